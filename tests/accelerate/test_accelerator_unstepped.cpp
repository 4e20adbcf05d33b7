// Windows that no step follows: nothing weighs anything, gradients overflow, the program leaves the
// step out. What comes after them is what one process has in f32. And zero_grad() wherever it stands.
// ctest labels: threads
#include "accelerate/accelerator_fixture.h"
#include "accelerate/sharding_modes.h"
#include "finished_process.h"

#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include <tessera/distributed/mesh/dtensor.h>

namespace tessera::test_accelerator_unstepped {
namespace {

using accelerate::Sharding;

struct Way {
  Sharding sharding = Sharding::kDdp;
  Precision precision = Precision::kNo;
  int64_t accumulation = 1;
};

struct Micro {
  std::optional<double> weight = {};
  double factor = 1;  // of the loss
  bool ends_window = false;
  bool clears_first = false;  // zero_grad() before the backward
  bool has_backward = true;
};

// A training of y = a x + b whose program is given, and the values that it comes to: norms, then
// parameters.
struct Training {
  explicit Training(const Way& way)
      : accelerator({.mixed_precision = way.precision,
                     .gradient_accumulation_steps = way.accumulation,
                     .seed = 5,
                     .sharding = way.sharding,
                     .loss_scale = {.init_scale = 1024},
                     .config_file = ""}),
        optimizer(model.named_parameters(), {.lr = 0.1}) {
    accelerator.prepare(model, optimizer);
  }
  void backward(const Micro& micro = {}) {
    const auto scope = accelerator.accumulate({&model}, {.ends_window = micro.ends_window});
    // The same on all ranks: so is one process's.
    const auto [x, y] = line.rows(8 * batches, 8 * batches + 8);
    ++batches;
    if (micro.clears_first) clear();
    if (!micro.has_backward) return;
    accelerator.backward(squared_error(model(x), y) * micro.factor, {.weight = micro.weight});
  }
  void clip(double max_norm = 0.5) {
    const Tensor norm = accelerator.clip_grad_norm(model.parameters(), max_norm);
    if (accelerator.sync_gradients()) values.push_back(norm.item());
  }
  void step() { optimizer.step(); }
  void clear() { optimizer.zero_grad(); }
  std::vector<double> result() {
    const NoGradGuard no_grad;
    for (const auto& [name, tensor] : model.named_parameters()) {
      values.push_back(
          (distributed::is_dtensor(tensor) ? distributed::full_tensor(tensor) : tensor).item());
    }
    return values;
  }
  Accelerator accelerator;
  Regression model;
  optim::SGD optimizer;
  const Line line{128};
  int64_t batches = 0;
  std::vector<double> values;
};

using Program = std::function<void(Training&)>;

void expect_as_in_f32(int64_t accumulation, const Program& program,
                      std::vector<Precision> precisions = {Precision::kNo, Precision::kFP16},
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
      for (const Precision precision : precisions) {
        SCOPED_TRACE(testing::Message()
                     << name_of(sharding) << " on " << ranks << " ranks, "
                     << (precision == Precision::kNo ? "f32" : "f16") << ", " << accumulation);
        on_ranks(ranks, [&](int) {
          const std::vector<double> got = outcome({sharding, precision, accumulation}, program);
          ASSERT_EQ(got.size(), expected.size());
          for (size_t i = 0; i < got.size(); ++i) {
            EXPECT_NEAR(got[i], expected[i], 1e-5 * (1 + std::abs(expected[i]))) << i;
          }
        });
      }
    }
  }
}

// ---- What the loss scaler was told -------------------------------------------------------------

TEST(UnsteppedWindows, WithoutWeightLeaveTheNextClippedStepAsItIs) {
  for (const int64_t accumulation : {1, 2}) {
    expect_as_in_f32(accumulation, [&](Training& training) {
      for (const double weight : {1.0, 0.0, 1.0, 1.0}) {
        for (int64_t micro = 0; micro < accumulation; ++micro) {
          training.backward({.weight = weight});
          training.clip();
          training.step(), training.clear();
        }
      }
    });
  }
}

TEST(UnsteppedWindows, ThatAProgramClipsAndLeavesOutLeaveTheNextClippedStepAsItIs) {
  for (const bool clears : {true, false}) {
    for (const int64_t accumulation : {1, 2}) {
      SCOPED_TRACE(clears);
      expect_as_in_f32(accumulation, [&](Training& training) {
        for (int window = 0; window < 4; ++window) {
          for (int64_t micro = 0; micro < accumulation; ++micro) {
            training.backward();
            training.clip();
            const bool left_out = window == 1 && micro == accumulation - 1;
            if (!left_out) training.step();
            if (!left_out || clears) training.clear();
          }
        }
      });
    }
  }
}

// ---- What was reduced before -------------------------------------------------------------------

// The short window at the end of an epoch; what follows it is a window like any other.
void after_a_short_window(Training& training, const Micro& last, bool steps) {
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (int micro = 0; micro < 2; ++micro) {
      training.backward({.weight = last.weight ? std::optional<double>(1) : std::nullopt});
      training.step(), training.clear();
    }
    training.backward(last);
    if (steps) training.step();
    training.clear();
  }
  for (int micro = 0; micro < 4; ++micro) {
    training.backward({.weight = last.weight ? std::optional<double>(1) : std::nullopt});
    training.step(), training.clear();
  }
}

TEST(UnsteppedWindows, OfOneMicroBatchWithoutWeightAreNotAddedTo) {
  expect_as_in_f32(2, [](Training& training) {
    after_a_short_window(training, {.weight = 0, .ends_window = true}, true);
  });
}

TEST(UnsteppedWindows, OfOneMicroBatchThatOverflowAreNotAddedTo) {
  // What one process does in f32 is not to step.
  const auto reference = [](Training& training) {
    after_a_short_window(training, {.ends_window = true}, false);
  };
  expect_as_in_f32(
      2,
      [](Training& training) {
        after_a_short_window(
            training, {.factor = std::numeric_limits<double>::infinity(), .ends_window = true},
            true);
      },
      {Precision::kFP16}, reference);
}

TEST(UnsteppedWindows, OfOneMicroBatchThatTheProgramLeavesOutAreNotAddedTo) {
  expect_as_in_f32(
      2, [](Training& training) { after_a_short_window(training, {.ends_window = true}, false); });
}

// ---- zero_grad() in front of the backward, as most loops of PyTorch have it --------------------

TEST(ZeroGradFirst, KeepsWhatTheWindowHasAddedUp) {
  for (const int64_t accumulation : {1, 2, 3}) {
    const auto program = [&](bool first) {
      return [=](Training& training) {
        for (int64_t micro = 0; micro < 3 * accumulation; ++micro) {
          training.backward({.clears_first = first});
          training.clip();
          training.step();
          if (!first) training.clear();
        }
      };
    };
    expect_as_in_f32(accumulation, program(true), {Precision::kNo, Precision::kFP16},
                     program(false));
  }
}

TEST(ZeroGradFirst, ClearsWhatAWindowWithoutAStepHasLeft) {
  const auto program = [&](bool first) {
    return [=](Training& training) {
      for (int64_t micro = 0; micro < 6; ++micro) {
        training.backward({.clears_first = first});
        if (micro != 1) training.step();
        if (!first) training.clear();
      }
    };
  };
  expect_as_in_f32(2, program(true), {Precision::kNo, Precision::kFP16}, program(false));
}

// A program that sees a loss that is no number, say, and goes on with the next batch.
TEST(ZeroGradFirst, ClearsTheWindowWhoseLastBackwardDoesNotCome) {
  const auto program = [](bool left) {
    return [=](Training& training) {
      training.batches = left ? 0 : 2;
      if (left) {
        training.backward();
        training.backward({.clears_first = true, .has_backward = false});
        training.clear();  // no more than once
      }
      for (int64_t micro = 0; micro < 4; ++micro) {
        training.backward();
        training.step(), training.clear();
      }
    };
  };
  expect_as_in_f32(2, program(true), {Precision::kNo, Precision::kFP16}, program(false));
}

// As of a generator and its critic, whose step comes before the generator's loss.
TEST(ZeroGradFirst, OfTwoModelsWaitsForTheBackwardOfEach) {
  const auto train = [](bool first) {
    const Line line{128};
    Accelerator accelerator({.gradient_accumulation_steps = 2, .seed = 5, .config_file = ""});
    Regression g, d;
    optim::SGD of_g(g.named_parameters(), {.lr = 0.1}), of_d(d.named_parameters(), {.lr = 0.1});
    accelerator.prepare(g, d, of_g, of_d);
    for (int64_t micro = 0; micro < 4; ++micro) {
      const auto [x, y] = line.rows(8 * micro, 8 * micro + 8);
      const auto scope_of_g = accelerator.accumulate(g);
      if (first) of_g.zero_grad();
      {
        const auto scope_of_d = accelerator.accumulate(d);
        if (first) of_d.zero_grad();
        accelerator.backward(squared_error(d(x), y));
        of_d.step();
      }
      accelerator.backward(squared_error(g(x), y));
      of_g.step();
      if (!first) of_g.zero_grad(), of_d.zero_grad();
    }
    return std::vector<std::vector<double>>{g.parameters().front().to_vector(),
                                            d.parameters().front().to_vector()};
  };
  const auto expected = train(false);
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [&](int) { EXPECT_EQ(train(true), expected); });
  }
}

TEST(ZeroGradFirst, ThatWaitsForABackwardIsDoneBeforeASave) {
  on_ranks(1, [](int) {
    Training training({.accumulation = 2});
    training.backward();
    training.backward({.clears_first = true, .has_backward = false});
    ASSERT_TRUE(training.model.parameters().front().grad().defined());
    const TestFolder folder;
    EXPECT_NO_THROW(training.accelerator.save_state(folder.path("state")));
    EXPECT_FALSE(training.model.parameters().front().grad().defined());
  });
}

}  // namespace
}  // namespace tessera::test_accelerator_unstepped
