// Small GPT-2, Llama and BERT for tests of models that several ranks calculate together, beside one
// process.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <tessera/core/random.h>
#include <tessera/distributed/mesh/dtensor.h>
#include <tessera/nn/models/bert.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/nn/models/llama.h>
#include <tessera/optim/optimizers.h>

namespace tessera::distributed {

// A vocabulary that does not divide.
inline constexpr nn::models::GptConfig kTiny{
    .vocab_size = 51, .context = 16, .width = 32, .layers = 2, .heads = 4};

struct Batch {
  Tensor inputs, targets;  // [2, 8]
};
inline Batch batch_of(int number) {
  const RandomStream stream{5, static_cast<uint64_t>(number)};
  const Tensor tokens = randint(0, kTiny.vocab_size, {2, 9}, kI64, stream);
  Batch batch{tokens.narrow(1, 0, 8).contiguous(), tokens.narrow(1, 1, 8).contiguous()};
  batch.targets.select(1, 3).fill_(-100);
  return batch;
}

// What is trained: a model and its loss of a batch.
struct Training {
  std::unique_ptr<nn::ModuleBase> model;
  std::function<Tensor(const Batch& batch)> loss;
};
template <class Model>
Training training_of(std::unique_ptr<Model> model, DType dtype,
                     const std::function<Tensor(Model& model, const Batch& batch)>& loss) {
  model->to(dtype);
  Model& reference = *model;
  return {std::move(model),
          [&reference, loss](const Batch& batch) { return loss(reference, batch); }};
}
inline std::unique_ptr<nn::models::Gpt> tiny_model(const nn::models::GptConfig& config = kTiny) {
  manual_seed(1);
  auto model = std::make_unique<nn::models::Gpt>(config);
  model->to(kF64);
  return model;
}
inline Training gpt_of(const nn::models::GptConfig& config, DType dtype = kF64,
                       nn::models::Logits logits = nn::models::Logits::kWithoutLoss) {
  return training_of<nn::models::Gpt>(tiny_model(config), dtype,
                                      [logits](nn::models::Gpt& model, const Batch& b) {
                                        return model(b.inputs, b.targets, logits).loss;
                                      });
}
inline Training gpt() { return gpt_of(kTiny); }
inline Training llama_of(int64_t kv_heads, DType dtype = kF64, bool head_norms = false) {
  manual_seed(1);
  auto model =
      std::make_unique<nn::models::Llama>(nn::models::LlamaConfig{.vocab_size = 51,
                                                                  .width = 32,
                                                                  .inner = 24,
                                                                  .layers = 2,
                                                                  .heads = 4,
                                                                  .kv_heads = kv_heads,
                                                                  .tied = false,
                                                                  .qkv_bias = true,
                                                                  .head_norms = head_norms});
  return training_of<nn::models::Llama>(
      std::move(model), dtype,
      [](nn::models::Llama& model, const Batch& b) { return model(b.inputs, b.targets).loss; });
}
inline Training llama() { return llama_of(2); }
inline Training bert(double dropout = 0, DType dtype = kF64) {
  manual_seed(1);
  auto model =
      std::make_unique<nn::models::Bert>(nn::models::BertConfig{.vocab_size = 51,
                                                                .width = 32,
                                                                .layers = 2,
                                                                .heads = 4,
                                                                .context = 16,
                                                                .dropout = dropout,
                                                                .attention_dropout = dropout});
  return training_of<nn::models::Bert>(
      std::move(model), dtype, [](nn::models::Bert& model, const Batch& b) {
        return model(b.inputs, {}, b.inputs.select(1, 0).remainder(2)).loss;
      });
}

using WholeValues = std::map<std::string, std::vector<double>>;

// Of all parameters, or of their gradients. Collective.
inline WholeValues wholes_of(const nn::ModuleBase& model, bool of_gradients) {
  const NoGradGuard no_grad;
  WholeValues values;
  for (const auto& [name, parameter] : model.named_parameters()) {
    const Tensor x = of_gradients ? parameter.grad() : parameter;
    values[name] = (is_dtensor(x) ? full_tensor(x) : x).to_vector();
  }
  return values;
}

// By each tensor's largest element.
inline void expect_close(const WholeValues& own, const WholeValues& expected, double tolerance,
                         const std::string& what) {
  ASSERT_EQ(own.size(), expected.size());
  for (const auto& [name, values] : expected) {
    const std::vector<double>& got = own.at(name);
    ASSERT_EQ(got.size(), values.size()) << what << " " << name;
    double scale = 1e-3, worst = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      scale = std::max(scale, std::abs(values[i]));
      worst = std::max(worst, std::abs(got[i] - values[i]));
    }
    EXPECT_LE(worst, tolerance * scale) << what << " of " << name;
  }
}

using MakeOptimizer = std::unique_ptr<optim::Optimizer> (*)(const NamedTensors& parameters);
inline std::unique_ptr<optim::Optimizer> sgd(const NamedTensors& parameters) {
  return std::make_unique<optim::SGD>(parameters, optim::SGD::Options{.lr = 0.1, .momentum = 0.9});
}
// A large eps: a key's bias has no gradient but rounding, of which Adam would make steps.
inline std::unique_ptr<optim::Optimizer> adamw(const NamedTensors& parameters) {
  return std::make_unique<optim::AdamW>(parameters, optim::AdamW::Options{.lr = 1e-2, .eps = 1e-3});
}

}  // namespace tessera::distributed
