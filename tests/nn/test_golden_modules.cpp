// Modules against torch.nn: outputs, gradients of inputs and parameters, buffers after the call,
// from the same state dictionaries.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <type_traits>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/nn/activation.h>
#include <tessera/nn/conv.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>
#include <tessera/nn/parametrizations.h>
#include <tessera/nn/recurrent/packed_sequence.h>
#include <tessera/nn/recurrent/recurrent.h>
#include <tessera/nn/transformer/attention.h>
#include <tessera/nn/transformer/transformer.h>

#include "autograd/op_checks.h"
#include "golden_files.h"

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

template <class Conv>
Subject transposed_convolution(const json& o, const json& forward) {
  nn::ConvTransposeLayerOptions options;
  options.stride = shape_of(o.value("stride", json(1)));
  options.padding = shape_of(o.value("padding", json(0)));
  options.output_padding = shape_of(o.value("output_padding", json(0)));
  options.dilation = shape_of(o.value("dilation", json(1)));
  options.groups = o.value("groups", 1);
  options.bias = o.value("bias", true);
  auto made =
      std::make_unique<Conv>(o["in_channels"].get<int64_t>(), o["out_channels"].get<int64_t>(),
                             shape_of(o["kernel_size"]), options);
  Conv* module = made.get();
  const Shape size = forward.contains("output_size") ? shape_of(forward["output_size"]) : Shape{};
  return {std::move(made),
          [module, size](const TensorList& x) { return TensorList{(*module)(x[0], size)}; }};
}

template <class Norm>
Subject instance_norm(const json& o) {
  return simple<Norm>(
      o["num_features"].get<int64_t>(),
      nn::InstanceNormOptions{.momentum = o.value("momentum", 0.1),
                              .affine = o.value("affine", false),
                              .track_running_stats = o.value("track_running_stats", false)});
}

Subject embedding_bag(const json& o) {
  const std::string mode = o["mode"];
  const nn::EmbeddingBagLayerOptions options{.mode = mode == "sum"   ? BagMode::kSum
                                                     : mode == "max" ? BagMode::kMax
                                                                     : BagMode::kMean,
                                             .padding_idx = maybe(o, "padding_idx")};
  auto made = std::make_unique<nn::EmbeddingBag>(o["num_embeddings"].get<int64_t>(),
                                                 o["embedding_dim"].get<int64_t>(), options);
  auto* module = made.get();
  return {std::move(made),
          [module](const TensorList& x) { return TensorList{(*module)(x[0], x[1])}; }};
}

nn::RecurrentOptions recurrent_options(const json& o) {
  return {.num_layers = o.value("num_layers", int64_t{1}),
          .bias = o.value("bias", true),
          .batch_first = o.value("batch_first", false),
          .bidirectional = o.value("bidirectional", false),
          .proj_size = o.value("proj_size", int64_t{0}),
          .nonlinearity = o.value("nonlinearity", "tanh") == "relu"
                              ? nn::RecurrentOptions::Nonlinearity::kRelu
                              : nn::RecurrentOptions::Nonlinearity::kTanh};
}

template <class Result>
TensorList parts_of(const Tensor& output, const Result& result) {
  if constexpr (requires { result.state; }) {
    return {output, result.state.hidden, result.state.cell};
  } else {
    return {output, result.hidden};
  }
}

// LSTM, GRU or RNN; with "lengths" the sequences are packed on the way.
template <class M>
Subject recurrent(const json& o, const json& forward) {
  using State = std::conditional_t<std::is_same_v<M, nn::LSTM>, nn::LstmState, Tensor>;
  const nn::RecurrentOptions options = recurrent_options(o);
  auto made =
      std::make_unique<M>(o["input_size"].get<int64_t>(), o["hidden_size"].get<int64_t>(), options);
  auto* module = made.get();
  std::vector<int64_t> lengths;
  if (forward.contains("lengths")) lengths = forward["lengths"].get<std::vector<int64_t>>();
  return {std::move(made), [=](const TensorList& x) -> TensorList {
            State state;
            if constexpr (std::is_same_v<State, Tensor>) {
              if (x.size() > 1) state = x[1];
            } else {
              if (x.size() > 1) state = {x[1], x[2]};
            }
            if (lengths.empty()) {
              const auto result = (*module)(x[0], state);
              return parts_of(result.output, result);
            }
            const auto result = (*module)(
                nn::pack_padded_sequence(x[0], lengths, options.batch_first, false), state);
            const nn::PaddedSequence padded =
                nn::pad_packed_sequence(result.output, options.batch_first);
            EXPECT_EQ(padded.lengths, lengths);
            return parts_of(padded.sequence, result);
          }};
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
  if (kind == "ConvTranspose1d") return transposed_convolution<nn::ConvTranspose1d>(o, forward);
  if (kind == "ConvTranspose2d") return transposed_convolution<nn::ConvTranspose2d>(o, forward);
  if (kind == "Conv3d") return convolution<nn::Conv3d>(o);
  if (kind == "InstanceNorm1d") return instance_norm<nn::InstanceNorm1d>(o);
  if (kind == "InstanceNorm2d") return instance_norm<nn::InstanceNorm2d>(o);
  if (kind == "PReLU") return simple<nn::PReLU>(o["num_parameters"].get<int64_t>());
  if (kind == "EmbeddingBag") return embedding_bag(o);
  if (kind == "LSTM") return recurrent<nn::LSTM>(o, forward);
  if (kind == "RNN") return recurrent<nn::RNN>(o, forward);
  TS_CHECK(kind == "GRU", "golden", "no module '", kind, "' here");
  return recurrent<nn::GRU>(o, forward);
}

void parametrize(nn::ModuleBase& module, const json& how) {
  const json& options = how["options"];
  if (how["name"] == "weight_norm") {
    const bool whole = options.contains("dim") && options["dim"].is_null();
    nn::weight_norm(module, "weight",
                    whole ? std::nullopt : std::optional(options.value("dim", int64_t{0})));
    return;
  }
  TS_CHECK(how["name"] == "spectral_norm", "golden", "no parametrization ", how["name"].dump());
  nn::spectral_norm(module, "weight",
                    {.n_power_iterations = options.value("n_power_iterations", int64_t{1})});
}

class GoldenModules : public testing::TestWithParam<DType> {};
INSTANTIATE_TEST_SUITE_P(DTypes, GoldenModules, testing::Values(kF64, kF32),
                         [](const auto& info) { return std::string(name_of(info.param)); });

TEST_P(GoldenModules, StateOutputsGradientsAndBuffersAreThoseOfTorch) {
  const DType dtype = GetParam();
  const SafeTensorsFile file(golden_path("modules.safetensors"));
  const json cases = golden_json("modules.json");
  EXPECT_EQ(cases.size(), 77u);
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
      if (golden.contains("parametrization")) {
        parametrize(*subject.module, golden["parametrization"]);
      }
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
