// Trainings that a DeepSpeed configuration drives, on thread ranks: the bits of the same training
// by settings of our own, and what does not go together is an error.
// ctest labels: threads
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <tessera/core/error.h>
#include <tessera/optim/clip.h>

#include "accelerate/sharded_words.h"
#include "message_of.h"
#include "thinned.h"

namespace tessera::test_deepspeed {
namespace {

using accelerate::Sharding;
using distributed::compared_ranks;

std::string replaced(std::string text, const std::string& what, const std::string& by) {
  text.replace(text.find(what), what.size(), by);
  return text;
}

// As the files of HuggingFace's tests for stage 2 and 3: what can be "auto" is.
constexpr const char* kStage2 = R"({
  "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 3, "initial_scale_power": 10,
           "hysteresis": 2, "min_loss_scale": 1},
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto",
                                            "torch_adam": true, "adam_w_mode": true}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto",
    "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
  "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none", "pin_memory": true},
    "allgather_partitions": true, "allgather_bucket_size": 2e8, "overlap_comm": true,
    "reduce_scatter": true, "reduce_bucket_size": 1000, "contiguous_gradients": true},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
  "wall_clock_breakdown": false
})";
constexpr const char* kStage3 = R"({
  "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 3, "initial_scale_power": 10,
           "hysteresis": 2, "min_loss_scale": 1},
  "bf16": {"enabled": "auto"},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto",
    "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}},
  "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"},
    "offload_param": {"device": "none"}, "overlap_comm": true, "contiguous_gradients": true,
    "sub_group_size": 1e9, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true},
  "gradient_accumulation_steps": 2, "gradient_clipping": "auto", "steps_per_print": 2000,
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
  "wall_clock_breakdown": false
})";

constexpr int64_t kWarmup = 2, kTotal = 9;
constexpr double kLr = 2e-2, kDecay = 0.1;

// Losses, rates and parameters.
struct Outcome {
  std::vector<float> losses, rates;
  Values values;
  bool operator==(const Outcome&) const = default;
};

template <class Step>
Outcome train(Accelerator& accelerator, Words& model, optim::Optimizer& optimizer,
              optim::Schedule& schedule, const Step& before_step) {
  data::DataLoader<std::array<Tensor, 2>> loader(std::make_shared<Tokens>(36),
                                                 {.batch_size = 2, .shuffle = true});
  accelerator.prepare(model, optimizer, schedule, loader);
  Outcome outcome;
  for (const auto& batch : loader) {
    const auto micro = accelerator.accumulate(model);
    const Tensor loss = cross_entropy(model(batch[0]).reshape({-1, 131}), batch[1].reshape({-1}));
    accelerator.backward(loss);
    before_step();
    outcome.rates.push_back(static_cast<float>(optimizer.lr()));
    optimizer.step(), schedule.step(), optimizer.zero_grad();
    outcome.losses.push_back(loss.item<float>());
  }
  outcome.values = whole_values(model);
  return outcome;
}

Outcome by_file(const std::string& json, AcceleratorOptions options) {
  options.seed = 5;
  options.config_file = "";
  options.deepspeed_config = json;
  Accelerator accelerator(options);
  Words model;
  const auto optimizer =
      accelerator.optimizer_from_config(model, {.lr = kLr, .weight_decay = kDecay});
  const auto schedule = accelerator.schedule_from_config(
      *optimizer, {.warmup_num_steps = kWarmup, .total_num_steps = kTotal});
  return train(accelerator, model, *optimizer, *schedule, [] {});
}

// The same said with our own words, and clipped by the program.
Outcome by_settings(AcceleratorOptions options) {
  options.seed = 5;
  options.config_file = "";
  options.loss_scale = {.init_scale = 1024, .growth_interval = 3, .min_scale = 1, .hysteresis = 2};
  Accelerator accelerator(options);
  Words model;
  optim::AdamW optimizer(model.named_parameters(), {.lr = kLr, .weight_decay = kDecay});
  optim::RuleSchedule schedule(
      optimizer,
      accelerate::WarmupDecayLR{
          .warmup = {.warmup_min_lr = 0, .warmup_max_lr = kLr, .warmup_num_steps = kWarmup},
          .total_num_steps = kTotal});
  return train(accelerator, model, optimizer, schedule,
               [&] { accelerator.clip_grad_norm(model.parameters(), 1.0); });
}

std::vector<Outcome> outcomes(int ranks, const std::function<Outcome()>& program) {
  std::vector<Outcome> all(static_cast<size_t>(ranks));
  compared_ranks(ranks, [&](int rank) { all[static_cast<size_t>(rank)] = program(); });
  return all;
}

TEST(DeepSpeedRun, HasTheBitsOfTheSameSettingsSaidOtherwise) {
  for (const Precision precision :
       tests::thinned({Precision::kNo, Precision::kBF16, Precision::kFP16}, 3)) {
    const PrecisionPolicy policy =
        precision == Precision::kNo ? PrecisionPolicy::kAutocast : PrecisionPolicy::kPure;
    SCOPED_TRACE(static_cast<int>(precision));
    EXPECT_TRUE(outcomes(2, [&] { return by_file(kStage2, {.mixed_precision = precision}); }) ==
                outcomes(2, [&] {
                  return by_settings({.mixed_precision = precision,
                                      .precision_policy = policy,
                                      .sharding = Sharding::kZero2,
                                      .ddp = {.bucket_cap_mb = 4000.0 / 1048576}});
                }));
    EXPECT_TRUE(outcomes(2, [&] { return by_file(kStage3, {.mixed_precision = precision}); }) ==
                outcomes(2, [&] {
                  return by_settings({.mixed_precision = precision,
                                      .precision_policy = policy,
                                      .gradient_accumulation_steps = 2,
                                      .sharding = Sharding::kZero3});
                }));
  }
}

TEST(DeepSpeedRun, TakesPrecisionAndStepsFromTheFileWhereItSaysThem) {
  const std::string json =
      replaced(replaced(kStage3, R"("bf16": {"enabled": "auto"})", R"("bf16": {"enabled": true})"),
               R"("gradient_accumulation_steps": 2, )", "");
  // 12 = 2 samples x 3 steps x 2 ranks
  const std::string sized = replaced(
      replaced(json, R"("train_batch_size": "auto")", R"("train_batch_size": 12)"),
      R"("train_micro_batch_size_per_gpu": "auto")", R"("train_micro_batch_size_per_gpu": 2)");
  EXPECT_TRUE(outcomes(2, [&] { return by_file(sized, {}); }) == outcomes(2, [&] {
                return by_settings({.mixed_precision = Precision::kBF16,
                                    .precision_policy = PrecisionPolicy::kPure,
                                    .gradient_accumulation_steps = 3,
                                    .sharding = Sharding::kZero3});
              }));
}

// The templates that Accelerate ships differ in the stage, with fp16 said by the file.
TEST(DeepSpeedRun, TrainsByTheTemplateOfEachStage) {
  const auto in_fp16 = [](const char* json) {
    return replaced(json, R"("fp16": {"enabled": "auto")", R"("fp16": {"enabled": true)");
  };
  const auto settings = [](Sharding sharding) {
    return AcceleratorOptions{.mixed_precision = Precision::kFP16,
                              .precision_policy = PrecisionPolicy::kPure,
                              .sharding = sharding,
                              .ddp = {.bucket_cap_mb = 4000.0 / 1048576}};
  };
  for (const auto& [stage, sharding] : {std::pair{R"("stage": 1)", Sharding::kZero1},
                                        std::pair{R"("stage": 2)", Sharding::kZero2}}) {
    SCOPED_TRACE(stage);
    const std::string json = replaced(in_fp16(kStage2), R"("stage": 2)", stage);
    EXPECT_TRUE(outcomes(2, [&] { return by_file(json, {}); }) ==
                outcomes(2, [&] { return by_settings(settings(sharding)); }));
  }
  const std::string stage3 = replaced(in_fp16(kStage3), R"("gradient_accumulation_steps": 2)",
                                      R"("gradient_accumulation_steps": 1)");
  EXPECT_TRUE(outcomes(2, [&] { return by_file(stage3, {}); }) ==
              outcomes(2, [&] { return by_settings(settings(Sharding::kZero3)); }));
}

// Parts that already lie in memory of the host cannot be moved there: no rank trains without them.
TEST(DeepSpeedRun, OfATemplateThatOffloadsIsRefusedOnCpuRanks) {
  constexpr const char* kToHost = R"({"device": "cpu", "nvme_path": "/nvme", "pin_memory": true})";
  const std::string stage2 =
      replaced(kStage2, R"({"device": "none", "pin_memory": true})", kToHost);
  const std::string stage3 = replaced(kStage3, R"("offload_param": {"device": "none"})",
                                      std::string(R"("offload_param": )") + kToHost);
  for (const std::string& json : {stage2, stage3}) {
    compared_ranks(2, [&](int) {
      const std::string message = message_of<UnsupportedError>([&] { (void)by_file(json, {}); });
      EXPECT_TRUE(mentions(message, "move the model to a GPU")) << message;
    });
  }
}

// A rate that never moved, or a clip that never came, would hide in the comparisons above.
TEST(DeepSpeedRun, WarmsUpDecaysAndClips) {
  const Outcome clipped = outcomes(2, [] { return by_file(kStage2, {}); })[0];
  EXPECT_EQ(clipped.rates.front(), 0);
  EXPECT_FLOAT_EQ(*std::max_element(clipped.rates.begin(), clipped.rates.end()),
                  static_cast<float>(kLr));
  EXPECT_LT(clipped.rates.back(), static_cast<float>(kLr) / 2);
  const Outcome loose = outcomes(2, [] {
    return by_file(replaced(kStage2, R"("gradient_clipping": "auto")", R"("gradient_clipping": 0)"),
                   {});
  })[0];
  EXPECT_FALSE(clipped.values == loose.values);
}

// ---- gradient_clipping

TEST(GradientClipping, OfAProgramIsAtMostTheSettings) {
  const auto trained = [](std::optional<double> setting, std::optional<double> program,
                          Sharding sharding = Sharding::kZero2,
                          Precision precision = Precision::kNo) {
    return outcomes(2, [&] {
      Accelerator accelerator({.mixed_precision = precision,
                               .gradient_clipping = setting,
                               .seed = 5,
                               .sharding = sharding,
                               .loss_scale = {.init_scale = 1024},
                               .config_file = ""});
      Words model;
      optim::SGD optimizer(model.named_parameters(), {.lr = 0.5});
      optim::ConstantSchedule schedule(optimizer, {.factor = 1});
      return train(accelerator, model, optimizer, schedule, [&] {
        if (program) accelerator.clip_grad_norm(model.parameters(), *program);
      });
    })[0];
  };
  for (const auto& [sharding, precision] :
       {std::pair{Sharding::kDdp, Precision::kFP16}, std::pair{Sharding::kZero2, Precision::kNo},
        std::pair{Sharding::kFsdp, Precision::kFP16}}) {
    const Outcome tight = trained({}, 0.05, sharding, precision);
    EXPECT_TRUE(trained(0.05, {}, sharding, precision) == tight);
    EXPECT_TRUE(trained(0.05, 100, sharding, precision) == tight);
    EXPECT_TRUE(trained(100, 0.05, sharding, precision) == tight);
  }
  EXPECT_FALSE(trained({}, {}) == trained({}, 0.05));
  EXPECT_TRUE(trained(0, {}) == trained({}, {}));
}

// What the program clips at once belongs to several optimizers, or is measured in another norm: the
// setting's limit, which is of each optimizer's 2-norm, comes after it.
TEST(GradientClipping, ComesAfterAClipThatIsNotOfOneOptimizersTwoNorm) {
  const Line line(96);
  struct Clip {
    double max_norm, norm_type;
    bool of_both;
  };
  const auto plain = [&](const Clip& clip, double limit) {
    Net model;
    model.eval();  // no random numbers
    optim::SGD first(model.first.named_parameters(), {.lr = 0.1});
    optim::SGD second(model.second.named_parameters(), {.lr = 0.1});
    for (int64_t step = 0; step < 3; ++step) {
      const auto [x, y] = line.rows(32 * step, 32 * step + 32);
      squared_error(model(x), y).backward();
      const optim::ClipOptions options{.norm_type = clip.norm_type};
      const TensorList clipped = clip.of_both ? model.parameters() : model.first.parameters();
      optim::clip_grad_norm(clipped, clip.max_norm, options);
      optim::clip_grad_norm(model.first.parameters(), limit);
      optim::clip_grad_norm(model.second.parameters(), limit);
      first.step(), second.step();
      first.zero_grad(), second.zero_grad();
    }
    return values_of(model);
  };
  const auto facade = [&](const Clip& clip, double limit) {
    Accelerator accelerator({.gradient_clipping = limit, .config_file = ""});
    Net model;
    model.eval();  // no random numbers
    optim::SGD first(model.first.named_parameters(), {.lr = 0.1});
    optim::SGD second(model.second.named_parameters(), {.lr = 0.1});
    accelerator.prepare(model, first, second);
    for (int64_t step = 0; step < 3; ++step) {
      const auto scope = accelerator.accumulate(model);
      const auto [x, y] = line.rows(32 * step, 32 * step + 32);
      accelerator.backward(squared_error(model(x), y));
      const TensorList clipped = clip.of_both ? model.parameters() : model.first.parameters();
      accelerator.clip_grad_norm(clipped, clip.max_norm, clip.norm_type);
      first.step(), second.step();
      first.zero_grad(), second.zero_grad();
    }
    return values_of(model);
  };
  const double infinity = std::numeric_limits<double>::infinity();
  const auto with_seed = [](const auto& train, const Clip& clip, double limit) {
    manual_seed(4);
    return train(clip, limit);
  };
  for (const bool of_both : {true, false}) {
    for (const double norm_type : {2.0, 1.0, infinity}) {
      for (const double max_norm : {0.02, 0.2, 100.0}) {
        for (const double limit : {0.05, 0.5, 50.0}) {
          SCOPED_TRACE(testing::Message()
                       << of_both << " " << norm_type << " " << max_norm << " " << limit);
          const Clip clip{max_norm, norm_type, of_both};
          EXPECT_TRUE(near(with_seed(facade, clip, limit), with_seed(plain, clip, limit)));
        }
      }
    }
  }
}

// ---- What does not go together

AcceleratorOptions with(const std::string& json) {
  return {.deepspeed_config = json, .config_file = ""};
}

TEST(DeepSpeedRun, TakesNoOptimizerBesideTheFiles) {
  Net model;
  optim::AdamW own(model.named_parameters(), {});
  {
    Accelerator accelerator(with(R"({"optimizer": {"type": "AdamW"}})"));
    const std::string message = message_of<ConfigError>([&] { accelerator.prepare(model, own); });
    EXPECT_TRUE(mentions(message, "optimizer_from_config()")) << message;
  }
  {
    Accelerator accelerator(with(R"({"scheduler": {"type": "WarmupLR"}})"));
    optim::ConstantSchedule schedule(own, {});
    accelerator.prepare(model, own);
    const std::string message = message_of<ConfigError>([&] { accelerator.prepare(schedule); });
    EXPECT_TRUE(mentions(message, "schedule_from_config()")) << message;
    const auto taken = accelerator.schedule_from_config(own);
    accelerator.prepare(taken), accelerator.prepare(taken);
  }
  {
    Accelerator accelerator(with("{}"));
    EXPECT_THROW(accelerator.optimizer_from_config(model), ConfigError);
    EXPECT_THROW(accelerator.schedule_from_config(own), ConfigError);
    accelerator.prepare(own);
  }
  {
    Accelerator accelerator({.config_file = ""});
    const std::string message =
        message_of<ConfigError>([&] { accelerator.optimizer_from_config(model); });
    EXPECT_TRUE(mentions(message, "deepspeed_config_file")) << message;
  }
}

TEST(DeepSpeedRun, HasLoadersOfTheFilesBatchSize) {
  const auto trained = [](int ranks, const std::string& json, int64_t batch_size, bool splits) {
    compared_ranks(ranks, [&](int) {
      AcceleratorOptions options = with(json);
      options.split_batches = splits;
      Accelerator accelerator(options);
      Regression model;
      data::DataLoader<std::array<Tensor, 2>> loader(std::make_shared<Line>(24),
                                                     {.batch_size = batch_size});
      accelerator.prepare(model, loader);
      for (const auto& batch : loader) {
        const auto micro = accelerator.accumulate(model);
        accelerator.backward(loss_of(model, batch));
      }
    });
  };
  EXPECT_NO_THROW(trained(2, R"({"train_batch_size": 8})", 4, false));
  EXPECT_NO_THROW(trained(2, R"({"train_batch_size": 8})", 8, true));
  EXPECT_NO_THROW(trained(1, R"({"train_micro_batch_size_per_gpu": 5})", 5, false));
  const std::string message = message_of<ConfigError>([&] {
    trained(1, R"({"train_batch_size": 8, "gradient_accumulation_steps": 2})", 8, false);
  });
  EXPECT_TRUE(mentions(message,
                       "train_batch_size 8 = train_micro_batch_size_per_gpu 4 x "
                       "gradient_accumulation_steps 2 x 1 ranks"))
      << message;
  EXPECT_TRUE(mentions(message, "batches of 8")) << message;
  EXPECT_TRUE(mentions(message, "make its batch_size 4")) << message;
}

// Steps that change later are held against the file's sizes as those at the beginning are.
TEST(DeepSpeedRun, StepsThatTheProgramChangesStillMultiply) {
  const std::string full = R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4})";
  for (const std::string& json :
       {full, std::string(R"({"gradient_accumulation_steps": 1})"),
        std::string(R"({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4,
                        "gradient_accumulation_steps": 1})")}) {
    compared_ranks(2, [&](int) {
      Accelerator accelerator(with(json));
      Regression model;
      accelerator.prepare(model);
      const std::string message =
          message_of<ConfigError>([&] { accelerator.set_gradient_accumulation_steps(2); });
      EXPECT_TRUE(mentions(message, "gradient_accumulation_steps")) << message;
      EXPECT_THROW(accelerator.set_gradient_accumulation_steps(model, 2), ConfigError);
      EXPECT_EQ(accelerator.gradient_accumulation_steps(), 1);
      accelerator.set_gradient_accumulation_steps(1);
    });
  }
  // What the file leaves open follows.
  compared_ranks(1, [](int) {
    Accelerator accelerator(with(R"({"train_batch_size": 8})"));
    Regression model;
    data::DataLoader<std::array<Tensor, 2>> loader(std::make_shared<Line>(24), {.batch_size = 8});
    accelerator.prepare(model, loader);
    EXPECT_THROW(accelerator.set_gradient_accumulation_steps(model, 2), ConfigError);
    accelerator.set_gradient_accumulation_steps(2);
    const std::string message = message_of<ConfigError>([&] {
      for (const auto& batch : loader) {
        const auto micro = accelerator.accumulate(model);
        accelerator.backward(loss_of(model, batch));
      }
    });
    EXPECT_TRUE(mentions(message, "make its batch_size 4")) << message;
  });
  Accelerator open(with(R"({"train_micro_batch_size_per_gpu": 4})"));
  open.set_gradient_accumulation_steps(3);
  EXPECT_EQ(open.gradient_accumulation_steps(), 3);
}

TEST(DeepSpeedRun, SizesThatDoNotMultiplyEndItBeforeItBegins) {
  compared_ranks(2, [](int) {
    const std::string message = message_of<ConfigError>(
        [] { Accelerator accelerator(with(R"({"train_batch_size": 9})")); });
    EXPECT_TRUE(mentions(message, "which is 4.5")) << message;
  });
}

TEST(DeepSpeedRun, IsDescribedKeyByKey) {
  const Accelerator accelerator(
      with(R"({"train_batch_size": 8, "zero_optimization": {"overlap_comm": true}})"));
  const std::string text = accelerator.describe();
  for (const char* part :
       {"zero_optimization.overlap_comm: true", "always so", "train_batch_size 8 = "}) {
    EXPECT_TRUE(mentions(text, part)) << part << " in\n" << text;
  }
}

}  // namespace
}  // namespace tessera::test_deepspeed
