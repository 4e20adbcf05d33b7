// What the norms of rows have in common, forward and backward: where a row is kept while it is
// calculated with, and how its operands come.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <type_traits>

#include <tessera/core/cuda/movable_stream.h>
#include <tessera/core/kernels/common/compute.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/norm/norm.h>
#include <tessera/core/kernels/random/random_fill.h>
#include <tessera/core/kernels/random/random_numbers.h>
#include <tessera/core/tensor/tensor.h>
#include <tessera/core/kernels/common/rows.cuh>
#include <tessera/core/kernels/common/strided.cuh>
#include <tessera/core/kernels/common/vector_lanes.cuh>

namespace tessera::kernels::row_norms {

// Rows of up to 1024 numbers (512 of f64) whose vectors are aligned stay in the registers of a
// warp: read and written once, 16 bytes at a time. Longer ones take a block each. Forward keeps
// them in shared memory. Backward keeps them in the registers of up to kNarrowBlock threads, or up
// to kWideBlock for 8192 numbers (4096), with the sums of the columns beside them; beyond, or
// without alignment, in shared memory, and the sums of the columns are a launch of their own, which
// reads dy and x a second time.
constexpr int kNarrowBlock = 128, kWideBlock = 512;
constexpr int kRowsOfBlock = 4;  // of forward
template <class T, int kThreads>
inline constexpr int64_t kMostInRegisters = InRegisters<T>::kMost*(kThreads == kWideBlock ? 8 : 1);

// What is calculated from it after this is calculated anew, not kept in registers from before.
TS_DEVICE void forget_results([[maybe_unused]] uint32_t& of) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(of));
#endif
}
TS_DEVICE void forget_results([[maybe_unused]] int64_t& of) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+l"(of));
#endif
}

// Neighbours of a row, as words: numbers of 16 bits would take a register each.
template <class T, int N>
class PackedVector {
 public:
  TS_DEVICE void load(const T* from) { set(gpu::load_vector<N>(from)); }
  TS_DEVICE void set(const gpu::Vector<T, N>& vector) { memcpy(words_, &vector, sizeof(words_)); }
  TS_DEVICE gpu::Vector<T, N> vector() const {
    gpu::Vector<T, N> vector;
    memcpy(&vector, words_, sizeof(words_));
    return vector;
  }
  TS_DEVICE void unpack(Compute<T> (&values)[N]) const { kernels::unpack(vector(), values); }
  TS_DEVICE void stay_packed() {
    TS_UNROLL
    for (uint32_t& word : words_) forget_results(word);
  }

 private:
  uint32_t words_[sizeof(T) * N / sizeof(uint32_t)] = {};  // zeros
};

// Columns of weight or bias. Rows in registers read them as they are stored (W: of x's dtype, or as
// they are calculated with), the others converted.
template <class W, class A, int N>
TS_DEVICE gpu::Vector<A, N> load_stored(const void* columns, int64_t c) {
  const auto stored = gpu::load_vector<N>(static_cast<const W*>(columns) + c);
  if constexpr (std::is_same_v<W, A>) {
    return stored;
  } else {
    gpu::Vector<A, N> values;
    TS_UNROLL
    for (int j = 0; j < N; ++j) values.values[j] = load<A>(stored.values[j]);
    return values;
  }
}

// Dropout on the way, as dropout_kernel of random_fill.cu has it.
template <class T>
struct NormDropout {
  MovableStream stream;
  uint32_t dropped;
  Compute<T> scale;

  // Neighbours from element `first` on, a multiple of N. `now`: of stream.
  template <int N>
  TS_DEVICE void apply(gpu::Vector<T, N>& vector, const RandomStream& now, int64_t first) const {
    constexpr int kEach = N < 4 ? N : 4;
    TS_UNROLL
    for (int b = 0; b < N / kEach; ++b) {
      const auto bits = philox4x32(now.seed, now.stream, static_cast<uint64_t>(first / 4 + b));
      const bool second_half = kEach < 4 && first % 4 != 0;
      TS_UNROLL
      for (int i = 0; i < kEach; ++i) {
        const uint32_t word =
            second_half ? bits[static_cast<size_t>((i + 2) % 4)] : bits[static_cast<size_t>(i)];
        T& number = vector.values[b * kEach + i];
        const Compute<T> value = load<Compute<T>>(number) * scale;
        number = store<T>(word >= dropped ? value : Compute<T>(0));
      }
    }
  }
};

inline Tensor in_dtype(const Tensor& x, DType dtype) {
  if (!x.defined()) return x;
  return contiguous(x.dtype() == dtype ? x : convert(x, dtype));
}
template <class T>
T* data_or_null(const Tensor& x) {
  return x.defined() ? x.data_as<T>() : nullptr;
}

// The block that keeps rows in its registers; 0 where none does.
template <class T>
int register_threads(int64_t columns, std::initializer_list<const Tensor*> operands) {
  bool aligned = columns % (16 / static_cast<int64_t>(sizeof(T))) == 0;
  for (const Tensor* x : operands) aligned = aligned && (!x->defined() || is_aligned(x->data()));
  if (!aligned || columns > kMostInRegisters<T, kWideBlock>) return 0;
  return columns <= kMostInRegisters<T, kNarrowBlock> ? kNarrowBlock : kWideBlock;
}

// As the kernels of rows in registers read it: as it is where they can, else in the compute type.
template <class T>
Tensor stored_parameter(const Tensor& x) {
  if (!x.defined()) return x;
  const bool as_it_is = x.dtype() == dtype_of<T> && is_aligned(x.data()) && x.is_contiguous();
  return as_it_is ? x : in_dtype(x, dtype_of<Compute<T>>);
}
// Calls f.operator()<W>() for the type that all of them are stored in, and converts those that
// differ.
template <class T, class F>
void with_stored_type(std::initializer_list<Tensor*> parameters, const F& f) {
  if constexpr (!std::is_same_v<T, Compute<T>>) {
    bool narrow = false, wide = false;
    for (const Tensor* x : parameters) {
      if (x->defined()) (x->dtype() == dtype_of<T> ? narrow : wide) = true;
    }
    if (narrow && !wide) return f.template operator()<T>();
  }
  for (Tensor* x : parameters) *x = in_dtype(*x, dtype_of<Compute<T>>);
  f.template operator()<Compute<T>>();
}
inline const void* address_or_null(const Tensor& x) { return x.defined() ? x.data() : nullptr; }

template <class T>
NormDropout<T> dropout_of(const std::optional<ResidualDropout>& given) {
  if (!given) return {};
  return {movable(given->stream), dropout_threshold(given->p),
          static_cast<Compute<T>>(1.0 / (1.0 - given->p))};
}
inline int64_t state_bytes_of(const MovableStream& stream) {
  return stream.state != nullptr ? 16 : 0;
}

}  // namespace tessera::kernels::row_norms
