// When gradients are reduced and what they then are: windows, no_sync, weights, uneven ranks.
// ctest labels: threads
#include "accelerator_fixture.h"

#include <cmath>
#include <numeric>
#include <utility>

#include <tessera/accelerate/local_sgd.h>
#include <tessera/core/error.h>
#include <tessera/optim/clip.h>

namespace tessera {
namespace {

using Values = std::vector<std::vector<float>>;

bool near(const Values& a, const Values& b, double tolerance = 1e-5) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].size() != b[i].size()) return false;
    for (size_t j = 0; j < a[i].size(); ++j) {
      if (!(std::abs(a[i][j] - b[i][j]) <= tolerance * (1 + std::abs(b[i][j])))) return false;
    }
  }
  return true;
}

Tensor loss_of(Regression& model, const std::array<Tensor, 2>& batch) {
  return squared_error(model(batch[0]), batch[1]);
}

// The gradient that one process has for the mean loss over some rows of a line.
Values gradient_over(const Line& line, const std::vector<std::pair<int64_t, int64_t>>& parts) {
  Regression model;
  double total = 0;
  for (const auto& [begin, end] : parts) total += static_cast<double>(end - begin);
  for (const auto& [begin, end] : parts) {
    const double weight = static_cast<double>(end - begin) / total;
    (loss_of(model, line.rows(begin, end)) * weight).backward();
  }
  return gradients_of(model);
}

// Rank r's batch of 16 rows in turn `turn`.
std::pair<int64_t, int64_t> share(int turn, int rank, int ranks) {
  const int64_t begin = (turn * ranks + rank) * 16;
  return {begin, begin + 16};
}

// ---- Batches that ranks leave out
// ----------------------------------------------------------------

// At the next step, not when one rank's epoch ends before the others'.
TEST(Batches, ARankThatLeavesOneOutIsAnErrorAtThatStep) {
  distributed::compared_ranks(3, [&](int rank) {
    const Line line(96);
    Accelerator accelerator;
    Regression model;
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
    data::DataLoader loader(line, {.batch_size = 4});
    accelerator.prepare(model, optimizer, loader);
    int steps = 0;
    bool left_out = false;
    std::string message;
    try {
      for (auto& batch : loader) {
        if (rank == 1 && steps == 2 && !std::exchange(left_out, true)) continue;
        const auto micro = accelerator.accumulate(model);
        accelerator.backward(loss_of(model, batch));
        optimizer.step();
        optimizer.zero_grad();
        ++steps;
      }
    } catch (const DistributedError& error) {
      message = error.what();
    }
    EXPECT_EQ(steps, 2);
    EXPECT_NE(message.find("0:36, 0:48, 0:36"), std::string::npos) << message;
  });
}

// ---- Backwards that fail -----------------------------------------------------------------------

// At once, not by a timeout, and the ranks may go on with the next batch.
TEST(Backward, OfARankThatThrowsEndsThatOfTheOthers) {
  on_ranks(2, [](int rank) {
    const Line line(64);
    Accelerator accelerator;
    Regression model;
    accelerator.prepare(model);
    const auto backward = [&](int turn) {
      const auto [begin, end] = share(turn, rank, 2);
      accelerator.backward(loss_of(model, line.rows(begin, end)));
    };
    {
      HookHandle hook;
      if (rank == 1) {
        hook = register_hook(model.a,
                             [](const Tensor&) -> Tensor { TS_THROW(IoError, "hook", "fails"); });
      }
      std::string message;
      try {
        backward(0);
      } catch (const IoError& error) {
        message = "own";
      } catch (const DistributedError& error) {
        message = error.what();
      }
      hook.remove();
      if (rank == 1) {
        EXPECT_EQ(message, "own");
      } else {
        EXPECT_NE(message.find("rank 1 of 'world' has thrown"), std::string::npos) << message;
      }
    }
    model.zero_grad();
    backward(1);
    EXPECT_TRUE(near(gradients_of(model), gradient_over(line, {{32, 64}})));
  });
}

// ---- no_sync -----------------------------------------------------------------------------------

// SYN-1
TEST(NoSync, ChangesNothingInOneProcess) {
  const Line line(80);
  Accelerator accelerator;
  Regression model, baseline;
  accelerator.prepare(model);
  for (int turn = 0; turn < 4; ++turn) {
    loss_of(baseline, line.rows(turn * 16, turn * 16 + 16)).backward();
    const auto scope = accelerator.no_sync(model);
    accelerator.backward(loss_of(model, line.rows(turn * 16, turn * 16 + 16)));
    EXPECT_EQ(gradients_of(model), gradients_of(baseline));
  }
}

// SYN-2
TEST(NoSync, GradientsDifferUntilABackwardThatSynchronises) {
  for (const int size : {2, 4}) {
    on_ranks(size, [&](int rank) {
      const Line line(64 * 4);
      Accelerator accelerator;
      Regression model;
      accelerator.prepare(model);
      for (int turn = 0; turn < 4; turn += 2) {
        const auto batch = [&](int t) {
          const auto [begin, end] = share(t, rank, size);
          return line.rows(begin, end);
        };
        // What all ranks together would have, the two backwards added up.
        Values expected;
        {
          Regression whole;
          for (int t = turn; t < turn + 2; ++t) {
            loss_of(whole, line.rows(t * size * 16, (t + 1) * size * 16)).backward();
          }
          expected = gradients_of(whole);
        }
        {
          const auto scope = accelerator.no_sync(model);
          accelerator.backward(loss_of(model, batch(turn)));
        }
        const Tensor a = accelerator.gather(model.a.grad());
        EXPECT_NE(a[0].item(), a[1].item());
        accelerator.backward(loss_of(model, batch(turn + 1)));
        EXPECT_TRUE(near(gradients_of(model), expected));
        model.zero_grad();
      }
    });
  }
}

// SYN-3
TEST(NoSync, WhatRanForwardInItIsReducedWhenTriggered) {
  on_ranks(2, [&](int rank) {
    const Line line(16 * 2 * 3);
    Accelerator accelerator;
    Regression model;
    accelerator.prepare(model);
    std::vector<Tensor> losses;
    {
      const auto scope = accelerator.no_sync(model);
      for (int turn = 0; turn < 3; ++turn) {
        const auto [begin, end] = share(turn, rank, 2);
        losses.push_back(loss_of(model, line.rows(begin, end)));
      }
    }
    for (int turn = 0; turn < 3; ++turn) {
      std::optional<AcceleratorScope> scope;
      if (turn == 2) scope.emplace(accelerator.trigger_sync_in_backward(model));
      accelerator.backward(losses[static_cast<size_t>(turn)]);
      const Tensor all = accelerator.gather(model.a.grad());
      if (turn < 2) {
        EXPECT_NE(all[0].item(), all[1].item()) << turn;
      } else {
        EXPECT_EQ(all[0].item(), all[1].item());
        Regression whole;
        for (int t = 0; t < 3; ++t) {
          loss_of(whole, line.rows(t * 32, t * 32 + 32)).backward();
        }
        EXPECT_TRUE(near(gradients_of(model), gradients_of(whole)));
      }
    }
  });
}

// ---- accumulate --------------------------------------------------------------------------------

struct Case {
  int ranks;
  bool split, dispatch, each_batch;
};

// SYN-4, SYN-5 and, with 80 samples, the short last window of SYN-8.
TEST(Accumulate, GradientsAreThoseOfOneProcessAtEveryBoundaryAndRatesExact) {
  std::vector<Case> cases;
  for (const int ranks : {1, 2, 4}) {
    for (const bool split : {false, true}) {
      for (const bool dispatch : {false, true}) {
        for (const bool each_batch : {false, true}) {
          cases.push_back({ranks, split, dispatch, each_batch});
        }
      }
    }
  }
  for (const Case& one : cases) {
    SCOPED_TRACE(testing::Message() << one.ranks << " ranks, split " << one.split << ", dispatch "
                                    << one.dispatch << ", each batch " << one.each_batch);
    const int64_t batch_size = 16;
    // Rows of all ranks in a turn.
    const int64_t turn_rows = one.split ? batch_size : batch_size * one.ranks;
    const int turns = 5;
    const Line line(turn_rows * turns);
    on_ranks(one.ranks, [&](int) {
      Accelerator accelerator({.gradient_accumulation_steps = 2,
                               .sync_each_batch = one.each_batch,
                               .split_batches = one.split,
                               .dispatch_batches = one.dispatch});
      Regression model;
      optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});
      optim::LambdaSchedule schedule(
          optimizer, {[](int64_t n) { return std::pow(0.65, static_cast<double>(n)); }});
      data::DataLoader loader(line, {.batch_size = batch_size});
      accelerator.prepare(optimizer, loader, schedule, model);
      Regression whole;
      optim::AdamW whole_optimizer(whole.named_parameters(), {.lr = 1e-3});
      optim::LambdaSchedule whole_schedule(
          whole_optimizer, {[](int64_t n) { return std::pow(0.65, static_cast<double>(n)); }});
      int turn = 0;
      for (auto& batch : loader) {
        const bool last = turn + 1 == turns;
        const bool boundary = turn % 2 == 1 || last;
        const bool begins = turn % 2 == 0;
        // The mean over the window so far: of one micro-batch, or of two equal ones.
        const int64_t first = begins ? turn : turn - 1;
        if (begins) whole.zero_grad();
        Regression probe;
        probe.copy_state_from(whole);
        loss_of(probe, line.rows(first * turn_rows, (turn + 1) * turn_rows)).backward();

        const auto micro = accelerator.accumulate(model);
        EXPECT_EQ(micro.sync_gradients(), boundary);
        EXPECT_EQ(accelerator.sync_gradients(), boundary);
        accelerator.backward(loss_of(model, batch));
        if (boundary || one.each_batch) {
          EXPECT_TRUE(near(gradients_of(model), gradients_of(probe))) << turn;
        } else if (one.ranks > 1) {
          EXPECT_FALSE(near(gradients_of(model), gradients_of(probe))) << turn;
        }
        const Values before = gradients_of(model);
        EXPECT_EQ(optimizer.step(), boundary);
        EXPECT_EQ(schedule.step(), boundary);
        optimizer.zero_grad();
        if (boundary) {
          whole.a.set_grad(probe.a.grad()), whole.b.set_grad(probe.b.grad());
          whole_optimizer.step(), whole_schedule.step();
          EXPECT_FALSE(model.a.grad().defined());
        } else {
          EXPECT_EQ(gradients_of(model), before);  // zero_grad did nothing
        }
        EXPECT_EQ(optimizer.lr(), whole_optimizer.lr());
        EXPECT_TRUE(near(values_of(model), values_of(whole), 1e-4));
        ++turn;
      }
      EXPECT_EQ(turn, turns);
    });
  }
}

// SYN-8, and trap 4: a window of k < n micro-batches is divided by n. 86 rows in batches of 16:
// four, then one and the rest of 6.
TEST(Accumulate, AShortLastWindowIsTheMeanOfItsSamples) {
  const Line line(86);
  Accelerator accelerator({.gradient_accumulation_steps = 4});
  Regression model;
  optim::SGD optimizer(model.named_parameters(), {.lr = 0});
  data::DataLoader loader(line, {.batch_size = 16});
  accelerator.prepare(model, optimizer, loader);
  std::vector<Values> seen;
  for (auto& batch : loader) {
    const auto micro = accelerator.accumulate(model);
    accelerator.backward(loss_of(model, batch));
    if (micro.sync_gradients()) seen.push_back(gradients_of(model));
    optimizer.step(), optimizer.zero_grad();
  }
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_TRUE(near(seen[0], gradient_over(line, {{0, 64}})));
  EXPECT_TRUE(near(seen[1], gradient_over(line, {{64, 86}})));
}

// The last turn of two ranks has 6 rows for the first and none of its own for the second, whose
// batch is filled up: copies weigh nothing.
TEST(Accumulate, CopiesThatFillUpABatchWeighNothing) {
  on_ranks(2, [&](int) {
    const Line line(64 + 6);
    Accelerator accelerator({.gradient_accumulation_steps = 2});
    Regression model;
    optim::SGD optimizer(model.named_parameters(), {.lr = 0});
    data::DataLoader loader(line, {.batch_size = 16});
    accelerator.prepare(model, optimizer, loader);
    std::vector<Values> seen;
    for (auto& batch : loader) {
      const auto micro = accelerator.accumulate(model);
      // A loss over the rows that count; the others are left out by the caller, as a mask would.
      const int64_t rows = std::max<int64_t>(1, loader.batch_samples());
      accelerator.backward(
          squared_error(model(batch[0].narrow(0, 0, rows)), batch[1].narrow(0, 0, rows)));
      if (micro.sync_gradients()) seen.push_back(gradients_of(model));
      optimizer.step(), optimizer.zero_grad();
    }
    ASSERT_EQ(seen.size(), 2u);
    EXPECT_TRUE(near(seen[0], gradient_over(line, {{0, 64}})));
    EXPECT_TRUE(near(seen[1], gradient_over(line, {{64, 70}})));
  });
}

// A plain mean of a batch of 6 samples and 10 copies has the copies in it; one by the mask has not.
TEST(Accumulate, AMaskOfRowsLeavesOutTheCopiesOfABatch) {
  for (const int size : {1, 2, 3}) {
    on_ranks(size, [&](int rank) {
      const Line line(16 * size + 6);
      Accelerator accelerator;
      Regression model;
      data::DataLoader loader(line, {.batch_size = 16});
      accelerator.prepare(model, loader);
      EXPECT_THROW(accelerator.row_mask(), ValueError);
      std::vector<Values> seen;
      for (auto& batch : loader) {
        const Tensor mask = accelerator.row_mask();
        EXPECT_EQ(mask.shape(), Shape{batch[0].size(0)});
        const double samples = seen.empty() ? 16 : rank == 0 ? 6 : 0;
        EXPECT_EQ(mask.sum().item(), samples);
        const Tensor losses = square(model(batch[0]) - batch[1]).view({-1});
        accelerator.backward((losses * mask).sum() /
                             static_cast<double>(std::max<int64_t>(1, loader.batch_samples())));
        seen.push_back(gradients_of(model));
        model.zero_grad();
      }
      ASSERT_EQ(seen.size(), 2u);
      EXPECT_TRUE(near(seen[0], gradient_over(line, {{0, 16 * size}})));
      EXPECT_TRUE(near(seen[1], gradient_over(line, {{16 * size, 16 * size + 6}})));
    });
  }
}

TEST(Accumulate, UnequalBatchesOfRanksWeighByTheirSamples) {
  on_ranks(2, [&](int rank) {
    const Line line(40);
    Accelerator accelerator;
    Regression model;
    accelerator.prepare(model);
    // 4 + 12 rows in the first micro-batch, 20 + 4 in the second.
    const std::pair<int64_t, int64_t> parts[2][2] = {{{0, 4}, {4, 16}}, {{16, 36}, {36, 40}}};
    accelerator.set_gradient_accumulation_steps(2);
    for (const auto& part : parts) {
      const auto micro = accelerator.accumulate(model);
      const auto [begin, end] = part[rank];
      accelerator.backward(loss_of(model, line.rows(begin, end)),
                           {.weight = static_cast<double>(end - begin)});
    }
    EXPECT_TRUE(near(gradients_of(model), gradient_over(line, {{0, 40}})));
  });
}

// Tokens of a rank that has none weigh nothing; a window of none is left out and says so.
TEST(Accumulate, AWindowWithoutWeightIsLeftOut) {
  for (const int size : {1, 2}) {
    on_ranks(size, [&](int rank) {
      const Line line(16);
      Accelerator accelerator;
      Regression model;
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
      accelerator.prepare(model, optimizer);
      const auto step = [&](double weight) {
        const auto micro = accelerator.accumulate(model);
        accelerator.backward(loss_of(model, line.rows(0, 8)), {.weight = weight});
        const bool stepped = optimizer.step();
        optimizer.zero_grad();
        return stepped;
      };
      EXPECT_TRUE(step(5));
      const Values before = values_of(model);
      EXPECT_FALSE(step(0));
      EXPECT_NE(optimizer.skip_reason().find("any weight"), std::string::npos);
      EXPECT_TRUE(accelerator.optimizer_step_was_skipped());
      EXPECT_EQ(values_of(model), before);
      // One rank with tokens is enough, and it is not diluted by the others.
      Regression alone;
      alone.copy_state_from(model);
      loss_of(alone, line.rows(0, 8)).backward();
      {
        const auto micro = accelerator.accumulate(model);
        accelerator.backward(loss_of(model, line.rows(0, 8)), {.weight = rank == 0 ? 7 : 0});
        EXPECT_TRUE(near(gradients_of(model), gradients_of(alone)));
        EXPECT_TRUE(optimizer.step());
      }
      EXPECT_FALSE(accelerator.optimizer_step_was_skipped());
    });
  }
}

TEST(Accumulate, SeveralLossesOfAMicroBatchAddUpAndHaveOneWeight) {
  for (const int size : {1, 2}) {
    on_ranks(size, [&](int rank) {
      const Line line(16);
      Accelerator accelerator({.gradient_accumulation_steps = 2});
      Regression model, whole;
      accelerator.prepare(model);
      const auto rows = [&](int micro) {
        const int64_t begin = (micro * size + rank) * 4;
        return line.rows(begin, begin + 4);
      };
      for (int micro = 0; micro < 2; ++micro) {
        const auto open = accelerator.accumulate(model);
        for (int loss = 0; loss < 2; ++loss) accelerator.backward(loss_of(model, rows(micro)));
        EXPECT_THROW(accelerator.backward(loss_of(model, rows(micro)), {.weight = 3}), ValueError);
      }
      (loss_of(whole, line.rows(0, 8 * size)) * 2.0).backward();
      EXPECT_TRUE(near(gradients_of(model), gradients_of(whole)));
    });
  }
}

TEST(Accumulate, ModelsHaveWindowsOfTheirOwn) {
  for (const int size : {1, 2}) {
    on_ranks(size, [&](int rank) {
      const Line line(64);
      Accelerator accelerator;
      Regression generator, critic;
      optim::SGD slow(generator.named_parameters(), {.lr = 0.1});
      optim::SGD fast(critic.named_parameters(), {.lr = 0.1});
      optim::StepSchedule slow_rate(slow, {.step_size = 1});
      accelerator.prepare(slow, fast, slow_rate, generator, critic);
      accelerator.set_gradient_accumulation_steps(generator, 3);
      int slow_steps = 0, fast_steps = 0;
      double last_norm = 0;
      for (int turn = 0; turn < 6; ++turn) {
        const int64_t begin = (turn * size + rank) * 4;
        const auto batch = line.rows(begin, begin + 4);
        {
          const auto micro = accelerator.accumulate(critic);
          accelerator.backward(loss_of(critic, batch));
          fast_steps += fast.step();
          fast.zero_grad();
          EXPECT_TRUE(accelerator.clip_grad_norm(critic.parameters(), 1).defined());
        }
        const auto micro = accelerator.accumulate(generator);
        accelerator.backward(loss_of(generator, batch));
        const double norm = accelerator.clip_grad_norm(generator.parameters(), 1).item();
        if (turn % 3 == 2) last_norm = norm;
        EXPECT_EQ(std::isnan(norm), turn < 2);
        EXPECT_TRUE(turn < 2 || norm == last_norm);  // in between, that of the last boundary
        slow_steps += slow.step();
        slow_rate.step(), slow.zero_grad();
      }
      EXPECT_EQ(slow_steps, 2);
      EXPECT_EQ(fast_steps, 6);
      EXPECT_EQ(slow_rate.current_step(), 2);
    });
  }
}

TEST(Accumulate, TheNumberOfStepsMayChangeFromWindowToWindow) {
  const Line line(64);
  Accelerator accelerator({.gradient_accumulation_steps = 2});
  Regression model;
  accelerator.prepare(model);
  std::vector<bool> boundaries;
  for (int turn = 0; turn < 7; ++turn) {
    const auto micro = accelerator.accumulate(model);
    if (turn == 2) accelerator.set_gradient_accumulation_steps(3);  // of the next window
    boundaries.push_back(micro.sync_gradients());
    accelerator.backward(loss_of(model, line.rows(0, 4)));
  }
  EXPECT_EQ(boundaries, (std::vector<bool>{false, true, false, true, false, false, true}));
  Accelerator::AccumulateOptions now{.ends_window = true};
  EXPECT_TRUE(accelerator.accumulate({&model}, now).sync_gradients());
  EXPECT_THROW(accelerator.set_gradient_accumulation_steps(0), ValueError);
  Regression stranger;
  EXPECT_THROW((void)accelerator.accumulate(stranger), ValueError);
}

TEST(Accumulate, ALossOfSeveralElementsIsAnErrorWithAndWithoutALossScale) {
  for (const Precision precision : {Precision::kNo, Precision::kFP16}) {
    Accelerator accelerator({.mixed_precision = precision});
    const Tensor weight = ones({2}).set_requires_grad();
    EXPECT_THROW(accelerator.backward(weight * 2.0), ShapeError);
    EXPECT_THROW(accelerator.backward(Tensor()), ShapeError);
    EXPECT_FALSE(weight.grad().defined());
    accelerator.backward((weight * 2.0).sum());
    EXPECT_TRUE(weight.grad().defined());
  }
}

TEST(Accumulate, AStepOfGradientsThatWereNeverReducedIsAnError) {
  on_ranks(2, [&](int) {
    const Line line(8);
    Accelerator accelerator({.gradient_accumulation_steps = 2});
    Regression model;
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
    accelerator.prepare(model, optimizer);
    {
      const auto micro = accelerator.accumulate(model);
      accelerator.backward(loss_of(model, line.rows(0, 8)));
    }
    const auto micro = accelerator.accumulate(model);  // without a backward
    EXPECT_THROW(optimizer.step(), AutogradError);
  });
}

// ---- Loaders -----------------------------------------------------------------------------------

// SYN-6
TEST(ActiveLoader, NestedLoopsEachHaveTheirEnd) {
  for (const int size : {1, 2}) {
    on_ranks(size, [&](int) {
      const Line outer_line(80 * size), inner_line(96 * size);
      Accelerator accelerator;
      data::DataLoader outer(outer_line, {.batch_size = 16}), inner(inner_line, {.batch_size = 16});
      accelerator.prepare(outer, inner);
      EXPECT_EQ(accelerator.active_loader(), nullptr);
      int turn = 0;
      for ([[maybe_unused]] auto& batch : outer) {
        EXPECT_EQ(accelerator.active_loader(), &outer);
        if (turn == 1) {
          int inner_turn = 0;
          for ([[maybe_unused]] auto& other : inner) {
            EXPECT_EQ(accelerator.active_loader(), &inner);
            EXPECT_EQ(accelerator.end_of_dataloader(), ++inner_turn == 6);
          }
        }
        EXPECT_EQ(accelerator.active_loader(), &outer);
        EXPECT_EQ(accelerator.end_of_dataloader(), ++turn == 5);
      }
      EXPECT_EQ(accelerator.active_loader(), nullptr);
      EXPECT_FALSE(accelerator.end_of_dataloader());
    });
  }
}

// SYN-7, and trap 5: a loop that was left early stays the active one.
TEST(ActiveLoader, ALoopThatWasLeftEarlyIsForgotten) {
  for (const int size : {1, 2}) {
    on_ranks(size, [&](int) {
      const Line first_line(64 * size), second_line(32 * size);
      Accelerator accelerator({.gradient_accumulation_steps = 4});
      Regression model;
      data::DataLoader first(first_line, {.batch_size = 16});
      data::DataLoader second(second_line, {.batch_size = 8});
      accelerator.prepare(model, first, second);
      for ([[maybe_unused]] auto& batch : first) break;
      EXPECT_EQ(accelerator.active_loader(), nullptr);
      try {
        for ([[maybe_unused]] auto& batch : first) throw 1;
      } catch (int) {
      }
      int turn = 0;
      for (auto& batch : second) {
        EXPECT_EQ(accelerator.active_loader(), &second);
        const auto micro = accelerator.accumulate(model);
        EXPECT_EQ(micro.sync_gradients(), ++turn == 4) << turn;
        accelerator.backward(loss_of(model, batch));
      }
      EXPECT_EQ(accelerator.active_loader(), nullptr);
    });
  }
}

// ---- Gradients that are there already ----------------------------------------------------------

// Most of Accelerate's examples: the loss divided by hand, a step every k-th batch. The last
// batches are short, and copies fill them up.
TEST(AddingUp, AccumulationByHandIsThatOfOneProcess) {
  for (const int size : {1, 2, 3}) {
    on_ranks(size, [&](int) {
      const Line line(16 * size * 4 + 6 * size);
      Accelerator accelerator({.split_batches = true});
      Regression model, whole;
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
      optim::SGD whole_optimizer(whole.named_parameters(), {.lr = 0.1});
      data::DataLoader loader(line, {.batch_size = 16 * size});
      data::DataLoader whole_loader(line, {.batch_size = 16 * size});
      accelerator.prepare(model, optimizer, loader);
      const int k = 3;
      int turn = 0;
      auto whole_batch = whole_loader.begin();
      for (auto& batch : loader) {
        accelerator.backward(loss_of(model, batch) / static_cast<double>(k));
        (loss_of(whole, *whole_batch) / static_cast<double>(k)).backward();
        ++whole_batch;
        if (++turn == 5) break;  // the rows that fill it up are the caller's affair
        EXPECT_TRUE(near(gradients_of(model), gradients_of(whole))) << turn;
        if (turn % k != 0) continue;
        EXPECT_TRUE(optimizer.step());
        optimizer.zero_grad();
        whole_optimizer.step(), whole_optimizer.zero_grad();
      }
      EXPECT_EQ(turn, 5);
      EXPECT_TRUE(near(values_of(model), values_of(whole)));
    });
  }
}

// Nobody calls zero_grad: each window's mean is added to what is there.
TEST(AddingUp, WindowsWithoutZeroGradAddUpOnAnyNumberOfRanks) {
  for (const int size : {1, 2, 3}) {
    for (const int64_t steps : {1, 2}) {
      for (const bool each_batch : {false, true}) {
        for (const bool as_views : {true, false}) {
          SCOPED_TRACE(testing::Message()
                       << size << " ranks, windows of " << steps << ", each batch " << each_batch);
          on_ranks(size, [&](int rank) {
            const Line line(200 * size);
            Accelerator accelerator({.gradient_accumulation_steps = steps,
                                     .sync_each_batch = each_batch,
                                     .ddp = {.gradient_as_bucket_view = as_views}});
            Regression model;
            accelerator.prepare(model);
            Values expected{{0}, {0}};
            int64_t at = 0;
            for (int window = 0; window < 4; ++window) {
              std::vector<std::pair<int64_t, int64_t>> parts;
              for (int64_t index = 0; index < steps; ++index) {
                // Ranks and micro-batches differ in size.
                std::pair<int64_t, int64_t> own;
                for (int other = 0; other < size; ++other) {
                  const int64_t rows = 4 + 3 * other + 5 * ((window + index) % 2);
                  parts.emplace_back(at, at + rows);
                  if (other == rank) own = parts.back();
                  at += rows;
                }
                const auto micro = accelerator.accumulate(model);
                const auto [begin, end] = own;
                accelerator.backward(loss_of(model, line.rows(begin, end)),
                                     {.weight = static_cast<double>(end - begin)});
              }
              const Values mean = gradient_over(line, parts);
              for (size_t i = 0; i < mean.size(); ++i) expected[i][0] += mean[i][0];
              EXPECT_TRUE(near(gradients_of(model), expected)) << window;
            }
            // What was cleared is gone.
            model.zero_grad();
            for (int64_t index = 0; index < steps; ++index) {
              const auto micro = accelerator.accumulate(model);
              accelerator.backward(loss_of(model, line.rows(0, 8)), {.weight = 8});
            }
            EXPECT_TRUE(near(gradients_of(model), gradient_over(line, {{0, 8}})));
          });
        }
      }
    }
  }
}

// In the midst of a window: what was there before it, and what it has added up so far.
TEST(AddingUp, ClearingWithinAWindowClearsWhatWasThereBeforeIt) {
  for (const int size : {1, 2}) {
    for (const bool to_none : {true, false}) {
      on_ranks(size, [&](int) {
        const Line line(32);
        Accelerator accelerator({.gradient_accumulation_steps = 2});
        Regression model;
        accelerator.prepare(model);
        const auto backward = [&](int64_t begin) {
          const auto micro = accelerator.accumulate(model);
          accelerator.backward(loss_of(model, line.rows(begin, begin + 8)), {.weight = 8});
        };
        backward(0), backward(0), backward(8);
        model.zero_grad(to_none);
        backward(16);
        Values half = gradient_over(line, {{16, 24}});  // of the window's two micro-batches
        for (auto& value : half) value[0] /= 2;
        EXPECT_TRUE(near(gradients_of(model), half));
      });
    }
  }
}

TEST(AddingUp, SeveralLossesAndNoSyncOnTopOfReducedGradients) {
  for (const int size : {1, 2}) {
    for (const int64_t steps : {1, 2}) {
      on_ranks(size, [&](int rank) {
        const Line line(16 * size);
        Accelerator accelerator({.gradient_accumulation_steps = steps});
        Regression model, whole;
        accelerator.prepare(model);
        const auto own = line.rows(rank * 16, rank * 16 + 16);
        const auto all = line.rows(0, 16 * size);
        for (int window = 0; window < 2; ++window) {
          for (int64_t index = 0; index < steps; ++index) {
            const auto micro = accelerator.accumulate(model);
            accelerator.backward(loss_of(model, own));
            accelerator.backward(loss_of(model, own));
            loss_of(whole, all).backward();
            loss_of(whole, all).backward();
          }
        }
        Values expected = gradients_of(whole);
        for (auto& value : expected) value[0] /= static_cast<float>(steps);
        EXPECT_TRUE(near(gradients_of(model), expected));
        // Outside of windows, and one backward that is not reduced.
        {
          const auto scope = accelerator.no_sync(model);
          accelerator.backward(loss_of(model, own));
        }
        accelerator.backward(loss_of(model, own));
        const Values twice = gradient_over(line, {{0, 16 * size}});
        for (size_t i = 0; i < expected.size(); ++i) expected[i][0] += 2 * twice[i][0];
        EXPECT_TRUE(near(gradients_of(model), expected));
      });
    }
  }
}

// A batch of 4 in a loader of 16 weighs a quarter; a model that no rank shares has no such mean.
TEST(Weights, AreNotThoseOfModelsThatWereNotPrepared) {
  for (const int size : {1, 2}) {
    on_ranks(size, [&](int rank) {
      const Line line(4 * size);
      Accelerator accelerator;
      Regression model, stranger, alone;
      data::DataLoader loader(line, {.batch_size = 16});
      accelerator.prepare(model, loader);
      for (auto& batch : loader) {
        const auto own = line.rows(rank * 4, rank * 4 + 4);
        loss_of(alone, own).backward();
        accelerator.backward(loss_of(stranger, own));
        EXPECT_EQ(gradients_of(stranger), gradients_of(alone));
        stranger.zero_grad();
        const auto micro = accelerator.accumulate(model);
        accelerator.backward(loss_of(stranger, own));
        EXPECT_EQ(gradients_of(stranger), gradients_of(alone));
        accelerator.backward(loss_of(model, batch));
        EXPECT_TRUE(model.a.grad().defined());
      }
    });
  }
}

// ---- Ranks that part ---------------------------------------------------------------------------

TEST(JoinUnevenInputs, RanksWithMoreBatchesFinishAloneAndTheLoadersComeBack) {
  on_ranks(2, [&](int rank) {
    // 5 batches of 4: rank 0 has three, rank 1 two.
    const Line line(20);
    Accelerator accelerator;
    Regression model;
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
    data::DataLoader loader(line, {.batch_size = 4});
    accelerator.prepare(model, optimizer, loader);
    int turns = 0;
    std::vector<float> last;
    accelerator.join_uneven_inputs(model, [&] {
      EXPECT_FALSE(accelerator.loader_plan().even_batches());
      for (auto& batch : loader) {
        const auto micro = accelerator.accumulate(model);
        accelerator.backward(loss_of(model, batch));
        if (turns++ == 2) {
          // Alone: its own gradient, not halved.
          Regression probe;
          probe.copy_state_from(model);
          loss_of(probe, batch).backward();
          EXPECT_TRUE(near(gradients_of(model), gradients_of(probe)));
        }
        optimizer.step(), optimizer.zero_grad();
      }
    });
    EXPECT_EQ(turns, rank == 0 ? 3 : 2);
    EXPECT_TRUE(accelerator.loader_plan().even_batches());
    const Tensor all = accelerator.gather(model.a.detach());
    EXPECT_EQ(all[0].item(), all[1].item());
    EXPECT_THROW(
        accelerator.join_uneven_inputs(model, [] { throw ValueError("train: stop here"); }),
        ValueError);
    EXPECT_TRUE(accelerator.loader_plan().even_batches());
  });
}

// DDL-7: Accelerate warns of a model whose gradients are not reduced, and does nothing.
TEST(JoinUnevenInputs, AModelThatRanksDoNotShareIsAnErrorBeforeTheBody) {
  on_ranks(2, [](int) {
    Accelerator accelerator;
    Regression stranger;
    bool ran = false;
    EXPECT_THROW(accelerator.join_uneven_inputs(stranger, [&] { ran = true; }), ValueError);
    EXPECT_FALSE(ran);
    EXPECT_TRUE(accelerator.loader_plan().even_batches());
  });
}

TEST(JoinUnevenInputs, OneProcessRunsTheBody) {
  Accelerator accelerator;
  Regression model;
  accelerator.prepare(model);
  int ran = 0;
  accelerator.join_uneven_inputs(model, [&] { ++ran; });
  EXPECT_EQ(ran, 1);
}

// LSG-1
TEST(LocalSGD, RanksStepAloneAndAverageEveryFewUpdates) {
  for (const int size : {2, 4}) {
    on_ranks(size, [&](int rank) {
      const Line line(16 * size * 5);
      Accelerator accelerator;
      Regression model, own;
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
      optim::SGD own_optimizer(own.named_parameters(), {.lr = 0.1});
      accelerator.prepare(model, optimizer);
      const auto traffic = [] { return distributed::rank_context().trace->records().size(); };
      LocalSGD local(accelerator, model, {.steps = 2});
      const auto average = [&] {
        for (const Tensor& parameter : own.parameters()) {
          distributed::all_reduce(parameter.detach(), distributed::ReduceOp::kMean);
        }
      };
      for (int turn = 0; turn < 5; ++turn) {
        const auto [begin, end] = share(turn, rank, size);
        const size_t before = traffic();
        {
          const auto micro = accelerator.accumulate(model);
          accelerator.backward(loss_of(model, line.rows(begin, end)));
          optimizer.step(), optimizer.zero_grad();
        }
        EXPECT_EQ(traffic(), before);
        local.step();
        EXPECT_EQ(traffic() - before, turn % 2 == 1 ? 1u : 0u);  // both scalars in one message
        loss_of(own, line.rows(begin, end)).backward();
        own_optimizer.step(), own_optimizer.zero_grad();
        if (turn % 2 == 1) average();
        EXPECT_TRUE(near(values_of(model), values_of(own), 1e-6)) << turn;
      }
      local.finish();
      average();
      EXPECT_EQ(local.averages(), 3);
      EXPECT_TRUE(near(values_of(model), values_of(own), 1e-6));
      // Afterwards gradients are reduced again.
      const auto [begin, end] = share(0, rank, size);
      accelerator.backward(loss_of(model, line.rows(begin, end)));
      const Tensor all = accelerator.gather(model.a.grad());
      EXPECT_EQ(all[0].item(), all[1].item());
    });
  }
}

// LSG-1: with an average after each step of SGD it is data-parallel training, and at its end all
// ranks hold the same.
TEST(LocalSGD, AveragingAfterEachStepOfSgdIsDataParallelTraining) {
  for (const int size : {2, 4}) {
    on_ranks(size, [&](int rank) {
      const Line line(16 * size * 6);
      const auto train = [&](bool local_steps) {
        Accelerator accelerator({.gradient_accumulation_steps = 2});
        Regression model;
        optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
        accelerator.prepare(model, optimizer);
        LocalSGD local(accelerator, model, {.steps = 1, .enabled = local_steps});
        for (int turn = 0; turn < 6; ++turn) {
          const auto [begin, end] = share(turn, rank, size);
          const auto micro = accelerator.accumulate(model);
          accelerator.backward(loss_of(model, line.rows(begin, end)));
          optimizer.step(), optimizer.zero_grad();
          local.step();
        }
        local.finish();
        for (const Tensor& parameter : model.parameters()) {
          const Tensor all = accelerator.gather(parameter.detach());
          for (int other = 1; other < size; ++other) {
            EXPECT_EQ(all[other].item(), all[0].item()) << other;
          }
        }
        return values_of(model);
      };
      EXPECT_TRUE(near(train(true), train(false), 1e-6));
    });
  }
}

// The optimizer has written what autocast keeps of the weight beside the weight; the average is not
// that.
TEST(LocalSGD, UnderAutocastTheNextForwardSeesTheAverage) {
  struct Matrix : nn::Module<Matrix> {
    Matrix() : weight(parameter("weight", raw::zeros({1, 2}, kF32))) {}
    Tensor forward(const Tensor& x) { return linear(x, weight); }
    const Tensor& weight;
  };
  on_ranks(2, [](int rank) {
    Accelerator accelerator({.mixed_precision = Precision::kBF16});
    Matrix model;
    optim::SGD optimizer(model.named_parameters(), {.lr = 1});
    accelerator.prepare(model, optimizer);
    LocalSGD local(accelerator, model, {.steps = 1});
    const Tensor x = full({1, 2}, rank == 0 ? 1.0 : 3.0);  // gradients 1 and 3: the average is -2
    accelerator.backward(model(x).sum());
    optimizer.step(), optimizer.zero_grad();
    EXPECT_EQ(model.weight.to_vector<float>()[0], rank == 0 ? -1 : -3);
    local.step();
    EXPECT_EQ(model.weight.to_vector<float>()[0], -2);
    EXPECT_EQ(model(ones({1, 2})).item(), -4);
    local.finish();
    EXPECT_EQ(model(ones({1, 2})).item(), -4);
  });
}

TEST(LocalSGD, DoesNothingInOneProcess) {
  const Line line(8);
  Accelerator accelerator;
  Regression model;
  accelerator.prepare(model);
  LocalSGD local(accelerator, model, {.steps = 1});
  accelerator.backward(loss_of(model, line.rows(0, 8)));
  local.step();
  local.finish();
  EXPECT_EQ(local.averages(), 0);
  EXPECT_THROW(LocalSGD(accelerator, model, {.steps = 0}), ValueError);
}

}  // namespace
}  // namespace tessera
