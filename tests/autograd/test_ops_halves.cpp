// Backwards in two halves: the gradients of inputs first, those of weights later, with the bits and
// the arithmetic of one pass.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/autograd/engine.h>
#include <tessera/autograd/op.h>
#include <tessera/core/context.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/random.h>
#include <tessera/nn/fused.h>
#include <tessera/nn/linear.h>
#include <tessera/precision/autocast.h>
#include <tessera/precision/fp8_linear.h>

#include "autograd/op_samples.h"
#include "message_of.h"

namespace tessera::tests::test_ops_halves {
namespace {

// Counts the operations of a part.
template <class Part>
double flops_of(const Part& part) {
  FlopCounter& counter = Context::current().slot<FlopCounter>();
  counter = {.enabled = true};
  part();
  counter.enabled = false;
  return counter.total;
}

std::vector<Edge> edges_of(const TensorList& tensors) {
  std::vector<Edge> edges;
  for (const Tensor& one : tensors) edges.push_back(gradient_edge(one));
  return edges;
}
SplitBackward split(const TensorList& outputs, const TensorList& gradients,
                    const TensorList& inputs) {
  return SplitBackward(
      {.roots = edges_of(outputs), .gradients = gradients, .inputs = edges_of(inputs)});
}

bool has_bits(const Tensor& got, const Tensor& expected) {
  if (got.defined() != expected.defined()) return false;
  if (!got.defined()) return true;
  const Tensor a = got.contiguous(), b = expected.contiguous();
  return a.shape() == b.shape() && a.dtype() == b.dtype() &&
         std::memcmp(a.data(), b.data(), static_cast<size_t>(a.nbytes())) == 0;
}

TensorList random_like(const TensorList& outputs) {
  TensorList gradients;
  for (size_t i = 0; i < outputs.size(); ++i) {
    gradients.push_back(
        randn(outputs[i].shape(), {.dtype = outputs[i].dtype()}, RandomStream{9, i}));
  }
  return gradients;
}

// Every sample with several inputs, of which one is a stage's and the others are its weights.
TEST(TwoHalves, EveryOpGivesTheBitsAndTakesTheArithmeticOfOnePass) {
  int64_t checked = 0;
  for (const OpRow& row : op_rows()) {
    if (row.differentiable == Differentiable::kNo) continue;
    for (const Sample& sample : row.samples) {
      std::vector<size_t> wanted;
      for (size_t i = 0; i < sample.inputs.size(); ++i) {
        const Input::Kind kind = sample.inputs[i].kind;
        if (sample.inputs[i].grad && kind != Input::Kind::kInteger && kind != Input::Kind::kBool &&
            kind != Input::Kind::kStarts && kind != Input::Kind::kAbsent) {
          wanted.push_back(i);
        }
      }
      if (wanted.size() < 2 || wanted.size() > 8) continue;
      for (const size_t input : wanted) {
        SCOPED_TRACE(std::string(row.name) + " " + sample.attrs + ", input " +
                     std::to_string(input));
        struct Run {
          TensorList leaves, outputs, gradients;
        };
        const auto forward = [&] {
          Run run;
          run.leaves = make_inputs(row, sample, kF32);
          for (const size_t i : wanted) run.leaves[i].set_requires_grad();
          manual_seed(3);
          for (const Tensor& output :
               call_op(row, run.leaves, Attrs::parse(sample.attrs)).tensors) {
            if (output.defined() && output.requires_grad()) run.outputs.push_back(output);
          }
          run.gradients = random_like(run.outputs);
          return run;
        };
        const Run whole = forward(), halves = forward();
        ASSERT_FALSE(whole.outputs.empty());
        const double expected = flops_of([&] { backward(whole.outputs, whole.gradients); });
        const double got = flops_of([&] {
          SplitBackward half = split(halves.outputs, halves.gradients, {halves.leaves[input]});
          for (const size_t i : wanted) {
            if (i != input) {
              EXPECT_FALSE(halves.leaves[i].grad().defined()) << i;
            } else {
              EXPECT_TRUE(has_bits(halves.leaves[i].grad(), whole.leaves[i].grad())) << i;
            }
          }
          half.run_weights();
        });
        EXPECT_EQ(got, expected);
        for (const size_t i : wanted) {
          EXPECT_TRUE(has_bits(halves.leaves[i].grad(), whole.leaves[i].grad())) << i;
        }
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, 100);
}

// Half of their backward's operations are of inputs.
TEST(TwoHalves, ProductsOfWeightsAreLeftToTheSecondHalf) {
  const Tensor x = randn({4, 6}).set_requires_grad();
  const auto weight = [](const Shape& shape) { return randn(shape).set_requires_grad(); };
  const Tensor square = weight({6, 6}), bias = weight({6}), inner = weight({8, 6}),
               inner_bias = weight({8}), outer = weight({6, 8}), kernel = weight({6, 6, 1, 1});
  const std::pair<const char*, std::function<Tensor()>> calls[] = {
      {"linear", [&] { return linear(x, square, bias); }},
      {"linear with a residual",
       [&] {
         return linear(x, square, bias, ones({4, 6}));
       }},
      {"linear_gelu", [&] { return linear_gelu(x, square, bias, Gelu::kTanh); }},
      {"linear_gelu_linear",
       [&] { return linear_gelu_linear(x, inner, inner_bias, outer, bias, Gelu::kTanh, x); }},
      {"matmul", [&] { return matmul(x, square); }},
      {"matmul of a weight", [&] { return matmul(square, x.transpose(0, 1)); }},
      {"addmm", [&] { return addmm(bias, x, square); }},
      {"conv2d",
       [&] {
         return conv2d(reshape(x, {1, 6, 4, 1}), kernel);
       }},
      {"conv_transpose2d",
       [&] {
         return conv_transpose2d(reshape(x, {1, 6, 4, 1}), kernel);
       }},
  };
  for (const auto& [name, call] : calls) {
    SCOPED_TRACE(name);
    const Tensor y = call();
    std::optional<SplitBackward> half;
    const double first = flops_of([&] { half.emplace(split({y}, {ones_like(y)}, {x})); });
    const double second = flops_of([&] { half->run_weights(); });
    EXPECT_GT(first, 0);
    EXPECT_EQ(first, second);
  }
}

struct Mlp : nn::Module<Mlp> {
  Mlp() : fc(add<nn::Linear>("fc", 64, 128)), proj(add<nn::Linear>("proj", 128, 64)) {}
  Tensor forward(const Tensor& x) { return nn::linear_gelu_linear(fc, proj, x); }
  std::unique_ptr<Mlp> remake() const { return std::make_unique<Mlp>(); }
  nn::Linear& fc;
  nn::Linear& proj;
};

// Products of weights wait, and nothing is quantized twice. A micro-batch's scales are those of one pass.
TEST(TwoHalves, ProductsOfWeightsInFp8AreLeftToTheSecondHalf) {
  for (const char* name : {"tensorwise", "delayed", "rowwise", "rowwise_with_gw_hp", "blockwise"}) {
    SCOPED_TRACE(name);
    precision::Fp8Recipe recipe = precision::Fp8Recipe::named(name);
    recipe.filter = precision::Fp8Filter::kAll;
    manual_seed(3);
    Mlp whole;
    const auto halves = whole.clone();
    nn::Linear head(64, 32);
    const auto other_head = head.clone();
    const precision::AppliedPolicy policies[] = {
        precision::apply(whole, precision::Policy::fp8(recipe)),
        precision::apply(head, precision::Policy::fp8(recipe)),
        precision::apply(*halves, precision::Policy::fp8(recipe)),
        precision::apply(*other_head, precision::Policy::fp8(recipe))};
    std::vector<SplitBackward> left;
    for (int micro = 0; micro < 3; ++micro) {
      const Tensor x = randn({4, 32, 64}).set_requires_grad();
      const Tensor dy = mul(randn({4, 32, 32}), 1e-3).to(kBF16);
      const Tensor again = x.detach().clone().set_requires_grad();
      const Tensor y = head(whole(x)), other = (*other_head)((*halves)(again));
      const double expected = flops_of([&] { y.backward(dy); });
      const double first = flops_of([&] {
        left.emplace_back(SplitBackward::Request{
            .roots = {gradient_edge(other)}, .gradients = {dy}, .inputs = {gradient_edge(again)}});
      });
      EXPECT_EQ(2 * first, expected);
      EXPECT_EQ(again.grad().to_vector(), x.grad().to_vector());
      EXPECT_FALSE(halves->fc.weight.grad().defined());
    }
    for (SplitBackward& half : left) half.run_weights();
    NamedTensors own = halves->named_parameters(), all = whole.named_parameters();
    for (const NamedTensor& named : other_head->named_parameters()) own.push_back(named);
    for (const NamedTensor& named : head.named_parameters()) all.push_back(named);
    for (size_t i = 0; i < own.size(); ++i) {
      EXPECT_EQ(own[i].tensor.grad().to_vector(), all[i].tensor.grad().to_vector()) << own[i].name;
    }
  }
}

// Two linear layers and a norm. `weight` is in both, and once as a part of another calculation.
struct Network {
  Network() {
    const auto parameter = [this](const Shape& shape) {
      parameters.push_back(randn(shape, {}, RandomStream{4, parameters.size()}));
      parameters.back().set_requires_grad();
      return parameters.back();
    };
    weight = parameter({6, 6}), bias = parameter({6});
    norm_weight = parameter({6}), norm_bias = parameter({6});
    scale = parameter({6, 6});
    x = randn({5, 6}, {}, RandomStream{4, 99}).set_requires_grad();
  }
  Tensor forward() const { return forward(x); }
  Tensor forward(const Tensor& from) const {
    Tensor h = linear(from, weight, bias);
    h = layer_norm(gelu(h), {6}, norm_weight, norm_bias);
    h = linear(h, mul(weight, scale), bias) + h;
    return sum(matmul(tanh(h), weight) * h);
  }
  TensorList gradients() const {
    TensorList all{x.grad()};
    for (const Tensor& parameter : parameters) all.push_back(parameter.grad());
    return all;
  }
  TensorList parameters;
  Tensor weight, bias, norm_weight, norm_bias, scale, x;
};

void expect_same(const TensorList& got, const TensorList& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(has_bits(got[i], expected[i])) << i;
}

TEST(TwoHalves, WeightsThatAreUsedSeveralTimesAreAddedUpInOneOrder) {
  for (const bool anomaly : {false, true}) {
    std::optional<AnomalyMode> mode;
    if (anomaly) mode.emplace();
    const Network whole, halves;
    for (int micro = 0; micro < 2; ++micro) whole.forward().backward();
    std::vector<SplitBackward> left;
    for (int micro = 0; micro < 2; ++micro) {
      const Tensor loss = halves.forward();
      left.push_back(split({loss}, {ones_like(loss)}, {halves.x}));
    }
    EXPECT_TRUE(has_bits(halves.x.grad(), whole.x.grad()));
    for (const Tensor& parameter : halves.parameters) EXPECT_FALSE(parameter.grad().defined());
    for (SplitBackward& half : left) half.run_weights();
    expect_same(halves.gradients(), whole.gradients());
  }
}

TEST(TwoHalves, ARecomputedPartRunsAgainOnce) {
  const Network whole, halves;
  whole.forward().backward();
  int calls = 0;
  const Tensor loss = checkpoint(
      [&](const Tensor& x) {
        ++calls;
        return halves.forward(x);
      },
      halves.x);
  SplitBackward half = split({loss}, {ones_like(loss)}, {halves.x});
  half.run_weights();
  EXPECT_EQ(calls, 2);
  expect_same(halves.gradients(), whole.gradients());
}

TEST(TwoHalves, WithoutInputsTheSecondHalfIsAllOfIt) {
  const Network whole, halves;
  whole.forward().backward();
  const Tensor loss = halves.forward();
  SplitBackward half = split({loss}, {ones_like(loss)}, {});
  for (const Tensor& one : halves.gradients()) EXPECT_FALSE(one.defined());
  half.run_weights();
  expect_same(halves.gradients(), whole.gradients());
}

TEST(TwoHalves, HooksOfParametersRunInTheSecondHalfAndOfInputsInTheFirst) {
  Network network;
  std::string calls;
  register_hook(network.weight, [&](const Tensor& gradient) {
    calls += "weight ";
    return gradient * 2;
  });
  register_hook(network.x, [&](const Tensor&) {
    calls += "x ";
    return Tensor();
  });
  const Tensor loss = network.forward();
  SplitBackward half = split({loss}, {ones_like(loss)}, {network.x});
  EXPECT_EQ(calls, "x ");
  half.run_weights();
  EXPECT_EQ(calls, "x weight ");
  EXPECT_TRUE(mentions(message_of<AutogradError>([&] { half.run_weights(); }), "once"));
}

// The backward in whose hook the first half ran has ended before the second one.
TEST(TwoHalves, ASecondHalfBelongsToTheBackwardInWhichItRuns) {
  const Network network;
  std::optional<SplitBackward> half;
  std::string calls;
  uint64_t first = 0, second = 0;
  const HookHandle weight = register_hook(network.weight, [&](const Tensor&) {
    second = current_backward();
    queue_backward_callback([&] { calls += "callback "; });
    return Tensor();
  });
  {
    const Tensor outer = ones({3}).set_requires_grad(), loss = network.forward();
    register_hook(outer, [&](const Tensor&) {
      first = current_backward();
      half.emplace(split({loss}, {ones_like(loss)}, {network.x}));
      return Tensor();
    });
    sum(outer).backward();
  }
  half->run_weights();
  EXPECT_EQ(calls, "callback ");
  EXPECT_NE(second, first);
  // Inside of another backward its callbacks wait for that one's end.
  const Tensor loss = network.forward();
  half.emplace(split({loss}, {ones_like(loss)}, {network.x}));
  calls.clear();
  const Tensor outer = ones({3}).set_requires_grad();
  register_hook(outer, [&](const Tensor&) {
    first = current_backward();
    half->run_weights();
    calls += "hook ";
    return Tensor();
  });
  sum(outer).backward();
  EXPECT_EQ(calls, "hook callback ");
  EXPECT_EQ(second, first);
}

// A layer between its halves has its input and the gradient of its output.
TEST(TwoHalves, WhatTheSecondHalfDoesNotReadIsFreed) {
  constexpr int64_t kRows = 64, kWidth = 128, kBytes = kRows * kWidth * 4;
  const Tensor weight = randn({kWidth, kWidth}).set_requires_grad();
  Tensor x = randn({kRows, kWidth}).set_requires_grad();
  const auto used = [] { return memory_stats()->current(); };
  const int64_t before = used();
  Tensor h = linear(mul(x, 2.0), weight);
  for (int i = 0; i < 8; ++i) h = tanh(h);
  EXPECT_GE(used() - before, 9 * kBytes);
  std::optional<SplitBackward> half;
  {
    std::vector<Edge> roots{gradient_edge(h)};
    Tensor gradient = ones_like(h);
    h = Tensor();
    SplitBackward::Request request{
        .roots = std::move(roots), .gradients = {}, .inputs = {gradient_edge(x)}};
    request.gradients.push_back(std::move(gradient));
    half.emplace(std::move(request));
  }
  x = Tensor();  // it was there before
  EXPECT_LE(used() - before, kBytes + 4096);
  half->run_weights();
  half.reset();
  EXPECT_LE(used() - before, weight.nbytes() - kBytes + 4096);
}

}  // namespace
}  // namespace tessera::tests::test_ops_halves
