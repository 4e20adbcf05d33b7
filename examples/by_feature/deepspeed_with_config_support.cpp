// Accelerate's example of the same name: a DeepSpeed configuration says how many ranks hold what,
// in which precision, with which optimizer and schedule. The program trains with what it says, goes
// on from a checkpoint and saves the model.
//
//     tessera launch -n 2 deepspeed_with_config_support FOLDER [ds_config.json]
//
// Without a file the two below run, and each has to have the numbers of the same training by
// settings of our own.
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include <tessera.h>

#include "curve.h"
#include "line.h"

using namespace tessera;
using accelerate::Sharding;

namespace {

constexpr const char* kStage2 = R"({
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                "warmup_num_steps": "auto", "total_num_steps": "auto"}},
  "zero_optimization": {"stage": 2, "allgather_partitions": true, "allgather_bucket_size": 2e8,
                        "overlap_comm": true, "reduce_scatter": true, "reduce_bucket_size": "auto",
                        "contiguous_gradients": true},
  "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 2000,
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
  "wall_clock_breakdown": false
})";
constexpr const char* kStage3 = R"({
  "bf16": {"enabled": true},
  "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
                "warmup_num_steps": "auto", "total_num_steps": "auto"}},
  "zero_optimization": {"stage": 3, "overlap_comm": true, "contiguous_gradients": true,
                        "sub_group_size": 1e9, "reduce_bucket_size": "auto",
                        "stage3_prefetch_bucket_size": "auto",
                        "stage3_param_persistence_threshold": "auto",
                        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
                        "stage3_gather_16bit_weights_on_model_save": true},
  "gradient_accumulation_steps": 2, "gradient_clipping": "auto", "steps_per_print": 2000,
  "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto",
  "wall_clock_breakdown": false
})";

constexpr int64_t kBatches = 24, kEpochs = 2;
constexpr double kRate = 1e-2, kDecay = 0.1;

// Biases do not decay.
std::vector<accelerate::ConfiguredGroup> groups_of(const nn::ModuleBase& model) {
  accelerate::ConfiguredGroup decayed, others;
  others.weight_decay = 0;
  for (const NamedTensor& named : model.named_parameters()) {
    (named.name.ends_with("bias") ? others : decayed).parameters.push_back(named);
  }
  return {decayed, others};
}

struct Trained {
  std::vector<std::vector<float>> parameters;
  float loss = 0;
  bool operator==(const Trained&) const = default;
};

template <class BeforeStep>
Trained train(Accelerator& accelerator, examples::Curve& model, optim::Optimizer& optimizer,
              optim::Schedule& schedule, const std::string& folder, const BeforeStep& before_step) {
  data::DataLoader loader(examples::make_line(accelerator.num_processes() * kBatches * 8),
                          {.batch_size = 8, .shuffle = true});
  accelerator.prepare(model, optimizer, schedule, loader);
  float sum = 0;
  for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
    sum = 0;
    for (auto& [x, y] : loader) {
      const auto micro = accelerator.accumulate(model);
      const Tensor loss = mse_loss(model(x), y);
      accelerator.backward(loss);
      before_step();
      optimizer.step(), schedule.step(), optimizer.zero_grad();
      sum += accelerator.gather(loss.detach().reshape({1})).mean().item<float>();
    }
    accelerator.save_state(folder + "/epoch");
  }
  accelerator.load_state(folder + "/epoch");  // on any number of ranks, in any mode
  accelerator.save_model(model, folder + "/model");
  return {examples::whole_parameters(model), sum / kBatches};
}

Trained by_file(const std::string& file, const std::string& folder) {
  Accelerator accelerator({.seed = 1, .deepspeed_config = file});
  examples::Curve model;
  const int64_t updates =
      kEpochs * kBatches / accelerator.settings().gradient_accumulation_steps.value;
  const auto optimizer =
      accelerator.optimizer_from_config(groups_of(model), {.lr = kRate, .weight_decay = kDecay});
  const auto schedule = accelerator.schedule_from_config(
      *optimizer, {.warmup_num_steps = 4, .total_num_steps = updates});
  return train(accelerator, model, *optimizer, *schedule, folder, [] {});
}

Trained by_settings(AcceleratorOptions options, const std::string& folder) {
  options.seed = 1;
  Accelerator accelerator(options);
  examples::Curve model;
  const int64_t updates =
      kEpochs * kBatches / accelerator.settings().gradient_accumulation_steps.value;
  const auto groups = groups_of(model);
  optim::AdamW optimizer({{groups[0].parameters, {.lr = kRate, .weight_decay = kDecay}},
                          {groups[1].parameters, {.lr = kRate, .weight_decay = 0}}});
  optim::RuleSchedule schedule(
      optimizer,
      accelerate::WarmupDecayLR{.warmup = {.warmup_max_lr = kRate, .warmup_num_steps = 4},
                                .total_num_steps = updates});
  return train(accelerator, model, optimizer, schedule, folder,
               [&] { accelerator.clip_grad_norm(model.parameters(), 1.0); });
}

}  // namespace

int main(int argc, char** argv) {
  bool good = true;
  const int failed = run(argc, argv, [&](std::span<const std::string> arguments) {
    const std::string folder = arguments.empty() ? "out/deepspeed" : arguments[0];
    const ProcessControl ranks;
    if (arguments.size() > 1) {
      ranks.print("mean loss of the last epoch: ", by_file(arguments[1], folder).loss);
      return;
    }
    const Trained stage2 = by_file(kStage2, folder);
    const Trained stage3 = by_file(kStage3, folder);
    good = stage2 == by_settings({.sharding = Sharding::kZero2}, folder) &&
           stage3 == by_settings({.mixed_precision = Precision::kBF16,
                                  .precision_policy = PrecisionPolicy::kPure,
                                  .gradient_accumulation_steps = 2,
                                  .sharding = Sharding::kZero3},
                                 folder) &&
           stage2.loss < 0.5F && stage3.loss < 0.5F;
    ranks.print("mean loss of the last epoch: stage 2 ", stage2.loss, ", stage 3 in bf16 ",
                stage3.loss);
    ranks.print(good ? "the same numbers as by settings of our own" : "other numbers");
  });
  return failed || !good;
}
