// Settings from the YAML files of HuggingFace Accelerate, of all their generations (0.11 to today).
//
// Every key of the file is accounted for: it becomes a setting, equals a default, stands for
// something that is planned, or has no counterpart, and the note names a replacement. Keys that
// Accelerate does not know are a ConfigError that lists all of them.
#pragma once

#include <string>

#include <tessera/accelerate/settings/import_report.h>

namespace tessera::accelerate {

// IoError, FormatError (not YAML, not a map), ConfigError: see above, and invalid values.
Import import_accelerate(const std::string& path);
// The same from the text of a file named `path`.
Import import_accelerate_text(const std::string& text, const std::string& path);

}  // namespace tessera::accelerate
