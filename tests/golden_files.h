// Reads the files that tests/golden/generate.py writes.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include <tessera/core/error.h>

#include "source_dir.h"

namespace tessera::tests {

// tests/golden of the tree that was built.
inline std::string golden_path(const std::string& name) {
  return std::string(source_dir()) + "/tests/golden/" + name;
}

inline nlohmann::json golden_json(const std::string& name) {
  std::ifstream file(golden_path(name));
  TS_CHECK_AS(IoError, file.good(), "golden", "cannot read '", golden_path(name),
              "'; run generate.py");
  return nlohmann::json::parse(file);
}

}  // namespace tessera::tests
