// What nlp_example and complete_nlp_example share: the tasks, the model to begin with, evaluation.
#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <tessera/accelerate/accelerator.h>
#include <tessera/data/dataloader.h>
#include <tessera/nn/models/bert.h>

#include "../common/classification.h"
#include "text_data.h"

namespace tessera::examples {

struct TaskOptions {
  std::string data, task = "intents", model, save;
  std::string mixed_precision, fp8_recipe, fp8_filter;  // empty: as the launch says
  int64_t epochs = 12, batch_size = 32, accumulate = 1, max_length = 64, train_rows = 0;
  int64_t width = 128, layers = 2, heads = 4;
  double lr = 1e-3, dropout = 0.1, weight_decay = 0.01;
  int64_t seed = 42;
  std::optional<int64_t> tp_size;  // unset: as the launch says

  void add_to(CLI::App& app);
  std::optional<Precision> precision() const;
  Fp8Options fp8() const;
  // Batches are as long as their longest text, which the ranks of sequence shards could not divide.
  std::optional<bool> tp_sequence() const {
    return tp_size.value_or(1) > 1 ? std::optional(false) : std::nullopt;
  }
};

struct Task {
  data::DatasetPtr<TextExample> train, validation;
  std::vector<std::string> labels;
};

// That of the model's folder where it has a vocabulary, else that of bert/ in the data.
data::WordPieceTokenizer make_tokenizer(const TaskOptions& options);

// "intents": the 77 intents of Banking77; "mrpc": do two sentences say the same; "qnli": does the
// sentence answer the question (every tenth validates: of QNLI only the development part is used).
Task read_task(const TaskOptions& options, const data::WordPieceTokenizer& tokenizer);

// From random weights, or options.model. ConfigError where that has another number of labels.
std::unique_ptr<nn::models::Bert> make_model(const TaskOptions& options, const Task& task,
                                             int64_t vocab_size, const Accelerator& accelerator);

// Each sample of a prepared loader once, over all ranks.
ClassificationScore evaluate(Accelerator& accelerator, nn::models::Bert& model,
                             data::DataLoader<TextExample>& loader);

// "  fp8_calls 96  fp8_fallbacks 2": of the linear layers of a prepared model in fp8, since it
// was prepared, on this rank; empty for other precisions.
std::string fp8_calls_of(const nn::models::Bert& model);

// F1 of the second of two classes, or the mean over all classes.
double f1_of(const ClassificationScore& score, const Task& task);

}  // namespace tessera::examples
