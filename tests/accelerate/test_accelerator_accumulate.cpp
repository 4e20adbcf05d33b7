// What gradients are after several backwards: windows, their weights, sums by hand.
// ctest labels: threads
#include "accelerate/accelerator_fixture.h"

#include <cmath>
#include <utility>

#include <tessera/core/error.h>
#include <tessera/optim/clip.h>

namespace tessera::test_accelerator_accumulate {
namespace {

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
        if (boundary) {
          EXPECT_TRUE(near(gradients_of(model), gradients_of(probe))) << turn;
        } else if (one.each_batch) {  // the sum over the ranks, of the window's first micro-batch
          Values sum = gradients_of(probe);
          for (auto& value : sum) value[0] *= static_cast<float>(one.ranks);
          EXPECT_TRUE(near(gradients_of(model), sum)) << turn;
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

TEST(Accumulate, AWeightThatIsNegativeOrNoNumberIsAnError) {
  const Line line(8);
  Accelerator accelerator;
  Regression model;
  accelerator.prepare(model);
  for (const double weight : {-1.0, -0x1p-1074, std::nan(""), HUGE_VAL}) {
    EXPECT_THROW(accelerator.backward(loss_of(model, line.rows(0, 8)), {.weight = weight}),
                 ValueError)
        << weight;
  }
  accelerator.backward(loss_of(model, line.rows(0, 8)), {.weight = 0});
}

// Another model may lie where one died.
TEST(Accumulate, TheNormBetweenBoundariesIsOfThisModelOrNone) {
  const Line line(8);
  Accelerator accelerator({.gradient_accumulation_steps = 2});
  for (int life = 0; life < 20; ++life) {
    auto model = std::make_unique<Regression>();
    accelerator.prepare(*model);
    std::vector<double> norms;
    for (int turn = 0; turn < 4; ++turn) {
      const auto micro = accelerator.accumulate(*model);
      accelerator.backward(loss_of(*model, line.rows(0, 8)));
      norms.push_back(accelerator.clip_grad_norm(model->parameters(), 100).item());
      if (micro.sync_gradients()) model->zero_grad();
    }
    EXPECT_TRUE(std::isnan(norms[0])) << "life " << life << ": " << norms[0];
    EXPECT_GT(norms[1], 0);
    EXPECT_EQ(norms[2], norms[1]);
  }
}

// As those of prepared ones, at the end of the window.
TEST(Accumulate, ParametersOfNoPreparedModelAreClippedWhereGradientsSynchronise) {
  const Line line(8);
  Accelerator accelerator({.gradient_accumulation_steps = 2, .config_file = ""});
  Regression model, stranger;
  accelerator.prepare(model);
  loss_of(stranger, line.rows(0, 8)).backward();
  const Values whole = gradients_of(stranger);
  for (const bool at_boundary : {false, true}) {
    const auto micro = accelerator.accumulate(model);
    EXPECT_EQ(micro.sync_gradients(), at_boundary);
    const double norm = accelerator.clip_grad_norm(stranger.parameters(), 0.5).item();
    if (at_boundary) {
      const double own = std::hypot(whole[0][0], whole[1][0]);
      EXPECT_NEAR(norm, own, 4 * 0x1p-23 * own);
      const Values clipped = gradients_of(stranger);
      EXPECT_NEAR(std::hypot(clipped[0][0], clipped[1][0]), 0.5, 1e-5);  // 1e-6 beside the norm
    } else {
      EXPECT_TRUE(std::isnan(norm));
      EXPECT_EQ(gradients_of(stranger), whole);
      accelerator.clip_grad_value(stranger.parameters(), 1e-3);
      EXPECT_EQ(gradients_of(stranger), whole);
    }
    accelerator.backward(loss_of(model, line.rows(0, 8)));
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

// Rows [4 k, 4 k + rows) for the k-th batch of all, a weight each, which is its rows.
TEST(Weights, OfAWindowOfSeveralModelsCountForTheLossOfEach) {
  const Line line(64);
  const int64_t rows[] = {4, 1, 2, 3};
  std::vector<std::pair<int64_t, int64_t>> parts;
  for (int64_t k = 0; k < 4; ++k) parts.emplace_back(4 * k, 4 * k + rows[k]);
  const Values expected = gradient_over(line, parts);
  for (const int size : {1, 2}) {
    for (const bool apart : {false, true}) {
      on_ranks(size, [&](int rank) {
        SCOPED_TRACE(testing::Message() << size << " ranks, apart " << apart);
        Accelerator accelerator({.gradient_accumulation_steps = 4 / size, .config_file = ""});
        Regression first, second;
        accelerator.prepare(first, second);
        for (int64_t micro = 0; micro < 4 / size; ++micro) {
          const auto at = static_cast<size_t>(micro * size + rank);
          const auto batch = line.rows(parts[at].first, parts[at].second);
          const auto weight = static_cast<double>(rows[at]);
          const auto scope = accelerator.accumulate(first, second);
          if (apart) {
            accelerator.backward(loss_of(first, batch), {.weight = weight, .more = true});
            accelerator.backward(loss_of(second, batch), {.weight = weight});
          } else {
            accelerator.backward(loss_of(first, batch) + loss_of(second, batch),
                                 {.weight = weight});
          }
        }
        EXPECT_TRUE(near(gradients_of(first), expected));
        EXPECT_TRUE(near(gradients_of(second), expected));
      });
    }
  }
}

// One ends its window with every micro-batch, the other with every second one.
TEST(Weights, OfModelsWithWindowsOfTheirOwnAreDividedAtTheEndOfEach) {
  const Line line(32);
  const std::vector<std::pair<int64_t, int64_t>> parts = {{0, 4}, {8, 20}, {20, 21}, {24, 27}};
  Accelerator accelerator({.config_file = ""});
  Regression first, second;
  accelerator.prepare(first, second);
  accelerator.set_gradient_accumulation_steps(second, 2);
  for (size_t micro = 0; micro < parts.size(); ++micro) {
    const auto [begin, end] = parts[micro];
    const auto batch = line.rows(begin, end);
    const auto scope = accelerator.accumulate(first, second);
    accelerator.backward(loss_of(first, batch) + loss_of(second, batch),
                         {.weight = static_cast<double>(end - begin)});
    EXPECT_TRUE(near(gradients_of(first), gradient_over(line, {parts[micro]}))) << micro;
    first.zero_grad();
    if (micro % 2 == 0) continue;
    EXPECT_TRUE(near(gradients_of(second), gradient_over(line, {parts[micro - 1], parts[micro]})))
        << micro;
    second.zero_grad();
  }
}

// The ranks' mean is weighed as those of windows are. Alone a gradient is that of its loss.
TEST(Weights, OfALossOfAnotherModelThanTheWindowsCountAmongTheRanks) {
  const Line line(16);
  const Values alone = gradient_over(line, {{12, 13}});
  const Values of_both = gradient_over(line, {{0, 3}, {12, 13}});
  for (const bool in_window : {false, true}) {
    for (const int size : {1, 2}) {
      on_ranks(size, [&](int rank) {
        SCOPED_TRACE(testing::Message() << size << " ranks, in a window " << in_window);
        Accelerator accelerator({.config_file = ""});
        Regression first, second;
        accelerator.prepare(first, second);
        const bool has_three = size == 2 && rank == 0;
        const auto batch = has_three ? line.rows(0, 3) : line.rows(12, 13);
        const double weight = has_three ? 3 : 1;
        {  // the unit of weights is the first, of three rows
          const auto scope = accelerator.accumulate(first);
          accelerator.backward(loss_of(first, line.rows(0, 3)), {.weight = 3});
        }
        if (in_window) {
          const auto scope = accelerator.accumulate(first);
          accelerator.backward(loss_of(second, batch), {.weight = weight, .more = true});
          accelerator.backward(loss_of(first, batch), {.weight = weight});
        } else {
          accelerator.backward(loss_of(second, batch), {.weight = weight});
        }
        EXPECT_TRUE(near(gradients_of(second), size == 1 ? alone : of_both));
      });
    }
  }
}

}  // namespace
}  // namespace tessera::test_accelerator_accumulate
