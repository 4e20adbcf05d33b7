// The parameters of a model by name and shape, without its code: from the headers of safetensors
// files, or from a program's report.
//
//     const ParameterList list = ParameterList::of_model(model);  // list.to_json() is the report
//     plan_training([&] { return training_of(list); }, {.ranks = 1024});
//
// training_of() makes a module like any other, in the tree of the names, so that the engine finds,
// gathers and reduces the repeated blocks. Its modules read their parameters in the order of the
// list and keep nothing: for such models a plan knows no activations and no operations. For a
// config.json planned_model.h makes the model itself.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <tessera/accelerate/plan/training_plan.h>

namespace tessera::accelerate {

struct ListedModule {
  std::string name;  // dotted, in the order of the forward
  std::vector<std::pair<std::string, Shape>> parameters;
  // A product with its weight: under autocast it reads 16-bit casts, and backward reads it again.
  // Others, tables and norms, are read as they are stored.
  bool product = false;
  std::string tied = {};     // the dotted name of a parameter that it reads in place of its weight
  int64_t buffer_bytes = 0;  // of index buffers, which no training cuts
};

struct ParameterList {
  std::string kind;                   // "Gpt", "2 safetensors files"
  std::string block_class = "Block";  // of modules whose name is a number, for fsdp_wrap_modules
  std::vector<ListedModule> modules = {};

  int64_t num_parameters() const;
  // Parameters that are no matrices of hidden layers: of tables, norms and the head.
  std::vector<std::string> not_by_muon() const;
  // What the modules of a model hold, in the order of construction. Products are those of
  // nn::Linear.
  static ParameterList of_model(nn::ModuleBase& model);
  // Names and shapes of the headers; of modules in the order of the first names.
  static ParameterList of_safetensors(const std::vector<std::string>& files);
  // {"modules": [{"name", "parameters": [["weight", [768, 768]]], ...}]}. FormatError names the
  // key.
  std::string to_json() const;
  static ParameterList parse(const std::string& text, const std::string& path);
  // "h.3", "embeddings": the block that a module is part of.
  static std::string block_of(const std::string& module);
};

// Inside of plan_training().
PlannedTraining training_of(const ParameterList& list);

}  // namespace tessera::accelerate
