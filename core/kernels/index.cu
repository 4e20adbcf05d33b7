#include <tessera/core/kernels/index.h>

#include <string>

#include <tessera/core/cuda/device_errors.h>
#include <tessera/core/cuda/launch.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/factory.h>
#include <tessera/core/kernels/copy.h>
#include <tessera/core/kernels/on_device.h>
#include <tessera/core/kernels/strided.cuh>

namespace tessera::kernels {
namespace {

constexpr int kBlock = 256;

// ---- Indices ------------------------------------------------------------------------------------

template <class Index>
__global__ void check_index_kernel(const Index* index, int64_t* result, int64_t n, int64_t low,
                                   int64_t high, const char* op, gpu::DeviceErrorWord* errors) {
  const int64_t i = gpu::first_index();
  if (i >= n) return;
  const int64_t value = index[i];
  if (value < low || value >= high) {
    if (atomicCAS(&errors->found, 0, 1) == 0) {
      errors->op = op;
      errors->position = i;
      errors->value = value;
      errors->low = low;
      errors->high = high;
    }
    result[i] = 0;
  } else {
    result[i] = value < 0 ? value + high : value;
  }
}

Tensor checked_index_cuda(const Tensor& index, int64_t size, bool negative,
                          std::string_view where) {
  TS_CHECK_DTYPE(index.dtype() == kI64 || index.dtype() == kI32, where,
                 "expects an index of dtype i64 or i32; got ", index, "; convert with to(kI64)");
  const Tensor result = raw::empty(index.shape(), kI64, index.device());
  if (index.numel() == 0) return result;
  TS_CHECK_INDEX(size > 0, where, "the indices ", index, " have nothing to point at");
  const Tensor dense = contiguous(index);
  const auto run = [&]<class Index>() {
    gpu::launch(
        {.name = "check_index", .grid = gpu::blocks(index.numel(), kBlock), .block = kBlock},
        check_index_kernel<Index>, dense.data_as<Index>(), result.data_as<int64_t>(), index.numel(),
        negative ? -size : 0, size, where.data(), gpu::device_error_word());
  };
  index.dtype() == kI64 ? run.operator()<int64_t>() : run.operator()<int32_t>();
  return result;
}

// ---- Rows and elements, moved as bits -----------------------------------------------------------

// result[b, n, a] = x[b, positions[n], a]
template <class T>
__global__ void select_rows_kernel(const T* x, const int64_t* positions, T* result, int64_t total,
                                   int64_t M, int64_t N, int64_t A) {
  const int64_t i = gpu::first_index();
  if (i >= total) return;
  const int64_t a = i % A, n = i / A % N, b = i / A / N;
  result[i] = x[(b * M + positions[n]) * A + a];
}

template <class F>
void with_bits(int64_t size, const F& f) {
  switch (size) {
    case 1:
      return f.template operator()<uint8_t>();
    case 2:
      return f.template operator()<uint16_t>();
    case 4:
      return f.template operator()<uint32_t>();
    default:
      return f.template operator()<uint64_t>();
  }
}

Tensor select_rows_cuda(const Tensor& x, const Tensor& positions) {
  const int64_t B = x.size(0), M = x.size(1), A = x.size(2), N = positions.numel();
  const Tensor result = raw::empty({B, N, A}, x.dtype(), x.device());
  if (result.numel() == 0) return result;
  // The widest unit that rows and addresses allow.
  const int64_t bytes = size_of(x.dtype());
  int64_t unit = bytes;
  while (unit < 8 && A * bytes % (2 * unit) == 0 && is_aligned(x.data())) unit *= 2;
  const int64_t width = A * bytes / unit;
  with_bits(unit, [&]<class T>() {
    gpu::launch(
        {.name = "index_select", .grid = gpu::blocks(B * N * width, kBlock), .block = kBlock},
        select_rows_kernel<T>, static_cast<const T*>(x.data()), positions.data_as<int64_t>(),
        static_cast<T*>(result.data()), B * N * width, M, N, width);
  });
  return result;
}

// [Note: order of writes] Where several indices name one place they take effect in their order: one
// thread walks a whole line of the index.

// x[b, positions[n], a] = source[b, n, a], or += where Adds.
template <class T, bool kAdds>
__global__ void write_rows_kernel(T* x, const int64_t* positions, const T* source, int64_t lines,
                                  int64_t M, int64_t N, int64_t A) {
  const int64_t line = gpu::first_index();
  if (line >= lines) return;
  const int64_t a = line % A, b = line / A;
  for (int64_t n = 0; n < N; ++n) {
    T& target = x[(b * M + positions[n]) * A + a];
    const T value = source[(b * N + n) * A + a];
    if constexpr (kAdds) {
      target =
          store<T>(static_cast<Compute<T>>(load<Compute<T>>(target) + load<Compute<T>>(value)));
    } else {
      target = value;
    }
  }
}

void put_rows_cuda(const Tensor& x, const Tensor& positions, const Tensor& source) {
  if (source.numel() == 0) return;
  const int64_t lines = x.size(0) * x.size(2);
  with_bits(size_of(x.dtype()), [&]<class T>() {
    gpu::launch({.name = "index_put", .grid = gpu::blocks(lines, kBlock), .block = kBlock},
                write_rows_kernel<T, false>, static_cast<T*>(x.data()),
                positions.data_as<int64_t>(), static_cast<const T*>(source.data()), lines,
                x.size(1), positions.numel(), x.size(2));
  });
}

// Sums of f16 and bf16 are f32 inside and rounded once: calls add(x in the dtype of sums).
template <class F>
void with_sums(const Tensor& x, const F& add) {
  if (!is_low_precision(x.dtype())) return add(x);
  const Tensor sums = contiguous(convert(x, kF32));
  add(sums);
  copy_into(x, sums);
}

void add_rows_cuda(const Tensor& x, const Tensor& positions, const Tensor& source) {
  if (source.numel() == 0) return;
  const int64_t lines = x.size(0) * x.size(2);
  with_sums(x, [&](const Tensor& sums) {
    const Tensor values = source.dtype() == sums.dtype() ? source : convert(source, sums.dtype());
    dispatch_numeric_and_bool(sums.dtype(), "index_add", [&]<class T>() {
      gpu::launch({.name = "index_add", .grid = gpu::blocks(lines, kBlock), .block = kBlock},
                  write_rows_kernel<T, true>, sums.data_as<T>(), positions.data_as<int64_t>(),
                  values.data_as<T>(), lines, x.size(1), positions.numel(), x.size(2));
    });
  });
}

// result[.., i, ..] = x[.., index[.., i, ..], ..]; the walk has result, index and x, whose stride
// along the dimension is left out.
template <class T>
__global__ void gather_kernel(const T* x, const int64_t* index, T* result, int64_t stride,
                              const DeviceWalk<3> walk) {
  const int64_t i = gpu::first_index();
  if (i >= walk.numel) return;
  int64_t at[3];
  walk.offsets(i, at);
  result[at[0]] = x[at[2] + index[at[1]] * stride];
}

Shape without(const Shape& strides, int dim) {
  Shape result = strides;
  if (result.size() > 0) result[dim] = 0;
  return result;
}

Tensor gather_cuda(const Tensor& x, int dim, const Tensor& index) {
  const Tensor result = raw::empty(index.shape(), x.dtype(), x.device());
  const Tensor places = checked_index(index, x.dim() == 0 ? 1 : x.shape()[dim], false, "gather");
  if (result.numel() == 0) return result;
  const Shape strides[3] = {result.strides(), places.strides(), without(x.strides(), dim)};
  const Walk walk(index.shape(), strides);
  with_bits(size_of(x.dtype()), [&]<class T>() {
    gpu::launch({.name = "gather", .grid = gpu::blocks(walk.numel, kBlock), .block = kBlock},
                gather_kernel<T>, static_cast<const T*>(x.data()), places.data_as<int64_t>(),
                static_cast<T*>(result.data()), x.dim() == 0 ? 0 : x.strides()[dim],
                DeviceWalk<3>(walk));
  });
  return result;
}

// A thread a line; see [Note: order of writes].
template <class T, bool kAdds>
__global__ void scatter_kernel(T* x, const int64_t* index, const T* source, int64_t n,
                               int64_t x_stride, int64_t index_stride, int64_t source_stride,
                               const DeviceWalk<3> lines) {
  const int64_t line = gpu::first_index();
  if (line >= lines.numel) return;
  int64_t at[3];
  lines.offsets(line, at);
  for (int64_t i = 0; i < n; ++i) {
    T& target = x[at[0] + index[at[1] + i * index_stride] * x_stride];
    const T value = source[at[2] + i * source_stride];
    if constexpr (kAdds) {
      target =
          store<T>(static_cast<Compute<T>>(load<Compute<T>>(target) + load<Compute<T>>(value)));
    } else {
      target = value;
    }
  }
}

template <class T, bool kAdds>
void launch_scatter(const char* where, const Tensor& x, int dim, const Tensor& places,
                    const Tensor& source) {
  Shape lines = places.shape();
  const bool scalar = x.dim() == 0;
  if (!scalar) lines[dim] = 1;
  const Shape strides[3] = {without(x.strides(), dim), without(places.strides(), dim),
                            without(source.strides(), dim)};
  const Walk walk(lines, strides);
  gpu::launch({.name = where, .grid = gpu::blocks(walk.numel, kBlock), .block = kBlock},
              scatter_kernel<T, kAdds>, static_cast<T*>(x.data()), places.data_as<int64_t>(),
              static_cast<const T*>(source.data()), scalar ? 1 : places.shape()[dim],
              scalar ? 0 : x.strides()[dim], scalar ? 0 : places.strides()[dim],
              scalar ? 0 : source.strides()[dim], DeviceWalk<3>(walk));
}

void scatter_cuda(const Tensor& x, int dim, const Tensor& index, const Tensor& source) {
  const Tensor places = checked_index(index, x.dim() == 0 ? 1 : x.shape()[dim], false, "scatter");
  if (index.numel() == 0) return;
  with_bits(size_of(x.dtype()),
            [&]<class T>() { launch_scatter<T, false>("scatter", x, dim, places, source); });
}

void scatter_add_cuda(const Tensor& x, int dim, const Tensor& index, const Tensor& source) {
  const Tensor places =
      checked_index(index, x.dim() == 0 ? 1 : x.shape()[dim], false, "scatter_add");
  if (index.numel() == 0) return;
  with_sums(x, [&](const Tensor& sums) {
    const Tensor values = source.dtype() == sums.dtype() ? source : convert(source, sums.dtype());
    dispatch_numeric_and_bool(sums.dtype(), "scatter_add", [&]<class T>() {
      launch_scatter<T, true>("scatter_add", sums, dim, places, values);
    });
  });
}

template <class T>
__global__ void triangle_kernel(const T* x, T* y, int64_t total, int64_t rows, int64_t columns,
                                int64_t diagonal, bool lower) {
  const int64_t i = gpu::first_index();
  if (i >= total) return;
  const int64_t column = i % columns, row = i / columns % rows;
  const bool kept = lower ? column <= row + diagonal : column >= row + diagonal;
  y[i] = kept ? x[i] : T(0);
}

Tensor triangle(const Tensor& x, int64_t diagonal, bool lower, const char* where) {
  TS_CHECK_SHAPE(x.dim() >= 2, where, "needs at least two dimensions; got ", x);
  const Tensor result = raw::empty(x.shape(), x.dtype(), x.device());
  if (x.numel() == 0) return result;
  const Tensor dense = contiguous(x);
  with_bits(size_of(x.dtype()), [&]<class T>() {
    gpu::launch({.name = where, .grid = gpu::blocks(x.numel(), kBlock), .block = kBlock},
                triangle_kernel<T>, static_cast<const T*>(dense.data()),
                static_cast<T*>(result.data()), x.numel(), x.size(-2), x.size(-1), diagonal, lower);
  });
  return result;
}
Tensor tril_cuda(const Tensor& x, int64_t diagonal) { return triangle(x, diagonal, true, "tril"); }
Tensor triu_cuda(const Tensor& x, int64_t diagonal) { return triangle(x, diagonal, false, "triu"); }

}  // namespace

void register_index() {
  cuda_form<checked_index> = checked_index_cuda;
  cuda_form<select_rows> = select_rows_cuda;
  cuda_form<put_rows> = put_rows_cuda;
  cuda_form<add_rows> = add_rows_cuda;
  cuda_form<gather> = gather_cuda;
  cuda_form<scatter> = scatter_cuda;
  cuda_form<scatter_add> = scatter_add_cuda;
  cuda_form<tril> = tril_cuda;
  cuda_form<triu> = triu_cuda;
}

}  // namespace tessera::kernels
