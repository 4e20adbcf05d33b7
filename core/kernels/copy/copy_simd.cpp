#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/common/transpose.h>
#include <tessera/core/kernels/copy/copy_loops.h>

namespace tessera::kernels::TS_SIMD {
namespace {

template <class T, class C>
void load_lane(const void* source, int64_t stride, void* lane, int64_t count) {
  const T* x = static_cast<const T*>(source);
  C* y = static_cast<C*>(lane);
  if (stride == 1) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) y[i] = load<C>(x[i]);
  } else if (stride == 0) {
    const C value = load<C>(x[0]);
    for (int64_t i = 0; i < count; ++i) y[i] = value;
  } else {
    for (int64_t i = 0; i < count; ++i) y[i] = load<C>(x[i * stride]);
  }
}

template <class C, class T>
void store_lane(const void* lane, void* target, int64_t stride, int64_t count) {
  const C* x = static_cast<const C*>(lane);
  T* y = static_cast<T*>(target);
  if (stride == 1) {
#pragma GCC ivdep
    for (int64_t i = 0; i < count; ++i) y[i] = store<T>(x[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) y[i * stride] = store<T>(x[i]);
  }
}

template <class T>
void move_run(const void* source, int64_t source_stride, void* target, int64_t target_stride,
              int64_t count) {
  const T* x = static_cast<const T*>(source);
  T* y = static_cast<T*>(target);
  if (source_stride == 0) {
    const T value = x[0];
    if (target_stride == 1) {
      for (int64_t i = 0; i < count; ++i) y[i] = value;
    } else {
      for (int64_t i = 0; i < count; ++i) y[i * target_stride] = value;
    }
  } else if (target_stride == 1) {
    for (int64_t i = 0; i < count; ++i) y[i] = x[i * source_stride];
  } else {
    for (int64_t i = 0; i < count; ++i) y[i * target_stride] = x[i * source_stride];
  }
}

template <class T>
TS_HD void transpose_8x8(const T* x, int64_t x_stride, T* y, int64_t y_stride) {
  typedef T Row __attribute__((vector_size(8 * sizeof(T))));
  Row rows[8];
  for (int i = 0; i < 8; ++i) __builtin_memcpy(&rows[i], x + i * x_stride, sizeof(Row));
  transpose_8x8(rows);
  for (int i = 0; i < 8; ++i) __builtin_memcpy(y + i * y_stride, &rows[i], sizeof(Row));
}

// Blocks of 32 x 32: every cache line that is touched is used up while it is in L1.
template <class T>
void transpose(const void* source, int64_t source_stride, void* target, int64_t target_stride,
               int64_t rows, int64_t columns) {
  constexpr int64_t kBlock = 32;
  const T* x = static_cast<const T*>(source);  // (columns, rows), rows contiguous
  T* y = static_cast<T*>(target);              // (rows, columns), columns contiguous
  const int64_t whole_rows = rows / 8 * 8, whole_columns = columns / 8 * 8;
  for (int64_t c0 = 0; c0 < columns; c0 += kBlock) {
    const int64_t c1 = c0 + kBlock < columns ? c0 + kBlock : columns;
    const int64_t c8 = c1 < whole_columns ? c1 : whole_columns;
    for (int64_t r0 = 0; r0 < rows; r0 += kBlock) {
      const int64_t r1 = r0 + kBlock < rows ? r0 + kBlock : rows;
      const int64_t r8 = r1 < whole_rows ? r1 : whole_rows;
      for (int64_t r = r0; r < r8; r += 8) {
        for (int64_t c = c0; c < c8; c += 8) {
          transpose_8x8(x + c * source_stride + r, source_stride, y + r * target_stride + c,
                        target_stride);
        }
      }
      for (int64_t r = r0; r < r1; ++r) {  // what is left at the right and below
        const int64_t first = r < r8 ? c8 : c0;
        for (int64_t c = first; c < c1; ++c) y[r * target_stride + c] = x[c * source_stride + r];
      }
    }
  }
}

template <class T>
LoadFunction load_of(Lane lane) {
  switch (lane) {
    case Lane::kFloat:
      return load_lane<T, float>;
    case Lane::kDouble:
      return load_lane<T, double>;
    case Lane::kInt64:
      return load_lane<T, int64_t>;
    default:
      return load_lane<T, bool>;
  }
}

template <class T>
StoreFunction store_of(Lane lane) {
  switch (lane) {
    case Lane::kFloat:
      return store_lane<float, T>;
    case Lane::kDouble:
      return store_lane<double, T>;
    case Lane::kInt64:
      return store_lane<int64_t, T>;
    default:
      return store_lane<bool, T>;
  }
}

template <class T>
MoveFunctions move_of() {
  return {move_run<T>, transpose<T>};
}

}  // namespace

// A switch for itself: the helpers of dispatch.h are inline functions that the linker would merge
// across instruction sets.
LoadFunction load_function(DType dtype, Lane lane) {
  switch (dtype) {
    case kF64:
      return load_of<double>(lane);
    case kF32:
      return load_of<float>(lane);
    case kF16:
      return load_of<f16>(lane);
    case kBF16:
      return load_of<bf16>(lane);
    case kF8E4M3:
      return load_of<f8e4m3>(lane);
    case kF8E5M2:
      return load_of<f8e5m2>(lane);
    case kI64:
      return load_of<int64_t>(lane);
    case kI32:
      return load_of<int32_t>(lane);
    case kU8:
      return load_of<uint8_t>(lane);
    default:
      return load_of<bool>(lane);
  }
}

StoreFunction store_function(Lane lane, DType dtype) {
  switch (dtype) {
    case kF64:
      return store_of<double>(lane);
    case kF32:
      return store_of<float>(lane);
    case kF16:
      return store_of<f16>(lane);
    case kBF16:
      return store_of<bf16>(lane);
    case kF8E4M3:
      return store_of<f8e4m3>(lane);
    case kF8E5M2:
      return store_of<f8e5m2>(lane);
    case kI64:
      return store_of<int64_t>(lane);
    case kI32:
      return store_of<int32_t>(lane);
    case kU8:
      return store_of<uint8_t>(lane);
    default:
      return store_of<bool>(lane);
  }
}

MoveFunctions move_functions(int64_t element_size) {
  switch (element_size) {
    case 8:
      return move_of<uint64_t>();
    case 4:
      return move_of<uint32_t>();
    case 2:
      return move_of<uint16_t>();
    default:
      return move_of<uint8_t>();
  }
}

}  // namespace tessera::kernels::TS_SIMD
