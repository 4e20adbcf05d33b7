// Ranks that part: unequal numbers of batches, steps of their own between averages.
// ctest labels: threads
#include "accelerate/accelerator_fixture.h"

#include <tessera/accelerate/local_sgd.h>
#include <tessera/core/error.h>

namespace tessera::test_accelerator_uneven {
namespace {

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

// A rank that has no more batches cannot be asked for its first weight.
TEST(JoinUnevenInputs, WeightsMayBeginWhereOneRankIsAlone) {
  on_ranks(2, [&](int rank) {
    const Line line(12);  // rank 0 has two batches of 4, rank 1 has one
    Accelerator accelerator({.collective_timeout = 20});
    Regression model;
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
    data::DataLoader loader(line, {.batch_size = 4});
    accelerator.prepare(model, optimizer, loader);
    int turns = 0;
    accelerator.join_uneven_inputs(model, [&] {
      for (auto& batch : loader) {
        const auto micro = accelerator.accumulate(model);
        const bool alone = turns++ == 1;
        accelerate::BackwardOptions options;
        if (alone) options.weight = 8;
        accelerator.backward(loss_of(model, batch), options);
        if (alone) {
          Regression probe;
          probe.copy_state_from(model);
          loss_of(probe, batch).backward();
          EXPECT_TRUE(near(gradients_of(model), gradients_of(probe)));
        }
        optimizer.step(), optimizer.zero_grad();
      }
    });
    EXPECT_EQ(turns, rank == 0 ? 2 : 1);
    const Tensor all = accelerator.gather(model.a.detach());
    EXPECT_EQ(all[0].item(), all[1].item());
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
}  // namespace tessera::test_accelerator_uneven
