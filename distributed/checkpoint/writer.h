// What each rank writes of a checkpoint: the plan, the chunk files and the record.
//
// [Note: plan] A tensor that all ranks hold is written once. It is cut along dimension 0 into
// chunks, and the chunks of all such tensors are dealt to the ranks, largest first, each to the
// rank with the fewest bytes so far. Every rank calculates the same plan from the same list;
// nothing is exchanged. A part that one rank alone holds is written by that rank; parts that some
// ranks hold alike are dealt among these in the same way.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <tessera/core/tensor/tensor.h>
#include <tessera/distributed/checkpoint/manifest.h>
#include <tessera/distributed/mesh/box.h>

namespace tessera::distributed {

// One tensor, or this rank's part of it, on any device.
struct SaveItem {
  std::string name;
  Tensor tensor;
  Shape shape;             // of the whole tensor
  Box box;                 // what `tensor` is of it
  bool replicated = true;  // all ranks hold the same
  // Of what is not replicated: the ranks that hold the same, with this one, ascending, which all
  // give the same such items in one order. Empty: this rank alone.
  std::vector<int> holders = {};

  static SaveItem whole(std::string name, const Tensor& tensor);
  // What this rank alone holds: rows of a sharded tensor, or a tensor of its own under a name of
  // its own. ShapeError where `tensor` does not lie at `offset` in `shape`.
  static SaveItem part(std::string name, const Tensor& tensor, const Shape& shape,
                       const Shape& offset);
};

inline constexpr int64_t kChunkBytes = 8 << 20;  // a checksum covers so much at most, or a row
inline constexpr int64_t kFileBytes = int64_t{4} << 30;  // then the rank begins another file

struct PlannedChunk {
  size_t item = 0;
  Box box;
  int writer = 0;
};
// Of all ranks for replicated items, of the holders for theirs, of this rank for its own. A tensor
// may have several parts under its name. ValueError for one that is undefined, has no name or a
// name twice, or parts of two shapes or dtypes; DeviceError for one without bytes (meta).
std::vector<PlannedChunk> plan_chunks(std::span<const SaveItem> items, int rank, int ranks,
                                      int64_t chunk_bytes = kChunkBytes);
// The same on all ranks that plan the same replicated chunks.
uint64_t fingerprint_of(std::span<const SaveItem> items);

// A chunk's elements on the CPU, row-major.
struct ChunkToWrite {
  std::string name;
  Tensor elements;
  Shape shape;  // of the whole tensor
  Box box;
};
// Those that `rank` writes. `snapshot`: copies, in memory of category kStaging that `staging` keeps
// for the next time; else views wherever elements lie on the CPU in order.
std::vector<ChunkToWrite> collect_chunks(std::span<const SaveItem> items,
                                         std::span<const PlannedChunk> plan, int rank,
                                         bool snapshot, std::vector<Tensor>& staging);

// Writes chunks and the record of this rank into `folder`, forced to the disk. `between` is called
// after the first half of the bytes and after the chunk files. IoError.
void write_rank(const std::string& folder, int rank, int ranks,
                std::span<const ChunkToWrite> chunks, int64_t file_bytes,
                const std::function<void(bool all_chunks)>& between);
std::string record_name(int rank);  // "rank-3.json"

}  // namespace tessera::distributed
