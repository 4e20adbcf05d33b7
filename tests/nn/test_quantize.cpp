// Frozen bases in 8 and 4 bits: what quantize() changes, what keeps to it, and QLoRA beside peft and
// bitsandbytes.
#include <tessera/nn/quantize/quantize.h>

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/nn/container.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/fused.h>
#include <tessera/nn/lora/lora.h>
#include <tessera/nn/models/gguf.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/nn/models/llama.h>
#include <tessera/nn/parametrizations.h>
#include <tessera/optim/optimizers.h>
#include <tessera/precision/fp8_linear.h>

#include "finished_process.h"
#include "golden_files.h"
#include "message_of.h"

namespace tessera::nn::test_quantize {
namespace {

// A table, a fused perceptron, a head that is tied to the table, and one that is not.
struct Model : Module<Model> {
  Model()
      : table(add<Embedding>("table", 11, 64)),
        mlp(add<Mlp>("mlp", 64, 96)),
        tied(add<Linear>("tied", 64, 11, LinearOptions{.bias = false})),
        lm_head(add<Linear>("lm_head", 64, 11, LinearOptions{.bias = false})) {
    tied.share_parameter("weight", table.weight);
  }
  Tensor hidden(const Tensor& tokens) { return mlp(table(tokens)); }
  Tensor forward(const Tensor& tokens) {
    const Tensor x = hidden(tokens);
    return tied(x) + lm_head(x);
  }
  std::unique_ptr<Model> remake() const { return std::make_unique<Model>(); }
  Embedding& table;
  Mlp& mlp;
  Linear& tied;
  Linear& lm_head;
};

Tensor tokens() { return tensor({1, 4, 10, 0, 4, 7}).to(kI64); }
std::vector<double> elements(const Tensor& x) { return x.detach().to(kF64).to_vector(); }

std::vector<QuantizeOptions> all_options() {
  return {{.format = QuantizeFormat::kInt8},
          {.format = QuantizeFormat::kNf4},
          {.format = QuantizeFormat::kNf4, .double_quantize = true},
          {.format = QuantizeFormat::kFp4, .block_size = 128}};
}

// The same model with weights as the quantized one reads them.
void read_into(const ModuleBase& quantized, Linear& plain) {
  const NoGradGuard no_grad;
  plain.weight.detach().copy_(kernels::unpack(packed_weight(quantized), kF32));
}

void expect_near(const Tensor& got, const Tensor& expected, double relative) {
  const std::vector<double> a = elements(got), b = elements(expected);
  ASSERT_EQ(a.size(), b.size());
  double largest = 0;
  for (const double each : b) largest = std::max(largest, std::fabs(each));
  for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], relative * largest) << i;
}

TEST(Quantize, CallsAndTheirGradientsAreThoseOfTheNumbersThatAreRead) {
  for (const QuantizeOptions& options : all_options()) {
    SCOPED_TRACE(kernels::name_of(options.format));
    Model model, plain;
    quantize(model, options);
    read_into(model.mlp.inner, plain.mlp.inner);
    read_into(model.mlp.outer, plain.mlp.outer);
    const Tensor y = model(tokens()), expected = plain(tokens());
    expect_near(y, expected, 64 * 1.2e-7);
    mul(y, y).sum().backward();
    mul(expected, expected).sum().backward();
    expect_near(model.table.weight.grad(), plain.table.weight.grad(), 256 * 1.2e-7);
    expect_near(model.mlp.inner.bias.grad(), plain.mlp.inner.bias.grad(), 256 * 1.2e-7);
    EXPECT_FALSE(model.mlp.inner.weight.grad().defined());
  }
}

TEST(Quantize, NamesStayAndScalesStandBesideTheBytes) {
  Model model;
  const QuantizeSummary summary = quantize(model, {.double_quantize = true});
  EXPECT_EQ(summary.quantized, (std::vector<std::string>{"mlp.fc1", "mlp.fc2"}));
  EXPECT_EQ(summary.bytes_before, 2 * 64 * 96 * 4);
  EXPECT_EQ(summary.bytes_after, 2 * (64 * 96 / 2 + 96 + 4 + 4));
  const StateDict state = model.state_dict();
  EXPECT_EQ(state.at("mlp.fc1.weight").dtype(), kU8);
  EXPECT_EQ(state.at("mlp.fc1.weight").shape(), (Shape{64 * 96 / 2, 1}));
  EXPECT_EQ(state.at("mlp.fc1.quant_state.absmax").dtype(), kU8);
  EXPECT_EQ(state.at("mlp.fc1.quant_state.nested_absmax").dtype(), kF32);
  EXPECT_EQ(state.at("mlp.fc1.quant_state.nested_offset").numel(), 1);
  EXPECT_EQ(state.at("lm_head.weight").dtype(), kF32);
  EXPECT_TRUE(model.tied.weight.is(model.table.weight));
  EXPECT_NE(model.repr().find("(quant_state): QuantState(nf4, block_size=64"), std::string::npos)
      << model.repr();
}

TEST(Quantize, AStateLoadsIntoAModelThatIsQuantizedAlikeAndIntoNoOther) {
  for (const QuantizeOptions& options : all_options()) {
    Model model, other, plain;
    quantize(model, options);
    {  // other values
      const NoGradGuard no_grad;
      for (const Tensor& each : other.parameters()) each.detach().mul_(Scalar(2));
    }
    const StateDict floating = plain.state_dict();
    quantize(other, options);
    EXPECT_NE(elements(model(tokens())), elements(other(tokens())));
    EXPECT_THROW(other.load_state_dict(floating), ValueError);
    // Of int8 the shapes are alike: bytes are no numbers to which others could be converted.
    EXPECT_THROW(other.load_state_dict(floating, {.strict = false}), ValueError);
    other.load_state_dict(model.state_dict());
    EXPECT_EQ(elements(model(tokens())), elements(other(tokens())));
    // Nor are bytes numbers of a floating weight, nor of another format's.
    EXPECT_THROW(plain.load_state_dict(model.state_dict(), {.strict = false}), ValueError);
    const auto swapped =
        options.format == QuantizeFormat::kNf4 ? QuantizeFormat::kFp4 : QuantizeFormat::kNf4;
    QuantizeOptions of_other = options;
    of_other.format = swapped;
    if (options.format == QuantizeFormat::kInt8) continue;
    Model unlike;
    quantize(unlike, of_other);
    EXPECT_THROW(unlike.load_state_dict(model.state_dict()), ValueError);
  }
}

// Bytes and scales of [64, 96] and of [96, 64] have one shape.
TEST(Quantize, AStateOfOtherSizesIsTold) {
  Linear wide(64, 96), high(96, 64);
  for (Linear* layer : {&wide, &high}) layer->requires_grad_(false);
  quantize(wide, {.format = QuantizeFormat::kNf4});
  quantize(high, {.format = QuantizeFormat::kNf4});
  std::map<std::string, Tensor> state = wide.state_dict().to_map();
  state.erase("bias");
  high.load_state_dict(StateDict::from_map(state), {.strict = false});
  EXPECT_THROW(high(rand({2, 96})), ValueError);
}

TEST(Quantize, FilesOfFloatingWeightsAreRefused) {
  TestFolder folder;
  models::Llama llama(
      {.vocab_size = 64, .width = 64, .inner = 96, .layers = 1, .heads = 2, .kv_heads = 2});
  quantize(llama, {.format = QuantizeFormat::kInt8});
  EXPECT_THROW(llama.save_pretrained(folder.path("folder")), UnsupportedError);
  EXPECT_THROW(models::save_gguf(llama, folder.path("x.gguf")), UnsupportedError);
  models::Gpt gpt({.vocab_size = 64, .context = 8, .width = 64, .layers = 1, .heads = 2});
  quantize(gpt);
  EXPECT_THROW(gpt.save_pretrained(folder.path("gpt")), UnsupportedError);
}

TEST(Quantize, ACloneHasTheSameBytesOfItsOwn) {
  for (const bool adapted : {false, true}) {
    for (const QuantizeOptions& options : all_options()) {
      Model model;
      quantize(model, options);
      if (adapted) add_lora(model, {.names = {"fc1"}, .rank = 2});
      const std::unique_ptr<Model> copy = model.clone();
      const std::unique_ptr<Model> again = copy->clone();
      EXPECT_EQ(elements(model(tokens())), elements((*again)(tokens())));
      EXPECT_FALSE(model.mlp.inner.weight.storage() == again->mlp.inner.weight.storage());
      EXPECT_TRUE(is_quantized(again->mlp.inner));
      EXPECT_FALSE(again->mlp.inner.weight.requires_grad());
    }
  }
}

TEST(Quantize, ALayerIsWithoutItsAdapterWhatItWas) {
  Model model;
  quantize(model);
  const std::vector<double> before = elements(model(tokens()));
  add_lora(model, {.names = {"fc1"}, .rank = 2});
  add_lora(model, {.adapter = "other", .names = {"fc1"}, .rank = 3});
  remove_lora(model, "other");
  remove_lora(model);
  EXPECT_EQ(elements(model(tokens())), before);
  EXPECT_EQ(elements((*model.clone())(tokens())), before);
}

TEST(Quantize, AQuantizedWeightDoesNotLearn) {
  Model model;
  quantize(model, {.format = QuantizeFormat::kInt8});
  EXPECT_FALSE(model.mlp.inner.weight.requires_grad());
  EXPECT_THROW(model.mlp.inner.weight.set_requires_grad(true), DTypeError);
  model.requires_grad_();  // of what can
  EXPECT_FALSE(model.mlp.inner.weight.requires_grad());
  EXPECT_THROW(add_lora(model, {.names = {"fc2"}, .rank = 2, .modules_to_save = {"fc1"}}),
               ConfigError);
  EXPECT_TRUE(lora_adapter_names(model).empty());
  EXPECT_TRUE(model.table.weight.requires_grad());  // an error changes nothing
}

TEST(Quantize, UnderAutocastProductsRunInItsDtype) {
  Model model, plain;
  quantize(model);
  read_into(model.mlp.inner, plain.mlp.inner);
  const AutocastGuard autocast(kBF16);
  const Tensor x = randn({5, 64});
  const Tensor y = model.mlp.inner(x);
  EXPECT_EQ(y.dtype(), kBF16);
  // The same bf16 numbers, in sums of another order.
  expect_near(y, plain.mlp.inner(x), 2 * 7.9e-3);
}

TEST(Quantize, RecomputationHasTheBitsOfKeepingAndNeitherKeepsAnUnpackedWeight) {
  Model model;
  quantize(model);
  const auto gradient = [&](bool again) {
    model.zero_grad();
    const Tensor x = model.table(tokens());
    const auto call = [&](const Tensor& given) { return model.mlp(given); };
    const int64_t before = memory_stats()->current();
    const Tensor y = again ? checkpoint(call, x) : call(x);
    const int64_t kept = memory_stats()->current() - before;
    // Beside y, by recomputation nothing, else up to three tensors as wide as the layer inside.
    const int64_t wide = 6 * 96 * 4;
    EXPECT_LE(kept, y.numel() * 4 + (again ? 0 : 3 * wide));
    EXPECT_LT(kept, 96 * 64 * 2);  // of a weight in bf16
    mul(y, y).sum().backward();
    return elements(model.table.weight.grad());
  };
  EXPECT_EQ(gradient(true), gradient(false));
}

TEST(Quantize, AHeadThatAFusedLossWouldReadIsCalled) {
  Model model, plain;
  quantize(model, {.names = {"lm_head"}});
  read_into(model.lm_head, plain.lm_head);
  const Tensor x = randn({6, 64});
  const Tensor loss = linear_cross_entropy(model.lm_head, x, tokens());
  expect_near(loss, linear_cross_entropy(plain.lm_head, x, tokens()), 16 * 1.2e-7);
}

TEST(Quantize, WhatCannotBeQuantizedIsATypedErrorThatChangesNothing) {
  Model model;
  const std::vector<double> before = elements(model(tokens()));
  EXPECT_THROW(quantize(model, {.names = {"nobody"}}), ConfigError);
  EXPECT_THROW(quantize(model, {.names = {"tied"}}), ConfigError);
  EXPECT_THROW(quantize(model, {.exclude = {"fc1", "fc2", "lm_head"}}), ConfigError);
  EXPECT_THROW(quantize(model, {.block_size = 63}), ValueError);
  EXPECT_THROW(quantize(model, {.format = QuantizeFormat::kInt8, .double_quantize = true}),
               UnsupportedError);
  EXPECT_THROW(packed_weight(model.mlp.inner), ValueError);
  add_lora(model, {.names = {"fc2"}, .rank = 2});
  EXPECT_THROW(quantize(model), ConfigError);
  EXPECT_FALSE(is_quantized(model.mlp.inner));
  remove_lora(model);
  weight_norm(model.mlp.outer);
  EXPECT_THROW(quantize(model), ConfigError);
  remove_parametrizations(model.mlp.outer);
  model.mlp.outer.to(kF64);
  EXPECT_THROW(quantize(model), DTypeError);
  EXPECT_FALSE(is_quantized(model.mlp.inner));
  model.mlp.outer.to(kF32);
  EXPECT_EQ(model.mlp.inner.weight.dtype(), kF32);
  quantize(model);
  EXPECT_THROW(quantize(model), ConfigError);  // again
}

TEST(Quantize, WhatAQuantizedModelCannotIsATypedError) {
  Model model;
  quantize(model);
  EXPECT_THROW(model.mlp.inner(randn({2, 63})), ShapeError);
  EXPECT_THROW(model.mlp.inner.reset_parameters(), DTypeError);
  add_lora(model, {.names = {"fc1"}, .rank = 2});
  EXPECT_NE(message_of<UnsupportedError>([&] { merge_lora(model); }).find("'mlp.fc1'"),
            std::string::npos);
  EXPECT_FALSE(is_lora_merged(model));
  model.to(kBF16);
  EXPECT_NE(message_of<DTypeError>([&] {
              model.mlp.inner(randn({2, 64}).to(kBF16));
            }).find("convert a model's dtype before it is quantized"),
            std::string::npos);
}

TEST(Quantize, Fp8LeavesAQuantizedLayerOutAndSaysSo) {
  Model model;
  quantize(model, {.names = {"fc1"}});
  const std::vector<double> before =
      elements(model.mlp.inner(randn({16, 64}, {}, RandomStream{3})));
  precision::Fp8Recipe recipe = precision::Fp8Recipe::named("tensorwise");
  precision::Fp8Layers layers(model, recipe);
  EXPECT_EQ(elements(model.mlp.inner(randn({16, 64}, {}, RandomStream{3}))), before);
  int found = 0;
  for (const precision::Fp8LayerReport& layer : layers.report().layers) {
    if (layer.name != "mlp.fc1") continue;
    ++found;
    EXPECT_EQ(layer.excluded, "its weight is quantized");
    EXPECT_EQ(layer.fp8_calls, 0);
    EXPECT_EQ(layer.dtypes.at("f32"), 1);
  }
  EXPECT_EQ(found, 1);
}

// ---- QLoRA beside peft and bitsandbytes, of golden/qlora_cases.py -------------------------------

std::vector<double> losses_of(const std::string& format, bool low, bool recompute = false) {
  const nlohmann::json golden = tests::golden_json("qlora.json");
  auto model = models::Llama::from_pretrained(tests::golden_path("qlora"));
  model->to(kF32);
  QuantizeOptions options{.double_quantize = format.ends_with("_double")};
  if (format == "int8") options.format = QuantizeFormat::kInt8;
  if (format == "fp4") options.format = QuantizeFormat::kFp4;
  if (format != "none") {
    EXPECT_EQ(quantize(*model, options).quantized.size(), 14u);  // all but lm_head
  }
  load_lora(*model, tests::golden_path("qlora/adapter"), {.trainable = true});
  if (recompute) model->model.layers.child(0).checkpoint_calls();
  model->train();
  optim::AdamW optimizer(trainable_parameters(*model), {.lr = golden["lr"].get<double>()});
  std::vector<double> losses;
  for (const auto& batch : golden["tokens"]) {
    std::vector<int64_t> inputs, targets;
    for (const auto& row : batch) {
      const auto all = row.get<std::vector<int64_t>>();
      inputs.insert(inputs.end(), all.begin(), all.end() - 1);
      targets.insert(targets.end(), all.begin() + 1, all.end());
    }
    const Shape shape{8, 32};
    const AutocastGuard autocast(kBF16, low);
    const Tensor loss = (*model)(tensor(inputs, shape), tensor(targets, shape)).loss;
    losses.push_back(loss.item());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return losses;
}

class Qlora : public testing::TestWithParam<const char*> {};

TEST_P(Qlora, LossesAreThoseOfPeftAndBitsandbytes) {
  for (const bool low : {false, true}) {
    if (std::string(GetParam()) == "none" && low) continue;
    const std::string name = std::string(GetParam()) + (low ? ".bf16" : ".f32");
    const auto expected =
        tests::golden_json("qlora.json")["losses"][name].get<std::vector<double>>();
    const std::vector<double> losses = losses_of(GetParam(), low);
    ASSERT_EQ(losses.size(), expected.size());
    for (size_t i = 0; i < losses.size(); ++i) {
      EXPECT_NEAR(losses[i], expected[i], 1e-3) << name << ", step " << i;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Formats, Qlora,
                         testing::Values("none", "int8", "nf4", "nf4_double", "fp4"));

TEST(QloraTraining, RecomputedBlocksHaveTheSameLosses) {
  EXPECT_EQ(losses_of("nf4_double", true, true), losses_of("nf4_double", true));
}

}  // namespace
}  // namespace tessera::nn::test_quantize
