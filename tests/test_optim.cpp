#include <tessera/optim/optimizer.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/autograd/weight_cache.h>
#include <tessera/core/kernels/optim/multi_tensor.h>
#include <tessera/core/profiler.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/schedule.h>

#include "message_of.h"
#include "optimizer_kinds.h"

namespace tessera::optim {
namespace {

NamedTensors make_parameters(DType dtype = kF32) {
  NamedTensors named = {{"a", tensor({1, 2, 3, 4}).view({2, 2}).clone().to(dtype)},
                        {"b", tensor({-1, 0.5}).to(dtype)}};
  for (const auto& one : named) one.tensor.set_requires_grad();
  return named;
}
// Gradients that change from step to step.
void set_gradients(const NamedTensors& parameters, int step) {
  double value = 0.1 * step + 0.3;
  for (const auto& [name, parameter] : parameters) {
    std::vector<double> values;
    for (int64_t i = 0; i < parameter.numel(); ++i)
      values.push_back(value = std::sin(3 * value + 1));
    parameter.set_grad(tensor(values, parameter.shape(), parameter.dtype()));
  }
}
std::vector<double> values_of(const NamedTensors& parameters) {
  std::vector<double> values;
  for (const auto& [name, parameter] : parameters) {
    const auto own = parameter.to_vector();
    values.insert(values.end(), own.begin(), own.end());
  }
  return values;
}

template <class T>
class EveryOptimizer : public testing::Test {};
TYPED_TEST_SUITE(EveryOptimizer, OptimizerKinds);

TYPED_TEST(EveryOptimizer, StateDictResumesBitForBit) {
  for (const DType dtype : {kF32, kBF16, kF64}) {
    SCOPED_TRACE(name_of(dtype));
    const NamedTensors parameters = make_parameters(dtype);
    TypeParam optimizer(parameters, kOptions<TypeParam>.front());
    for (int step = 0; step < 3; ++step) {
      set_gradients(parameters, step);
      optimizer.step();
    }
    optimizer.set_lr(0.03);
    const StateDict saved = optimizer.state_dict().clone();

    NamedTensors copies;
    for (const auto& [name, parameter] : parameters) {
      copies.push_back({name, parameter.detach().clone().set_requires_grad()});
    }
    TypeParam resumed(copies, kOptions<TypeParam>.front());
    resumed.load_state_dict(saved);
    EXPECT_EQ(resumed.lr(), 0.03);
    for (int step = 3; step < 6; ++step) {
      for (const NamedTensors& list : {parameters, copies}) set_gradients(list, step);
      optimizer.step();
      resumed.step();
    }
    EXPECT_EQ(values_of(parameters), values_of(copies));
  }
}

TYPED_TEST(EveryOptimizer, MasterWeightsKeepStepsThatBf16WouldLose) {
  const auto run = [](DType dtype, bool master) {
    const NamedTensors parameters = make_parameters(dtype);
    auto options = kOptions<TypeParam>.front();
    options.lr = 1e-4;  // far below the spacing of bf16 near 1
    options.master_weights = master;
    TypeParam optimizer(parameters, options);
    for (int step = 0; step < 100; ++step) {
      for (const auto& one : parameters) one.tensor.set_grad(ones_like(one.tensor));
      optimizer.step();
    }
    return values_of(parameters);
  };
  const auto exact = run(kF32, true), with_master = run(kBF16, true), without = run(kBF16, false);
  for (size_t i = 0; i < exact.size(); ++i) {
    EXPECT_NEAR(with_master[i], exact[i], std::abs(exact[i]) * 0x1p-8 + 1e-6);
  }
  EXPECT_EQ(without[0], 1) << "steps smaller than half a spacing vanish";
}

TYPED_TEST(EveryOptimizer, ParametersWithoutGradientStayAndJoinLater) {
  const NamedTensors parameters = make_parameters();
  TypeParam optimizer(parameters, kOptions<TypeParam>.front());
  set_gradients(parameters, 0);
  parameters[1].tensor.zero_grad();
  const auto before = parameters[1].tensor.to_vector();
  optimizer.step();
  EXPECT_EQ(parameters[1].tensor.to_vector(), before);
  // From now on it goes the way of one that begins now.
  NamedTensors fresh = {{"b", parameters[1].tensor.detach().clone().set_requires_grad()}};
  TypeParam second(fresh, kOptions<TypeParam>.front());
  for (int step = 1; step < 4; ++step) {
    set_gradients(parameters, step);
    fresh[0].tensor.set_grad(parameters[1].tensor.grad().clone());
    optimizer.step();
    second.step();
  }
  EXPECT_EQ(parameters[1].tensor.to_vector(), fresh[0].tensor.to_vector());
}

TYPED_TEST(EveryOptimizer, StateCountsAsOptimizerMemory) {
  const Tensor parameter = zeros({64, 64}).set_requires_grad();
  TypeParam optimizer({{"w", parameter}}, kOptions<TypeParam>.front());
  const int64_t before = memory_stats()->current(MemoryCategory::kOptimizer);
  parameter.set_grad(ones({64, 64}));
  optimizer.step();
  EXPECT_GT(optimizer.state_bytes(), 0);
  EXPECT_GE(memory_stats()->current(MemoryCategory::kOptimizer) - before, optimizer.state_bytes());
}

std::vector<uint16_t> bits_of(const Tensor& narrow) {
  const auto* bits = static_cast<const uint16_t*>(narrow.data());
  return {bits, bits + narrow.numel()};
}
int64_t casts_in(const auto& function) {
  Profiler profiler;
  {
    const ProfilerScope scope(profiler);
    function();
  }
  const auto found = profiler.entries().find("to");
  return found == profiler.entries().end() ? 0 : found->second.calls;
}

TYPED_TEST(EveryOptimizer, WritesTheCastsOfAutocastInItsOwnPass) {
  for (const DType dtype : {kBF16, kF16}) {
    SCOPED_TRACE(name_of(dtype));
    manual_seed(3);
    // More than one chunk of the multi-tensor pass, and a remainder.
    const Tensor weight = randn({130, 259}).set_requires_grad();
    const Tensor x = randn({2, 259}).to(dtype);
    const auto forward = [&] {
      const AutocastGuard autocast(dtype);
      return linear(x, weight);
    };
    Tensor y;
    EXPECT_EQ(casts_in([&] { y = forward(); }), 1);
    y.sum().backward();
    const auto cached = [&] { return weight_cache::find(weight, {.dtype = dtype}); };
    const TensorImpl* const first = cached().impl();
    TypeParam optimizer({{"weight", weight}}, kOptions<TypeParam>.front());
    for (int step = 0; step < 3; ++step) {
      SCOPED_TRACE(step);
      const std::vector<uint16_t> before = bits_of(cached());
      ASSERT_TRUE(optimizer.step());
      ASSERT_TRUE(cached().defined());
      EXPECT_NE(bits_of(cached()), before);
      EXPECT_EQ(bits_of(cached()), bits_of(weight.detach().to(dtype)));
      // The next forward reads it: it casts nothing and leaves the tensor in its place.
      EXPECT_EQ(casts_in([&] { y = forward(); }), 0);
      y.sum().backward();
      EXPECT_EQ(cached().impl(), first);
    }
  }
}

TEST(Optimizer, ACastIsStaleAfterAnyOtherWriteAndLetGoWhereAutocastIsLeft) {
  const Tensor weight = tensor({1, 2, 3, 4}).view({2, 2}).clone().set_requires_grad();
  const Tensor x = ones({1, 2});
  const auto forward = [&](bool autocast) {
    const AutocastGuard guard(kBF16, autocast);
    return linear(x, weight);
  };
  const auto is_current = [&] { return weight_cache::find(weight, {.dtype = kBF16}).defined(); };
  forward(true).sum().backward();
  SGD optimizer({{"weight", weight}}, {.lr = 0.5});
  optimizer.step();
  EXPECT_TRUE(is_current());
  {
    const NoGradGuard no_grad;
    fill_(weight, 7);
  }
  EXPECT_FALSE(is_current());
  EXPECT_EQ(forward(true).to(kF32).to_vector(), (std::vector<double>{14, 14}));

  // A step that is skipped writes neither; the cast stays current.
  optimizer.next_step().data_as<double>()[1] = 1;
  EXPECT_FALSE(optimizer.step());
  EXPECT_TRUE(is_current());

  optimizer.step();
  EXPECT_TRUE(is_current());
  forward(false);
  optimizer.step();  // no forward has read it since the last step
  EXPECT_EQ(weight_cache::bytes(weight), 0);
  EXPECT_EQ(casts_in([&] { forward(true); }), 2);  // the weight and x
}

TEST(Optimizer, ACastIsStaleAfterSetData) {
  const Tensor weight = tensor({1, 2, 3, 4}).view({2, 2}).clone().set_requires_grad();
  const auto forward = [&] {
    const AutocastGuard autocast;
    return linear(ones({1, 2}), weight).to(kF32).to_vector();
  };
  EXPECT_EQ(forward(), (std::vector<double>{3, 7}));
  const Tensor values = tensor({7, 7, 7, 7, 1, 1, 1, 1}).view({2, 2, 2}).clone();
  weight.set_data(values.select(0, 0));
  EXPECT_EQ(forward(), (std::vector<double>{14, 14}));
  weight.set_data(values.select(0, 1));  // of the same storage
  EXPECT_EQ(forward(), (std::vector<double>{2, 2}));
  const Tensor square = tensor({1, 2, 3, 4}).view({2, 2}).clone();
  weight.set_data(square);
  EXPECT_EQ(forward(), (std::vector<double>{3, 7}));
  weight.set_data(square.t());  // of the same storage and shape
  EXPECT_EQ(forward(), (std::vector<double>{4, 6}));
}

TEST(Optimizer, AGraphFromBeforeTheStepRefusesTheCastThatWasWritten) {
  const Tensor weight = randn({4, 4}).set_requires_grad();
  const Tensor x = randn({2, 4}).set_requires_grad();
  Tensor loss;
  {
    const AutocastGuard autocast;
    loss = linear(x, weight).sum();
  }
  backward(loss, {}, {.retain_graph = true});
  SGD optimizer({{"weight", weight}}, {.lr = 0.5});
  optimizer.step();
  EXPECT_THROW(loss.backward(), Error);
}

TEST(Optimizer, GroupsHaveOptionsOfTheirOwn) {
  const NamedTensors parameters = make_parameters();
  SGD optimizer({{{parameters[0]}, {.lr = 0.5}}, {{parameters[1]}, {.lr = 0.25}}});
  for (const auto& one : parameters) one.tensor.set_grad(ones_like(one.tensor));
  optimizer.step();
  EXPECT_EQ(values_of(parameters), (std::vector<double>{0.5, 1.5, 2.5, 3.5, -1.25, 0.25}));
  EXPECT_EQ(optimizer.lr(1), 0.25);
  EXPECT_EQ(optimizer.parameters().size(), 2u);
}

TEST(Optimizer, AGateHoldsTheStepBackWithAReason) {
  const NamedTensors parameters = make_parameters();
  SGD optimizer(parameters, {.lr = 1});
  optimizer.set_step_gate([] { return StepDecision::skip("accumulating, 1 of 4"); });
  set_gradients(parameters, 0);
  const auto before = values_of(parameters);
  EXPECT_FALSE(optimizer.step());
  EXPECT_EQ(optimizer.skip_reason(), "accumulating, 1 of 4");
  EXPECT_EQ(values_of(parameters), before);
  optimizer.set_step_gate({});
  EXPECT_TRUE(optimizer.step());
  EXPECT_EQ(optimizer.skip_reason(), "");
  EXPECT_NE(values_of(parameters), before);
}

TEST(Optimizer, TheNextStepCanBeScaledOrSkippedOnce) {
  const NamedTensors parameters = make_parameters(), others = make_parameters();
  SGD optimizer(parameters, {.lr = 1}), reference(others, {.lr = 1});
  for (const auto& one : parameters) one.tensor.set_grad(full_like(one.tensor, 0.5));
  for (const auto& one : others) one.tensor.set_grad(ones_like(one.tensor));
  optimizer.next_step().data_as<double>()[1] = 1;
  EXPECT_FALSE(optimizer.step());
  EXPECT_EQ(values_of(parameters), values_of(others));
  EXPECT_NE(optimizer.skip_reason(), "");
  optimizer.scale_next_step(2);
  EXPECT_TRUE(optimizer.step());
  reference.step();
  EXPECT_EQ(values_of(parameters), values_of(others));
  EXPECT_EQ(optimizer.next_step().to_vector(), (std::vector<double>{1, 0}));
}

// The buffer of SGD's first step is the gradient undamped; a step that was left out has not filled
// it.
TEST(Optimizer, SgdBeginsWithTheFirstStepThatWasNotLeftOut) {
  const NamedTensors parameters = make_parameters(), others = make_parameters();
  const SGDOptions options{.lr = 0.1, .momentum = 0.9, .dampening = 0.5};
  SGD optimizer(parameters, options), reference(others, options);
  const auto before = values_of(parameters);
  set_gradients(parameters, 0);
  optimizer.skip_next_step_where(tensor({1}, kF64));
  optimizer.step();
  EXPECT_EQ(values_of(parameters), before);
  for (int step = 1; step < 4; ++step) {
    for (const NamedTensors& list : {parameters, others}) set_gradients(list, step);
    optimizer.step();
    reference.step();
    EXPECT_EQ(values_of(parameters), values_of(others)) << step;
  }
}

TEST(Optimizer, RefusesWhatItCannotName) {
  const NamedTensors parameters = make_parameters();
  EXPECT_THROW(SGD({{"a", parameters[0].tensor}, {"a", parameters[1].tensor}}), ValueError);
  EXPECT_THROW(SGD({{"a", parameters[0].tensor}, {"b", parameters[0].tensor}}), ValueError);
  EXPECT_THROW(SGD({{"a", Tensor()}}), ValueError);
  EXPECT_THROW(SGD({{"a", zeros({2}, {.dtype = kI64})}}), ValueError);
  EXPECT_THROW(SGD(parameters, {.nesterov = true}), ValueError);
}

TYPED_TEST(EveryOptimizer, RefusesOptionsOutsideOfTheirRange) {
  const NamedTensors parameters = make_parameters();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  // refuses(name, write, values): the optimizer is made with none of the values, and says which.
  const auto refuses = [&](const std::string& name, auto write, std::vector<double> values) {
    for (const double value : values) {
      auto options = kOptions<TypeParam>.front();
      write(options, value);
      const std::string message = message_of([&] { TypeParam(parameters, options); });
      EXPECT_NE(message.find(": " + name + " must "), std::string::npos) << message;
      const std::vector<ParameterGroup<decltype(options)>> groups = {
          {{parameters[0]}, kOptions<TypeParam>.front()}, {{parameters[1]}, options}};
      EXPECT_THROW((TypeParam(groups)), ValueError) << name << ' ' << value;
    }
  };
  refuses("lr", [](auto& o, double x) { o.lr = x; }, {-0.1, nan});
  refuses("weight_decay", [](auto& o, double x) { o.weight_decay = x; }, {-0.1, nan});
  using Options = typename TypeParam::Options;
  if constexpr (requires(Options o) { o.betas; }) {
    refuses("betas[0]", [](auto& o, double x) { o.betas[0] = x; }, {-0.1, 1, 1.5, nan});
    refuses("betas[1]", [](auto& o, double x) { o.betas[1] = x; }, {-0.1, 1, 1.5, nan});
  }
  if constexpr (requires(Options o) { o.eps; }) {
    refuses("eps", [](auto& o, double x) { o.eps = x; }, {-1e-8, nan});
  }
  if constexpr (requires(Options o) { o.momentum; }) {
    refuses("momentum", [](auto& o, double x) { o.momentum = x; }, {-0.9, nan});
  }
  if constexpr (requires(Options o) { o.alpha; }) {
    refuses("alpha", [](auto& o, double x) { o.alpha = x; }, {-0.9, nan});
  }
  if constexpr (requires(Options o) { o.rho; }) {
    refuses("rho", [](auto& o, double x) { o.rho = x; }, {-0.1, 1.1, nan});
  }
  if constexpr (requires(Options o) { o.momentum_decay; }) {
    refuses("momentum_decay", [](auto& o, double x) { o.momentum_decay = x; }, {-0.1, nan});
  }
  if constexpr (requires(Options o) { o.lr_decay; }) {
    refuses("lr_decay", [](auto& o, double x) { o.lr_decay = x; }, {-0.9});
    refuses("initial_accumulator_value", [](auto& o, double x) { o.initial_accumulator_value = x; },
            {-0.9});
  }
  auto allowed = kOptions<TypeParam>.front();
  allowed.lr = allowed.weight_decay = 0;
  EXPECT_NO_THROW(TypeParam(parameters, allowed));
  const double below_one = std::nextafter(1.0, 0.0);
  if constexpr (requires(Options o) { o.betas; }) {
    allowed.betas = {0, 0};
    EXPECT_NO_THROW(TypeParam(parameters, allowed));
    allowed.betas = {below_one, below_one};
  }
  if constexpr (requires(Options o) { o.eps; }) allowed.eps = 0;
  if constexpr (requires(Options o) { o.alpha; }) allowed.alpha = 0;
  if constexpr (requires(Options o) { o.momentum_decay; }) allowed.momentum_decay = 0;
  if constexpr (requires(Options o) { o.lr_decay; }) {
    allowed.lr_decay = allowed.initial_accumulator_value = 0;
  }
  EXPECT_NO_THROW(TypeParam(parameters, allowed));
  if constexpr (requires(Options o) { o.rho; }) {
    for (const double rho : {0, 1}) {
      allowed.rho = rho;
      EXPECT_NO_THROW(TypeParam(parameters, allowed)) << rho;
    }
  }
}

TEST(Optimizer, NeedsAParameterThoughNotInEveryGroup) {
  const NamedTensors parameters = make_parameters();
  EXPECT_THROW(AdamW(NamedTensors{}, {.lr = 0.1}), ValueError);
  EXPECT_THROW(AdamW(std::vector<ParameterGroup<AdamWOptions>>{}), ValueError);
  EXPECT_THROW(AdamW({{{}, {.lr = 0.1}}, {{}, {.lr = 0.2}}}), ValueError);
  AdamW optimizer({{{}, {.lr = 0.1}}, {parameters, {.lr = 0.2}}});
  set_gradients(parameters, 0);
  EXPECT_TRUE(optimizer.step());
  EXPECT_EQ(optimizer.num_groups(), 2u);
}

TEST(Optimizer, ReportsAllOfAStateThatDoesNotFitAndChangesNothing) {
  const NamedTensors parameters = make_parameters();
  AdamW optimizer(parameters, {.lr = 0.1});
  set_gradients(parameters, 0);
  optimizer.step();
  StateDict broken;
  for (const auto& [name, value] : optimizer.state_dict().clone()) {
    if (name == "state.a.exp_avg" || name == "group.0.eps") continue;
    broken.set(name, name == "state.b.exp_avg_sq" ? zeros({3}) : value);
  }
  broken.set("state.c.step", scalar_tensor(1, kI64));
  broken.set("group.0.lr", scalar_tensor(7, kF64));
  const std::string message = message_of([&] { optimizer.load_state_dict(broken); });
  for (const char* part : {"missing: group.0.eps", "missing: state.a.exp_avg",
                           "of another shape: state.b.exp_avg_sq", "unexpected: state.c.step"}) {
    EXPECT_NE(message.find(part), std::string::npos) << part << " in " << message;
  }
  EXPECT_EQ(optimizer.lr(), 0.1);
  EXPECT_EQ(optimizer.options().betas[1], 0.999);
  EXPECT_TRUE(optimizer.options().master_weights);
}

TEST(Optimizer, AStateOfAnotherNumberOfGroupsIsRefusedAndChangesNothing) {
  const NamedTensors parameters = make_parameters();
  AdamW one(parameters, {.lr = 0.1});
  AdamW two({{{parameters[0]}, {.lr = 0.2}}, {{parameters[1]}, {.lr = 0.3}}});
  const StateDict of_one = one.state_dict().clone(), of_two = two.state_dict().clone();
  const std::string more = message_of([&] { one.load_state_dict(of_two); });
  EXPECT_NE(more.find("unexpected: group.1.lr"), std::string::npos) << more;
  const std::string fewer = message_of([&] { two.load_state_dict(of_one); });
  EXPECT_NE(fewer.find("missing: group.1.lr"), std::string::npos) << fewer;
  EXPECT_EQ(one.lr(), 0.1);
  EXPECT_EQ(two.lr(0), 0.2);
  EXPECT_EQ(two.lr(1), 0.3);
  two.set_lr(0, 5), two.set_lr(1, 6);
  two.load_state_dict(of_two);
  EXPECT_EQ(two.lr(0), 0.2);
  EXPECT_EQ(two.lr(1), 0.3);
}

// The options of the dictionary say which states there are, not those before.
template <class T>
void expect_loads(const typename T::Options& saved, const typename T::Options& before) {
  const NamedTensors parameters = make_parameters(), others = make_parameters();
  T first(parameters, saved), resumed(others, before);
  set_gradients(parameters, 0);
  first.step();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const NoGradGuard no_grad;
    copy_(others[i].tensor, parameters[i].tensor);
  }
  resumed.load_state_dict(first.state_dict());
  for (const auto& list : {parameters, others}) set_gradients(list, 1);
  first.step();
  resumed.step();
  for (size_t i = 0; i < parameters.size(); ++i) {
    EXPECT_EQ(others[i].tensor.to_vector(), parameters[i].tensor.to_vector()) << others[i].name;
  }
  EXPECT_EQ(resumed.state_dict().size(), first.state_dict().size());
}

TEST(Optimizer, LoadsTheStatesThatTheLoadedOptionsNeed) {
  const AdamWOptions largest{.lr = 0.1, .amsgrad = true};
  expect_loads<AdamW>(largest, {});
  expect_loads<AdamW>({}, largest);
  expect_loads<SGD>({.lr = 0.1, .momentum = 0.9}, {});
  expect_loads<SGD>({}, {.lr = 0.1, .momentum = 0.9});
  expect_loads<RMSprop>({.momentum = 0.9, .centered = true}, {});
}

TEST(Optimizer, LoadsAStateThatAnOptionNeededBefore) {
  const NamedTensors parameters = make_parameters();
  SGD optimizer(parameters, {.lr = 0.1, .momentum = 0.9});
  set_gradients(parameters, 0);
  optimizer.step();
  optimizer.options().momentum = 0;
  const StateDict saved = optimizer.state_dict();
  SGD resumed(parameters, {});
  resumed.load_state_dict(saved);
  EXPECT_EQ(resumed.state_dict().size(), saved.size());
}

TEST(Optimizer, RebindMovesStateToOtherTensorsOfTheSameNames) {
  const NamedTensors parameters = make_parameters(), others = make_parameters();
  AdamW moved(parameters, {.lr = 0.1}), reference(others, {.lr = 0.1});
  for (const auto& list : {parameters, others}) set_gradients(list, 0);
  moved.step();
  reference.step();
  NamedTensors fresh;
  for (const auto& [name, parameter] : parameters) {
    fresh.push_back({name, parameter.detach().clone().set_requires_grad()});
  }
  moved.rebind(fresh);
  for (const auto& list : {fresh, others}) set_gradients(list, 1);
  moved.step();
  reference.step();
  EXPECT_EQ(values_of(fresh), values_of(others));
  EXPECT_THROW(moved.rebind({fresh[0]}), ValueError);
  EXPECT_THROW(moved.rebind({fresh[0], {"b", zeros({5}).set_requires_grad()}}), ShapeError);
}

// ---- Clipping ----------------------------------------------------------------------------------

TEST(Clip, ScalesToTheNormOrLeavesAlone) {
  const NamedTensors parameters = make_parameters();
  TensorList tensors = {parameters[0].tensor, parameters[1].tensor};
  const auto set = [&] {
    tensors[0].set_grad(full({2, 2}, 2));
    tensors[1].set_grad(tensor({0, 3}));
  };
  set();
  EXPECT_DOUBLE_EQ(clip_grad_norm(tensors, 1).item(), 5);
  EXPECT_NEAR(tensors[1].grad().to_vector()[1], 0.6, 1e-6);
  set();
  EXPECT_DOUBLE_EQ(clip_grad_norm(tensors, 6).item(), 5);
  EXPECT_EQ(tensors[1].grad().to_vector()[1], 3);
  EXPECT_DOUBLE_EQ(
      clip_grad_norm(tensors, 10, {.norm_type = std::numeric_limits<double>::infinity()}).item(),
      3);
  clip_grad_value(tensors, 1.5);
  EXPECT_EQ(tensors[0].grad().to_vector(), std::vector<double>(4, 1.5));
  EXPECT_EQ(tensors[1].grad().to_vector(), (std::vector<double>{0, 1.5}));
}

TEST(Clip, FoldedIntoTheStepItGivesTheSameParameters) {
  const NamedTensors in_place = make_parameters(), folded = make_parameters();
  AdamW first(in_place, {.lr = 0.1}), second(folded, {.lr = 0.1});
  for (int step = 0; step < 4; ++step) {
    for (const auto& list : {in_place, folded}) set_gradients(list, step);
    const auto gradient = folded[0].tensor.grad().to_vector();
    clip_grad_norm({in_place[0].tensor, in_place[1].tensor}, 0.5);
    clip_grad_norm({folded[0].tensor, folded[1].tensor}, 0.5, {.fold_into = &second});
    EXPECT_EQ(folded[0].tensor.grad().to_vector(), gradient) << "gradients keep their values";
    first.step();
    second.step();
  }
  const auto a = values_of(in_place), b = values_of(folded);
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-6);
}

TEST(Clip, TellsOfNonFiniteGradients) {
  const NamedTensors parameters = make_parameters();
  set_gradients(parameters, 0);
  parameters[1].tensor.set_grad(tensor({1, std::numeric_limits<double>::quiet_NaN()}));
  const TensorList tensors = {parameters[0].tensor, parameters[1].tensor};
  EXPECT_THROW(clip_grad_norm(tensors, 1, {.error_if_nonfinite = true}), ValueError);
  EXPECT_TRUE(std::isnan(clip_grad_norm(tensors, 1).item()));
  EXPECT_TRUE(std::isnan(parameters[0].tensor.grad().to_vector()[0])) << "as torch does";
  EXPECT_EQ(clip_grad_norm({}, 1).item(), 0);
}

// ---- Averages ----------------------------------------------------------------------------------

TEST(Ema, ScopeHoldsTheAveragesForAWhile) {
  const NamedTensors parameters = make_parameters(kBF16);
  EMA average(parameters, {.decay = 0.5});
  const Tensor handle = parameters[1].tensor;
  {
    const NoGradGuard no_grad;
    copy_(handle, tensor({3, 4.5}));
  }
  average.update();
  EXPECT_EQ(average.averages()[1].tensor.dtype(), kF32);
  EXPECT_EQ(average.averages()[1].tensor.to_vector(), (std::vector<double>{1, 2.5}));
  {
    const EMA::Scope scope(average);
    EXPECT_EQ(handle.to_vector(), (std::vector<double>{1, 2.5}));
    EXPECT_EQ(handle.dtype(), kBF16);
  }
  EXPECT_EQ(handle.to_vector(), (std::vector<double>{3, 4.5}));
  average.copy_to_parameters();
  EXPECT_EQ(handle.to_vector(), (std::vector<double>{1, 2.5}));
}

// What autocast keeps of a parameter in its own dtype follows the averages and back.
TEST(Ema, UnderAutocastEveryForwardSeesTheValuesOfItsTime) {
  const Tensor weight = tensor({1, 2, 3, 4}).view({2, 2}).clone().set_requires_grad();
  EMA average({{"weight", weight}}, {.decay = 0.5});
  const auto forward = [&] {
    const AutocastGuard autocast(kBF16);
    return linear(ones({1, 2}), weight);
  };
  const auto values = [&] { return forward().to(kF32).to_vector(); };
  EXPECT_EQ(values(), (std::vector<double>{3, 7}));
  {
    const NoGradGuard no_grad;
    copy_(weight, zeros({2, 2}));
  }
  average.update();  // half of both
  EXPECT_EQ(values(), (std::vector<double>{0, 0}));
  Tensor within;
  {
    const EMA::Scope scope(average);
    EXPECT_EQ(values(), (std::vector<double>{1.5, 3.5}));
    within = linear(ones({1, 2}).set_requires_grad(), weight).sum();
  }
  EXPECT_EQ(values(), (std::vector<double>{0, 0}));
  EXPECT_THROW(within.backward(), Error) << "its weight is no longer what it has used";
  average.copy_to_parameters();
  EXPECT_EQ(values(), (std::vector<double>{1.5, 3.5}));
}

TEST(Ema, AveragesCountAsOptimizerMemory) {
  const Tensor parameter = zeros({64, 64}).set_requires_grad();
  const int64_t before = memory_stats()->current(MemoryCategory::kOptimizer);
  const EMA average({{"w", parameter}}, {});
  EXPECT_EQ(memory_stats()->current(MemoryCategory::kOptimizer) - before, 64 * 64 * 4);
}

TEST(Ema, StateDictGoesRound) {
  const NamedTensors parameters = make_parameters();
  EMA average(parameters, {.decay = 0.9});
  {
    const NoGradGuard no_grad;
    copy_(parameters[0].tensor, zeros({2, 2}));
  }
  average.update();
  const StateDict saved = average.state_dict().clone();
  EMA other(parameters, {.decay = 0.9});
  other.load_state_dict(saved);
  EXPECT_EQ(other.num_updates(), 1);
  EXPECT_EQ(other.averages()[0].tensor.to_vector(), average.averages()[0].tensor.to_vector());
  EXPECT_THROW(other.load_state_dict(StateDict()), ValueError);
  // An average of another shape is an error that leaves all of them, those before it too.
  const std::vector<double> before = values_of(other.averages());
  StateDict larger = saved.clone();
  larger.set("average.a", full({2, 2}, 9));
  larger.set("average.b", zeros({3}));
  EXPECT_THROW(other.load_state_dict(larger), ShapeError);
  StateDict uncounted;
  for (const auto& [name, average] : saved) {
    if (name != "num_updates") uncounted.set(name, full(average.shape(), 9));
  }
  EXPECT_THROW(other.load_state_dict(uncounted), ValueError);
  EXPECT_EQ(values_of(other.averages()), before);
  EXPECT_EQ(other.num_updates(), 1);
}

TEST(Ema, ADecayIsAPartOfOne) {
  const NamedTensors parameters = make_parameters();
  const double least = std::numeric_limits<double>::denorm_min();
  const std::vector<double> refused = {-least, std::nextafter(1.0, 2.0),
                                       std::numeric_limits<double>::quiet_NaN()};
  for (const double decay : refused) EXPECT_THROW(EMA(parameters, {.decay = decay}), ValueError);
  const std::vector<double> began = values_of(parameters);
  EMA follows(parameters, {.decay = 0}), stays(parameters, {.decay = 1});
  {
    const NoGradGuard no_grad;
    for (const auto& one : parameters) fill_(one.tensor, 8);
  }
  follows.update(), stays.update();
  EXPECT_EQ(values_of(follows.averages()), values_of(parameters));
  EXPECT_EQ(values_of(stays.averages()), began);
}

TEST(Ema, RebindFollowsOtherTensorsOfTheSameNamesAndShapes) {
  const NamedTensors parameters = make_parameters(), others = make_parameters();
  EMA average(parameters, {.decay = 0.5});
  const NamedTensors without = {others[0], {"c", others[1].tensor}};
  const NamedTensors reshaped = {others[0], {"b", zeros({3})}};
  const std::string missing = message_of<ValueError>([&] { average.rebind(without); });
  EXPECT_NE(missing.find("parameter 'b' of shape"), std::string::npos) << missing;
  EXPECT_THROW(average.rebind(reshaped), ValueError);
  EXPECT_THROW(average.rebind({}), ValueError);
  {
    const NoGradGuard no_grad;
    for (const auto& one : parameters) fill_(one.tensor, 8);
    for (const auto& one : others) fill_(one.tensor, 16);
  }
  average.update();  // of those before
  EXPECT_EQ(average.averages()[1].tensor.to_vector(), (std::vector<double>{3.5, 4.25}));
  average.rebind({{"c", zeros({7})}, others[1], others[0]});  // in any order, among more
  average.update();
  EXPECT_EQ(average.averages()[1].tensor.to_vector(), (std::vector<double>{9.75, 10.125}));
  average.copy_to_parameters();
  EXPECT_EQ(others[1].tensor.to_vector(), (std::vector<double>{9.75, 10.125}));
  EXPECT_EQ(parameters[1].tensor.to_vector(), (std::vector<double>{8, 8}));
}

// ---- Schedules: their values are compared with torch's in test_golden_optim ---------------------

TEST(Schedule, SetsTheRatesOfAllGroupsFromTheirOwn) {
  const NamedTensors parameters = make_parameters();
  SGD optimizer({{{parameters[0]}, {.lr = 1}}, {{parameters[1]}, {.lr = 0.5}}});
  CosineSchedule schedule(optimizer, {.warmup = 2, .total = 6, .min_lr = 0.1});
  std::vector<double> first, second;
  for (int step = 0; step < 8; ++step) {
    first.push_back(optimizer.lr(0));
    second.push_back(optimizer.lr(1));
    schedule.step();
  }
  EXPECT_EQ(first[0], 0);
  EXPECT_EQ(first[1], 0.5);
  EXPECT_EQ(second[0], 0);
  EXPECT_EQ(second[1], 0.25);
  EXPECT_EQ(second[2], 0.5);
  EXPECT_EQ(second[7], 0.1);
  EXPECT_DOUBLE_EQ(first[4], 0.55);
  EXPECT_EQ(first[6], 0.1);
  EXPECT_EQ(first[7], 0.1) << "stays at its end";
}

TEST(Schedule, StateDictResumesAtTheStep) {
  const NamedTensors parameters = make_parameters();
  SGD optimizer(parameters, {.lr = 1}), other(parameters, {.lr = 0.3});
  ExponentialSchedule schedule(optimizer, {.gamma = 0.5});
  schedule.step();
  schedule.step();
  ExponentialSchedule resumed(other, {.gamma = 0.5});
  resumed.load_state_dict(schedule.state_dict());
  EXPECT_EQ(other.lr(), 0.25);
  EXPECT_EQ(resumed.current_step(), 2);
  resumed.step();
  EXPECT_EQ(other.lr(), 0.125);
  EXPECT_THROW(resumed.load_state_dict(StateDict()), ValueError);
}

TEST(Schedule, AGateHoldsItBack) {
  const NamedTensors parameters = make_parameters();
  SGD optimizer(parameters, {.lr = 1});
  ExponentialSchedule schedule(optimizer, {.gamma = 0.5});
  schedule.set_step_gate([] { return StepDecision::skip("the optimizer skipped its step"); });
  EXPECT_FALSE(schedule.step());
  EXPECT_EQ(schedule.skip_reason(), "the optimizer skipped its step");
  EXPECT_EQ(optimizer.lr(), 1);
}

TEST(Schedule, OneCycleMovesMomentumTheOtherWay) {
  const NamedTensors parameters = make_parameters();
  AdamW optimizer(parameters, {.lr = 1});
  OneCycleSchedule schedule(optimizer, {.max_lr = 1, .total = 11});
  EXPECT_DOUBLE_EQ(optimizer.options().betas[0], 0.95);
  double lowest = 1;
  for (int step = 0; step < 10; ++step) {
    schedule.step();
    lowest = std::min(lowest, optimizer.options().betas[0]);
  }
  EXPECT_NEAR(lowest, 0.85, 0.01);
  EXPECT_DOUBLE_EQ(optimizer.options().betas[0], 0.95);
}

TEST(Schedule, AStructWithARateIsARule) {
  struct Half {
    double rate(int64_t, double base) const { return base / 2; }
  };
  const NamedTensors parameters = make_parameters();
  SGD optimizer(parameters, {.lr = 1});
  RuleSchedule<Chained> schedule(optimizer, {.rules = {Half{}, Exponential{.gamma = 0.5}}});
  EXPECT_EQ(optimizer.lr(), 0.5);
  schedule.step();
  EXPECT_EQ(optimizer.lr(), 0.25);
  EXPECT_THROW(SequentialSchedule(optimizer, {.rules = {Half{}}, .milestones = {3}}), ValueError);
}

TEST(Schedule, RefusesNumbersThatAreMissingOrCannotBe) {
  const NamedTensors parameters = make_parameters();
  SGD optimizer(parameters, {.lr = 1});
  const auto message = [&](auto rule) {
    return message_of([&] { RuleSchedule<decltype(rule)>(optimizer, rule); });
  };
  const auto refuses = [&](auto rule, const std::string& name) {
    EXPECT_NE(message(rule).find(name), std::string::npos) << message(rule);
    EXPECT_THROW(Rule{rule}, Error) << "as a part of another";
  };
  refuses(Cosine{.warmup = 2, .total = {}}, "total");
  refuses(Cosine{.warmup = -1, .total = 5}, "warmup");
  refuses(Cosine{.warmup = 6, .total = 5}, "total");
  refuses(Cosine{.total = 5, .min_lr = -1}, "min_lr");
  refuses(Polynomial{.warmup = 100}, "total");  // of 5 steps, torch's default
  refuses(Polynomial{.total = 0}, "total");
  refuses(CosineHardRestarts{.warmup = 2, .total = {}}, "total");
  refuses(CosineHardRestarts{.total = 4, .cycles = 0}, "cycles");
  refuses(CosineRestarts{.period = {}}, "period");
  refuses(CosineRestarts{.period = 4, .growth = 0}, "growth");
  refuses(OneCycle{.max_lr = 1, .total = {}}, "total");
  refuses(OneCycle{.max_lr = {}, .total = 10}, "max_lr");
  refuses(OneCycle{.max_lr = 1, .total = 10, .pct_start = 1.5}, "pct_start");
  refuses(OneCycle{.max_lr = 1, .total = 10, .div_factor = 0}, "div_factor");
  refuses(Step{.step_size = {}}, "step_size");
  refuses(Exponential{.gamma = {}}, "gamma");
  refuses(MultiStep{.milestones = {5, 3}}, "milestones");
  refuses(MultiStep{.milestones = {-5}}, "milestones");
  refuses(Constant{.total_iters = -1}, "total_iters");
  refuses(Linear{.total_iters = 0}, "total_iters");
  refuses(InverseSqrt{.warmup = -1}, "warmup");
  refuses(InverseSqrt{.timescale = 0}, "timescale");
  refuses(Warmup{-1}, "warmup");
  refuses(Lambda{.factor = {}}, "function");
  refuses(Chained{.rules = {}}, "rule");
  refuses(Sequential{{Warmup{1}, Warmup{1}, Warmup{1}}, {5, 3}}, "milestones");
  EXPECT_THROW(PlateauSchedule(optimizer, {.factor = -0.5}), ValueError);
  EXPECT_THROW(PlateauSchedule(optimizer, {.patience = -1}), ValueError);
  EXPECT_THROW(PlateauSchedule(optimizer, {.cooldown = -1}), ValueError);
  EXPECT_EQ(optimizer.lr(), 1) << "the rates were left alone";
}

// Every bound of every option: on it a rule has rates that are numbers, beside it it is refused.
TEST(Schedule, OptionsReachToTheirBoundsAndNoFurther) {
  const NamedTensors parameters = make_parameters();
  SGD optimizer(parameters, {.lr = 1});
  const double least = std::numeric_limits<double>::denorm_min(), below = -least;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto accepts = [&](auto rule, const char* what) {
    EXPECT_NO_THROW(RuleSchedule<decltype(rule)>(optimizer, rule)) << what;
    for (int64_t step = 0; step < 8; ++step) {
      EXPECT_TRUE(std::isfinite(rule.rate(step, 1.0))) << what << " at " << step;
    }
  };
  const auto refuses = [&](auto rule, const std::string& name) {
    const std::string message =
        message_of<ValueError>([&] { RuleSchedule<decltype(rule)>(optimizer, rule); });
    EXPECT_NE(message.find(name + (name == "total" ? "," : "")), std::string::npos) << message;
  };
  accepts(Constant{.factor = 0, .total_iters = 0}, "Constant");
  refuses(Constant{.total_iters = -1}, "total_iters must be at least 0");
  accepts(Linear{.start_factor = 0, .end_factor = 0, .total_iters = 1}, "Linear");
  refuses(Linear{.total_iters = 0}, "total_iters must be at least 1");
  accepts(Step{.step_size = 1, .gamma = 0}, "Step");
  refuses(Step{.step_size = 0}, "step_size must be at least 1");
  accepts(MultiStep{.milestones = {0}, .gamma = 0}, "MultiStep");
  accepts(MultiStep{.milestones = {0, 3, 3}}, "MultiStep with equal milestones");
  accepts(MultiStep{.milestones = {}}, "MultiStep without milestones");
  refuses(MultiStep{.milestones = {-1}}, "milestones must ascend");
  refuses(MultiStep{.milestones = {0, 3, 2}}, "milestones must ascend");
  accepts(Exponential{.gamma = least}, "Exponential");
  accepts(Polynomial{.warmup = 0, .total = 1, .power = 0, .min_lr = 0}, "Polynomial");
  accepts(Polynomial{.warmup = 3, .total = 3}, "Polynomial of warm-up alone");
  refuses(Polynomial{.warmup = -1}, "warmup must be at least 0");
  refuses(Polynomial{.warmup = 4, .total = 3}, "total");
  refuses(Polynomial{.total = 0}, "total");
  for (const bool periodic : {false, true}) {
    accepts(Cosine{.total = 1, .periodic = periodic}, "Cosine");
    accepts(Cosine{.warmup = 3, .total = 3, .periodic = periodic}, "Cosine of warm-up alone");
  }
  refuses(Cosine{.warmup = -1, .total = 3}, "warmup must be at least 0");
  refuses(Cosine{.warmup = 4, .total = 3}, "total");
  refuses(Cosine{.total = 0}, "total");
  accepts(CosineRestarts{.period = 1, .growth = 1}, "CosineRestarts");
  refuses(CosineRestarts{.period = 0}, "period must be at least 1");
  refuses(CosineRestarts{.period = 1, .growth = 0}, "growth must be at least 1");
  accepts(CosineHardRestarts{.total = 1, .cycles = 1}, "CosineHardRestarts");
  accepts(CosineHardRestarts{.warmup = 3, .total = 3}, "CosineHardRestarts of warm-up alone");
  refuses(CosineHardRestarts{.warmup = -1, .total = 3}, "warmup must be at least 0");
  refuses(CosineHardRestarts{.warmup = 4, .total = 3}, "total");
  refuses(CosineHardRestarts{.total = 3, .cycles = 0}, "cycles must be at least 1");
  accepts(OneCycle{.max_lr = 1, .total = 1}, "OneCycle of one step");
  accepts(OneCycle{.max_lr = least, .total = 8}, "OneCycle with a small max_lr");
  for (const double part : {0.0, 1.0}) {
    accepts(OneCycle{.max_lr = 1, .total = 8, .pct_start = part}, "OneCycle with pct_start");
  }
  refuses(OneCycle{.max_lr = 1, .total = 0}, "total must be at least 1");
  accepts(InverseSqrt{.warmup = 0, .timescale = 1}, "InverseSqrt");
  accepts(InverseSqrt{.warmup = 0}, "InverseSqrt without warm-up");
  refuses(InverseSqrt{.warmup = -1}, "warmup must be at least 0");
  refuses(InverseSqrt{.timescale = 0}, "timescale must be at least 1");
  accepts(Warmup{0}, "Warmup");
  refuses(Warmup{-1}, "warmup must be at least 0");
  accepts(Sequential{{Warmup{1}, Warmup{1}}, {0}}, "Sequential");
  refuses(Sequential{{Warmup{1}}, {0}}, "one rule more");
  refuses(Sequential{{Warmup{1}, Warmup{1}, Warmup{1}}, {0}}, "one rule more");
  refuses(Sequential{{Warmup{1}, Warmup{1}}, {-1}}, "milestones must ascend");
  accepts(Chained{{Warmup{1}}}, "Chained");
  for (const double x : {below, nan}) {
    refuses(Constant{.factor = x}, "factor must not be negative");
    refuses(Linear{.start_factor = x}, "start_factor must not be negative");
    refuses(Linear{.end_factor = x}, "end_factor must not be negative");
    refuses(Step{.step_size = 1, .gamma = x}, "gamma must not be negative");
    refuses(MultiStep{.milestones = {1}, .gamma = x}, "gamma must not be negative");
    refuses(Polynomial{.power = x}, "power must not be negative");
    refuses(Polynomial{.min_lr = x}, "min_lr must not be negative");
    refuses(Cosine{.total = 3, .min_lr = x}, "min_lr must not be negative");
    refuses(CosineRestarts{.period = 1, .min_lr = x}, "min_lr must not be negative");
  }
  for (const double x : {0.0, below, nan}) {
    refuses(Exponential{.gamma = x}, "gamma must be positive");
    refuses(OneCycle{.max_lr = x, .total = 3}, "max_lr must be positive");
    refuses(OneCycle{.max_lr = 1, .total = 3, .div_factor = x}, "div_factor must be positive");
    refuses(OneCycle{.max_lr = 1, .total = 3, .final_div_factor = x},
            "final_div_factor must be positive");
  }
  for (const double x : {below, std::nextafter(1.0, 2.0), nan}) {
    refuses(OneCycle{.max_lr = 1, .total = 3, .pct_start = x}, "pct_start");
  }

  const auto plateau = [&](const PlateauOptions& options, const std::string& name) {
    const std::string message =
        message_of<ValueError>([&] { PlateauSchedule(optimizer, options); });
    EXPECT_NE(message.find(name), std::string::npos) << message;
  };
  EXPECT_NO_THROW(PlateauSchedule(
      optimizer,
      {.factor = 0, .patience = 0, .threshold = 0, .cooldown = 0, .min_lr = 0, .eps = 0}));
  EXPECT_NO_THROW(PlateauSchedule(optimizer, {.factor = std::nextafter(1.0, 0.0)}));
  for (const double x : {below, 1.0, nan}) plateau({.factor = x}, "factor must be in [0, 1)");
  plateau({.patience = -1}, "patience must be at least 0");
  plateau({.cooldown = -1}, "cooldown must be at least 0");
  for (const double x : {below, nan}) {
    plateau({.threshold = x}, "threshold must not be negative");
    plateau({.min_lr = x}, "min_lr must not be negative");
    plateau({.eps = x}, "eps must not be negative");
  }
}

TEST(Schedule, AStateOfAnotherNumberOfGroupsIsRefusedAndChangesNothing) {
  const NamedTensors parameters = make_parameters();
  SGD one(parameters, {.lr = 1});
  SGD two({{{parameters[0]}, {.lr = 0.75}}, {{parameters[1]}, {.lr = 0.5}}});
  ExponentialSchedule of_one(one, {.gamma = 0.5}), of_two(two, {.gamma = 0.5});
  of_one.step();
  of_two.step(), of_two.step();
  const StateDict states[] = {of_one.state_dict().clone(), of_two.state_dict().clone()};
  const std::string more = message_of<ValueError>([&] { of_one.load_state_dict(states[1]); });
  EXPECT_NE(more.find("rates of 2 groups, the optimizer has 1"), std::string::npos) << more;
  const std::string fewer = message_of<ValueError>([&] { of_two.load_state_dict(states[0]); });
  EXPECT_NE(fewer.find("rates of 1 groups, the optimizer has 2"), std::string::npos) << fewer;
  EXPECT_EQ(of_one.current_step(), 1);
  EXPECT_EQ(of_two.current_step(), 2);
  of_one.step(), of_two.step();
  EXPECT_EQ(one.lr(), 0.25);
  EXPECT_EQ(two.lr(0), 0.75 / 8);
  EXPECT_EQ(two.lr(1), 0.5 / 8);
  // Its own it takes, with the rates of both.
  of_two.load_state_dict(states[1]);
  EXPECT_EQ(two.lr(0), 0.75 / 4);
  EXPECT_EQ(two.lr(1), 0.5 / 4);
}

TEST(Schedule, OneCycleMovesTheMomentumOfEveryGroup) {
  const NamedTensors parameters = make_parameters();
  AdamW optimizer({{{parameters[0]}, {.lr = 1}}, {{parameters[1]}, {.lr = 2}}});
  OneCycleSchedule schedule(optimizer, {.max_lr = 1, .total = 11});
  for (int step = 0; step < 4; ++step) {
    EXPECT_EQ(optimizer.options(0).betas[0], optimizer.options(1).betas[0]) << step;
    EXPECT_EQ(optimizer.lr(0), optimizer.lr(1)) << step;
    schedule.step();
  }
  EXPECT_LT(optimizer.options(1).betas[0], 0.95);
}

TEST(Schedule, APlateauLowersTheRatesOfAllGroupsDownToTheLeast) {
  const NamedTensors parameters = make_parameters();
  SGD optimizer({{{parameters[0]}, {.lr = 1}}, {{parameters[1]}, {.lr = 0.5}}});
  PlateauSchedule schedule(optimizer, {.factor = 0.5, .patience = 0, .min_lr = 0.25});
  const auto rates = [&] { return std::vector<double>{schedule.lr(0), schedule.lr(1)}; };
  EXPECT_FALSE(schedule.step(1)) << "better than none";
  EXPECT_TRUE(schedule.step(1));
  EXPECT_EQ(rates(), (std::vector<double>{0.5, 0.25}));
  EXPECT_TRUE(schedule.step(1)) << "one of the two";
  EXPECT_EQ(rates(), (std::vector<double>{0.25, 0.25}));
  EXPECT_FALSE(schedule.step(1)) << "none is left to lower";
  EXPECT_EQ(rates(), (std::vector<double>{0.25, 0.25}));
  // A change of eps itself is not made.
  SGD other(parameters, {.lr = 1});
  PlateauSchedule coarse(other, {.factor = 0.5, .patience = 0, .eps = 0.5});
  coarse.step(1);
  EXPECT_FALSE(coarse.step(1));
  EXPECT_EQ(other.lr(), 1);
}

TEST(Schedule, APlateauWantsMoreThanItsThreshold) {
  const NamedTensors parameters = make_parameters();
  // Whether `metric` counts as better than a best of 2 or -2.
  const auto better = [&](double best, double metric, PlateauOptions options) {
    SGD optimizer(parameters, {.lr = 1});
    options.patience = 0;
    PlateauSchedule schedule(optimizer, options);
    schedule.step(best);
    const bool lowered = schedule.step(metric);
    EXPECT_EQ(schedule.best(), lowered ? best : metric);
    return !lowered;
  };
  const PlateauOptions smaller{.threshold = 0.25};
  EXPECT_FALSE(better(2, 1.5, smaller));
  EXPECT_TRUE(better(2, std::nextafter(1.5, 0.0), smaller));
  const PlateauOptions larger{.maximize = true, .threshold = 0.25};
  EXPECT_FALSE(better(2, 2.5, larger));
  EXPECT_TRUE(better(2, std::nextafter(2.5, 3.0), larger));
  const PlateauOptions smaller_by{.threshold = 0.25, .absolute_threshold = true};
  EXPECT_FALSE(better(2, 1.75, smaller_by));
  EXPECT_TRUE(better(2, std::nextafter(1.75, 0.0), smaller_by));
  const PlateauOptions larger_by{.maximize = true, .threshold = 0.25, .absolute_threshold = true};
  EXPECT_FALSE(better(2, 2.25, larger_by));
  EXPECT_TRUE(better(2, std::nextafter(2.25, 3.0), larger_by));
  EXPECT_FALSE(better(2, std::numeric_limits<double>::quiet_NaN(), smaller));
}

TEST(Schedule, OneCycleEndsWhereTorchEndsIt) {
  const NamedTensors parameters = make_parameters();
  SGD optimizer(parameters, {.lr = 1});
  OneCycleSchedule schedule(optimizer, {.max_lr = 1, .total = 4});
  for (int step = 0; step < 4; ++step) schedule.step();  // one behind each of the four steps
  const double lr = optimizer.lr();
  EXPECT_THROW(schedule.step(), ValueError);
  EXPECT_EQ(schedule.current_step(), 4);
  EXPECT_EQ(optimizer.lr(), lr);
  // Where the rise has no length the first step has the highest rate, and no NaN.
  OneCycleSchedule steep(optimizer, {.max_lr = 1, .total = 10, .pct_start = 0.1});
  EXPECT_EQ(optimizer.lr(), 1);
}

TEST(Schedule, PlateauStateGoesRound) {
  const NamedTensors parameters = make_parameters();
  SGD optimizer(parameters, {.lr = 1});
  PlateauSchedule first(optimizer, {.factor = 0.5, .patience = 1});
  first.step(1);
  first.step(1);
  PlateauSchedule second(optimizer, {.factor = 0.5, .patience = 1});
  second.load_state_dict(first.state_dict());
  EXPECT_TRUE(second.step(1)) << "the second step without improvement";
  EXPECT_EQ(optimizer.lr(), 0.5);
  // Steps of rest are part of it, and a state that lacks one of its numbers changes nothing.
  PlateauSchedule third(optimizer, {.factor = 0.5, .patience = 0, .cooldown = 2});
  third.step(1), third.step(1);
  EXPECT_EQ(optimizer.lr(), 0.25);
  PlateauSchedule fourth(optimizer, {.factor = 0.5, .patience = 0, .cooldown = 2});
  const StateDict saved = third.state_dict();
  for (const char* left_out : {"best", "bad_steps", "cooldown_left"}) {
    StateDict broken;
    for (const auto& [name, value] : saved) {
      if (name != left_out) broken.set(name, value);
    }
    EXPECT_THROW(fourth.load_state_dict(broken), ValueError) << left_out;
  }
  EXPECT_EQ(fourth.best(), std::numeric_limits<double>::infinity());
  fourth.load_state_dict(saved);
  EXPECT_EQ(fourth.best(), 1);
  EXPECT_FALSE(fourth.step(1)) << "the first step of rest";
  EXPECT_FALSE(fourth.step(1)) << "the second";
  EXPECT_TRUE(fourth.step(1));
}

}  // namespace
}  // namespace tessera::optim
