// Optimizer states in bf16, rounded stochastically: without bias, and in bits that know neither
// layout nor threads nor interruptions.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <set>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/parallel.h>
#include <tessera/optim/muon.h>
#include <tessera/optim/optimizers.h>

#include "message_of.h"

namespace tessera::optim::test_state_rounding {
namespace {

using kernels::round_by_noise;
using kernels::StateRounding;
using kernels::WholeIndex;

// ---- One number ---------------------------------------------------------------------------------

TEST(StateRounding, TheMeanOverAllNoiseIsTheNumberItself) {
  for (const float value : {1.0f, 1.00390625f, 3.14159f, -2.7182f, 1e-30f, -1e-39f, 0x1p-140f,
                            0x1.fffffep0f, 0.0f, 65535.7f}) {
    for (const int state : {0, 1}) {
      double sum = 0;
      std::set<float> results;
      for (uint32_t noise = 0; noise < 65536; ++noise) {
        // The other half belongs to the other state, and changes nothing.
        const uint32_t bits = (noise << (16 * state)) | (0x5a5au << (16 - 16 * state));
        const float rounded = to_float(round_by_noise(value, bits, state));
        sum += static_cast<double>(rounded);
        results.insert(rounded);
      }
      EXPECT_EQ(sum / 65536, static_cast<double>(value));  // exact: 2^16 numbers of 8 digits
      EXPECT_LE(results.size(), 2u) << "the neighbours in bf16, or itself";
    }
  }
}

TEST(StateRounding, WhatIsNotFiniteStaysAndWhatIsFiniteToo) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const uint32_t noise : {0u, 0xffffffffu}) {
    EXPECT_EQ(to_float(round_by_noise(kInfinity, noise, 0)), kInfinity);
    EXPECT_EQ(to_float(round_by_noise(-kInfinity, noise, 1)), -kInfinity);
    for (const uint32_t bits : {0x7fffffffu, 0xffffffffu, 0x7f800001u}) {
      EXPECT_TRUE(std::isnan(to_float(round_by_noise(tessera::detail::float_of(bits), noise, 0))));
    }
    EXPECT_TRUE(
        std::isfinite(to_float(round_by_noise(std::numeric_limits<float>::max(), noise, 0))));
    EXPECT_EQ(round_by_noise(-0.0f, noise, 0).bits, 0x8000);
  }
}

// ---- Places -------------------------------------------------------------------------------------

TEST(StateRounding, AnElementIsKnownByItsPlaceInTheWhole) {
  const Shape whole = {5, 6, 4};
  const Tensor numbers = arange(120).to(kF64).reshape(whole);
  const auto expect_places = [&](const Tensor& part, const Shape& offset) {
    const WholeIndex index = WholeIndex::of(part.shape(), part.strides(), whole, offset);
    // The part's elements in the order of its memory.
    const double* const memory = part.data_as<double>();
    for (int64_t i = 0; i < part.numel(); ++i) {
      ASSERT_EQ(index(i), static_cast<int64_t>(memory[i])) << i;
    }
  };
  expect_places(numbers, {0, 0, 0});
  expect_places(numbers.narrow(0, 2, 3).clone(), {2, 0, 0});
  expect_places(numbers.narrow(1, 1, 4).clone(), {0, 1, 0});
  expect_places(numbers.narrow(2, 3, 1).contiguous(), {0, 0, 3});
  expect_places(numbers.permute({2, 0, 1}).contiguous().permute({1, 2, 0}), {0, 0, 0});
  expect_places(numbers.narrow(1, 2, 3).permute({1, 2, 0}).contiguous().permute({2, 0, 1}),
                {0, 2, 0});
  EXPECT_TRUE(WholeIndex::of({3, 6, 4}, {24, 4, 1}, whole, {2, 0, 0}).is_run());
  EXPECT_FALSE(WholeIndex::of({5, 4, 4}, {16, 4, 1}, whole, {0, 1, 0}).is_run());
}

Tensor noise(const Shape& shape, uint64_t stream, DType dtype = kF32) {
  return randn(shape, {}, RandomStream{79, stream}).to(dtype);
}

// The state after three steps of a parameter that lies as make(values) does.
std::vector<double> state_of(const Shape& shape, const auto& make) {
  const Tensor parameter = make(noise(shape, 1)).detach().set_requires_grad();
  AdamW optimizer({{"w", parameter}}, {.lr = 0.1, .state_dtype = kBF16});
  for (uint64_t step = 0; step < 3; ++step) {
    parameter.set_grad(noise(shape, 2 + step));
    optimizer.step();
  }
  std::vector<double> all = parameter.to_vector();
  for (const char* name : {"exp_avg", "exp_avg_sq"}) {
    const auto state = optimizer.state_dict().at("state.w." + std::string(name)).to_vector();
    all.insert(all.end(), state.begin(), state.end());
  }
  return all;
}

TEST(StateRounding, LayoutAndThreadsChangeNoBit) {
  const Shape shape = {67, 5, 129};  // three chunks, and a rest that fills no block of noise
  const auto expected = state_of(shape, [](const Tensor& x) { return x; });
  EXPECT_EQ(state_of(shape,
                     [](const Tensor& x) {
                       return x.permute({2, 0, 1}).contiguous().permute({1, 2, 0});
                     }),
            expected);
  const int threads = num_threads();
  for (const int count : {1, 3}) {
    set_num_threads(count);
    EXPECT_EQ(state_of(shape, [](const Tensor& x) { return x; }), expected);
  }
  set_num_threads(threads);
}

// ---- Many numbers -------------------------------------------------------------------------------

// The sum of n independent errors of mean 0 in [-s, s], where s is a spacing, is beyond 6 s sqrt(n)
// with a probability below 2 exp(-18) (Hoeffding): 3e-8.
double bound_of_mean(double spacing, double count) { return 6 * spacing / std::sqrt(count); }

double mean_of(const Tensor& x) { return x.to(kF64).mean().item(); }

TEST(StateRounding, AveragesThatNearestWouldStopGoOnWithoutBias) {
  constexpr int64_t kCount = 1 << 14;
  constexpr int kSteps = 200;
  const Tensor parameter = zeros({kCount}).set_requires_grad();
  AdamW optimizer({{"w", parameter}}, {.lr = 0, .state_dtype = kBF16});
  parameter.set_grad(ones({kCount}));
  double exact = 0;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.step();
    exact = exact * 0.999 + 0.001;
  }
  // exp_avg_sq is 0.181, where the spacing is 2^-10: a step there is 8e-4, and rounded to nearest
  // each is taken for a whole spacing.
  EXPECT_NEAR(exact, 0.181, 1e-3);
  // Each step's error is under a spacing, and fades by 0.999: as of so many steps.
  const Tensor second = optimizer.state_dict().at("state.w.exp_avg_sq");
  EXPECT_EQ(second.dtype(), kBF16);
  EXPECT_NEAR(mean_of(second), exact, bound_of_mean(0x1p-10 * std::sqrt(kSteps), kCount));
  const Tensor first = optimizer.state_dict().at("state.w.exp_avg");
  EXPECT_NEAR(mean_of(first), 1 - std::pow(0.9, kSteps),
              bound_of_mean(0x1p-8 * std::sqrt(10), kCount));
  double nearest = 0;
  for (int step = 0; step < kSteps; ++step) {
    nearest = to_float(bf16(static_cast<float>(nearest * 0.999 + 0.001)));
  }
  EXPECT_GT(std::abs(nearest - exact), 10 * bound_of_mean(0x1p-10 * std::sqrt(kSteps), kCount))
      << "the bound is fine enough to see what rounding to nearest loses";
}

// Values between two neighbours: how often each state of each element went up.
TEST(StateRounding, NoiseOfStatesStepsAndNamesIsIndependent) {
  constexpr int64_t kCount = 1 << 15;
  const StateRounding w{StateRounding::key_of("w"), WholeIndex::of({kCount}, {1}, {kCount}, {0})};
  const StateRounding v{StateRounding::key_of("v"), w.index};
  std::vector<uint32_t> now(kCount), next(kCount), other(kCount);
  const auto draw = [](const StateRounding& rounding, double step, std::vector<uint32_t>& into) {
    for (int64_t i = 0; i < kCount; i += 4) {
      uint32_t four[4] = {};
      kernels::draw_noise(rounding.index, rounding.stream(step), i, four);
      std::copy_n(four, 4, into.begin() + i);
    }
  };
  draw(w, 1, now), draw(w, 2, next), draw(v, 1, other);
  // Products of signs of independent fair coins have mean 0.
  const auto agreement = [&](const auto& a, const auto& b) {
    double sum = 0;
    for (size_t i = 0; i < kCount; ++i) sum += a(i) == b(i) ? 1 : -1;
    return sum / kCount;
  };
  const auto up = [](const std::vector<uint32_t>& noise, int state) {
    return [&noise, state](size_t i) {
      return round_by_noise(1.001953125f, noise[i], state).bits == 0x3f81;  // a quarter above 1
    };
  };
  const auto half = [](const std::vector<uint32_t>& noise, int state) {
    return [&noise, state](size_t i) { return round_by_noise(1.00390625f, noise[i], state).bits; };
  };
  const double bound = bound_of_mean(1, kCount);
  EXPECT_NEAR(agreement(half(now, 0), half(now, 1)), 0, bound);
  EXPECT_NEAR(agreement(half(now, 0), half(next, 0)), 0, bound);
  EXPECT_NEAR(agreement(half(now, 0), half(other, 0)), 0, bound);
  EXPECT_NEAR(agreement(up(now, 0), [](size_t) { return true; }), 2 * 0.25 - 1, bound);
  EXPECT_NEAR(agreement(up(now, 1), [](size_t) { return true; }), 2 * 0.25 - 1, bound);
}

// ---- Optimizers ---------------------------------------------------------------------------------

TEST(RoundedStates, TheyTakeHalfTheMemory) {
  const auto bytes = [](DType state) {
    const Tensor parameter = zeros({100, 10}).set_requires_grad();
    AdamW optimizer({{"w", parameter}}, {.state_dtype = state});
    parameter.set_grad(ones({100, 10}));
    optimizer.step();
    return optimizer.state_bytes();
  };
  EXPECT_EQ(bytes(kF32), 8000);
  EXPECT_EQ(bytes(kBF16), 4000);
}

TEST(RoundedStates, AStateDictResumesBitForBit) {
  for (const DType dtype : {kF32, kBF16}) {
    const Tensor parameter = noise({40, 50}, 1, dtype).set_requires_grad();
    const AdamOptions options{.lr = 0.01, .state_dtype = kBF16};
    Adam optimizer({{"w", parameter}}, options);
    for (uint64_t step = 0; step < 3; ++step) {
      parameter.set_grad(noise({40, 50}, 2 + step, dtype));
      optimizer.step();
    }
    const StateDict saved = optimizer.state_dict().clone();
    EXPECT_EQ(saved.scalar("group.0.state_bits"), 16);
    const Tensor copy = parameter.detach().clone().set_requires_grad();
    manual_seed(12345);  // of another process
    Adam resumed({{"w", copy}});
    resumed.load_state_dict(saved);
    EXPECT_EQ(resumed.options().state_dtype, kBF16);
    for (uint64_t step = 3; step < 6; ++step) {
      parameter.set_grad(noise({40, 50}, 2 + step, dtype));
      copy.set_grad(noise({40, 50}, 2 + step, dtype));
      optimizer.step(), resumed.step();
    }
    EXPECT_EQ(parameter.to_vector(), copy.to_vector());
    const StateDict a = optimizer.state_dict(), b = resumed.state_dict();
    for (const auto& [name, value] : a) EXPECT_EQ(value.to_vector(), b.at(name).to_vector());
  }
}

TEST(RoundedStates, AFileFromBeforeThereWereAnySaysF32) {
  const Tensor parameter = noise({3}, 1).set_requires_grad();
  AdamW written({{"w", parameter}}, {.lr = 0.01});
  parameter.set_grad(noise({3}, 2));
  written.step();
  const StateDict saved = written.state_dict().clone();
  EXPECT_FALSE(saved.contains("group.0.state_bits"));
  AdamW reader({{"w", parameter}}, {.state_dtype = kBF16});
  reader.load_state_dict(saved);
  EXPECT_EQ(reader.options().state_dtype, kF32);
  EXPECT_EQ(reader.state_dict().at("state.w.exp_avg").dtype(), kF32);
}

TEST(RoundedStates, WhoeverCannotRoundRefuses) {
  const auto one = [](DType dtype) {
    return NamedTensors{{"w", zeros({2}, {.dtype = dtype}).set_requires_grad()}};
  };
  EXPECT_NE(message_of<ValueError>([&] {
              AdamW(one(kF32), {.amsgrad = true, .state_dtype = kBF16});
            }).find("amsgrad needs state_dtype kF32"),
            std::string::npos);
  EXPECT_THROW(AdamW(one(kF32), {.state_dtype = kF16}), ValueError);
  EXPECT_THROW(AdamW(one(kF32), {.state_dtype = kF64}), ValueError);
  EXPECT_NE(message_of<DTypeError>([&] {
              AdamW(one(kF64), {.state_dtype = kBF16});
            }).find("'w' is f64[2]"),
            std::string::npos);
  // A rule that has no such states takes none, and no file brings it any.
  const Tensor x = zeros({4}), narrow = zeros({4}, {.dtype = kBF16});
  const double scalars[kernels::kNumStepScalars] = {0.1, 1, 1, 0};
  const kernels::UpdateTensors entry{x, ones({4}), {narrow}};
  EXPECT_THROW(
      kernels::multi_tensor_update<kernels::rules::SGD>({&entry, 1}, {.momentum = 0.9}, scalars),
      DTypeError);
  const kernels::UpdateTensors mixed{x, ones({4}), {narrow, zeros({4})}};
  EXPECT_THROW(kernels::multi_tensor_update<kernels::rules::AdamW>({&mixed, 1}, {}, scalars),
               DTypeError);
  SGD sgd(one(kF32), {.momentum = 0.9});
  StateDict state = sgd.state_dict();
  state.set("group.0.state_bits", scalar_tensor(16.0, kF64));
  EXPECT_THROW(sgd.load_state_dict(state), ValueError);
}

// A step that the device left out counts for no noise either.
TEST(RoundedStates, AStepThatIsLeftOutLeavesTheNumberOfTheNext) {
  const auto run = [](bool leaves_out) {
    const Tensor parameter = noise({500}, 1).set_requires_grad();
    AdamW optimizer({{"w", parameter}}, {.lr = 0.01, .state_dtype = kBF16});
    for (uint64_t step = 0; step < 3; ++step) {
      if (leaves_out && step == 1) {
        parameter.set_grad(noise({500}, 50));
        optimizer.skip_next_step_where(ones({1}, {.dtype = kF64}));
        optimizer.step();
      }
      parameter.set_grad(noise({500}, 2 + step));
      optimizer.step();
    }
    return optimizer.state_dict().at("state.w.exp_avg").to_vector();
  };
  EXPECT_EQ(run(true), run(false));
}

}  // namespace
}  // namespace tessera::optim::test_state_rounding
