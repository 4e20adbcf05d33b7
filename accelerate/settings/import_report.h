// How each key of another library's file was handled: Accelerate's YAML, DeepSpeed's JSON.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/accelerate/settings/settings.h>

namespace tessera::accelerate {

enum class ImportOutcome : uint8_t {
  kMapped,         // became a setting
  kPlanned,        // became a setting that is not available yet: a training with it is an error
  kUnset,          // empty, or the default
  kNoCounterpart,  // nothing was written for it, and training is the same
  kRefused,        // nothing can be written for it, and training would differ
};

struct ImportLine {
  std::string key;  // "fsdp_config.fsdp_offload_params"
  std::string value;
  ImportOutcome outcome = ImportOutcome::kMapped;
  std::string note;  // "ranks = 4"; why there is no counterpart
};

struct Import {
  Settings settings;              // with the origin of the YAML file
  std::vector<ImportLine> lines;  // in the order of the file
  int fsdp_version = 0;           // of its fsdp_config; 0: none
  std::string report() const;     // one line a key
  // The lines that are kRefused or kPlanned: "mixed_precision: fp8 (why); ...". Empty: training
  // with these settings is what the file describes.
  std::string refusals() const;
};

}  // namespace tessera::accelerate
