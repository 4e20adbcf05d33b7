// What layers promise beyond the values that test_golden_nn compares with torch's: initial values,
// shapes, modes, masks, printing, errors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/profile/profiler.h>
#include <tessera/core/random.h>
#include <tessera/nn/activation.h>
#include <tessera/nn/container.h>
#include <tessera/nn/conv.h>
#include <tessera/nn/dropout.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/fused.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/loss.h>
#include <tessera/nn/norm.h>
#include <tessera/nn/pooling.h>
#include <tessera/nn/recurrent/recurrent.h>
#include <tessera/nn/summary.h>
#include <tessera/nn/transformer/attention.h>
#include <tessera/nn/transformer/positions.h>
#include <tessera/nn/transformer/residual.h>
#include <tessera/nn/transformer/transformer.h>

namespace tessera::nn::test_layers {
namespace {

Tensor random(const Shape& shape, uint64_t stream = 0) {
  return randn(shape, {}, RandomStream{11, stream});
}

double largest_difference(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.shape(), b.shape());
  return (a - b).abs().max().item();
}
double bound_of(const Tensor& x) { return x.abs().max().item(); }

// ---- Initial values are torch's ----------------------------------------------------------------

TEST(Layers, LinearAndConvolutionsBeginUniformByFanIn) {
  const Linear linear(400, 50);
  EXPECT_LE(bound_of(linear.weight), 0.05);
  EXPECT_GT(bound_of(linear.weight), 0.0495);
  EXPECT_LE(bound_of(linear.bias), 0.05);
  const Conv2d conv(8, 16, 5, {.groups = 2});
  EXPECT_EQ(conv.weight.shape(), (Shape{16, 4, 5, 5}));
  EXPECT_LE(bound_of(conv.weight), 0.1);
  EXPECT_GT(bound_of(conv.weight), 0.098);
  EXPECT_LE(bound_of(conv.bias), 0.1);
}

TEST(Layers, NormsBeginAsIdentity) {
  const LayerNorm layer(4);
  EXPECT_EQ(layer.weight.to_vector(), std::vector<double>(4, 1));
  EXPECT_EQ(layer.bias.to_vector(), std::vector<double>(4, 0));
  EXPECT_FALSE(LayerNorm(4, {.bias = false}).bias.defined());
  EXPECT_FALSE(LayerNorm(4, {.elementwise_affine = false}).weight.defined());
  const BatchNorm1d batch(3);
  EXPECT_EQ(batch.running_mean.to_vector(), std::vector<double>(3, 0));
  EXPECT_EQ(batch.running_var.to_vector(), std::vector<double>(3, 1));
  EXPECT_EQ(batch.num_batches_tracked.item<int64_t>(), 0);
}

TEST(Layers, EmbeddingPaddingBeginsAsZerosAndGetsNoGradient) {
  Embedding embedding(5, 3, {.padding_idx = -1});
  EXPECT_EQ(embedding.weight.select(0, 4).to_vector(), std::vector<double>(3, 0));
  embedding(tensor(std::vector<int64_t>{4, 1}, {2})).backward(ones({2, 3}));
  EXPECT_EQ(embedding.weight.grad().select(0, 4).to_vector(), std::vector<double>(3, 0));
  EXPECT_EQ(embedding.weight.grad().select(0, 1).to_vector(), std::vector<double>(3, 1));
  EXPECT_THROW(Embedding(5, 3, {.padding_idx = 5}), IndexError);
}

TEST(Layers, AttentionBeginsXavierAndWithoutBias) {
  const MultiheadAttention attention(64, 4);
  const double bound = std::sqrt(6.0 / (64 + 3 * 64));
  EXPECT_LE(bound_of(attention.in_proj_weight), bound);
  EXPECT_GT(bound_of(attention.in_proj_weight), bound * 0.99);
  EXPECT_EQ(bound_of(attention.in_proj_bias), 0);
  EXPECT_EQ(bound_of(attention.out_proj.bias), 0);
}

TEST(Layers, RecurrentParametersHaveTorchsNamesAndBounds) {
  const GRU gru(3, 16, {.num_layers = 2, .bidirectional = true});
  std::vector<std::string> names;
  for (const auto& [name, parameter] : gru.named_parameters()) {
    names.push_back(name);
    EXPECT_LE(bound_of(parameter), 0.25) << name;
  }
  EXPECT_EQ(names.size(), 16u);
  EXPECT_EQ(names[0], "weight_ih_l0");
  EXPECT_EQ(names[4], "weight_ih_l0_reverse");
  EXPECT_EQ(gru.get_parameter("weight_ih_l1_reverse").shape(), (Shape{48, 32}));
}

// ---- Modes -------------------------------------------------------------------------------------

TEST(Layers, DropoutActsInTrainingOnly) {
  Dropout dropout(0.25);
  const Tensor x = ones({100, 100});
  const auto values = dropout(x).to_vector();
  const auto zeros = std::ranges::count(values, 0.0);
  EXPECT_NEAR(static_cast<double>(zeros) / 1e4, 0.25, 0.02);
  EXPECT_FLOAT_EQ(static_cast<float>(std::ranges::max(values)), 1 / 0.75f);
  dropout.eval();
  EXPECT_EQ(dropout(x).to_vector(), x.to_vector());
  EXPECT_THROW(Dropout(1.5), ValueError);
}

TEST(Layers, BatchNormCountsBatchesWhileTraining) {
  BatchNorm2d norm(3, {.momentum = std::nullopt});
  norm(random({2, 3, 4, 4}));
  norm(random({2, 3, 4, 4}, 1));
  EXPECT_EQ(norm.num_batches_tracked.item<int64_t>(), 2);
  const auto mean = norm.running_mean.to_vector();
  norm.eval();
  norm(random({2, 3, 4, 4}, 2));
  EXPECT_EQ(norm.num_batches_tracked.item<int64_t>(), 2);
  EXPECT_EQ(norm.running_mean.to_vector(), mean);
  EXPECT_THROW(norm(random({2, 4, 4, 4})), ShapeError);
  EXPECT_THROW(BatchNorm1d(3)(random({2, 3, 4, 4})), ShapeError);
}

// ---- Attention and transformers ----------------------------------------------------------------

TEST(Attention, WeightsAndFusedPathAgreeUnderEveryMask) {
  MultiheadAttention attention(8, 2, {.batch_first = true});
  const Tensor x = random({2, 5, 8});
  const Tensor padding = tensor({0, 0, 0, 0, 1, 0, 0, 0, 1, 1}, kBool).view({2, 5});
  const Tensor additive = random({4, 5, 5}, 3);
  for (AttentionMasks masks :
       {AttentionMasks{}, AttentionMasks{.causal = true},
        AttentionMasks{.key_padding_mask = padding}, AttentionMasks{.attn_mask = additive},
        AttentionMasks{.key_padding_mask = padding, .attn_mask = additive},
        AttentionMasks{.key_padding_mask = padding, .causal = true},
        AttentionMasks{.attn_mask = additive, .causal = true},
        AttentionMasks{.key_padding_mask = padding, .attn_mask = additive, .causal = true}}) {
    const Tensor fused = attention(x, x, x, masks).output;
    masks.need_weights = true;
    const AttentionResult composed = attention(x, x, x, masks);
    EXPECT_LT(largest_difference(fused, composed.output), 1e-5);
    EXPECT_LT(largest_difference(composed.weights.sum({-1}), ones({2, 5})), 1e-5);
    // One tensor given as three tensors takes the path of separate products.
    const Tensor copy = x.clone();
    EXPECT_LT(largest_difference(attention(x, copy, copy, masks).output, composed.output), 1e-5);
  }
}

TEST(Attention, CausalFlagIsTheTriangularMask) {
  MultiheadAttention attention(8, 2);
  const Tensor x = random({5, 3, 8});
  const Tensor mask = triu(ones({5, 5}, {.dtype = kBool}), 1);
  EXPECT_LT(largest_difference(attention(x, x, x, AttentionMasks{.causal = true}).output,
                               attention(x, x, x, AttentionMasks{.attn_mask = mask}).output),
            1e-5);
}

TEST(Attention, AQueryThatSeesNoKeyHasWeightsAndGradientsOfZero) {
  MultiheadAttention attention(8, 2, {.batch_first = true});
  const Tensor all_hidden = tensor({0, 0, 1, 1, 1, 1}, kBool).view({2, 3});
  const Tensor first_hidden = tensor({1, 0, 0, 1, 0, 0}, kBool).view({2, 3});  // of causal, row 0
  const double hidden = -std::numeric_limits<double>::infinity();
  const Tensor additive =
      tensor({0, 0, 0, hidden, hidden, hidden, 0, hidden, 0}).to(kF32).view({3, 3});
  for (AttentionMasks masks :
       {AttentionMasks{.key_padding_mask = all_hidden},
        AttentionMasks{.key_padding_mask = first_hidden, .causal = true},
        AttentionMasks{.attn_mask = eq(additive, hidden)}, AttentionMasks{.attn_mask = additive},
        AttentionMasks{.key_padding_mask = first_hidden, .attn_mask = additive, .causal = true}}) {
    TensorList gradients[2];
    Tensor outputs[2];
    for (const bool weights : {false, true}) {
      masks.need_weights = weights;
      const Tensor x = random({2, 3, 8}).set_requires_grad();
      attention.zero_grad();
      const AttentionResult result = attention(x, x, x, masks);
      square(result.output).sum().backward();
      outputs[weights] = result.output.detach();
      gradients[weights] = {x.grad(), attention.in_proj_weight.grad()};
      if (!weights) continue;
      const std::vector<double> sums = result.weights.sum({-1}).to_vector();
      EXPECT_GE(std::ranges::count(sums, 0.0), 1);
      for (const double sum : sums) EXPECT_TRUE(sum == 0 || std::abs(sum - 1) < 1e-6) << sum;
    }
    EXPECT_LT(largest_difference(outputs[0], outputs[1]), 1e-5);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_LT(largest_difference(gradients[0][i], gradients[1][i]), 1e-5);
    }
  }
}

TEST(Attention, WorksWithoutABatchAndRefusesOtherShapes) {
  MultiheadAttention attention(8, 2);
  const Tensor x = random({5, 8});
  const AttentionResult result = attention(x, x, x, AttentionMasks{.need_weights = true});
  EXPECT_EQ(result.output.shape(), (Shape{5, 8}));
  EXPECT_EQ(result.weights.shape(), (Shape{5, 5}));
  EXPECT_LT(largest_difference(attention(x.unsqueeze(1), x.unsqueeze(1), x.unsqueeze(1)).output,
                               result.output.unsqueeze(1)),
            1e-5);
  EXPECT_THROW(attention(random({5, 7}), x, x), ShapeError);
  EXPECT_THROW(attention(x, x, x, AttentionMasks{.attn_mask = zeros({4, 5})}), ShapeError);
  EXPECT_THROW(MultiheadAttention(8, 3), ValueError);
}

TEST(Transformer, StacksRunTheirLayersInOrder) {
  const TransformerLayerOptions options{.dim_feedforward = 16, .dropout = 0, .norm_first = true};
  TransformerEncoder encoder(8, 2, 3, options, true);
  TransformerDecoder decoder(8, 2, 2, options);
  const Tensor source = random({4, 2, 8}), target = random({3, 2, 8}, 1);
  Tensor x = source;
  for (size_t i = 0; i < 3; ++i) x = encoder.layers.at<TransformerEncoderLayer>(i)(x);
  const Tensor memory = encoder(source);
  EXPECT_LT(largest_difference(memory, (*encoder.norm)(x)), 1e-6);
  EXPECT_EQ(decoder(target, memory, DecoderMasks{.causal = true}).shape(), target.shape());
  const auto copy = encoder.clone();
  EXPECT_EQ(largest_difference((*copy)(source), memory), 0);
  EXPECT_NE(encoder.get_parameter("layers.0.linear1.weight").to_vector(),
            encoder.get_parameter("layers.1.linear1.weight").to_vector());
}

// Each Dropout has its place, once, and in evaluation the layer is the one without them.
TEST(Transformer, DropoutActsAtItsPlacesInTrainingOnly) {
  const Tensor source = random({4, 2, 8}), target = random({3, 2, 8}, 1);
  for (const bool norm_first : {false, true}) {
    const TransformerLayerOptions options{
        .dim_feedforward = 16, .dropout = 0.5, .norm_first = norm_first};
    TransformerLayerOptions without = options;
    without.dropout = 0;
    TransformerEncoderLayer encoder(8, 2, options), plain_encoder(8, 2, without);
    TransformerDecoderLayer decoder(8, 2, options), plain_decoder(8, 2, without);
    plain_encoder.load_state_dict(encoder.state_dict());
    plain_decoder.load_state_dict(decoder.state_dict());
    const auto encode = [&](TransformerEncoderLayer& layer) { return layer(source); };
    const auto decode = [&](TransformerDecoderLayer& layer) { return layer(target, source); };
    const auto expect = [](auto& layer, auto& plain, auto run, std::vector<Dropout*> places) {
      std::vector<int> calls(places.size());
      std::vector<HookHandle> handles;
      for (size_t i = 0; i < places.size(); ++i) {
        handles.push_back(places[i]->register_forward_hook([&calls, i](auto&&...) { ++calls[i]; }));
      }
      EXPECT_GT(largest_difference(run(layer), run(layer)), 1e-3) << "drawn anew";
      EXPECT_EQ(calls, std::vector<int>(places.size(), 2));
      const Tensor trained = run(plain);
      layer.eval(), plain.eval();
      EXPECT_EQ(largest_difference(run(layer), run(layer)), 0);
      EXPECT_LT(largest_difference(run(layer), run(plain)), 1e-6);
      EXPECT_LT(largest_difference(run(plain), trained), 1e-6);
      layer.train();
      EXPECT_GT(largest_difference(run(layer), run(plain)), 1e-3);
    };
    expect(encoder, plain_encoder, encode,
           {&encoder.dropout, &encoder.dropout1, &encoder.dropout2});
    expect(decoder, plain_decoder, decode,
           {&decoder.dropout, &decoder.dropout1, &decoder.dropout2, &decoder.dropout3});
  }
}

TEST(Transformer, ACausalDecoderDoesNotSeeTheFuture) {
  TransformerDecoder decoder(8, 2, 2, {.dim_feedforward = 16, .dropout = 0, .batch_first = true});
  const Tensor memory = random({1, 3, 8}), target = random({1, 4, 8}, 1);
  const Tensor changed = target.clone();
  {
    const NoGradGuard no_grad;
    changed.select(1, 3).zero_();
  }
  const DecoderMasks masks{.causal = true};
  const Tensor a = decoder(target, memory, masks), b = decoder(changed, memory, masks);
  EXPECT_LT(largest_difference(a.narrow(1, 0, 3), b.narrow(1, 0, 3)), 1e-6);
  EXPECT_GT(largest_difference(a.select(1, 3), b.select(1, 3)), 1e-3);
}

TEST(Transformer, CausalAndPaddingGoTogether) {
  const TransformerLayerOptions options{.dim_feedforward = 16, .dropout = 0, .batch_first = true};
  TransformerEncoder encoder(8, 2, 2, options);
  TransformerDecoder decoder(8, 2, 2, options);
  const Tensor x = random({2, 4, 8}), memory = random({2, 3, 8}, 1);
  const Tensor padding = tensor({0, 0, 0, 1, 0, 0, 1, 1}, kBool).view({2, 4});
  const Tensor triangle = triu(ones({4, 4}, {.dtype = kBool}), 1);
  EXPECT_LT(largest_difference(
                encoder(x, EncoderMasks{.src_key_padding_mask = padding, .causal = true}),
                encoder(x, EncoderMasks{.src_mask = triangle, .src_key_padding_mask = padding})),
            1e-5);
  EXPECT_LT(
      largest_difference(
          decoder(x, memory, DecoderMasks{.tgt_key_padding_mask = padding, .causal = true}),
          decoder(x, memory, DecoderMasks{.tgt_mask = triangle, .tgt_key_padding_mask = padding})),
      1e-5);
}

// ---- Recurrent ---------------------------------------------------------------------------------

TEST(Recurrent, CellsStepAsTheLayersDo) {
  LSTM lstm(3, 4);
  LSTMCell lstm_cell(3, 4);
  GRU gru(3, 4);
  GRUCell gru_cell(3, 4);
  const auto copy = [](ModuleBase& layer, ModuleBase& cell) {
    StateDict state;
    for (const auto& [name, value] : layer.state_dict())
      state.set(name.substr(0, name.size() - 3), value);
    cell.load_state_dict(state);
  };
  copy(lstm, lstm_cell);
  copy(gru, gru_cell);
  const Tensor x = random({6, 2, 3});
  const LstmResult whole = lstm(x);
  const GruResult gru_whole = gru(x);
  LstmState state;
  Tensor hidden;
  for (int64_t t = 0; t < 6; ++t) {
    state = lstm_cell(x.select(0, t), state);
    hidden = gru_cell(x.select(0, t), hidden);
    EXPECT_LT(largest_difference(state.hidden, whole.output.select(0, t)), 1e-6);
    EXPECT_LT(largest_difference(hidden, gru_whole.output.select(0, t)), 1e-6);
  }
  EXPECT_LT(largest_difference(state.cell, whole.state.cell.select(0, 0)), 1e-6);
}

TEST(Recurrent, WorksWithoutABatchAndGoesOnFromAState) {
  GRU gru(3, 4, {.num_layers = 2});
  const Tensor x = random({6, 3});
  const GruResult whole = gru(x);
  EXPECT_EQ(whole.output.shape(), (Shape{6, 4}));
  EXPECT_EQ(whole.hidden.shape(), (Shape{2, 4}));
  const GruResult first = gru(x.narrow(0, 0, 2)), second = gru(x.narrow(0, 2, 4), first.hidden);
  EXPECT_LT(largest_difference(second.output, whole.output.narrow(0, 2, 4)), 1e-6);
  EXPECT_THROW(gru(random({6, 4})), ShapeError);
  EXPECT_THROW(gru(x, zeros({3, 4})), ShapeError);
  EXPECT_THROW(LSTM(3, 4)(x, LstmState{zeros({1, 4}), {}}), ValueError);
}

TEST(Recurrent, OnlyAnLstmProjectsAndToLessThanItsHiddenSize) {
  const LstmResult result =
      LSTM(3, 8, {.num_layers = 2, .proj_size = 2})(random({4, 5, 3}), LstmState{});
  EXPECT_EQ(result.output.shape(), (Shape{4, 5, 2}));
  EXPECT_EQ(result.state.hidden.shape(), (Shape{2, 5, 2}));
  EXPECT_EQ(result.state.cell.shape(), (Shape{2, 5, 8}));
  EXPECT_THROW(LSTM(3, 8, {.proj_size = 8}), ValueError);
  EXPECT_THROW(LSTM(3, 8, {.proj_size = -1}), ValueError);
  EXPECT_THROW(GRU(3, 8, {.proj_size = 2}), ValueError);
}

TEST(Recurrent, DropoutStandsBetweenLayersAndNotBehindTheLast) {
  const Tensor x = random({4, 2, 3});
  LSTM lstm(3, 8, {.num_layers = 2, .dropout = 0.9});
  const LstmResult result = lstm(x);
  EXPECT_EQ(largest_difference(result.output.select(0, 3), result.state.hidden.select(0, 1)), 0);
  GRU gru(3, 8, {.num_layers = 2, .dropout = 0.9});
  const GruResult of_gru = gru(x);
  EXPECT_EQ(largest_difference(of_gru.output.select(0, 3), of_gru.hidden.select(0, 1)), 0);

  // So that of one layer does nothing, as in torch.
  LSTM one(3, 8, {.dropout = 0.9});
  GRU one_gru(3, 8, {.dropout = 0.9});
  const Tensor training = one(x).output, training_of_gru = one_gru(x).output;
  one.eval(), one_gru.eval();
  EXPECT_EQ(largest_difference(one(x).output, training), 0);
  EXPECT_EQ(largest_difference(one_gru(x).output, training_of_gru), 0);
}

// ---- Dropout within modules --------------------------------------------------------------------

struct DropoutCase {
  const char* name;
  std::function<std::unique_ptr<ModuleBase>(double p)> make;
  std::function<Tensor(ModuleBase&)> run;
};

// Every module that takes a rate of dropout.
std::vector<DropoutCase> dropout_cases() {
  const auto layer_options = [](double p, bool norm_first) {
    return TransformerLayerOptions{.dim_feedforward = 16, .dropout = p, .norm_first = norm_first};
  };
  const Tensor x = random({4, 2, 8}), memory = random({3, 2, 8}, 1);
  const auto make_attention = [](double p) {
    return std::make_unique<MultiheadAttention>(8, 2, MultiheadAttentionOptions{.dropout = p});
  };
  return {
      {"MultiheadAttention", make_attention,
       [=](ModuleBase& m) { return static_cast<MultiheadAttention&>(m)(x, x, x).output; }},
      {"MultiheadAttention with weights", make_attention,
       [=](ModuleBase& m) {
         const AttentionMasks masks{.need_weights = true};
         return static_cast<MultiheadAttention&>(m)(x, x, x, masks).output;
       }},
      {"TransformerEncoderLayer",
       [=](double p) {
         return std::make_unique<TransformerEncoderLayer>(8, 2, layer_options(p, false));
       },
       [=](ModuleBase& m) { return static_cast<TransformerEncoderLayer&>(m)(x); }},
      {"TransformerDecoderLayer",
       [=](double p) {
         return std::make_unique<TransformerDecoderLayer>(8, 2, layer_options(p, false));
       },
       [=](ModuleBase& m) { return static_cast<TransformerDecoderLayer&>(m)(x, memory); }},
      {"TransformerEncoder",
       [=](double p) {
         return std::make_unique<TransformerEncoder>(8, 2, 2, layer_options(p, true), true);
       },
       [=](ModuleBase& m) { return static_cast<TransformerEncoder&>(m)(x); }},
      {"TransformerDecoder",
       [=](double p) {
         return std::make_unique<TransformerDecoder>(8, 2, 2, layer_options(p, true), true);
       },
       [=](ModuleBase& m) { return static_cast<TransformerDecoder&>(m)(x, memory); }},
      {"LSTM",
       [](double p) {
         return std::make_unique<LSTM>(8, 4, RecurrentOptions{.num_layers = 2, .dropout = p});
       },
       [=](ModuleBase& m) { return static_cast<LSTM&>(m)(x).output; }},
      {"GRU",
       [](double p) {
         return std::make_unique<GRU>(
             8, 4, RecurrentOptions{.num_layers = 3, .dropout = p, .bidirectional = true});
       },
       [=](ModuleBase& m) { return static_cast<GRU&>(m)(x).output; }},
  };
}

TEST(DropoutWithin, EvaluationIsThatOfTheModuleWithoutIt) {
  for (const DropoutCase& one : dropout_cases()) {
    const auto with = one.make(0.5), without = one.make(0);
    const Tensor expected = one.run(*without);
    EXPECT_GT(largest_difference(one.run(*with), expected), 1e-3) << one.name;
    with->eval();
    EXPECT_EQ(largest_difference(one.run(*with), expected), 0) << one.name;
    without->eval();
    EXPECT_EQ(largest_difference(one.run(*without), expected), 0) << one.name;
  }
}

TEST(DropoutWithin, TrainingDiffersByTheSeedAndRepeatsByIt) {
  for (const DropoutCase& one : dropout_cases()) {
    const auto module = one.make(0.5);
    const auto run = [&](uint64_t seed) {
      manual_seed(seed);
      return one.run(*module);
    };
    const Tensor first = run(1), other = run(2);
    EXPECT_GT(largest_difference(first, other), 1e-3) << one.name;
    EXPECT_EQ(largest_difference(run(1), first), 0) << one.name;
    EXPECT_GT(largest_difference(one.run(*module), first), 1e-3) << one.name;  // the next call
  }
}

// ---- Fused ops over modules --------------------------------------------------------------------

std::vector<std::string> ops_of(const std::function<void()>& function) {
  Profiler profiler;
  {
    const ProfilerScope scope(profiler);
    function();
  }
  std::vector<std::string> names;
  for (const auto& [name, entry] : profiler.entries()) names.push_back(name);
  return names;
}

HookHandle hook_that_only_looks(ModuleBase& module) {
  return module.register_forward_hook([](ModuleBase&, TensorRefs, TensorRefs) {});
}

TEST(FusedModules, AreOneOpWhileNothingHangsOnTheModules) {
  const NoGradGuard no_grad;
  Mlp mlp(4, 8, {.inner = "c_fc", .outer = "c_proj"});
  LayerNorm norm(4);
  Linear head(4, 5, {.bias = false});
  Embedding table(5, 4);
  const Tensor x = random({3, 4}), target = zeros({3}, {.dtype = kI64});
  const auto ops = [&] {
    return ops_of([&] {
      embedding_add(table, target, x);
      mlp(x);
      linear_gelu(mlp.inner, x);
      residual_layer_norm(norm, x, x);
      linear_cross_entropy(head, x, target);
    });
  };
  const std::vector<std::string> fused = {"embedding_add", "linear_cross_entropy", "linear_gelu",
                                          "linear_gelu_linear", "residual_layer_norm"};
  EXPECT_EQ(ops(), fused);
  std::vector<HookHandle> hooks;
  for (ModuleBase* one : std::initializer_list<ModuleBase*>{&mlp.outer, &norm, &head, &table}) {
    hooks.push_back(hook_that_only_looks(*one));
  }
  EXPECT_EQ(ops(), (std::vector<std::string>{"add", "cross_entropy", "embedding", "layer_norm",
                                             "linear", "linear_gelu"}));
  hooks.push_back(hook_that_only_looks(mlp.inner));
  EXPECT_EQ(ops(), (std::vector<std::string>{"add", "cross_entropy", "embedding", "gelu",
                                             "layer_norm", "linear"}));
  for (HookHandle& hook : hooks) hook.remove();
  EXPECT_EQ(ops(), fused);
  EXPECT_EQ(mlp.state_dict().begin()->name, "c_fc.weight");
}

// What GELU was applied to; its result is made again.
TEST(FusedModules, AnMlpKeepsItsHiddenLayerOnce) {
  constexpr int64_t kRows = 64, kWidth = 16, kHidden = 64;
  for (const bool frozen : {false, true}) {
    Mlp mlp(kWidth, kHidden);
    if (frozen) mlp.inner.requires_grad_(false);
    const Tensor x = ones({kRows, kWidth});
    const int64_t before = memory_stats()->current(MemoryCategory::kActivation);
    const Tensor y = mlp(x);
    EXPECT_EQ(memory_stats()->current(MemoryCategory::kActivation) - before,
              static_cast<int64_t>(sizeof(float)) * kRows * (kHidden + kWidth));
    y.sum().backward();
    EXPECT_EQ(mlp.outer.weight.grad().to_vector(),
              matmul(ones({kWidth, kRows}), gelu(mlp.inner(x))).to_vector());
    EXPECT_EQ(mlp.inner.weight.grad().defined(), !frozen);
  }
}

TEST(FusedModules, CalledModulesGiveTheSameWithinRounding) {
  for (const Gelu gelu : {Gelu::kNone, Gelu::kTanh}) {
    const auto results = [&](bool called) {
      Mlp mlp(16, 32, {.approximate = gelu});
      LayerNorm norm(16);
      Linear head(16, 7, {.bias = false});
      if (called) {
        for (ModuleBase* one :
             std::initializer_list<ModuleBase*>{&mlp.inner, &mlp.outer, &norm, &head}) {
          hook_that_only_looks(*one);
        }
      }
      const Tensor x = random({5, 16}).set_requires_grad();
      const Tensor target = tensor(std::vector<int64_t>{1, 6, -100, 0, 3}, {5});
      const auto [sum, normed] =
          residual_layer_norm(norm, mlp(x), linear_gelu(mlp.outer, mlp.inner(x), gelu));
      const Tensor loss = linear_cross_entropy(head, normed, target) + sum.mean();
      loss.backward();
      return TensorList{loss.detach(),           sum.detach(),          x.grad(),
                        mlp.inner.weight.grad(), mlp.outer.bias.grad(), norm.weight.grad(),
                        head.weight.grad()};
    };
    const TensorList fused = results(false), called = results(true);
    for (size_t i = 0; i < fused.size(); ++i) {
      EXPECT_LT(largest_difference(called[i], fused[i]), 16 * epsilon_of(kF32)) << i;
    }
  }
}

// What an adapter (LoRA) does: it adds to what a layer gives.
TEST(FusedModules, WhatAHookAddsToALayerTakesPart) {
  Mlp mlp(4, 8);
  const Tensor x = random({3, 4});
  const Tensor expected = mlp.outer(gelu(mlp.inner(x) + 1.0));
  HookHandle hook = mlp.inner.register_forward_hook(
      [](ModuleBase&, TensorRefs, TensorRefs outputs) { *outputs[0] = *outputs[0] + 1.0; });
  EXPECT_LT(largest_difference(mlp(x), expected), 16 * epsilon_of(kF32));
  hook.remove();
  EXPECT_GT(largest_difference(mlp(x), expected), 1e-3);
}

TEST(Positions, CountFromWhatIsBefore) {
  EXPECT_EQ(positions(3, kCpu).to_vector<int64_t>(), (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(positions(2, kCpu, 5).to_vector<int64_t>(), (std::vector<int64_t>{5, 6}));
}

// A block's addition is left to the norm that comes next, and hooks see each module.
TEST(ResidualBlocks, AreTheirFormulaInFewerOps) {
  LayerNorm first(4), second(4), last(4);
  Mlp one(4, 8), two(4, 8);
  const Tensor x = random({3, 4});
  const auto blocks = [&] {
    Residual stream = pre_norm_residual(x, first, one);
    stream = pre_norm_residual(stream, second, two);
    return pre_norm(last, stream);
  };
  const auto ops = [&] { return ops_of([&] { static_cast<void>(blocks()); }); };
  const std::vector<std::string> fused = {"layer_norm", "linear_gelu_linear",
                                          "residual_layer_norm"};
  const Tensor middle = x + one(first(x));
  const Tensor expected = last(middle + two(second(middle)));
  const NoGradGuard no_grad;
  EXPECT_LT(largest_difference(blocks(), expected), 16 * epsilon_of(kF32));
  EXPECT_EQ(ops(), fused);
  int calls = 0;
  std::vector<HookHandle> hooks;
  for (ModuleBase* module : std::initializer_list<ModuleBase*>{&first, &second, &last, &one, &two,
                                                               &one.inner, &two.outer}) {
    hooks.push_back(
        module->register_forward_hook([&](ModuleBase&, TensorRefs, TensorRefs) { ++calls; }));
  }
  EXPECT_LT(largest_difference(blocks(), expected), 16 * epsilon_of(kF32));
  EXPECT_EQ(calls, 7);
  for (HookHandle& hook : hooks) hook.remove();
}

TEST(ResidualBlocks, DropWhatAPartGives) {
  LayerNorm norm(64);
  Mlp mlp(64, 64);
  const Tensor x = random({8, 64});
  const Residual all = pre_norm_residual(x, norm, mlp, {.dropout = 1});
  EXPECT_EQ(all.tensor().to_vector(), x.to_vector());
  manual_seed(3);
  const Tensor half = pre_norm_residual(x, norm, mlp, {.dropout = 0.5}).update;
  manual_seed(3);
  EXPECT_EQ(half.to_vector(), dropout(mlp(norm(x)), 0.5).to_vector());
}

TEST(FusedModules, AHeadWithABiasUsesIt) {
  Linear head(4, 5);
  const Tensor x = random({3, 4}), target = tensor(std::vector<int64_t>{1, 4, 0}, {3});
  EXPECT_EQ(linear_cross_entropy(head, x, target).item(), cross_entropy(head(x), target).item());
}

// ---- Convolution, losses, printing -------------------------------------------------------------

TEST(Layers, AnImageClassifierRunsAndLearns) {
  manual_seed(3);
  Sequential net(layer<Conv2d>(1, 4, 3, ConvLayerOptions{.same_padding = true}), layer<ReLU>(),
                 layer<MaxPool2d>(2), layer<BatchNorm2d>(4), layer<AdaptiveAvgPool2d>(2),
                 layer<Flatten>(), layer<Linear>(16, 3));
  CrossEntropyLoss loss_of;
  const Tensor images = random({6, 1, 8, 8});
  const Tensor labels = tensor(std::vector<int64_t>{0, 1, 2, 0, 1, 2}, {6});
  double first = 0, last = 0;
  for (int step = 0; step < 60; ++step) {
    const Tensor loss = loss_of(net(images), labels);
    net.zero_grad();
    loss.backward();
    const NoGradGuard no_grad;
    for (const Tensor& p : net.parameters()) p.sub_(p.grad() * 0.5);
    (step == 0 ? first : last) = loss.item();
  }
  EXPECT_LT(last, first / 3);
}

TEST(Layers, SamePaddingKeepsSizesOfEvenKernelsToo) {
  Conv1d conv(2, 3, 4, {.dilation = {3}, .same_padding = true});
  EXPECT_EQ(conv(random({1, 2, 17})).shape(), (Shape{1, 3, 17}));
  EXPECT_THROW(Conv1d(2, 2, 3, {.stride = {2}, .same_padding = true}), ValueError);
  EXPECT_THROW(Conv1d(3, 2, 3, {.groups = 2}), ValueError);
}

TEST(Layers, LossesAreTheirOps) {
  const Tensor x = random({4, 3}), y = random({4, 3}, 1);
  const Tensor labels = tensor(std::vector<int64_t>{0, 2, 1, 1}, {4});
  const Tensor weight = tensor({1, 2, 3});
  const auto expect_equal = [](const Tensor& a, const Tensor& b) { EXPECT_EQ(a.item(), b.item()); };
  expect_equal(MSELoss()(x, y), mse_loss(x, y));
  expect_equal(L1Loss(Reduction::kSum)(x, y), l1_loss(x, y, Reduction::kSum));
  expect_equal(SmoothL1Loss(Reduction::kMean, 0.5)(x, y),
               smooth_l1_loss(x, y, Reduction::kMean, 0.5));
  expect_equal(HuberLoss(Reduction::kMean, 0.5)(x, y), huber_loss(x, y, Reduction::kMean, 0.5));
  expect_equal(CrossEntropyLoss({.weight = weight, .label_smoothing = 0.1})(x, labels),
               cross_entropy(x, labels, {.weight = weight, .label_smoothing = 0.1}));
  expect_equal(NLLLoss()(log_softmax(x, 1), labels), nll_loss(log_softmax(x, 1), labels));
  expect_equal(BCEWithLogitsLoss({.pos_weight = weight})(x, sigmoid(y)),
               binary_cross_entropy_with_logits(x, sigmoid(y), {}, Reduction::kMean, weight));
  expect_equal(KLDivLoss(KlReduction::kBatchMean)(log_softmax(x, 1), softmax(y, 1)),
               kl_div(log_softmax(x, 1), softmax(y, 1), KlReduction::kBatchMean));
}

TEST(Layers, ActivationsAreTheirOps) {
  const Tensor x = random({3, 4});
  const auto expect_equal = [](const Tensor& a, const Tensor& b) {
    EXPECT_EQ(a.to_vector(), b.to_vector());
  };
  expect_equal(GELU(Gelu::kTanh)(x), gelu(x, Gelu::kTanh));
  expect_equal(SiLU()(x), silu(x));
  expect_equal(Tanh()(x), tanh(x));
  expect_equal(Sigmoid()(x), sigmoid(x));
  expect_equal(LeakyReLU(0.2)(x), leaky_relu(x, 0.2));
  expect_equal(ELU(0.5)(x), elu(x, 0.5));
  expect_equal(Softplus(2)(x), softplus(x, 2));
  expect_equal(GLU()(x), glu(x));
  expect_equal(Softmax(0)(x), softmax(x, 0));
  expect_equal(LogSoftmax(1)(x), log_softmax(x, 1));
  expect_equal(Identity()(x), x);
}

TEST(Layers, PrintTheirOptionsAsTorchDoes) {
  EXPECT_EQ(Conv2d(3, 8, {3, 2}, {.padding = {1, 0}, .bias = false}).repr(),
            "Conv2d(3, 8, kernel_size=(3, 2), stride=(1, 1), padding=(1, 0), bias=False)");
  EXPECT_EQ(LayerNorm({2, 3}).repr(), "LayerNorm((2, 3), eps=1e-05, elementwise_affine=True)");
  EXPECT_EQ(BatchNorm2d(4).repr(),
            "BatchNorm2d(4, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)");
  EXPECT_EQ(Embedding(7, 3, {.padding_idx = 0}).repr(), "Embedding(7, 3, padding_idx=0)");
  EXPECT_EQ(LSTM(3, 4, {.num_layers = 2, .dropout = 0.5}).repr(),
            "LSTM(3, 4, num_layers=2, dropout=0.5)");
  EXPECT_EQ(LSTM(3, 4, {.num_layers = 2, .proj_size = 2}).repr(),
            "LSTM(3, 4, proj_size=2, num_layers=2)");
  EXPECT_EQ(MaxPool2d(2).repr(),
            "MaxPool2d(kernel_size=2, stride=2, padding=0, dilation=1, ceil_mode=False)");
  EXPECT_EQ(Dropout(0.1).repr(), "Dropout(p=0.1)");
}

TEST(Summary, CountsAndLeavesTheModelAsItWas) {
  Sequential net(layer<Linear>(4, 8), layer<ReLU>(), layer<Linear>(8, 2));
  const Tensor x = random({5, 4});
  const auto before = net(x).to_vector();
  const Summary result = summary(net, x);
  EXPECT_EQ(result.parameters, 4 * 8 + 8 + 8 * 2 + 2);
  EXPECT_EQ(result.flops, 2.0 * 5 * (4 * 8 + 8 * 2));
  ASSERT_EQ(result.rows.size(), 4u);
  EXPECT_EQ(result.rows[1].output, "[5, 8]");
  EXPECT_EQ(result.rows[3].flops, 2.0 * 5 * 8 * 2);
  EXPECT_EQ(result.activation_bytes, 5 * (8 + 8 + 2) * 4);
  EXPECT_EQ(net(x).to_vector(), before);
  EXPECT_NE(result.table().find("  0: Linear  [5, 8]"), std::string::npos) << result.table();
}

TEST(Summary, CountsConvolutionsAndAttention) {
  const auto image = empty({2, 6, 8, 8}, {.device = kMeta});
  Conv2d convolution(6, 4, 3, {.padding = {1}, .groups = 2});
  EXPECT_EQ(summary(convolution, image).flops, 2.0 * (2 * 4 * 8 * 8) * (3 * 3 * 3));
  const Tensor x = empty({2, 7, 8}, {.device = kMeta});
  MultiheadAttention attention(8, 2, {.batch_first = true});
  const double projections = 4 * 2.0 * (2 * 7) * 8 * 8, products = 2 * 2.0 * (2 * 7 * 7) * 8;
  EXPECT_EQ(summary(attention, x, x, x).flops, projections + products);
}

// ---- Operations counted while an op runs -------------------------------------------------------

// Those of f(), forward and backward apart.
struct Flops {
  double forward, backward;
};
template <class F>
Flops count(F&& f) {
  FlopCounter& counter = Context::current().slot<FlopCounter>();
  counter = {.enabled = true};
  const Tensor y = f();
  const double forward = counter.total;
  y.sum().backward();
  const double total = counter.total;
  counter = {};
  return {forward, total - forward};
}

TEST(Flops, BackwardOfAConvolutionIsTwoOfTheForward) {
  const Tensor x = random({2, 6, 9, 9}).set_requires_grad();
  const Tensor weight = random({4, 3, 3, 3}).set_requires_grad();
  const ConvOptions options{.stride = {2}, .groups = 2};
  const Flops both = count([&] { return conv2d(x, weight, {}, options); });
  EXPECT_EQ(both.forward, 2.0 * (2 * 4 * 4 * 4) * (3 * 3 * 3));
  EXPECT_EQ(both.backward, 2 * both.forward);
  const Flops one = count([&] { return conv2d(x.detach(), weight, {}, options); });
  EXPECT_EQ(one.backward, one.forward);
}

TEST(Flops, BackwardOfAttentionIsFiveProductsOfVisiblePairs) {
  const Tensor q = random({2, 4, 6, 8}).set_requires_grad();
  const Tensor k = random({2, 2, 5, 8}).set_requires_grad();
  const Tensor v = random({2, 2, 5, 3}).set_requires_grad();
  for (bool causal : {false, true}) {
    const double pairs = 2 * 4 * (causal ? 1 + 2 + 3 + 4 + 5 + 5 : 6 * 5);
    const Flops flops = count([&] {
      return scaled_dot_product_attention(q, k, v, {.causal = causal, .enable_gqa = true});
    });
    EXPECT_EQ(flops.forward, 2 * pairs * (8 + 3));
    EXPECT_EQ(flops.backward, 2 * pairs * (3 * 8 + 2 * 3));
  }
  const Tensor packed = random({2, 6, 3, 4, 8}).set_requires_grad();
  const Flops flops = count([&] { return packed_attention(packed, {.causal = true}); });
  EXPECT_EQ(flops.forward, 2.0 * (2 * 4 * 21) * (8 + 8));
  EXPECT_EQ(flops.backward, 2.0 * (2 * 4 * 21) * 5 * 8);
}

TEST(Flops, BackwardOfAFusedLayerIsTwoOfTheForward) {
  const Tensor x = random({5, 4}).set_requires_grad(), w = random({3, 4}).set_requires_grad();
  const Flops flops = count([&] { return linear_gelu(x, w, {}, Gelu::kTanh); });
  EXPECT_EQ(flops.forward, 2.0 * 5 * 3 * 4);
  EXPECT_EQ(flops.backward, 2 * flops.forward);
  const Tensor out = random({2, 3}).set_requires_grad();
  const Flops both = count([&] { return linear_gelu_linear(x, w, {}, out, {}); });
  EXPECT_EQ(both.forward, flops.forward + 2.0 * 5 * 2 * 3);
  EXPECT_EQ(both.backward, 2 * both.forward);
}

}  // namespace
}  // namespace tessera::nn::test_layers
