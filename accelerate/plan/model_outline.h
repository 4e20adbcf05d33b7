// A model by the names and shapes of its parameters, for plans of models whose code is not here: of
// a transformers config.json, of the headers of safetensors files, or of a report that a program
// has written.
//
//     const ModelOutline outline = ModelOutline::of_config("config.json");
//     plan_training([&] { return training_of(outline, {.tokens = 4096}); }, {.ranks = 1024});
//
// What training_of() makes is a module like any other, in the tree that the names say, so that the
// engine finds the blocks that repeat, gathers and reduces them. Its ops stand for those of the
// model: each reads the parameters of a module in the order of the list, gives a tensor of
// [tokens, width], keeps for backward as much as the real op would, and its backward brings the
// gradients. tests/accelerate/test_training_plan.cpp holds outlines against the models of the
// examples.
//
// Activations are an estimate, of what a layer of ours keeps: inputs of norms and products,
// queries, keys and values, attention's result and its statistics, the inner values of the
// feed-forward part as on a CPU (a GPU keeps what its activation gives as well, and fused ops keep
// theirs under activation checkpointing); no tokens x tokens, as attention is computed in tiles,
// and no logits, but the gradient of the head's weight, as a head is fused with the loss.
// Operations are those of products with weights; attention's own, a share of tokens / (6 width) of
// a layer's, are left out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <tessera/accelerate/plan/training_plan.h>

namespace tessera::accelerate {

// How ops read a module's parameters.
enum class OutlineRead : uint8_t {
  kAsStored,   // tables, norms
  kProduct,    // under autocast as 16-bit casts; backward reads the weight again
  kActivated,  // with its activation, which backward makes again from weight and bias
  kHead,       // with the loss: forward makes the gradients
};

struct OutlineModule {
  std::string name;  // dotted, in the order of the forward
  std::vector<std::pair<std::string, Shape>> parameters;
  OutlineRead read = OutlineRead::kAsStored;
  double kept = 0;           // elements a token that backward reads, in the dtype of computing
  double kept_bytes = 0;     // bytes a token, whatever that is
  double kept_fused = 0;     // elements a token that no activation checkpointing lets go
  int64_t kept_once = 0;     // elements, however many tokens there are
  std::string tied = {};     // the dotted name of a parameter that it reads in place of its weight
  std::string block = {};    // that it is part of; empty: block_of(name)
  int64_t buffer_bytes = 0;  // of index buffers, which no training cuts
};

// Of a transformer; 0: not known.
struct OutlineDimensions {
  int64_t width = 0, layers = 0, heads = 0, inner = 0, vocabulary = 0, kv_width = 0, context = 0;
  bool gated = false;
};

struct ModelOutline {
  std::string kind;                   // "gpt2", "2 safetensors files"
  std::string block_class = "Block";  // of modules whose name is a number, for fsdp_wrap_modules
  std::vector<OutlineModule> modules = {};
  OutlineDimensions dimensions = {};

  int64_t num_parameters() const;
  // Parameters that are no matrices of hidden layers: of tables, norms and the head.
  std::vector<std::string> not_by_muon() const;
  // A report of a model that stands: what its modules hold, in the order of construction. Products
  // are those of nn::Linear. Activations are not in it.
  static ModelOutline of_model(nn::ModuleBase& model);
  // What read() reads: {"modules": [{"name", "parameters": [["weight", [768, 768]]], ...}]}.
  std::string to_json() const;
  static ModelOutline parse(const std::string& text, const std::string& path);
  // "h.3", "embeddings": the block that a module is part of.
  static std::string block_of(const std::string& module);

  // A config.json of bert, gpt2, llama, mistral, qwen2 or qwen3. `trains`: with the head that is
  // trained (BertForSequenceClassification with the config's labels), as the models of the examples
  // have it; else the parameters of transformers' base model, whose size is spoken of. Throws
  // IoError, FormatError that names file and key, UnsupportedError for other models.
  static ModelOutline of_config(const std::string& path, bool trains = true);
  // Names and shapes of the headers; of modules in the order of the first names.
  static ModelOutline of_safetensors(const std::vector<std::string>& files);
  // One of these, a report, an index, or a folder with one of them.
  static ModelOutline read(const std::string& path, bool trains = true);
};

struct OutlineTrainingOptions {
  int64_t tokens = 0;  // of a micro-batch; 0: no activations
};
// Inside of plan_training().
PlannedTraining training_of(const ModelOutline& outline,
                            const OutlineTrainingOptions& options = {});

}  // namespace tessera::accelerate
