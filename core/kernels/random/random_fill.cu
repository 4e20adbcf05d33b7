#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include <tessera/core/cuda/movable_stream.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/kernels/random/random_fill.h>
#include <tessera/core/kernels/random/random_numbers.h>
#include <tessera/core/kernels/reduce/reduce.h>
#include <tessera/core/kernels/sort/sort.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/core/kernels/common/rows.cuh>
#include <tessera/core/kernels/common/strided.cuh>

namespace tessera::kernels {
namespace {

constexpr int kBlock = 256;

struct Bits {
  uint32_t words[4];
  TS_DEVICE uint64_t word64(int half) const {
    return (uint64_t{words[2 * half]} << 32) | words[2 * half + 1];
  }
};
TS_DEVICE Bits philox_block(RandomStream stream, int64_t block) {
  const auto four = philox4x32(stream.seed, stream.stream, static_cast<uint64_t>(block));
  return {{four[0], four[1], four[2], four[3]}};
}

// A thread makes the numbers of whole Philox blocks, kEach of a block, that fill 16 bytes or more.
template <class T, int kEach>
inline constexpr int kNumbers = std::max(kEach, 16 / static_cast<int>(sizeof(T)));
template <class T>
inline constexpr int kFloats = std::is_same_v<T, double> ? 2 : 4;  // of a block, if they are floats

// The first `count` numbers: by vectors where all of them have a place.
template <class T, int N>
TS_DEVICE void store_numbers(T* x, const gpu::Vector<T, N>& numbers, int64_t count, bool vectors) {
  if (vectors && count >= N) return gpu::store_vector(x, numbers);
  TS_UNROLL
  for (int i = 0; i < N; ++i) {
    if (i < count) x[i] = numbers.values[i];
  }
}

// Elements [first, first + n) of a whole. A thread makes the numbers of `each` neighbours in the
// whole, of which those at the ends may lie outside.
template <class T>
struct Part {
  T* x;
  int64_t n, first;
  bool vectors;  // the neighbours are a vector of x
};
template <class T>
Part<T> part_of(const Tensor& x, int64_t first, int each) {
  return {x.data_as<T>(), x.numel(), first, is_aligned(x.data()) && first % each == 0};
}

// make(bits, numbers): the kEach numbers of one Philox block.
template <int kEach, class T, class F>
TS_DEVICE void fill_numbers(const Part<T>& part, const MovableStream& stream, const F& make) {
  constexpr int kAll = kNumbers<T, kEach>;
  const int64_t begin = part.first / kAll * kAll + gpu::first_index() * kAll;  // of the whole
  const int64_t at = begin - part.first;
  if (at >= part.n) return;
  const RandomStream now = stream.now();
  gpu::Vector<T, kAll> numbers;
  TS_UNROLL
  for (int b = 0; b < kAll / kEach; ++b) {
    make(philox_block(now, begin / kEach + b), numbers.values + b * kEach);
  }
  if (at >= 0) return store_numbers(part.x + at, numbers, part.n - at, part.vectors);
  TS_UNROLL
  for (int i = 0; i < kAll; ++i) {
    if (at + i >= 0 && at + i < part.n) part.x[at + i] = numbers.values[i];
  }
}

template <class T>
__global__ void uniform_kernel(Part<T> part, MovableStream stream, double low, double high) {
  fill_numbers<kFloats<T>>(part, stream, [&](const Bits& bits, T* numbers) {
    TS_UNROLL
    for (int i = 0; i < kFloats<T>; ++i) {
      if constexpr (std::is_same_v<T, double>) {
        numbers[i] = uniform_between<double>(unit64(bits.word64(i)), low, high);
      } else {
        const float u = unit<T>(bits.words[i]);
        numbers[i] = low == 0 && high == 1
                         ? store<T>(u)
                         : uniform_between<T>(u, static_cast<float>(low), static_cast<float>(high));
      }
    }
  });
}

template <class T>
__global__ void normal_kernel(Part<T> part, MovableStream stream, double mean, double std) {
  fill_numbers<kFloats<T>>(part, stream, [&](const Bits& bits, T* numbers) {
    if constexpr (std::is_same_v<T, double>) {
      const double radius = ::sqrt(-2.0 * ::log(unit64(bits.word64(0)) + 0x1p-54));
      const double angle = 6.283185307179586477 * unit64(bits.word64(1));
      numbers[0] = mean + std * (radius * ::cos(angle));
      numbers[1] = mean + std * (radius * ::sin(angle));
    } else {
      float z[4];
      box_muller(bits.words[0], bits.words[1], z[0], z[1]);
      box_muller(bits.words[2], bits.words[3], z[2], z[3]);
      TS_UNROLL
      for (int i = 0; i < 4; ++i) {
        numbers[i] = store<T>(static_cast<float>(mean) + static_cast<float>(std) * z[i]);
      }
    }
  });
}

template <class T>
__global__ void bernoulli_kernel(Part<T> part, MovableStream stream, uint64_t threshold) {
  fill_numbers<4>(part, stream, [&](const Bits& bits, T* numbers) {
    TS_UNROLL
    for (int i = 0; i < 4; ++i) {
      numbers[i] = store<T>(static_cast<Compute<T>>(bits.words[i] < threshold));
    }
  });
}

template <class T>
__global__ void integers_kernel(Part<T> part, MovableStream stream, int64_t low, uint64_t range) {
  fill_numbers<2>(part, stream, [&](const Bits& bits, T* numbers) {
    TS_UNROLL
    for (int i = 0; i < 2; ++i) {
      const uint64_t value = static_cast<uint64_t>(low) + __umul64hi(bits.word64(i), range);
      numbers[i] = store<T>(load<Compute<T>>(static_cast<int64_t>(value)));
    }
  });
}

// The numbers of elements [first, first + 4) of a part. `in_draws`: of the place.
TS_DEVICE Bits bits_of_part(const RandomStream& now, const DrawPlace& place, bool in_draws,
                            int64_t first) {
  if (in_draws) return philox_block(now, place.number_of(first) / 4);
  Bits bits{};
  TS_ROLLED
  for (int i = 0; i < 4; ++i) {
    const int64_t number = place.number_of(first + i), lane = number % 4;
    const Bits block = philox_block(now, number / 4);
    const uint32_t low = lane == 0 ? block.words[0] : block.words[1];
    const uint32_t word = lane < 2 ? low : lane == 2 ? block.words[2] : block.words[3];
    TS_UNROLL
    for (int k = 0; k < 4; ++k) bits.words[k] = k == i ? word : bits.words[k];  // in registers
  }
  return bits;
}

// vectors: x is aligned; y, which is new, always is.
template <class T, bool kPart>
__global__ void dropout_kernel(const T* x, T* y, int64_t n, bool vectors, MovableStream stream,
                               DrawPlace place, bool in_draws, uint32_t dropped, Compute<T> scale) {
  constexpr int kAll = kNumbers<T, 4>;
  const int64_t first = gpu::first_index() * kAll;
  if (first >= n) return;
  gpu::Vector<T, kAll> numbers;
  if (vectors && n - first >= kAll) {
    numbers = gpu::load_vector<kAll>(x + first);
  } else {
    TS_UNROLL
    for (int i = 0; i < kAll; ++i) numbers.values[i] = x[first + i < n ? first + i : first];
  }
  const RandomStream now = stream.now();
  TS_UNROLL
  for (int b = 0; b < kAll / 4; ++b) {
    Bits bits;
    if constexpr (kPart) {
      bits = bits_of_part(now, place, in_draws, first + 4 * b);
    } else {
      bits = philox_block(now, first / 4 + b);
    }
    TS_UNROLL
    for (int i = 0; i < 4; ++i) {
      T& number = numbers.values[4 * b + i];
      const Compute<T> value = load<Compute<T>>(number) * scale;
      number = store<T>(bits.words[i] >= dropped ? value : Compute<T>(0));
    }
  }
  store_numbers(y + first, numbers, n - first, true);
}

// Calls fill(contiguous tensor): x itself, or one that is copied to x.
template <class F>
void fill_contiguous(const Tensor& x, const F& fill) {
  if (x.numel() == 0) return;
  if (x.is_contiguous()) {
    fill(x);
    return;
  }
  const Tensor dense = raw::empty(x.shape(), x.dtype(), x.device());
  fill(dense);
  copy_into(x, dense);
}

int64_t state_bytes(const MovableStream& stream) { return stream.state != nullptr ? 16 : 0; }

// Of a part; `each`: elements of a thread.
template <class T>
gpu::LaunchConfig config_for_part(const char* name, int64_t n, int64_t first, int each,
                                  const MovableStream& stream) {
  return {.name = name,
          .grid = gpu::blocks(first % each + n, kBlock, each),
          .block = kBlock,
          .traffic = {state_bytes(stream), n * static_cast<int64_t>(sizeof(T))}};
}
gpu::LaunchConfig config_for(const char* name, int64_t n, int each,
                             const gpu::Traffic& traffic = {}) {
  return {.name = name, .grid = gpu::blocks(n, kBlock, each), .block = kBlock, .traffic = traffic};
}

void random_uniform_cuda(const Tensor& x, double low, double high, RandomStream stream,
                         int64_t first) {
  dispatch_floating(x.dtype(), "random_uniform", [&]<class T>() {
    fill_contiguous(x, [&](const Tensor& dense) {
      constexpr int kAll = kNumbers<T, kFloats<T>>;
      const MovableStream moved = movable(stream);
      gpu::launch(config_for_part<T>("random_uniform", dense.numel(), first, kAll, moved),
                  uniform_kernel<T>, part_of<T>(dense, first, kAll), moved, low, high);
    });
  });
}

void random_normal_cuda(const Tensor& x, double mean, double std, RandomStream stream,
                        int64_t first) {
  dispatch_floating(x.dtype(), "random_normal", [&]<class T>() {
    fill_contiguous(x, [&](const Tensor& dense) {
      constexpr int kAll = kNumbers<T, kFloats<T>>;
      const MovableStream moved = movable(stream);
      gpu::launch(config_for_part<T>("random_normal", dense.numel(), first, kAll, moved),
                  normal_kernel<T>, part_of<T>(dense, first, kAll), moved, mean, std);
    });
  });
}

void random_bernoulli_cuda(const Tensor& x, double p, RandomStream stream, int64_t first) {
  const uint64_t threshold = static_cast<uint64_t>(p * 0x1p32 + 0.5);
  dispatch_numeric_and_bool(x.dtype(), "random_bernoulli", [&]<class T>() {
    fill_contiguous(x, [&](const Tensor& dense) {
      constexpr int kAll = kNumbers<T, 4>;
      const MovableStream moved = movable(stream);
      gpu::launch(config_for_part<T>("random_bernoulli", dense.numel(), first, kAll, moved),
                  bernoulli_kernel<T>, part_of<T>(dense, first, kAll), moved, threshold);
    });
  });
}

void random_integers_cuda(const Tensor& x, int64_t low, int64_t high, RandomStream stream,
                          int64_t first) {
  const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  dispatch_numeric_and_bool(x.dtype(), "random_integers", [&]<class T>() {
    fill_contiguous(x, [&](const Tensor& dense) {
      constexpr int kAll = kNumbers<T, 2>;
      const MovableStream moved = movable(stream);
      gpu::launch(config_for_part<T>("random_integers", dense.numel(), first, kAll, moved),
                  integers_kernel<T>, part_of<T>(dense, first, kAll), moved, low, range);
    });
  });
}

Tensor dropout_cuda(const Tensor& x, double p, RandomStream stream, const DrawPlace& place) {
  const Tensor result = raw::empty(x.shape(), x.dtype(), x.device());
  if (x.numel() == 0) return result;
  const Tensor dense = contiguous(x);
  dispatch_floating(x.dtype(), "dropout", [&]<class T>() {
    const MovableStream moved = movable(stream);
    const int64_t bytes = x.numel() * static_cast<int64_t>(sizeof(T));
    gpu::launch(
        config_for("dropout", x.numel(), kNumbers<T, 4>, {bytes + state_bytes(moved), bytes}),
        place.is_part() ? dropout_kernel<T, true> : dropout_kernel<T, false>, dense.data_as<T>(),
        result.data_as<T>(), x.numel(), is_aligned(dense.data()), moved, place, place.in_draws(),
        dropout_threshold(p), static_cast<Compute<T>>(1.0 / (1.0 - p)));
  });
  return result;
}

// ---- Draws by weight ----------------------------------------------------------------------------

// Number (row, i) of a draw, as on the CPU.
TS_DEVICE double draw(RandomStream stream, int64_t element) {
  const Bits bits = philox_block(stream, element / 2);
  return unit64(element % 2 == 0 ? bits.word64(0) : bits.word64(1));
}

// A block a row: the positive weights, and the first that cannot be one (-1: none).
template <class T>
__global__ void inspect_weights_kernel(const T* weights, int64_t* found, int64_t n) {
  TS_REDUCE_SLOT(int64_t, slot);
  int64_t positive = 0, last_bad = 0;  // n - position, the largest is the first
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    const Compute<T> w = load<Compute<T>>(weights[blockIdx.x * n + i]);
    positive += w > 0;
    const bool good = w >= 0 && w < static_cast<Compute<T>>(INFINITY);
    if (!good && n - i > last_bad) last_bad = n - i;
  }
  positive = gpu::block_reduce(positive, gpu::Plus{}, int64_t{0}, slot);
  last_bad = gpu::block_reduce(last_bad, gpu::Larger{}, int64_t{0}, slot);
  if (threadIdx.x == 0) {
    found[2 * blockIdx.x] = positive;
    found[2 * blockIdx.x + 1] = last_bad > 0 ? n - last_bad : -1;
  }
}

// sums: running sums of the weights of each row. The first sum above u times the total.
template <class T>
__global__ void choose_kernel(const T* weights, const double* sums, int64_t* chosen, int64_t total,
                              int64_t n, int64_t count, MovableStream stream) {
  const int64_t i = gpu::first_index();
  if (i >= total) return;
  const int64_t row = i / count;
  const double* const sum = sums + row * n;
  const double u = draw(stream.now(), i) * sum[n - 1];
  int64_t low = 0, high = n;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (sum[middle] <= u) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  int64_t index = low < n ? low : n - 1;
  // Rounding of u * total may reach the end: the last positive weight takes it.
  while (!(load<Compute<T>>(weights[row * n + index]) > 0)) --index;
  chosen[i] = index;
}

template <class T>
__global__ void priorities_kernel(const T* weights, double* priorities, int64_t total,
                                  MovableStream stream) {
  const int64_t i = gpu::first_index();
  if (i >= total) return;
  const auto w = static_cast<double>(load<Compute<T>>(weights[i]));
  priorities[i] =
      w > 0 ? ::log(draw(stream.now(), i) + 0x1p-54) / w : -static_cast<double>(INFINITY);
}

// The weights are looked at on the host before anything is drawn: an error here is worth a wait.
Tensor random_choice_cuda(const Tensor& weights, int64_t count, bool replacement,
                          RandomStream stream) {
  const int64_t rows = weights.size(0), n = weights.size(1);
  const Tensor dense = contiguous(weights);
  Tensor result = raw::empty({rows, count}, kI64, weights.device());
  if (rows == 0) return result;
  const Tensor found = raw::zeros({rows, 2}, kI64, weights.device());
  dispatch_floating(weights.dtype(), "multinomial", [&]<class T>() {
    gpu::launch(
        {.name = "multinomial", .grid = static_cast<unsigned>(rows), .block = row_threads(n)},
        inspect_weights_kernel<T>, dense.data_as<T>(), found.data_as<int64_t>(), n);
    const std::vector<int64_t> seen = found.to_vector<int64_t>();
    const int64_t needed = replacement ? 1 : count;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t positive = seen[static_cast<size_t>(2 * row)];
      const int64_t bad = seen[static_cast<size_t>(2 * row + 1)];
      TS_CHECK(bad < 0, "multinomial", "weights must be finite and not negative; got ",
               raw::select(raw::select(dense, 0, row), 0, bad).item(), " at position [", row, ", ",
               bad, "]");
      TS_CHECK(positive >= needed, "multinomial", "row ", row, " has ", positive,
               " positive weights and must have at least ", needed,
               replacement ? "" : "; draw with replacement, or fewer");
    }
    if (replacement) {
      const Tensor sums = cumsum(dense, 1, kF64);
      if constexpr (std::is_same_v<T, double>) {  // no sum of others gets there
        const std::vector<double> totals = raw::select(sums, 1, n - 1).to_vector<double>();
        for (int64_t row = 0; row < rows; ++row) {
          TS_CHECK(std::isfinite(totals[static_cast<size_t>(row)]), "multinomial",
                   "the sum of row ", row, " is beyond f64; divide the weights by their largest");
        }
      }
      gpu::launch(config_for("multinomial", rows * count, 1), choose_kernel<T>, dense.data_as<T>(),
                  sums.data_as<double>(), result.data_as<int64_t>(), rows * count, n, count,
                  movable(stream));
    } else {
      const Tensor priorities = raw::empty({rows, n}, kF64, weights.device());
      gpu::launch(config_for("multinomial", rows * n, 1), priorities_kernel<T>, dense.data_as<T>(),
                  priorities.data_as<double>(), rows * n, movable(stream));
      result = topk(priorities, count, 1, true).indices;
    }
  });
  return result;
}

}  // namespace

void register_random_fill() {
  cuda_kernel<random_uniform> = random_uniform_cuda;
  cuda_kernel<random_normal> = random_normal_cuda;
  cuda_kernel<random_bernoulli> = random_bernoulli_cuda;
  cuda_kernel<random_integers> = random_integers_cuda;
  cuda_kernel<random_choice> = random_choice_cuda;
  cuda_kernel<dropout> = dropout_cuda;
}

}  // namespace tessera::kernels
