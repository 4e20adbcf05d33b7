// Modules against PyTorch: outputs, gradients of inputs and parameters, buffers after the call.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/safetensors.h>
#include <tessera/nn/attention.h>
#include <tessera/nn/conv.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>
#include <tessera/nn/recurrent.h>
#include <tessera/nn/transformer.h>

#include "golden_files.h"
#include "op_checks.h"

namespace tessera::tests {
namespace {

using nlohmann::json;

struct Case {
  std::unique_ptr<nn::ModuleBase> module;
  std::function<TensorList(const TensorList& x)> call;
};

// A case from a module and from how it is called: call(module, inputs) returns its outputs.
template <class M, class Call>
Case make(std::unique_ptr<M> module, Call call) {
  M* pointer = module.get();
  return {std::move(module), [pointer, call](const TensorList& x) { return call(*pointer, x); }};
}
// One input, one output.
template <class M>
Case simple(std::unique_ptr<M> module) {
  return make(std::move(module), [](M& m, const TensorList& x) { return TensorList{m(x[0])}; });
}

Shape sizes(const json& value) {
  if (value.is_number()) return Shape{value.get<int64_t>()};
  return Shape(value.get<std::vector<int64_t>>());
}

Case make_conv(const std::string& kind, const json& o) {
  nn::ConvLayerOptions options{.groups = o.value("groups", int64_t{1}),
                               .bias = o.value("bias", true)};
  if (o.contains("stride")) options.stride = sizes(o["stride"]);
  if (o.contains("dilation")) options.dilation = sizes(o["dilation"]);
  if (o.contains("padding") && o["padding"].is_string()) {
    options.same_padding = o["padding"] == "same";
  } else if (o.contains("padding")) {
    options.padding = sizes(o["padding"]);
  }
  const int64_t in = o["in_channels"], out = o["out_channels"];
  const Shape kernel = sizes(o["kernel_size"]);
  if (kind == "Conv1d") return simple(std::make_unique<nn::Conv1d>(in, out, kernel, options));
  return simple(std::make_unique<nn::Conv2d>(in, out, kernel, options));
}

template <class M>
Case make_batch_norm(const json& record) {
  const json& o = record["options"];
  nn::BatchNormOptions options{.track_running_stats = o.value("track_running_stats", true)};
  if (o.contains("momentum") && o["momentum"].is_null()) options.momentum = std::nullopt;
  const bool twice = record.contains("forward") && record["forward"].value("twice", false);
  return make(std::make_unique<M>(o["num_features"].get<int64_t>(), options),
              [twice](M& m, const TensorList& x) {
                const Tensor first = m(x[0]);
                return TensorList{twice ? m(x[0] * 2) : first};
              });
}

Case make_attention(const json& record) {
  const json& o = record["options"];
  const json forward = record.value("forward", json::object());
  nn::MultiheadAttentionOptions options{.bias = o.value("bias", true),
                                        .batch_first = o.value("batch_first", false)};
  if (o.contains("kdim")) options.kdim = o["kdim"];
  if (o.contains("vdim")) options.vdim = o["vdim"];
  const bool weights = forward.value("need_weights", true);
  const bool average = forward.value("average_attn_weights", true);
  const bool attn_mask = forward.value("attn_mask", false);
  return make(
      std::make_unique<nn::MultiheadAttention>(o["embed_dim"].get<int64_t>(),
                                               o["num_heads"].get<int64_t>(), options),
      [=](nn::MultiheadAttention& m, const TensorList& x) {
        nn::AttentionMasks masks{.need_weights = weights, .average_weights = average};
        if (x.size() == 4) (attn_mask ? masks.attn_mask : masks.key_padding_mask) = x[3];
        const nn::AttentionResult result = m(x[0], x[1], x[2], masks);
        return weights ? TensorList{result.output, result.weights} : TensorList{result.output};
      });
}

Case make_transformer_layer(const std::string& kind, const json& o) {
  using Activation = nn::TransformerLayerOptions::Activation;
  const nn::TransformerLayerOptions options{
      .dim_feedforward = o["dim_feedforward"],
      .dropout = o["dropout"],
      .activation = o.value("activation", "relu") == "gelu" ? Activation::kGelu : Activation::kRelu,
      .batch_first = o.value("batch_first", false),
      .norm_first = o.value("norm_first", false)};
  const int64_t width = o["d_model"], heads = o["nhead"];
  if (kind == "TransformerDecoderLayer") {
    return make(std::make_unique<nn::TransformerDecoderLayer>(width, heads, options),
                [](nn::TransformerDecoderLayer& m, const TensorList& x) {
                  return TensorList{m(x[0], x[1])};
                });
  }
  return make(std::make_unique<nn::TransformerEncoderLayer>(width, heads, options),
              [](nn::TransformerEncoderLayer& m, const TensorList& x) {
                nn::EncoderMasks masks;
                if (x.size() == 2) masks.src_mask = x[1];
                return TensorList{m(x[0], masks)};
              });
}

Case make_recurrent(const std::string& kind, const json& o) {
  const nn::RecurrentOptions options{.num_layers = o.value("num_layers", int64_t{1}),
                                     .bias = o.value("bias", true),
                                     .batch_first = o.value("batch_first", false),
                                     .bidirectional = o.value("bidirectional", false)};
  const int64_t in = o["input_size"], hidden = o["hidden_size"];
  if (kind == "LSTM") {
    return make(std::make_unique<nn::LSTM>(in, hidden, options),
                [](nn::LSTM& m, const TensorList& x) {
                  nn::LstmState state;
                  if (x.size() == 3) state = {x[1], x[2]};
                  const nn::LstmResult result = m(x[0], state);
                  return TensorList{result.output, result.state.hidden, result.state.cell};
                });
  }
  return make(std::make_unique<nn::GRU>(in, hidden, options), [](nn::GRU& m, const TensorList& x) {
    const nn::GruResult result = m(x[0], x.size() == 2 ? x[1] : Tensor());
    return TensorList{result.output, result.hidden};
  });
}

Case make_case(const json& record) {
  const std::string kind = record["module"];
  const json& o = record["options"];
  if (kind == "Linear") {
    return simple(std::make_unique<nn::Linear>(o["in_features"].get<int64_t>(),
                                               o["out_features"].get<int64_t>(),
                                               nn::LinearOptions{.bias = o.value("bias", true)}));
  }
  if (kind == "Embedding") {
    nn::EmbeddingOptions options;
    if (o.contains("padding_idx")) options.padding_idx = o["padding_idx"];
    return simple(std::make_unique<nn::Embedding>(o["num_embeddings"].get<int64_t>(),
                                                  o["embedding_dim"].get<int64_t>(), options));
  }
  if (kind == "LayerNorm") {
    const nn::LayerNormOptions options{.eps = o.value("eps", 1e-5),
                                       .elementwise_affine = o.value("elementwise_affine", true)};
    return simple(std::make_unique<nn::LayerNorm>(sizes(o["normalized_shape"]), options));
  }
  if (kind == "RMSNorm") {
    return simple(std::make_unique<nn::RMSNorm>(sizes(o["normalized_shape"]),
                                                nn::RmsNormOptions{.eps = o["eps"].get<double>()}));
  }
  if (kind == "GroupNorm") {
    return simple(std::make_unique<nn::GroupNorm>(o["num_groups"].get<int64_t>(),
                                                  o["num_channels"].get<int64_t>()));
  }
  if (kind == "BatchNorm1d") return make_batch_norm<nn::BatchNorm1d>(record);
  if (kind == "BatchNorm2d") return make_batch_norm<nn::BatchNorm2d>(record);
  if (kind.starts_with("Conv")) return make_conv(kind, o);
  if (kind == "MultiheadAttention") return make_attention(record);
  if (kind.starts_with("Transformer")) return make_transformer_layer(kind, o);
  if (kind == "LSTM" || kind == "GRU") return make_recurrent(kind, o);
  TS_THROW(ValueError, "golden", "no module ", kind);
}

void replay(const json& record, const SafeTensorsFile& file, DType dtype) {
  const std::string name = record["name"];
  SCOPED_TRACE(name);
  const auto stored = [&](const std::string& key) { return file.load(name + "/" + key); };
  // References are f64; f32 results may be off by roundings of a few chained sums.
  const double relative = dtype == kF64 ? 1e-9 : 2e-5;
  const auto expect = [&](const Tensor& got, const std::string& key, double scale) {
    ASSERT_TRUE(got.defined()) << key;
    const Tensor reference = stored(key);
    EXPECT_EQ(got.shape(), reference.shape()) << key;
    EXPECT_EQ(difference(got, reference.to_vector(), relative * scale), "") << key;
  };

  const Case test = make_case(record);
  test.module->to(dtype);
  StateDict state;
  for (const auto& [key, tensor] : test.module->state_dict()) {
    state.set(key, stored("state." + key));
  }
  test.module->load_state_dict(state);
  test.module->train(record["training"].get<bool>());
  TensorList x;
  for (int i = 0; i < record["inputs"].get<int>(); ++i) {
    const Tensor input = stored("x" + std::to_string(i));
    x.push_back(is_floating(input.dtype()) ? converted(input, dtype).set_requires_grad() : input);
  }

  const TensorList y = test.call(x);
  ASSERT_EQ(y.size(), record["outputs"].get<size_t>());
  const json& scales = record["scales"];
  TensorList followed, gradients;
  for (size_t i = 0; i < y.size(); ++i) {
    const std::string key = "y" + std::to_string(i);
    expect(y[i], key, scales[key]);
    if (!file.contains(name + "/dy" + std::to_string(i))) continue;
    followed.push_back(y[i]);
    gradients.push_back(converted(stored("dy" + std::to_string(i)), dtype));
  }
  backward(followed, gradients);
  for (const auto& [key, scale] : scales.items()) {
    if (!key.starts_with("grad.")) continue;
    const std::string of = key.substr(5);
    const bool is_input = of.size() == 2 && of[0] == 'x';
    const Tensor& leaf =
        is_input ? x[static_cast<size_t>(of[1] - '0')] : test.module->get_parameter(of);
    expect(leaf.grad(), key, scale);
  }
  for (const auto& [key, buffer] : test.module->named_buffers()) {
    expect(buffer, "after." + key, std::max(1.0, largest(stored("after." + key).to_vector())));
  }
}

class GoldenModules : public testing::TestWithParam<DType> {};

TEST_P(GoldenModules, ReplayPyTorch) {
  const SafeTensorsFile file(golden_path("modules.safetensors"));
  const json records = golden_json("modules.json");
  ASSERT_GT(records.size(), 40u);
  for (const json& record : records) replay(record, file, GetParam());
}

INSTANTIATE_TEST_SUITE_P(DTypes, GoldenModules, testing::Values(kF32, kF64),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace tessera::tests
