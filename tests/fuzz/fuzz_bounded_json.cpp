// What is read can be copied and shown: both call themselves for each level.
#include <tessera/core/io/bounded_json.h>

#include "driver.h"

using namespace tessera;

FUZZ(text) {
  fuzz::feed([&] {
    const nlohmann::json json = parse_bounded_json(text, "input");
    const nlohmann::json copy = json;
    if (!copy.is_discarded()) fuzz::require(!copy.dump().empty(), "a value can be shown");
  });
}
