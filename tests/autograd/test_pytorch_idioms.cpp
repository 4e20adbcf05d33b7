// What a user of PyTorch writes without looking: calls of modules, options in place, collate
// functions, gradients by name.
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <tessera.h>

#include "message_of.h"

namespace tessera::test_pytorch_idioms {
namespace {

using Values = std::vector<double>;

// ---- Calls --------------------------------------------------------------------------------------

struct ScaleOptions {
  double by = 1;
  bool negate = false;
  void visit_tensors(auto&&) {}
};
struct Scale : nn::Module<Scale> {
  Tensor forward(const Tensor& x, const Tensor& mask = {}, const ScaleOptions& options = {}) {
    ++calls;
    Tensor y = x * (options.negate ? -options.by : options.by);
    return mask.defined() ? y.masked_fill(mask, 0) : y;
  }
  int calls = 0;
};

TEST(ModuleCalls, ArgumentsMayBeInBraces) {
  Scale scale;
  const Tensor x = tensor({1, 2}), mask = tensor({1, 0}, kBool);
  EXPECT_EQ(scale(x).to_vector(), (Values{1, 2}));
  EXPECT_EQ(scale(x, {}).to_vector(), (Values{1, 2}));
  EXPECT_EQ(scale(x, mask).to_vector(), (Values{0, 2}));
  EXPECT_EQ(scale(x, mask, {.by = 3}).to_vector(), (Values{0, 6}));
  EXPECT_EQ(scale(x, {}, {.by = 2, .negate = true}).to_vector(), (Values{-2, -4}));
  EXPECT_EQ(scale(x, {}, ScaleOptions{.by = 5}).to_vector(), (Values{5, 10}));
  EXPECT_EQ(scale.calls, 6);
}

TEST(ModuleCalls, HooksSeeArgumentsInBraces) {
  Scale scale;
  std::vector<size_t> inputs;
  scale.register_forward_pre_hook(
      [&](nn::ModuleBase&, nn::TensorRefs tensors) { inputs.push_back(tensors.size()); });
  const Tensor x = tensor({1, 2}), mask = tensor({1, 0}, kBool);
  EXPECT_EQ(scale(x, {}, {.by = 2}).to_vector(), (Values{2, 4}));
  EXPECT_EQ(scale(x, mask, {.by = 2}).to_vector(), (Values{0, 4}));
  EXPECT_EQ(inputs, (std::vector<size_t>{1, 2}));
}

TEST(ModuleCalls, ConstModulesCanBeCalled) {
  Scale scale;
  const Scale& seen = scale;
  const Tensor x = tensor({1, 2});
  EXPECT_EQ(seen(x, {}, {.by = 3}).to_vector(), (Values{3, 6}));
  EXPECT_EQ(seen(x).to_vector(), (Values{1, 2}));
  EXPECT_EQ(scale.calls, 2);
  const nn::Sequential net(nn::layer<nn::Linear>(2, 3), nn::layer<nn::ReLU>());
  EXPECT_EQ(net(x).shape(), Shape({3}));
}

// ---- Options in place ---------------------------------------------------------------------------

struct BlockOptions {
  int64_t width = 4;
};
struct Block : nn::Module<Block> {
  using Options = BlockOptions;
  explicit Block(const BlockOptions& options = {})
      : fc(add<nn::Linear>("fc", 2, options.width, {.bias = false})) {}
  Tensor forward(const Tensor& x) { return fc(x); }
  nn::Linear& fc;
};
struct Net : nn::Module<Net> {
  Net()
      : conv(add<nn::Conv2d>("conv", 1, 8, 3, {.stride = 2, .padding = {1}})),
        norm(add<nn::LayerNorm>("norm", 4, {.eps = 1e-3})),
        words(add<nn::Embedding>("words", 5, 4, {.padding_idx = 0})),
        block(add<Block>("block", {.width = 6})) {}
  Tensor forward(const Tensor& x) { return conv(x); }
  nn::Conv2d& conv;
  nn::LayerNorm& norm;
  nn::Embedding& words;
  Block& block;
};

TEST(ModuleOptions, StandInBracesInsideAddLayerAppendAndInsert) {
  Net net;
  EXPECT_EQ(net(zeros({1, 1, 8, 8})).shape(), Shape({1, 8, 4, 4}));
  EXPECT_EQ(net.norm.options.eps, 1e-3);
  EXPECT_EQ(net.block.fc.weight.shape(), Shape({6, 2}));
  EXPECT_FALSE(net.block.fc.bias.defined());
  nn::Sequential list(nn::layer<nn::Conv2d>(1, 8, 3, {.stride = 2}), nn::layer<nn::Flatten>());
  EXPECT_EQ(list(zeros({1, 1, 9, 9})).shape(), Shape({1, 128}));
  EXPECT_FALSE(list.append<nn::Linear>(128, 2, {.bias = false}).bias.defined());
  nn::ModuleDict dict;
  EXPECT_FALSE(dict.insert<nn::Linear>("a", 2, 2, {.bias = false}).bias.defined());
}

TEST(ModuleOptions, OptionsAsAVariableAreTheSame) {
  const nn::LinearOptions fixed{.bias = false};
  nn::LinearOptions changing{.bias = false};
  nn::ModuleDict dict;
  EXPECT_FALSE(dict.insert<nn::Linear>("a", 2, 2, fixed).bias.defined());
  EXPECT_FALSE(dict.insert<nn::Linear>("b", 2, 2, changing).bias.defined());
}

// ---- Replacing ----------------------------------------------------------------------------------

struct Classifier : nn::Module<Classifier> {
  Classifier() : body(add<Block>("body")), head(add<nn::Linear>("head", 4, 10)) {}
  Tensor forward(const Tensor& x) { return head(body(x)); }
  Block& body;
  nn::Linear& head;
};

TEST(ModuleReplace, TheReferenceMeansTheNewChild) {
  manual_seed(1);
  Classifier model, other;
  const Tensor old = model.head.weight;
  nn::Linear& made = model.replace<nn::Linear>("head", 4, 3);
  EXPECT_EQ(&made, &model.head);
  EXPECT_EQ(model(zeros({5, 2})).shape(), Shape({5, 3}));
  EXPECT_EQ(old.shape(), Shape({10, 4}));  // whoever holds the old one keeps it
  EXPECT_EQ(made.dotted_name(), "head");
  std::vector<std::string> names;
  for (const auto& [name, parameter] : model.named_parameters()) names.push_back(name);
  EXPECT_EQ(names, (std::vector<std::string>{"body.fc.weight", "head.weight", "head.bias"}));
  // Initial values are those of the name, whenever it was made.
  other.replace<nn::Linear>("head", 4, 10);
  EXPECT_EQ(other.head.weight.to_vector(), Classifier().head.weight.to_vector());
  model.replace<nn::Linear>("body.fc", 2, 4, {.bias = true});
  EXPECT_TRUE(model.body.fc.bias.defined());
  EXPECT_EQ(model.body.fc.dotted_name(), "body.fc");
  sum(model(ones({5, 2}))).backward();
  EXPECT_TRUE(model.body.fc.weight.grad().defined());
}

TEST(ModuleReplace, WhatDoesNotFitChangesNothing) {
  Classifier model;
  const Tensor weight = model.head.weight;
  EXPECT_THROW(model.replace<nn::Linear>("tail", 4, 3), ValueError);
  EXPECT_THROW(model.replace<nn::Linear>("head", 4, -3), Error);
  EXPECT_TRUE(mentions(message_of<ValueError>([&] { model.replace<Block>("head"); }),
                       "the child 'head' is a Linear"));
  EXPECT_TRUE(model.head.weight.is(weight));
}

// ---- Loaders ------------------------------------------------------------------------------------

struct Sentence {
  std::string text;
  int label = 0;
};
struct Sentences : data::Dataset<Sentence> {
  int64_t size() const override { return 5; }
  Sentence get(int64_t i) const override {
    return {std::string(static_cast<size_t>(i), 'a'), static_cast<int>(i)};
  }
};
struct Counted {
  size_t letters = 0;
  int64_t rows = 0;
};
Counted count(std::span<Sentence> examples) {
  Counted result{.rows = std::ssize(examples)};
  for (const Sentence& example : examples) result.letters += example.text.size();
  return result;
}

TEST(LoaderCollate, EachLoaderMayHaveItsOwn) {
  const auto sentences = std::make_shared<Sentences>();
  for (const int workers : {0, 2}) {
    data::DataLoader counted(sentences, {.batch_size = 2, .workers = workers}, count);
    std::vector<size_t> letters;
    for (const Counted& batch : counted) letters.push_back(batch.letters);
    EXPECT_EQ(letters, (std::vector<size_t>{1, 5, 4}));
  }
  data::DataLoader labels(*sentences, {.batch_size = 3}, [](std::span<Sentence> examples) {
    std::vector<double> values;
    for (const Sentence& example : examples) values.push_back(example.label);
    return tensor(values, {std::ssize(examples)});
  });
  EXPECT_EQ(labels.next()->to_vector(), (Values{0, 1, 2}));
  data::DataLoader sampled(sentences, std::make_shared<data::SequentialSampler>(4),
                           {.batch_size = 4}, count);
  EXPECT_EQ(sampled.next()->letters, 6u);
}

struct Numbers : data::Dataset<int64_t> {
  int64_t size() const override { return 4; }
  int64_t get(int64_t i) const override { return i; }
};

TEST(LoaderCollate, TakesThePlaceOfTheRuleOfTheType) {
  const Numbers numbers;
  data::DataLoader doubled(numbers, {.batch_size = 4},
                           [](std::span<int64_t> examples) { return data::collate(examples) * 2; });
  EXPECT_EQ(doubled.next()->to_vector(), (Values{0, 2, 4, 6}));
  data::DataLoader plain(numbers, {.batch_size = 4});
  EXPECT_EQ(plain.next()->to_vector(), (Values{0, 1, 2, 3}));
}

TEST(LoaderCollate, PreparedLoadersKeepIt) {
  data::DataLoader counted(std::make_shared<Sentences>(), {.batch_size = 5}, count);
  accelerate::LoaderPlan plan;
  plan.prepare(counted);
  EXPECT_EQ(counted.next()->letters, 10u);
}

// ---- x[...] on its way through templates
// ---------------------------------------------------------

TEST(IndexedTensors, AreTensorsToMetricsAndBatches) {
  const Tensor x = tensor({1, 2});
  auto part = x[0];
  accelerate::detail::MetricLeaves leaves;
  leaves(part);
  EXPECT_EQ(leaves.tensors.size(), 1u);
  data::BatchTensors found;
  found(part);
  EXPECT_EQ(found.tensors.size(), 1u);
}

// ---- Gradients ----------------------------------------------------------------------------------

TEST(GradForms, InputsAreAListInBracesOrOne) {
  const Tensor x = tensor({2, 3}).requires_grad_(), w = tensor({5, 7}).requires_grad_();
  const Tensor y = (x * w).sum();
  const GradOptions keep{.retain_graph = true};
  const TensorList both = grad(y, {x, w}, {}, keep);
  EXPECT_EQ(both[0].to_vector(), (Values{5, 7}));
  EXPECT_EQ(both[1].to_vector(), (Values{2, 3}));
  EXPECT_EQ(grad(y, {w}, {}, keep)[0].to_vector(), (Values{2, 3}));
  EXPECT_EQ(grad(y, x, {}, keep)[0].to_vector(), (Values{5, 7}));
  EXPECT_EQ(grad(x * w, x, tensor({1, 10}))[0].to_vector(), (Values{5, 70}));
  EXPECT_EQ(grad(y, TensorList{x}, {}, keep).size(), 1u);
}

}  // namespace
}  // namespace tessera::test_pytorch_idioms

// Names of a user's own beside all of tessera's.
namespace names_of_a_user {
using namespace tessera;
struct Request {
  int number = 0;
};
int number_of(const Request& request) { return request.number; }
Tensor spread(const Tensor& x) { return x.std() + std::vector<int>(1).size(); }
}  // namespace names_of_a_user
