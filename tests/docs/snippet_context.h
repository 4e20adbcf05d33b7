// What the fragments of the pages use without making it. Declared only: snippets are compiled,
// never linked.
#pragma once

#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <tessera.h>

namespace docs {

using namespace tessera;

// A model of tokens that gives its loss, as the Gpt of examples/gpt2.
struct GptConfig {};
struct GptOutput {
  Tensor logits, loss;
  double tokens = 0;
  void visit_tensors(auto&& visit) { visit(logits), visit(loss); }
};
struct Gpt : nn::Module<Gpt> {
  explicit Gpt(const GptConfig& config);
  GptOutput forward(const Tensor& inputs, const Tensor& targets = {});
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
extern distributed::Mesh mesh;
extern data::RandomWindows dataset;
extern data::DataLoader<data::TokenExample> loader, train_loader, validation;
extern data::TokenExample batch;
extern std::vector<data::TokenExample> micro;
extern TensorList parameters;
extern Tensor x, y, loss, norm, ids;
extern int64_t step, epoch, m;
extern std::string folder;
extern EarlyStopping early_stopping;
extern Accuracy metric;

void train(auto&&...);
void train_step(auto&&...);
void compute();

}  // namespace docs
