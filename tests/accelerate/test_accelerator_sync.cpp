// When gradients are reduced: every backward, none in no_sync, and what ranks that differ are told.
// ctest labels: threads
#include "accelerate/accelerator_fixture.h"

#include <tessera/core/error.h>

namespace tessera::test_accelerator_sync {
namespace {

// ---- Batches that ranks leave out --------------------------------------------------------------

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

// Batches taken by hand, in turn: the active loader is the one that gave the last.
TEST(ActiveLoader, IsWhoeverGaveTheLastBatch) {
  const Line line(64);
  Accelerator accelerator;
  data::DataLoader first(line, {.batch_size = 16}), second(line, {.batch_size = 16});
  accelerator.prepare(first, second);
  for (auto* loader : {&first, &second, &first, &second}) {
    EXPECT_TRUE(loader->next().has_value());
    EXPECT_EQ(accelerator.active_loader(), loader);
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

}  // namespace
}  // namespace tessera::test_accelerator_sync
