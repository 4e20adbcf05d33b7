// What the fragments of the pages use without making it. Declared only: snippets are compiled,
// never linked.
#pragma once

#include <chrono>
#include <cstddef>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include <tessera.h>
#include <tessera/core/kernels/elementwise/elementwise.h>

namespace docs {

using namespace tessera;
using distributed::world;

// A model of tokens that gives its loss, as nn::models::Gpt.
struct GptConfig {};
struct GptOutput {
  Tensor logits, loss;
  double tokens = 0;
  void visit_tensors(auto&& visit) { visit(logits), visit(loss); }
};
struct Gpt : nn::Module<Gpt> {
  explicit Gpt(const GptConfig& config);
  std::vector<nn::ModuleBase*> blocks();
  GptOutput forward(const nn::TokenRows& inputs, const Tensor& targets = {});
};
struct EarlyStopping {
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);
};
struct Accuracy {
  void add(const Tensor& scores, const Tensor& targets);
};

extern const GptConfig config;
extern Gpt model, critic, generator;
extern optim::AdamW optimizer;
extern optim::CosineSchedule schedule;
extern Accelerator accelerator;
extern distributed::Replica replica;
extern data::RandomWindows dataset;
extern data::DataLoader<data::TokenExample> loader, train_loader, validation;
extern data::TokenExample batch;
extern std::vector<data::TokenExample> micro;
extern TensorList parameters;
extern Tensor x, y, loss, norm, ids, targets;
extern int64_t step, epoch, m;
extern std::string folder;
extern EarlyStopping early_stopping;
extern Accuracy metric;

// Of headers' examples.
using namespace std::chrono_literals;
extern distributed::Group& group;
extern distributed::ParallelDims dims;
extern const data::TokenArray tokens;
extern data::PackedDataset packed;
extern distributed::PipelineStage& stage;
extern nn::Linear dense, lm_head;
extern Tensor gradient, weight, residual, scale, predictions, losses, host;
extern TensorList tensors;
extern NamedTensors decayed, others;
extern const precision::Policy policy;
extern const AcceleratorOptions options;
extern const accelerate::TrainingState state;
extern const std::string id, token, path, header;
extern const std::vector<std::string> prompts;
extern std::vector<distributed::SaveItem> items;
extern int64_t begin, width;
extern const uint64_t seed;
extern EarlyStopping my_early_stopping;
extern nn::LayerNorm ln;
extern accelerate::LoaderPlan loaders;
extern ProcessControl ranks;
extern std::shared_ptr<data::IterableDataset<data::TokenExample>> stream;
extern const std::vector<std::byte> tensor_bytes;
extern const nlohmann::json settings_of_rank_0;
extern Tensor correct;
extern int64_t rows, buckets;
extern bool due;
struct Mlp : nn::Module<Mlp> {
  explicit Mlp(int64_t width);
  Tensor forward(const Tensor& x);
};
extern std::vector<std::unique_ptr<Mlp>> ensemble;
#define EXPECT_EQ(a, b) result((a) == (b))
Tensor block(const Tensor&);
void fill(const Tensor&);
void log_loss(double);
void use(auto&&...);
void evaluate(auto&&...);
void validate();
int build_or_read_cache(const std::string&);
void write_report();
void result(auto&&...);

double train(auto&&...);
void train_step(auto&&...);
void compute();

}  // namespace docs
