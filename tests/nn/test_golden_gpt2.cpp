// A whole GPT-2 of transformers with random weights: logits, loss, every gradient, ten AdamW steps
// with clipping, greedy tokens. The model is written here in ops alone, from the file's names.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>

#include "autograd/op_checks.h"
#include "golden_files.h"

namespace tessera::tests::test_golden_gpt2 {
namespace {

constexpr int64_t kLayers = 2, kHeads = 4, kWidth = 48;
constexpr double kEps = 1e-5;

struct Gpt2 {
  explicit Gpt2(DType dtype = kF32) {
    for (auto& [name, value] : load_safetensors(golden_path("gpt2/model.safetensors"))) {
      weights[name] = (dtype == kF32 ? value : converted(value, dtype)).set_requires_grad();
    }
  }
  const Tensor& weight(const std::string& name) const { return weights.at("transformer." + name); }

  Tensor norm(const Tensor& x, const std::string& name) const {
    return layer_norm(x, {kWidth}, weight(name + ".weight"), weight(name + ".bias"), kEps);
  }
  // Conv1D of GPT-2: weights are [in, out].
  Tensor project(const Tensor& x, const std::string& name) const {
    return linear(x, transpose(weight(name + ".weight"), 0, 1), weight(name + ".bias"));
  }
  // ids: [B, T]. Returns [B, T, V].
  Tensor logits(const Tensor& ids) const {
    const int64_t B = ids.size(0), T = ids.size(1);
    Tensor h = add(embedding(ids, weight("wte.weight")), narrow(weight("wpe.weight"), 0, 0, T));
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      const std::string block = "h." + std::to_string(layer) + ".";
      const Tensor packed = project(norm(h, block + "ln_1"), block + "attn.c_attn");
      const Tensor heads =
          permute(view(packed, {B, T, 3, kHeads, kWidth / kHeads}), {2, 0, 3, 1, 4});
      const Tensor mixed = scaled_dot_product_attention(select(heads, 0, 0), select(heads, 0, 1),
                                                        select(heads, 0, 2), {.causal = true});
      h = add(h, project(reshape(transpose(mixed, 1, 2), {B, T, kWidth}), block + "attn.c_proj"));
      const Tensor inner = gelu(project(norm(h, block + "ln_2"), block + "mlp.c_fc"), Gelu::kTanh);
      h = add(h, project(inner, block + "mlp.c_proj"));
    }
    return linear(norm(h, "ln_f"), weight("wte.weight"));
  }
  // Each position predicts the next.
  Tensor loss(const Tensor& ids) const {
    const int64_t T = ids.size(1);
    const Tensor predictions = narrow(logits(ids), 1, 0, T - 1);
    return cross_entropy(flatten(predictions, 0, 1), flatten(narrow(ids, 1, 1, T - 1)));
  }

  std::map<std::string, Tensor> weights;
};

const SafeTensorsFile& golden() {
  static const SafeTensorsFile file(golden_path("gpt2.safetensors"));
  return file;
}

TEST(GoldenGpt2, LogitsAndLossAreThoseOfTransformers) {
  const Gpt2 model;
  const Tensor ids = golden().load("input_ids");
  const std::vector<double> logits = golden().load("logits").to_vector();
  EXPECT_EQ(difference(model.logits(ids), logits, 1e-5 * largest(logits)), "");
  const double loss = golden_json("gpt2.json")["loss"];
  EXPECT_NEAR(model.loss(ids).item(), loss, 1e-6 * loss);
}

TEST(GoldenGpt2, EveryGradientIsWithinAHundredThousandthOfItsLargest) {
  const Gpt2 model;
  model.loss(golden().load("input_ids")).backward();
  const std::vector<std::string> names = golden_json("gpt2.json")["parameters"];
  EXPECT_EQ(names.size(), model.weights.size());
  for (const std::string& name : names) {
    const std::vector<double> expected = golden().load("grad." + name).to_vector();
    EXPECT_EQ(difference(model.weights.at(name).grad(), expected, 1e-5 * largest(expected)), "")
        << name;
  }
}

TEST(GoldenGpt2, TenClippedAdamWStepsFollowTorch) {
  const nlohmann::json reference = golden_json("gpt2.json"), options = reference["steps"];
  const Gpt2 model;
  optim::ParameterGroup<optim::AdamWOptions> decayed, others;
  decayed.options = {.lr = options["lr"],
                     .betas = {options["betas"][0], options["betas"][1]},
                     .eps = options["eps"],
                     .weight_decay = options["weight_decay"]};
  others.options = decayed.options;
  others.options.weight_decay = 0;
  TensorList parameters;
  for (const std::string name : reference["parameters"]) {
    const Tensor& weight = model.weights.at(name);
    parameters.push_back(weight);
    (weight.dim() >= 2 ? decayed : others).parameters.push_back({name, weight});
  }
  optim::AdamW optimizer({decayed, others});
  const Tensor batches = golden().load("batches");
  for (int64_t step = 0; step < batches.size(0); ++step) {
    optimizer.zero_grad();
    const Tensor loss = model.loss(select(batches, 0, step));
    loss.backward();
    const double norm = optim::clip_grad_norm(parameters, options["max_norm"]).item();
    optimizer.step();
    const double expected = reference["losses"][static_cast<size_t>(step)];
    EXPECT_NEAR(loss.item(), expected, 1e-5 * expected) << "step " << step;
    const double expected_norm = reference["norms"][static_cast<size_t>(step)];
    EXPECT_NEAR(norm, expected_norm, 1e-5 * expected_norm) << "step " << step;
  }
  for (const auto& [name, weight] : model.weights) {
    std::vector<double> expected = golden().load("final." + name).to_vector();
    if (name.ends_with("attn.c_attn.bias")) {
      // A bias of the keys moves all scores of a query alike: its gradient is 0, and Adam follows
      // the sign of what rounding leaves of it.
      const std::vector<double> got = weight.to_vector();
      std::copy(got.begin() + kWidth, got.begin() + 2 * kWidth, expected.begin() + kWidth);
    }
    EXPECT_EQ(difference(weight, expected, 2e-5), "") << name;
  }
}

TEST(GoldenGpt2, GreedyTokensAreThoseOfTransformers) {
  const Gpt2 model;
  NoGradGuard no_grad;
  const std::vector<int64_t> expected = golden().load("greedy").to_vector<int64_t>();
  std::vector<int64_t> tokens = golden().load("prompt").to_vector<int64_t>();
  while (tokens.size() < expected.size()) {
    const int64_t count = static_cast<int64_t>(tokens.size());
    const Tensor logits = model.logits(tensor(std::span<const int64_t>(tokens), {1, count}));
    tokens.push_back(argmax(select(select(logits, 0, 0), 0, count - 1)).item<int64_t>());
  }
  EXPECT_EQ(tokens, expected);
}

TEST(GoldenGpt2, F64FollowsTorchToTheLastDigits) {
  const Gpt2 model(kF64);
  const Tensor ids = golden().load("input_ids");
  const std::vector<double> logits = golden().load("logits").to_vector();
  EXPECT_EQ(difference(model.logits(ids), logits, 1e-13 * largest(logits)), "");
  const double loss = golden_json("gpt2.json")["loss"];
  EXPECT_NEAR(model.loss(ids).item(), loss, 1e-13 * loss);
}

}  // namespace
}  // namespace tessera::tests::test_golden_gpt2
