// What each rank writes of a checkpoint: the plan, the chunk files and the record.
//
// [Note: plan] A tensor that all ranks hold is written once. It is split along dimension 0 into
// chunks, and the chunks of all such tensors are assigned to the ranks, largest first, each to the
// rank with the fewest bytes so far. Every rank calculates the same plan from the same list without
// communication. Data that only one rank holds is written by that rank; data that some ranks hold
// is distributed over these in the same way.
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
  Box box;                 // the box of it that `tensor` holds
  bool replicated = true;  // all ranks hold the same
  // For items that are not replicated: the ranks that hold the same data, including this one,
  // ascending; all of them pass the same such items in the same order. Empty: this rank alone.
  std::vector<int> holders = {};

  static SaveItem whole(std::string name, const Tensor& tensor);
  // Data that only this rank holds: rows of a sharded tensor, or a tensor with its own name.
  // ShapeError if `tensor` does not lie at `offset` in `shape`.
  static SaveItem part(std::string name, const Tensor& tensor, const Shape& shape,
                       const Shape& offset);
};

inline constexpr int64_t kChunkBytes = 8 << 20;  // a checksum covers at most this much, or a row
inline constexpr int64_t kFileBytes = int64_t{4} << 30;  // then the rank begins another file

struct PlannedChunk {
  size_t item = 0;
  Box box;
  int writer = 0;
};
// The plan for replicated items over all ranks, for others over their holders or this rank. A
// tensor may have several items of its name. ValueError for one that is undefined, has no name or a
// repeated name, or items of different shapes or dtypes; DeviceError for a meta tensor.
std::vector<PlannedChunk> plan_chunks(std::span<const SaveItem> items, int rank, int ranks,
                                      int64_t chunk_bytes = kChunkBytes);
// Equal on all ranks that plan the same replicated chunks.
uint64_t fingerprint_of(std::span<const SaveItem> items);

// A chunk's elements on the CPU, row-major.
struct ChunkToWrite {
  std::string name;
  Tensor elements;
  Shape shape;  // of the whole tensor
  Box box;
};
// The chunks that `rank` writes. `snapshot`: copies, in memory of category kStaging that `staging`
// keeps for the next save; else views if elements lie on the CPU in order.
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
