// Schedules of the facade: what they count, and when they stay where they are.
// ctest labels: threads
#include "accelerate/accelerator_fixture.h"

#include <limits>

namespace tessera::test_accelerator_schedules {
namespace {

// SCH-1, and trap 18: the world size multiplies the user's schedule.
TEST(Schedules, CountUpdatesOrAccelerateStepsAsTheyAreAsked) {
  struct Case {
    ScheduleUnit unit;
    bool split, tied;
    double (*expected)(int ranks);
  };
  const Case cases[] = {
      {ScheduleUnit::kUpdates, false, true, [](int) { return 1 - 1 / 10.0; }},
      {ScheduleUnit::kUpdates, true, true, [](int) { return 1 - 1 / 10.0; }},
      {ScheduleUnit::kHuggingFace, false, true, [](int ranks) { return 1 - ranks / 10.0; }},
      {ScheduleUnit::kHuggingFace, true, true, [](int) { return 1 - 1 / 10.0; }},
      {ScheduleUnit::kHuggingFace, false, false, [](int) { return 1 - 1 / 10.0; }},
  };
  for (const int ranks : {1, 2, 4}) {
    for (const Case& one : cases) {
      on_ranks(ranks, [&](int) {
        Accelerator accelerator({.step_schedule_with_optimizer = one.tied,
                                 .schedule_unit = one.unit,
                                 .split_batches = one.split});
        Regression model;
        optim::SGD optimizer(model.named_parameters(), {.lr = 1});
        optim::LambdaSchedule schedule(optimizer,
                                       {[](int64_t n) { return 1 - static_cast<double>(n) / 10; }});
        accelerator.prepare(model, optimizer, schedule);
        schedule.step();
        EXPECT_DOUBLE_EQ(optimizer.lr(), one.expected(ranks));
      });
    }
  }
}

TEST(Schedules, OneCycleIsNeverTakenBeyondItsEnd) {
  on_ranks(4, [](int) {
    Accelerator accelerator({.schedule_unit = ScheduleUnit::kHuggingFace});
    Regression model;
    optim::SGD optimizer(model.named_parameters(), {.lr = 1});
    optim::OneCycleSchedule schedule(optimizer,
                                     {.max_lr = 1, .total = 10, .cycle_momentum = false});
    accelerator.prepare(model, optimizer, schedule);
    for (int i = 0; i < 5; ++i) schedule.step();
    EXPECT_EQ(schedule.current_step(), 9);
    EXPECT_DOUBLE_EQ(optimizer.lr(), 1 / 25.0 / 1e4);
  });
}

// SCH-1: an overflow leaves the schedule where it is, unless it is stepped by itself. OPT-1:
// whether a step was skipped, with gradients that are not finite: false, true, true, false.
TEST(Schedules, StayWhereTheirOwnOptimizerSkipped) {
  for (const int ranks : {1, 2}) {
    for (const bool tied : {true, false}) {
      on_ranks(ranks, [&](int) {
        const Line line(8);
        Accelerator accelerator({.mixed_precision = Precision::kFP16,
                                 .step_schedule_with_optimizer = tied,
                                 .loss_scale = {.init_scale = 1024}});
        Regression model, other;
        optim::SGD optimizer(model.named_parameters(), {.lr = 1});
        optim::SGD bystander(other.named_parameters(), {.lr = 1});
        const auto falling = [](int64_t n) { return 1 - static_cast<double>(n) / 10; };
        optim::LambdaSchedule schedule(optimizer, {falling}), others(bystander, {falling});
        accelerator.prepare(others, bystander, model, optimizer, schedule, other);
        const auto [x, y] = line.rows(0, 8);
        const auto step = [&](double factor) {
          accelerator.backward(squared_error(model(x), y) * factor);
          accelerator.backward(squared_error(other(x), y));
          optimizer.step(), schedule.step(), optimizer.zero_grad();
          bystander.step(), others.step(), bystander.zero_grad();
          return accelerator.optimizer_step_was_skipped(optimizer);
        };
        const double nan = std::numeric_limits<double>::quiet_NaN();
        EXPECT_FALSE(accelerator.optimizer_step_was_skipped());
        EXPECT_FALSE(step(0.1));
        EXPECT_EQ(schedule.current_step(), 1);
        const auto before = values_of(model);
        EXPECT_TRUE(step(nan));
        EXPECT_TRUE(step(nan));
        EXPECT_TRUE(accelerator.optimizer_step_was_skipped());
        EXPECT_EQ(values_of(model), before);
        EXPECT_EQ(schedule.current_step(), tied ? 1 : 3);
        // Another optimizer's overflow is not its own: upstream blocks all schedules.
        EXPECT_EQ(others.current_step(), 3);
        EXPECT_FALSE(accelerator.optimizer_step_was_skipped(bystander));
        EXPECT_FALSE(step(0.1));
        EXPECT_FALSE(accelerator.optimizer_step_was_skipped());
      });
    }
  }
}

// A metric within a window, and one after a step that was left out, says nothing of the rate.
TEST(Schedules, APlateauIsLookedForWhereItsOwnOptimizerStepped) {
  for (const bool tied : {true, false}) {
    const Line line(8);
    Accelerator accelerator(
        {.gradient_accumulation_steps = 2, .step_schedule_with_optimizer = tied});
    Regression model;
    optim::SGD optimizer(model.named_parameters(), {.lr = 1});
    optim::PlateauSchedule plateau(optimizer, {.factor = 0.5, .patience = 0});
    accelerator.prepare(model, optimizer, plateau);
    const auto [x, y] = line.rows(0, 8);
    int lowered = 0;
    for (int turn = 0; turn < 6; ++turn) {
      const auto micro = accelerator.accumulate(model);
      const double weight = turn < 4 ? 1 : 0;  // the last window is left out
      accelerator.backward(squared_error(model(x), y), {.weight = weight});
      optimizer.step();
      lowered += plateau.step(turn == 1 ? 1 : 2);
      optimizer.zero_grad();
    }
    EXPECT_EQ(lowered, tied ? 1 : 4);
    EXPECT_EQ(plateau.skip_reason().empty(), !tied);
  }
}

// SCH-2, and trap 2: the option that lets accumulation count as steps never does. Here accumulation
// never counts.
TEST(Schedules, ALinearScheduleOfTwentyReachesZeroAfterTenUpdatesOfTwoRanks) {
  for (const int64_t steps : {1, 2, 4}) {
    for (const bool updates : {true, false}) {
      on_ranks(2, [&](int) {
        const Line line(4);
        Accelerator accelerator(
            {.gradient_accumulation_steps = steps,
             .schedule_unit = updates ? ScheduleUnit::kUpdates : ScheduleUnit::kHuggingFace});
        Regression model;
        optim::SGD optimizer(model.named_parameters(), {.lr = 1});
        optim::PolynomialSchedule schedule(optimizer, {.total = 20});
        accelerator.prepare(model, optimizer, schedule);
        const auto [x, y] = line.rows(0, 4);
        const int64_t calls = (updates ? 20 : 10) * steps;
        for (int64_t call = 0; call < calls; ++call) {
          EXPECT_GT(optimizer.lr(), 0) << call;
          const auto micro = accelerator.accumulate(model);
          accelerator.backward(squared_error(model(x), y) * 0.01);
          optimizer.step(), schedule.step(), optimizer.zero_grad();
        }
        EXPECT_EQ(optimizer.lr(), 0);
      });
    }
  }
}

}  // namespace
}  // namespace tessera::test_accelerator_schedules
