// The keys of a DeepSpeed configuration, and how each is handled.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera::accelerate {

// What Accelerate uses if its switch is on and no file is named: stage 2 and clipping to 1 unless
// set elsewhere, and DeepSpeed's own precision and loss scale. Messages name it after the switch.
inline constexpr std::string_view kDeepSpeedWithoutFile =
    R"({"zero_optimization": {"stage": "auto"}, "gradient_clipping": "auto"})";
inline constexpr std::string_view kDeepSpeedSwitch = "ACCELERATE_USE_DEEPSPEED";

enum class ValueKind : uint8_t {
  kBool,
  kWhole,  // 5e8 counts as one
  kNumber,
  kText,
  kAny,      // also objects, whose keys are ignored
  kSwitch,   // an object without effect unless its "enabled" is true
  kSection,  // an object of keys in this table
};

// How a key is handled: it is `setting`; or any value needs nothing (`note`); or only the
// `harmless` values do, and others are refused. Keys with none of these have their own code.
struct DeepSpeedKey {
  std::string_view path;
  ValueKind kind = ValueKind::kBool;
  std::string_view setting = {};
  std::string_view note = {};      // why nothing has to be done
  std::string_view harmless = {};  // values as JSON, with | between
  std::string_view refused = {};   // why others are not supported
  bool automatic = false;          // "auto" is allowed
};

// A type of the section "optimizer" or "scheduler".
struct DeepSpeedType {
  std::string_view name;          // in small letters
  std::string_view refused = {};  // why it is not supported
};
std::span<const DeepSpeedType> deepspeed_types(std::string_view section);

// The keys of all sections, in their order.
std::span<const DeepSpeedKey> deepspeed_key_table();
// Found by path, "zero_optimization.stage", or an older name; null if unknown.
const DeepSpeedKey* find_key(std::string_view path);
// The nearest key: first in its own section, then the same word elsewhere; or "".
std::string nearest_path(std::string_view path);

}  // namespace tessera::accelerate
