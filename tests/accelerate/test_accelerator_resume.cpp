// Loops that go on where a state was saved, to the bit.
// ctest labels: threads
#include "accelerate/accelerator_fixture.h"

#include <filesystem>
#include <string>
#include <vector>

#include <tessera/core/error.h>

namespace tessera::test_accelerator_resume {
namespace {

// A program that counts its steps resumes by `epoch = step / batches`, wherever it stopped, and has
// nothing to skip: where it does by habit, it would skip twice.
TEST(Accelerator, AResumedLoopGoesOnWhereItWasAndSkippingAgainIsAnError) {
  for (const int ranks : {1, 2}) {
    const std::string folder = testing::TempDir() + "accelerator_skips_" + std::to_string(ranks);
    on_ranks(ranks, [&](int) {
      const Line line(40);
      const int64_t batches = 40 / 4 / ranks;
      // Batches of the epochs up to the third, from step `from` on; saves after step `until`.
      const auto run = [&](int64_t from, int64_t until, bool skip) {
        Accelerator accelerator;
        Regression model;
        optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
        data::DataLoader loader(line, {.batch_size = 4});
        accelerator.prepare(model, optimizer, loader);
        if (from > 0) accelerator.load_state(folder);
        int64_t step = from;
        for (int64_t epoch = from / batches; epoch < 3; ++epoch) {
          auto& rest = skip && step % batches != 0
                           ? accelerator.skip_first_batches(loader, step % batches)
                           : loader;
          for (auto& batch : rest) {
            const auto micro = accelerator.accumulate(model);
            accelerator.backward(squared_error(model(batch[0]), batch[1]));
            optimizer.step(), optimizer.zero_grad();
            if (++step == until) {
              accelerator.save_state(folder);
              return step;
            }
          }
          EXPECT_EQ(step, (epoch + 1) * batches);
        }
        return step;
      };
      for (const int64_t stop : {batches - 2, batches, 2 * batches + 1}) {
        run(0, stop, false);
        EXPECT_EQ(run(stop, -1, false), 3 * batches) << "stopped after " << stop;
      }
      run(0, 2, false);
      EXPECT_THROW(run(2, -1, true), ConfigError);
    });
  }
}

TEST(Accelerator, StatesAreNumberedWhereTheSettingSaysSo) {
  const std::string folder = testing::TempDir() + "accelerator_numbers";
  Accelerator accelerator({.project_dir = folder, .automatic_checkpoint_naming = true});
  Regression model;
  accelerator.prepare(model);
  for (int number = 0; number < 2; ++number) {
    EXPECT_EQ(accelerator.save_state(),
              folder + "/checkpoints/checkpoint_" + std::to_string(number));
  }
  EXPECT_EQ(accelerator.load_state().folder, folder + "/checkpoints/checkpoint_1");
  EXPECT_THROW(Accelerator({.project_dir = folder}).save_state(), ConfigError);
  std::filesystem::remove_all(folder);
}

TEST(Accelerator, TheBestStateIsTheLeastMetricOrTheLargest) {
  for (const bool larger : {false, true}) {
    const std::string folder = testing::TempDir() + "accelerator_best";
    std::filesystem::remove_all(folder);
    Accelerator accelerator({.project_dir = folder,
                             .automatic_checkpoint_naming = true,
                             .total_limit = 1,
                             .keep_best = 1,
                             .larger_is_better = larger});
    Regression model;
    accelerator.prepare(model);
    EXPECT_EQ(accelerator.best_checkpoint(), std::nullopt);
    for (const double metric : {0.5, 0.25, 0.75, 0.5}) {
      accelerator.save_state({}, {.metric = metric});
    }
    EXPECT_EQ(accelerator.best_checkpoint(),
              folder + "/checkpoints/checkpoint_" + (larger ? "2" : "1"));
    std::filesystem::remove_all(folder);
  }
}

// The loader itself: the next loop is shorter, those after it are not.
TEST(Accelerator, FirstBatchesAreSkippedOnce) {
  const Line line(40);
  Accelerator accelerator;
  data::DataLoader loader(line, {.batch_size = 4});
  accelerator.prepare(loader);
  int batches = 0;
  for ([[maybe_unused]] auto& batch : accelerator.skip_first_batches(loader, 3)) ++batches;
  EXPECT_EQ(batches, 7);
  for ([[maybe_unused]] auto& batch : loader) ++batches;
  EXPECT_EQ(batches, 17);
}

void expect_exact_resume(int ranks, const AcceleratorOptions& options) {
  const std::string folder = testing::TempDir() + "accelerator_resume_" + std::to_string(ranks);
  on_ranks(ranks, [&](int) {
    const auto run = [&](int from, int to, bool load) {
      manual_seed(11);
      const Line line(96);
      Accelerator accelerator(options);
      Net net;
      optim::AdamW optimizer(net.named_parameters(), {.lr = 1e-2});
      data::DataLoader loader(line, {.batch_size = 4, .shuffle = true, .seed = 5});
      optim::CosineSchedule schedule(optimizer, {.warmup = 2, .total = 20});
      accelerator.prepare(net, optimizer, loader, schedule);
      if (load) accelerator.load_state(folder);
      for (int turn = from; turn < to; ++turn) {
        auto batch = loader.next();
        if (!batch) batch = loader.next();  // the next epoch
        const auto micro = accelerator.accumulate(net);
        accelerator.backward(squared_error(net((*batch)[0]), (*batch)[1]));
        optimizer.step(), schedule.step(), optimizer.zero_grad();
        if (turn == 4) {
          EXPECT_THROW(accelerator.save_state(folder), ValueError);
        }
      }
      if (to == 6) accelerator.save_state(folder);
      std::vector<std::vector<double>> values;
      for (const auto& [name, tensor] : net.named_parameters()) {
        values.push_back(tensor.to_vector());
      }
      for (const auto& [name, tensor] : optimizer.state_dict()) {
        values.push_back(tensor.to_vector());
      }
      return values;
    };
    const auto expected = run(0, 20, false);
    run(0, 6, false);
    EXPECT_EQ(run(6, 20, true), expected);
  });
}

TEST(Accelerator, ResumesInTheMiddleOfAnEpochToTheBit) {
  for (const int ranks : {1, 2}) expect_exact_resume(ranks, {.gradient_accumulation_steps = 2});
}
TEST(Accelerator, ResumesMastersOf16BitParametersToTheBit) {
  for (const Precision precision : {Precision::kBF16, Precision::kFP16}) {
    expect_exact_resume(2, {.mixed_precision = precision,
                            .precision_policy = PrecisionPolicy::kPure,
                            .gradient_accumulation_steps = 2});
  }
}

}  // namespace
}  // namespace tessera::test_accelerator_resume
