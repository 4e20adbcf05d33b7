// Tensors that lie in parts (DTensors) in checkpoints: what each rank gives to a save, and what it
// takes from a folder, however the tensor lay when it was saved.
//
// Nothing is gathered and nothing is communicated: a rank writes boxes that it holds and reads
// those that it needs. Where axes of the mesh replicate, several ranks hold the same boxes; their
// chunks are dealt among these ranks (writer.h).
#pragma once

#include <string>
#include <vector>

#include <tessera/distributed/checkpoint/reader.h>
#include <tessera/distributed/checkpoint/writer.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

// What this rank of the group gives of a tensor: of a plain one the whole, which all ranks give; of
// a DTensor its local boxes, which share the part's elements, none where it has none. ConfigError
// for a DTensor whose mesh is not the ranks of the group in their order, UnsupportedError for a
// Partial.
std::vector<SaveItem> items_of(const std::string& name, const Tensor& tensor, Group& group);

// The saved tensor as a DTensor that lies by `spec`, on `device`, in the dtype that was saved. On
// the CPU it lies over the mapped bytes where it is one run of them. ShapeError where another shape
// was saved, UnsupportedError for a Partial.
Tensor read_as(CheckpointReader& reader, const std::string& name, const DTensorSpec& spec,
               const Device& device = kCpu);

}  // namespace tessera::distributed
