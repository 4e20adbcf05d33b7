// L-BFGS against torch's, step by step; what it does with closures, states and errors.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/optim/lbfgs.h>

#include "golden_files.h"
#include "message_of.h"
#include "refusals.h"

namespace tessera::tests::test_lbfgs {
namespace {

using nlohmann::json;
using optim::LBFGS;
using optim::LbfgsOptions;
using optim::LineSearch;

// The functions of tests/golden/transform_cases.py: a valley that bends, and waves with many
// minima.
Tensor loss_of(const Tensor& a, const Tensor& b) {
  const int64_t n = b.size(0);
  const Tensor later = b.narrow(0, 1, n - 1), earlier = b.narrow(0, 0, n - 1);
  const Tensor valley = (10.0 * square(later - square(earlier)) + square(1.0 - earlier)).sum();
  return valley + square(exp(a) - 2.0).sum() + 0.1 * tanh(a.sum()) * b.sum();
}

Tensor waves_of(const Tensor& a, const Tensor& b) {
  const auto of = [](const Tensor& x) { return 0.05 * square(x).sum() + sin(3.0 * x).sum(); };
  return of(a) + of(b);
}

Tensor peaks_of(const Tensor& a, const Tensor& b) {
  return log1p(50.0 * square(a)).sum() + log1p(50.0 * square(b)).sum();
}

NamedTensors start_values(const SafeTensorsFile& file, DType dtype = kF64) {
  NamedTensors parameters;
  for (const char* name : {"p0", "p1"}) {
    const Tensor start = file.load(std::string("start/") + name);
    parameters.push_back({name, start.to(dtype).clone().set_requires_grad()});
  }
  return parameters;
}

LbfgsOptions options_of(const json& o) {
  LbfgsOptions options;
  options.lr = o.value("lr", options.lr);
  options.max_iter = o.value("max_iter", options.max_iter);
  if (o.contains("max_eval")) options.max_eval = o["max_eval"].get<int64_t>();
  options.tolerance_change = o.value("tolerance_change", options.tolerance_change);
  options.history_size = o.value("history_size", options.history_size);
  options.maximize = o.value("maximize", false);
  if (o.contains("line_search_fn")) options.line_search = LineSearch::kStrongWolfe;
  return options;
}

std::function<Tensor()> closure_of(LBFGS& optimizer, const NamedTensors& parameters,
                                   double sign = 1, decltype(&loss_of) function = loss_of) {
  return [&optimizer, parameters, sign, function] {
    optimizer.zero_grad();
    const Tensor loss = sign * function(parameters[0].tensor, parameters[1].tensor);
    loss.backward();
    return loss;
  };
}

void expect_near(const Tensor& got, const std::vector<double>& expected, double tolerance,
                 const std::string& where) {
  const std::vector<double> values = got.to_vector();
  ASSERT_EQ(values.size(), expected.size()) << where;
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_NEAR(values[i], expected[i], tolerance) << where << " element " << i;
  }
}

TEST(Lbfgs, EveryStepIsThatOfTorch) {
  const SafeTensorsFile file(golden_path("lbfgs.safetensors"));
  const json cases = golden_json("lbfgs.json");
  EXPECT_EQ(cases.size(), 13u);
  for (const json& golden : cases) {
    const std::string name = golden["name"];
    SCOPED_TRACE(name);
    const NamedTensors parameters = start_values(file);
    LBFGS optimizer(parameters, options_of(golden["options"]));
    const double sign = golden["options"].value("maximize", false) ? -1 : 1;
    const auto function = name.starts_with("waves")   ? waves_of
                          : name.starts_with("peaks") ? peaks_of
                                                      : loss_of;
    const auto closure = closure_of(optimizer, parameters, sign, function);
    const std::vector<double> losses = golden["losses"];
    for (size_t step = 0; step < losses.size(); ++step) {
      const std::string where = "step " + std::to_string(step);
      // Products of a few numbers, whose rounding a search of dozens of trials magnifies.
      EXPECT_NEAR(optimizer.step(closure).item(), losses[step],
                  1e-10 * std::max(1.0, std::abs(losses[step])))
          << where;
      EXPECT_EQ(optimizer.evaluations(), golden["evaluations"][step].get<int64_t>()) << where;
      EXPECT_EQ(optimizer.iterations(), golden["iterations"][step].get<int64_t>()) << where;
      for (const auto& [key, parameter] : parameters) {
        const Tensor all = file.load(name + "/" + key);
        expect_near(parameter, all.select(0, static_cast<int64_t>(step)).to_vector(), 1e-9,
                    where + " " + key);
      }
    }
  }
}

TEST(Lbfgs, FindsTheMinimumInF32) {
  const SafeTensorsFile file(golden_path("lbfgs.safetensors"));
  const NamedTensors parameters = start_values(file, kF32);
  LBFGS optimizer(parameters, {.max_iter = 60, .line_search = LineSearch::kStrongWolfe});
  const auto closure = closure_of(optimizer, parameters);
  const double before = optimizer.step(closure).item();
  const double after = closure().item();
  EXPECT_LT(after, 0.05 * before);
  double largest = 0;
  for (const auto& [name, parameter] : parameters) {
    largest = std::max(largest, max(abs(parameter.grad())).item());
  }
  EXPECT_LT(largest, 0.05) << "no way down is left";
}

TEST(Lbfgs, GoesOnFromASavedState) {
  const SafeTensorsFile file(golden_path("lbfgs.safetensors"));
  const LbfgsOptions options{
      .max_iter = 4, .history_size = 5, .line_search = LineSearch::kStrongWolfe};
  const NamedTensors parameters = start_values(file);
  LBFGS optimizer(parameters, options);
  const auto closure = closure_of(optimizer, parameters);
  optimizer.step(closure);
  const StateDict saved = optimizer.state_dict().clone();
  NamedTensors copies;
  for (const auto& [name, parameter] : parameters) {
    copies.push_back({name, parameter.detach().clone().set_requires_grad()});
  }
  LBFGS other(copies, options);
  other.load_state_dict(saved);
  EXPECT_EQ(other.iterations(), optimizer.iterations());
  optimizer.step(closure);
  other.step(closure_of(other, copies));
  for (size_t i = 0; i < copies.size(); ++i) {
    EXPECT_EQ(copies[i].tensor.to_vector(), parameters[i].tensor.to_vector());
  }
  EXPECT_THROW(LBFGS({{"p", parameters[0].tensor}}, options).load_state_dict(saved), ValueError);
}

TEST(Lbfgs, CallsTheClosureOnceWhereNothingIsToBeDone) {
  const Tensor x = zeros({3}).set_requires_grad();
  LBFGS optimizer({{"x", x}});
  int calls = 0;
  optimizer.step([&] {
    ++calls;
    optimizer.zero_grad();
    const Tensor loss = square(x).sum();
    loss.backward();
    return loss;
  });
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(optimizer.iterations(), 0);
  EXPECT_EQ(x.to_vector(), std::vector<double>(3, 0));
}

TEST(Lbfgs, RefusesWhatItCannotUse) {
  const Tensor x = zeros({3}).set_requires_grad();
  EXPECT_THROW(LBFGS(NamedTensors{}), ValueError);
  EXPECT_THROW(LBFGS({{"x", x}}, {.lr = -1}), ValueError);
  EXPECT_THROW(LBFGS({{"x", x}}, {.history_size = 0}), ValueError);
  EXPECT_THROW(LBFGS({{"n", zeros({2}, {.dtype = kI64})}}), DTypeError);
  const auto with = [&](const LbfgsOptions& options) {
    return [&x, options] { LBFGS({{"x", x}}, options); };
  };
  for (const LbfgsOptions& fits :
       {LbfgsOptions{.lr = 0}, LbfgsOptions{.max_iter = 1}, LbfgsOptions{.history_size = 1},
        LbfgsOptions{.tolerance_grad = 0}, LbfgsOptions{.tolerance_change = 0}}) {
    EXPECT_NO_THROW(with(fits)());
  }
  expect_refusals({
      {"needs at least one parameter", [] { LBFGS(NamedTensors{}); }},
      {"the parameter 'y' is undefined",
       [&] {
         LBFGS({{"x", x}, {"y", Tensor()}});
       }},
      {"'y' must be f64, f32, f16 or bf16",
       [&] {
         LBFGS({{"x", x}, {"y", zeros({2}, {.dtype = kF8E4M3})}});
       }},
      {"all parameters on one device",
       [&] {
         LBFGS({{"x", x}, {"y", zeros({2}, {.device = kMeta})}});
       }},
      {"'lr' is out of its range; got -1", with({.lr = -1})},
      {"'max_iter' is out of its range; got 0", with({.max_iter = 0})},
      {"'history_size' is out of its range; got 0", with({.history_size = 0})},
      {"'tolerance_grad' is out of its range", with({.tolerance_grad = -1e-9})},
      {"'tolerance_change' is out of its range", with({.tolerance_change = -1e-9})},
  });
  LBFGS optimizer({{"x", x}});
  const std::string message = message_of<ShapeError>([&] { optimizer.step([&] { return x; }); });
  EXPECT_NE(message.find("the closure must return the loss"), std::string::npos) << message;
}

}  // namespace
}  // namespace tessera::tests::test_lbfgs
