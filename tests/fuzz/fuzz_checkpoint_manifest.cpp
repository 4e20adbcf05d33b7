#include <string>

#include <tessera/distributed/checkpoint/manifest.h>

#include "driver.h"

using namespace tessera;

// The checksum in front is made right, so that the fuzzer meets the parser behind it; and once the
// text as it is.
FUZZ(text) {
  fuzz::feed([&] { distributed::parse_manifest(text, "manifest.json"); });
  for (const bool complete : {false, true}) {
    fuzz::feed([&] {
      const distributed::Manifest manifest =
          distributed::parse_manifest(distributed::sealed(text), "manifest.json", complete);
      for (const auto& [name, tensor] : manifest.tensors) {
        for (const auto& chunk : tensor.chunks) {
          fuzz::require(distributed::lies_within(chunk.box, tensor.shape), "boxes lie within");
          fuzz::require(chunk.offset + chunk.length <= manifest.files.at(chunk.file).bytes,
                        "chunks lie in their file");
        }
      }
      // What was accepted is written and read as the same.
      const std::string again = distributed::manifest_text(manifest);
      fuzz::require(distributed::manifest_text(
                        distributed::parse_manifest(again, "manifest.json", complete)) == again,
                    "a manifest survives writing and reading");
    });
  }
}
