// The training loop of the facade: windows, weights, gates, and that ranks change no bits.
// ctest labels: threads
#include "accelerator_fixture.h"

#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

#include <tessera/accelerate/local_sgd.h>
#include <tessera/autograd/autocast_mode.h>
#include <tessera/core/error.h>
#include <tessera/nn/dropout.h>
#include <tessera/nn/linear.h>
#include <tessera/precision/autocast.h>
#include <tessera/precision/grad_scaler.h>
#include <tessera/precision/report.h>

namespace tessera {
namespace {

// ---- One loop for every set-up -----------------------------------------------------------------

struct Net : nn::Module<Net> {
  Net()
      : first(add<nn::Linear>("first", 1, 16)),
        dropout(add<nn::Dropout>("dropout", 0.25)),
        second(add<nn::Linear>("second", 16, 1)) {}
  Tensor forward(const Tensor& x) { return second(dropout(relu(first(x)))); }
  nn::Linear& first;
  nn::Dropout& dropout;
  nn::Linear& second;
};

// Trains over `samples` lines and returns the parameters.
std::vector<std::vector<float>> train(int64_t steps, int64_t samples, int epochs = 2) {
  manual_seed(11);
  const Line line(samples);
  Accelerator accelerator({.gradient_accumulation_steps = steps});
  Net net;
  optim::AdamW optimizer(net.named_parameters(), {.lr = 1e-2});
  data::DataLoader loader(line, {.batch_size = 4, .shuffle = true, .seed = 5});
  optim::CosineSchedule schedule(optimizer, {.warmup = 2, .total = 20});
  accelerator.prepare(schedule, loader, optimizer, net);
  for (int epoch = 0; epoch < epochs; ++epoch) {
    for (auto& [x, y] : loader) {
      auto micro = accelerator.accumulate(net);
      accelerator.backward(squared_error(net(x), y));
      accelerator.clip_grad_norm(net.parameters(), 0.5);
      optimizer.step(), schedule.step(), optimizer.zero_grad();
    }
  }
  return values_of(net);
}

void expect_near(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b,
                 double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].size(), b[i].size());
    for (size_t j = 0; j < a[i].size(); ++j)
      EXPECT_NEAR(a[i][j], b[i][j], tolerance) << i << " " << j;
  }
}

// SCR-10 with bits instead of bounds, and dropout.
TEST(Accelerator, RanksWithOneMicroBatchHaveTheBitsOfOneProcessThatAccumulates) {
  for (const int ranks : {2, 4}) {
    const auto expected = train(ranks, 64);
    on_ranks(ranks, [&](int) { EXPECT_EQ(train(1, 64), expected) << ranks << " ranks"; });
  }
}

TEST(Accelerator, RanksThatAccumulateDifferFromOneProcessByTheRoundingOfTheirSums) {
  for (const int ranks : {2, 4}) {
    const auto expected = train(4 * ranks, 128);
    on_ranks(ranks, [&](int) { expect_near(train(4, 128), expected, 1e-5); });
  }
}

// ---- Schedules ---------------------------------------------------------------------------------

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

// What a second pass over the gradients would find is written behind the back of their versions.
TEST(ClippedGradients, AreNotReadAgainForTheLossScaler) {
  const double inf = std::numeric_limits<double>::infinity();
  const Line line(8);
  const auto [x, y] = line.rows(0, 8);
  // Whether the step was skipped after clip(accelerator, a, b).
  const auto skipped = [&, x = x, y = y](double factor, const auto& clip) {
    Accelerator accelerator(
        {.mixed_precision = Precision::kFP16, .loss_scale = {.init_scale = 1024}});
    Regression model;
    optim::SGD optimizer(model.named_parameters(), {.lr = 1});
    accelerator.prepare(model, optimizer);
    accelerator.backward(squared_error(model(x), y) * factor);
    clip(accelerator, model.a, model.b);
    optimizer.step();
    return accelerator.optimizer_step_was_skipped();
  };
  const auto clip = [](Accelerator& accelerator, const TensorList& parameters) {
    EXPECT_GT(accelerator.clip_grad_norm(parameters, 0.01).item(), 0.01);
  };
  const auto overwrite = [inf](const Tensor& parameter) {
    parameter.grad().data_as<float>()[0] = static_cast<float>(inf);
  };
  EXPECT_FALSE(skipped(1, [&](Accelerator& accelerator, const Tensor& a, const Tensor& b) {
    clip(accelerator, {a, b});
    overwrite(b);
  }));
  EXPECT_FALSE(skipped(1, [&](Accelerator& accelerator, const Tensor& a, const Tensor& b) {
    clip(accelerator, {a});
    clip(accelerator, {b});
    overwrite(a);
  }));
  // A gradient that no norm was taken of, or another time; and a norm that is not finite.
  EXPECT_TRUE(skipped(1, [&](Accelerator& accelerator, const Tensor& a, const Tensor& b) {
    clip(accelerator, {a});
    overwrite(b);
  }));
  EXPECT_TRUE(skipped(1, [&](Accelerator& accelerator, const Tensor& a, const Tensor& b) {
    clip(accelerator, {a, b});
    b.grad().fill_(inf);
  }));
  EXPECT_TRUE(skipped(1, [&](Accelerator& accelerator, const Tensor& a, const Tensor& b) {
    clip(accelerator, {a, b});
    b.set_grad(full({1}, inf));
  }));
  EXPECT_TRUE(skipped(inf, [&](Accelerator& accelerator, const Tensor& a, const Tensor& b) {
    EXPECT_FALSE(std::isfinite(accelerator.clip_grad_norm({a, b}, 0.01).item()));
  }));
}

// ---- Clipping ----------------------------------------------------------------------------------

// The step applies a clip of everything that its optimizer has; one of a part is done at once.
TEST(ClippedGradients, AreThoseThatTheStepSeesHoweverTheyCameAbout) {
  const Line line(8);
  const auto [x, y] = line.rows(0, 8);
  for (const Precision precision : {Precision::kNo, Precision::kFP16}) {
    for (const int ranks : {1, 2}) {
      on_ranks(ranks, [&, x = x, y = y](int) {
        // What SGD with a rate of 1 has subtracted after clip(accelerator, model).
        const auto step_after = [&](const auto& clip) {
          Accelerator accelerator(
              {.mixed_precision = precision, .loss_scale = {.init_scale = 1024}});
          Regression model;
          optim::SGD optimizer(model.named_parameters(), {.lr = 1});
          accelerator.prepare(model, optimizer);
          accelerator.backward(squared_error(model(x), y));
          clip(accelerator, model, optimizer);
          optimizer.step();
          return std::array<double, 2>{-model.a.item(), -model.b.item()};
        };
        const auto plain = step_after([](auto&, auto&, auto&) {});
        const double norm = std::hypot(plain[0], plain[1]);
        const auto expect = [&](const std::array<double, 2>& got, double a, double b) {
          EXPECT_NEAR(got[0], a, 1e-5 * norm);
          EXPECT_NEAR(got[1], b, 1e-5 * norm);
        };
        const double half = norm / 2;
        expect(step_after([&](auto& accelerator, auto& model, auto&) {
                 EXPECT_NEAR(accelerator.clip_grad_norm(model.parameters(), half).item(), norm,
                             1e-5 * norm);
                 EXPECT_NEAR(accelerator.clip_grad_norm(model.parameters(), half / 2).item(), half,
                             1e-5 * norm);
               }),
               plain[0] / 4, plain[1] / 4);
        // A part, after all of it: what is pending is done first.
        expect(step_after([&](auto& accelerator, auto& model, auto&) {
                 accelerator.clip_grad_norm(model.parameters(), half);
                 EXPECT_NEAR(accelerator.clip_grad_norm({model.a}, std::abs(plain[0]) / 8).item(),
                             std::abs(plain[0]) / 2, 1e-5 * norm);
               }),
               plain[0] / 8, plain[1] / 2);
        // Values, after a norm.
        expect(step_after([&](auto& accelerator, auto& model, auto&) {
                 accelerator.clip_grad_norm(model.parameters(), half);
                 accelerator.clip_grad_value(model.parameters(), std::abs(plain[0]) / 4);
               }),
               plain[0] / 4,
               std::copysign(std::min(std::abs(plain[1]) / 2, std::abs(plain[0]) / 4), plain[1]));
        // No step follows: what comes is added to clipped gradients.
        expect(step_after([&](auto& accelerator, auto& model, auto&) {
                 accelerator.clip_grad_norm(model.parameters(), half);
                 accelerator.backward(squared_error(model(x), y));
               }),
               plain[0] * 1.5, plain[1] * 1.5);
        // They are cleared, and the clip with them.
        expect(step_after([&](auto& accelerator, auto& model, auto& optimizer) {
                 accelerator.clip_grad_norm(model.parameters(), half);
                 optimizer.zero_grad();
                 accelerator.backward(squared_error(model(x), y));
               }),
               plain[0], plain[1]);
      });
    }
  }
}

// ---- Accelerate's names ------------------------------------------------------------------------

TEST(Accelerator, SavesAModelGivesItsStateAndComputesOutsideOfItInThePrecision) {
  const std::string folder = testing::TempDir() + "accelerator_save_model";
  on_ranks(2, [&](int) {
    Accelerator accelerator({.mixed_precision = Precision::kBF16, .collective_timeout = 77});
    EXPECT_EQ(distributed::rank_context().timeouts.collective, 77);
    Regression model, other;
    accelerator.prepare(model);
    {
      const NoGradGuard no_grad;
      model.a.fill_(2), model.b.fill_(3);
    }
    accelerator.save_model(model, folder);
    load_model(other, folder);
    EXPECT_EQ(values_of(other), values_of(model));
    EXPECT_EQ(accelerator.get_state_dict(model).at("a").item(), 2);
    const Tensor x = ones({2, 2});
    {
      const auto scope = accelerator.autocast();
      EXPECT_EQ(matmul(x, x).dtype(), kBF16);
      const auto off = accelerator.autocast(false);
      EXPECT_EQ(matmul(x, x).dtype(), kF32);
    }
    EXPECT_EQ(matmul(x, x).dtype(), kF32);
  });
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

// ---- Precision ---------------------------------------------------------------------------------

std::vector<std::vector<float>> regression(int ranks_of_batch, AcceleratorOptions options) {
  const Line line(96);
  Accelerator accelerator(options);
  Regression model;
  optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
  data::DataLoader loader(line, {.batch_size = 8 * ranks_of_batch, .shuffle = true, .seed = 3});
  accelerator.prepare(model, optimizer, loader);
  for (int epoch = 0; epoch < 3; ++epoch) {
    for (auto& [x, y] : loader) {
      accelerator.backward(squared_error(model(x), y));
      accelerator.clip_grad_norm(model.parameters(), 100);
      optimizer.step(), optimizer.zero_grad();
    }
  }
  return values_of(model);
}

// SCR-10 and SCR-11: 8 samples a rank, or one process with 8 n, in every precision.
TEST(Precision, RanksTrainLikeOneProcessWithTheirBatchesTogether) {
  for (const int ranks : {2, 4}) {
    const auto expected = regression(ranks, {});
    for (const Precision precision : {Precision::kNo, Precision::kBF16, Precision::kFP16}) {
      on_ranks(ranks, [&](int) {
        expect_near(regression(1, {.mixed_precision = precision}), expected, 1e-6);
        expect_near(regression(ranks, {.mixed_precision = precision, .split_batches = true}),
                    expected, 1e-6);
      });
    }
  }
}

struct Doubler : nn::Module<Doubler> {
  Doubler() : weight(parameter("weight", raw::full({4, 4}, 0.25, kF32))) {}
  Tensor forward(const Tensor& x) {
    TS_CHECK(x.size(0) != 3, "Doubler", "has no room for 3 rows");
    seen = matmul(x, weight);
    return seen;
  }
  const Tensor& weight;
  Tensor seen;
};

// KW-1: autocast inside of another.
TEST(Precision, HoldsInTheModelAloneHoweverTheCallEnds) {
  Accelerator accelerator({.mixed_precision = Precision::kBF16});
  Doubler model;
  accelerator.prepare(model);
  const Tensor x = ones({2, 4});
  EXPECT_EQ(model(x).dtype(), kF32);
  EXPECT_EQ(model.seen.dtype(), kBF16);
  EXPECT_EQ(matmul(x, model.weight).dtype(), kF32);
  EXPECT_THROW(model(ones({3, 4})), ValueError);
  EXPECT_EQ(matmul(x, model.weight).dtype(), kF32);
  {
    const AutocastGuard half(kF16);
    EXPECT_EQ(model(x).dtype(), kF32);
    EXPECT_EQ(model.seen.dtype(), kBF16);
    EXPECT_EQ(matmul(x, model.weight).dtype(), kF16);
    const AutocastGuard off(kF16, false);
    EXPECT_EQ(matmul(x, model.weight).dtype(), kF32);
  }
  accelerator.free_memory();
  EXPECT_EQ(model(x).dtype(), kF32);
}

struct WithLoss {
  Tensor logits, loss;
  void visit_tensors(auto&& visit) { visit(logits), visit(loss); }
};
struct HeadWithLoss : nn::Module<HeadWithLoss> {
  HeadWithLoss() : head(add<nn::Linear>("head", 4, 1000)) {}
  // The loss within the model: nobody widens logits that nobody gets.
  WithLoss forward(const Tensor& x, const Tensor& labels) {
    Tensor logits = head(x);
    computed = logits.dtype();
    if (!labels.defined()) return {logits, {}};
    return {{}, cross_entropy(logits, labels)};
  }
  nn::Linear& head;
  DType computed = kF64;
};

// A loss made outside of the model of results in 16 bits would not see what training changes:
// next to 7 the next number in bf16 is 7.03.
TEST(Precision, ResultsOfPreparedModelsAreF32UnlessAskedOtherwise) {
  for (const Precision precision : {Precision::kNo, Precision::kBF16, Precision::kFP16}) {
    for (const PrecisionPolicy policy :
         {PrecisionPolicy::kAutocast, PrecisionPolicy::kBoundary, PrecisionPolicy::kPure}) {
      if (precision == Precision::kNo && policy != PrecisionPolicy::kAutocast) continue;
      const DType low = precision == Precision::kNo     ? kF32
                        : precision == Precision::kBF16 ? kBF16
                                                        : kF16;
      for (const auto output : {OutputPrecision::kF32, OutputPrecision::kComputed}) {
        for (const int ranks : {1, 2}) {
          SCOPED_TRACE(testing::Message() << "precision " << static_cast<int>(precision)
                                          << ", policy " << static_cast<int>(policy) << ", output "
                                          << static_cast<int>(output) << ", ranks " << ranks);
          on_ranks(ranks, [&](int) {
            AcceleratorOptions options{.mixed_precision = precision, .output_precision = output};
            if (precision != Precision::kNo) options.precision_policy = policy;
            Accelerator accelerator(options);
            HeadWithLoss model;
            optim::SGD optimizer(model.named_parameters(), {.lr = 0.5});
            accelerator.prepare(model, optimizer);
            const Tensor x = ones({4, 4}), labels = tensor({1.0, 2.0, 3.0, 4.0}).to(kI64);
            const DType given = output == OutputPrecision::kF32 ? kF32 : low;
            std::vector<double> losses;
            for (int step = 0; step < 4; ++step) {
              const Tensor logits = model(x, Tensor()).logits;
              EXPECT_EQ(logits.dtype(), given);
              EXPECT_EQ(model.computed, low);
              const Tensor loss = cross_entropy(logits, labels);
              EXPECT_EQ(loss.dtype(), given);
              losses.push_back(loss.item());
              accelerator.backward(loss);
              optimizer.step(), optimizer.zero_grad();
            }
            if (given == kF32) {
              for (size_t i = 1; i < losses.size(); ++i) EXPECT_LT(losses[i], losses[i - 1]);
            }
            const WithLoss inside = model(x, labels);
            EXPECT_FALSE(inside.logits.defined());
            EXPECT_EQ(model.computed, low);
          });
        }
      }
    }
  }
}

TEST(Precision, ClippingSeesTheTrueNormBehindTheLossScale) {
  const Line line(8);
  const auto norm_with = [&](Precision precision) {
    Accelerator accelerator({.mixed_precision = precision});
    Regression model;
    optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
    accelerator.prepare(model, optimizer);
    const auto [x, y] = line.rows(0, 8);
    accelerator.backward(squared_error(model(x), y));
    const double norm = accelerator.clip_grad_norm(model.parameters(), 0.5).item();
    // Clipped: the second look finds the bound.
    EXPECT_NEAR(accelerator.clip_grad_norm(model.parameters(), 0.5).item(), 0.5, 1e-5);
    optimizer.step();
    EXPECT_NEAR(std::hypot(model.a.item(), model.b.item()), 0.05, 1e-6);
    return norm;
  };
  const double expected = norm_with(Precision::kNo);
  EXPECT_GT(expected, 1);
  EXPECT_NEAR(norm_with(Precision::kFP16), expected, 1e-5 * expected);
}

// A scale that changes while another model's gradients wait changes them, too.
TEST(Precision, GradientsThatWaitForTheirStepFollowTheLossScale) {
  const Line line(8);
  for (const bool in_windows : {true, false}) {
    Accelerator accelerator(
        {.mixed_precision = Precision::kFP16, .loss_scale = {.growth_interval = 1}});
    Regression slow, fast, expected;
    optim::SGD slow_optimizer(slow.named_parameters(), {.lr = 0.1});
    optim::SGD fast_optimizer(fast.named_parameters(), {.lr = 0.1});
    accelerator.prepare(slow, fast, slow_optimizer, fast_optimizer);
    accelerator.set_gradient_accumulation_steps(slow, 2);
    const auto [x, y] = line.rows(0, 8);
    for (int turn = 0; turn < 2; ++turn) {
      if (in_windows) {
        const auto slow_micro = accelerator.accumulate(slow);
        accelerator.backward(squared_error(slow(x), y));
      } else if (turn == 0) {
        accelerator.backward(squared_error(slow(x), y));
      }
      accelerator.backward(squared_error(fast(x), y));
      fast_optimizer.step(), fast_optimizer.zero_grad();
    }
    EXPECT_EQ(accelerator.loss_scale(), 2 * 65536);  // the second growth waits for the next loss
    EXPECT_TRUE(slow_optimizer.step());
    squared_error(expected(x), y).backward();
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_NEAR(slow.parameters()[i].item(), -0.1 * expected.parameters()[i].grad().item(), 1e-6);
    }
  }
}

// Gradients that were stepped with are nobody's any more: who reads them finds them as they were.
TEST(Precision, AChangeOfTheLossScaleLeavesGradientsThatWereSteppedWithAlone) {
  const Line line(8);
  Accelerator accelerator(
      {.mixed_precision = Precision::kFP16, .loss_scale = {.growth_interval = 1}});
  Regression stepped, waiting;
  optim::SGD stepped_optimizer(stepped.named_parameters(), {.lr = 0.1});
  optim::SGD waiting_optimizer(waiting.named_parameters(), {.lr = 0.1});
  accelerator.prepare(stepped, waiting, stepped_optimizer, waiting_optimizer);
  const auto [x, y] = line.rows(0, 8);
  {
    const auto micro = accelerator.accumulate(stepped);
    accelerator.backward(squared_error(stepped(x), y));
  }
  EXPECT_TRUE(stepped_optimizer.step());
  std::vector<std::vector<double>> before;
  for (const Tensor& parameter : stepped.parameters()) {
    before.push_back(parameter.grad().to_vector());
  }
  const double scale = accelerator.loss_scale();
  {
    const auto micro = accelerator.accumulate(waiting);
    accelerator.backward(squared_error(waiting(x), y));
  }
  EXPECT_EQ(accelerator.loss_scale(), 2 * scale) << "it has changed in between";
  for (size_t i = 0; i < before.size(); ++i) {
    EXPECT_EQ(stepped.parameters()[i].grad().to_vector(), before[i]);
  }
}

struct PolicyRun {
  std::vector<std::vector<double>> weights;  // masters, where there are any
  precision::PrecisionReport report;
  std::string description;
};

PolicyRun run_with_policy() {
  manual_seed(4);
  Accelerator accelerator({.gradient_accumulation_steps = 2, .loss_scale = {.init_scale = 256}});
  const Line line(64);
  Net net;
  net.eval();  // without dropout
  optim::AdamW optimizer(net.named_parameters(), {.lr = 1e-3});
  data::DataLoader loader(line, {.batch_size = 8, .shuffle = true, .seed = 5});
  accelerator.prepare(optimizer, net, loader);
  precision::PrecisionWatch watch(net, precision::policy_of(net).value_or(precision::Policy()));
  for (auto& [x, y] : loader) {
    const auto micro = accelerator.accumulate(net);
    accelerator.backward(squared_error(net(x), y));
    accelerator.clip_grad_norm(net.parameters(), 1);
    optimizer.step(), optimizer.zero_grad();
    EXPECT_FALSE(accelerator.optimizer_step_was_skipped());
  }
  const StateDict state = optimizer.state_dict();
  PolicyRun run{{}, watch.report(state), accelerator.describe()};
  for (const auto& [name, tensor] : net.named_parameters()) {
    const std::string master = "state." + name + ".master";
    run.weights.push_back((state.contains(master) ? state.at(master) : tensor).to_vector());
  }
  return run;
}

// Every policy by configuration alone, on one rank and two, where f32 goes; and describe() and the
// report of the run say what it was.
TEST(Precision, PoliciesAreSettings) {
  for (const int ranks : {1, 2}) {
    std::vector<std::vector<double>> f32;
    on_ranks(ranks, [&](int rank) {
      const PolicyRun run = run_with_policy();
      if (rank == 0) f32 = run.weights;
    });
    for (const std::string precision : {"bf16", "fp16"}) {
      const DType low = precision == "bf16" ? kBF16 : kF16;
      const std::string low_name(name_of(low));
      for (const std::string policy : {"autocast", "boundary", "pure"}) {
        SCOPED_TRACE(precision + " " + policy + " on " + std::to_string(ranks));
        std::vector<PolicyRun> runs(static_cast<size_t>(ranks));
        // From outside of the program, as a user gives it.
        ::setenv("TESSERA_MIXED_PRECISION", precision.c_str(), 1);
        ::setenv("TESSERA_PRECISION_POLICY", policy.c_str(), 1);
        on_ranks(ranks, [&](int rank) { runs[static_cast<size_t>(rank)] = run_with_policy(); });
        ::unsetenv("TESSERA_MIXED_PRECISION");
        ::unsetenv("TESSERA_PRECISION_POLICY");
        const bool pure = policy == "pure";
        for (const PolicyRun& run : runs) EXPECT_EQ(run.weights, runs[0].weights);
        // Four (or two) steps of at most 1e-3 each.
        for (size_t i = 0; i < f32.size(); ++i) {
          for (size_t j = 0; j < f32[i].size(); ++j) {
            EXPECT_NEAR(runs[0].weights[i][j], f32[i][j], 2e-3) << i << ' ' << j;
          }
        }
        EXPECT_NE(runs[0].description.find("precision_policy = " + policy), std::string::npos);
        EXPECT_NE(runs[0].description.find("precision: parameters " + (pure ? low_name : "f32") +
                                           ", compute " + low_name),
                  std::string::npos)
            << runs[0].description;
        EXPECT_TRUE(runs[0].report.deviations.empty()) << runs[0].report.table();
        for (const precision::LayerPrecision& layer : runs[0].report.layers) {
          if (layer.type != "Linear") continue;
          EXPECT_EQ(layer.parameters, precision::DTypes{pure ? low : kF32});
          EXPECT_EQ(layer.products, precision::DTypes{low});
          EXPECT_EQ(layer.gradients, precision::DTypes{kF32});
          EXPECT_EQ(layer.masters, pure ? precision::DTypes{kF32} : precision::DTypes{});
          EXPECT_EQ(layer.states, precision::DTypes{kF32});
        }
      }
    }
  }
}

// 1 + 2^-12 is 1 in bf16: a master that begins with the parameter has lost it.
TEST(Precision, MastersBeginWithWhatTheParametersWereUnlessOthersWereLoaded) {
  on_ranks(2, [](int rank) {
    const auto first_master = [&](const std::function<void(Regression&)>& change) {
      Accelerator accelerator(
          {.mixed_precision = Precision::kBF16, .precision_policy = PrecisionPolicy::kPure});
      Regression model;
      {
        const NoGradGuard no_grad;
        model.a.fill_(1 + 0x1p-12 + rank);  // rank 0's become everybody's
      }
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.5});
      accelerator.prepare(model);
      EXPECT_EQ(model.a.dtype(), kBF16);
      EXPECT_EQ(model.a.item(), 1);
      accelerator.prepare(optimizer);
      change(model);
      const auto micro = accelerator.accumulate(model);
      accelerator.backward((model(ones({1, 1})) * 0).sum());
      EXPECT_EQ(model.a.grad().dtype(), kF32);
      EXPECT_TRUE(optimizer.step());
      return optimizer.state_dict().at("state.a.master").item();
    };
    EXPECT_EQ(first_master([](Regression&) {}), 1 + 0x1p-12);
    EXPECT_EQ(first_master([](Regression& model) {
                Regression other;
                const NoGradGuard no_grad;
                other.a.fill_(5);
                model.load_state_dict(other.state_dict());
              }),
              5);
  });
}

TEST(Precision, APolicyIsAppliedOnceAndEndsWithTheAccelerator) {
  Regression model;
  {
    Accelerator accelerator({.mixed_precision = Precision::kBF16,
                             .precision_policy = PrecisionPolicy::kBoundary,
                             .output_precision = OutputPrecision::kComputed});
    accelerator.prepare(model);
    accelerator.prepare(model);
    EXPECT_EQ(precision::policy_of(model), precision::Policy::boundary(kBF16));
    EXPECT_EQ(model(ones({2, 1})).dtype(), kBF16);
  }
  EXPECT_EQ(precision::policy_of(model), std::nullopt);
  EXPECT_EQ(model(ones({2, 1})).dtype(), kF32);
  // Autocast and boundary casting of one model exclude each other.
  const auto own = precision::apply(model, precision::Policy::boundary(kBF16));
  Accelerator accelerator({.mixed_precision = Precision::kBF16});
  EXPECT_THROW(accelerator.prepare(model), ConfigError);
  Accelerator plain;
  plain.prepare(model);
  EXPECT_EQ(model(ones({2, 1})).dtype(), kBF16);
}

TEST(Precision, LocalSgdOf16BitParametersIsRefused) {
  on_ranks(2, [](int) {
    Accelerator accelerator(
        {.mixed_precision = Precision::kBF16, .precision_policy = PrecisionPolicy::kPure});
    Regression model;
    accelerator.prepare(model);
    EXPECT_THROW(LocalSGD(accelerator, model), UnsupportedError);
  });
}

// ---- Settings ----------------------------------------------------------------------------------

// KW-1
TEST(Settings, ReachWhatTheyAreFor) {
  on_ranks(2, [](int) {
    Accelerator accelerator({.mixed_precision = Precision::kFP16,
                             .ddp = {.bucket_cap_mb = 15},
                             .loss_scale = {.init_scale = 1024, .growth_factor = 4}});
    EXPECT_EQ(accelerator.settings().scaler_growth_factor.value, 4);
    EXPECT_EQ(accelerator.settings().scaler_backoff_factor.value, 0.5);  // not given: the default
    EXPECT_EQ(accelerator.loss_scale(), 1024);
    EXPECT_EQ(accelerator.settings().ddp_bucket_cap_mb.value, 15);
    Net net;
    accelerator.prepare(net);
    const std::string text = accelerator.describe();
    for (const char* part : {"rank ", "ddp_bucket_cap_mb = 15  (code)", "model Net", "bucket 0"}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << " in\n" << text;
    }
  });
}

// Their own values differ by rank and shape; only `debug` sees that before they are mixed.
TEST(Settings, DebugComparesShapesInEveryOperationOfTheFacade) {
  on_ranks(2, [](int rank) {
    const Tensor value = zeros(rank == 0 ? Shape{2, 3} : Shape{3, 2});
    const Accelerator plain;
    EXPECT_EQ(plain.gather(value).size(0), rank == 0 ? 4 : 6);
    const Accelerator accelerator({.debug = true});
    using accelerate::OperationMismatch;
    EXPECT_THROW(accelerator.gather(value), OperationMismatch);
    EXPECT_THROW(accelerator.reduce(value), OperationMismatch);
    EXPECT_THROW(accelerator.broadcast(value), OperationMismatch);
  });
  ::setenv("ACCELERATE_DEBUG_MODE", "1", 1);
  EXPECT_TRUE(Accelerator().settings().debug);
  ::unsetenv("ACCELERATE_DEBUG_MODE");
}

// SCR-8
TEST(Settings, TheDataSeedIsThatOfLoadersThatShuffle) {
  const auto order = [](std::optional<int64_t> data_seed, bool own_sampler = false) {
    const Line line(32);
    Accelerator accelerator({.data_seed = data_seed});
    const data::DataLoaderOptions options{.batch_size = 8, .shuffle = !own_sampler, .seed = 3};
    data::DataLoader<std::array<Tensor, 2>> loader =
        own_sampler ? data::DataLoader<std::array<Tensor, 2>>(
                          {std::shared_ptr<void>(), &line},
                          std::make_shared<data::SequentialSampler>(32), options)
                    : data::DataLoader<std::array<Tensor, 2>>(line, options);
    accelerator.prepare(loader);
    accelerator.prepare(loader);
    std::vector<std::vector<float>> batches;
    for (int epoch = 0; epoch < 2; ++epoch) {
      for (auto& [x, y] : loader) batches.push_back(x.to_vector<float>());
    }
    return batches;
  };
  EXPECT_EQ(order(42), order(42));
  EXPECT_NE(order(42), order(43));
  EXPECT_EQ(order(3), order({}));
  EXPECT_NE(order(42), order({}));
  EXPECT_EQ(order(42, true), order({}, true));
}

TEST(Settings, TheDeviceIsTheCpuWhereThereIsNoGpu) {
  EXPECT_EQ(Accelerator().device(), kCpu);
  EXPECT_EQ(Accelerator({.cpu = true}).device(), kCpu);
  EXPECT_EQ(Accelerator({.device = "cpu"}).device(), kCpu);
  EXPECT_THROW(Accelerator({.device = "cuda"}).device(), DeviceError);
  EXPECT_THROW(Accelerator({.device = "tpu"}).device(), ConfigError);
  EXPECT_THROW(Accelerator({.cpu = true, .device = "cuda"}), ConfigError);
}

// Trap 3: the environment beats the program.
TEST(Settings, TheProgramBeatsTheEnvironment) {
  ::setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8", 1);
  EXPECT_EQ(Accelerator({.gradient_accumulation_steps = 2}).gradient_accumulation_steps(), 2);
  const Accelerator accelerator;
  EXPECT_EQ(accelerator.gradient_accumulation_steps(), 8);
  EXPECT_NE(accelerator.describe().find("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"),
            std::string::npos);
  ::unsetenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS");
}

// HOOK-1
TEST(Settings, CompressedGradientsTrainAsPlainOnesDo) {
  for (const auto hook : {accelerate::CommHook::kFP16, accelerate::CommHook::kBF16,
                          accelerate::CommHook::kPowerSgd}) {
    on_ranks(2, [&](int) {
      const auto run = [&](accelerate::CommHook which) {
        manual_seed(4);
        const Line line(64);
        AcceleratorOptions options{.ddp = {.comm_hook = which}};
        if (which == accelerate::CommHook::kPowerSgd) options.ddp.power_sgd_start_step = 0;
        Accelerator accelerator(options);
        Net net;
        net.eval();  // without dropout
        optim::SGD optimizer(net.named_parameters(), {.lr = 0.01});
        data::DataLoader loader(line, {.batch_size = 4});
        accelerator.prepare(net, optimizer, loader);
        for (auto& [x, y] : loader) {
          accelerator.backward(squared_error(net(x), y));
          optimizer.step(), optimizer.zero_grad();
        }
        return values_of(net);
      };
      expect_near(run(hook), run(accelerate::CommHook::kNone), 1e-2);
    });
  }
}

// ---- Objects -----------------------------------------------------------------------------------

// ACC-1 and SCR-13 without globals: a second Accelerator with other settings is no error and
// changes nothing.
TEST(Accelerator, TwoSideBySideEachHaveTheBitsThatTheyHaveAlone) {
  struct Training {
    explicit Training(int64_t steps, Precision precision)
        : line(64),
          accelerator({.mixed_precision = precision, .gradient_accumulation_steps = steps}),
          optimizer(net.named_parameters(), {.lr = 1e-2}),
          loader(line, {.batch_size = 4, .shuffle = true, .seed = 5}) {
      accelerator.prepare(net, optimizer, loader);
    }
    void step() {
      auto batch = loader.next();
      if (!batch) return;
      const auto micro = accelerator.accumulate(net);
      accelerator.backward(squared_error(net((*batch)[0]), (*batch)[1]));
      optimizer.step(), optimizer.zero_grad();
    }
    Line line;
    Accelerator accelerator;
    Net net;
    optim::AdamW optimizer;
    data::DataLoader<std::array<Tensor, 2>> loader;
  };
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [](int) {
      const auto alone = [](int64_t steps, Precision precision) {
        manual_seed(9);
        Training training(steps, precision);
        for (int i = 0; i < 8; ++i) training.step();
        return values_of(training.net);
      };
      const auto first = alone(1, Precision::kNo), second = alone(3, Precision::kBF16);
      manual_seed(9);
      Training a(1, Precision::kNo), b(3, Precision::kBF16);
      for (int i = 0; i < 8; ++i) {
        a.step();
        b.step();
        EXPECT_TRUE(a.accelerator.sync_gradients());
      }
      EXPECT_EQ(values_of(a.net), first);
      EXPECT_EQ(values_of(b.net), second);
    });
  }
}

// ACC-4: nothing passes through, nothing is prepared twice, and objects keep their identity.
TEST(Accelerator, PreparesOnceInPlaceAndInAnyOrder) {
  on_ranks(2, [](int) {
    const Line line(32);
    Accelerator accelerator;
    auto model = std::make_unique<Regression>();
    Regression* nobody = nullptr;
    std::unique_ptr<Regression> empty;
    optim::SGD optimizer(model->named_parameters(), {.lr = 0.1});
    data::DataLoader loader(line, {.batch_size = 4});
    const TensorImpl* weight = model->a.impl();
    std::nullptr_t nothing = nullptr;
    accelerator.prepare(optimizer, nothing, nobody, empty, model, loader);
    accelerator.prepare(model, loader, optimizer);
    EXPECT_EQ(model->a.impl(), weight);
    EXPECT_EQ(accelerator.models().size(), 1u);
    EXPECT_EQ(accelerator.optimizers().size(), 1u);
    EXPECT_EQ(accelerator.loaders().size(), 1u);
    EXPECT_EQ(loader.size(), 4);  // half of 8 batches, not a quarter
    const auto [x, y] = line.rows(0, 4);
    const int64_t before =
        static_cast<int64_t>(distributed::rank_context().trace->records().size());
    accelerator.backward(squared_error((*model)(x), y));
    // A weight, a bucket, a used map, an order of buckets: reduced once.
    EXPECT_EQ(static_cast<int64_t>(distributed::rank_context().trace->records().size()) - before,
              4);
  });
}

// ACC-1: what was prepared is let go.
TEST(Accelerator, FreeMemoryLetsGoOfEverything) {
  on_ranks(2, [](int rank) {
    const Line line(32);
    Accelerator accelerator({.gradient_accumulation_steps = 2});
    data::DataLoader loader(line, {.batch_size = 4});
    {
      Regression model;
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
      accelerator.prepare(model, optimizer, loader);
      const Tensor held = model.a;
      const int32_t holders = held.use_count();
      { const auto micro = accelerator.accumulate(model); }
      accelerator.free_memory();
      EXPECT_LT(held.use_count(), holders);
      EXPECT_TRUE(accelerator.models().empty());
      EXPECT_TRUE(accelerator.loaders().empty());
      EXPECT_EQ(loader.size(), 8);
      EXPECT_TRUE(accelerator.sync_gradients());
      // It trains alone: gradients are this rank's.
      const auto [x, y] = line.rows(rank * 4, rank * 4 + 4);
      squared_error(model(x), y).backward();
      EXPECT_TRUE(optimizer.step());
      const Tensor all = accelerator.gather(model.a.detach());
      EXPECT_NE(all[0].item(), all[1].item());
    }
    Regression next;  // perhaps at the same address
    accelerator.prepare(next, loader);
    EXPECT_EQ(accelerator.models().size(), 1u);
  });
}

TEST(Accelerator, AModelAtTheAddressOfADeadOneIsAnother) {
  Accelerator accelerator({.gradient_accumulation_steps = 4});
  alignas(Regression) std::byte room[sizeof(Regression)];
  auto* model = new (room) Regression;
  accelerator.prepare(*model);
  { const auto micro = accelerator.accumulate(*model); }
  model->~Regression();
  model = new (room) Regression;
  accelerator.prepare(*model);
  EXPECT_EQ(accelerator.models().size(), 1u);
  for (int i = 0; i < 4; ++i) EXPECT_EQ(accelerator.accumulate(*model).sync_gradients(), i == 3);
  model->~Regression();
}

// Locals that die on out-of-memory, then free_memory() at the top of the next try.
TEST(Accelerator, ForgetsWhatDiedBeforeIt) {
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [](int) {
      const Line line(32);
      Accelerator accelerator({.gradient_accumulation_steps = 2});
      const auto attempt = [&](bool use) {
        Regression model;
        optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
        optim::StepSchedule schedule(optimizer, {.step_size = 1});
        optim::PlateauSchedule plateau(optimizer);
        data::DataLoader loader(line, {.batch_size = 4});
        accelerator.prepare(model, optimizer, loader, schedule, plateau);
        if (!use) return;
        const auto [x, y] = line.rows(0, 4);
        const auto micro = accelerator.accumulate(model);  // an open window
        accelerator.backward(squared_error(model(x), y));
        optimizer.step(), schedule.step(), optimizer.zero_grad();
      };
      for (const bool use : {false, true}) {
        attempt(use);
        EXPECT_TRUE(accelerator.models().empty());
        EXPECT_TRUE(accelerator.optimizers().empty());
        EXPECT_TRUE(accelerator.schedules().empty());
        EXPECT_TRUE(accelerator.plateau_schedules().empty());
        EXPECT_TRUE(accelerator.loaders().empty());
        EXPECT_EQ(accelerator.describe().find("model "), std::string::npos);
        EXPECT_FALSE(accelerator.optimizer_step_was_skipped());
        accelerator.free_memory();
      }
      // Others are prepared in the place of the dead, and train.
      attempt(false);
      Regression model;
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
      optim::StepSchedule schedule(optimizer, {.step_size = 1});
      accelerator.prepare(model, optimizer, schedule);
      accelerator.set_gradient_accumulation_steps(1);
      const auto [x, y] = line.rows(0, 4);
      accelerator.backward(squared_error(model(x), y));
      EXPECT_TRUE(optimizer.step());
      EXPECT_TRUE(schedule.step());
    });
  }
}

// A checkpoint without the model that was trained would be found out much later.
TEST(Accelerator, ACheckpointWithoutWhatDiedIsAnErrorThatNamesIt) {
  for (const int ranks : {1, 2}) {
    on_ranks(ranks, [](int) {
      const std::string folder = testing::TempDir() + "accelerator_gone";
      Accelerator accelerator;
      {
        Regression model;
        optim::SGD optimizer(model.named_parameters(), {.lr = 0.1});
        accelerator.prepare(model, optimizer);
      }
      Regression other;
      accelerator.prepare(other);
      for (const bool save : {true, false}) {
        try {
          save ? (void)accelerator.save_state(folder) : (void)accelerator.load_state(folder);
          ADD_FAILURE() << "nothing was thrown";
        } catch (const ValueError& error) {
          const std::string text = error.what();
          EXPECT_NE(text.find("Regression"), std::string::npos) << text;
          EXPECT_NE(text.find("an optimizer of 2 parameters"), std::string::npos) << text;
          EXPECT_NE(text.find("free_memory()"), std::string::npos) << text;
        }
      }
      accelerator.free_memory();
      accelerator.prepare(other);
      accelerator.save_state(folder);
      accelerator.load_state(folder);
    });
  }
}

TEST(Accelerator, FreeMemoryTakesTheObjectsThatAreToGo) {
  Accelerator accelerator;
  auto model = std::make_unique<Regression>();
  auto optimizer = std::make_shared<optim::SGD>(model->named_parameters(), optim::SGDOptions{});
  std::optional<optim::StepSchedule> schedule(std::in_place, *optimizer, optim::Step{1});
  Regression local;
  Regression* pointer = &local;
  accelerator.prepare(model, optimizer, *schedule, local);
  accelerator.free_memory(schedule, optimizer, model, pointer, local);
  EXPECT_EQ(model, nullptr);
  EXPECT_EQ(optimizer, nullptr);
  EXPECT_FALSE(schedule.has_value());
  EXPECT_EQ(pointer, nullptr);
  EXPECT_TRUE(accelerator.models().empty());
}

// ---- State -------------------------------------------------------------------------------------

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
}  // namespace tessera
