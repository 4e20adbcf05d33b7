#include <tessera/nn/module.h>

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <tessera/autograd/ops.h>
#include <tessera/nn/activation.h>
#include <tessera/nn/container.h>
#include <tessera/nn/init.h>
#include <tessera/nn/linear.h>

#include "message_of.h"

namespace tessera::nn::test_module {
namespace {

struct Mlp : Module<Mlp> {
  explicit Mlp(int64_t width)
      : fc(add<Linear>("fc", width, 2 * width)), proj(add<Linear>("proj", 2 * width, width)) {}
  Tensor forward(const Tensor& x) { return proj(relu(fc(x))); }
  std::unique_ptr<Mlp> remake() const { return std::make_unique<Mlp>(fc.in_features); }
  Linear& fc;
  Linear& proj;
};

struct Net : Module<Net> {
  Net() : mlp(add<Mlp>("mlp", 3)), count(buffer("count", tensor({0.0}))) {}
  Tensor forward(const Tensor& x) { return mlp(x); }
  Mlp& mlp;
  const Tensor& count;
};

std::vector<std::string> names_of(const NamedTensors& named) {
  std::vector<std::string> names;
  for (const auto& one : named) names.push_back(one.name);
  return names;
}

TEST(Module, NamesParametersByTheirPlace) {
  Net net;
  EXPECT_EQ(names_of(net.named_parameters()),
            (std::vector<std::string>{"mlp.fc.weight", "mlp.fc.bias", "mlp.proj.weight",
                                      "mlp.proj.bias"}));
  EXPECT_EQ(names_of(net.named_buffers()), std::vector<std::string>{"count"});
  EXPECT_EQ(net.mlp.fc.dotted_name(), "mlp.fc");
  EXPECT_EQ(&net.submodule("mlp.proj"), &net.mlp.proj);
  EXPECT_TRUE(net.get_parameter("mlp.fc.bias").is(net.mlp.fc.bias));
  EXPECT_EQ(net.num_parameters(), 6 * 3 + 6 + 3 * 6 + 3);
}

TEST(Module, ErrorsNameTheInnermostModuleOnce) {
  Net net;
  const std::string message = message_of([&] { net(zeros({2, 4})); });
  EXPECT_EQ(message.substr(0, 8), "mlp.fc: ") << message;
  EXPECT_EQ(message.find("mlp.fc", 1), std::string::npos) << message;
  EXPECT_EQ(call_site(), "");
  // The next error is named anew.
  EXPECT_EQ(message_of([&] { net.mlp.proj(zeros({2, 4})); }).substr(0, 10), "mlp.proj: ");
}

TEST(Module, ExceptionsOfTheUserAreNamedToo) {
  struct TooLong : std::length_error {
    using std::length_error::length_error;
  };
  struct Thrower : Module<Thrower> {
    Tensor forward(int kind) {
      if (kind == 0) throw std::runtime_error("no file");
      if (kind == 1) throw TooLong("300 tokens");
      throw std::bad_alloc();
    }
  };
  struct Root : Module<Root> {
    Root() : inner(add<Thrower>("inner")) {}
    Tensor forward(int kind) { return inner(kind); }
    Thrower& inner;
  };
  struct Top : Module<Top> {
    Top() : root(add<Root>("root")) {}
    Tensor forward(int kind) { return root(kind); }
    Root& root;
  };
  Top top;
  const auto text_of = [&](int kind, auto as) -> std::string {
    try {
      top(kind);
    } catch (const decltype(as)& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_EQ(text_of(0, std::runtime_error("")), "root.inner: no file");
  EXPECT_EQ(text_of(1, TooLong("")), "root.inner: 300 tokens");
  EXPECT_EQ(text_of(2, std::bad_alloc()), std::bad_alloc().what());
}

TEST(Module, CallSiteIsTheDottedName) {
  struct Probe : Module<Probe> {
    std::string forward(int) { return call_site(); }
  };
  struct Root : Module<Root> {
    Root() : inner(add<Probe>("inner")) {}
    std::string forward(int x) { return inner(x) + "|" + call_site(); }
    Probe& inner;
  };
  Root root;
  EXPECT_EQ(root(1), "inner|");
}

TEST(Module, InitialValuesDependOnSeedAndNameAlone) {
  manual_seed(7);
  Linear alone(4, 4);
  manual_seed(7);
  rand({5});  // moves the context's own streams
  struct Two : Module<Two> {
    Two() : b(add<Linear>("b", 4, 4)), a(add<Linear>("a", 4, 4)) {}
    Linear& b;
    Linear& a;
  };
  Two two;
  manual_seed(7);
  struct Reversed : Module<Reversed> {
    Reversed() : a(add<Linear>("a", 4, 4)), b(add<Linear>("b", 4, 4)) {}
    Linear& a;
    Linear& b;
  };
  Reversed reversed;
  EXPECT_EQ(two.a.weight.to_vector(), reversed.a.weight.to_vector());
  EXPECT_EQ(two.b.weight.to_vector(), reversed.b.weight.to_vector());
  EXPECT_NE(two.a.weight.to_vector(), two.b.weight.to_vector());
  const InitialName scope("a");
  EXPECT_EQ(Linear(4, 4).weight.to_vector(), two.a.weight.to_vector());
  EXPECT_NE(alone.weight.to_vector(), two.a.weight.to_vector());
}

TEST(Module, DefaultsMakeParametersOfAnyDTypeOrWithoutBytes) {
  {
    const ParameterDefaultsGuard guard({.dtype = kBF16});
    EXPECT_EQ(Linear(2, 2).weight.dtype(), kBF16);
  }
  const ParameterDefaultsGuard guard({.device = kMeta});
  Linear huge(1 << 20, 1 << 20);
  EXPECT_TRUE(huge.weight.is_meta());
  EXPECT_EQ(huge(empty({3, 1 << 20}, {.device = kMeta})).shape(), (Shape{3, 1 << 20}));
}

TEST(Module, AParameterIsNotANumberUntilItIsFilled) {
  struct Forgetful : Module<Forgetful> {
    Forgetful() : w(parameter("w", {4})) {}
    Tensor forward(const Tensor& x) { return mul(x, w); }
    const Tensor& w;
  };
  for (const DType dtype : {kF32, kBF16, kF64}) {
    const ParameterDefaultsGuard guard({.dtype = dtype});
    for (const double value : Forgetful().w.to_vector()) EXPECT_TRUE(std::isnan(value)) << dtype;
  }
}

// ---- Modules by value ---------------------------------------------------------------------------

TEST(Module, AModuleByValueIsAnError) {
  struct Direct : Module<Direct> {
    Tensor forward(const Tensor& x) { return fc(x); }
    Linear fc{2, 2};
  };
  EXPECT_EQ(
      message_of([] { Direct direct; }),
      "Direct: holds a Linear by value, which would be neither trained nor saved; make it with "
      "add<Linear>(\"name\", ...) and keep the reference");
  struct Late : Module<Late> {
    Tensor forward(const Tensor& x) { return (*fc)(x); }
    std::optional<Linear> fc;
  };
  Late late;
  EXPECT_EQ(message_of([&] { late.fc.emplace(2, 2); }).substr(0, 28),
            "Late: holds a Linear by valu");
  struct Heads {
    std::array<Linear, 2> heads{Linear(2, 2), Linear(2, 2)};
  };
  struct Nested : Module<Nested> {
    Nested() : fc(add<Linear>("fc", 2, 2)) {}
    Tensor forward(const Tensor& x) { return heads.heads[0](x); }
    Linear& fc;
    Heads heads;
  };
  EXPECT_EQ(message_of([] { std::make_unique<Nested>(); }).substr(0, 25),
            "Nested: holds a Linear by");
}

TEST(Module, ModulesBesideEachOtherAreNoMistake) {
  struct Named {
    std::string name = "a member before the base";
  };
  struct Second : Named, Module<Second> {
    Tensor forward(const Tensor& x) { return x; }
  };
  struct Program {  // no module: whoever owns it trains what it holds
    Mlp model{2};
    Linear head{2, 2};
    Second second;
    Linear behind{2, 2};
    std::array<Linear, 2> more{Linear(2, 2), Linear(2, 2)};
  };
  Program program;
  EXPECT_EQ(program.head(program.second(zeros({1, 2}))).shape(), (Shape{1, 2}));
  // Where a module was, another thing may stand.
  alignas(Mlp) std::array<std::byte, 64 + sizeof(Mlp) + sizeof(Linear)> place;
  std::destroy_at(new (place.data()) Mlp(2));
  auto* inside = new (place.data() + 64) Linear(2, 2);
  EXPECT_EQ(inside->dotted_name(), "");
  std::destroy_at(inside);
}

TEST(Module, ParametersCountAsParameterMemory) {
  const int64_t before = memory_stats()->current(MemoryCategory::kParameter);
  const Linear layer(64, 64);
  EXPECT_GE(memory_stats()->current(MemoryCategory::kParameter) - before, 64 * 65 * 4);
}

TEST(Module, TrainAndEvalReachEveryModule) {
  Net net;
  EXPECT_TRUE(net.mlp.fc.is_training());
  net.eval();
  EXPECT_FALSE(net.mlp.fc.is_training());
  net.train();
  EXPECT_TRUE(net.mlp.fc.is_training());
}

TEST(Module, ToDtypeKeepsHandles) {
  Net net;
  const Tensor weight = net.mlp.fc.weight;
  net.mlp.fc.weight.set_grad(ones_like(weight));
  net.to(kBF16);
  EXPECT_EQ(weight.dtype(), kBF16);
  EXPECT_TRUE(weight.is(net.mlp.fc.weight));
  EXPECT_TRUE(weight.requires_grad());
  EXPECT_EQ(weight.grad().dtype(), kBF16);
  EXPECT_EQ(net.count.dtype(), kBF16);
}

TEST(Module, RequiresGradAndZeroGradReachAll) {
  Net net;
  net.requires_grad_(false);
  for (const Tensor& p : net.parameters()) EXPECT_FALSE(p.requires_grad());
  net.requires_grad_();
  net(ones({1, 3})).backward(ones({1, 3}));
  for (const Tensor& p : net.parameters()) EXPECT_TRUE(p.grad().defined());
  net.zero_grad();
  for (const Tensor& p : net.parameters()) EXPECT_FALSE(p.grad().defined());
}

TEST(Module, ApplyVisitsChildrenFirst) {
  Net net;
  std::vector<std::string> order;
  net.apply([&](ModuleBase& module) { order.push_back(module.type_name()); });
  EXPECT_EQ(order, (std::vector<std::string>{"Linear", "Linear", "Mlp", "Net"}));
}

TEST(Module, NamesMustBeNewAndWithoutDots) {
  struct Bad : Module<Bad> {
    explicit Bad(const char* name) {
      parameter("weight", Shape{1});
      add<Linear>(name, 1, 1);
    }
  };
  EXPECT_THROW(Bad("weight"), ValueError);
  EXPECT_THROW(Bad("a.b"), ValueError);
  EXPECT_THROW(Bad(""), ValueError);
  EXPECT_NO_THROW(Bad("fc"));
}

// ---- Tied weights and clones -------------------------------------------------------------------

struct Tied : Module<Tied> {
  Tied() : first(add<Linear>("first", 3, 3)), second(add<Linear>("second", 3, 3)) {
    second.share_parameter("weight", first.weight);
  }
  Tensor forward(const Tensor& x) { return second(first(x)); }
  std::unique_ptr<Tied> remake() const { return std::make_unique<Tied>(); }
  Linear& first;
  Linear& second;
};

TEST(Module, ATiedParameterIsListedOnceAndKnownByAllNames) {
  Tied tied;
  EXPECT_TRUE(tied.second.weight.is(tied.first.weight));
  EXPECT_EQ(names_of(tied.named_parameters()),
            (std::vector<std::string>{"first.weight", "first.bias", "second.bias"}));
  EXPECT_TRUE(tied.state_dict().contains("second.weight"));
  tied(ones({1, 3})).backward(ones({1, 3}));
  EXPECT_TRUE(tied.first.weight.grad().defined());
  EXPECT_THROW(tied.second.share_parameter("weight", zeros({2, 2})), ShapeError);
}

TEST(Module, TwoValuesForATiedParameterAreSaidWithBoth) {
  Tied tied;
  const auto said = [&](const Tensor& first, const Tensor& second) {
    StateDict state = tied.state_dict().clone();
    state.set("first.weight", first);
    state.set("second.weight", second);
    testing::internal::CaptureStderr();
    tied.load_state_dict(state);
    return testing::internal::GetCapturedStderr();
  };
  const Tensor ones_ = ones({3, 3});
  EXPECT_EQ(said(ones_, ones_), "");
  EXPECT_EQ(said(ones_, ones_.clone()), "");
  EXPECT_EQ(said(ones_, ones({3, 3}, {.dtype = kBF16})), "");
  Tensor other = ones({3, 3});
  other.select(0, 1).select(0, 2).fill_(4);
  const std::string warning = said(ones_, other);
  EXPECT_NE(warning.find("'first.weight' and 'second.weight'"), std::string::npos) << warning;
  EXPECT_NE(warning.find("at [1, 2]: 1 and 4"), std::string::npos) << warning;
  EXPECT_EQ(tied.first.weight.to_vector(), other.to_vector());
}

TEST(Module, CloneCopiesValuesTiesAndModes) {
  Tied tied;
  tied.eval();
  tied.first.bias.set_requires_grad(false);
  const auto copy = tied.clone();
  EXPECT_TRUE(copy->second.weight.is(copy->first.weight));
  EXPECT_FALSE(copy->first.weight.is(tied.first.weight));
  EXPECT_EQ(copy->first.weight.to_vector(), tied.first.weight.to_vector());
  EXPECT_FALSE(copy->is_training());
  EXPECT_FALSE(copy->first.bias.requires_grad());
  init::zeros(tied.first.weight);
  EXPECT_NE(copy->first.weight.to_vector(), tied.first.weight.to_vector());
}

TEST(Module, CloneWithoutRemakeSaysWhatToDo) {
  Net net;
  EXPECT_NE(message_of([&] { net.clone(); }).find("remake() const"), std::string::npos);
}

// ---- Hooks -------------------------------------------------------------------------------------

TEST(ModuleHooks, PreAndForwardHooksSeeAndReplaceTensors) {
  Linear layer(2, 2);
  init::eye(layer.weight);
  init::zeros(layer.bias);
  const Tensor x = tensor({1, 2}).view({1, 2});
  HookHandle before = layer.register_forward_pre_hook(
      [](ModuleBase&, TensorRefs inputs) { *inputs[0] = *inputs[0] * 10; });
  HookHandle after =
      layer.register_forward_hook([](ModuleBase& module, TensorRefs inputs, TensorRefs outputs) {
        EXPECT_EQ(module.type_name(), "Linear");
        EXPECT_EQ(inputs[0]->to_vector(), (std::vector<double>{10, 20}));
        *outputs[0] = *outputs[0] + 1;
      });
  EXPECT_EQ(layer(x).to_vector(), (std::vector<double>{11, 21}));
  EXPECT_EQ(x.to_vector(), (std::vector<double>{1, 2})) << "the caller's tensor stays";
  before.remove();
  after.remove();
  EXPECT_EQ(layer(x).to_vector(), (std::vector<double>{1, 2}));
}

struct Pair {
  Tensor a;
  std::vector<Tensor> more;
  std::optional<Tensor> maybe = {};
  void visit_tensors(auto&& visit) { visit(a), visit(more), visit(maybe); }
};
struct Cache {
  Tensor held;
  void visit_tensors(auto&& visit) { visit(held); }
};
struct Nested : Module<Nested> {
  Pair forward(const Pair& in, Cache& cache, int64_t factor) {
    cache.held = in.a;
    return {in.a * factor, {in.more[0], in.more[0]}, in.a};
  }
};

TEST(ModuleHooks, HooksSeeTensorsInNestedArguments) {
  Nested module;
  size_t seen_inputs = 0, seen_outputs = 0;
  module.register_forward_hook([&](ModuleBase&, TensorRefs inputs, TensorRefs outputs) {
    seen_inputs = inputs.size();
    seen_outputs = outputs.size();
  });
  Cache cache{zeros({1})};
  module(Pair{ones({2}), {ones({1}), ones({3})}}, cache, 2);
  EXPECT_EQ(seen_inputs, 4u);
  EXPECT_EQ(seen_outputs, 4u);
  EXPECT_EQ(cache.held.numel(), 2) << "what forward writes reaches the caller's object";
}

TEST(ModuleHooks, AHookMayRemoveItself) {
  Linear layer(1, 1);
  int calls = 0;
  HookHandle handle;
  handle = layer.register_forward_pre_hook([&](ModuleBase&, TensorRefs) {
    ++calls;
    handle.remove();
  });
  layer(zeros({1, 1}));
  layer(zeros({1, 1}));
  EXPECT_EQ(calls, 1);
}

// The first of three removes itself and adds a fourth: the others run in this call, each once, the
// fourth from the next call on.
TEST(ModuleHooks, HooksOfEveryKindMayChangeTheirListWhileItRuns) {
  using Register = std::function<HookHandle(Linear&, std::function<void()>)>;
  const std::vector<std::pair<const char*, Register>> kinds = {
      {"pre-forward",
       [](Linear& layer, std::function<void()> call) {
         return layer.register_forward_pre_hook([call](ModuleBase&, TensorRefs) { call(); });
       }},
      {"forward",
       [](Linear& layer, std::function<void()> call) {
         return layer.register_forward_hook(
             [call](ModuleBase&, TensorRefs, TensorRefs) { call(); });
       }},
      {"backward",
       [](Linear& layer, std::function<void()> call) {
         return layer.register_full_backward_hook(
             [call](ModuleBase&, TensorRefs, TensorRefs) { call(); });
       }},
      {"scope",
       [](Linear& layer, std::function<void()> call) {
         return layer.register_call_scope([call](ModuleBase&) -> std::shared_ptr<void> {
           call();
           return nullptr;
         });
       }},
  };
  for (const auto& [kind, add] : kinds) {
    Linear layer(1, 1);
    std::array<int, 4> calls{};
    HookHandle first;
    first = add(layer, [&] {
      ++calls[0];
      first.remove();
      add(layer, [&] { ++calls[3]; });
    });
    add(layer, [&] { ++calls[1]; });
    add(layer, [&] { ++calls[2]; });
    layer(ones({1, 1})).backward();
    EXPECT_EQ(calls, (std::array{1, 1, 1, 0})) << kind;
    layer(ones({1, 1})).backward();
    EXPECT_EQ(calls, (std::array{1, 2, 2, 1})) << kind;
  }
}

TEST(ModuleHooks, AModuleKnowsWhetherItHasHooks) {
  Linear layer(1, 1);
  EXPECT_FALSE(layer.has_hooks());
  HookHandle hook = layer.register_forward_hook([](ModuleBase&, TensorRefs, TensorRefs) {});
  HookHandle scope = layer.register_call_scope([](ModuleBase&) { return std::shared_ptr<void>(); });
  hook.remove();
  EXPECT_TRUE(layer.has_hooks());
  scope.remove();
  EXPECT_FALSE(layer.has_hooks());
}

TEST(ModuleHooks, AHandleMayOutliveItsModule) {
  HookHandle handle;
  {
    Linear layer(1, 1);
    handle = layer.register_forward_pre_hook([](ModuleBase&, TensorRefs) {});
  }
  handle.remove();
}

TEST(ModuleHooks, BackwardHookSeesBothEnds) {
  Linear layer(2, 3, {.bias = false});
  std::vector<double> grad_input, grad_output;
  int calls = 0;
  HookHandle handle = layer.register_full_backward_hook(
      [&](ModuleBase&, TensorRefs grad_inputs, TensorRefs grad_outputs) {
        ++calls;
        ASSERT_EQ(grad_inputs.size(), 1u);
        ASSERT_EQ(grad_outputs.size(), 1u);
        grad_input = grad_inputs[0]->to_vector();
        grad_output = grad_outputs[0]->to_vector();
        *grad_inputs[0] = *grad_inputs[0] * 2;
      });
  const Tensor x = tensor({1, 2}).view({1, 2}).clone().set_requires_grad();
  const Tensor dy = tensor({1, 2, 3}).view({1, 3});
  layer(x).backward(dy);
  EXPECT_EQ(calls, 1);
  EXPECT_EQ(grad_output, (std::vector<double>{1, 2, 3}));
  const Tensor expected = matmul(dy, layer.weight.detach());
  EXPECT_EQ(grad_input, expected.to_vector());
  EXPECT_EQ(x.grad().to_vector(), (expected * 2).to_vector()) << "what the hook assigned flows on";
  handle.remove();
  layer(x).backward(dy);
  EXPECT_EQ(calls, 1);
}

TEST(ModuleHooks, BackwardHookRunsWhenNoInputRequiresGrad) {
  Linear layer(2, 2);
  int calls = 0;
  layer.register_full_backward_hook(
      [&](ModuleBase&, TensorRefs grad_inputs, TensorRefs grad_outputs) {
        ++calls;
        EXPECT_TRUE(grad_inputs.empty());
        EXPECT_EQ(grad_outputs.size(), 1u);
      });
  layer(ones({1, 2})).backward(ones({1, 2}));
  EXPECT_EQ(calls, 1);
}

TEST(ModuleHooks, OtherEntryPointsRunHooksToo) {
  struct Model : Module<Model> {
    Tensor forward(const Tensor& x) { return x; }
    Tensor encode(const Tensor& x, double scale) { return x * scale; }
  };
  Model model;
  int calls = 0;
  model.register_forward_pre_hook([&](ModuleBase&, TensorRefs) { ++calls; });
  EXPECT_EQ(model.call(&Model::encode, ones({1}), 3.0).item(), 3);
  EXPECT_EQ(calls, 1);
}

// ---- Containers and printing -------------------------------------------------------------------

TEST(Containers, SequentialRunsItsLayersInOrder) {
  Sequential net(layer<Linear>(2, 4), layer<ReLU>(), layer<Linear>(4, 1, LinearOptions{false}));
  EXPECT_EQ(net(ones({5, 2})).shape(), (Shape{5, 1}));
  EXPECT_EQ(names_of(net.named_parameters()),
            (std::vector<std::string>{"0.weight", "0.bias", "2.weight"}));
  const auto copy = net.clone();
  EXPECT_EQ((*copy)(ones({5, 2})).to_vector(), net(ones({5, 2})).to_vector());
  EXPECT_THROW(net[3], IndexError);
}

TEST(Containers, SequentialRefusesAModuleOfAnotherSignature) {
  struct TwoInputs : Module<TwoInputs> {
    Tensor forward(const Tensor& a, const Tensor&) { return a; }
  };
  Sequential net(layer<TwoInputs>());
  EXPECT_THROW(net(ones({1})), UnsupportedError);
}

TEST(Containers, ModuleDictFindsByName) {
  ModuleDict dict;
  dict.insert<Linear>("left", 1, 2);
  dict.insert<ReLU>("right");
  EXPECT_EQ(dict.at<Linear>("left").out_features, 2);
  EXPECT_TRUE(dict.contains("right"));
  EXPECT_FALSE(dict.contains("middle"));
  EXPECT_THROW(dict.at<ReLU>("left"), ValueError);
}

TEST(Module, PrintsAsTorchDoes) {
  struct Model : Module<Model> {
    Model()
        : h(add<ModuleList>("h")),
          head(add<Sequential>("head", layer<Linear>(4, 2, LinearOptions{.bias = false}),
                               layer<LeakyReLU>())) {
      for (int i = 0; i < 3; ++i) h.append<Mlp>(2);
    }
    ModuleList& h;
    Sequential& head;
  };
  EXPECT_EQ(Model().repr(), R"(Model(
  (h): ModuleList(
    (0-2): 3 x Mlp(
      (fc): Linear(in_features=2, out_features=4, bias=True)
      (proj): Linear(in_features=4, out_features=2, bias=True)
    )
  )
  (head): Sequential(
    (0): Linear(in_features=4, out_features=2, bias=False)
    (1): LeakyReLU(negative_slope=0.01)
  )
))");
}

}  // namespace
}  // namespace tessera::nn::test_module
