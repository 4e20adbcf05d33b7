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
#include <tessera/core/profile/profiler.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/ema.h>
#include <tessera/optim/schedule.h>

#include "message_of.h"
#include "optim/optim_fixture.h"
#include "optim/optimizer_kinds.h"
#include "refusals.h"

namespace tessera::optim::test_optim {
namespace {

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

TEST(Optimizer, AGroupMayComeLater) {
  const NamedTensors parameters = make_parameters();
  SGD optimizer({parameters[0]}, {.lr = 0.5});
  StepSchedule schedule(optimizer, {.step_size = 1, .gamma = 0.5});
  optimizer.add_param_group({{parameters[1]}, {.lr = 0.25}});
  schedule.step();
  EXPECT_EQ(optimizer.lr(0), 0.25);
  EXPECT_EQ(optimizer.lr(1), 0.25) << "the schedule goes on with the groups it was made for";
  for (const auto& one : parameters) one.tensor.set_grad(ones_like(one.tensor));
  optimizer.step();
  EXPECT_EQ(values_of(parameters), (std::vector<double>{0.75, 1.75, 2.75, 3.75, -1.25, 0.25}));
  EXPECT_THROW(optimizer.add_param_group({{parameters[1]}, {.lr = 0.1}}), ValueError);
  EXPECT_THROW(optimizer.add_param_group({{}, {.lr = -1}}), ValueError);
  EXPECT_EQ(optimizer.num_groups(), 2u);
  EXPECT_TRUE(optimizer.step()) << "what was refused left nothing behind";
  optimizer.set_step_gate([] { return StepDecision{}; });
  EXPECT_THROW(optimizer.add_param_group({{}, {.lr = 1}}), UnsupportedError);
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

// Each entry of a state has the shape of a parameter, or is a number; and names of parameters have
// dots.
TEST(Optimizer, SaysWhichParameterEachStateIsOf) {
  const Tensor weight = ones({2, 3}, {.dtype = kBF16}), bias = ones({3});
  const NamedTensors parameters = {{"layers.0.weight", weight}, {"layers.0", bias}};
  AdamW optimizer({{{parameters[0]}, {.lr = 0.1}}, {{parameters[1]}, {.lr = 0.2}}});
  for (const auto& one : parameters) one.tensor.set_grad(ones_like(one.tensor));
  optimizer.step();
  int numbers = 0, states = 0;
  for (const auto& [key, value] : optimizer.state_dict()) {
    const Tensor like = optimizer.state_like(key);
    if (!key.starts_with("state.") || key.ends_with(".step")) {
      EXPECT_FALSE(like.defined()) << key;
      ++numbers;
      continue;
    }
    EXPECT_TRUE(like.is(key.starts_with("state.layers.0.weight.") ? weight : bias)) << key;
    EXPECT_EQ(value.shape(), like.shape()) << key;
    ++states;
  }
  EXPECT_EQ(states, 5);  // two averages each, and a master of the narrow one
  EXPECT_GT(numbers, 2);
  for (const char* key : {"", "state.", "state.layers.1.exp_avg", "state.exp_avg",
                          "other.layers.0.exp_avg", "state.layers.0"}) {
    EXPECT_FALSE(optimizer.state_like(key).defined()) << key;
  }
  const StateDict narrow = optimizer.parameter_state("layers.0.weight");
  EXPECT_EQ(narrow.at("step").item<int64_t>(), 1);
  EXPECT_EQ(narrow.at("exp_avg").shape(), weight.shape());
  EXPECT_EQ(narrow.at("master").dtype(), kF32);
  EXPECT_FALSE(optimizer.parameter_state("layers.0").contains("master"));
  expect_refusals({{"has no parameter 'layers'", [&] { optimizer.parameter_state("layers"); }}});
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

TEST(Clip, TakesParametersWithTheirNames) {
  const NamedTensors parameters = make_parameters();
  for (const auto& one : parameters) one.tensor.set_grad(ones_like(one.tensor));
  EXPECT_EQ(clip_grad_norm(parameters, 100).item(), std::sqrt(6.0));
  clip_grad_value(parameters, 0.5);
  EXPECT_EQ(parameters[1].tensor.grad().to_vector(), (std::vector<double>{0.5, 0.5}));
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

TEST(Clip, BoundsAndFactorsThatContradict) {
  const NamedTensors parameters = make_parameters(), others = make_parameters();
  for (const auto& one : parameters) one.tensor.set_grad(ones_like(one.tensor));
  const TensorList tensors = {parameters[0].tensor, parameters[1].tensor};
  SGD optimizer(parameters, {.lr = 1}), second(others, {.lr = 1}), scaled(others, {.lr = 1});
  scaled.scale_next_step(0.5);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const char* const same = "must be told the same before";
  expect_refusals({
      {"max_norm must not be negative", [&] { clip_grad_norm(tensors, -1e-9); }},
      {"max_norm must not be negative", [&] { clip_grad_norm(tensors, nan); }},
      {"leave out gradient_scale",
       [&] { clip_grad_norm(tensors, 1, {.fold_into = &optimizer, .gradient_scale = 2}); }},
      {"fold_into, which is null",
       [&] { clip_grad_norm(tensors, 1, {.fold_into_others = {&second}}); }},
      {same,
       [&] {
         clip_grad_norm(tensors, 1, {.fold_into = &optimizer, .fold_into_others = {&scaled}});
       }},
      {same,
       [&] {
         clip_grad_norm(tensors, 1, {.fold_into = &optimizer, .fold_into_others = {nullptr}});
       }},
      {"the limit must not be negative", [&] { clip_grad_value(tensors, -1e-9); }},
      {"gradient_scale must be positive", [&] { clip_grad_value(tensors, 1, 0); }},
      {"gradient_scale must be positive", [&] { clip_grad_value(tensors, 1, -1); }},
  });
  EXPECT_EQ(optimizer.next_step().data_as<double>()[0], 1);
  clip_grad_norm(tensors, 1, {.fold_into = &optimizer, .fold_into_others = {&second}});
  const double factor = 1 / (std::sqrt(6.0) + 1e-6);
  EXPECT_EQ(optimizer.next_step().data_as<double>()[0], factor);
  EXPECT_EQ(second.next_step().data_as<double>()[0], factor);
  clip_grad_value(tensors, 0.5, 2);  // of gradients that are multiplied by 2
  EXPECT_EQ(tensors[0].grad().to_vector(), std::vector<double>(4, 0.25));
  EXPECT_EQ(clip_grad_norm(tensors, 0, {.gradient_scale = 4}).item(), std::sqrt(6.0));
  EXPECT_EQ(tensors[0].grad().to_vector(), std::vector<double>(4, 0));
}

// Norms of every order, against a sum that is written out.
TEST(Clip, NormsOfEveryOrder) {
  const NamedTensors parameters = make_parameters();
  const TensorList tensors = {parameters[0].tensor, parameters[1].tensor};
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double p : {1.0, 2.0, 3.0, 0.5, infinity}) {
    tensors[0].set_grad(tensor({1, -2, 3, -4}).view({2, 2}));
    tensors[1].set_grad(tensor({0.5, 0}));
    double expected = 0;
    for (const double value : {1.0, 2.0, 3.0, 4.0, 0.5}) {
      expected = std::isinf(p) ? std::max(expected, value) : expected + std::pow(value, p);
    }
    if (!std::isinf(p)) expected = std::pow(expected, 1 / p);
    EXPECT_NEAR(clip_grad_norm(tensors, 1e9, {.norm_type = p}).item(), expected, 1e-9 * expected);
    EXPECT_EQ(tensors[0].grad().to_vector()[3], -4);
    clip_grad_norm(tensors, expected / 2, {.norm_type = p});
    EXPECT_NEAR(tensors[0].grad().to_vector()[3], -2, 1e-5) << p;
  }
}

TEST(Optimizer, MastersThatAreGivenFitTheirParameters) {
  const Tensor narrow = ones({2, 3}, {.dtype = kBF16}), wide = ones({2});
  const auto given = [&](const Tensor& value, const char* name = "narrow") {
    SGD optimizer({{"narrow", narrow}, {"wide", wide}}, {.lr = 1});
    optimizer.begin_masters({{name, value}});
    return optimizer.state_dict().contains("state.narrow.master");
  };
  EXPECT_TRUE(given(ones({2, 3})));
  EXPECT_FALSE(given(ones({2, 3}), "unknown"));
  const char* const dtypes = "f32 values for 16-bit parameters";
  expect_refusals({
      {dtypes,
       [&] {
         given(ones({2, 3}, {.dtype = kBF16}));
       }},
      {dtypes, [&] { given(ones({2}), "wide"); }},
      {"the value of 'narrow' is",
       [&] {
         given(ones({3, 2}));
       }},
      {"the value of 'narrow' is",
       [&] {
         given(ones({3, 2}).t());
       }},
      {"'narrow' has a master",
       [&] {
         SGD optimizer({{"narrow", narrow}}, {.lr = 1});
         optimizer.begin_masters({{"narrow", ones({2, 3})}});
         optimizer.begin_masters({{"narrow", ones({2, 3})}});
       }},
  });
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

TEST(Ema, AStateOfAnotherShapeChangesNothing) {
  const NamedTensors parameters = make_parameters();
  EMA average(parameters, {.decay = 0.5});
  const std::vector<double> before = values_of(average.averages());
  StateDict state = average.state_dict().clone();
  state.set("average.a", full({2, 2}, 7));
  state.set("average.b", zeros({3}));
  state.set("num_updates", scalar_tensor(9, kI64));
  expect_refusals({{"the saved average of 'b'", [&] { average.load_state_dict(state); }}});
  EXPECT_EQ(values_of(average.averages()), before);
  EXPECT_EQ(average.num_updates(), 0);
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

}  // namespace
}  // namespace tessera::optim::test_optim
