// The settings of checkpoints and logs.
#include <tessera/accelerate/settings/schema/row.h>

namespace tessera::accelerate {

std::vector<Setting> project_settings() {
  using S = Settings;
  using O = AcceleratorOptions;
  return {
      {.key = "project_dir",
       .field = field<&S::project_dir, &O::project_dir>,
       .help = "folder of checkpoints and logs"},
      {.key = "logging_dir",
       .field = field<&S::logging_dir, &O::logging_dir>,
       .help = "folder of trackers; without it project_dir"},
      {.key = "automatic_checkpoint_naming",
       .field = field<&S::automatic_checkpoint_naming, &O::automatic_checkpoint_naming>,
       .help = "save_state() names its folders checkpoints/checkpoint_0, _1, ..."},
      {.key = "total_limit",
       .field = field<&S::total_limit, &O::total_limit>,
       .help = "newest checkpoints that stay; 0: all",
       .least = 0,
       .most = 1e9},
      {.key = "keep_every",
       .field = field<&S::keep_every, &O::keep_every>,
       .help = "besides, checkpoints whose number is a multiple stay; 0: none",
       .least = 0,
       .most = 1e9},
      {.key = "keep_best",
       .field = field<&S::keep_best, &O::keep_best>,
       .help = "besides, so many checkpoints with the best metric stay",
       .least = 0,
       .most = 1e9},
      {.key = "larger_is_better",
       .field = field<&S::larger_is_better, &O::larger_is_better>,
       .help = "the best metric is the largest (an accuracy); else the least (a loss)"},
      {.key = "asynchronous_checkpoints",
       .field = field<&S::asynchronous_checkpoints, &O::asynchronous_checkpoints>,
       .help = "save_state() returns when the state is copied; a thread writes"},
      {.key = "log_with",
       .field = field<&S::log_with, &O::log_with>,
       .help = "trackers: jsonl, csv, tensorboard, all, or names that the program registers"},
  };
}

}  // namespace tessera::accelerate
