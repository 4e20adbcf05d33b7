// Layers in fp8 on a GPU: trainings beside the CPU's, fused ones beside those one
// by one, graphs, states that move.
#include <gtest/gtest.h>

#include <cmath>
#include <tuple>
#include <vector>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/weight_cache.h>
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>
#include <tessera/nn/fused.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>
#include <tessera/nn/read_by.h>
#include <tessera/optim/graphed_step.h>
#include <tessera/optim/optimizers.h>
#include <tessera/precision/autocast.h>
#include <tessera/precision/fp8_linear.h>

#include "../message_of.h"
#include "fp8_fixture.h"

namespace tessera::test_cuda_fp8_layers {
namespace {

using namespace fp8_on_gpu;
using precision::Fp8Recipe;
using precision::Fp8Scaling;

using CudaFp8Layers = CudaFp8;

struct Net : nn::Module<Net> {
  Net() : up(add<nn::Linear>("up", 32, 48)), down(add<nn::Linear>("down", 48, 32)) {}
  Tensor forward(const Tensor& x) { return down(gelu(up(x))).to(kF32); }
  nn::Linear& up;
  nn::Linear& down;
};

Tensor batch_of(int step) {
  manual_seed(100 + static_cast<uint64_t>(step));
  return randn({2, 16, 32}).detach();
}

struct Training {
  Training(const Device& device, const Fp8Recipe& recipe)
      : seeded((manual_seed(3), true)),
        applied(precision::apply(model, precision::Policy::fp8(recipe))),
        moved((model.to(device), device)),
        optimizer(model.named_parameters(), {.lr = 1e-2}) {}
  Tensor loss(int step) {
    const Tensor x = batch_of(step);
    return mean(square(model(x.to(moved)) - sin(mul(x, 3.0)).to(moved)));
  }
  double step(int number) {
    const Tensor now = loss(number);
    now.backward();
    applied.fp8()->update();
    optimizer.step();
    optimizer.zero_grad();
    return now.item();
  }
  const bool seeded;
  Net model;
  precision::AppliedPolicy applied;
  const Device moved;
  optim::AdamW optimizer;
};

constexpr Fp8Scaling kScalings[] = {Fp8Scaling::kTensorwise, Fp8Scaling::kDelayed,
                                    Fp8Scaling::kRowwise, Fp8Scaling::kRowwiseWithGwHp,
                                    Fp8Scaling::kBlockwise};

Fp8Recipe recipe_of(Fp8Scaling scaling) {
  return {.scaling = scaling, .filter = precision::Fp8Filter::kAll, .strict = true};
}

// What was seen of each operand, to be compared.
void append_notes(std::vector<std::vector<double>>& values, const auto& report) {
  for (const auto& layer : report.layers) {
    for (const auto& operand : layer.operands) {
      values.push_back({static_cast<double>(operand.amax), static_cast<double>(operand.elements),
                        operand.saturated, operand.underflown});
    }
  }
}

TEST_F(CudaFp8Layers, ATrainingIsThatOfTheCpu) {
  for (const Fp8Scaling scaling : kScalings) {
    const std::string name(precision::name_of(scaling));
    Training on_cpu(kCpu, recipe_of(scaling)), on_gpu(kGpu, recipe_of(scaling));
    asked.clear();
    for (int step = 0; step < 6; ++step) {
      // Sums of bf16 results are taken in another order; a number that rounds to another fp8
      // is 2^-4 of itself off.
      EXPECT_NEAR(on_gpu.step(step), on_cpu.step(step), 0.01) << name << " step " << step;
    }
    const size_t low = scaling == Fp8Scaling::kRowwiseWithGwHp ? 3 : 5;  // grad_W is in bf16
    if (gpu::on_emulation()) {
      EXPECT_EQ(asked.size(), 6U * low) << "no gradient of the batch is asked for";
    }
    const precision::Fp8Report cpu = on_cpu.applied.fp8()->report();
    const precision::Fp8Report gpu = on_gpu.applied.fp8()->report();
    EXPECT_EQ(gpu.fp8_calls(), cpu.fp8_calls());
    EXPECT_EQ(gpu.fallbacks(), 0);
    for (size_t layer = 0; layer < cpu.layers.size(); ++layer) {
      for (size_t role = 0; role < 3; ++role) {
        const auto& own = gpu.layers[layer].operands[role];
        const auto& expected = cpu.layers[layer].operands[role];
        EXPECT_EQ(own.elements, expected.elements) << name << " " << layer << " " << role;
        EXPECT_NEAR(own.underflown, expected.underflown, 0.01);
        EXPECT_NEAR(own.saturated, expected.saturated, 0.01);
        EXPECT_EQ(own.not_finite, 0);
      }
    }
    if (scaling != Fp8Scaling::kDelayed) continue;
    const StateDict own = on_gpu.applied.fp8()->state_dict();
    for (const auto& [key, value] : on_cpu.applied.fp8()->state_dict()) {
      ASSERT_EQ(own.at(key).shape(), value.shape()) << key;
      EXPECT_LE(relative_error(own.at(key), value), 0.05) << key;
    }
    // Maxima of the first layer's input are those of the batch.
    const Tensor history = own.at("up.history");
    for (int step = 0; step < 6; ++step) {
      const double amax = tessera::amax(batch_of(step).to(kBF16).to(kF32).abs()).item();
      EXPECT_EQ(history.narrow(0, 0, 1).narrow(1, 5 - step, 1).item(), amax) << "newest first";
    }
  }
}

TEST_F(CudaFp8Layers, ABackwardReadsTheColumnsThatWereKept) {
  TS_NEEDS_EMULATION("notes products");
  Training run(kGpu, recipe_of(Fp8Scaling::kTensorwise));
  const Tensor loss = run.loss(0);
  static_cast<void>(loss.item());
  asked.clear();
  loss.backward();
  static_cast<void>(run.model.up.weight.grad().to(kCpu));  // until then kernels are queued
  ASSERT_EQ(asked.size(), 3U);
  for (const GemmProblem& problem : asked) {
    EXPECT_EQ(problem.a.dtype, kF8E5M2);
    EXPECT_EQ(problem.b.dtype, kF8E4M3);
    EXPECT_FALSE(problem.fast_accumulation);
  }
}

// One op for both layers and gelu has the bits of the layers, one by one.
TEST_F(CudaFp8Layers, AFusedPerceptronHasTheBitsOfItsLayers) {
  for (const Fp8Scaling scaling : {Fp8Scaling::kTensorwise, Fp8Scaling::kDelayed}) {
    for (const Gelu form : {Gelu::kNone, Gelu::kTanh}) {
      const auto outcome = [&](bool fused) {
        Training run(kGpu, recipe_of(scaling));
        std::vector<std::vector<double>> values;
        for (int step = 0; step < 3; ++step) {
          const Tensor x = batch_of(step).to(kGpu).set_requires_grad();
          const AutocastGuard autocast(kBF16);
          Net& net = run.model;
          const Tensor y = fused ? nn::linear_gelu_linear(net.up, net.down, x, form)
                                 : net.down(gelu(net.up(x), form));
          mean(square(y.to(kF32))).backward();
          run.applied.fp8()->update();
          for (const Tensor& each : {y.detach(), x.grad(), net.up.weight.grad(), net.up.bias.grad(),
                                     net.down.weight.grad(), net.down.bias.grad()}) {
            values.push_back(each.to(kCpu).to_vector());
          }
          run.optimizer.step();
          run.optimizer.zero_grad();
        }
        const auto report = run.applied.fp8()->report();
        EXPECT_EQ(report.fp8_calls(), 6);
        append_notes(values, report);
        return values;
      };
      EXPECT_EQ(outcome(true), outcome(false)) << precision::name_of(scaling);
    }
  }
}

// A norm that writes the operand of the layer behind it has the bits of the two, one by one.
enum class Norm { kLayer, kResidual, kRms };
TEST_F(CudaFp8Layers, ANormBeforeALayerHasTheBitsOfTheTwo) {
  for (const Norm kind : {Norm::kLayer, Norm::kResidual, Norm::kRms}) {
    for (const DType dtype : {kF32, kBF16}) {
      for (const bool two_layers : {false, true}) {
        for (const bool checkpoints : {false, true}) {
          const auto outcome = [&](bool fused) {
            Training run(kGpu, recipe_of(Fp8Scaling::kDelayed));
            Net& net = run.model;
            nn::LayerNorm layer_norm(32);
            nn::RMSNorm rms_norm(Shape{32});
            for (const Tensor& each : {layer_norm.weight, layer_norm.bias, rms_norm.weight}) {
              const NoGradGuard no_grad;
              each.copy_(randn({32}));
            }
            layer_norm.to(kGpu), rms_norm.to(kGpu);
            std::vector<std::vector<double>> values;
            for (int step = 0; step < 3; ++step) {
              const Tensor x = batch_of(step).to(dtype).detach().to(kGpu).set_requires_grad();
              const Tensor r = batch_of(step + 9).to(dtype).detach().to(kGpu).set_requires_grad();
              const AutocastGuard autocast(kBF16);
              const auto block = [&](const Tensor& x_in, const Tensor& r_in) {
                const auto norm = [&]() -> ResidualNorm {
                  if (kind == Norm::kResidual) {
                    return nn::residual_layer_norm(layer_norm, x_in, r_in);
                  }
                  return {r_in, kind == Norm::kLayer ? layer_norm(x_in) : rms_norm(x_in)};
                };
                const ResidualNorm both = [&] {
                  if (!fused) return norm();
                  const nn::ReadBy scope(net.up);
                  return norm();
                }();
                // Until the first call the scales are the host's.
                if (step > 0 || !checkpoints) {
                  EXPECT_EQ(both.normalized.storage()->bytes() == 0, fused && step > 0);
                }
                const Tensor y = two_layers
                                     ? nn::linear_gelu_linear(net.up, net.down, both.normalized)
                                     : net.down(gelu(net.up(both.normalized)));
                return both.residual + y;
              };
              const Tensor y =
                  checkpoints
                      ? checkpoint(
                            [&](const TensorList& in) { return TensorList{block(in[0], in[1])}; },
                            {x, r})[0]
                      : block(x, r);
              mean(square(y.to(kF32))).backward();
              run.applied.fp8()->update();
              for (const Tensor& each :
                   {y.detach(), x.grad(), r.grad(), net.up.weight.grad(), net.up.bias.grad(),
                    net.down.weight.grad(), layer_norm.weight.grad(), layer_norm.bias.grad(),
                    rms_norm.weight.grad()}) {
                values.push_back(each.defined() ? each.to(kCpu).to_vector()
                                                : std::vector<double>{});
              }
              run.optimizer.step();
              run.optimizer.zero_grad();
            }
            const auto report = run.applied.fp8()->report();
            EXPECT_EQ(report.fp8_calls(), 6);
            append_notes(values, report);
            return values;
          };
          EXPECT_EQ(outcome(true), outcome(false))
              << static_cast<int>(kind) << name_of(dtype) << two_layers << checkpoints;
        }
      }
    }
  }
}

TEST_F(CudaFp8Layers, ANormThatOthersReadHasItsBytesForThem) {
  Training run(kGpu, recipe_of(Fp8Scaling::kDelayed));
  run.step(0);
  Net& net = run.model;
  nn::LayerNorm norm(32);
  norm.to(kGpu);
  const AutocastGuard autocast(kBF16);
  const Tensor x = batch_of(1).to(kGpu).set_requires_grad();
  const auto normed = [&](const Tensor& of) {
    const nn::ReadBy scope(net.up);
    return norm(of);
  };
  const Tensor expected = norm(x).detach().to(kCpu);
  const Tensor by_layer = net.up(norm(x)).detach().to(kCpu);
  const auto expect_bytes = [&](const Tensor& y, const char* what) {
    EXPECT_GT(y.storage()->bytes(), 0) << what;
    expect_same_bytes(y.detach(), expected, what);
    expect_same_bytes(net.up(y).detach(), by_layer, what);
  };
  const Tensor viewed = normed(x);
  EXPECT_EQ(viewed.storage()->bytes(), 0);
  EXPECT_NE(message_of<UnsupportedError>([&] { viewed.to_vector(); }).find("clone() it first"),
            std::string::npos);
  expect_same_bytes(viewed.view({32, 32}).detach().view({2, 16, 32}), expected, "view");
  expect_bytes(viewed, "viewed");
  const Tensor detached = normed(x);
  expect_same_bytes(detached.detach(), expected, "detach");
  expect_bytes(detached, "detached");
  const Tensor twice = normed(x);
  expect_same_bytes(net.up(twice).detach(), by_layer, "first");
  expect_same_bytes(net.up(twice).detach(), by_layer, "second");
  expect_bytes(twice, "twice");
  // By another layer than was said, which is told in fp8 as ever.
  nn::Linear other(32, 48);
  other.to(kGpu);
  const Tensor elsewhere = normed(x);
  expect_same_bytes(other(elsewhere).detach(), other(norm(x)).detach().to(kCpu), "another layer");
  expect_bytes(elsewhere, "elsewhere");
  // Its gradient is the norm's.
  x.zero_grad();
  sum(exp(normed(x))).backward();
  const Tensor gradient = x.grad().to(kCpu);
  x.zero_grad();
  sum(exp(norm(x))).backward();
  expect_same_bytes(x.grad(), gradient, "gradient");
  const Tensor source = batch_of(2).to(kGpu);
  const Tensor late = normed(source);
  source.add_(1);
  EXPECT_NE(message_of<AutogradError>([&] { exp(late); }).find("written in place"),
            std::string::npos);
}

TEST_F(CudaFp8Layers, AHeadWithItsLossIsThatOfTheTwoOps) {
  for (const auto& [scaling, factor] :
       {std::pair(Fp8Scaling::kTensorwise, 1.0), std::pair(Fp8Scaling::kTensorwise, 0.5),
        std::pair(Fp8Scaling::kRowwise, 0.5), std::pair(Fp8Scaling::kRowwiseWithGwHp, 0.5),
        std::pair(Fp8Scaling::kBlockwise, 0.5)}) {
    SCOPED_TRACE(precision::name_of(scaling));
    const auto outcome = [&, scaling = scaling, factor = factor](bool fused) {
      const Tensor x = batch_of(1).view({32, 32}).to(kGpu).set_requires_grad();
      std::vector<int64_t> classes(32);
      for (size_t i = 0; i < classes.size(); ++i) {
        classes[i] = i % 7 == 3 ? -100 : static_cast<int64_t>(i) % 48;
      }
      const Tensor target = tensor(classes, {32}, kI64).to(kGpu);
      nn::Linear head(32, 48, {.bias = false});
      precision::AppliedPolicy applied =
          precision::apply(head, precision::Policy::fp8(recipe_of(scaling)));
      head.to(kGpu);
      const AutocastGuard autocast(kBF16);
      const Tensor loss =
          fused ? nn::linear_cross_entropy(head, x, target) : cross_entropy(head(x), target);
      mul(loss, factor).backward();
      return std::tuple(loss.item(), x.grad().to(kCpu), head.weight.grad().to(kCpu));
    };
    const auto [loss, dx, dw] = outcome(true);
    const auto [expected_loss, expected_dx, expected_dw] = outcome(false);
    if (scaling == Fp8Scaling::kTensorwise) {  // one scale: the gradient is never stored
      EXPECT_EQ(loss, expected_loss);
      expect_same_bytes(dx, expected_dx, "dx");
      expect_same_bytes(dw, expected_dw, "dw");
      continue;
    }
    EXPECT_NEAR(loss, expected_loss, 1e-5);
    // A gradient of a logit that rounds to another bf16 may round to another fp8, 2^-2 off.
    EXPECT_LE(relative_error(dx, expected_dx), 0.02);
    EXPECT_LE(relative_error(dw, expected_dw), 0.02);
  }
}

// As sharded training does between forward and backward.
TEST_F(CudaFp8Layers, ACopyThatWasReleasedIsMadeAgainForTheGraphThatWaits) {
  for (const Fp8Scaling scaling : kScalings) {
    const auto gradients = [&](bool releases) {
      Training run(kGpu, recipe_of(scaling));
      const Tensor loss = run.loss(0);
      const Tensor& weight = run.model.down.weight;
      if (releases) {
        const int64_t bytes = weight_cache::bytes(weight);
        // By rows and by columns; the one scale of the recipe has both for dx alone.
        EXPECT_EQ(bytes, (scaling == Fp8Scaling::kRowwiseWithGwHp ? 3 : 2) * weight.numel());
        weight_cache::release(weight);
        EXPECT_EQ(weight_cache::bytes(weight), 0);
        EXPECT_THROW(loss.backward({}, /*retain_graph=*/true), Error);
        weight_cache::restore(weight);
        // The copy of the result alone has no graph that waits for it.
        const bool two = scaling == Fp8Scaling::kRowwise || scaling == Fp8Scaling::kRowwiseWithGwHp;
        EXPECT_EQ(weight_cache::bytes(weight), bytes - (two ? weight.numel() : 0));
      }
      loss.backward();
      return run.model.up.weight.grad().to(kCpu).to_vector();
    };
    EXPECT_EQ(gradients(true), gradients(false)) << precision::name_of(scaling);
  }
}

TEST_F(CudaFp8Layers, AGraphedStepHasTheBitsOfAnEagerOne) {
  for (const Fp8Scaling scaling : kScalings) {
    const auto weights = [&](bool graphed) {
      Training run(kGpu, recipe_of(scaling));
      const Tensor x = empty({2, 16, 32}, {.dtype = kF32, .device = kGpu});
      const auto compute = [&](const TensorList& inputs) -> TensorList {
        const Tensor loss = mean(square(run.model(inputs[0]) - inputs[0]));
        loss.backward();
        run.applied.fp8()->update();
        run.optimizer.step();
        run.optimizer.zero_grad();
        return {loss.detach()};
      };
      optim::GraphedStep graph(kGpu, compute, {.warmup = 2});
      for (int step = 0; step < 7; ++step) {
        const NoGradGuard no_grad;
        copy_(x, batch_of(step).to(kGpu));
        const EnableGradGuard grad;
        if (graphed) {
          graph({x});
        } else {
          compute({x});
        }
      }
      EXPECT_EQ(graph.captured(), graphed);
      return run.model.up.weight.to(kCpu).to_vector();
    };
    EXPECT_EQ(weights(true), weights(false)) << precision::name_of(scaling);
  }
}

TEST_F(CudaFp8Layers, AStateMovesFromOneDeviceToTheOther) {
  Training first(kCpu, recipe_of(Fp8Scaling::kDelayed)),
      second(kGpu, recipe_of(Fp8Scaling::kDelayed));
  for (int step = 0; step < 3; ++step) first.step(step);
  second.step(0);
  second.applied.fp8()->load_state_dict(first.applied.fp8()->state_dict());
  const StateDict state = second.applied.fp8()->state_dict();
  for (const auto& [key, value] : first.applied.fp8()->state_dict()) {
    EXPECT_EQ(state.at(key).to_vector(), value.to_vector()) << key;
  }
  EXPECT_LT(second.step(3), 2);
}

TEST_F(CudaFp8Layers, BlocksThatProductsOfAGpuDoNotHaveAreRefused) {
  Fp8Recipe recipe = Fp8Recipe::named("blockwise");
  check(precision::Policy::fp8(recipe), kGpu);
  recipe.block = 64;
  EXPECT_NE(message_of<UnsupportedError>([&] {
              check(precision::Policy::fp8(recipe), kGpu);
            }).find("128 wide"),
            std::string::npos);
}

}  // namespace
}  // namespace tessera::test_cuda_fp8_layers
