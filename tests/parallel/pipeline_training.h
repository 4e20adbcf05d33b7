// Models that are trained by pipeline stages through the Accelerator, for tests.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/parallel.h>
#include <tessera/core/random.h>
#include <tessera/nn/container.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/models/bert.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/nn/models/llama.h>
#include <tessera/nn/norm.h>
#include <tessera/optim/optimizers.h>

#include "distributed/compared_ranks.h"

namespace tessera::test_pipeline {

using accelerate::PipelineOptions;
using distributed::compared_ranks;
using nn::models::Bert;
using nn::models::Gpt;
using nn::models::Llama;

constexpr int64_t kVocabulary = 52;  // which two ranks divide
constexpr int kSteps = 3;

struct Batch {
  Tensor inputs, targets;  // [2, 8]
};
inline Batch batch_of(int64_t number) {
  const RandomStream stream{5, static_cast<uint64_t>(number)};
  const Tensor tokens = randint(0, kVocabulary, {2, 9}, kI64, stream);
  return {tokens.narrow(1, 0, 8).contiguous(), tokens.narrow(1, 1, 8).contiguous()};
}

// What is trained: a model and its loss of a batch.
struct Training {
  std::unique_ptr<nn::ModuleBase> model;
  std::function<Tensor(const Batch& batch)> loss;
};
using MakeTraining = std::function<Training()>;

template <class Model>
Training training_of(std::unique_ptr<Model> model,
                     const std::function<Tensor(Model& model, const Batch& batch)>& loss) {
  Model& reference = *model;
  return {std::move(model),
          [&reference, loss](const Batch& batch) { return loss(reference, batch); }};
}
inline Training gpt(bool tied, double dropout = 0,
                    nn::models::Logits logits = nn::models::Logits::kAll) {
  manual_seed(1);
  return training_of<Gpt>(
      std::make_unique<Gpt>(nn::models::GptConfig{.vocab_size = kVocabulary,
                                                  .context = 16,
                                                  .width = 32,
                                                  .layers = 4,
                                                  .heads = 4,
                                                  .dropout = dropout,
                                                  .tied = tied}),
      [logits](Gpt& model, const Batch& b) { return model(b.inputs, b.targets, logits).loss; });
}
inline Training untied() { return gpt(false); }
inline Training llama() {
  manual_seed(1);
  return training_of<Llama>(
      std::make_unique<Llama>(nn::models::LlamaConfig{.vocab_size = kVocabulary,
                                                      .width = 32,
                                                      .inner = 24,
                                                      .layers = 4,
                                                      .heads = 4,
                                                      .kv_heads = 2,
                                                      .tied = false}),
      [](Llama& model, const Batch& b) { return model(b.inputs, b.targets).loss; });
}
inline Training bert() {
  manual_seed(1);
  return training_of<Bert>(
      std::make_unique<Bert>(nn::models::BertConfig{
          .vocab_size = kVocabulary, .width = 32, .layers = 4, .heads = 4, .context = 16}),
      [](Bert& model, const Batch& b) {
        nn::models::TokenFeatures features;
        features.attention_mask = ne(b.inputs, 7).to(kI64);
        return model(b.inputs, features, b.inputs.select(1, 0).remainder(2)).loss;
      });
}

// A block with running statistics.
struct NormedBlock : nn::Module<NormedBlock> {
  explicit NormedBlock(int64_t width)
      : fc(add<nn::Linear>("fc", width, width)), norm(add<nn::BatchNorm1d>("norm", width)) {}
  Tensor forward(const Tensor& x) { return norm(fc(x)) + x; }
  nn::Linear& fc;
  nn::BatchNorm1d& norm;
};
// A table, four blocks and a head.
template <class Block>
struct Stacked : nn::Module<Stacked<Block>> {
  Stacked()
      : embed(this->template add<nn::Embedding>("embed", kVocabulary, 16)),
        blocks(this->template add<nn::ModuleList>("blocks")),
        head(this->template add<nn::Linear>("head", 16, kVocabulary)) {
    for (int i = 0; i < 4; ++i) blocks.template append<Block>(16);
  }
  Tensor forward(const Tensor& tokens, const Tensor& targets) {
    Tensor x = embed(tokens).view({tokens.numel(), 16});
    for (size_t i = 0; i < blocks.size(); ++i) x = blocks.template at<Block>(i)(x);
    return cross_entropy(head(x), targets.reshape({targets.numel()}));
  }
  nn::Embedding& embed;
  nn::ModuleList& blocks;
  nn::Linear& head;
};
template <class Block>
Training stacked() {
  manual_seed(1);
  return training_of<Stacked<Block>>(
      std::make_unique<Stacked<Block>>(),
      [](Stacked<Block>& model, const Batch& b) { return model(b.inputs, b.targets); });
}
inline Training normed() { return stacked<NormedBlock>(); }

// Hooks that a window of one gradient or of several sums may call in any order.
inline void double_some_gradients(nn::ModuleBase& model) {
  const NamedTensors parameters = model.named_parameters();
  for (size_t i = 0; i < parameters.size(); i += 2) {
    register_hook(parameters[i].tensor, [](const Tensor& gradient) { return gradient * 2; });
  }
}

using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(const NamedTensors&)>;
// A large eps: a key's bias has no gradient but rounding, of which Adam would make steps.
inline std::unique_ptr<optim::Optimizer> adamw(const NamedTensors& parameters) {
  return std::make_unique<optim::AdamW>(parameters, optim::AdamW::Options{.lr = 1e-2, .eps = 1e-3});
}

// How it is trained.
struct Way {
  int pp = 1;
  int ranks = 0;  // 0: pp
  int stages_per_rank = 1;
  int64_t micro_batches = 4;
  distributed::PipelineSchedule schedule = distributed::PipelineSchedule::kOneFOneB;
  Sharding sharding = Sharding::kDdp;
  int tp = 1;
  bool sequence = true;  // with tp
  bool alike = false;    // batches count alike
  Precision precision = Precision::kNo;
  double init_scale = 65536;
  PipelineOptions options = {};
  MakeOptimizer optimizer = adamw;
  std::vector<double> weights = {};
  std::vector<std::vector<double>> weights_of_ranks = {};  // data-parallel ones
  bool zeroes = true;
  bool checkpoints = false;
  DType dtype = kF32;
  std::function<void(nn::ModuleBase& model)> change = {};
  std::function<void(nn::ModuleBase& model, int step)> before_step = {};
  int first = 0, last = kSteps;  // steps
  std::string load = {}, save = {};
};

using Values = std::map<std::string, std::vector<double>>;
struct Trained {
  std::vector<double> losses, norms, scales;
  std::vector<double> of_all;  // the losses of all data-parallel ranks, by their weights
  Values parameters;           // of rank 0
};

inline AcceleratorOptions settings_of(const Way& way) {
  AcceleratorOptions settings{.mixed_precision = way.precision,
                              .gradient_accumulation_steps = way.micro_batches,
                              .cpu = true};
  settings.loss_scale.init_scale = way.init_scale;
  settings.pp.size = way.pp;
  settings.pp.stages_per_rank = way.stages_per_rank;
  settings.pp.schedule = way.schedule;
  settings.fsdp.activation_checkpointing = way.checkpoints;
  settings.sharding = way.sharding;
  if (way.alike) settings.loss_weighting = LossWeighting::kHuggingFace;
  if (way.tp > 1) settings.tp_size = way.tp, settings.tp_sequence = way.sequence;
  return settings;
}

inline Trained train(const MakeTraining& make, const Way& way) {
  set_num_threads(1);
  Accelerator accelerator(settings_of(way));
  accelerator.set_seed(3);
  const Training training = make();
  training.model->to(way.dtype);
  if (way.change) way.change(*training.model);
  const auto optimizer = way.optimizer(training.model->named_parameters());
  Pipeline pipeline = accelerator.pipeline(*training.model, way.options);
  accelerator.prepare(*training.model, optimizer);
  if (!way.load.empty()) accelerator.load_state(way.load);
  Trained trained;
  const int64_t data_rank = accelerator.data_ranks().rank();
  const int64_t data_ranks = accelerator.data_ranks().size();
  for (int step = way.first; step < way.last; ++step) {
    if (way.before_step) way.before_step(*training.model, step);
    std::vector<Batch> window;
    for (int64_t micro = 0; micro < way.micro_batches; ++micro) {
      window.push_back(batch_of((step * way.micro_batches + micro) * data_ranks + data_rank));
    }
    const std::vector<double>& weights =
        way.weights_of_ranks.empty() ? way.weights
                                     : way.weights_of_ranks.at(static_cast<size_t>(data_rank));
    const Tensor loss = pipeline.step(window, training.loss, {.weights = weights});
    trained.losses.push_back(loss.item());
    double weight = weights.empty() ? 1 : 0;
    for (const double one : weights) weight += one;
    const Tensor sums = accelerator.reduce(tensor(std::vector{loss.item() * weight, weight}, kF64));
    trained.of_all.push_back(sums.select(0, 0).item() / sums.select(0, 1).item());
    trained.norms.push_back(accelerator.clip_grad_norm(training.model->parameters(), 0.5).item());
    optimizer->step();
    if (way.zeroes) optimizer->zero_grad();
    trained.scales.push_back(accelerator.loss_scale());
  }
  if (!way.save.empty()) accelerator.save_state(way.save);
  for (const auto& [name, tensor] : accelerator.get_state_dict(*training.model)) {
    trained.parameters[name] = tensor.to_vector();
  }
  return trained;
}

inline Trained train_alone(const MakeTraining& make, Way way) {
  way.pp = way.stages_per_rank = way.tp = 1;
  Trained trained;
  compared_ranks(1, [&](int) { trained = train(make, way); });
  return trained;
}

}  // namespace tessera::test_pipeline
