#include <tessera/core/kernels/optim/multi_tensor_copy.h>

#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/optim/multi_tensor.cuh>

namespace tessera::kernels {
namespace {

using namespace multi_tensor;

constexpr int kBlock = 256;

struct CopyRow {
  const void* from;  // or nullptr
  void* to;
  int64_t numel, first_chunk;
  DType source, target;
  uint8_t size;  // bytes of an element of target: a table of them would be local memory
  bool vectors;  // both sides are aligned to them
};

// Elements [begin, end) from S to T, rounded by way of C.
template <class S, class T, class C>
TS_DEVICE void copy_chunk(const Span& source, const Span& target, const Place& place) {
  if (source.vectors && target.vectors) {
    constexpr int kGroup = 16 / static_cast<int>(sizeof(S) < sizeof(T) ? sizeof(S) : sizeof(T));
    for_groups<kGroup>(place, [&](int64_t i, int count) {
      C values[kGroup];
      load_group_of<S>(source, i, count, values);
      store_group_of<T>(target, i, count, values);
    });
    return;
  }
  const S* const from = elements_of<S>(source, 0);
  T* const to = elements_of<T>(target, 0);
  for (int64_t i = place.begin + threadIdx.x; i < place.end; i += blockDim.x) {
    to[i] = store<T>(load<C>(from[i]));
  }
}
// The same of one dtype: bits, which no conversion touches.
template <class Word>
TS_DEVICE void move_chunk(const Span& source, const Span& target, const Place& place) {
  const Word* const from = elements_of<Word>(source, 0);
  Word* const to = elements_of<Word>(target, 0);
  if (source.vectors && target.vectors) {
    constexpr int kGroup = kGroupOf<Word>;
    for_groups<kGroup>(place, [&](int64_t i, int count) {
      if (count == kGroup) {
        gpu::store_vector(to + i, gpu::load_vector<kGroup>(from + i));
      } else {
        for (int j = 0; j < count; ++j) to[i + j] = from[i + j];
      }
    });
    return;
  }
  for (int64_t i = place.begin + threadIdx.x; i < place.end; i += blockDim.x) to[i] = from[i];
}
template <class Word>
TS_DEVICE void zero_chunk(const Span& target, const Place& place) {
  Word* const to = elements_of<Word>(target, 0);
  if (target.vectors) {
    constexpr int kGroup = kGroupOf<Word>;
    for_groups<kGroup>(place, [&](int64_t i, int count) {
      if (count == kGroup) {
        gpu::store_vector(to + i, gpu::Vector<Word, kGroup>{});
      } else {
        for (int j = 0; j < count; ++j) to[i + j] = 0;
      }
    });
    return;
  }
  for (int64_t i = place.begin + threadIdx.x; i < place.end; i += blockDim.x) to[i] = 0;
}

template <class F>
TS_DEVICE void with_floating(DType dtype, const F& f) {
  if (dtype == kF64) {
    f.template operator()<double>();
  } else {
    with_lane_dtype<float>(dtype, f);
  }
}

__global__ void __launch_bounds__(kBlock) copy_kernel(const CopyRow* rows, int count) {
  const Place place = find_chunk(rows, count);
  const CopyRow row = rows[place.row];
  const Span source = {const_cast<void*>(row.from), row.source, row.vectors};
  const Span target = {row.to, row.target, row.vectors};
  if (row.from == nullptr) {
    switch (row.size) {
      case 8:
        return zero_chunk<uint64_t>(target, place);
      case 4:
        return zero_chunk<uint32_t>(target, place);
      case 2:
        return zero_chunk<uint16_t>(target, place);
      default:
        return zero_chunk<uint8_t>(target, place);
    }
  }
  if (row.source == row.target) {
    switch (row.size) {
      case 8:
        return move_chunk<uint64_t>(source, target, place);
      case 4:
        return move_chunk<uint32_t>(source, target, place);
      case 2:
        return move_chunk<uint16_t>(source, target, place);
      default:
        return move_chunk<uint8_t>(source, target, place);
    }
  }
  with_floating(row.source, [&]<class S>() {
    with_floating(row.target, [&]<class T>() {
      if constexpr (!std::is_same_v<S, T>) copy_chunk<S, T, Compute<S>>(source, target, place);
    });
  });
}

// One block a chunk of each piece, whatever their sizes.
class CopyTable {
 public:
  void add(const void* from, void* to, DType source, DType target, int64_t numel) {
    if (numel == 0) return;
    read_ += numel * size_of(source);
    written_ += numel * size_of(target);
    rows_.push_back({from, to, numel, chunks_, source, target,
                     static_cast<uint8_t>(size_of(target)), is_aligned(from) && is_aligned(to)});
    chunks_ += (numel + kMultiTensorChunk - 1) / kMultiTensorChunk;
  }
  void copy(const char* name, const Device& device) const {
    if (rows_.empty()) return;
    const Tensor bytes = upload_rows(rows_, device);
    // Of the table as much as chunks look for.
    gpu::launch({.name = name,
                 .grid = static_cast<unsigned>(chunks_),
                 .block = kBlock,
                 .traffic = {bytes.numel() + read_, written_, true}},
                copy_kernel, static_cast<const CopyRow*>(bytes.data()),
                static_cast<int>(rows_.size()));
  }

 private:
  std::vector<CopyRow> rows_;
  int64_t chunks_ = 0;
  int64_t read_ = 0, written_ = 0;  // bytes
};

void multi_tensor_copy_cuda(std::span<const Tensor> targets, std::span<const Tensor> sources) {
  CopyTable table;
  for (size_t i = 0; i < targets.size(); ++i) {
    table.add(sources[i].data(), targets[i].data(), sources[i].dtype(), targets[i].dtype(),
              targets[i].numel());
  }
  if (!targets.empty()) table.copy("multi_tensor_copy", targets[0].device());
}

void copy_segments_cuda(std::span<const CopySegment> segments, DType source, DType target,
                        const Device& device) {
  CopyTable table;
  for (const CopySegment& segment : segments) {
    table.add(segment.from, segment.to, source, target, segment.numel);
  }
  table.copy("copy_segments", device);
}

}  // namespace

void register_multi_tensor_copy() {
  cuda_kernel<multi_tensor_copy> = multi_tensor_copy_cuda;
  cuda_kernel<copy_segments> = copy_segments_cuda;
}

}  // namespace tessera::kernels
