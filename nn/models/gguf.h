// Llama-like models as GGUF, the one-file format of llama.cpp.
//
//     const auto llama = nn::models::Llama::from_pretrained("folder");
//     nn::models::save_gguf(*llama, "model.gguf", {.type = nn::models::GgufType::kQ8_0});
//
// The file has the model's sizes and weights with llama.cpp's names (version 3 of the format,
// https://github.com/ggml-org/ggml/blob/master/docs/gguf.md); it has no tokenizer, which whoever
// runs the model gives it. As there, vectors are f32, weights of norms that add 1 are written with
// the 1, and heads of queries and keys of Llama and Mistral are interleaved.
#pragma once

#include <string>

#include <tessera/nn/models/llama.h>

namespace tessera::nn::models {

enum class GgufType {
  kF32,
  kF16,
  kBF16,
  kQ8_0,  // 32 weights share an f16 scale, of which each is a multiple from -127 to 127
};
struct GgufOptions {
  GgufType type = GgufType::kF16;  // of matrices; kQ8_0 is f16 where a row is no multiple of 32
};
// The file appears whole or not at all. UnsupportedError names what the format has no field for: the
// rotary scaling dynamic, windows or rotations that differ between layers otherwise than the
// architecture says, biases of a perceptron. IoError.
void save_gguf(const Llama& model, const std::string& path, const GgufOptions& options = {});

}  // namespace tessera::nn::models
