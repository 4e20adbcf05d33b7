// DTensors in checkpoints: what each rank saves, and what it reads from a folder, whatever the
// placement when it was saved.
//
// Nothing is gathered or communicated: a rank writes boxes that it holds and reads those that it
// needs. If axes of the mesh replicate, several ranks hold the same boxes; their chunks are
// distributed over these ranks (writer.h).
#pragma once

#include <string>
#include <vector>

#include <tessera/distributed/checkpoint/reader.h>
#include <tessera/distributed/checkpoint/writer.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/distributed/transport/group.h>

namespace tessera::distributed {

// What this rank of the group saves of a tensor: the whole of a plain one, which all ranks pass;
// the local boxes of a DTensor, which share memory with the shard, none if it is empty. ConfigError
// for a DTensor whose mesh is not the ranks of the group in their order, UnsupportedError for a
// Partial.
std::vector<SaveItem> items_of(const std::string& name, const Tensor& tensor, Group& group);

// The saved tensor as a DTensor with placement `spec`, on `device`, in the saved dtype. On the CPU
// it uses the mapped file without a copy if it is one run of it. ShapeError if another shape was
// saved, UnsupportedError for a Partial.
Tensor read_as(CheckpointReader& reader, const std::string& name, const DTensorSpec& spec,
               const Device& device = kCpu);

}  // namespace tessera::distributed
