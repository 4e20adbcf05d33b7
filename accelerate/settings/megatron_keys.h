// Accelerate's keys for Megatron-LM, in its files (megatron_lm_config) and, in capitals, in the
// variables that its launcher exports, and what becomes of them: MegatronLMPlugin of
// https://github.com/huggingface/accelerate.
#pragma once

#include <span>
#include <string_view>

namespace tessera::accelerate {

// The switch of the variables, and Megatron's default of a key that this library does not share.
inline constexpr std::string_view kMegatronSwitch = "ACCELERATE_USE_MEGATRON_LM";
inline constexpr std::string_view kMegatronClipping = "1.0";

struct MegatronKey {
  std::string_view key;           // "megatron_lm_tp_degree"
  std::string_view setting = {};  // that it is, or no counterpart and why
  std::string_view why = {};
  std::string_view harmless = {};  // the value with which nothing is lost
  bool alters = false;             // another value means another training, which is refused
};
// `use_distributed_optimizer` has neither: true is the setting sharding=zero1, false the default.
inline constexpr std::string_view kMegatronShards = "megatron_lm_use_distributed_optimizer";

std::span<const MegatronKey> megatron_keys();

}  // namespace tessera::accelerate
