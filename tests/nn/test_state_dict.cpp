#include <tessera/core/state/state_dict.h>

#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include <tessera/autograd/ops.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/nn/container.h>
#include <tessera/nn/init.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/norm.h>

#include "message_of.h"

namespace tessera::nn::test_state_dict {
namespace {

Sequential make_net() { return Sequential(layer<Linear>(2, 3), layer<Linear>(3, 1)); }

TEST(StateDict, KeepsTheOrderOfInsertionAndReplacesByName) {
  StateDict state;
  state.set("b", scalar_tensor(1, kI64));
  state.set("a", scalar_tensor(2, kI64));
  state.set("b", scalar_tensor(3, kI64));
  ASSERT_EQ(state.size(), 2u);
  EXPECT_EQ(state.begin()->name, "b");
  EXPECT_EQ(state.scalar("b"), 3);
  EXPECT_EQ(state.find("c"), nullptr);
  EXPECT_EQ(state.count("c"), 0u);
  EXPECT_THROW(state.at("c"), ValueError);
}

TEST(StateDict, MergesUnderAPrefixAndBack) {
  StateDict inner, outer;
  inner.set("weight", scalar_tensor(1, kF32));
  outer.merge("model.", inner);
  outer.set("step", scalar_tensor(5, kI64));
  const StateDict back = outer.with_prefix("model.");
  ASSERT_EQ(back.size(), 1u);
  EXPECT_TRUE(back.at("weight").is(inner.at("weight")));
}

TEST(StateDict, CloneIsASnapshotOfAnyLayout) {
  const Tensor x = tensor({1, 2, 3, 4, 5, 6}).view({2, 3});
  StateDict state;
  state.set("x", x.transpose(0, 1));
  const StateDict copy = state.clone();
  x.zero_();
  EXPECT_EQ(copy.at("x").to_vector(), (std::vector<double>{1, 4, 2, 5, 3, 6}));
  EXPECT_EQ(state.at("x").to_vector(), std::vector<double>(6, 0));
}

TEST(StateDict, ListsParametersBuffersAndThenChildren) {
  struct Model : Module<Model> {
    Model() {
      add<Linear>("fc", 2, 2, LinearOptions{.bias = false});
      buffer("kept", zeros({1}));
      buffer("passing", zeros({1}), false);
      parameter("scale", Shape{1});
    }
  };
  Model model;
  std::vector<std::string> names;
  for (const auto& entry : model.state_dict()) names.push_back(entry.name);
  EXPECT_EQ(names, (std::vector<std::string>{"scale", "kept", "fc.weight"}));
}

TEST(StateDict, LoadsWhatAnotherModelSaved) {
  Sequential source = make_net(), target = make_net();
  init::constant(source[1].get_parameter("bias"), 5);
  target.load_state_dict(source.state_dict());
  const Tensor x = ones({1, 2});
  EXPECT_EQ(target(x).to_vector(), source(x).to_vector());
  EXPECT_FALSE(target.get_parameter("1.bias").is(source.get_parameter("1.bias")));
}

TEST(StateDict, ReportsEverythingThatDoesNotFitAtOnceAndWritesNothing) {
  Sequential net = make_net();
  const auto before = net.get_parameter("1.bias").to_vector();
  StateDict state = net.state_dict().clone();
  StateDict broken;
  for (const auto& [name, value] : state) {
    if (name == "0.bias") continue;
    broken.set(name, name == "0.weight" ? zeros({3, 3}) : value + 1);
  }
  broken.set("extra.weight", zeros({1}));
  const std::string message = message_of([&] { net.load_state_dict(broken); });
  EXPECT_NE(message.find("missing in the state (1):\n    0.bias"), std::string::npos) << message;
  EXPECT_NE(message.find("unexpected in the state (1):\n    extra.weight"), std::string::npos)
      << message;
  EXPECT_NE(message.find("0.weight: the module has f32[3, 2] cpu, the state has f32[3, 3] cpu"),
            std::string::npos)
      << message;
  // Not strict it would fail as well: a shape is the harder reason.
  EXPECT_EQ(message.find("strict"), std::string::npos) << message;
  EXPECT_EQ(net.get_parameter("1.bias").to_vector(), before);
}

TEST(StateDict, NotStrictReturnsNamesButRefusesOtherShapes) {
  Sequential net = make_net();
  StateDict state;
  state.set("1.bias", full({1}, 9));
  state.set("other", zeros({1}));
  const LoadReport report = net.load_state_dict(state, {.strict = false});
  EXPECT_EQ(report.unexpected, std::vector<std::string>{"other"});
  EXPECT_EQ(report.missing, (std::vector<std::string>{"0.weight", "0.bias", "1.weight"}));
  EXPECT_EQ(net.get_parameter("1.bias").item(), 9);
  state.set("0.bias", zeros({7}));
  EXPECT_THROW(net.load_state_dict(state, {.strict = false}), ValueError);
}

TEST(StateDict, ATiedParameterNeedsOneOfItsNames) {
  struct Tied : Module<Tied> {
    Tied() : a(add<Linear>("a", 2, 2)), b(add<Linear>("b", 2, 2)) {
      b.share_parameter("weight", a.weight);
    }
    Linear& a;
    Linear& b;
  };
  Tied tied;
  StateDict state;
  for (const char* name : {"b.weight", "a.bias", "b.bias"}) {
    state.set(name, full(tied.state_dict().at(name).shape(), 2));
  }
  EXPECT_NO_THROW(tied.load_state_dict(state));
  EXPECT_EQ(tied.a.weight.to_vector(), std::vector<double>(4, 2));
}

TEST(StateDict, LoadConvertsDtypesAndKeepsHandles) {
  Linear layer(2, 2, {.bias = false});
  const Tensor handle = layer.weight;
  StateDict state;
  state.set("weight", full({2, 2}, 0.5, {.dtype = kBF16}));
  layer.load_state_dict(state);
  EXPECT_EQ(handle.dtype(), kF32);
  EXPECT_EQ(handle.to_vector(), std::vector<double>(4, 0.5));
  EXPECT_TRUE(handle.requires_grad());
}

TEST(StateDict, AModelWithoutBytesTakesThoseOfTheState) {
  std::unique_ptr<Linear> layer;
  {
    const ParameterDefaultsGuard guard({.device = kMeta});
    layer = std::make_unique<Linear>(2, 2, LinearOptions{.bias = false});
  }
  StateDict state;
  state.set("weight", full({2, 2}, 3));
  layer->load_state_dict(state);
  EXPECT_EQ(layer->weight.to_vector(), std::vector<double>(4, 3));
  init::zeros(layer->weight);
  EXPECT_EQ(state.at("weight").to_vector(), std::vector<double>(4, 3));
}

TEST(StateDict, GoesThroughASafetensorsFile) {
  const auto path =
      (std::filesystem::path(testing::TempDir()) / "tessera_state_dict.safetensors").string();
  Sequential source = make_net();
  save_safetensors(path, source.state_dict().to_map());
  Sequential target = make_net();
  init::zeros(target.get_parameter("0.weight"));
  target.load_state_dict(StateDict::from_map(load_safetensors(path)));
  EXPECT_EQ(target.get_parameter("0.weight").to_vector(),
            source.get_parameter("0.weight").to_vector());
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace tessera::nn::test_state_dict
