// Attention and convolution on a GPU: own tiles over several blocks against the CPU, and the way to
// cuDNN, which on the emulation is a model that evaluates the graph it is given on the memory it is
// given.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <iostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/core/cuda/emulation/graph_model.h>
#include <tessera/core/cuda/libraries/attention_graph.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/kernels/attention/attention.h>

#include "on_emulation.h"

namespace tessera::test_cuda_attention {
namespace {

const Device kGpu = cuda(0);

struct Case {
  std::string name;
  int64_t B, H, Hk, T, S, E, Ev;
  DType dtype;
  bool causal = false;
  double dropout = 0;
};

struct Outcome {
  std::vector<double> output, query, key, value;
};

// [B, H, S, columns]: ones at (first + j, j).
Tensor identity(int64_t B, int64_t H, int64_t S, int64_t first, int64_t columns) {
  std::vector<double> values(static_cast<size_t>(S * columns), 0.0);
  for (int64_t j = 0; j < columns; ++j) values[static_cast<size_t>((first + j) * columns + j)] = 1;
  return expand(tensor(values, {S, columns}, kF32), {B, H, S, columns});
}

// What dropout by the library multiplies probabilities with: [B, H, T, S]. Equal scores and columns
// of the identity as values show it.
Tensor kept_by_library(const Case& c, const RandomStream& stream = {5, 7}) {
  constexpr int64_t kColumns = 4;
  const Tensor q = zeros({c.B, c.H, c.T, 16}, {.dtype = kBF16, .device = kGpu});
  const Tensor k = zeros({c.B, c.H, c.S, 16}, {.dtype = kBF16, .device = kGpu});
  AttentionOptions options{.dropout = c.dropout};
  options.stream = stream;
  TensorList columns;
  for (int64_t s = 0; s < c.S; s += kColumns) {
    const Tensor ones = identity(c.B, c.H, c.S, s, kColumns);
    const Tensor v = cat(TensorList{ones, ones}, 3).to(kBF16).to(kGpu);  // eight columns at least
    const Tensor y = scaled_dot_product_attention(q, k, v, options);
    columns.push_back(y.narrow(3, 0, kColumns).to(kCpu).to(kF32));
  }
  return mul(gt(cat(columns, 3), 0).to(kF32), 1 / (1 - c.dropout));
}

struct Ranges {
  Tensor starts = {}, ends = {};
};

// Forward and backward with a gradient that is dense, or as a sum over everything gives it. `kept`:
// dropout as kept_by_library() has it.
Outcome run(const Case& c, const Device& device, DType compute, bool dense_gradient,
            const Tensor& mask = {}, const Tensor& lengths = {}, const Tensor& kept = {},
            const Ranges& ranges = {}) {
  manual_seed(11);
  const auto leaf = [&](int64_t heads, int64_t rows, int64_t width) {
    // [B, rows, heads, width] in memory, as linear layers give it
    const Tensor x = randn({c.B, rows, heads, width}).to(c.dtype).to(compute).to(device);
    return x.transpose(1, 2).detach().set_requires_grad();
  };
  const Tensor q = leaf(c.H, c.T, c.E), k = leaf(c.Hk, c.S, c.E), v = leaf(c.Hk, c.S, c.Ev);
  const Tensor up = randn({c.B, c.H, c.T, c.Ev}).to(c.dtype).to(compute).to(device);
  AttentionOptions options{.dropout = c.dropout, .causal = c.causal, .enable_gqa = c.H != c.Hk};
  options.stream = RandomStream{5, 7};
  if (mask.defined()) options.mask = mask.to(device);
  if (lengths.defined()) options.lengths = lengths.to(device);
  if (ranges.starts.defined()) options.starts = ranges.starts.to(device);
  if (ranges.ends.defined()) options.ends = ranges.ends.to(device);
  if (kept.defined()) options.dropout = 0;
  const Tensor ones = kept.defined() ? identity(c.B, c.Hk, c.S, 0, c.S) : v;
  Tensor y = scaled_dot_product_attention(q, k, ones, options);
  if (kept.defined()) y = matmul(mul(y, kept), v);
  dense_gradient ? backward(sum(mul(y, up))) : backward(sum(y));
  return {y.to_vector(), q.grad().to_vector(), k.grad().to_vector(), v.grad().to_vector()};
}

void expect_near(const std::vector<double>& got, const std::vector<double>& expected, double bound,
                 const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  double largest = 0, furthest = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    largest = std::fmax(largest, std::fabs(expected[i]));
    const double away = std::fabs(got[i] - expected[i]);
    furthest = away <= furthest ? furthest : away;  // NaN stays
  }
  EXPECT_LE(furthest, bound * std::fmax(1.0, largest)) << what;
}
void expect_near(const Outcome& got, const Outcome& expected, double bound,
                 const std::string& what) {
  expect_near(got.output, expected.output, bound, what + ": output");
  expect_near(got.query, expected.query, bound, what + ": grad_query");
  expect_near(got.key, expected.key, bound, what + ": grad_key");
  expect_near(got.value, expected.value, bound, what + ": grad_value");
}

// Without the library. Says which of the own kernels a test ran: those on tensor cores, or the
// others.
template <bool kTensorCores>
class OwnKernels : public testing::Test {
 protected:
  OwnKernels() { Context::current().slot<kernels::AttentionPolicy>().library = false; }
  void TearDown() override {
    if (!gpu::on_emulation()) return;
    const std::vector<int64_t> after = launches();
    EXPECT_EQ(after[0] > before_[0], kTensorCores) << "forward on tensor cores";
    EXPECT_EQ(after[1] > before_[1], kTensorCores) << "backward on tensor cores";
    EXPECT_EQ(after[2] > before_[2], !kTensorCores) << "forward by tiles";
  }

 private:
  static std::vector<int64_t> launches() {
    if (!gpu::on_emulation()) return {};
    using gpu::emulation::launches_of;
    return {launches_of("attention_tensor"), launches_of("attention_backward_tensor"),
            launches_of("attention")};
  }
  Context context_;
  ContextGuard guard_{context_};
  std::vector<int64_t> before_ = launches();
};
using AttentionTiles = OwnKernels<false>;
using AttentionTensorCores = OwnKernels<true>;

// ---- Own tiles ----------------------------------------------------------------------------------

TEST_F(AttentionTiles, HaveTheValuesOfTheCpuOverSeveralTilesAndPanels) {
  for (const Case& c : {Case{"causal", 1, 2, 2, 130, 130, 16, 16, kF32, true},
                        Case{"cross", 2, 2, 2, 70, 150, 40, 24, kF32},
                        Case{"grouped", 1, 4, 2, 65, 65, 32, 32, kF32, true},
                        Case{"wide", 1, 1, 1, 66, 80, 136, 200, kF32},
                        Case{"odd widths", 1, 2, 1, 67, 66, 9, 5, kF32, true},
                        Case{"more keys than queries", 1, 1, 1, 3, 140, 16, 16, kF32, true},
                        Case{"dropout", 1, 2, 2, 70, 70, 16, 16, kF32, true, 0.3},
                        Case{"f64", 1, 1, 1, 70, 70, 72, 72, kF64, true}}) {
    const Outcome expected = run(c, kCpu, c.dtype, true);
    // Sums of up to 150 numbers in another order.
    expect_near(run(c, kGpu, c.dtype, true), expected, 64 * epsilon_of(c.dtype), c.name);
  }
}

TEST_F(AttentionTiles, MasksHideKeysAndAddToScoresAndRowsWithoutKeysAreZero) {
  const Case c{"mask", 1, 2, 2, 70, 90, 16, 16, kF32};
  std::vector<double> visible(70 * 90);
  for (size_t i = 0; i < visible.size(); ++i) {
    visible[i] = i / 90 == 5 ? 0 : static_cast<double>((i * 7 + i / 90) % 3 != 0);
  }
  const Tensor mask = tensor(visible, {70, 90}, kBool);
  const Outcome got = run(c, kGpu, kF32, true, mask);
  expect_near(got, run(c, kCpu, kF32, true, mask), 64 * epsilon_of(kF32), "bool");
  for (size_t e = 0; e < 16; ++e) EXPECT_EQ(got.output[5 * 16 + e], 0);
  const Tensor added = tensor(visible, {70, 90}, kF32);
  expect_near(run(c, kGpu, kF32, true, added), run(c, kCpu, kF32, true, added),
              64 * epsilon_of(kF32), "added");
}

TEST_F(AttentionTiles, PassOverThePaddingOfASample) {
  for (const Case& c : {Case{"padded", 3, 1, 1, 20, 150, 8, 12, kF32},
                        Case{"causal, grouped", 3, 2, 1, 70, 70, 8, 8, kF32, true},
                        Case{"dropout", 3, 1, 1, 9, 66, 8, 8, kF32, false, 0.3}}) {
    const auto S = static_cast<double>(c.S);
    const Tensor lengths = tensor(std::vector<double>{5, S, 65}, {3}, kI64);
    expect_near(run(c, kGpu, c.dtype, true, {}, lengths), run(c, kCpu, c.dtype, true, {}, lengths),
                64 * epsilon_of(c.dtype), c.name);
  }
}

// [B, T] by a function of sample and query.
template <class F>
Tensor bounds_of(const Case& c, F&& f) {
  std::vector<double> values;
  for (int64_t b = 0; b < c.B; ++b) {
    for (int64_t t = 0; t < c.T; ++t) values.push_back(static_cast<double>(f(b, t)));
  }
  return tensor(values, {c.B, c.T}, kI32);
}

struct RangedCase {
  Case c;
  Ranges ranges;
};
// Documents, windows, a prefix, and queries without keys; tiles in which some see nothing, and such
// as nobody looks into.
std::vector<RangedCase> ranged_cases(DType dtype) {
  std::vector<RangedCase> result;
  const std::vector<int64_t> edges{0, 40, 41, 48, 130, 190};
  const auto document = [&edges](int64_t t) {
    return std::upper_bound(edges.begin(), edges.end(), t) - edges.begin() - 1;
  };
  const auto first = [&](int64_t b, int64_t t) {
    return b == 0 ? edges[document(t)] : t / 64 * 64;
  };
  const auto last = [&](int64_t b, int64_t t) {
    return b == 0 ? edges[document(t) + 1] : std::min<int64_t>(t / 64 * 64 + 64, 190);
  };
  Case c{"causal documents", 2, 2, 1, 190, 190, 16, 16, dtype, true};
  result.push_back({c, {bounds_of(c, first), {}}});
  c = {"documents", 2, 1, 1, 190, 190, 16, 8, dtype};
  result.push_back({c, {bounds_of(c, first), bounds_of(c, last)}});
  c = {"a window, dropout", 1, 2, 2, 200, 200, 16, 16, dtype, true, 0.3};
  result.push_back(
      {c, {bounds_of(c, [](int64_t, int64_t t) { return std::max<int64_t>(t - 9, 0); }), {}}});
  c = {"a prefix", 2, 1, 1, 70, 150, 16, 16, dtype};
  result.push_back({c, {{}, bounds_of(c, [](int64_t b, int64_t t) { return 60 * b + t + 1; })}});
  c = {"nothing for some", 1, 1, 1, 140, 260, 16, 16, dtype};
  const auto is_blind = [](int64_t t) { return t < 64 || (t >= 70 && t < 80); };
  result.push_back(
      {c,
       {bounds_of(c, [&](int64_t, int64_t t) { return is_blind(t) ? 7 : 130; }),
        bounds_of(c, [&](int64_t, int64_t t) { return is_blind(t) ? 7 : 131 + t / 2; })}});
  c = {"fewer keys than queries", 1, 1, 1, 100, 66, 16, 16, dtype, true};
  result.push_back(
      {c,
       {bounds_of(c, [](int64_t, int64_t t) { return std::clamp<int64_t>(t - 5, 0, 66); }), {}}});
  c = {"one query", 3, 2, 1, 1, 90, 16, 16, dtype};
  result.push_back({c,
                    {bounds_of(c, [](int64_t b, int64_t) { return 30 * b; }),
                     bounds_of(c, [](int64_t b, int64_t) { return 30 * b + 29; })}});
  return result;
}

TEST_F(AttentionTiles, SeeTheKeysFromStartsToEnds) {
  for (const DType dtype : {kF32, kF64}) {
    for (const auto& [c, ranges] : ranged_cases(dtype)) {
      expect_near(run(c, kGpu, dtype, true, {}, {}, {}, ranges),
                  run(c, kCpu, dtype, true, {}, {}, {}, ranges), 64 * epsilon_of(dtype), c.name);
    }
  }
}

// What a tile holds that no query of another sees is not read, nor are queries that do not see a
// tile of keys: NaN would come through 0 * NaN. It spoils its tile and the next, and what these see.
void expect_that_unseen_tiles_are_skipped(DType dtype) {
  constexpr int64_t kT = 320, kNan = 5;
  const Tensor place = arange(0, kT, 1, kI64);
  const auto bounds = [&](const Tensor& keys) {
    return clamp(keys, 0, kT).to(kI32).view({1, kT}).to(kGpu);
  };
  for (const bool causal : {true, false}) {
    const auto leaf = [&](uint64_t stream) {
      Tensor x = randn({1, 1, kT, 16}, {}, RandomStream{3, stream});
      x.narrow(2, kNan, 1).fill_(NAN);
      return x.to(dtype).to(kGpu).set_requires_grad();
    };
    const Tensor q = leaf(1), k = leaf(2), v = leaf(3), up = leaf(4).detach();
    AttentionOptions options{.starts = bounds(sub(place, 20))};
    if (!causal) options.ends = bounds(add(place, 20));
    const Tensor y = scaled_dot_product_attention(q, k, v, options);
    backward(sum(mul(y, up)));
    for (const Tensor& x : {y.detach(), q.grad(), k.grad(), v.grad()}) {
      const Tensor by_row = isfinite(x.to(kCpu).to(kF32)).all(-1).view({kT});
      EXPECT_FALSE(by_row[kNan].item<bool>());
      EXPECT_TRUE(all(by_row.narrow(0, 192, kT - 192)).item<bool>()) << causal;
    }
  }
}
TEST_F(AttentionTiles, SkipTilesThatNoQuerySees) { expect_that_unseen_tiles_are_skipped(kF32); }

// One row of memory, which all keys share.
TEST(AttentionRows, ThatNoNumberOf32BitsCountsAreRefused) {
  const Tensor q = zeros({1, 1, 1, 8}, {.device = kGpu});
  for (const int64_t rows : {int64_t{1} << 31, (int64_t{1} << 31) - 64}) {
    EXPECT_THROW(
        scaled_dot_product_attention(q, expand(q, {1, 1, rows, 8}), expand(q, {1, 1, rows, 8})),
        UnsupportedError);
  }
}

TEST_F(AttentionTiles, TakeHeadsOf16BitsThatAreWiderThanTensorCoresDo) {
  for (const Case& c : {Case{"wide values", 1, 1, 1, 9, 70, 16, 136, kBF16},
                        Case{"wide keys", 1, 1, 1, 66, 9, 136, 16, kF16, true}}) {
    expect_near(run(c, kGpu, c.dtype, true), run(c, kCpu, kF32, true), 4 * epsilon_of(c.dtype),
                c.name);
  }
}

void expect_place_of_the_cpu(DType dtype, double bound) {
  const kernels::AttentionSpec spec{
      .scale = 0.3,
      .dropout = 0.4,
      .stream = {7, 9},
      .place = {.batch = 1, .head = 2, .query = 3, .heads = 8, .queries = 99}};
  const auto outcome = [&](const Device& device, DType compute) -> Outcome {
    const auto numbers = [&](int64_t rows, uint64_t stream) {
      return randn({2, 2, rows, 16}, {}, RandomStream{3, stream}).to(dtype).to(compute).to(device);
    };
    const Tensor q = numbers(66, 1), k = numbers(70, 2), v = numbers(70, 3), dy = numbers(66, 4);
    const auto [y, log_sums] = kernels::attention(q, k, v, spec);
    const Tensor dq = empty_like(q), dk = empty_like(k), dv = empty_like(v);
    kernels::attention_backward(dy, q, k, v, y, log_sums, spec, dq, dk, dv);
    return {y.to_vector(), dq.to_vector(), dk.to_vector(), dv.to_vector()};
  };
  expect_near(outcome(kGpu, dtype), outcome(kCpu, kF32), bound, "a part");
}

TEST_F(AttentionTiles, DrawDropoutByThePlaceOfAPart) { expect_place_of_the_cpu(kF32, 1e-5); }

// ---- Tensor cores -------------------------------------------------------------------------------

TEST_F(AttentionTensorCores, HaveTheValuesOfTheCpuOverSeveralTilesAndWidths) {
  const Tensor lengths = tensor({5, 70}, kI64);
  for (const Case& c : {Case{"causal", 1, 1, 1, 130, 130, 16, 16, kBF16, true},
                        Case{"cross, widths of no vectors", 2, 1, 1, 20, 70, 17, 9, kF16},
                        Case{"grouped", 1, 4, 2, 65, 65, 32, 24, kF16, true},
                        Case{"wide", 1, 1, 1, 66, 80, 72, 128, kBF16},
                        Case{"lengths", 2, 1, 1, 20, 70, 16, 16, kBF16},
                        Case{"dropout", 1, 2, 2, 20, 70, 16, 16, kBF16, true, 0.3},
                        Case{"dropout, odd rows", 1, 1, 1, 66, 131, 8, 8, kF16, false, 0.3}}) {
    const Tensor of_samples = c.name == "lengths" ? lengths : Tensor();
    const Outcome expected = run(c, kCpu, kF32, true, {}, of_samples);
    // Probabilities, gradients of scores and results are rounded once each.
    expect_near(run(c, kGpu, c.dtype, true, {}, of_samples), expected, 4 * epsilon_of(c.dtype),
                c.name);
  }
}

TEST_F(AttentionTensorCores, SeeTheKeysFromStartsToEnds) {
  for (const DType dtype : {kBF16, kF16}) {
    for (const auto& [c, ranges] : ranged_cases(dtype)) {
      expect_near(run(c, kGpu, dtype, true, {}, {}, {}, ranges),
                  run(c, kCpu, kF32, true, {}, {}, {}, ranges), 4 * epsilon_of(dtype), c.name);
    }
  }
}

TEST_F(AttentionTensorCores, SkipTilesThatNoQuerySees) {
  expect_that_unseen_tiles_are_skipped(kBF16);
}

TEST_F(AttentionTensorCores, DrawDropoutByThePlaceOfAPart) {
  expect_place_of_the_cpu(kBF16, 4 * epsilon_of(kBF16));
}

TEST_F(AttentionTensorCores, MasksHideKeysAndAddToScoresAndRowsWithoutKeysAreZero) {
  const Case c{"mask", 1, 2, 2, 20, 90, 16, 16, kBF16};
  std::vector<double> visible(20 * 90);
  for (size_t i = 0; i < visible.size(); ++i) {
    visible[i] = i / 90 == 5 ? 0 : static_cast<double>((i * 7 + i / 90) % 3 != 0);
  }
  for (const DType dtype : {kBool, kF32}) {
    const Tensor mask = tensor(visible, {20, 90}, dtype);
    const Outcome got = run(c, kGpu, kBF16, true, mask);
    expect_near(got, run(c, kCpu, kF32, true, mask), 4 * epsilon_of(kBF16), mask.describe());
    if (dtype != kBool) continue;
    for (size_t e = 0; e < 16; ++e) EXPECT_EQ(got.output[5 * 16 + e], 0);
  }
}

// ---- The library --------------------------------------------------------------------------------

class AttentionLibrary : public testing::Test {
 protected:
  AttentionLibrary() { model().enabled = true; }
  static gpu::emulation::GraphModel& model() {
    return Context::current().slot<gpu::emulation::GraphModel>();
  }
  static kernels::AttentionPolicy& policy() {
    return Context::current().slot<kernels::AttentionPolicy>();
  }
  // What the library's result is held against.
  static Outcome expected_of(const Case& c, bool dense, const Tensor& mask = {},
                             const Tensor& lengths = {}) {
    const Tensor kept = c.dropout > 0 ? kept_by_library(c) : Tensor();
    model().ran.clear();
    return run(c, kCpu, kF32, dense, mask, lengths, kept);
  }
  // That the model was asked for these: "forward backward". Nobody sees it on a GPU.
  static void expect_ran(const std::string& expected, const std::string& what = {}) {
    if (gpu::on_emulation()) {
      EXPECT_EQ(ran(), expected) << what;
    }
  }
  // That the key of what it ran as number `index` has this part.
  static void expect_in_key(size_t index, const std::string& part) {
    if (!gpu::on_emulation()) return;
    ASSERT_LT(index, model().ran.size());
    EXPECT_NE(model().ran[index].find(part), std::string::npos) << model().ran[index];
  }
  static std::string ran() {
    std::string result;
    for (const std::string& key : model().ran) {
      if (!result.empty()) result += " ";
      const size_t begin = key.find(' ') + 1;
      result += key.substr(begin, key.find(' ', begin) - begin);
    }
    model().ran.clear();
    return result;
  }

 private:
  Context context_;
  ContextGuard guard_{context_};
};

// bf16 in and out, with probabilities rounded to it on the way.
constexpr double kBound = 0.03;

TEST_F(AttentionLibrary, IsHandedWhatTheOpMeans) {
  for (const Case& c : {Case{"full", 2, 3, 3, 20, 36, 16, 24, kBF16},
                        Case{"causal", 2, 2, 2, 40, 40, 16, 16, kBF16, true},
                        Case{"more keys", 1, 2, 2, 12, 40, 16, 16, kF16, true},
                        Case{"grouped", 2, 4, 2, 24, 24, 16, 8, kBF16, true},
                        Case{"dropout", 1, 2, 2, 32, 32, 16, 16, kBF16, true, 0.25},
                        Case{"one sample and head", 1, 1, 1, 16, 16, 8, 8, kF16}}) {
    for (const bool dense : {true, false}) {
      const Outcome expected = expected_of(c, dense);
      expect_near(run(c, kGpu, c.dtype, dense), expected, kBound, c.name);
      expect_ran("forward backward", c.name);
    }
  }
}

TEST_F(AttentionLibrary, WritesGradientsDirectlyInTheDeterministicForm) {
  policy().deterministic = true;
  const Case c{"deterministic", 2, 2, 2, 24, 24, 16, 16, kBF16, true};
  expect_near(run(c, kGpu, kBF16, true), run(c, kCpu, kF32, true), kBound, c.name);
  expect_in_key(1, "deterministic");
  expect_ran("forward backward");
}

TEST_F(AttentionLibrary, ReadsAndWritesThePackedLayoutInPlace) {
  const auto packed = [](const Device& device, DType dtype) {
    manual_seed(3);
    const Tensor qkv = randn({2, 24, 3, 2, 16}).to(kBF16).to(dtype).to(device).set_requires_grad();
    const Tensor up = randn({2, 24, 32}).to(kBF16).to(dtype).to(device);
    const Tensor y = packed_attention(qkv, {.causal = true});
    backward(sum(mul(y, up)));
    return std::pair(y.to_vector(), qkv.grad().to_vector());
  };
  const auto expected = packed(kCpu, kF32), got = packed(kGpu, kBF16);
  expect_near(got.first, expected.first, kBound, "output");
  expect_near(got.second, expected.second, kBound, "gradient");
  // Strides of 3 * 2 * 16 from row to row, both ways.
  expect_in_key(0, " 2304,16,96 2304,16,96 2304,16,96 768,16,32");
  expect_in_key(1, " 768,16,32 2304,16,96 2304,16,96 2304,16,96");
  expect_ran("forward backward");
}

TEST_F(AttentionLibrary, IsNotAskedForWhatItDoesNotServe) {
  TS_NEEDS_EMULATION("notes graphs");
  const auto asked = [&](const Case& c, const Tensor& mask = {}) {
    const Outcome got = run(c, kGpu, c.dtype, true, mask);
    const std::string asked_for = ran();
    const bool drawn_by_library = c.dropout > 0 && !asked_for.empty();
    expect_near(got, drawn_by_library ? expected_of(c, true, mask) : run(c, kCpu, kF32, true, mask),
                kBound, c.name);
    return asked_for;
  };
  const Case good{"good", 1, 2, 2, 16, 16, 16, 16, kBF16, true};
  Case c = good;
  EXPECT_EQ(asked(c), "forward backward");
  c.E = c.Ev = 12;
  EXPECT_EQ(asked(c), "");
  c.E = c.Ev = 264;
  EXPECT_EQ(asked(c), "");
  c = good;
  c.dtype = kF32;
  EXPECT_EQ(asked(c), "");
  c = good;
  c.dropout = 0.2;
  EXPECT_EQ(asked(c), "forward backward");
  policy().equal_dropout = true;
  EXPECT_EQ(asked(c), "");
  EXPECT_EQ(asked(good), "forward backward");
  policy().library = false;
  EXPECT_EQ(asked(good), "");
  policy().library = true;
  model().version = 91001;
  EXPECT_EQ(asked(good), "");
  model().version = 91500;  // backward wants keys in multiples of 128
  EXPECT_EQ(asked(good), "forward");
  c = good;
  c.dropout = 0.2;
  EXPECT_EQ(asked(c), "");  // which must be drawn by one hand
  model().enabled = false;
  EXPECT_EQ(asked(good), "");
  EXPECT_NE(gpu::graph_library().find("own kernels"), std::string::npos);
}

TEST_F(AttentionLibrary, HidesWhatLiesBeyondTheLengthsOfASample) {
  for (const Case& c : {Case{"padded", 3, 2, 2, 20, 20, 16, 24, kBF16},
                        Case{"causal", 3, 2, 2, 24, 24, 16, 16, kF16, true},
                        Case{"cross, grouped", 3, 4, 2, 12, 40, 8, 8, kBF16},
                        Case{"dropout", 3, 2, 2, 16, 16, 16, 16, kBF16, false, 0.25}}) {
    for (const DType dtype : {kI64, kI32}) {
      const auto S = static_cast<double>(c.S);
      const Tensor lengths = tensor(std::vector<double>{S, 5, 1}, {3}, dtype);
      const Outcome expected = expected_of(c, true, {}, lengths);
      // The model leaves NaN in gradients of keys that are not there.
      expect_near(run(c, kGpu, c.dtype, true, {}, lengths), expected, kBound, c.name);
      for (const size_t index : {0, 1}) expect_in_key(index, " lengths");
      expect_ran("forward backward", c.name);
    }
  }
}

// Of [B, H, T, S] = [2, 2, 20, 36], each dimension or 1 for it.
Tensor some_mask(const Shape& shape, DType dtype) {
  std::vector<double> values;
  for (int64_t i = 0; i < numel_of(shape); ++i) {
    const bool seen = (i * 7 + i / 36) % 3 != 0;
    values.push_back(dtype == kBool ? seen : seen ? static_cast<double>(i % 5) - 2 : -INFINITY);
  }
  return tensor(values, shape, dtype);
}

TEST_F(AttentionLibrary, GetsMasksAsWhatIsAddedToTheScores) {
  Case c{"mask", 2, 2, 2, 20, 36, 16, 24, kBF16};
  for (const auto& [shape, dtype] :
       std::initializer_list<std::pair<Shape, DType>>{{{20, 36}, kBool},
                                                      {{2, 1, 1, 36}, kF32},
                                                      {{2, 2, 20, 36}, kBF16},
                                                      {{1, 2, 20, 36}, kF16},
                                                      {{2, 1, 20, 36}, kF64}}) {
    const Tensor mask = some_mask(shape, dtype);
    expect_near(run(c, kGpu, kBF16, true, mask), run(c, kCpu, kF32, true, mask), kBound,
                mask.describe());
    expect_in_key(1, " bias f32 ");
    expect_ran("forward backward");
  }
  run(c, kGpu, kBF16, true, some_mask({2, 1, 1, 36}, kBool));
  expect_in_key(0, " bias f32 2,1,1 36,36,36");
  expect_in_key(1, " bias f32 2,1,20 720,720,36");  // backward takes no row for all
  model().ran.clear();
  c.dropout = 0.25;
  const Tensor mask = some_mask({20, 36}, kBool);
  const Outcome expected = expected_of(c, true, mask);
  expect_near(run(c, kGpu, kBF16, true, mask), expected, kBound, "dropout");
  expect_ran("forward backward");
}

std::string bits_in_hexadecimal(const std::vector<double>& mask) {
  std::string text;
  for (size_t i = 0; i + 4 <= mask.size(); i += 4) {
    int digit = 0;
    for (size_t j = 0; j < 4; ++j) digit = 2 * digit + (mask[i + j] != 0 ? 1 : 0);
    text += "0123456789abcdef"[digit];
  }
  return text;
}

// Two attentions of one model have neighbouring streams.
// ---- Plans --------------------------------------------------------------------------------------

TEST(AttentionLengths, GoUpToMultiplesOf64AndBeyondToThreeSignificantBits) {
  int64_t last = 0, classes = 0;
  for (int64_t length = 1; length <= 1 << 16; ++length) {
    const int64_t up = gpu::attention_length(length);
    EXPECT_TRUE(up >= length && (up - length < 64 || 4 * (up - length) <= length)) << length;
    EXPECT_EQ(gpu::attention_length(up), up);
    EXPECT_GE(up, last);
    classes += up != last;
    last = up;
  }
  EXPECT_EQ(classes, 8 + 4 * 7);
}

// Once the lengths of a form have no plans of their own any more, values and gradients are still
// those of the CPU, in each form that hides what is behind.
TEST_F(AttentionLibrary, LengthsThatAreRoundedHaveTheValuesOfTheirOwn) {
  const auto odd_mask = [](int64_t T, int64_t S, DType dtype) {
    const Tensor far = gt(randn({2, 1, T, S}), 1.0);
    return dtype == kBool ? logical_not(far) : mul(far.to(kF32), -3.0);
  };
  for (Case c :
       {Case{"causal", 2, 3, 3, 0, 0, 40, 40, kBF16, true},
        Case{"full", 2, 3, 3, 0, 0, 40, 48, kBF16},
        Case{"grouped", 2, 4, 2, 0, 0, 40, 40, kF16, true},
        Case{"more keys", 2, 3, 3, 0, 7, 48, 40, kBF16, true},
        Case{"fewer keys", 2, 3, 3, 0, -2, 48, 48, kBF16, true},
        Case{"lengths", 2, 3, 3, 0, 0, 48, 56, kBF16}, Case{"mask", 2, 3, 3, 0, 0, 56, 40, kBF16},
        Case{"added mask", 2, 3, 3, 0, 0, 56, 48, kBF16}}) {
    const int64_t more_keys = c.S;
    for (int64_t T = 10; T < 16; ++T) {
      manual_seed(static_cast<uint64_t>(T));
      c.T = T;
      c.S = T + more_keys;
      const Tensor mask = c.name == "mask"         ? odd_mask(c.T, c.S, kBool)
                          : c.name == "added mask" ? odd_mask(c.T, c.S, kF32)
                                                   : Tensor();
      const Tensor lengths =
          c.name == "lengths"
              ? tensor(std::vector<double>{static_cast<double>(T - 3), static_cast<double>(T)}, {2},
                       kI64)
              : Tensor();
      const std::string what = c.name + " " + std::to_string(T);
      expect_near(run(c, kGpu, c.dtype, T % 2 == 0, mask, lengths),
                  run(c, kCpu, kF32, T % 2 == 0, mask, lengths), kBound, what);
      if (T >= 10 + gpu::kOwnLengths) {
        expect_in_key(0, " T64 S64 ");
        expect_in_key(1, " T64 S64 ");
      }
      expect_ran("forward backward", what);
    }
  }
}

TEST_F(AttentionLibrary, RoundedLengthsDrawTheSameDropoutInBothDirections) {
  TS_NEEDS_EMULATION("notes graphs");
  Case c{"dropout", 2, 5, 5, 0, 0, 64, 64, kBF16, false, 0.25};
  for (int64_t T = 12; T < 36; T += 4) {
    c.T = c.S = T;
    const Outcome expected = expected_of(c, true);
    expect_near(run(c, kGpu, c.dtype, true), expected, kBound, c.name);
    expect_ran("forward backward", c.name);
  }
}

// What runs: a plan each.
TEST_F(AttentionLibrary, GenerationAndBatchesOfAnyLengthMakeABoundedNumberOfPlans) {
  TS_NEEDS_EMULATION("notes graphs");
  const NoGradGuard none;
  const auto plans = [&] {
    const std::set<std::string> different(model().ran.begin(), model().ran.end());
    model().ran.clear();
    return different.size();
  };
  const auto heads = [](int64_t rows) {
    return zeros({1, 2, rows, 72}, {.dtype = kBF16, .device = kGpu});
  };
  for (int64_t S = 1; S <= 128; ++S) {  // 128 tokens behind a cache
    scaled_dot_product_attention(heads(1), heads(S), heads(S));
  }
  EXPECT_EQ(plans(), 0U);
  for (int64_t T = 2; T <= 128; ++T) {  // without one
    scaled_dot_product_attention(heads(T), heads(T), heads(T), {.causal = true});
  }
  EXPECT_EQ(plans(), 4U + 2U + 2U);   // own ones; 64 and 128, copied and in place
  for (int64_t i = 0; i < 20; ++i) {  // 20 batches of BERT
    const int64_t T = 9 + 13 * i;
    AttentionOptions options;
    options.lengths = full({1}, T - 2, {.dtype = kI64, .device = kGpu});
    scaled_dot_product_attention(heads(T), heads(T), heads(T), options);
  }
  EXPECT_EQ(plans(), 4U + 4U + 1U);  // own ones; 64, 128, 192 and 256, and that in place
}

TEST_F(AttentionLibrary, DropoutOfAdjacentStreamsDoesNotCorrelate) {
  const Case c{"dropout", 1, 2, 2, 64, 64, 16, 16, kBF16, false, 0.5};
  const auto kept = [&](uint64_t stream) { return kept_by_library(c, {5, stream}).to_vector(); };
  const std::vector<double> first = kept(100);
  EXPECT_EQ(kept(100), first);
  constexpr int64_t kMostShift = 64;
  for (uint64_t ahead = 1; ahead <= 3; ++ahead) {
    const std::vector<double> other = kept(100 + ahead);
    const auto size = static_cast<int64_t>(first.size());
    for (int64_t shift = -kMostShift; shift <= kMostShift; ++shift) {
      int64_t equal = 0, pairs = 0;
      for (int64_t i = std::max<int64_t>(0, -shift); i < std::min(size, size - shift); ++i) {
        equal += first[static_cast<size_t>(i)] == other[static_cast<size_t>(i + shift)];
        ++pairs;
      }
      // Half of them by chance, with a deviation of sqrt(pairs) / 2; twice that of cuDNN 9.19, which draws
      // one mask for the rows t, t + 2, t + 4 and t + 6 of every eight (seen on an H200).
      const double away = std::fabs(2.0 * static_cast<double>(equal) - static_cast<double>(pairs));
      EXPECT_LT(away, (gpu::on_emulation() ? 5 : 10) * std::sqrt(static_cast<double>(pairs)))
          << "streams " << ahead << " apart, shifted by " << shift;
    }
    if (testing::Test::HasFailure()) {
      std::cout << "stream 100: " << bits_in_hexadecimal(first) << "\nstream " << 100 + ahead
                << ": " << bits_in_hexadecimal(other) << "\n";
    }
  }
}

TEST_F(AttentionLibrary, RowsWithoutKeysAreZerosAndHaveNoGradients) {
  const Case c{"hidden rows", 2, 2, 2, 20, 36, 16, 16, kBF16};
  for (const double hidden : {0.0, -HUGE_VAL}) {
    const DType dtype = hidden == 0 ? kBool : kF32;
    std::vector<double> values(20 * 36, hidden == 0 ? 1 : 0.5);
    for (size_t s = 0; s < 36; ++s) values[7 * 36 + s] = hidden;
    for (size_t s = 0; s < 35; ++s) values[8 * 36 + s] = hidden;  // one key is left
    const Tensor mask = tensor(values, {20, 36}, dtype);
    const Outcome got = run(c, kGpu, kBF16, true, mask);
    expect_ran("forward backward");
    expect_near(got, run(c, kCpu, kF32, true, mask), kBound, mask.describe());
    for (size_t e = 0; e < 16; ++e) {
      EXPECT_EQ(got.output[7 * 16 + e], 0);
      EXPECT_EQ(got.query[7 * 16 + e], 0);
    }
  }
  // A whole sample, as masks of padding say it: nothing comes of it or goes to it.
  std::vector<double> sample(2 * 36, 1);
  std::fill(sample.begin(), sample.begin() + 36, 0);
  const Tensor mask = tensor(sample, {2, 1, 1, 36}, kBool);
  expect_near(run(c, kGpu, kBF16, true, mask), run(c, kCpu, kF32, true, mask), kBound, "sample");
  expect_ran("forward backward");
}

TEST_F(AttentionLibrary, NumbersAsLargeAsThoseThatHideAreStillCompared) {
  const Case c{"lowest", 1, 1, 1, 8, 8, 8, 8, kBF16};
  // Some libraries hide with the lowest number: a row of it and -infinity sees what has the number.
  std::vector<double> values(64, 0.0);
  for (size_t s = 0; s < 8; ++s) values[3 * 8 + s] = s % 2 == 0 ? -3e38 : -INFINITY;
  const Outcome got = run(c, kGpu, kBF16, true, tensor(values, {8, 8}, kF32));
  expect_ran("forward backward");
  for (size_t s = 0; s < 8; ++s) values[3 * 8 + s] = s % 2 == 0 ? 0.0 : -INFINITY;
  expect_near(got, run(c, kCpu, kF32, true, tensor(values, {8, 8}, kF32)), kBound, c.name);
}

TEST_F(AttentionLibrary, LengthsThatDoNotFitAreErrorsWhereTheDeviceIsWaitedFor) {
  const Case c{"wrong", 2, 1, 1, 8, 8, 8, 8, kBF16};
  for (const bool library : {true, false}) {
    policy().library = library;
    for (const double wrong : {0.0, 9.0, -3.0}) {
      const Tensor lengths = tensor(std::vector<double>{8, wrong}, {2}, kI64);
      EXPECT_THROW(run(c, kGpu, kBF16, true, {}, lengths), IndexError) << wrong;
      EXPECT_NO_THROW(gpu::synchronize(0)) << "told once";
    }
  }
}

TEST_F(AttentionLibrary, IsNotAskedForRangesOfKeys) {
  for (const auto& [c, ranges] : ranged_cases(kBF16)) {
    expect_near(run(c, kGpu, kBF16, true, {}, {}, {}, ranges),
                run(c, kCpu, kF32, true, {}, {}, {}, ranges), 4 * epsilon_of(kBF16), c.name);
    expect_ran("", c.name);
  }
}

TEST_F(AttentionLibrary, RangesThatDoNotFitAreErrorsWhereTheDeviceIsWaitedFor) {
  const Case c{"wrong", 2, 1, 1, 3, 3, 8, 8, kBF16};
  const auto rows = [](const std::vector<double>& values) {
    return values.empty() ? Tensor() : tensor(values, {2, 3}, kI32);
  };
  const std::pair<std::vector<double>, std::vector<double>> wrong[] = {
      {{0, 0, 0, 0, 2, 2}, {}},                  // points ahead
      {{0, -1, 0, 0, 0, 0}, {}},                 // before the first key
      {{0, 0, 0, 0, 0, 0}, {3, 3, 3, 3, 4, 3}},  // beyond the last
      {{0, 0, 2, 0, 0, 0}, {3, 3, 1, 3, 3, 3}},  // ends before it starts
      {{0, 0, 4, 0, 0, 0}, {3, 3, 4, 3, 3, 3}},  // starts beyond the last
      {{}, {3, 3, 3, 3, -1, 3}},
  };
  for (const auto& [starts, ends] : wrong) {
    EXPECT_THROW(run(c, kGpu, kBF16, true, {}, {}, {}, {rows(starts), rows(ends)}), IndexError);
    EXPECT_NO_THROW(gpu::synchronize(0)) << "told once";
  }
}

// ---- Convolution --------------------------------------------------------------------------------

struct ConvOutcome {
  std::vector<double> output, x, weight, bias;
};
ConvOutcome convolve(const Device& device, DType dtype, const ConvOptions& options) {
  manual_seed(9);
  const auto leaf = [&](const Shape& shape) {
    return randn(shape).to(kBF16).to(dtype).to(device).set_requires_grad();
  };
  const Tensor x = leaf({2, 4, 7, 6}), weight = leaf({6, 4 / options.groups, 3, 2}),
               bias = leaf({6});
  const Tensor y = conv2d(x, weight, bias, options);
  const Tensor up = randn(y.shape()).to(kBF16).to(dtype).to(device);
  backward(sum(mul(y, up)));
  return {y.to_vector(), x.grad().to_vector(), weight.grad().to_vector(), bias.grad().to_vector()};
}

TEST_F(AttentionLibrary, ServesConvolutionsAndTheirGradientsToo) {
  for (const ConvOptions& options :
       {ConvOptions{}, ConvOptions{.stride = {2, 1}, .padding = {1, 2}, .groups = 2},
        ConvOptions{.padding = {2}, .dilation = {2, 3}}}) {
    for (const DType dtype : {kF32, kBF16}) {
      const double bound = dtype == kF32 ? 1e-5 : kBound;
      const ConvOutcome got = convolve(kGpu, dtype, options),
                        expected = convolve(kCpu, kF32, options);
      if (gpu::on_emulation()) {
        EXPECT_EQ(model().ran.size(), 3U);
      }
      model().ran.clear();
      expect_near(got.output, expected.output, bound, "output");
      expect_near(got.x, expected.x, bound, "grad_x");
      expect_near(got.weight, expected.weight, bound, "grad_weight");
      expect_near(got.bias, expected.bias, bound, "grad_bias");
    }
  }
  convolve(kGpu, kF64, {});
  EXPECT_TRUE(model().ran.empty());
}

// ---- Batch norm ---------------------------------------------------------------------------------

TEST_F(AttentionLibrary, ServesTheGradientOfBatchNormOfRowsInTraining) {
  const auto outcome = [](const Device& device, DType dtype, bool training) {
    manual_seed(21);
    const Tensor x = randn({16, 3}).to(kBF16).to(dtype).to(device).set_requires_grad();
    const Tensor weight = randn({3}).to(device).set_requires_grad(),
                 bias = randn({3}).to(device).set_requires_grad();
    const Tensor mean = zeros({3}, {.device = device}), variance = ones({3}, {.device = device});
    const Tensor y = batch_norm(x, mean, variance, weight, bias, training, 0.1, 1e-5);
    const Tensor up = randn(y.shape()).to(kBF16).to(dtype).to(device);
    backward(sum(mul(y, up)));
    return Outcome{y.to_vector(), x.grad().to_vector(), weight.grad().to_vector(),
                   bias.grad().to_vector()};
  };
  for (const DType dtype : {kF32, kBF16}) {
    const Outcome expected = outcome(kCpu, kF32, true);
    expect_near(outcome(kGpu, dtype, true), expected, dtype == kF32 ? 1e-5 : kBound, "training");
    expect_ran("backward");
    outcome(kGpu, dtype, false);
    expect_ran("");
  }
}

}  // namespace
}  // namespace tessera::test_cuda_attention
