#include <tessera/core/kernels/copy/shape.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <tessera/core/cuda/graph.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/copy/full.h>
#include <tessera/core/tensor/empty.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/kernels/common/strided.cuh>

namespace tessera::kernels {
namespace {

constexpr int kBlock = 256;

// Contiguous tensors side by side: a launch writes up to kPieces of them, a thread a vector of
// kWidth elements. Word: of counts of vectors in a piece.
constexpr int kPieces = 16;
template <class Word>
struct Pieces {
  struct Piece {
    const void* from;
    int64_t vectors;       // in all
    int64_t first_column;  // where it begins in the result's rows, in vectors
    DivisorOf<Word> columns;
    unsigned first_block;
  };
  int count = 0;
  int64_t columns = 0;  // of the result
  Piece pieces[kPieces];
};

template <class B, int kWidth, class Word>
__global__ void __launch_bounds__(kBlock) cat_kernel(B* y, const Pieces<Word> all) {
  int p = 0;
  while (p + 1 < all.count && blockIdx.x >= all.pieces[p + 1].first_block) ++p;
  const auto& piece = all.pieces[p];
  const int64_t i = int64_t{blockIdx.x - piece.first_block} * blockDim.x + threadIdx.x;
  if (i >= piece.vectors) return;
  const Word row = piece.columns.quotient(static_cast<Word>(i));
  const int64_t column = i - static_cast<int64_t>(row) * static_cast<int64_t>(piece.columns.value);
  const int64_t to = static_cast<int64_t>(row) * all.columns + piece.first_column + column;
  gpu::store_vector(y + to * kWidth,
                    gpu::load_vector<kWidth>(static_cast<const B*>(piece.from) + i * kWidth));
}

// What reads of tensors touch that may be views of one memory.
int64_t distinct_bytes(std::span<const Tensor> tensors) {
  std::vector<std::pair<uintptr_t, uintptr_t>> ranges;
  for (const Tensor& x : tensors) {
    const auto begin = reinterpret_cast<uintptr_t>(x.data());
    ranges.emplace_back(begin, begin + static_cast<uintptr_t>(x.nbytes()));
  }
  std::sort(ranges.begin(), ranges.end());
  int64_t bytes = 0;
  uintptr_t reach = 0;
  for (const auto& [begin, end] : ranges) {
    if (end <= reach) continue;
    bytes += static_cast<int64_t>(end - std::max(begin, reach));
    reach = end;
  }
  return bytes;
}

template <class B, int kWidth, class Word>
void join_pieces(const Tensor& result, std::span<const Tensor> tensors, int64_t rows) {
  int64_t column = 0;
  for (size_t first = 0; first < tensors.size(); first += kPieces) {
    const auto some = tensors.subspan(first, std::min<size_t>(kPieces, tensors.size() - first));
    Pieces<Word> all;
    all.columns = result.numel() / rows / kWidth;
    unsigned blocks = 0;
    const int64_t before = column;
    for (const Tensor& x : some) {
      if (x.numel() == 0) continue;
      const int64_t vectors = x.numel() / kWidth;
      all.pieces[all.count++] = {x.data(), vectors, column,
                                 DivisorOf<Word>(static_cast<Word>(vectors / rows)), blocks};
      column += vectors / rows;
      blocks += gpu::blocks(vectors, kBlock);
    }
    if (blocks == 0) continue;
    const int64_t written = (column - before) * rows * kWidth * static_cast<int64_t>(sizeof(B));
    gpu::launch({.name = "cat",
                 .grid = blocks,
                 .block = kBlock,
                 .traffic = {distinct_bytes(some), written}},
                cat_kernel<B, kWidth, Word>, static_cast<B*>(result.data()), all);
  }
}

Tensor cat_cuda(std::span<const Tensor> tensors, int dim) {
  Shape shape = tensors[0].shape();
  shape[dim] = 0;
  for (const Tensor& x : tensors) shape[dim] += x.shape()[dim];
  const Tensor result = raw::empty(shape, tensors[0].dtype(), tensors[0].device());
  if (result.numel() == 0) return result;
  const int64_t rows = numel_of(shape.slice(0, dim)), size = size_of(result.dtype());
  bool contiguous = true, vectors = is_aligned(result.data());
  for (const Tensor& x : tensors) {
    contiguous = contiguous && x.is_contiguous();
    vectors = vectors && is_aligned(x.data()) && x.numel() / rows * size % 16 == 0;
  }
  if (!contiguous) {  // copies into views, which read any layout in vectors where they can
    int64_t at = 0;
    for (const Tensor& x : tensors) {
      const int64_t length = x.shape()[dim];
      if (x.numel() > 0) copy_into(raw::narrow(result, dim, at, length), x);
      at += length;
    }
    return result;
  }
  dispatch_size(size, [&]<class B>() {
    constexpr int kWidth = 16 / sizeof(B);
    const bool wide = result.numel() > INT32_MAX;
    const auto join =
        vectors ? (wide ? join_pieces<B, kWidth, uint64_t> : join_pieces<B, kWidth, uint32_t>)
                : (wide ? join_pieces<B, 1, uint64_t> : join_pieces<B, 1, uint32_t>);
    join(result, tensors, rows);
  });
  return result;
}

Tensor embed_slice_cuda(const Tensor& x, const Shape& shape, int dim, int64_t start, int64_t step) {
  const Tensor result = raw::zeros(shape, x.dtype(), x.device());
  if (x.numel() == 0) return result;
  const int64_t end = start + (x.shape()[dim] - 1) * step + 1;
  copy_into(raw::slice(result, dim, start, end, step), x);
  return result;
}

// ---- Places from lists: flip, padding -----------------------------------------------------------

// Lists of all dimensions, one after the other in device memory.
struct Maps {
  Tensor table;  // i64
  std::vector<int64_t> values;

  int64_t add(std::span<const int64_t> list) {
    const auto first = static_cast<int64_t>(values.size());
    values.insert(values.end(), list.begin(), list.end());
    return first;
  }
  int64_t bytes() const { return static_cast<int64_t>(values.size()) * 8; }
  const int64_t* upload(const Device& device) {
    const auto count = static_cast<int64_t>(values.size());
    if (count == 0) return nullptr;
    table = raw::empty({count}, kI64, device);
    gpu::upload_constants(table.data(), device.index, values.data(),
                          values.size() * sizeof(int64_t));
    return table.data_as<int64_t>();
  }
};

struct MappedDims {
  int dims;
  int64_t sizes[kMaxDims];    // of what the threads walk
  int64_t strides[kMaxDims];  // of what they read
  int64_t maps[kMaxDims];     // where a dimension's list begins; -1: none
};

template <class B>
__global__ void take_kernel(const B* x, const int64_t* table, B* y, int64_t total,
                            const MappedDims at) {
  const int64_t i = gpu::first_index();
  if (i >= total) return;
  int64_t rest = i, offset = 0;
  for (int d = at.dims - 1; d >= 0; --d) {
    const int64_t index = rest % at.sizes[d];
    rest /= at.sizes[d];
    offset += (at.maps[d] < 0 ? index : table[at.maps[d] + index]) * at.strides[d];
  }
  y[i] = x[offset];
}

Tensor take_cuda(const Tensor& x, std::span<const std::vector<int64_t>> maps) {
  Shape shape = x.shape();
  Maps lists;
  MappedDims at{.dims = x.dim(), .sizes = {}, .strides = {}, .maps = {}};
  for (int d = 0; d < x.dim(); ++d) {
    const std::vector<int64_t>& map = maps[static_cast<size_t>(d)];
    if (!map.empty()) shape[d] = static_cast<int64_t>(map.size());
    at.sizes[d] = shape[d];
    at.strides[d] = x.strides()[d];
    at.maps[d] = map.empty() ? -1 : lists.add(map);
  }
  const Tensor result = raw::empty(shape, x.dtype(), x.device());
  if (result.numel() == 0) return result;
  const int64_t* const table = lists.upload(x.device());
  dispatch_size(size_of(x.dtype()), [&]<class B>() {
    const int64_t bytes = result.numel() * static_cast<int64_t>(sizeof(B));
    gpu::launch({.name = "take",
                 .grid = gpu::blocks(result.numel(), kBlock),
                 .block = kBlock,
                 .traffic = {bytes + lists.bytes(), bytes, true}},
                take_kernel<B>, static_cast<const B*>(x.data()), table,
                static_cast<B*>(result.data()), result.numel(), at);
  });
  return result;
}

// A thread a place: it adds up what take reads from there, in the row-major order of x. For each
// mapped dimension the table has, for each place, where its list of origins begins and ends, and
// then the lists.
template <class T>
__global__ void take_transposed_kernel(const T* x, const int64_t* table, T* y, int64_t total,
                                       const MappedDims at) {
  using C = Compute<T>;
  const int64_t i = gpu::first_index();
  if (i >= total) return;
  const int64_t* origins[kMaxDims];  // null: the place itself
  int64_t counts[kMaxDims], index[kMaxDims];
  int64_t rest = i, offset = 0;
  for (int d = at.dims - 1; d >= 0; --d) {
    const int64_t place = rest % at.sizes[d];
    rest /= at.sizes[d];
    index[d] = 0;
    if (at.maps[d] < 0) {
      origins[d] = nullptr;
      counts[d] = 1;
      offset += place * at.strides[d];
      continue;
    }
    const int64_t* const starts = table + at.maps[d];
    origins[d] = starts + at.sizes[d] + 1 + starts[place];
    counts[d] = starts[place + 1] - starts[place];
    if (counts[d] == 0) {
      y[i] = store<T>(C(0));
      return;
    }
    offset += origins[d][0] * at.strides[d];
  }
  C sum = 0;
  for (;;) {
    sum = static_cast<C>(sum + load<C>(x[offset]));
    int d = at.dims - 1;
    for (; d >= 0; --d) {
      if (counts[d] == 1) continue;
      const int64_t before = origins[d][index[d]];
      index[d] = index[d] + 1 < counts[d] ? index[d] + 1 : 0;
      offset += (origins[d][index[d]] - before) * at.strides[d];
      if (index[d] > 0) break;
    }
    if (d < 0) break;
  }
  y[i] = store<T>(sum);
}

Tensor take_transposed_cuda(const Tensor& x, std::span<const std::vector<int64_t>> maps,
                            const Shape& shape) {
  const Tensor result = raw::empty(shape, x.dtype(), x.device());
  if (result.numel() == 0) return result;
  Maps lists;
  MappedDims at{.dims = x.dim(), .sizes = {}, .strides = {}, .maps = {}};
  for (int d = 0; d < x.dim(); ++d) {
    const std::vector<int64_t>& map = maps[static_cast<size_t>(d)];
    at.sizes[d] = shape[d];
    at.strides[d] = x.strides()[d];
    at.maps[d] = -1;
    if (map.empty()) continue;
    std::vector<int64_t> starts(static_cast<size_t>(shape[d]) + 1, 0), origins(map.size());
    for (const int64_t place : map) ++starts[static_cast<size_t>(place) + 1];
    for (size_t p = 1; p < starts.size(); ++p) starts[p] += starts[p - 1];
    std::vector<int64_t> next = starts;
    for (size_t i = 0; i < map.size(); ++i) {
      origins[static_cast<size_t>(next[static_cast<size_t>(map[i])]++)] = static_cast<int64_t>(i);
    }
    at.maps[d] = lists.add(starts);
    lists.add(origins);
  }
  const int64_t* const table = lists.upload(x.device());
  dispatch_numeric_and_bool(x.dtype(), "pad_backward", [&]<class T>() {
    constexpr auto kSize = static_cast<int64_t>(sizeof(T));
    gpu::launch({.name = "pad_backward",
                 .grid = gpu::blocks(result.numel(), kBlock),
                 .block = kBlock,
                 .traffic = {x.numel() * kSize + lists.bytes(), result.numel() * kSize, true}},
                take_transposed_kernel<T>, x.data_as<T>(), table, result.data_as<T>(),
                result.numel(), at);
  });
  return result;
}

}  // namespace

void register_shape() {
  cuda_kernel<cat> = cat_cuda;
  cuda_kernel<take> = take_cuda;
  cuda_kernel<take_transposed> = take_transposed_cuda;
  cuda_kernel<embed_slice> = embed_slice_cuda;
}

}  // namespace tessera::kernels
