// One training as a set of choices: drawn from a seed, written as a line, read from one, made simpler.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <tessera/accelerate/settings/settings.h>

namespace tessera::compositions {

enum class Numbers : uint8_t { kF64, kF32, kBF16, kFP16 };
enum class Weights : uint8_t { kEqual, kUnequal, kSomeZero };
enum class OptimizerKind : uint8_t {
  kSgd,
  kMomentum,
  kAdamW,
  kAdam,
  kRmsprop,
  kAdagrad,
  kLion,
  kAdamax,
  kNAdam,
  kAdadelta,
};
enum class ScheduleKind : uint8_t { kNone, kCosine, kStep, kWarmup };
// What `clip` bounds: a norm of all gradients (Euclid's or the greatest), that of every other parameter,
// or each element.
enum class ClipKind : uint8_t { kNorm, kGreatest, kSome, kValue };

// The ranks of a part of the training, and what they hold.
struct Setup {
  int64_t ranks = 1;
  int64_t replicas = 1;    // HSDP: dp_replicate_size
  int64_t accumulate = 1;  // micro-batches of a window on each rank
  accelerate::Sharding sharding = accelerate::Sharding::kDdp;
  friend bool operator==(const Setup&, const Setup&) = default;
};

// Numbers of windows count from 0; -1: never.
struct Composition {
  uint64_t seed = 0;  // of initial values, and of what is drawn for each micro-batch
  int64_t windows = 4;
  Setup first = {}, second = {};
  int64_t resume_at = -1;  // before this window all is saved, and `second` goes on
  Numbers numbers = Numbers::kF64;
  PrecisionPolicy policy = PrecisionPolicy::kAutocast;  // of 16 bits
  int64_t overflow_at = -1;                             // fp16: a loss of this window is infinite
  Weights weights = Weights::kEqual;
  int64_t weightless = -1;  // nothing counts in this window
  double clip = 0;          // the bound; 0: none
  ClipKind clip_kind = ClipKind::kNorm;
  OptimizerKind optimizer = OptimizerKind::kSgd;
  bool groups = false;  // the second half of the parameters has another rate, and decay
  ScheduleKind schedule = ScheduleKind::kNone;
  bool ema = false;
  int64_t freeze_at = -1, thaw_at = -1;  // of one part, before that window; 0: before prepare()
  int64_t part = 0;
  bool adapters = false;
  bool recompute = false;
  bool hooks = false;
  int64_t left_out = -1;         // no step in this window
  bool keeps_gradients = false;  // nor is anything cleared
  int64_t short_window = -1;     // one micro-batch on each rank
  bool early = false;            // the optimizer is made before prepare()
  int64_t written_at = -1;       // before this window the program writes to all parameters
  int64_t rated_at = -1;         // ... and to the rate of every group
  int64_t looked_at = -1;        // amid this window the model is evaluated
  bool two_losses = false;       // each micro-batch has two backwards
  bool clears_first = false;  // zero_grad() stands in front of each backward, not behind the step
  friend bool operator==(const Composition&, const Composition&) = default;

  const Setup& setup_at(int64_t window) const {
    return resume_at >= 0 && window >= resume_at ? second : first;
  }
};

Composition draw(uint64_t seed);

// "seed=7 windows=4 ranks=2 sharding=fsdp ...": what is not said is as Composition has it. parse()
// throws ConfigError for a word that is none.
std::string describe(const Composition& composition);
Composition parse(std::string_view text);

// The same with one choice less each.
std::vector<Composition> simpler(const Composition& composition);

}  // namespace tessera::compositions
