// Schedules: what they set, refuse and save. Their values are compared with torch's in
// test_golden_optim.
#include <tessera/optim/schedule.h>

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <tessera/optim/optimizers.h>

#include "message_of.h"
#include "optim/optim_fixture.h"

namespace tessera::optim::test_schedule {
namespace {

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

// As torch's groups keep initial_lr: rates that schedules set are nobody's base.
TEST(Schedule, GoesOutFromTheRatesBeforeAnySchedule) {
  const NamedTensors parameters = make_parameters();
  const auto rates = [](const Optimizer& optimizer) {
    return std::vector<double>{optimizer.lr(0), optimizer.lr(1)};
  };
  SGD first({{{parameters[0]}, {.lr = 1}}, {{parameters[1]}, {.lr = 0.5}}});
  EXPECT_FALSE(first.initial_lr().has_value());
  EXPECT_FALSE(first.state_dict().contains("group.0.initial_lr"));
  WarmupSchedule warmup(first, {2});
  EXPECT_EQ(rates(first), (std::vector<double>{0, 0}));
  const StateDict at_zero = first.state_dict().clone();
  warmup.step();
  // A second one beside the first, and one made after the first has moved.
  ExponentialSchedule second(first, {.gamma = 0.5});
  EXPECT_EQ(rates(first), (std::vector<double>{1, 0.5}));
  second.step();
  EXPECT_EQ(rates(first), (std::vector<double>{0.5, 0.25}));
  const StateDict decayed = first.state_dict().clone();
  for (const StateDict* saved : {&at_zero, &decayed}) {
    SGD other({{{parameters[0]}, {.lr = 7}}, {{parameters[1]}, {.lr = 7}}});
    other.load_state_dict(*saved);
    EXPECT_EQ(rates(other),
              (std::vector<double>{saved->scalar("group.0.lr"), saved->scalar("group.1.lr")}));
    WarmupSchedule again(other, {2});
    again.step(), again.step();
    EXPECT_EQ(rates(other), (std::vector<double>{1, 0.5}));
  }
  // A state of an optimizer without schedules: its rates are its own.
  SGD plain({{{parameters[0]}, {.lr = 3}}, {{parameters[1]}, {.lr = 2}}});
  first.load_state_dict(plain.state_dict());
  ExponentialSchedule third(first, {.gamma = 0.5});
  EXPECT_EQ(rates(first), (std::vector<double>{3, 2}));
  // OneCycle has rates of its own, from which later schedules go out.
  OneCycleSchedule cycle(first, {.max_lr = 1, .total = 11, .div_factor = 4});
  EXPECT_EQ(*first.initial_lr(1), 0.25);
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
  // The rates, too; a state without them leaves those of the optimizer.
  SGD fresh(parameters, {.lr = 1});
  PlateauSchedule fifth(fresh, {.factor = 0.5});
  StateDict without;
  for (const auto& [name, value] : saved) {
    if (name != "lrs") without.set(name, value);
  }
  fifth.load_state_dict(without);
  EXPECT_EQ(fresh.lr(), 1);
  fifth.load_state_dict(saved);
  EXPECT_EQ(fresh.lr(), 0.25);
  SGD two({{{parameters[0]}, {.lr = 0.75}}, {{parameters[1]}, {.lr = 0.5}}});
  EXPECT_THROW(PlateauSchedule(two).load_state_dict(saved), ValueError);
}

}  // namespace
}  // namespace tessera::optim::test_schedule
