#include <tessera/core/io/zip_reader.h>

#include "driver.h"

using namespace tessera;

FUZZ(text) {
  fuzz::feed([&] {
    uint64_t bytes = 0;
    for (const ZipEntry& entry :
         read_zip_entries(std::as_bytes(std::span(text.data(), text.size())), "input")) {
      fuzz::require(entry.begin <= entry.end && entry.end <= text.size(), "an entry is within");
      bytes += entry.end - entry.begin;
    }
    fuzz::require(bytes <= text.size(), "no byte twice");
  });
}
