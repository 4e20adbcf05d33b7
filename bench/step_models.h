// Models that bench_step trains beside GPT-2 and BERT: bench/compare/pytorch_models.py has the same
// in PyTorch, layer by layer.
//
//     Cnn       images [N, 1, 28, 28], two convolutions, max pooling, one linear layer
//               (examples/cv_example.cpp)
//     Vit       images [N, 3, S, S] in patches of 4 x 4, pre-LayerNorm blocks with exact GELU, the
//               mean of all patches, one linear layer (Dosovitskiy et al. 2021)
//     LstmLm    a language model: embedding, LSTM, head
//     Llama     RMSNorm, rotary embedding, SwiGLU, half as many heads of keys and values, no biases
//               (Touvron et al. 2023)
#pragma once

#include <cmath>
#include <cstdint>
#include <utility>

#include <tessera/autograd/ops.h>
#include <tessera/nn/activation.h>
#include <tessera/nn/container.h>
#include <tessera/nn/conv.h>
#include <tessera/nn/dropout.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/fused.h>
#include <tessera/nn/init.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/module.h>
#include <tessera/nn/norm.h>
#include <tessera/nn/pooling.h>
#include <tessera/nn/recurrent/recurrent.h>

namespace bench {

using namespace tessera;

struct Cnn : nn::Module<Cnn> {
  Cnn()
      : features(add<nn::Sequential>(
            "features", nn::layer<nn::Conv2d>(1, 16, 5), nn::layer<nn::ReLU>(),
            nn::layer<nn::MaxPool2d>(2), nn::layer<nn::Conv2d>(16, 32, 5), nn::layer<nn::ReLU>(),
            nn::layer<nn::MaxPool2d>(2), nn::layer<nn::Flatten>(), nn::layer<nn::Dropout>(0.25))),
        classifier(add<nn::Linear>("classifier", 32 * 4 * 4, 10)) {}
  Tensor forward(const Tensor& images, const Tensor& labels) {
    return cross_entropy(classifier(features(images)), labels);
  }
  nn::Sequential& features;
  nn::Linear& classifier;
};

struct VitBlock : nn::Module<VitBlock> {
  VitBlock(int64_t width, int64_t heads)
      : heads(heads),
        ln_1(add<nn::LayerNorm>("ln_1", width)),
        qkv(add<nn::Linear>("qkv", width, 3 * width)),
        proj(add<nn::Linear>("proj", width, width)),
        ln_2(add<nn::LayerNorm>("ln_2", width)),
        mlp(add<nn::Mlp>("mlp", width, 4 * width, nn::MlpOptions{.approximate = Gelu::kNone})) {}
  Tensor forward(const Tensor& x) {
    const int64_t B = x.size(0), T = x.size(1), C = x.size(2);
    const Tensor packed = qkv(ln_1(x)).view({B, T, 3, heads, C / heads});
    const auto [after, second] = nn::residual_layer_norm(ln_2, proj(packed_attention(packed)), x);
    return after + mlp(second);
  }
  const int64_t heads;
  nn::LayerNorm& ln_1;
  nn::Linear& qkv;
  nn::Linear& proj;
  nn::LayerNorm& ln_2;
  nn::Mlp& mlp;
};

struct Vit : nn::Module<Vit> {
  Vit(int64_t layers, int64_t width, int64_t heads, int64_t patches, int64_t classes)
      : patch(add<nn::Conv2d>("patch", 3, width, 4, nn::ConvLayerOptions{.stride = {4}})),
        positions(parameter("positions", Shape{1, patches, width})),
        blocks(add<nn::ModuleList>("blocks")),
        norm(add<nn::LayerNorm>("norm", width)),
        head(add<nn::Linear>("head", width, classes)) {
    nn::init::normal(positions, 0, 0.02);
    for (int64_t i = 0; i < layers; ++i) blocks.append<VitBlock>(width, heads);
  }
  Tensor forward(const Tensor& images, const Tensor& labels) {
    Tensor x = flatten(patch(images), 2).transpose(1, 2) + positions;
    for (size_t i = 0; i < blocks.size(); ++i) x = blocks.at<VitBlock>(i)(x);
    return cross_entropy(head(mean(norm(x), {1})), labels);
  }
  nn::Conv2d& patch;
  const Tensor& positions;
  nn::ModuleList& blocks;
  nn::LayerNorm& norm;
  nn::Linear& head;
};

struct LstmLm : nn::Module<LstmLm> {
  LstmLm(int64_t layers, int64_t width, int64_t vocab)
      : embedding(add<nn::Embedding>("embedding", vocab, width)),
        lstm(add<nn::LSTM>("lstm", width, width,
                           nn::RecurrentOptions{.num_layers = layers, .batch_first = true})),
        head(add<nn::Linear>("head", width, vocab)) {}
  Tensor forward(const Tensor& tokens, const Tensor& targets) {
    const Tensor logits = head(lstm(embedding(tokens)).output);
    return cross_entropy(flatten(logits, 0, 1), flatten(targets));
  }
  nn::Embedding& embedding;
  nn::LSTM& lstm;
  nn::Linear& head;
};

// cos and sin of every position: [T, E / 2] each.
inline std::pair<Tensor, Tensor> rotary_tables(int64_t T, int64_t E) {
  const Tensor rates =
      exp(arange(0, E / 2, 1, kF32) * (-2 * std::log(10000.0) / static_cast<double>(E)));
  const Tensor angles = arange(0, T, 1, kF32).unsqueeze(1) * rates;
  return {cos(angles), sin(angles)};
}

struct LlamaBlock : nn::Module<LlamaBlock> {
  LlamaBlock(int64_t width, int64_t heads)
      : heads(heads),
        E(width / heads),
        norm_1(add<nn::RMSNorm>("norm_1", width)),
        q(add<nn::Linear>("q", width, width, kNoBias)),
        k(add<nn::Linear>("k", width, width / 2, kNoBias)),
        v(add<nn::Linear>("v", width, width / 2, kNoBias)),
        o(add<nn::Linear>("o", width, width, kNoBias)),
        norm_2(add<nn::RMSNorm>("norm_2", width)),
        gate(add<nn::Linear>("gate", width, inner(width), kNoBias)),
        up(add<nn::Linear>("up", width, inner(width), kNoBias)),
        down(add<nn::Linear>("down", inner(width), width, kNoBias)) {}
  // 8/3 of the width, in whole 64.
  static int64_t inner(int64_t width) { return (8 * width / 3 + 63) / 64 * 64; }
  Tensor forward(const Tensor& x, const Tensor& cos, const Tensor& sin) {
    const int64_t B = x.size(0), T = x.size(1);
    const Tensor y = norm_1(x);
    const auto split = [&](const Tensor& part) { return part.view({B, T, -1, E}).transpose(1, 2); };
    const Tensor attended = scaled_dot_product_attention(
        rotary_embedding(split(q(y)), cos, sin), rotary_embedding(split(k(y)), cos, sin),
        split(v(y)), {.causal = true, .enable_gqa = true});
    const Tensor middle = x + o(attended.transpose(1, 2).reshape({B, T, heads * E}));
    const Tensor z = norm_2(middle);
    return middle + down(silu(gate(z)) * up(z));
  }
  static constexpr nn::LinearOptions kNoBias{.bias = false};
  const int64_t heads, E;
  nn::RMSNorm& norm_1;
  nn::Linear& q;
  nn::Linear& k;
  nn::Linear& v;
  nn::Linear& o;
  nn::RMSNorm& norm_2;
  nn::Linear& gate;
  nn::Linear& up;
  nn::Linear& down;
};

struct Llama : nn::Module<Llama> {
  Llama(int64_t layers, int64_t width, int64_t heads, int64_t context, int64_t vocab)
      : embedding(add<nn::Embedding>("embedding", vocab, width)),
        blocks(add<nn::ModuleList>("blocks")),
        norm(add<nn::RMSNorm>("norm", width)),
        head(add<nn::Linear>("head", width, vocab, nn::LinearOptions{.bias = false})),
        tables_(rotary_tables(context, width / heads)) {
    TS_CHECK(heads % 2 == 0, "Llama", "needs an even number of heads, two for each of keys; got ",
             heads);
    for (int64_t i = 0; i < layers; ++i) blocks.append<LlamaBlock>(width, heads);
  }
  Tensor forward(const Tensor& tokens, const Tensor& targets) {
    Tensor x = embedding(tokens);
    const Tensor cos = tables_.first.to(x.device()).to(x.dtype());
    const Tensor sin = tables_.second.to(x.device()).to(x.dtype());
    for (size_t i = 0; i < blocks.size(); ++i) x = blocks.at<LlamaBlock>(i)(x, cos, sin);
    return nn::linear_cross_entropy(head, flatten(norm(x), 0, 1), flatten(targets));
  }
  nn::Embedding& embedding;
  nn::ModuleList& blocks;
  nn::RMSNorm& norm;
  nn::Linear& head;

 private:
  std::pair<Tensor, Tensor> tables_;
};

}  // namespace bench
