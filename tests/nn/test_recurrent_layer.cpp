// The layers of an LSTM and a GRU as one op, beside the same made of steps.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/recurrent.h>
#include <tessera/core/parallel.h>
#include <tessera/core/profile/profiler.h>
#include <tessera/core/random.h>

#include "message_of.h"

namespace tessera::tests::test_recurrent_layer {
namespace {

struct Case {
  bool lstm;
  int64_t in, H;
  std::vector<int64_t> sizes;  // of each step
  bool reverse, bias;
};

// x, weight_ih, weight_hh, bias_ih, bias_hh, hidden, cell; states and weights as large as those of
// a layer that was just made.
TensorList operands(const Case& c, DType dtype) {
  manual_seed(7);
  const int64_t rows = (c.lstm ? 4 : 3) * c.H, N = c.sizes[0];
  int64_t total = 0;
  for (const int64_t size : c.sizes) total += size;
  const double scale = 1 / std::sqrt(static_cast<double>(c.H));
  TensorList list = {randn({total, c.in}, {.dtype = kF64}),
                     randn({rows, c.in}, {.dtype = kF64}) * scale,
                     randn({rows, c.H}, {.dtype = kF64}) * scale,
                     randn({rows}, {.dtype = kF64}) * scale,
                     randn({rows}, {.dtype = kF64}) * scale,
                     randn({N, c.H}, {.dtype = kF64}),
                     randn({N, c.H}, {.dtype = kF64})};
  if (!c.bias) list[3] = list[4] = Tensor();
  if (!c.lstm) list.pop_back();
  for (Tensor& x : list) {
    if (!x.defined()) continue;
    x = x.to(kBF16).to(dtype).detach();  // the same numbers in each dtype
    x.set_requires_grad(true);
  }
  return list;
}

struct Outcome {
  TensorList results;    // output, hidden, cell
  TensorList gradients;  // of the operands that there are
};

TensorList layer(const Case& c, const TensorList& o) {
  const RecurrentSteps steps{c.sizes, c.reverse};
  if (c.lstm) {
    const RecurrentLayer r = lstm_layer(o[0], o[1], o[2], o[3], o[4], o[5], o[6], steps);
    return {r.output, r.hidden, r.cell};
  }
  const RecurrentLayer r = gru_layer(o[0], o[1], o[2], o[3], o[4], o[5], steps);
  return {r.output, r.hidden};
}

// Each sequence alone, a cell a step.
TensorList by_cells(const Case& c, const TensorList& o) {
  const int64_t N = c.sizes[0];
  std::vector<int64_t> offsets;
  int64_t total = 0;
  for (const int64_t size : c.sizes) offsets.push_back(total), total += size;
  TensorList rows(static_cast<size_t>(total)), hidden, cell;
  for (int64_t n = 0; n < N; ++n) {
    Tensor h = o[5].select(0, n), s = c.lstm ? o[6].select(0, n) : Tensor();
    for (size_t i = 0; i < c.sizes.size(); ++i) {
      const size_t t = c.reverse ? c.sizes.size() - 1 - i : i;
      if (n >= c.sizes[t]) continue;
      const Tensor x = o[0].select(0, offsets[t] + n);
      if (c.lstm) {
        const LstmStates next = lstm_cell(x, h, s, o[1], o[2], o[3], o[4]);
        h = next.hidden, s = next.cell;
      } else {
        h = gru_cell(x, h, o[1], o[2], o[3], o[4]);
      }
      rows[static_cast<size_t>(offsets[t] + n)] = h;
    }
    hidden.push_back(h);
    if (c.lstm) cell.push_back(s);
  }
  TensorList results = {stack(rows, 0), stack(hidden, 0)};
  if (c.lstm) results.push_back(stack(cell, 0));
  return results;
}

// A weight for each element of each result; results beyond `used` get no gradient.
Outcome run(const Case& c, DType dtype, TensorList (*form)(const Case&, const TensorList&),
            size_t first_used = 0) {
  const TensorList o = operands(c, dtype);
  Outcome r{form(c, o), {}};
  manual_seed(8);
  Tensor loss;
  for (size_t i = 0; i < r.results.size(); ++i) {
    const Tensor weight = randn(r.results[i].shape(), {.dtype = kF64}).to(kBF16).to(dtype);
    if (i < first_used) continue;
    const Tensor part = sum((r.results[i] * weight).to(kF64));
    loss = loss.defined() ? loss + part : part;
  }
  loss.backward();
  for (const Tensor& x : o) {
    if (x.defined()) r.gradients.push_back(x.grad());
  }
  return r;
}

// The largest difference, in units of the largest value.
double distance(const Tensor& a, const Tensor& b) {
  const Tensor wide = b.detach().to(kF64);
  const double scale = std::max(1e-30, wide.abs().max().item());
  return (a.detach().to(kF64) - wide).abs().max().item() / scale;
}

const std::vector<Case> kCases = {
    {true, 5, 7, {3, 3, 3, 3}, false, true},     {true, 5, 7, {4, 3, 3, 1}, false, true},
    {true, 5, 7, {4, 3, 3, 1}, true, false},     {true, 3, 1, {2, 1}, true, true},
    {true, 9, 300, {13, 13, 9, 2}, true, true},  // two stretches of a depth of 1200
    {true, 4, 50, {37, 37, 21}, false, true},    {false, 5, 7, {3, 3, 3, 3}, false, true},
    {false, 5, 7, {4, 3, 3, 1}, true, true},     {false, 5, 7, {4, 3, 3, 1}, false, false},
    {false, 9, 350, {13, 13, 9, 2}, true, true}, {false, 4, 50, {37, 37, 21}, true, true},
};
std::string title_of(const Case& c) {
  return std::string(c.lstm ? "LSTM" : "GRU") + " H " + std::to_string(c.H) +
         (c.reverse ? " reverse" : "");
}

TEST(RecurrentLayer, IsWhatItsCellsGiveOneByOne) {
  for (const Case& c : kCases) {
    SCOPED_TRACE(title_of(c));
    const Outcome whole = run(c, kF64, layer), cells = run(c, kF64, by_cells);
    for (size_t i = 0; i < whole.results.size(); ++i) {
      EXPECT_LT(distance(whole.results[i], cells.results[i]), 24 * 0x1p-53) << "result " << i;
    }
    for (size_t i = 0; i < whole.gradients.size(); ++i) {
      EXPECT_LT(distance(whole.gradients[i], cells.gradients[i]), 32 * 0x1p-53) << "gradient " << i;
    }
  }
}

TEST(RecurrentLayer, StaysWithinRoundingInEveryDType) {
  for (const Case& c : kCases) {
    const Outcome exact = run(c, kF64, layer);
    for (const DType dtype : {kF32, kF16, kBF16}) {
      SCOPED_TRACE(title_of(c) + " " + std::string(name_of(dtype)));
      const double eps = epsilon_of(dtype) / 2;
      const Outcome got = run(c, dtype, layer);
      for (size_t i = 0; i < got.results.size(); ++i) {
        EXPECT_EQ(got.results[i].dtype(), dtype);
        EXPECT_LT(distance(got.results[i], exact.results[i]), 8 * eps) << "result " << i;
      }
      for (size_t i = 0; i < got.gradients.size(); ++i) {
        EXPECT_LT(distance(got.gradients[i], exact.gradients[i]), 16 * eps) << "gradient " << i;
      }
    }
  }
}

TEST(RecurrentLayer, AResultThatNothingUsedHasAGradientOfZeros) {
  for (const Case& c : {kCases[1], kCases[2], kCases[7]}) {
    SCOPED_TRACE(title_of(c));
    for (const size_t first : {size_t{1}, size_t{c.lstm ? 2u : 1u}}) {
      const Outcome whole = run(c, kF64, layer, first), cells = run(c, kF64, by_cells, first);
      for (size_t i = 0; i < whole.gradients.size(); ++i) {
        EXPECT_LT(distance(whole.gradients[i], cells.gradients[i]), 32 * 0x1p-53) << i;
      }
    }
  }
}

TEST(RecurrentLayer, FrozenOperandsLeaveTheOthersGradients) {
  const Case c = kCases[4];
  const Outcome all = run(c, kF32, layer);
  const TensorList o = operands(c, kF32);
  for (size_t learns = 0; learns < o.size(); ++learns) {
    TensorList some = o;
    for (size_t i = 0; i < some.size(); ++i) some[i] = o[i].detach();
    some[learns].set_requires_grad(true);
    manual_seed(8);
    Tensor loss;
    for (const Tensor& result : layer(c, some)) {
      const Tensor weight = randn(result.shape(), {.dtype = kF64}).to(kBF16).to(kF32);
      const Tensor part = sum((result * weight).to(kF64));
      loss = loss.defined() ? loss + part : part;
    }
    loss.backward();
    EXPECT_EQ(distance(some[learns].grad(), all.gradients[learns]), 0) << learns;
  }
}

bool same_bits(const Tensor& a, const Tensor& b) {
  const Tensor x = a.detach().contiguous(), y = b.detach().contiguous();
  return x.nbytes() == y.nbytes() && std::memcmp(x.data(), y.data(), x.nbytes()) == 0;
}

// Few sequences with large steps, whose columns threads share out, and many, which they do.
TEST(RecurrentLayer, BitsDoNotDependOnTheNumberOfThreads) {
  const int before = num_threads();
  for (const Case& c :
       {Case{true, 8, 420, {3, 3, 2, 1}, false, true}, Case{false, 8, 480, {3, 2, 1}, true, true},
        Case{true, 8, 60, {33, 33, 30, 5}, false, true},
        Case{false, 8, 60, {33, 33, 30, 5}, true, true}}) {
    for (const DType dtype : {kF32, kBF16, kF64}) {
      SCOPED_TRACE(title_of(c) + " " + std::string(name_of(dtype)));
      set_num_threads(1);
      const Outcome one = run(c, dtype, layer);
      for (const int threads : {2, 3, 8}) {
        set_num_threads(threads);
        const Outcome more = run(c, dtype, layer);
        for (size_t i = 0; i < one.results.size(); ++i) {
          EXPECT_TRUE(same_bits(one.results[i], more.results[i])) << threads << " result " << i;
        }
        for (size_t i = 0; i < one.gradients.size(); ++i) {
          EXPECT_TRUE(same_bits(one.gradients[i], more.gradients[i])) << threads << " grad " << i;
        }
      }
    }
  }
  set_num_threads(before);
}

// The gradient of a sequence's states is that of its own rows: others have no part in it.
TEST(RecurrentLayer, SequencesDoNotTouchEachOther) {
  const Case c = kCases[5];
  const TensorList o = operands(c, kF32);
  const TensorList whole = layer(c, o);
  const int64_t n = 20, length = 3;
  const TensorList index = {o[0].select(0, n), o[0].select(0, 37 + n), o[0].select(0, 74 + n)};
  const RecurrentLayer alone = lstm_layer(stack(index, 0).unsqueeze(1), o[1], o[2], o[3], o[4],
                                          o[5].narrow(0, n, 1), o[6].narrow(0, n, 1));
  EXPECT_EQ(alone.output.shape(), (Shape{length, 1, c.H}));
  EXPECT_LT(distance(alone.hidden.select(0, 0), whole[1].select(0, n)), 8 * 0x1p-24);
  EXPECT_LT(distance(alone.cell.select(0, 0), whole[2].select(0, n)), 8 * 0x1p-24);
}

TEST(RecurrentLayer, IsOneOp) {
  const TensorList o = operands(kCases[0], kF32);
  Profiler profiler;
  {
    const ProfilerScope scope(profiler);
    layer(kCases[0], o);
  }
  ASSERT_EQ(profiler.entries().size(), 1u);
  EXPECT_EQ(profiler.entries().begin()->first, "lstm_layer");
}

TEST(RecurrentLayer, ProjectedStatesAreMadeOfOpsAndReadAlikeUnderAutocast) {
  const TensorList o = operands(kCases[0], kF32);
  const Tensor down = randn({2, 7}), weight_hh = randn({28, 2}), hidden = randn({3, 2});
  const AutocastGuard autocast(kBF16);
  const RecurrentLayer projected =
      lstm_layer(o[0], o[1], weight_hh, o[3], o[4], hidden, o[6], {{3, 3, 3, 3}, false}, down);
  const RecurrentLayer plain =
      lstm_layer(o[0], o[1], o[2], o[3], o[4], o[5], o[6], {{3, 3, 3, 3}, false});
  for (const RecurrentLayer& r : {projected, plain}) {
    EXPECT_EQ(r.output.dtype(), kBF16);
    EXPECT_EQ(r.cell.dtype(), kBF16);
  }
  EXPECT_EQ(projected.output.shape(), (Shape{12, 2}));
}

TEST(RecurrentLayer, WhatDoesNotFitIsNamed) {
  const TensorList o = operands(kCases[1], kF32);
  const auto message = [&](TensorList given, const RecurrentSteps& steps) {
    return message_of<Error>([&] {
      lstm_layer(given[0], given[1], given[2], given[3], given[4], given[5], given[6], steps);
    });
  };
  const auto changed = [&](size_t i, Tensor x) {
    TensorList list = o;
    list[i] = std::move(x);
    return list;
  };
  const RecurrentSteps steps{{4, 3, 3, 1}, false};
  const auto expect = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect(message(o, {{4, 3, 3}, false}), "add up to 10 rows");
  expect(message(o, {{3, 4, 3, 1}, false}), "must descend");
  expect(message(o, {}), "[steps, sequences, in]");
  expect(message(changed(2, zeros({28, 6})), steps), "weight_hh of [28, 7]");
  expect(message(changed(3, Tensor()), steps), "both biases or none");
  expect(message(changed(6, zeros({3, 7})), steps), "cell of [4, 7]");
  expect(message(changed(5, zeros({4, 7}, {.dtype = kF64})), steps), "one floating dtype");
}

}  // namespace
}  // namespace tessera::tests::test_recurrent_layer
