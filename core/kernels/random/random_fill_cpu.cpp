#include <tessera/core/kernels/random/random_fill.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/common/on_device.h>
#include <tessera/core/kernels/copy/copy.h>
#include <tessera/core/parallel.h>

namespace tessera::kernels {
namespace {

// A multiple of the chunk of random_fill_simd.cpp; 30 us a piece.
constexpr int64_t kFillGrain = 32768;

// Calls fill(contiguous tensor): x itself, or a copy that is written back.
template <class F>
void fill_contiguous(const Tensor& x, F&& fill) {
  if (x.is_meta() || x.numel() == 0) return;
  if (x.is_contiguous()) {
    fill(x);
    return;
  }
  const Tensor dense = raw::empty(x.shape(), x.dtype(), x.device());
  fill(dense);
  copy_into(x, dense);
}

// Calls f(bits, i, n) for chunks of elements, `words` 32-bit numbers each; element i takes those of
// element i + first.
template <int words, class F>
void for_each_random(int64_t size, RandomStream stream, int64_t first, F&& f) {
  constexpr int64_t kChunk = 1024;
  parallel_for(size, kFillGrain, [&](int64_t begin, int64_t end) {
    alignas(64) uint32_t bits[kChunk * words + 4];
    for (int64_t i = begin; i < end; i += kChunk) {
      const int64_t n = std::min(kChunk, end - i);
      const int64_t word = (i + first) * words, before = word % 4;  // of a block's four
      TS_SIMD_CALL(philox_range, bits, stream, static_cast<uint64_t>(word / 4),
                   (before + n * words + 3) / 4);
      f(static_cast<const uint32_t*>(bits) + before, i, n);
    }
  });
}

// Calls range(values, begin, end, offset) as random_fill_simd.cpp wants it for n elements of which
// the first takes the numbers of element `first`.
template <class T, class Range>
void fill_ranges(T* values, int64_t n, int64_t first, Range&& range) {
  constexpr int64_t kBlock = 4;  // elements, the most that share a Philox block
  int64_t head = 0;
  if (const int64_t before = first % kBlock; before != 0) {
    T block[kBlock];
    range(block, 0, kBlock, first - before);
    head = std::min(n, kBlock - before);
    std::copy(block + before, block + before + head, values);
  }
  parallel_for(n - head, kFillGrain,
               [&](int64_t begin, int64_t end) { range(values + head, begin, end, first + head); });
}

uint64_t word64(const uint32_t* bits, int64_t i) {
  return (uint64_t{bits[2 * i]} << 32) | bits[2 * i + 1];
}

// A number of [0, range) from 64 bits, by the upper half of their product.
uint64_t below(uint64_t bits, uint64_t range) {
  return static_cast<uint64_t>((static_cast<unsigned __int128>(bits) * range) >> 64);
}

}  // namespace

void random_uniform(const Tensor& x, double low, double high, RandomStream stream, int64_t first) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::random_uniform>("random_uniform", x.device(), x, low, high, stream,
                                            first);
  }
  dispatch_floating(x.dtype(), "random_uniform", [&]<class T>() {
    fill_contiguous(x, [&](const Tensor& dense) {
      fill_ranges(dense.data_as<T>(), dense.numel(), first,
                  [&](T* values, int64_t begin, int64_t end, int64_t offset) {
                    TS_SIMD_CALL(uniform_range, values, begin, end, stream, offset, low, high);
                  });
    });
  });
}

void random_normal(const Tensor& x, double mean, double std, RandomStream stream, int64_t first) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::random_normal>("random_normal", x.device(), x, mean, std, stream,
                                           first);
  }
  dispatch_floating(x.dtype(), "random_normal", [&]<class T>() {
    fill_contiguous(x, [&](const Tensor& dense) {
      fill_ranges(dense.data_as<T>(), dense.numel(), first,
                  [&](T* values, int64_t begin, int64_t end, int64_t offset) {
                    TS_SIMD_CALL(normal_range, values, begin, end, stream, offset, mean, std);
                  });
    });
  });
}

void random_bernoulli(const Tensor& x, double p, RandomStream stream, int64_t first) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::random_bernoulli>("random_bernoulli", x.device(), x, p, stream, first);
  }
  const uint64_t threshold = static_cast<uint64_t>(p * 0x1p32 + 0.5);
  dispatch_numeric_and_bool(x.dtype(), "random_bernoulli", [&]<class T>() {
    fill_contiguous(x, [&](const Tensor& dense) {
      T* values = dense.data_as<T>();
      const T zero = store<T>(Compute<T>(0)), one = store<T>(Compute<T>(1));
      for_each_random<1>(dense.numel(), stream, first,
                         [&](const uint32_t* bits, int64_t i, int64_t n) {
                           for (int64_t j = 0; j < n; ++j)
                             values[i + j] = bits[j] < threshold ? one : zero;
                         });
    });
  });
}

void random_integers(const Tensor& x, int64_t low, int64_t high, RandomStream stream,
                     int64_t first) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::random_integers>("random_integers", x.device(), x, low, high, stream,
                                             first);
  }
  const uint64_t range = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  dispatch_numeric_and_bool(x.dtype(), "random_integers", [&]<class T>() {
    fill_contiguous(x, [&](const Tensor& dense) {
      T* values = dense.data_as<T>();
      for_each_random<2>(
          dense.numel(), stream, first, [&](const uint32_t* bits, int64_t i, int64_t n) {
            for (int64_t j = 0; j < n; ++j) {
              const uint64_t value = static_cast<uint64_t>(low) + below(word64(bits, j), range);
              values[i + j] = store<T>(load<Compute<T>>(static_cast<int64_t>(value)));
            }
          });
    });
  });
}

Tensor random_permutation(int64_t size, RandomStream stream) {
  Tensor result = raw::empty({size}, kI64);
  int64_t* values = result.data_as<int64_t>();
  std::iota(values, values + size, int64_t{0});
  constexpr int64_t kChunk = 512;
  uint32_t bits[2 * kChunk];
  for (int64_t i = 0; i < size; ++i) {
    if (i % kChunk == 0) {
      TS_SIMD_CALL(philox_range, bits, stream, static_cast<uint64_t>(i) / 2, kChunk / 2);
    }
    const uint64_t step = below(word64(bits, i % kChunk), static_cast<uint64_t>(size - i));
    std::swap(values[i], values[i + static_cast<int64_t>(step)]);
  }
  return result;
}

Tensor random_choice(const Tensor& weights, int64_t count, bool replacement, RandomStream stream) {
  if (weights.device().is_cuda()) {
    return on_cuda<kernels::random_choice>("multinomial", weights.device(), weights, count,
                                           replacement, stream);
  }
  const int64_t rows = weights.size(0), n = weights.size(1);
  Tensor result = raw::empty({rows, count}, kI64, weights.device());
  if (weights.is_meta()) return result;
  const Tensor dense = contiguous(weights);
  int64_t* chosen = result.data_as<int64_t>();
  // Element (row, i) of the draw: i counts results with replacement, candidates without.
  const auto draw = [&](int64_t element) {
    const auto block = philox4x32(stream.seed, stream.stream, static_cast<uint64_t>(element) / 2);
    const size_t half = static_cast<size_t>(element % 2) * 2;
    return uniform_from_bits64(block[half], block[half + 1]);
  };
  dispatch_floating(weights.dtype(), "multinomial", [&]<class T>() {
    std::vector<double> values(static_cast<size_t>(n));
    std::vector<int64_t> order;
    for (int64_t row = 0; row < rows; ++row) {
      const T* weight = dense.data_as<T>() + row * n;  // (n)
      double total = 0;
      int64_t positive = 0;
      for (int64_t i = 0; i < n; ++i) {
        const double w = static_cast<double>(load<Compute<T>>(weight[i]));
        TS_CHECK(w >= 0 && std::isfinite(w), "multinomial",
                 "weights must be finite and not negative; got ", w, " at position [", row, ", ", i,
                 "]");
        total += w;
        positive += w > 0;
        values[static_cast<size_t>(i)] = total;
      }
      const int64_t needed = replacement ? 1 : count;
      TS_CHECK(positive >= needed, "multinomial", "row ", row, " has ", positive,
               " positive weights and must have at least ", needed,
               replacement ? "" : "; draw with replacement, or fewer");
      if (replacement) {
        TS_CHECK(std::isfinite(total), "multinomial", "the sum of row ", row,
                 " is beyond f64; divide the weights by their largest");
        for (int64_t i = 0; i < count; ++i) {
          const double u = draw(row * count + i) * total;
          const auto place = std::upper_bound(values.begin(), values.end(), u);
          int64_t index = std::min(place - values.begin(), n - 1);
          // Rounding of u * total may reach the end: the last positive weight takes it.
          while (!(load<Compute<T>>(weight[index]) > 0)) --index;
          chosen[row * count + i] = index;
        }
      } else {
        order.clear();
        for (int64_t i = 0; i < n; ++i) {
          const double w = static_cast<double>(load<Compute<T>>(weight[i]));
          if (!(w > 0)) continue;
          values[static_cast<size_t>(i)] = std::log(draw(row * n + i) + 0x1p-54) / w;
          order.push_back(i);
        }
        std::partial_sort(order.begin(), order.begin() + count, order.end(),
                          [&](int64_t a, int64_t b) {
                            const double left = values[static_cast<size_t>(a)];
                            const double right = values[static_cast<size_t>(b)];
                            return left != right ? left > right : a < b;
                          });
        std::copy(order.begin(), order.begin() + count, chosen + row * count);
      }
    }
  });
  return result;
}

Tensor dropout(const Tensor& x, double p, RandomStream stream, const DrawPlace& place) {
  if (x.device().is_cuda()) {
    return on_cuda<kernels::dropout>("dropout", x.device(), x, p, stream, place);
  }
  Tensor result = raw::empty(x.shape(), x.dtype(), x.device());
  dispatch_floating(x.dtype(), "dropout", [&]<class T>() {
    if (x.is_meta()) return;
    const Tensor dense = contiguous(x);
    const T* source = dense.data_as<T>();
    T* target = result.data_as<T>();
    const int64_t run = place.run(dense.numel());
    parallel_for(dense.numel(), kFillGrain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin, stop; i < end; i = stop) {
        stop = std::min(end, (i / run + 1) * run);
        TS_SIMD_CALL(dropout_range, source, target, i, stop, stream, place.number_of(i) - i, p);
      }
    });
  });
  return result;
}

}  // namespace tessera::kernels
