#include <tessera/data/jsonl.h>

#include "driver.h"

using namespace tessera;
using namespace tessera::data;

FUZZ(text) {
  fuzz::feed([&] {
    JsonlReader reader(text, "input");
    while (const std::optional<JsonRecord> record = reader.next()) {
      for (const std::string& field : record->fields()) {
        fuzz::feed([&] { record->text(field); });
        fuzz::feed([&] { record->integer(field); });
        fuzz::feed([&] { record->number(field); });
        fuzz::feed([&] { record->boolean(field); });
        fuzz::feed([&] { record->texts(field); });
        fuzz::feed([&] { record->integers(field); });
      }
    }
  });
}
