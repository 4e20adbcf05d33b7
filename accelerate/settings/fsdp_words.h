// Accelerate's words for sharding, in the variables that its launcher exports, its flags and its
// files, and their combined meaning as settings.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

namespace tessera::accelerate {

struct FsdpStrategy {
  std::string_view name, number;  // 0.11 to 0.20 wrote the number
  std::string_view sharding;
  bool reshards = true;
  bool hybrid = false;
};
// "FULL_SHARD", "full_shard", "1"; null if unknown.
const FsdpStrategy* find_fsdp_strategy(std::string_view text);
// The names, for messages.
inline constexpr std::string_view kFsdpStrategies =
    "FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2";

enum class FsdpWrapPolicy {
  kUnsaid,       // units follow the settings
  kTransformer,  // classes; without any the default
  kSize,
  kNone,  // the whole model is one unit
};
// ConfigError that begins with `source`.
FsdpWrapPolicy parse_fsdp_wrap_policy(std::string_view source, std::string_view text);

// The number that Accelerate's launcher exports by default.
inline constexpr std::string_view kFsdpMinNumParams = "100000000";

// Values by word without its prefix: "sharding_strategy", "reshard_after_forward". Empty values
// count as missing.
using FsdpWords = std::map<std::string, std::string, std::less<>>;
// Calls `put(setting, text, word)` for what follows from several words: `sharding`,
// `fsdp_reshard_after_forward`, `fsdp_wrap_modules`, `fsdp_min_num_params`. In version 1 the
// strategy decides about resharding, in version 2 reshard_after_forward does. ConfigError and
// UnsupportedError name the word as `spelling(word)` gives it.
void read_fsdp_words(const FsdpWords& words,
                     const std::function<std::string(std::string_view word)>& spelling,
                     const std::function<void(std::string_view setting, std::string_view text,
                                              std::string_view word)>& put);

}  // namespace tessera::accelerate
