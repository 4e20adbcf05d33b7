#include <tessera/accelerate/settings/config.h>
#include <tessera/accelerate/settings/yaml_import.h>

#include "driver.h"

using namespace tessera;
using namespace tessera::accelerate;

// What is imported can be written, and read again it is the same.
FUZZ(text) {
  fuzz::feed([&] {
    const Import import = import_accelerate_text(std::string(text), "input.yaml");
    import.report();
    import.refusals();
    const std::string json = config_json(import.settings);
    Settings again;
    for (const auto& [key, value] : parse_config(json, "again.json")) {
      assign(*find_setting(key), again, value, {Source::kFile, "again.json"});
    }
    fuzz::require(config_json(again) == json,
                  "settings that were imported read as they were written");
  });
}
