// Muon against PyTorch, its options, its state, and what it refuses.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>

#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/muon.h>
#include <tessera/optim/optimizers.h>
#include <tessera/optim/schedule.h>

#include "golden_files.h"
#include "message_of.h"

namespace tessera::optim::test_muon {
namespace {

using nlohmann::json;
using tests::golden_json;
using tests::golden_path;

constexpr double kEpsBf16 = 0x1p-8;

MuonOptions read_options(const json& values, MuonOptions options) {
  size_t read = 0;
  const auto take = [&](const char* name, auto& field) {
    if (values.contains(name)) values[name].get_to(field), ++read;
  };
  take("lr", options.lr), take("weight_decay", options.weight_decay);
  take("momentum", options.momentum), take("nesterov", options.nesterov);
  take("ns_coefficients", options.ns_coefficients), take("eps", options.eps);
  take("ns_steps", options.ns_steps);
  std::string adjust;
  take("adjust_lr_fn", adjust);
  if (adjust == "match_rms_adamw") options.adjust_lr_fn = AdjustLr::kMatchRmsAdamW;
  if (adjust == "spectral_unclamped") options.adjust_lr_fn = AdjustLr::kSpectralUnclamped;
  EXPECT_EQ(read, values.size()) << values;
  return options;
}

Tensor row_of(const Tensor& x, int64_t row, DType dtype) {
  return raw::narrow(x, 0, row, 1).to(dtype).reshape(x.shape().slice(1, x.dim())).clone();
}

double largest_difference(const Tensor& a, const Tensor& b) {
  const std::vector<double> x = a.to_vector<double>(), y = b.to_vector<double>();
  EXPECT_EQ(x.size(), y.size());
  double largest = 0;
  for (size_t i = 0; i < x.size(); ++i) largest = std::max(largest, std::abs(x[i] - y[i]));
  return largest;
}

// The iteration rounds to bf16 in each product. Where its sums are f32, as torch's, the roundings
// are the same ones and 0.003 of an eps of bf16 of a step is left (measured with AVX2); engines
// that add up in pairs (AMX) may round now and then to the other side, which the next product
// carries on. A step's elements are at most about 1.2 times the rate, and ten steps add up.
TEST(GoldenMuon, TenStepsAreThoseOfTorch) {
  const SafeTensorsFile file(golden_path("muon.safetensors"));
  int cases = 0;
  for (const json& golden : golden_json("muon.json")) {
    const std::string name = golden["name"];
    SCOPED_TRACE(name);
    const DType dtype = golden["dtype"] == "float64" ? kF64 : kF32;
    const MuonOptions options = read_options(golden["options"], {});
    NamedTensors parameters;
    for (int i = 0; i < 5; ++i) {
      const std::string key = "p" + std::to_string(i);
      const Tensor start = file.view("start/" + key).to(dtype).clone();
      parameters.push_back({key, start.set_requires_grad()});
    }
    std::vector<ParameterGroup<MuonOptions>> groups;
    if (golden.contains("groups")) {
      for (const json& group : golden["groups"]) {
        groups.push_back({{}, read_options(group, options)});
      }
    } else {
      groups.push_back({{}, options});
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      groups[i % groups.size()].parameters.push_back(parameters[i]);
    }
    Muon optimizer(groups);
    for (int64_t step = 0; step < 10; ++step) {
      for (const auto& [key, parameter] : parameters) {
        parameter.set_grad(row_of(file.view("grads/" + key), step, dtype));
      }
      ASSERT_TRUE(optimizer.step());
      for (size_t i = 0; i < parameters.size(); ++i) {
        const auto& [key, parameter] = parameters[i];
        const auto a = static_cast<double>(parameter.size(0));
        const auto b = static_cast<double>(parameter.size(1));
        const MuonOptions& own = groups[i % groups.size()].options;
        const double ratio = own.adjust_lr_fn == AdjustLr::kMatchRmsAdamW
                                 ? 0.2 * std::sqrt(std::max(a, b))
                                 : std::sqrt(std::max(1.0, a / b));
        const double of_a_step = own.lr * ratio * kEpsBf16;
        const double difference =
            largest_difference(parameter, row_of(file.view(name + "/" + key), step, dtype));
        EXPECT_LE(difference, 2 * of_a_step * static_cast<double>(step + 1))
            << key << " step " << step;
      }
    }
    ++cases;
  }
  EXPECT_EQ(cases, 9);
}

Tensor noise(const Shape& shape, uint64_t stream, DType dtype = kF32) {
  return randn(shape, {}, RandomStream{77, stream}).to(dtype);
}
NamedTensors matrices(DType dtype = kF32) {
  NamedTensors list = {{"wide", noise({6, 20}, 1, dtype)},
                       {"tall", noise({31, 7}, 2, dtype)},
                       {"square", noise({9, 9}, 3, dtype)}};
  for (const auto& one : list) one.tensor.set_requires_grad();
  return list;
}
void set_noise(const NamedTensors& parameters, int step) {
  uint64_t stream = 100 + 10 * static_cast<uint64_t>(step);
  for (const auto& [name, parameter] : parameters) {
    parameter.set_grad(noise(parameter.shape(), stream++, parameter.dtype()));
  }
}
std::vector<double> values_of(const NamedTensors& parameters) {
  std::vector<double> values;
  for (const auto& [name, parameter] : parameters) {
    const auto own = parameter.to_vector<double>();
    values.insert(values.end(), own.begin(), own.end());
  }
  return values;
}

TEST(NewtonSchulz, SingularValuesComeToLieAroundOne) {
  // The coefficients' polynomial takes what is not tiny into [0.68, 1.14], Jordan's page says; the
  // products in bf16 add some eps.
  for (const Shape& shape : {Shape{8, 64}, Shape{64, 8}}) {
    const Tensor x = newton_schulz(noise(shape, 5, kBF16));
    ASSERT_EQ(x.shape(), shape);
    const Tensor wide = shape[0] < shape[1] ? x.to(kF64) : x.to(kF64).transpose(0, 1);
    const Tensor gram = matmul(wide, wide.transpose(0, 1));
    double trace = 0;
    for (int64_t i = 0; i < 8; ++i) {
      const double diagonal = gram.select(0, i).select(0, i).item();
      trace += diagonal;
      EXPECT_GT(diagonal, 0.4);
      EXPECT_LT(diagonal, 1.4);
    }
    EXPECT_NEAR(trace / 8, 0.8, 0.3);
  }
}

TEST(NewtonSchulz, OfNothingIsNothing) {
  EXPECT_EQ(newton_schulz(zeros({3, 5}, {.dtype = kBF16})).to_vector(),
            std::vector<double>(15, 0.0));
  EXPECT_EQ(newton_schulz(zeros({0, 5}, {.dtype = kBF16})).shape(), (Shape{0, 5}));
}

TEST(NewtonSchulz, RefusesWhatIsNoMatrixOfBf16) {
  EXPECT_THROW(newton_schulz(zeros({3}, {.dtype = kBF16})), ShapeError);
  EXPECT_THROW(newton_schulz(zeros({3, 3})), DTypeError);
}

TEST(Muon, TheOrderOfAMatrixInMemoryChangesNoBit) {
  const Tensor values = noise({6, 20}, 1);
  const NamedTensors rows = {{"w", values.clone().set_requires_grad()}};
  const Tensor columns = values.transpose(0, 1).contiguous().transpose(0, 1);
  ASSERT_FALSE(columns.is_contiguous());
  const NamedTensors other = {{"w", columns.detach().set_requires_grad()}};
  Muon first(rows, {.lr = 0.1}), second(other, {.lr = 0.1});
  for (int step = 0; step < 3; ++step) {
    set_noise(rows, step), set_noise(other, step);
    first.step(), second.step();
  }
  EXPECT_EQ(values_of(rows), values_of(other));
}

TEST(Muon, StateDictResumesBitForBit) {
  for (const DType dtype : {kF32, kBF16, kF64}) {
    for (const DType state : {kF32, kBF16}) {
      if (dtype == kF64 && state == kBF16) continue;
      SCOPED_TRACE(std::string(name_of(dtype)) + " " + std::string(name_of(state)));
      const NamedTensors parameters = matrices(dtype);
      const MuonOptions options{.lr = 0.02,
                                .ns_coefficients = {2, -1.5, 0.5},
                                .ns_steps = 3,
                                .adjust_lr_fn = AdjustLr::kSpectralUnclamped,
                                .state_dtype = state};
      Muon optimizer(parameters, options);
      for (int step = 0; step < 3; ++step) set_noise(parameters, step), optimizer.step();
      const StateDict saved = optimizer.state_dict().clone();
      EXPECT_EQ(saved.at("state.tall.momentum_buffer").dtype(), dtype == kF64 ? kF64 : state);
      NamedTensors copies;
      for (const auto& [name, parameter] : parameters) {
        copies.push_back({name, parameter.detach().clone().set_requires_grad()});
      }
      Muon resumed(copies);  // the options are the state's
      resumed.load_state_dict(saved);
      EXPECT_EQ(resumed.options().ns_steps, 3);
      EXPECT_EQ(resumed.options().ns_coefficients[1], -1.5);
      EXPECT_EQ(resumed.options().adjust_lr_fn, AdjustLr::kSpectralUnclamped);
      EXPECT_EQ(resumed.options().state_dtype, state);
      for (int step = 3; step < 6; ++step) {
        set_noise(parameters, step), set_noise(copies, step);
        optimizer.step(), resumed.step();
      }
      EXPECT_EQ(values_of(parameters), values_of(copies));
    }
  }
}

TEST(Muon, ParametersOf16BitsHaveMasters) {
  const NamedTensors narrow = matrices(kBF16);
  NamedTensors wide;
  for (const auto& [name, parameter] : narrow) {
    wide.push_back({name, parameter.detach().to(kF32).set_requires_grad()});
  }
  Muon first(narrow, {.lr = 1e-4}), second(wide, {.lr = 1e-4});
  for (int step = 0; step < 20; ++step) {
    set_noise(narrow, step);
    for (size_t i = 0; i < wide.size(); ++i) {
      wide[i].tensor.set_grad(narrow[i].tensor.grad().to(kF32));
    }
    first.step(), second.step();
  }
  for (const auto& [name, parameter] : wide) {
    EXPECT_EQ(first.state_dict().at("state." + name + ".master").to_vector(),
              parameter.to_vector());
  }
  EXPECT_EQ(values_of(narrow), [&] {
    NamedTensors rounded;
    for (const auto& [name, parameter] : wide) {
      rounded.push_back({name, parameter.detach().to(kBF16)});
    }
    return values_of(rounded);
  }());
}

TEST(Muon, AParameterThatJoinsLateHasTheBitsOfOneThatBegins) {
  const NamedTensors parameters = matrices();
  Muon optimizer(parameters, {.lr = 0.1});
  set_noise(parameters, 0);
  parameters[1].tensor.zero_grad();
  const auto before = parameters[1].tensor.to_vector();
  optimizer.step();
  EXPECT_EQ(parameters[1].tensor.to_vector(), before);
  const NamedTensors fresh = {{"tall", parameters[1].tensor.detach().clone().set_requires_grad()}};
  Muon second(fresh, {.lr = 0.1});
  for (int step = 1; step < 4; ++step) {
    set_noise(parameters, step);
    fresh[0].tensor.set_grad(parameters[1].tensor.grad().clone());
    optimizer.step(), second.step();
  }
  EXPECT_EQ(parameters[1].tensor.to_vector(), fresh[0].tensor.to_vector());
}

TEST(Muon, AFactorIsAppliedToGradientsAsTheyAreRead) {
  const NamedTensors folded = matrices(), scaled = matrices();
  Muon first(folded, {.lr = 0.1}), second(scaled, {.lr = 0.1});
  for (int step = 0; step < 3; ++step) {
    set_noise(folded, step), set_noise(scaled, step);
    first.scale_next_step(0.25);
    for (const auto& [name, parameter] : scaled) {
      parameter.set_grad(parameter.grad() * Scalar(0.25));
    }
    first.step(), second.step();
  }
  EXPECT_EQ(values_of(folded), values_of(scaled));
}

TEST(Muon, AStepThatIsLeftOutChangesNothing) {
  const NamedTensors parameters = matrices();
  Muon optimizer(parameters, {.lr = 0.1});
  set_noise(parameters, 0);
  optimizer.step();
  const auto before = values_of(parameters);
  const StateDict state = optimizer.state_dict().clone();
  set_noise(parameters, 1);
  optimizer.skip_next_step_where(ones({1}, {.dtype = kF64}));
  optimizer.step();
  EXPECT_EQ(values_of(parameters), before);
  for (const auto& [name, value] : optimizer.state_dict()) {
    EXPECT_EQ(value.to_vector(), state.at(name).to_vector()) << name;
  }
}

TEST(Muon, OneFactorOfAClipServesWhoeverHoldsTheRest) {
  const auto run = [](bool folds) {
    const NamedTensors parameters = matrices();
    Muon muon({parameters[0], parameters[1]}, {.lr = 0.1});
    AdamW adamw({parameters[2]}, {.lr = 0.1, .eps = 1});
    TensorList all;
    for (const auto& [name, parameter] : parameters) all.push_back(parameter);
    for (int step = 0; step < 3; ++step) {
      set_noise(parameters, step);
      const ClipOptions options =
          folds ? ClipOptions{.fold_into = &adamw, .fold_into_others = {&muon}} : ClipOptions{};
      clip_grad_norm(all, 0.5, options);
      muon.step(), adamw.step();
    }
    return values_of(parameters);
  };
  const auto folded = run(true), scaled = run(false);
  for (size_t i = 0; i < folded.size(); ++i) EXPECT_NEAR(folded[i], scaled[i], 16 * 0x1p-24 * 4);
  const NamedTensors parameters = matrices();
  Muon muon(parameters), other({{"x", noise({2, 2}, 1).set_requires_grad()}});
  set_noise(parameters, 0);
  EXPECT_THROW(clip_grad_norm({parameters[0].tensor}, 1, {.fold_into_others = {&muon}}),
               ValueError);
  other.scale_next_step(0.5);
  EXPECT_THROW(
      clip_grad_norm({parameters[0].tensor}, 1, {.fold_into = &muon, .fold_into_others = {&other}}),
      ValueError);
}

TEST(Muon, SchedulesMoveItsRateAndMomentum) {
  const NamedTensors parameters = matrices();
  Muon optimizer(parameters, {.lr = 0.1});
  OneCycleSchedule schedule(optimizer, {.max_lr = 0.3, .total = 10});
  EXPECT_NEAR(optimizer.lr(), 0.3 / 25, 1e-15);
  EXPECT_EQ(optimizer.options().momentum, 0.95);  // where the rate is lowest
  schedule.step();
  EXPECT_LT(optimizer.options().momentum, 0.95);
}

TEST(Muon, RefusesWhatIsNoMatrixByName) {
  const std::string message = message_of([] {
    Muon({{"fine", zeros({2, 2}).set_requires_grad()}, {"bias", zeros({5}).set_requires_grad()}});
  });
  EXPECT_NE(message.find("'bias' is f32[5]"), std::string::npos) << message;
  EXPECT_THROW(Muon({{"conv", zeros({2, 2, 2}).set_requires_grad()}}), ShapeError);
  EXPECT_THROW(Muon({{"one", zeros({}).set_requires_grad()}}), ShapeError);
}

TEST(Muon, RefusesOptionsOutOfTheRangeOfTorch) {
  const auto make = [](const MuonOptions& options) { Muon(matrices(), options); };
  EXPECT_THROW(make({.lr = -1}), ValueError);
  EXPECT_THROW(make({.weight_decay = -1}), ValueError);
  EXPECT_THROW(make({.momentum = -0.1}), ValueError);
  EXPECT_THROW(make({.ns_steps = 100}), ValueError);
  EXPECT_THROW(make({.ns_steps = -1}), ValueError);
  EXPECT_THROW(make({.state_dtype = kF16}), ValueError);
  EXPECT_THROW(Muon(matrices(kF64), {.state_dtype = kBF16}), DTypeError);
}

TEST(SplitForMuon, SortsByDimensionsAndByNames) {
  const NamedTensors all = {{"wte.weight", zeros({9, 4})},  {"h.0.weight", zeros({4, 4})},
                            {"h.0.bias", zeros({4})},       {"h.conv", zeros({2, 2, 2})},
                            {"wte2.weight", zeros({3, 3})}, {"lm_head.weight", zeros({9, 4})}};
  const auto names = [](const NamedTensors& list) {
    std::string text;
    for (const auto& one : list) text += one.name + " ";
    return text;
  };
  const auto [matrices, others] = split_for_muon(all, {"wte", "lm_head.weight"});
  EXPECT_EQ(names(matrices), "h.0.weight wte2.weight ");
  EXPECT_EQ(names(others), "wte.weight h.0.bias h.conv lm_head.weight ");
  EXPECT_EQ(names(split_for_muon(all).matrices),
            "wte.weight h.0.weight wte2.weight lm_head.weight ");
  EXPECT_THROW(split_for_muon(all, {"wpe"}), ValueError);
}

}  // namespace
}  // namespace tessera::optim::test_muon
