// A model for plans, from files on this machine: a config.json of transformers, files of weights,
// or a program's report.
//
//     const PlannedModel model = PlannedModel::read("config.json");
//     plan_training([&] { return model.training(4, 1024); }, {.ranks = 1024});
//
// For a config.json it is the model of nn/models on the meta device, with its real calls, memory
// and FLOPs. Files and reports give only parameters (parameter_list.h).
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <tessera/accelerate/plan/parameter_list.h>
#include <tessera/accelerate/plan/training_plan.h>

namespace tessera::accelerate {

// For a transformer; 0: not known.
struct ModelDimensions {
  int64_t width = 0, layers = 0, heads = 0, inner = 0, vocabulary = 0, kv_width = 0, context = 0;
  bool gated = false;
  int64_t head = 0;  // width of one head
};

struct PlannedModel {
  std::string kind;  // "gpt2", "2 safetensors files"
  ParameterList parameters;
  ModelDimensions dimensions = {};
  // For micro-batches of `batch` sequences of `length` tokens; without a batch there are no
  // activations. Inside of plan_training().
  std::function<PlannedTraining(int64_t batch, int64_t length)> training = {};

  // A config.json of bert, gpt2 or a kind of LlamaConfig (with the head that is trained), a
  // safetensors file, an index, a report, or a folder with one of them. IoError, FormatError that
  // names file and field, UnsupportedError for other models.
  static PlannedModel read(const std::string& path);
};

}  // namespace tessera::accelerate
