// Modules against torch.nn: outputs, gradients of inputs and parameters, buffers after the call,
// from the same state dictionaries.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <set>

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

namespace tessera::tests::test_golden_modules {
namespace {

using nlohmann::json;

// A module, and how its forward is called with the inputs of the case.
struct Subject {
  std::unique_ptr<nn::ModuleBase> module;
  std::function<TensorList(const TensorList&)> call;
};

Shape shape_of(const json& value) {
  return value.is_array() ? Shape(value.get<std::vector<int64_t>>()) : Shape{value.get<int64_t>()};
}
std::optional<int64_t> maybe(const json& options, const char* key) {
  return options.contains(key) ? std::optional<int64_t>(options[key].get<int64_t>()) : std::nullopt;
}

// For modules that map one tensor to one.
template <class M, class... Args>
Subject simple(Args&&... args) {
  auto made = std::make_unique<M>(std::forward<Args>(args)...);
  M* module = made.get();
  return {std::move(made), [module](const TensorList& x) { return TensorList{(*module)(x[0])}; }};
}

template <class Conv>
Subject convolution(const json& o) {
  nn::ConvLayerOptions options;
  options.stride = shape_of(o.value("stride", json(1)));
  options.dilation = shape_of(o.value("dilation", json(1)));
  options.groups = o.value("groups", 1);
  options.bias = o.value("bias", true);
  options.same_padding = o.value("padding", json(0)) == "same";
  if (!options.same_padding) options.padding = shape_of(o.value("padding", json(0)));
  return simple<Conv>(o["in_channels"].get<int64_t>(), o["out_channels"].get<int64_t>(),
                      shape_of(o["kernel_size"]), options);
}

template <class Norm>
Subject batch_norm(const json& o, bool twice) {
  nn::BatchNormOptions options;
  if (o.contains("momentum")) options.momentum = std::nullopt;
  options.track_running_stats = o.value("track_running_stats", true);
  auto made = std::make_unique<Norm>(o["num_features"].get<int64_t>(), options);
  Norm* module = made.get();
  return {std::move(made), [module, twice](const TensorList& x) {
            const Tensor first = (*module)(x[0]);
            return TensorList{twice ? (*module)(mul(x[0], 2)) : first};
          }};
}

Subject attention(const json& o, const json& forward) {
  nn::MultiheadAttentionOptions options{.bias = o.value("bias", true),
                                        .kdim = maybe(o, "kdim"),
                                        .vdim = maybe(o, "vdim"),
                                        .batch_first = o.value("batch_first", false)};
  auto made = std::make_unique<nn::MultiheadAttention>(o["embed_dim"].get<int64_t>(),
                                                       o["num_heads"].get<int64_t>(), options);
  auto* module = made.get();
  nn::AttentionMasks masks;
  masks.need_weights = forward.value("need_weights", true);
  masks.average_weights = forward.value("average_attn_weights", true);
  const bool is_attn_mask = forward.contains("attn_mask");
  return {std::move(made), [=](const TensorList& x) {
            nn::AttentionMasks own = masks;
            if (x.size() > 3) (is_attn_mask ? own.attn_mask : own.key_padding_mask) = x[3];
            const nn::AttentionResult result = (*module)(x[0], x[1], x[2], own);
            return own.need_weights ? TensorList{result.output, result.weights}
                                    : TensorList{result.output};
          }};
}

nn::TransformerLayerOptions layer_options(const json& o) {
  nn::TransformerLayerOptions options;
  options.dim_feedforward = o["dim_feedforward"];
  options.dropout = o["dropout"];
  options.norm_first = o.value("norm_first", false);
  options.batch_first = o.value("batch_first", false);
  if (o.value("activation", "relu") == "gelu")
    options.activation = nn::TransformerLayerOptions::Activation::kGelu;
  return options;
}

nn::RecurrentOptions recurrent_options(const json& o) {
  return {.num_layers = o.value("num_layers", int64_t{1}),
          .bias = o.value("bias", true),
          .batch_first = o.value("batch_first", false),
          .bidirectional = o.value("bidirectional", false),
          .proj_size = o.value("proj_size", int64_t{0})};
}

Subject make_subject(const std::string& kind, const json& o, const json& forward) {
  if (kind == "Linear")
    return simple<nn::Linear>(o["in_features"].get<int64_t>(), o["out_features"].get<int64_t>(),
                              nn::LinearOptions{o.value("bias", true)});
  if (kind == "Embedding")
    return simple<nn::Embedding>(o["num_embeddings"].get<int64_t>(),
                                 o["embedding_dim"].get<int64_t>(),
                                 nn::EmbeddingOptions{maybe(o, "padding_idx")});
  if (kind == "LayerNorm")
    return simple<nn::LayerNorm>(
        shape_of(o["normalized_shape"]),
        nn::LayerNormOptions{.eps = o.value("eps", 1e-5),
                             .elementwise_affine = o.value("elementwise_affine", true)});
  if (kind == "RMSNorm")
    return simple<nn::RMSNorm>(shape_of(o["normalized_shape"]),
                               nn::RmsNormOptions{.eps = o["eps"].get<double>()});
  if (kind == "GroupNorm")
    return simple<nn::GroupNorm>(o["num_groups"].get<int64_t>(), o["num_channels"].get<int64_t>());
  if (kind == "BatchNorm1d") return batch_norm<nn::BatchNorm1d>(o, forward.contains("twice"));
  if (kind == "BatchNorm2d") return batch_norm<nn::BatchNorm2d>(o, false);
  if (kind == "Conv1d") return convolution<nn::Conv1d>(o);
  if (kind == "Conv2d") return convolution<nn::Conv2d>(o);
  if (kind == "MultiheadAttention") return attention(o, forward);
  if (kind == "TransformerEncoderLayer") {
    auto made = std::make_unique<nn::TransformerEncoderLayer>(
        o["d_model"].get<int64_t>(), o["nhead"].get<int64_t>(), layer_options(o));
    auto* module = made.get();
    return {std::move(made), [module](const TensorList& x) {
              nn::EncoderMasks masks;
              if (x.size() > 1) masks.src_mask = x[1];
              return TensorList{(*module)(x[0], masks)};
            }};
  }
  if (kind == "TransformerDecoderLayer") {
    auto made = std::make_unique<nn::TransformerDecoderLayer>(
        o["d_model"].get<int64_t>(), o["nhead"].get<int64_t>(), layer_options(o));
    auto* module = made.get();
    return {std::move(made),
            [module](const TensorList& x) { return TensorList{(*module)(x[0], x[1])}; }};
  }
  if (kind == "LSTM") {
    auto made = std::make_unique<nn::LSTM>(o["input_size"].get<int64_t>(),
                                           o["hidden_size"].get<int64_t>(), recurrent_options(o));
    auto* module = made.get();
    return {std::move(made), [module](const TensorList& x) {
              const nn::LstmResult result =
                  x.size() > 1 ? (*module)(x[0], nn::LstmState{x[1], x[2]}) : (*module)(x[0]);
              return TensorList{result.output, result.state.hidden, result.state.cell};
            }};
  }
  TS_CHECK(kind == "GRU", "golden", "no module '", kind, "' here");
  auto made = std::make_unique<nn::GRU>(o["input_size"].get<int64_t>(),
                                        o["hidden_size"].get<int64_t>(), recurrent_options(o));
  auto* module = made.get();
  return {std::move(made), [module](const TensorList& x) {
            const nn::GruResult result = x.size() > 1 ? (*module)(x[0], x[1]) : (*module)(x[0]);
            return TensorList{result.output, result.hidden};
          }};
}

class GoldenModules : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, GoldenModules, testing::Values(kF64, kF32),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(GoldenModules, StateOutputsGradientsAndBuffersAreThoseOfTorch) {
  const DType dtype = GetParam();
  const SafeTensorsFile file(golden_path("modules.safetensors"));
  const json cases = golden_json("modules.json");
  EXPECT_EQ(cases.size(), 48u);
  // Norms, softmax and up to 60 products follow each other: a few dozen roundings.
  const double relative = dtype == kF64 ? 1e-12 : 64 * 0x1p-24;
  const auto cast = [&](const Tensor& x) {
    return is_floating(x.dtype()) ? converted(x, dtype) : x;
  };

  for (const json& golden : cases) {
    const std::string name = golden["name"];
    SCOPED_TRACE(name);
    const nn::ParameterDefaultsGuard defaults({.dtype = dtype});
    try {
      Subject subject = make_subject(golden["module"], golden["options"],
                                     golden.value("forward", json::object()));
      StateDict state;
      const std::string prefix = name + "/state.";
      for (const SafeTensorsEntry& entry : file.entries()) {
        if (entry.name.starts_with(prefix))
          state.set(entry.name.substr(prefix.size()), cast(file.load(entry.name)));
      }
      subject.module->load_state_dict(state);  // strict: every name and shape is torch's
      subject.module->train(golden["training"]);

      TensorList inputs;
      for (size_t i = 0; i < golden["inputs"].get<size_t>(); ++i) {
        Tensor x = cast(file.load(name + "/x" + std::to_string(i)));
        if (is_floating(x.dtype())) x.set_requires_grad();
        inputs.push_back(x);
      }
      const TensorList outputs = subject.call(inputs);
      ASSERT_EQ(outputs.size(), golden["outputs"].get<size_t>());
      TensorList followed, gradients;
      const auto check = [&](const Tensor& got, const std::string& key) {
        const double scale = golden["scales"].value(key, 1.0);
        ASSERT_TRUE(got.defined()) << key;
        const Tensor reference = file.view(name + "/" + key);
        EXPECT_EQ(got.shape(), reference.shape()) << key;
        EXPECT_EQ(difference(got, reference.to_vector(), relative * std::max(scale, 1.0)), "")
            << key;
      };
      for (size_t i = 0; i < outputs.size(); ++i) {
        check(outputs[i], "y" + std::to_string(i));
        const std::string dy = name + "/dy" + std::to_string(i);
        if (!file.contains(dy)) continue;
        followed.push_back(outputs[i]);
        gradients.push_back(cast(file.load(dy)));
      }
      backward(followed, gradients);
      for (size_t i = 0; i < inputs.size(); ++i) {
        const std::string key = "grad.x" + std::to_string(i);
        if (file.contains(name + "/" + key)) check(inputs[i].grad(), key);
      }
      for (const NamedTensor& parameter : subject.module->named_parameters())
        check(parameter.tensor.grad(), "grad." + parameter.name);
      for (const NamedTensor& buffer : subject.module->named_buffers())
        check(buffer.tensor, "after." + buffer.name);
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
}

}  // namespace
}  // namespace tessera::tests::test_golden_modules
