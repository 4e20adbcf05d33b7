// Windows of several models with a loss each, windows that a loop leaves, and what may be saved
// when: on ranks as in one process.
// ctest labels: threads
#include "accelerate/accelerator_fixture.h"
#include "accelerate/sharding_modes.h"

#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include <tessera/accelerate/step/window_weights.h>
#include <tessera/core/error.h>
#include <tessera/distributed/mesh/dtensor.h>

#include "finished_process.h"
#include "message_of.h"

namespace tessera::test_accelerator_windows {
namespace {

using accelerate::Sharding;

struct Way {
  Sharding sharding = Sharding::kDdp;
  Precision precision = Precision::kNo;
  int64_t accumulation = 1;
  bool each_batch = false;
};

// Two lines y = a x + b, which are trained together. All ranks have the batches of one process.
struct Training {
  explicit Training(const Way& way)
      : accelerator({.mixed_precision = way.precision,
                     .gradient_accumulation_steps = way.accumulation,
                     .sync_each_batch = way.each_batch,
                     .seed = 5,
                     .sharding = way.sharding,
                     .config_file = ""}),
        first_optimizer(first.named_parameters(), {.lr = 0.1}),
        second_optimizer(second.named_parameters(), {.lr = 0.2}) {
    accelerator.prepare(first, second, first_optimizer, second_optimizer);
  }
  std::array<Tensor, 2> batch(int64_t number) const {
    return line.rows(8 * number, 8 * number + 8);
  }
  void step() {
    norms.push_back(accelerator.clip_grad_norm(first.parameters(), 2).item());
    first_optimizer.step(), second_optimizer.step();
    first_optimizer.zero_grad(), second_optimizer.zero_grad();
  }
  std::vector<double> result() {
    const NoGradGuard no_grad;
    std::vector<double> values;
    for (const double norm : norms) {
      if (!std::isnan(norm)) values.push_back(norm);
    }
    for (const Regression* model : {&first, &second}) {
      for (const auto& [name, tensor] : model->named_parameters()) {
        values.push_back(
            (distributed::is_dtensor(tensor) ? distributed::full_tensor(tensor) : tensor).item());
      }
    }
    return values;
  }
  Accelerator accelerator;
  Regression first, second;
  optim::SGD first_optimizer, second_optimizer;
  const Line line{256};
  std::vector<double> norms;
};

using Program = std::function<void(Training&)>;

void expect_as_in_one_process(int64_t accumulation, const Program& program,
                              const Program& reference = {}) {
  const auto outcome = [&](const Way& way, const Program& own) {
    Training training(way);
    own(training);
    return training.result();
  };
  const std::vector<double> expected =
      outcome({.accumulation = accumulation}, reference ? reference : program);
  for (const int ranks : {1, 2}) {
    for (const Sharding sharding : kModes) {
      for (const Precision precision : {Precision::kNo, Precision::kFP16}) {
        for (const bool each_batch : {false, true}) {
          on_ranks(ranks, [&](int) {
            SCOPED_TRACE(testing::Message() << name_of(sharding) << " on " << ranks << " ranks, "
                                            << (precision == Precision::kNo ? "f32" : "f16") << ", "
                                            << accumulation << ", each batch " << each_batch);
            const std::vector<double> got =
                outcome({sharding, precision, accumulation, each_batch}, program);
            ASSERT_EQ(got.size(), expected.size());
            for (size_t i = 0; i < got.size(); ++i) {
              // f16 rounds the products.
              const double tolerance = precision == Precision::kNo ? 1e-5 : 5e-3;
              EXPECT_NEAR(got[i], expected[i], tolerance * (1 + std::abs(expected[i]))) << i;
            }
          });
        }
      }
    }
  }
}

// ---- Several models in a micro-batch -----------------------------------------------------------

TEST(SeveralModels, WithALossEachInOneMicroBatchTrainAsInOneProcess) {
  for (const int64_t accumulation : {1, 2}) {
    for (const bool says_more : {false, true}) {
      expect_as_in_one_process(accumulation, [&](Training& run) {
        for (int64_t micro = 0; micro < 3 * accumulation; ++micro) {
          const auto scope = run.accelerator.accumulate(run.first, run.second);
          run.accelerator.backward(loss_of(run.first, run.batch(micro)), {.more = says_more});
          run.accelerator.backward(loss_of(run.second, run.batch(micro + 7)));
          run.step();
        }
      });
    }
  }
}

TEST(SeveralModels, WithSeveralLossesOfTheFirstTrainAsInOneProcess) {
  expect_as_in_one_process(2, [](Training& run) {
    for (int64_t micro = 0; micro < 4; ++micro) {
      const auto scope = run.accelerator.accumulate(run.first, run.second);
      for (int64_t loss = 0; loss < 2; ++loss) {
        run.accelerator.backward(loss_of(run.first, run.batch(micro + loss)), {.more = true});
      }
      run.accelerator.backward(loss_of(run.second, run.batch(micro + 7)));
      run.step();
    }
  });
}

TEST(SeveralModels, OfWhichOneHasNoLossInTheLastMicroBatchTrainAsInOneProcess) {
  expect_as_in_one_process(2, [](Training& run) {
    for (int64_t micro = 0; micro < 4; ++micro) {
      const auto scope = run.accelerator.accumulate(run.first, run.second);
      if (micro % 2 == 0) {
        run.accelerator.backward(loss_of(run.first, run.batch(micro)), {.more = true});
      }
      run.accelerator.backward(loss_of(run.second, run.batch(micro + 7)));
      run.step();
    }
  });
}

TEST(SeveralModels, OfWhichOneIsFrozenJustNowTrainAsInOneProcess) {
  for (const int64_t accumulation : {1, 2}) {
    expect_as_in_one_process(accumulation, [&](Training& run) {
      for (int64_t micro = 0; micro < 3 * accumulation; ++micro) {
        const bool frozen = micro / accumulation == 1;  // in the second of three windows
        if (micro % accumulation == 0) run.second.requires_grad_(!frozen);
        const auto scope = run.accelerator.accumulate(run.first, run.second);
        run.accelerator.backward(loss_of(run.first, run.batch(micro)), {.more = !frozen});
        if (!frozen) run.accelerator.backward(loss_of(run.second, run.batch(micro + 7)));
        run.step();
      }
    });
  }
}

// Another line with the slope of a first one.
struct SameSlope : nn::Module<SameSlope> {
  explicit SameSlope(const Regression& first)
      : a(parameter("a", first.a)), b(parameter("b", raw::zeros({1}, kF32))) {}
  Tensor forward(const Tensor& x) { return x * a + b; }
  const Tensor& a;
  const Tensor& b;
};

TEST(SeveralModels, ThatShareAParameterCountItOnce) {
  const Line line(256);
  const auto batch = [&](int64_t number) { return line.rows(8 * number, 8 * number + 8); };
  enum class Losses { kOneSum, kMoreFollow, kOneAfterTheOther };
  for (const int64_t accumulation : {1, 2, 3}) {
    Regression plain;
    SameSlope plain_other(plain);
    for (int64_t micro = 0; micro < 2 * accumulation; ++micro) {  // two windows, none cleared
      const auto [x, y] = batch(micro);
      const Tensor loss = squared_error(plain(x), y) + squared_error(plain_other(x), y * 3);
      (loss * (1 / static_cast<double>(accumulation))).backward();
    }
    for (const Losses losses : {Losses::kOneSum, Losses::kMoreFollow, Losses::kOneAfterTheOther}) {
      SCOPED_TRACE(testing::Message() << accumulation << " " << static_cast<int>(losses));
      Accelerator accelerator({.gradient_accumulation_steps = accumulation, .config_file = ""});
      Regression model;
      SameSlope other(model);
      accelerator.prepare(model, other);
      for (int64_t micro = 0; micro < 2 * accumulation; ++micro) {
        const auto [x, y] = batch(micro);
        const auto scope = accelerator.accumulate(model, other);
        const Tensor first = squared_error(model(x), y), second = squared_error(other(x), y * 3);
        if (losses == Losses::kOneSum) {
          accelerator.backward(first + second);
        } else {
          accelerator.backward(first, {.more = losses == Losses::kMoreFollow});
          accelerator.backward(second);
        }
      }
      EXPECT_TRUE(near(gradients_of(model), gradients_of(plain)));
      EXPECT_TRUE(near(gradients_of(other), gradients_of(plain_other)));
    }
  }
}

// ---- Windows that a loop leaves ----------------------------------------------------------------

// A loop over a prepared loader that is left after `batches` of it, then whole windows.
void leave_and_go_on(Training& run, int batches, bool clears, bool throws) {
  data::DataLoader loader(run.line, {.batch_size = 8});
  run.accelerator.prepare(loader);
  int seen = 0;
  try {
    for (auto& batch : loader) {
      const auto scope = run.accelerator.accumulate(run.first, run.second);
      const std::array<Tensor, 2> own = {batch[0], batch[1]};
      run.accelerator.backward(loss_of(run.first, own) + loss_of(run.second, own));
      run.step();
      if (++seen < batches) continue;
      if (throws) throw std::runtime_error("left");
      break;
    }
  } catch (const std::runtime_error&) {
  }
  if (clears) {
    run.first_optimizer.zero_grad(), run.second_optimizer.zero_grad();
    for (const Tensor& parameter : run.first.parameters()) {
      EXPECT_FALSE(parameter.grad().defined());
    }
  } else {
    EXPECT_FALSE(run.first_optimizer.step());
  }
}
void train_windows(Training& run, int64_t micro_batches) {
  for (int64_t micro = 0; micro < micro_batches; ++micro) {
    const auto scope = run.accelerator.accumulate(run.first, run.second);
    const auto batch = run.batch(micro);
    run.accelerator.backward(loss_of(run.first, batch) + loss_of(run.second, batch));
    run.step();
  }
}

TEST(LeftWindows, GiveNothingToTheNextOnes) {
  for (const bool clears : {false, true}) {
    for (const bool throws : {false, true}) {
      SCOPED_TRACE(testing::Message() << clears << throws);
      expect_as_in_one_process(
          3,
          [&](Training& run) {
            leave_and_go_on(run, 2, clears, throws);
            run.norms.clear();
            train_windows(run, 6);
          },
          [](Training& run) { train_windows(run, 6); });
    }
  }
}

TEST(LeftWindows, LetTheGradientsOfEarlierOnesStay) {
  on_ranks(1, [](int) {
    Training run({.accumulation = 2});
    for (int64_t micro = 0; micro < 2; ++micro) {  // a window that nobody clears
      const auto scope = run.accelerator.accumulate(run.first);
      run.accelerator.backward(loss_of(run.first, run.batch(micro)));
    }
    const Values before = gradients_of(run.first);
    {
      data::DataLoader loader(run.line, {.batch_size = 8});
      run.accelerator.prepare(loader);
      for (auto& batch : loader) {
        const auto scope = run.accelerator.accumulate(run.first);
        run.accelerator.backward(loss_of(run.first, {batch[0], batch[1]}));
        break;
      }
    }
    EXPECT_FALSE(run.first_optimizer.step());
    EXPECT_EQ(gradients_of(run.first), before);
  });
}

// A window that its loader's end does not end goes on in the next loop.
TEST(LeftWindows, AreNotThoseThatSpanEpochs) {
  on_ranks(1, [](int) {
    Accelerator accelerator({.gradient_accumulation_steps = 4, .sync_with_dataloader = false});
    Regression model;
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
    const Line line(24);
    data::DataLoader loader(line, {.batch_size = 8});
    accelerator.prepare(model, optimizer, loader);
    int steps = 0;
    for (int epoch = 0; epoch < 4; ++epoch) {
      for (auto& batch : loader) {
        const auto scope = accelerator.accumulate(model);
        accelerator.backward(loss_of(model, {batch[0], batch[1]}));
        steps += optimizer.step();
        optimizer.zero_grad();
      }
    }
    EXPECT_EQ(steps, 3);
  });
}

// ---- Batches that the program cuts, or that are made already ------------------------------------

// Told once, where it happens.
TEST(CutBatches, ThatEndAWindowEachAreToldOnce) {
  const auto told = [](int64_t accumulation, bool with_loader, bool cuts, bool says_end) {
    testing::internal::CaptureStderr();
    Accelerator accelerator({.gradient_accumulation_steps = accumulation,
                             .sync_with_dataloader = with_loader,
                             .config_file = ""});
    Regression model;
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
    const Line line(40);
    data::DataLoader loader(line, {.batch_size = 20});
    accelerator.prepare(model, optimizer, loader);
    int steps = 0;
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (auto& batch : loader) {
        const int64_t pieces = cuts ? 5 : 1;
        for (int64_t piece = 0; piece < pieces; ++piece) {
          const bool last = says_end && piece + 1 == pieces && accelerator.end_of_dataloader();
          const auto micro = accelerator.accumulate({&model}, {.ends_window = last});
          const int64_t rows = 20 / pieces;
          const std::array<Tensor, 2> part = {raw::narrow(batch[0], 0, piece * rows, rows),
                                              raw::narrow(batch[1], 0, piece * rows, rows)};
          accelerator.backward(loss_of(model, part));
          steps += optimizer.step();
          optimizer.zero_grad();
        }
      }
    }
    const std::string text = testing::internal::GetCapturedStderr();
    size_t lines = 0;
    for (size_t at = text.find("come from the loader's last batch"); at != std::string::npos;
         at = text.find("come from the loader's last batch", at + 1)) {
      ++lines;
    }
    return std::pair(steps, lines);
  };
  EXPECT_EQ(told(4, true, true, false), std::pair(2 * (1 + 5), size_t{1}));
  EXPECT_EQ(told(4, false, true, true), std::pair(2 * 3, size_t{0})) << "as the warning says";
  EXPECT_EQ(told(4, true, false, false), std::pair(2 * 1, size_t{0}));
  EXPECT_EQ(told(1, true, true, false), std::pair(2 * 10, size_t{0}));
}

// Batches of 8, 4, 8, 4... rows, which count for as many samples.
class MadeBatches : public data::Dataset<std::array<Tensor, 2>> {
 public:
  int64_t size() const override { return 8; }
  std::array<Tensor, 2> get(int64_t index) const override {
    const int64_t begin = index / 2 * 12 + index % 2 * 8;
    return line_.rows(begin, begin + (index % 2 == 0 ? 8 : 4));
  }

 private:
  Line line_{48};
};

TEST(MadeBatches, WeighByTheirRowsOnAnyNumberOfRanks) {
  const MadeBatches batches;
  Regression whole;
  loss_of(whole, Line(48).rows(0, 48)).backward();
  for (const int ranks : {1, 2}) {
    for (const bool dispatch : {false, true}) {
      on_ranks(ranks, [&](int) {
        SCOPED_TRACE(testing::Message() << ranks << " " << dispatch);
        Accelerator accelerator(
            {.gradient_accumulation_steps = 8, .dispatch_batches = dispatch, .config_file = ""});
        Regression model;
        data::DataLoader loader(batches, {.batch_size = data::kNoBatching});
        accelerator.prepare(model, loader);
        int64_t rows = 0;
        for (auto& batch : loader) {
          EXPECT_EQ(batch[0].size(0), loader.batch_rows());
          rows += loader.batch_samples();
          const auto micro = accelerator.accumulate(model);
          accelerator.backward(loss_of(model, batch));
        }
        const Tensor all =
            accelerator.reduce(scalar_tensor(rows, kI64), accelerate::RankReduction::kSum);
        EXPECT_EQ(all.item<int64_t>(), 48);
        EXPECT_TRUE(near(gradients_of(model), gradients_of(whole)));
      });
    }
  }
}

// The first weight that is not 0 is the unit of all, of ranks in their order where they can be asked.
// It stays within the range of 16 bits whatever weights count.
TEST(GivenWeights, AreInUnitsOfTheFirst) {
  const accelerate::Settings settings;
  const PreparedObjects prepared;
  const WindowWeights weights(settings, prepared);
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [&](int rank) {
      distributed::ParallelDims dims(distributed::world(), distributed::ParallelSizes{});
      const auto weigh = [&](double given, WindowWeights::Nominal& nominal, bool joined = false) {
        return weights.weigh(given, nullptr, dims, joined, nominal);
      };
      WindowWeights::Nominal nominal;
      EXPECT_EQ(weigh(rank == 0 ? 8 : 2, nominal), rank == 0 ? 1 : 0.25);
      EXPECT_EQ(nominal.weight, 8);
      EXPECT_EQ(weigh(4, nominal), 0.5);
      EXPECT_EQ(weigh(0, nominal), 0);
      WindowWeights::Nominal of_zero;
      EXPECT_EQ(weigh(0, of_zero), 0);
      EXPECT_EQ(of_zero.weight, 0);  // is no unit: thousands of tokens would overflow in f16
      const bool counts = rank + 1 == ranks;
      EXPECT_EQ(weigh(counts ? 4096 : 0, of_zero), counts ? 1 : 0);
      EXPECT_EQ(of_zero.weight, 4096);
      WindowWeights::Nominal alone;  // ranks without further batches cannot be asked
      EXPECT_EQ(weigh(8, alone, true), 8);
      EXPECT_EQ(alone.weight, 1);
      WindowWeights::Nominal none;
      EXPECT_EQ(weights.weigh({}, nullptr, dims, false, none), 1);
      EXPECT_EQ(none.weight, 0);
      const double infinity = std::numeric_limits<double>::infinity();
      for (const double bad : {-1.0, -1e-300, infinity, std::nan("")}) {
        EXPECT_TRUE(mentions(message_of<ValueError>([&] { weigh(bad, nominal); }), "not negative"));
      }
    });
  }
  accelerate::Settings huggingface;
  huggingface.loss_weighting.value = LossWeighting::kHuggingFace;
  const WindowWeights same(huggingface, prepared);
  on_ranks(1, [&](int) {
    distributed::ParallelDims dims(distributed::world(), distributed::ParallelSizes{});
    WindowWeights::Nominal nominal;
    EXPECT_EQ(same.weigh({}, nullptr, dims, false, nominal), 1);
    EXPECT_TRUE(mentions(message_of([&] { same.weigh(2, nullptr, dims, false, nominal); }),
                         "every micro-batch the same weight"));
  });
}

TEST(MadeBatches, AreNotSplit) {
  on_ranks(2, [](int) {
    const MadeBatches batches;
    Accelerator accelerator({.split_batches = true, .config_file = ""});
    data::DataLoader loader(batches, {.batch_size = data::kNoBatching});
    EXPECT_TRUE(mentions(message_of<ConfigError>([&] { accelerator.prepare(loader); }),
                         "are made already (kNoBatching)"));
  });
}

// ---- What may be saved when --------------------------------------------------------------------

TEST(UnsteppedGradients, AreNotSavedNorLoadedOver) {
  for (const int ranks : {1, 2}) {
    for (const Sharding sharding : kModes) {
      for (const bool in_window : {false, true}) {
        SCOPED_TRACE(testing::Message() << name_of(sharding) << " on " << ranks << in_window);
        const TestFolder folder;
        on_ranks(ranks, [&](int) {
          Training run({.sharding = sharding, .accumulation = in_window ? 2 : 1});
          const auto save = [&] { run.accelerator.save_state(folder.path("a")); };
          const auto load = [&] { run.accelerator.load_state(folder.path("a")); };
          const auto backward = [&](int64_t micro) {
            const auto batch = run.batch(micro);
            run.accelerator.backward(loss_of(run.first, batch) + loss_of(run.second, batch));
          };
          const auto window = [&](int64_t number) {
            if (!in_window) return backward(number);
            for (int64_t micro = 0; micro < 2; ++micro) {
              const auto scope = run.accelerator.accumulate(run.first, run.second);
              backward(2 * number + micro);
            }
          };
          const auto refused = [&](const std::function<void()>& call) {
            const std::string message = message_of<ValueError>(call);
            return message.find("no step has come since the backward") != std::string::npos;
          };
          save();
          window(0);
          EXPECT_TRUE(refused(save) && refused(load));
          run.step();
          save();
          load();
          window(1);
          EXPECT_TRUE(refused(save) && refused(load));
          run.first_optimizer.zero_grad(), run.second_optimizer.zero_grad();
          load();
          save();
        });
      }
    }
  }
}

}  // namespace
}  // namespace tessera::test_accelerator_windows
