// Reads the files that tests/golden/generate.py writes.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include <tessera/core/safetensors.h>

namespace tessera::tests {

// tests/golden, wherever the tree is.
std::string golden_path(const std::string& name);
nlohmann::json golden_json(const std::string& name);

// Runs one case of ops_GROUP.json against ops_GROUP.safetensors; what is wrong with its values,
// dtypes and gradients, nothing where all is right.
std::vector<std::string> replay_op_case(const nlohmann::json& golden, const SafeTensorsFile& file);

}  // namespace tessera::tests
