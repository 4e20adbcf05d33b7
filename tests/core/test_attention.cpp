// ctest instruction sets
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/attention/attention.h>
#include <tessera/core/parallel.h>
#include <tessera/core/tensor/raw_views.h>

namespace tessera::kernels::test_attention {
namespace {

struct Sizes {
  int64_t B, H, Hk, T, S, E, Ev;
};

Tensor random_tensor(const Shape& shape, DType dtype, uint32_t seed) {
  const Tensor x = raw::empty(shape, dtype);
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  dispatch_floating(dtype, "test", [&]<class T>() {
    for (int64_t i = 0; i < x.numel(); ++i) x.data_as<T>()[i] = store<T>(normal(generator));
  });
  return x;
}

double at(const Tensor& x, int64_t b, int64_t h, int64_t i, int64_t j) {
  const int64_t offset = b * x.stride(0) + h * x.stride(1) + i * x.stride(2) + j * x.stride(3);
  if (x.dtype() == kBool) return x.data_as<bool>()[offset];
  return dispatch_floating(x.dtype(), "test",
                           [&]<class T>() { return load<double>(x.data_as<T>()[offset]); });
}

// Everything in f64, by the definition.
struct Reference {
  std::vector<double> output, grad_query, grad_key, grad_value;

  Reference(const Sizes& n, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g,
            const AttentionSpec& spec)
      : output(static_cast<size_t>(n.B * n.H * n.T * n.Ev)),
        grad_query(static_cast<size_t>(n.B * n.H * n.T * n.E)),
        grad_key(static_cast<size_t>(n.B * n.Hk * n.S * n.E)),
        grad_value(static_cast<size_t>(n.B * n.Hk * n.S * n.Ev)) {
    std::vector<double> p(static_cast<size_t>(n.S)), dp(p), keep(p);
    const std::vector<double> lengths =
        spec.lengths.defined() ? spec.lengths.to_vector() : std::vector<double>();
    const std::vector<double> starts =
        spec.starts.defined() ? spec.starts.to_vector() : std::vector<double>();
    const std::vector<double> ends =
        spec.ends.defined() ? spec.ends.to_vector() : std::vector<double>();
    for (int64_t b = 0; b < n.B; ++b) {
      const double keys = lengths.empty() ? INFINITY : lengths[static_cast<size_t>(b)];
      for (int64_t h = 0; h < n.H; ++h) {
        const int64_t kh = h / (n.H / n.Hk);
        for (int64_t t = 0; t < n.T; ++t) {
          double maximum = -INFINITY, sum = 0, delta = 0;
          const auto query = static_cast<size_t>(b * n.T + t);
          for (int64_t s = 0; s < n.S; ++s) {
            const size_t i = static_cast<size_t>(s);
            p[i] = 0;
            for (int64_t e = 0; e < n.E; ++e) p[i] += at(q, b, h, t, e) * at(k, b, kh, s, e);
            p[i] *= spec.scale;
            if (spec.mask.defined()) {
              const double m = at(spec.mask, b, h, t, s);
              p[i] += spec.mask.dtype() == kBool ? (m != 0 ? 0 : -INFINITY) : m;
            }
            if (spec.causal && s > t) p[i] = -INFINITY;
            if (static_cast<double>(s) >= keys) p[i] = -INFINITY;
            if (!starts.empty() && static_cast<double>(s) < starts[query]) p[i] = -INFINITY;
            if (!ends.empty() && static_cast<double>(s) >= ends[query]) p[i] = -INFINITY;
            maximum = std::max(maximum, p[i]);
            const AttentionPlace& of = spec.place;
            const int64_t heads = of.is_part() ? of.heads : n.H;
            const int64_t queries = of.is_part() ? of.queries : n.T;
            const int64_t row = (of.batch + b) * heads + of.head + h;
            const uint64_t index = static_cast<uint64_t>((row * queries + of.query + t) * n.S + s);
            const auto drawn = philox4x32(spec.stream.seed, spec.stream.stream, index / 4);
            keep[i] = spec.dropout == 0 ? 1
                      : uniform_from_bits(drawn[index % 4]) >= static_cast<float>(spec.dropout)
                          ? 1 / (1 - spec.dropout)
                          : 0;
          }
          for (double& x : p) {
            x = maximum == -INFINITY ? 0 : std::exp(x - maximum);
            sum += x;
          }
          for (double& x : p) x = sum == 0 ? 0 : x / sum;
          for (int64_t s = 0; s < n.S; ++s) {
            const size_t i = static_cast<size_t>(s);
            dp[i] = 0;
            for (int64_t e = 0; e < n.Ev; ++e) {
              output[static_cast<size_t>(((b * n.H + h) * n.T + t) * n.Ev + e)] +=
                  p[i] * keep[i] * at(v, b, kh, s, e);
              dp[i] += keep[i] * at(g, b, h, t, e) * at(v, b, kh, s, e);
              grad_value[static_cast<size_t>(((b * n.Hk + kh) * n.S + s) * n.Ev + e)] +=
                  p[i] * keep[i] * at(g, b, h, t, e);
            }
            delta += p[i] * dp[i];
          }
          for (int64_t s = 0; s < n.S; ++s) {
            const size_t i = static_cast<size_t>(s);
            const double ds = p[i] * (dp[i] - delta) * spec.scale;
            for (int64_t e = 0; e < n.E; ++e) {
              grad_query[static_cast<size_t>(((b * n.H + h) * n.T + t) * n.E + e)] +=
                  ds * at(k, b, kh, s, e);
              grad_key[static_cast<size_t>(((b * n.Hk + kh) * n.S + s) * n.E + e)] +=
                  ds * at(q, b, h, t, e);
            }
          }
        }
      }
    }
  }
};

void expect_close(const Tensor& x, const std::vector<double>& reference, const char* what) {
  // f32 sums of at most a few hundred products of order 1; narrow types round inputs of products.
  const double tolerance = x.dtype() == kF64   ? 1e-12
                           : x.dtype() == kF32 ? 2e-6
                                               : 4 * epsilon_of(x.dtype());
  double scale = 1e-30;
  for (double value : reference) scale = std::max(scale, std::abs(value));
  size_t i = 0;
  for (int64_t b = 0; b < x.size(0); ++b) {
    for (int64_t h = 0; h < x.size(1); ++h) {
      for (int64_t r = 0; r < x.size(2); ++r) {
        for (int64_t e = 0; e < x.size(3); ++e, ++i) {
          ASSERT_NEAR(at(x, b, h, r, e), reference[i], tolerance * scale)
              << what << " of " << x << " at " << b << "," << h << "," << r << "," << e;
        }
      }
    }
  }
}

void expect_attention(const Sizes& n, DType dtype, AttentionSpec spec) {
  // Packed as a linear layer leaves them: (B, rows, heads, width).
  const Tensor q = raw::transpose(random_tensor({n.B, n.T, n.H, n.E}, dtype, 1), 1, 2);
  const Tensor k = raw::transpose(random_tensor({n.B, n.S, n.Hk, n.E}, dtype, 2), 1, 2);
  const Tensor v = random_tensor({n.B, n.Hk, n.S, n.Ev}, dtype, 3);
  const Tensor g = raw::transpose(random_tensor({n.B, n.T, n.H, n.Ev}, dtype, 4), 1, 2);
  spec.scale = 1 / std::sqrt(static_cast<double>(n.E));
  const AttentionResult result = attention(q, k, v, spec);
  const Tensor grad_q = raw::empty({n.B, n.H, n.T, n.E}, dtype);
  const Tensor grad_k = raw::transpose(raw::empty({n.B, n.S, n.Hk, n.E}, dtype), 1, 2);
  const Tensor grad_v = raw::empty({n.B, n.Hk, n.S, n.Ev}, dtype);
  attention_backward(g, q, k, v, result.output, result.log_sums, spec, grad_q, grad_k, grad_v);
  const Reference reference(n, q, k, v, g, spec);
  expect_close(result.output, reference.output, "output");
  expect_close(grad_q, reference.grad_query, "grad_query");
  expect_close(grad_k, reference.grad_key, "grad_key");
  expect_close(grad_v, reference.grad_value, "grad_value");
}

const DType kDTypes[] = {kF64, kF32, kF16, kBF16};

TEST(Attention, MatchesTheDefinitionInEveryDtype) {
  for (DType dtype : kDTypes) expect_attention({2, 2, 2, 37, 45, 16, 24}, dtype, {});
}
TEST(Attention, CausalMatchesTheDefinition) {
  for (DType dtype : kDTypes) {
    expect_attention({1, 2, 2, 100, 100, 64, 64}, dtype, {.causal = true});
    expect_attention({1, 1, 1, 70, 40, 8, 8}, dtype, {.causal = true});
    expect_attention({1, 1, 1, 20, 90, 8, 8}, dtype, {.causal = true});
  }
}
TEST(Attention, QueryHeadsShareKeyHeads) {
  for (DType dtype : kDTypes) expect_attention({2, 6, 2, 33, 50, 20, 12}, dtype, {});
}
TEST(Attention, ASingleQueryReadsTheWholeCache) {
  for (DType dtype : kDTypes) expect_attention({1, 2, 1, 1, 300, 32, 32}, dtype, {});
}
// Keys and values are read where they lie, once for up to 32 queries of the heads that share them.
TEST(Attention, FewQueriesOfManyHeadsMatchTheDefinition) {
  const Tensor lengths = raw::empty({2}, kI64);
  lengths.data_as<int64_t>()[0] = 50;
  lengths.data_as<int64_t>()[1] = 131;
  for (DType dtype : kDTypes) {
    expect_attention({2, 6, 2, 3, 131, 20, 12}, dtype, {});
    expect_attention({1, 10, 1, 7, 77, 64, 33}, dtype, {});  // 70 rows
    expect_attention({2, 4, 2, 8, 30, 16, 16}, dtype, {.causal = true});
    expect_attention({2, 4, 2, 8, 3, 16, 16}, dtype, {.causal = true});
    expect_attention({2, 4, 2, 5, 131, 16, 24}, dtype,
                     {.dropout = 0.3, .stream = {7, 9}, .lengths = lengths});
    const Tensor mask = raw::empty({2, 4, 3, 95}, kBool);
    for (int64_t i = 0; i < mask.numel(); ++i) {
      mask.data_as<bool>()[i] = i % 7 != 0 && i / 95 % 3 != 1;  // query 1 sees nothing
    }
    expect_attention({2, 4, 2, 3, 95, 16, 16}, dtype, {.mask = mask});
  }
}

TEST(Attention, APartDrawsTheDropoutOfItsPlaceInTheWhole) {
  const AttentionPlace place{.batch = 1, .head = 2, .query = 3, .heads = 8, .queries = 11};
  for (DType dtype : kDTypes) {
    for (const int64_t queries : {3, 40}) {
      expect_attention({2, 4, 2, queries, 41, 16, 16}, dtype,
                       {.dropout = 0.3, .stream = {7, 9}, .place = place});
    }
  }
}

TEST(Attention, DropoutIsDrawnAgainInBackward) {
  for (DType dtype : kDTypes) {
    expect_attention({2, 2, 2, 40, 40, 16, 16}, dtype,
                     {.causal = true, .dropout = 0.3, .stream = {7, 9}});
  }
}

TEST(Attention, BoolMasksHideKeysAndWholeRows) {
  const Sizes n{2, 2, 2, 40, 35, 16, 16};
  const Tensor mask = raw::empty({n.B, n.H, n.T, n.S}, kBool);
  std::mt19937 generator(5);
  for (int64_t i = 0; i < mask.numel(); ++i) {
    mask.data_as<bool>()[i] = generator() % 3 != 0 && (i / n.S) % n.T != 4;  // row 4 sees nothing
  }
  for (DType dtype : kDTypes) expect_attention(n, dtype, {.mask = mask});
}

TEST(Attention, AdditiveMasksOfAnyDtypeAndStride) {
  const Sizes n{2, 3, 3, 21, 35, 16, 16};
  for (DType dtype : kDTypes) {
    const Tensor mask = raw::expand(random_tensor({1, 1, n.T, n.S}, dtype, 8), {2, 3, n.T, n.S});
    expect_attention(n, dtype, {.mask = mask});
  }
}

TEST(Attention, LengthsHideThePaddingOfASample) {
  const auto lengths = [](const std::vector<int64_t>& values, DType dtype) {
    const Tensor x = raw::empty({static_cast<int64_t>(values.size())}, dtype);
    for (size_t i = 0; i < values.size(); ++i) {
      if (dtype == kI64) {
        x.data_as<int64_t>()[i] = values[i];
      } else {
        x.data_as<int32_t>()[i] = static_cast<int32_t>(values[i]);
      }
    }
    return x;
  };
  for (DType dtype : kDTypes) {
    expect_attention({3, 2, 2, 40, 70, 16, 24}, dtype, {.lengths = lengths({1, 33, 70}, kI64)});
    expect_attention({2, 4, 2, 65, 65, 16, 16}, dtype,
                     {.causal = true, .lengths = lengths({65, 20}, kI32)});
    expect_attention({2, 2, 2, 40, 40, 16, 16}, dtype,
                     {.dropout = 0.3, .stream = {7, 9}, .lengths = lengths({40, 11}, kI64)});
  }
  const Tensor x = random_tensor({2, 1, 3, 4}, kF32, 1);
  for (const std::vector<int64_t>& wrong : {std::vector<int64_t>{3, 0}, {4, 1}, {-1, 1}}) {
    EXPECT_THROW(attention(x, x, x, {.lengths = lengths(wrong, kI64)}), IndexError);
  }
}

// ---- Ranges of keys -----------------------------------------------------------------------------

Tensor i32_rows(const std::vector<std::vector<int32_t>>& rows) {
  const auto T = static_cast<int64_t>(rows[0].size());
  const Tensor x = raw::empty({static_cast<int64_t>(rows.size()), T}, kI32);
  for (size_t b = 0; b < rows.size(); ++b) {
    std::copy(rows[b].begin(), rows[b].end(), x.data_as<int32_t>() + static_cast<int64_t>(b) * T);
  }
  return x;
}

// Of documents of these lengths, one row of them a sample.
struct Bounds {
  Tensor starts, ends;
  explicit Bounds(const std::vector<std::vector<int32_t>>& lengths) {
    std::vector<std::vector<int32_t>> first(lengths.size()), last(lengths.size());
    for (size_t b = 0; b < lengths.size(); ++b) {
      for (const int32_t length : lengths[b]) {
        const auto at = static_cast<int32_t>(first[b].size());
        first[b].insert(first[b].end(), static_cast<size_t>(length), at);
        last[b].insert(last[b].end(), static_cast<size_t>(length), at + length);
      }
    }
    starts = i32_rows(first);
    ends = i32_rows(last);
  }
};

// ranges[b][t] by a function of (b, t).
template <class F>
Tensor bounds_of(int64_t B, int64_t T, F&& f) {
  std::vector<std::vector<int32_t>> rows(static_cast<size_t>(B));
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t t = 0; t < T; ++t) {
      rows[static_cast<size_t>(b)].push_back(static_cast<int32_t>(f(b, t)));
    }
  }
  return i32_rows(rows);
}

TEST(AttentionRanges, DocumentsMatchTheDefinition) {
  const Bounds bounds({{40, 1, 7, 66, 36}, {9, 32, 32, 64, 13}});
  for (DType dtype : kDTypes) {
    expect_attention({2, 2, 1, 150, 150, 8, 12}, dtype, {.causal = true, .starts = bounds.starts});
    expect_attention({2, 1, 1, 150, 150, 12, 8}, dtype,
                     {.starts = bounds.starts, .ends = bounds.ends});
    expect_attention({2, 1, 1, 150, 150, 8, 8}, dtype,
                     {.causal = true, .dropout = 0.3, .stream = {7, 9}, .starts = bounds.starts});
  }
}

TEST(AttentionRanges, WindowsPrefixesAndGapsMatchTheDefinition) {
  const int64_t B = 2, T = 131;
  const Tensor window =
      bounds_of(B, T, [](int64_t b, int64_t t) { return std::max<int64_t>(t - 40 * b - 8, 0); });
  const Tensor both_sides =
      bounds_of(B, T, [](int64_t, int64_t t) { return std::min<int64_t>(t + 20, 131); });
  const Tensor prefix = bounds_of(B, T, [](int64_t b, int64_t t) {
    return std::min<int64_t>(std::max<int64_t>(50 * b + 3, t + 1), 90);
  });
  // Queries 20 to 59 see nothing, and nobody sees keys 100 to 130.
  const Tensor from = bounds_of(B, T, [](int64_t, int64_t t) {
    return t >= 20 && t < 60 ? 70 : t < 20 ? 0 : 33;
  });
  const Tensor to = bounds_of(B, T, [](int64_t, int64_t t) {
    return t >= 20 && t < 60 ? 70 : t < 20 ? 9 : 100;
  });
  const Tensor all = bounds_of(B, T, [](int64_t, int64_t) { return 200; });
  const Tensor nothing = bounds_of(B, T, [](int64_t, int64_t) { return 5; });
  const Tensor rising =
      bounds_of(B, T, [](int64_t, int64_t t) { return std::clamp<int64_t>(t - 3, 0, 60); });
  for (DType dtype : kDTypes) {
    expect_attention({B, 2, 1, T, T, 8, 12}, dtype, {.causal = true, .starts = window});
    expect_attention({B, 1, 1, T, T, 8, 8}, dtype,
                     {.dropout = 0.3, .stream = {7, 9}, .starts = window, .ends = both_sides});
    expect_attention({B, 1, 1, T, 90, 8, 8}, dtype, {.ends = prefix});
    expect_attention({B, 1, 1, T, T, 8, 8}, dtype, {.starts = from, .ends = to});
    expect_attention({B, 1, 1, T, 200, 8, 8}, dtype, {.ends = all});
    expect_attention({B, 1, 1, T, T, 8, 8}, dtype, {.starts = nothing, .ends = nothing});
    expect_attention({B, 1, 1, T, 40, 8, 8}, dtype, {.causal = true, .starts = rising});
  }
}

TEST(AttentionRanges, FewQueriesMatchTheDefinition) {
  const auto of = [](int64_t T, auto&& f) { return bounds_of(2, T, f); };
  const Tensor from = of(5, [](int64_t b, int64_t t) { return 10 * t + 60 * b; });
  const Tensor to = of(5, [](int64_t, int64_t t) { return t == 2 ? 131 : 110 + t; });
  const Tensor none = of(5, [](int64_t, int64_t) { return 131; });
  const Tensor start = of(8, [](int64_t, int64_t t) { return t / 3 * 3; });
  for (DType dtype : kDTypes) {
    expect_attention({2, 6, 2, 5, 131, 20, 12}, dtype, {.starts = from, .ends = to});
    expect_attention({2, 4, 2, 5, 131, 16, 16}, dtype,
                     {.dropout = 0.3, .stream = {7, 9}, .starts = from, .ends = to});
    expect_attention({2, 2, 2, 5, 131, 16, 16}, dtype, {.starts = from, .ends = none});
    expect_attention({2, 2, 2, 5, 131, 16, 16}, dtype, {.starts = none, .ends = none});
    expect_attention({2, 6, 2, 8, 8, 16, 16}, dtype, {.causal = true, .starts = start});
  }
}

struct Attended {
  Tensor output, log_sums, query, key, value;  // gradients of the latter
  Attended(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, AttentionSpec spec) {
    spec.scale = 0.25;
    const AttentionResult result = attention(q, k, v, spec);
    output = result.output;
    log_sums = result.log_sums;
    query = raw::empty(q.shape(), q.dtype());
    key = raw::empty(k.shape(), k.dtype());
    value = raw::empty(v.shape(), v.dtype());
    attention_backward(g, q, k, v, output, log_sums, spec, query, key, value);
  }
};

// In every dtype a packed document has the bits of the document alone, forward and backward, and
// so they do not depend on what stands beside it.
TEST(AttentionRanges, ADocumentHasTheBitsOfTheDocumentAlone) {
  const std::vector<int32_t> lengths{33, 5, 64, 1, 100, 8, 39};
  const Bounds bounds({lengths});
  const Shape shape{1, 2, 250, 16};
  for (DType dtype : kDTypes) {
    for (const bool causal : {true, false}) {
      const Tensor q = random_tensor(shape, dtype, 1), k = random_tensor(shape, dtype, 2);
      const Tensor v = random_tensor(shape, dtype, 3), g = random_tensor(shape, dtype, 4);
      AttentionSpec spec{.causal = causal, .starts = bounds.starts};
      if (!causal) spec.ends = bounds.ends;
      const Attended packed(q, k, v, g, spec);
      int64_t at = 0;
      for (const int32_t length : lengths) {
        const auto part = [&](const Tensor& x) { return raw::narrow(x, 2, at, length); };
        const Attended alone(part(q), part(k), part(v), part(g), {.causal = causal});
        const std::pair<Tensor, Tensor> both[] = {{alone.output, part(packed.output)},
                                                  {alone.query, part(packed.query)},
                                                  {alone.key, part(packed.key)},
                                                  {alone.value, part(packed.value)}};
        for (const auto& [expected, found] : both) {
          ASSERT_EQ(found.to_vector(), expected.to_vector()) << found << " at " << at;
        }
        ASSERT_EQ(raw::narrow(packed.log_sums, 2, at, length).to_vector(),
                  alone.log_sums.to_vector());
        at += length;
      }
    }
  }
}

// What a tile that no query sees holds is not read: NaN there would come through 0 * NaN.
TEST(AttentionRanges, TilesThatNoQuerySeesAreSkipped) {
  const int64_t T = 320, kNan = 5;
  const Shape shape{1, 1, T, 16};
  const Tensor starts =
      bounds_of(1, T, [](int64_t, int64_t t) { return std::max<int64_t>(t - 20, 0); });
  for (DType dtype : kDTypes) {
    const Tensor q = random_tensor(shape, dtype, 1), k = random_tensor(shape, dtype, 2);
    const Tensor v = random_tensor(shape, dtype, 3), g = random_tensor(shape, dtype, 4);
    for (const Tensor& x : {q, k, v, g}) {
      dispatch_floating(dtype, "test", [&]<class N>() {
        for (int64_t e = 0; e < 16; ++e) x.data_as<N>()[kNan * 16 + e] = store<N>(NAN);
      });
    }
    const Attended run(q, k, v, g, {.causal = true, .starts = starts});
    for (const Tensor& x : {run.output, run.query, run.key, run.value}) {
      EXPECT_TRUE(std::isnan(at(x, 0, 0, kNan, 3)));
      for (int64_t t = 100; t < T; ++t) ASSERT_TRUE(std::isfinite(at(x, 0, 0, t, 3))) << t;
    }
  }
}

TEST(AttentionRanges, BoundsThatDoNotFitAreIndexErrors) {
  const Tensor x = random_tensor({2, 1, 3, 4}, kF32, 1);
  const std::pair<std::vector<std::vector<int32_t>>, std::vector<std::vector<int32_t>>> wrong[] = {
      {{{0, 0, 0}, {0, 2, 2}}, {}},                      // points ahead
      {{{0, -1, 0}, {0, 0, 0}}, {}},                     // before the first key
      {{{0, 0, 0}, {0, 0, 0}}, {{3, 3, 3}, {3, 4, 3}}},  // beyond the last
      {{{0, 0, 2}, {0, 0, 0}}, {{3, 3, 1}, {3, 3, 3}}},  // ends before it starts
      {{}, {{3, 3, 3}, {3, -1, 3}}},
  };
  for (const auto& [starts, ends] : wrong) {
    AttentionSpec spec{.causal = ends.empty()};
    if (!starts.empty()) spec.starts = i32_rows(starts);
    if (!ends.empty()) spec.ends = i32_rows(ends);
    EXPECT_THROW(attention(x, x, x, spec), IndexError);
    const Tensor log_sums = raw::empty({2, 1, 3}, kF32);
    EXPECT_THROW(attention_backward(x, x, x, x, x, log_sums, spec, x, x, x), IndexError);
  }
}

void expect_same_bits_for_any_thread_count(const Shape& queries) {
  const int before = num_threads();
  for (DType dtype : {kF32, kBF16}) {
    const Tensor q = random_tensor(queries, dtype, 1);
    const Tensor k = random_tensor(queries, dtype, 2);
    const AttentionSpec spec{.scale = 0.2, .causal = true};
    Tensor outputs[2], grads[2];
    for (int i = 0; i < 2; ++i) {
      set_num_threads(1 + 3 * i);
      const AttentionResult result = attention(q, k, k, spec);
      outputs[i] = result.output;
      grads[i] = raw::empty(q.shape(), dtype);
      const Tensor other = raw::empty(q.shape(), dtype), third = raw::empty(q.shape(), dtype);
      attention_backward(q, q, k, k, result.output, result.log_sums, spec, other, grads[i], third);
    }
    EXPECT_EQ(
        std::memcmp(outputs[0].data(), outputs[1].data(), static_cast<size_t>(outputs[0].nbytes())),
        0);
    EXPECT_EQ(std::memcmp(grads[0].data(), grads[1].data(), static_cast<size_t>(grads[0].nbytes())),
              0);
  }
  set_num_threads(before);
}
TEST(Attention, BitsDoNotDependOnTheThreadCount) {
  expect_same_bits_for_any_thread_count({2, 3, 65, 32});
  expect_same_bits_for_any_thread_count({2, 3, 5, 32});
}

// A power of two in front of the values, or an infinity among them, changes nothing else: however
// f32 products are made.
TEST(Attention, EnormousAndInfiniteValuesGoWhereTheyBelong) {
  const Shape shape{1, 2, 64, 32};
  const Tensor q = random_tensor(shape, kF32, 1), k = random_tensor(shape, kF32, 2);
  const AttentionSpec spec{.scale = 0.2, .causal = true};
  const Tensor plain_v = random_tensor(shape, kF32, 3), v = random_tensor(shape, kF32, 3);
  const Tensor plain = attention(q, k, plain_v, spec).output;
  for (int64_t i = 0; i < v.numel(); ++i) v.data_as<float>()[i] *= 0x1p100f;
  Tensor scaled = attention(q, k, v, spec).output;
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t t = 0; t < 64; ++t) {
      for (int64_t e = 0; e < 32; ++e) {
        ASSERT_NEAR(at(scaled, 0, h, t, e) * 0x1p-100, at(plain, 0, h, t, e), 1e-5);
      }
    }
  }
  for (int64_t i = 0; i < v.numel(); ++i) v.data_as<float>()[i] *= 0x1p-100f;
  v.data_as<float>()[40 * 32 + 5] = INFINITY;  // head 0, key 40
  scaled = attention(q, k, v, spec).output;
  for (int64_t h = 0; h < 2; ++h) {
    for (int64_t t = 0; t < 64; ++t) {
      for (int64_t e = 0; e < 32; ++e) {
        if (h == 0 && t >= 40 && e == 5) {
          EXPECT_EQ(at(scaled, 0, h, t, e), INFINITY) << t;
        } else if (h == 1 || e != 5 || t < 32) {  // a hidden key of the same block gives 0 * inf
          EXPECT_NEAR(at(scaled, 0, h, t, e), at(plain, 0, h, t, e), 1e-5) << h << t << e;
        }
      }
    }
  }
}

TEST(Attention, MetaTensorsGiveShapes) {
  const Tensor q = raw::empty({2, 3, 5, 8}, kBF16, kMeta);
  const AttentionResult result = attention(q, q, q, {});
  EXPECT_EQ(result.output.shape(), (Shape{2, 3, 5, 8}));
  EXPECT_TRUE(result.output.is_meta());
}

}  // namespace
}  // namespace tessera::kernels::test_attention
