#include <tessera/accelerate/settings/fsdp_words.h>

#include <tessera/accelerate/settings/letter_case.h>
#include <tessera/accelerate/settings/schema.h>
#include <tessera/core/error.h>

namespace tessera::accelerate {
namespace {

constexpr std::string_view kWords = "settings";

}  // namespace

const FsdpStrategy* find_fsdp_strategy(std::string_view text) {
  static constexpr FsdpStrategy kStrategies[] = {{"FULL_SHARD", "1", "fsdp"},
                                                 {"SHARD_GRAD_OP", "2", "fsdp", false},
                                                 {"NO_SHARD", "3", "ddp"},
                                                 {"HYBRID_SHARD", "4", "fsdp", true, true},
                                                 {"HYBRID_SHARD_ZERO2", "5", "fsdp", false, true}};
  for (const FsdpStrategy& strategy : kStrategies) {
    if (upper(text) == strategy.name || text == strategy.number) return &strategy;
  }
  return nullptr;
}

FsdpWrapPolicy parse_fsdp_wrap_policy(std::string_view source, std::string_view text) {
  const std::string policy = upper(text);
  if (policy == "TRANSFORMER_BASED_WRAP") return FsdpWrapPolicy::kTransformer;
  if (policy == "SIZE_BASED_WRAP") return FsdpWrapPolicy::kSize;
  if (policy == "NO_WRAP") return FsdpWrapPolicy::kNone;
  TS_THROW(ConfigError, kWords, source,
           " has to be TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP; got \"", text, "\"");
}

void read_fsdp_words(const FsdpWords& words,
                     const std::function<std::string(std::string_view word)>& spelling,
                     const std::function<void(std::string_view setting, std::string_view text,
                                              std::string_view word)>& put) {
  const auto said = [&](std::string_view word) -> std::string_view {
    const auto found = words.find(word);
    return found == words.end() ? std::string_view() : std::string_view(found->second);
  };
  const std::string_view version = said("version"), resharding = said("reshard_after_forward");
  TS_CHECK_AS(ConfigError, version.empty() || version == "1" || version == "2", kWords,
              spelling("version"), " has to be 1 or 2; got \"", version, "\"");

  // Version 1 has taken the strategy under this name, too.
  const bool reshards_by_strategy =
      version != "2" && find_fsdp_strategy(resharding) != nullptr && resharding != "1";
  std::string_view strategy_word = "sharding_strategy";
  const FsdpStrategy* strategy = nullptr;
  if (const std::string_view text = said("sharding_strategy"); version != "2" && !text.empty()) {
    strategy = find_fsdp_strategy(text);
    TS_CHECK_AS(ConfigError, strategy != nullptr, kWords, spelling("sharding_strategy"),
                " has to be ", kFsdpStrategies, "; got \"", text, "\"");
  }
  // Its launcher exports FULL_SHARD where nobody has said one.
  if (reshards_by_strategy && (strategy == nullptr || strategy->name == "FULL_SHARD")) {
    strategy = find_fsdp_strategy(resharding);
    strategy_word = "reshard_after_forward";
  }
  if (strategy != nullptr) put("sharding", strategy->sharding, strategy_word);
  if (strategy != nullptr && !strategy->reshards) {
    put("fsdp_reshard_after_forward", "false", strategy_word);
  } else if (!resharding.empty() && !reshards_by_strategy && version != "1") {
    put("fsdp_reshard_after_forward", resharding, "reshard_after_forward");
  }

  const std::string_view policy_text = said("auto_wrap_policy");
  const FsdpWrapPolicy policy =
      policy_text.empty() ? FsdpWrapPolicy::kUnsaid
                          : parse_fsdp_wrap_policy(spelling("auto_wrap_policy"), policy_text);
  const std::string_view classes = said("transformer_cls_to_wrap"), least = said("min_num_params");
  const bool by_class = policy == FsdpWrapPolicy::kTransformer || policy == FsdpWrapPolicy::kUnsaid;
  const bool by_size = policy == FsdpWrapPolicy::kSize ||
                       (policy == FsdpWrapPolicy::kUnsaid && least != kFsdpMinNumParams);
  const std::string offload = upper(said("activation_checkpointing_offload"));
  TS_CHECK_AS(UnsupportedError, offload.empty() || offload == "FALSE" || offload == "0", kWords,
              spelling("activation_checkpointing_offload"),
              " asks for inputs of checkpointed modules in host memory, which is not available; "
              "leave it out");

  // A model that is not sharded has units for recomputation alone.
  const std::string_view recompute = said("activation_checkpointing");
  const bool recomputes =
      !recompute.empty() && parse_bool(spelling("activation_checkpointing"), recompute);
  if (strategy != nullptr && strategy->sharding == "ddp" && !recomputes) return;
  if (policy == FsdpWrapPolicy::kNone) put("fsdp_wrap_modules", "none", "auto_wrap_policy");
  if (by_class && !classes.empty()) put("fsdp_wrap_modules", classes, "transformer_cls_to_wrap");
  if (by_size && !least.empty()) put("fsdp_min_num_params", least, "min_num_params");
}

}  // namespace tessera::accelerate
