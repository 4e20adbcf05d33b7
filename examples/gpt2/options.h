// What train is told on its command line.
#pragma once

#include <cstdint>
#include <string>

namespace tessera::examples {

struct TrainOptions {
  std::string data, tokenizer = "bytes", tokenizer_files, dtype = "f32", device = "cpu";
  std::string fp8_recipe = "tensorwise", fp8_filter = "default";
  std::string sharding;  // empty: as the launch says
  int64_t tp_size = 0;   // 0: as the launch says
  std::string optimizer = "adamw", states = "f32";
  int64_t layers = 4, width = 128, heads = 4, context = 64;
  int64_t batch_size = 12, accumulate = 1, steps = 2000, warmup = 100, eval_every = 250;
  int64_t schedule_steps = 0;  // 0: steps
  int64_t stop_at = 0, save_every = 0, log_every = 1;
  int64_t pp_size = 1, pp_stages_per_rank = 1;
  std::string pp_schedule = "1f1b";
  double lr = 1e-3, min_lr = 1e-4, beta1 = 0.9, beta2 = 0.99, weight_decay = 0.1, clip = 1;
  double muon_lr = 0.02, dropout = 0;
  bool graph = false, deterministic = false;
  uint64_t seed = 1337;
  int threads = 0;  // 0: as the environment says
  std::string save, resume, init_from, log;

  // Where a saved folder has the checkpoint to go on from.
  static std::string checkpoint_in(const std::string& folder) { return folder + "/training"; }
  // What a resumed run takes over unless a flag says otherwise, for options.json of the checkpoint.
  std::string resumed_text() const;
};

// With --resume what the checkpoint says stands where no flag does. Help and mistakes of the
// command line end the process. ConfigError for a folder without a checkpoint, FormatError for one
// that is damaged.
TrainOptions parse_options(int argc, char** argv);

}  // namespace tessera::examples
