// Accelerate's own test scripts (accelerate/test_utils/scripts, 1.15), function by function, on one
// rank and on two: what they assert holds here as it is written there. Where tessera's defaults are
// others, the settings that choose Accelerate's stand in huggingface().
// ctest labels: threads
#include "accelerate/accelerator_fixture.h"

#include <algorithm>
#include <cmath>
#include <new>
#include <optional>
#include <set>

#include <tessera/accelerate/batch_size.h>
#include <tessera/core/error.h>
#include <tessera/core/tensor/raw_views.h>
#include <tessera/nn/linear.h>

#include "accelerate/loader_fixture.h"

namespace tessera::test_accelerate_scripts {
namespace {

using Batch = std::array<Tensor, 2>;

AcceleratorOptions huggingface() {
  return {.loss_weighting = LossWeighting::kHuggingFace,
          .schedule_unit = ScheduleUnit::kHuggingFace};
}

// ---- test_sync.py ------------------------------------------------------------------------------

void check_model_parameters(Regression& a, Regression& b, bool in_sync, int iteration,
                            double relative = 1e-5) {
  const TensorList ours = a.parameters(), theirs = b.parameters();
  for (size_t i = 0; i < ours.size(); ++i) {
    // The check of gradients that are not in sync stays strict.
    EXPECT_EQ(allclose(ours[i].grad(), theirs[i].grad(), in_sync ? relative : 1e-5), in_sync)
        << "iteration " << iteration << ", parameter " << i << ": " << ours[i].grad().item()
        << " and " << theirs[i].grad().item();
  }
}

void step_model(Regression& model, const Batch& batch, Accelerator& accelerator,
                bool do_backward = true) {
  model.train();
  const Tensor loss = mse_loss(model(batch[0]), batch[1]);
  if (do_backward) {
    accelerator.backward(loss);
  } else {
    (loss / static_cast<double>(accelerator.gradient_accumulation_steps())).backward();
  }
}

struct TrainingSetup {
  explicit TrainingSetup(Accelerator& accelerator) : accelerator(accelerator) {
    accelerator.prepare(ddp_model, dataloader);
  }
  // All ranks' rows: what the model that is not prepared sees.
  Batch everything(const Batch& batch) const { return accelerator.gather(batch); }

  Accelerator& accelerator;
  Line dset{80};
  Regression model, ddp_model;
  data::DataLoader<Batch> dataloader{dset, {.batch_size = 16}};
};

void shuffle(Batch& batch, int iteration) {
  batch[0] = index_select(
      batch[0], 0,
      randperm(batch[0].size(0), RandomStream{1337, static_cast<uint64_t>(iteration)}));
}

TEST(TestSync, NoopSync) {
  for (const auto& options : {AcceleratorOptions{}, huggingface()}) {
    Accelerator accelerator(options);
    TrainingSetup setup(accelerator);
    Batch ddp = *setup.dataloader.next();
    for (int iteration = 0; iteration < 3; ++iteration) {
      step_model(setup.model, setup.everything(ddp), accelerator);
      if (iteration % 2 == 0) {
        const auto scope = accelerator.no_sync(setup.ddp_model);
        step_model(setup.ddp_model, ddp, accelerator);
      } else {
        step_model(setup.ddp_model, ddp, accelerator);
      }
      check_model_parameters(setup.model, setup.ddp_model, true, iteration);
      shuffle(ddp, iteration);
    }
  }
}

TEST(TestSync, DistributedSync) {
  for (const auto& options : {AcceleratorOptions{}, huggingface()}) {
    on_ranks(2, [&](int) {
      Accelerator accelerator(options);
      TrainingSetup setup(accelerator);
      Batch ddp = *setup.dataloader.next();
      for (int iteration = 0; iteration < 3; ++iteration) {
        step_model(setup.model, setup.everything(ddp), accelerator);
        if (iteration % 2 == 0) {
          const auto scope = accelerator.no_sync(setup.ddp_model);
          step_model(setup.ddp_model, ddp, accelerator);
        } else {
          step_model(setup.ddp_model, ddp, accelerator);
        }
        check_model_parameters(setup.model, setup.ddp_model, iteration % 2 == 1, iteration);
        shuffle(ddp, iteration);
      }
    });
  }
}

TEST(TestSync, DistributedSyncMultipleFwd) {
  for (const auto& options : {AcceleratorOptions{}, huggingface()}) {
    on_ranks(2, [&](int) {
      Accelerator accelerator(options);
      TrainingSetup setup(accelerator);
      std::vector<Tensor> losses;
      for (int iteration = 0; iteration < 3; ++iteration) {
        setup.dataloader.set_cursor({});
        const Batch ddp = *setup.dataloader.next();
        step_model(setup.model, setup.everything(ddp), accelerator);
        const auto scope = accelerator.no_sync(setup.ddp_model);
        losses.push_back(mse_loss(setup.ddp_model(ddp[0]), ddp[1]));
      }
      for (int iteration = 0; iteration < 3; ++iteration) {
        const Tensor& loss = losses[static_cast<size_t>(iteration)];
        if (iteration < 2) {
          accelerator.backward(loss);
          check_model_parameters(setup.model, setup.ddp_model, false, iteration);
        } else {
          const auto scope = accelerator.trigger_sync_in_backward(setup.ddp_model);
          accelerator.backward(loss);
          check_model_parameters(setup.model, setup.ddp_model, true, iteration);
        }
      }
    });
  }
}

struct Mode {
  int ranks;
  bool split_batches, dispatch_batches, sync_each_batch;
};
std::vector<Mode> modes() {
  std::vector<Mode> all;
  for (const int ranks : {1, 2}) {
    for (const int bits : {0, 1, 2, 3, 4, 5, 6, 7}) {
      all.push_back({ranks, (bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0});
    }
  }
  return all;
}
AcceleratorOptions options_of(const Mode& mode) {
  AcceleratorOptions options = huggingface();
  options.gradient_accumulation_steps = 2;
  options.sync_each_batch = mode.sync_each_batch;
  options.split_batches = mode.split_batches;
  options.dispatch_batches = mode.dispatch_batches;
  return options;
}
testing::Message describe(const Mode& mode) {
  return testing::Message() << mode.ranks << " ranks, split " << mode.split_batches << ", dispatch "
                            << mode.dispatch_batches << ", each batch " << mode.sync_each_batch;
}

TEST(TestSync, GradientAccumulation) {
  for (const Mode& mode : modes()) {
    SCOPED_TRACE(describe(mode));
    on_ranks(mode.ranks, [&](int) {
      Accelerator accelerator(options_of(mode));
      TrainingSetup setup(accelerator);
      const int64_t batches = setup.dataloader.size();
      int iteration = 0;
      for (auto& ddp : setup.dataloader) {
        step_model(setup.model, setup.everything(ddp), accelerator, false);
        {
          const auto micro = accelerator.accumulate(setup.ddp_model);
          step_model(setup.ddp_model, ddp, accelerator);
        }
        const bool in_sync = (iteration + 1) % 2 == 0 || iteration == batches - 1 ||
                             mode.sync_each_batch || mode.ranks == 1;
        check_model_parameters(setup.model, setup.ddp_model, in_sync, iteration);
        ++iteration;
      }
      EXPECT_EQ(iteration, batches);
    });
  }
}

TEST(TestSync, GradientAccumulationWithOptAndScheduler) {
  for (const Mode& mode : modes()) {
    SCOPED_TRACE(describe(mode));
    on_ranks(mode.ranks, [&](int) {
      Accelerator accelerator(options_of(mode));
      const optim::Lambda rule{
          [](int64_t epoch) { return std::pow(static_cast<double>(epoch), 0.65); }};
      TrainingSetup setup(accelerator);
      optim::AdamW opt(setup.model.named_parameters(), {.lr = 1e-3});
      optim::AdamW ddp_opt(setup.ddp_model.named_parameters(), {.lr = 1e-3});
      optim::LambdaSchedule sched(opt, rule), ddp_sched(ddp_opt, rule);
      accelerator.prepare(ddp_opt, ddp_sched);
      const int64_t batches = setup.dataloader.size();
      int iteration = 0;
      for (auto& ddp : setup.dataloader) {
        const bool did_step = (iteration + 1) % 2 == 0 || iteration + 1 == batches;
        step_model(setup.model, setup.everything(ddp), accelerator, false);
        opt.step();
        if (did_step) {
          const int times = mode.split_batches ? 1 : accelerator.num_processes();
          for (int i = 0; i < times; ++i) sched.step();
        }
        {
          const auto micro = accelerator.accumulate(setup.ddp_model);
          step_model(setup.ddp_model, ddp, accelerator);
          ddp_opt.step();
          ddp_sched.step();
        }
        EXPECT_EQ(opt.lr(), ddp_opt.lr());
        if (mode.ranks > 1) {
          check_model_parameters(setup.model, setup.ddp_model, did_step || mode.sync_each_batch,
                                 iteration, 1e-2);
        }
        if (did_step) opt.zero_grad();
        ddp_opt.zero_grad();
        ++iteration;
      }
    });
  }
}

TEST(TestSync, DataloaderBreak) {
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [](int) {
      Accelerator accelerator;
      const Line first_dset(80), second_dset(96);
      data::DataLoader first(first_dset, {.batch_size = 16});
      data::DataLoader second(second_dset, {.batch_size = 16});
      accelerator.prepare(first, second);
      EXPECT_EQ(accelerator.active_loader(), nullptr);
      int iteration = 0;
      for ([[maybe_unused]] auto& batch : first) {
        EXPECT_EQ(accelerator.active_loader(), &first);
        const bool last = iteration == first.size() - 1;
        EXPECT_EQ(accelerator.end_of_dataloader(), last);
        if (!last && iteration == 1) {
          int batch_num = 0;
          for ([[maybe_unused]] auto& inner : second) {
            EXPECT_EQ(accelerator.active_loader(), &second);
            EXPECT_EQ(accelerator.end_of_dataloader(), batch_num == second.size() - 1);
            ++batch_num;
          }
        }
        ++iteration;
      }
      EXPECT_EQ(accelerator.active_loader(), nullptr);
    });
  }
}

// ---- test_distributed_data_loop.py -------------------------------------------------------------

std::vector<int64_t> batch_sizes(const std::optional<bool>& even_batches, int64_t dataset_size,
                                 int64_t batch_size) {
  Accelerator accelerator({.even_batches = even_batches});
  const accelerate::Numbers dataset(dataset_size);
  data::DataLoader loader(dataset, {.batch_size = batch_size});
  accelerator.prepare(loader);
  std::vector<int64_t> sizes;
  for (const Tensor& batch : loader) sizes.push_back(batch.size(0));
  return sizes;
}
using Sizes = std::vector<int64_t>;

TEST(TestDistributedDataLoop, DefaultEnsuresEvenBatchSizes) {
  on_ranks(2, [](int) {
    EXPECT_EQ(batch_sizes({}, 3, 1), (Sizes{1, 1}));
    EXPECT_EQ(batch_sizes({}, 7, 2), (Sizes{2, 2}));
  });
}

TEST(TestDistributedDataLoop, CanDisableEvenBatches) {
  on_ranks(2, [](int rank) {
    EXPECT_EQ(batch_sizes(false, 3, 1), rank == 0 ? (Sizes{1, 1}) : (Sizes{1}));
    EXPECT_EQ(batch_sizes(false, 7, 2), rank == 0 ? (Sizes{2, 2}) : (Sizes{2, 1}));
  });
}

TEST(TestDistributedDataLoop, CanJoinUnevenInputs) {
  on_ranks(2, [](int rank) {
    Accelerator accelerator({.even_batches = false});
    nn::Linear model(1, 1);
    const accelerate::Numbers dataset(3);
    data::DataLoader loader(dataset, {.batch_size = 1});
    accelerator.prepare(model, loader);
    std::vector<int> batch_idxs;
    accelerator.join_uneven_inputs(model, [&] {
      int index = 0;
      for (const Tensor& batch : loader) {
        const Tensor output = model(batch.to(kF32).view({1, 1}));
        output.sum().backward();
        model.zero_grad();
        batch_idxs.push_back(index++);
      }
    });
    accelerator.wait_for_everyone();
    EXPECT_EQ(batch_idxs, rank == 0 ? (std::vector<int>{0, 1}) : (std::vector<int>{0}));
  });
}

// Also of a stream, so that there is nothing to warn of.
TEST(TestDistributedDataLoop, JoinCanOverrideEvenBatchesForMixedTypeDataloaders) {
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [&](int rank) {
      Accelerator accelerator;
      nn::Linear model(1, 1);
      const accelerate::Numbers dataset(3);
      const accelerate::NumberStream stream(3);
      data::DataLoader train(dataset, {.batch_size = 1}), valid(dataset, {.batch_size = 1});
      data::StreamLoader streamed(stream, {.batch_size = 1});
      accelerator.prepare(model, train, valid, streamed);
      const int64_t even = ranks == 1 ? 3 : 2, uneven = ranks == 1 ? 3 : 2 - rank;
      int64_t train_overridden = 0, valid_overridden = 0;
      accelerator.join_uneven_inputs(model, [&] {
        train_overridden = train.size();
        valid_overridden = valid.size();
      });
      EXPECT_EQ(train_overridden, uneven);
      EXPECT_EQ(valid_overridden, uneven);
      EXPECT_EQ(train.size(), even);
      EXPECT_EQ(valid.size(), even);
    });
  }
}

// test_join_raises_warning_for_iterable_when_overriding_even_batches: streams keep theirs there.
TEST(TestDistributedDataLoop, JoinOverridesEvenBatchesOfStreamsToo) {
  on_ranks(2, [](int rank) {
    for (const bool dispatch : {true, false}) {
      Accelerator accelerator({.dispatch_batches = dispatch});
      nn::Linear model(1, 1);
      const accelerate::NumberStream stream(3);
      data::StreamLoader train(stream, {.batch_size = 1});
      accelerator.prepare(model, train);
      const auto batches = [&] {
        int count = 0;
        for ([[maybe_unused]] const Tensor& batch : train) ++count;
        return count;
      };
      int overridden = 0;
      accelerator.join_uneven_inputs(model, [&] { overridden = batches(); });
      EXPECT_EQ(overridden, 2 - rank);
      EXPECT_EQ(batches(), 2);
    }
  });
}

// test_join_raises_warning_for_non_ddp_distributed: there the body runs, in which ranks then wait
// for each other.
TEST(TestDistributedDataLoop, JoinOfAModelThatRanksDoNotShareIsAnError) {
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [](int) {
      Accelerator accelerator;
      nn::Linear model(1, 1), stranger(1, 1);
      accelerator.prepare(model);
      int ran = 0;
      EXPECT_THROW(accelerator.join_uneven_inputs(stranger, [&] { ++ran; }), ValueError);
      EXPECT_EQ(ran, 0);
      accelerator.join_uneven_inputs(model, [&] { ++ran; });
      EXPECT_EQ(ran, 1);
    });
  }
}

// torch's BatchSampler(RandomSampler(dataset), batch_size, drop_last=False).
struct RandomBatches : data::BatchSampler {
  RandomBatches(int64_t examples, int64_t batch_size)
      : order(examples, 3), batch_size(batch_size) {}
  int64_t size() const override { return (order.size() + batch_size - 1) / batch_size; }
  std::vector<int64_t> batch(int64_t epoch, int64_t number) const override {
    const int64_t begin = number * batch_size;
    std::vector<int64_t> examples(static_cast<size_t>(std::min(batch_size, order.size() - begin)));
    order.indices(epoch, begin, examples);
    return examples;
  }
  data::RandomSampler order;
  int64_t batch_size;
};

// As batch_sampler, and as a sampler with batch_size=None, which is the same here.
TEST(TestDistributedDataLoop, DataLoaderWithBatchSampler) {
  constexpr int64_t kElements = 22;
  for (const int ranks : {1, 2}) {
    for (const bool dispatch : {false, true}) {
      for (const bool even : {true, false}) {
        on_ranks(ranks, [&](int rank) {
          Accelerator accelerator({.even_batches = even, .dispatch_batches = dispatch});
          data::DataLoader<int64_t> loader(std::make_shared<accelerate::Numbers>(kElements),
                                           std::make_shared<RandomBatches>(kElements, 4),
                                           {.workers = 2});
          accelerator.prepare(loader);
          std::vector<std::vector<double>> epochs;
          for (int epoch = 0; epoch < 2; ++epoch) {
            std::vector<double> examples;
            std::vector<int64_t> sizes;
            for (const Tensor& batch : loader) {
              sizes.push_back(batch.size(0));
              const auto [index, label] =
                  accelerator.gather_for_metrics(std::pair(batch, batch.to(kF32)));
              for (const double value : index.to_vector()) examples.push_back(value);
            }
            EXPECT_EQ(sizes, ranks == 1  ? (Sizes{4, 4, 4, 4, 4, 2})
                             : rank == 0 ? (Sizes{4, 4, 4})
                                         : (Sizes{4, 4, 2}));
            EXPECT_EQ(std::ssize(examples), kElements);
            EXPECT_EQ(std::ssize(std::set(examples.begin(), examples.end())), kElements);
            epochs.push_back(std::move(examples));
          }
          EXPECT_NE(epochs[0], epochs[1]);
          accelerator.skip_first_batches(loader, 2);
          int64_t left = 0;
          for ([[maybe_unused]] const Tensor& batch : loader) ++left;
          EXPECT_EQ(left, loader.size() - 2);
        });
      }
    }
  }
}

TEST(TestDistributedDataLoop, DataLoader) {
  constexpr int64_t kElements = 22;
  for (const int ranks : {1, 2}) {
    for (const bool shuffle : {false, true}) {
      for (const bool split : {false, true}) {
        on_ranks(ranks, [&](int) {
          Accelerator accelerator({.split_batches = split});
          const accelerate::Numbers dataset(kElements);
          data::DataLoader loader(dataset, {.batch_size = 4, .shuffle = shuffle, .workers = 2});
          accelerator.prepare(loader);
          std::vector<double> examples;
          for (const Tensor& batch : loader) {
            const auto [index, label] =
                accelerator.gather_for_metrics(std::pair(batch, batch.to(kF32)));
            for (const double value : index.to_vector()) examples.push_back(value);
          }
          // Accelerate's script takes each once of possibly more; here no more come.
          EXPECT_EQ(std::ssize(examples), kElements);
          EXPECT_EQ(std::ssize(std::set(examples.begin(), examples.end())), kElements);
        });
      }
    }
  }
}

// By the loader's own state, and by a checkpoint of everything.
TEST(TestDistributedDataLoop, StatefulDataLoader) {
  for (const int ranks : {1, 2}) {
    for (const bool by_checkpoint : {false, true}) {
      on_ranks(ranks, [&](int) {
        const std::string folder = testing::TempDir() + "scripts_stateful_" + std::to_string(ranks);
        Accelerator accelerator;
        const accelerate::Numbers dataset(32 * accelerator.num_processes());
        const accelerate::NumberStream stream(32 * accelerator.num_processes());
        data::DataLoader indexed(dataset, {.batch_size = 4, .shuffle = true});
        data::StreamLoader streamed(stream, {.batch_size = 4});
        data::DataLoader<int64_t> by_batches({std::shared_ptr<void>(), &dataset},
                                             std::make_shared<RandomBatches>(dataset.size(), 4));
        const auto resume = [&](auto& loader) {
          accelerator.prepare(loader);
          StateDict state;
          std::vector<std::vector<double>> untrained, resumed;
          int step = 0;
          for (const Tensor& batch : loader) {
            if (step == 2) {
              by_checkpoint ? (void)accelerator.save_state(folder)
                            : (void)(state = loader.state_dict());
            }
            if (step++ > 2) untrained.push_back(accelerator.gather(batch).to_vector());
          }
          if (by_checkpoint) {
            accelerator.load_state(folder);
          } else {
            loader.load_state_dict(state);
          }
          for (const Tensor& batch : loader) {
            resumed.push_back(accelerator.gather(batch).to_vector());
          }
          EXPECT_FALSE(untrained.empty());
          EXPECT_EQ(resumed, untrained);
          accelerator.free_memory();
        };
        resume(indexed);
        resume(by_batches);
        resume(streamed);
      });
    }
  }
}

// ---- test_ddp_comm_hook.py ---------------------------------------------------------------------

struct MockModel : nn::Module<MockModel> {
  MockModel() : p(parameter("p", raw::full({40, 20}, 1, kF32))) {}
  Tensor forward(const Tensor& x, int rank) { return p * (rank == 0 ? x : x * x); }
  const Tensor& p;
};

TEST(TestDdpCommHook, DdpCommHook) {
  using accelerate::CommHook;
  using accelerate::CommWrapper;
  on_ranks(2, [](int rank) {
    const auto grads = [&](const DistributedDataParallelOptions& ddp) {
      Accelerator accelerator({.ddp = ddp});
      MockModel model;
      accelerator.prepare(model);
      model(randn({40, 20}, {}, RandomStream{2024, 0}), rank).mean().backward();
      return model.p.grad().to_vector();
    };
    const std::vector<double> reference = grads({});
    EXPECT_GT(std::ranges::max(reference), 1e-3);
    for (const DistributedDataParallelOptions& ddp : std::vector<DistributedDataParallelOptions>{
             {},
             {.comm_hook = CommHook::kFP16},
             {.comm_hook = CommHook::kBF16},
             {.comm_hook = CommHook::kPowerSgd},
             {.comm_hook = CommHook::kPowerSgd, .comm_wrapper = CommWrapper::kFP16},
             {.comm_hook = CommHook::kPowerSgd, .comm_wrapper = CommWrapper::kBF16},
             {.comm_hook = CommHook::kPowerSgd, .power_sgd_rank = 2},
             {.comm_hook = CommHook::kBatchedPowerSgd},
             {.comm_hook = CommHook::kBatchedPowerSgd, .comm_wrapper = CommWrapper::kFP16},
             {.comm_hook = CommHook::kBatchedPowerSgd, .comm_wrapper = CommWrapper::kBF16}}) {
      const std::vector<double> hooked = grads(ddp);
      ASSERT_EQ(hooked.size(), reference.size());
      // Its script allows 1e-2, more than these gradients of up to 5e-3 are.
      for (size_t i = 0; i < hooked.size(); ++i) EXPECT_NEAR(hooked[i], reference[i], 5e-5);
    }
  });
}

// ---- by_feature/memory.py and automatic_gradient_accumulation.py -------------------------------

// The body makes its objects, frees what the try before has left, and runs out of memory in the
// midst of its training. On two ranks one of them does, while the other reduces gradients.
TEST(ByFeature, MemoryAndAutomaticGradientAccumulation) {
  for (const auto& [ranks, accumulate, in_backward] :
       {std::tuple(1, false, false), std::tuple(1, true, true), std::tuple(2, false, false),
        std::tuple(2, true, false), std::tuple(2, false, true), std::tuple(3, true, true)}) {
    std::vector<int64_t> tried;
    const auto train = [&](int rank) {
      constexpr int64_t kObserved = 16;
      const Line dataset(64);
      Accelerator accelerator;
      const auto inner_training_loop = [&](int64_t batch_size) {
        accelerator.free_memory();
        if (rank == 0) tried.push_back(batch_size);
        if (accumulate) accelerator.set_gradient_accumulation_steps(kObserved / batch_size);
        Regression model;
        optim::AdamW optimizer(model.named_parameters(), {.lr = 0.1});
        data::DataLoader loader(dataset, {.batch_size = batch_size});
        optim::LinearSchedule schedule(optimizer, {.total_iters = 10});
        accelerator.prepare(model, optimizer, loader, schedule);
        int64_t updates = 0;
        for (auto& batch : loader) {
          const auto micro = accelerator.accumulate(model);
          const Tensor output = model(batch[0]);
          const auto allocate = [size = batch_size](const Tensor&) -> Tensor {
            TS_THROW(OutOfMemory, "allocate", "no room for ", size, " examples");
          };
          if (batch_size > 5 && updates == 1 && rank == ranks - 1) {
            in_backward ? (void)register_hook(output, allocate) : (void)allocate(output);
          }
          accelerator.backward(mse_loss(output, batch[1]));
          updates += optimizer.step();
          schedule.step(), optimizer.zero_grad();
        }
        return std::pair(updates, model.a.item());
      };
      const auto halve = [](int64_t size) { return size / 2; };
      const auto [updates, a] =
          find_executable_batch_size(accelerator, kObserved, inner_training_loop, {.next = halve});
      const int64_t batches = (64 + 4 * ranks - 1) / (4 * ranks);
      EXPECT_EQ(updates, accumulate ? (batches + 3) / 4 : batches);
      EXPECT_GT(a, 0);
    };
    // In backward the rank brings the others' reductions to their end: all calls go on alike.
    if (in_backward) {
      on_ranks(ranks, train);
    } else {
      distributed::failing_ranks("one of them runs out of memory", ranks, train);
    }
    EXPECT_EQ(tried, (std::vector<int64_t>{16, 8, 4}));
  }
}

}  // namespace
}  // namespace tessera::test_accelerate_scripts
