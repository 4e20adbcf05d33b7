#include <tessera/accelerate/settings/deepspeed_config.h>

#include "driver.h"

using namespace tessera;
using namespace tessera::accelerate;

// What a file says can be applied, written and read again, and sizes that are given multiply.
FUZZ(text) {
  fuzz::feed([&] {
    const DeepSpeedConfig config = parse_deepspeed_config(std::string(text), "input.json");
    const Import import = config.import();
    import.report();
    import.refusals();
    const std::string json = config_json(import.settings);
    Settings again;
    for (const auto& [key, value] : parse_config(json, "again.json")) {
      assign(*find_setting(key), again, value, {Source::kFile, "again.json"});
    }
    fuzz::require(config_json(again) == json,
                  "settings that a file said read as they were written");
    fuzz::feed([&] {
      const BatchSizes sizes = batch_sizes(config, import.settings, 3);
      fuzz::require(!sizes.train || !sizes.micro || *sizes.train == *sizes.micro * sizes.steps * 3,
                    "train = micro * steps * ranks");
    });
  });
}
