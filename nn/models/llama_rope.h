// How positions turn, in config.json: rope_parameters (transformers 5) or rope_scaling (4).
#pragma once

#include <nlohmann/json.hpp>

#include <tessera/nn/models/config_reader.h>
#include <tessera/nn/models/llama_config.h>

namespace tessera::nn::models {

// Sets rotary, rotated and window_rotary; the rest is set already. FormatError, UnsupportedError.
void read_rope(const ConfigReader& reader, LlamaConfig& config);
// The fields for both versions.
nlohmann::json written_rope(const LlamaConfig& config);

}  // namespace tessera::nn::models
