// Precision of the facade: autocast in models, policies, masters, the loss scale, clipping.
// ctest labels: threads
#include "accelerate/accelerator_fixture.h"

#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <optional>
#include <string>

#include <tessera/accelerate/local_sgd.h>
#include <tessera/autograd/autocast_mode.h>
#include <tessera/core/error.h>
#include <tessera/precision/autocast.h>
#include <tessera/precision/report.h>

namespace tessera::test_accelerator_precision {
namespace {

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

// ---- Clipping ----------------------------------------------------------------------------------

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

// A norm of one group says nothing of the others.
TEST(ClippedGradients, OfEveryGroupHaveToBeKnown) {
  const Line line(8);
  const auto [x, y] = line.rows(0, 8);
  for (const bool all : {false, true}) {
    Accelerator accelerator(
        {.mixed_precision = Precision::kFP16, .loss_scale = {.init_scale = 1024}});
    Regression model;
    using Group = optim::ParameterGroup<optim::SGDOptions>;
    optim::SGD optimizer({Group{{{"a", model.a}}, {.lr = 1}}, Group{{{"b", model.b}}, {.lr = 1}}});
    accelerator.prepare(model, optimizer);
    accelerator.backward(squared_error(model(x), y));
    accelerator.clip_grad_norm(all ? TensorList{model.a, model.b} : TensorList{model.a}, 0.01);
    model.b.grad().data_as<float>()[0] = std::numeric_limits<float>::infinity();
    optimizer.step();
    EXPECT_EQ(accelerator.optimizer_step_was_skipped(), !all);
  }
}

// No pass over them: the next step reads them with the factor.
TEST(ClippedGradients, KeepTheirValuesUntilTheStep) {
  const Line line(8);
  const auto [x, y] = line.rows(0, 8);
  Accelerator accelerator;
  Regression model;
  optim::SGD optimizer(model.named_parameters(), {.lr = 1});
  accelerator.prepare(model, optimizer);
  accelerator.backward(squared_error(model(x), y));
  const std::vector<std::vector<float>> before = gradients_of(model);
  const double norm = accelerator.clip_grad_norm(model.parameters(), 0.5).item();
  ASSERT_GT(norm, 1);
  EXPECT_EQ(gradients_of(model), before);
  optimizer.step();
  EXPECT_NEAR(model.a.item(), -before[0][0] * 0.5 / norm, 1e-6);
  // Of a part they are changed at once.
  accelerator.clip_grad_norm({model.a}, std::abs(before[0][0]) / 2);
  EXPECT_NEAR(model.a.grad().item(), before[0][0] / 2, 1e-6 * norm);
}

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

}  // namespace
}  // namespace tessera::test_accelerator_precision
