#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy_loops.h>
#include <tessera/core/kernels/common/strided.cuh>

namespace tessera::kernels {
namespace {

constexpr int kBlock = 256;
constexpr int kTile = 32;  // elements of a transposed tile's side

// ---- Elements of one size, moved as bits --------------------------------------------------------

template <class T>
__global__ void move_linear(const T* source, T* target, int64_t n, bool vectors) {
  constexpr int kGroup = 16 / sizeof(T);
  const int64_t i = gpu::first_index() * kGroup;
  if (vectors && i + kGroup <= n) {
    gpu::store_vector(target + i, gpu::load_vector<kGroup>(source + i));
  } else {
    for (int64_t j = i; j < n && j < i + kGroup; ++j) target[j] = source[j];
  }
}

template <class T>
__global__ void move_strided(const T* source, T* target, const DeviceWalk<2> walk) {
  const int64_t i = gpu::first_index();
  if (i >= walk.numel) return;
  int64_t offsets[2];
  walk.offsets(i, offsets);
  target[offsets[0]] = source[offsets[1]];
}

// One tile of (rows, columns) of each batch: the target runs along columns, the source along rows.
struct TransposedCopy {
  int64_t rows, columns, target_row_stride, source_column_stride;
  int outer_dims;
  Divisor outer_sizes[kMaxDims];
  int64_t target_strides[kMaxDims], source_strides[kMaxDims];
};
template <class T>
__global__ void move_transposed(const T* source, T* target, const TransposedCopy copy) {
  TS_SHARED(T, tile, kTile * (kTile + 1));
  uint32_t left = blockIdx.z;
  TS_ROLLED
  for (int d = copy.outer_dims - 1; d >= 0; --d) {
    const uint32_t rest = copy.outer_sizes[d].quotient(left);
    const int64_t index = left - rest * copy.outer_sizes[d].value;
    left = rest;
    target += index * copy.target_strides[d];
    source += index * copy.source_strides[d];
  }
  const int64_t row0 = int64_t{blockIdx.y} * kTile, column0 = int64_t{blockIdx.x} * kTile;
  const int x = static_cast<int>(threadIdx.x);
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += static_cast<int>(blockDim.y)) {
    const int64_t row = row0 + x, column = column0 + y;
    if (row < copy.rows && column < copy.columns) {
      tile[y * (kTile + 1) + x] = source[column * copy.source_column_stride + row];
    }
  }
  __syncthreads();
  for (int y = static_cast<int>(threadIdx.y); y < kTile; y += static_cast<int>(blockDim.y)) {
    const int64_t row = row0 + y, column = column0 + x;
    if (row < copy.rows && column < copy.columns) {
      target[row * copy.target_row_stride + column] = tile[x * (kTile + 1) + y];
    }
  }
}

// True where the innermost dimension of the target is not the one in which the source lies in
// order.
bool find_transpose(const Walk& walk, TransposedCopy& copy) {
  const int inner = walk.dims - 1;
  if (walk.dims < 2 || walk.strides[0][inner] != 1 || walk.strides[1][inner] <= 1) return false;
  int source_inner = inner - 1;
  while (source_inner >= 0 && walk.strides[1][source_inner] != 1) --source_inner;
  if (source_inner < 0 || walk.sizes[inner] < 8 || walk.sizes[source_inner] < 8) return false;
  copy.rows = walk.sizes[source_inner];
  copy.columns = walk.sizes[inner];
  copy.target_row_stride = walk.strides[0][source_inner];
  copy.source_column_stride = walk.strides[1][inner];
  copy.outer_dims = 0;
  int64_t batches = 1;
  for (int d = 0; d < inner; ++d) {
    if (d == source_inner) continue;
    batches *= walk.sizes[d];
    if (batches > 65535) return false;  // sizes of 32 bits, and what a grid has
    copy.outer_sizes[copy.outer_dims] = Divisor(static_cast<uint32_t>(walk.sizes[d]));
    copy.target_strides[copy.outer_dims] = walk.strides[0][d];
    copy.source_strides[copy.outer_dims++] = walk.strides[1][d];
  }
  return copy.rows <= 65535 * kTile;
}

template <class T>
void move_as(const Walk& walk, const void* source_data, void* target_data) {
  const T* const source = static_cast<const T*>(source_data);
  T* const target = static_cast<T*>(target_data);
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  const gpu::Traffic traffic{walk.distinct(1) * kSize, walk.distinct(0) * kSize};
  if (walk.is_linear(0) && walk.is_linear(1)) {
    gpu::launch({.name = "copy",
                 .grid = gpu::blocks(walk.numel, kBlock, 16 / sizeof(T)),
                 .block = kBlock,
                 .traffic = traffic},
                move_linear<T>, source, target, walk.numel,
                is_aligned(source) && is_aligned(target));
    return;
  }
  TransposedCopy copy;
  if (find_transpose(walk, copy)) {
    const dim3 grid(gpu::blocks(copy.columns, kTile), gpu::blocks(copy.rows, kTile),
                    static_cast<unsigned>(walk.numel / (copy.rows * copy.columns)));
    gpu::launch({.name = "copy", .grid = grid, .block = dim3(kTile, 8), .traffic = traffic},
                move_transposed<T>, source, target, copy);
    return;
  }
  gpu::launch({.name = "copy",
               .grid = gpu::blocks(walk.numel, kBlock),
               .block = kBlock,
               .traffic = traffic},
              move_strided<T>, source, target, DeviceWalk<2>(walk));
}

// ---- Conversions --------------------------------------------------------------------------------

// The target's dtype is looked at once for kGroup elements (see elementwise.cuh).
template <class S>
__global__ void convert_kernel(const S* source, void* target, DType dtype, const DeviceWalk<2> walk,
                               bool linear, bool vectors) {
  constexpr int kGroup = 8;
  const int64_t position = gpu::first_index() * kGroup;
  if (position >= walk.numel) return;
  const int count =
      static_cast<int>(walk.numel - position < kGroup ? walk.numel - position : kGroup);
  Compute<S> values[kGroup];
  if (vectors && count == kGroup) {
    const gpu::Vector<S, kGroup> vector = gpu::load_vector<kGroup>(source + position);
    TS_UNROLL
    for (int i = 0; i < kGroup; ++i) values[i] = load<Compute<S>>(vector.values[i]);
    with_any_dtype(dtype, [&]<class T>() {
      gpu::Vector<T, kGroup> result;
      TS_UNROLL
      for (int i = 0; i < kGroup; ++i) result.values[i] = store<T>(values[i]);
      gpu::store_vector(static_cast<T*>(target) + position, result);
    });
    return;
  }
  int64_t at[kGroup];
  const auto find = [&](int operand) {
    if (!linear) return walk.group_offsets(operand, position, count, at);
    TS_UNROLL
    for (int i = 0; i < kGroup; ++i) at[i] = position + (i < count ? i : 0);
  };
  find(1);
  TS_UNROLL
  for (int i = 0; i < kGroup; ++i) values[i] = load<Compute<S>>(source[at[i]]);
  find(0);
  with_any_dtype(dtype, [&]<class T>() {
    TS_UNROLL
    for (int i = 0; i < kGroup; ++i) {
      if (i < count) static_cast<T*>(target)[at[i]] = store<T>(values[i]);
    }
  });
}

void move_elements_cuda(const Walk& walk, const Tensor& target, const Tensor& source) {
  if (target.dtype() != source.dtype()) {
    dispatch_all(source.dtype(), "copy_", [&]<class S>() {
      const bool linear = walk.is_linear(0) && walk.is_linear(1);
      gpu::launch({.name = "convert",
                   .grid = gpu::blocks(walk.numel, kBlock, 8),
                   .block = kBlock,
                   .traffic = {walk.distinct(1) * size_of(source.dtype()),
                               walk.distinct(0) * size_of(target.dtype())}},
                  convert_kernel<S>, source.data_as<S>(), target.data(), target.dtype(),
                  DeviceWalk<2>(walk), linear,
                  linear && is_aligned(source.data()) && is_aligned(target.data()));
    });
    return;
  }
  switch (size_of(target.dtype())) {
    case 1:
      return move_as<uint8_t>(walk, source.data(), target.data());
    case 2:
      return move_as<uint16_t>(walk, source.data(), target.data());
    case 4:
      return move_as<uint32_t>(walk, source.data(), target.data());
    default:
      return move_as<uint64_t>(walk, source.data(), target.data());
  }
}

// ---- Fills --------------------------------------------------------------------------------------

template <class T>
__global__ void fill_linear(T* x, T value, int64_t n, bool vectors) {
  constexpr int kGroup = 16 / sizeof(T);
  const int64_t i = gpu::first_index() * kGroup;
  if (vectors && i + kGroup <= n) {
    gpu::Vector<T, kGroup> group;
    TS_UNROLL
    for (int j = 0; j < kGroup; ++j) group.values[j] = value;
    gpu::store_vector(x + i, group);
  } else {
    for (int64_t j = i; j < n && j < i + kGroup; ++j) x[j] = value;
  }
}

template <class T>
__global__ void fill_strided(T* x, T value, const DeviceWalk<1> walk) {
  const int64_t i = gpu::first_index();
  if (i >= walk.numel) return;
  int64_t at[1];
  walk.offsets(i, at);
  x[at[0]] = value;
}

template <class T>
void fill_as(const Walk& walk, const Tensor& x, uint64_t bits) {
  T* const data = static_cast<T*>(x.data());
  const gpu::Traffic traffic{0, walk.distinct(0) * static_cast<int64_t>(sizeof(T))};
  if (walk.is_linear(0)) {
    gpu::launch({.name = "fill_",
                 .grid = gpu::blocks(walk.numel, kBlock, 16 / sizeof(T)),
                 .block = kBlock,
                 .traffic = traffic},
                fill_linear<T>, data, static_cast<T>(bits), walk.numel, is_aligned(data));
    return;
  }
  gpu::launch({.name = "fill_",
               .grid = gpu::blocks(walk.numel, kBlock),
               .block = kBlock,
               .traffic = traffic},
              fill_strided<T>, data, static_cast<T>(bits), DeviceWalk<1>(walk));
}

void fill_elements_cuda(const Walk& walk, const Tensor& x, uint64_t bits) {
  switch (size_of(x.dtype())) {
    case 1:
      return fill_as<uint8_t>(walk, x, bits);
    case 2:
      return fill_as<uint16_t>(walk, x, bits);
    case 4:
      return fill_as<uint32_t>(walk, x, bits);
    default:
      return fill_as<uint64_t>(walk, x, bits);
  }
}

}  // namespace

void register_copy() {
  cuda_kernel<move_elements> = move_elements_cuda;
  cuda_kernel<fill_elements> = fill_elements_cuda;
}

}  // namespace tessera::kernels
