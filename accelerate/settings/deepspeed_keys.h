// The keys of a DeepSpeed configuration, and what becomes of each.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera::accelerate {

// What Accelerate makes where its switch is on and no file is named: stage 2 and clipping to 1
// where nobody says others, and DeepSpeed's own precision and loss scale. Its name in messages is
// that of the switch.
inline constexpr std::string_view kDeepSpeedWithoutFile =
    R"({"zero_optimization": {"stage": "auto"}, "gradient_clipping": "auto"})";
inline constexpr std::string_view kDeepSpeedSwitch = "ACCELERATE_USE_DEEPSPEED";

enum class ValueKind : uint8_t {
  kBool,
  kWhole,  // 5e8 is one
  kNumber,
  kText,
  kAny,      // also objects, whose keys are not looked at
  kSwitch,   // an object that does nothing while its "enabled" is not true
  kSection,  // an object of keys in this table
};

// What becomes of a key: it is `setting`; or there is nothing to do for any value (`note`); or for
// the `harmless` values alone, and others are refused. Keys with none of these are read by code of
// their own.
struct DeepSpeedKey {
  std::string_view path;
  ValueKind kind = ValueKind::kBool;
  std::string_view setting = {};
  std::string_view note = {};      // why nothing has to be done
  std::string_view harmless = {};  // values as JSON, with | between
  std::string_view refused = {};   // why others cannot be served
  bool automatic = false;          // "auto" is a value
};

// A type of the section "optimizer" or "scheduler".
struct DeepSpeedType {
  std::string_view name;          // in small letters
  std::string_view refused = {};  // why there is none of it
};
std::span<const DeepSpeedType> deepspeed_types(std::string_view section);

// Of all sections, in their order.
std::span<const DeepSpeedKey> deepspeed_key_table();
// By its path, "zero_optimization.stage", or an older name; null where there is none.
const DeepSpeedKey* find_key(std::string_view path);
// The key that was meant: first one of its own section, then the same word elsewhere; or "".
std::string nearest_path(std::string_view path);

}  // namespace tessera::accelerate
