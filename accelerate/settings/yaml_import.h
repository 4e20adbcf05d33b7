// Settings from the YAML files of HuggingFace Accelerate, of all their generations (0.11 to today).
//
// Every key of the file is accounted for: it became a setting, it says what is the default anyway,
// it stands for something that this version does not have yet, or it has no counterpart and the
// note says what takes its place. Keys that Accelerate does not know are a ConfigError that lists
// all of them.
#pragma once

#include <string>

#include <tessera/accelerate/settings/import_report.h>

namespace tessera::accelerate {

// IoError, FormatError (no YAML, no map), ConfigError: see above, and values that cannot be.
Import import_accelerate(const std::string& path);
// The same from the text of a file named `path`.
Import import_accelerate_text(const std::string& text, const std::string& path);

}  // namespace tessera::accelerate
