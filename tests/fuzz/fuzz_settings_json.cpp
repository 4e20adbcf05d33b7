#include <tessera/accelerate/settings/config.h>

#include "driver.h"

using namespace tessera;
using namespace tessera::accelerate;

FUZZ(text) {
  fuzz::feed([&] {
    Settings settings;
    for (const auto& [key, value] : parse_config(std::string(text), "input.json")) {
      assign(*find_setting(key), settings, value, {Source::kFile, "input.json"});
    }
    describe(settings, true);
    fuzz::feed([&] { check_consistent(settings); });
    const std::string json = config_json(settings);
    Settings again;
    for (const auto& [key, value] : parse_config(json, "again.json")) {
      assign(*find_setting(key), again, value, {Source::kFile, "again.json"});
    }
    fuzz::require(config_json(again) == json, "settings read as they were written");
  });
}
