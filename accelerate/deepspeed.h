// The sections "optimizer" and "scheduler" of a DeepSpeed configuration (the setting
// deepspeed_config_file) as optimizers and schedules. Accelerate's counterparts are DummyOptim and
// DummyScheduler.
//
//     Accelerator accelerator({.deepspeed_config = "ds_zero2.json"});
//     Gpt model(config);
//     const auto optimizer = accelerator.optimizer_from_config(model, {.lr = 3e-4});
//     const auto schedule = accelerator.schedule_from_config(
//         *optimizer, {.warmup_num_steps = 100, .total_num_steps = 2000});
//     accelerator.prepare(model, optimizer, schedule, loader);
//
// The file's values count; values that are "auto" or missing come from the program's options. Two
// numbers that differ are a ConfigError.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/optim/optimizer.h>
#include <tessera/optim/schedule.h>

namespace tessera::accelerate {

struct DeepSpeedConfig;

// ---- DeepSpeed's schedules (deepspeed/runtime/lr_schedules.py): rules for optim::RuleSchedule.
// As in DeepSpeed the first step has the rate before its scheduler's first step
// (last_batch_iteration -1), so step s has the rate of its iteration s - 1. Groups' own rates count
// in WarmupCosineLR, and in WarmupLR without warmup_max_lr.

// From min_lr to max_lr in warmup_num_steps (at least 2), along a logarithm or a line, then max_lr.
struct WarmupLR {
  double warmup_min_lr = 0;
  std::optional<double> warmup_max_lr = {};  // default: the group's own rate
  int64_t warmup_num_steps = 1000;
  bool linear = false;  // warmup_type
  double rate(int64_t step, double base) const;
  void check() const;
};
// The same, then linearly down to min_lr at total_num_steps. warmup_max_lr is 0.001 by default,
// also for groups with other rates.
struct WarmupDecayLR {
  WarmupLR warmup = {};
  int64_t total_num_steps = 0;
  double rate(int64_t step, double base) const;
  void check() const;
};
// The group's own rate times a ratio: from warmup_min_ratio to 1, then half a cosine to
// cos_min_ratio at total_num_steps, where it stays.
struct WarmupCosineLR {
  double warmup_min_ratio = 0;
  int64_t warmup_num_steps = 1000;
  double cos_min_ratio = 0.0001;
  bool linear = false;
  int64_t total_num_steps = 0;
  double rate(int64_t step, double base) const;
  void check() const;
};
// min_lr * (1 + step_rate * interval), where interval is the number of steps in units of step_size,
// rounded down if staircase. Smith 2015.
struct LRRangeTest {
  double lr_range_test_min_lr = 1e-3;
  int64_t lr_range_test_step_size = 2000;
  double lr_range_test_step_rate = 1;
  bool lr_range_test_staircase = false;
  double rate(int64_t step, double base) const;
  void check() const;
};
// From cycle_min_lr to cycle_max_lr and back, along lines or in the given numbers of stairs, while
// momentum moves in the opposite direction; then down, if decay_step_size is not 0. Smith 2018. As
// in DeepSpeed the first step has cycle_min_mom, and the next is near cycle_max_mom.
struct DeepSpeedOneCycle {
  double cycle_min_lr = 0;
  double cycle_max_lr = 0;
  double decay_lr_rate = 0;
  int64_t cycle_first_step_size = 2000;
  std::optional<int64_t> cycle_second_step_size = {};    // default: as the first
  int64_t cycle_first_stair_count = 0;                   // 0: a line
  std::optional<int64_t> cycle_second_stair_count = {};  // default: as the first
  int64_t decay_step_size = 0;
  bool cycle_momentum = true;
  double cycle_min_mom = 0.8;
  double cycle_max_mom = 0.9;
  double decay_mom_rate = 0;
  double rate(int64_t step, double base) const;
  std::optional<double> momentum(int64_t step) const;
  void check() const;

 private:
  double scale(int64_t step) const;    // 0 to 1 and back
  double decayed(int64_t step) const;  // in units of decay_step_size
  bool is_over(int64_t step) const;
  int64_t length() const;
};

// ---- What the program says beside the file

// Values for the file's "auto" and for missing keys; Accelerate's DummyOptim.
struct ConfiguredOptimizerOptions {
  std::optional<double> lr = {};            // default 1e-3
  std::optional<double> weight_decay = {};  // default 0
  std::optional<std::array<double, 2>> betas = {};
  std::optional<double> eps = {};
};
// A group's own numbers have priority over the file's, as in torch's parameter groups.
struct ConfiguredGroup {
  NamedTensors parameters;
  std::optional<double> lr = {};
  std::optional<double> weight_decay = {};
};
struct ConfiguredScheduleOptions {
  std::optional<int64_t> warmup_num_steps = {};
  std::optional<int64_t> total_num_steps = {};  // optimizer updates
};

// From the file's section; ConfigError for a missing section, for an unknown type or parameter
// (with the nearest), for an invalid number. UnsupportedError for optimizers that only DeepSpeed
// has.
std::unique_ptr<optim::Optimizer> make_optimizer(const DeepSpeedConfig& config,
                                                 const std::vector<ConfiguredGroup>& groups,
                                                 const ConfiguredOptimizerOptions& options = {});
std::unique_ptr<optim::Schedule> make_schedule(const DeepSpeedConfig& config,
                                               optim::Optimizer& optimizer,
                                               const ConfiguredScheduleOptions& options = {});

}  // namespace tessera::accelerate
