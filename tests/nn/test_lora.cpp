// Adapters: what they add, what trains, PEFT's numbers and files, merging, and the company that
// they keep: autocast, checkpoint(), clones, replicas, shards.
// ctest labels: threads
#include <unistd.h>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>

#include <tessera/autograd/autocast_mode.h>
#include <tessera/autograd/checkpoint.h>
#include <tessera/autograd/gradcheck.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/nn/conv.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/fused.h>
#include <tessera/nn/lora/lora.h>
#include <tessera/nn/models/gpt2.h>

#include "distributed/sharded_fixture.h"
#include "golden_files.h"
#include "message_of.h"
#include "nn/adapted_ranks.h"

namespace tessera::nn::test_lora {
namespace {

// A table, a fused perceptron, and a head that is tied to the table.
struct Tied : Module<Tied> {
  Tied()
      : table(add<Embedding>("table", 11, 8)),
        mlp(add<Mlp>("mlp", 8, 16)),
        head(add<Linear>("head", 8, 11, LinearOptions{.bias = false})) {
    head.share_parameter("weight", table.weight);
  }
  Tensor forward(const Tensor& tokens) { return head(mlp(table(tokens))); }
  std::unique_ptr<Tied> remake() const { return std::make_unique<Tied>(); }
  Embedding& table;
  Mlp& mlp;
  Linear& head;
};

Tensor tokens() { return tensor({1, 4, 10, 0, 4, 7}).to(kI64); }
Tensor classes() { return tensor({4, 10, 0, 4, 7, 2}).to(kI64); }
Tensor noise(const Shape& shape, uint64_t stream = 0, DType dtype = kF32) {
  return randn(shape, {.dtype = dtype}, RandomStream{5, stream});
}
double distance(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.shape(), b.shape());
  return (a.to(kF64) - b.to(kF64)).abs().max().item();
}
std::vector<double> elements(const Tensor& x) { return x.detach().to(kF64).to_vector(); }
const Tensor& part(const ModuleBase& model, const std::string& name) {
  return model.get_parameter(name);
}
// B, or an Embedding's A, is zeros at first: an adapter of which nothing is seen.
void shake(ModuleBase& model, double scale = 0.3) {
  const NoGradGuard no_grad;
  uint64_t stream = 100;
  for (const auto& [name, tensor] : trainable_parameters(model)) {
    tensor.detach().add_(noise(tensor.shape(), stream++, tensor.dtype()) * scale);
  }
}
std::map<std::string, std::vector<double>> values_by_name(const ModuleBase& model) {
  std::map<std::string, std::vector<double>> values;
  for (const auto& [name, tensor] : model.state_dict()) values[name] = elements(tensor);
  return values;
}
std::string scratch_folder(const std::string& name) {
  const auto path = std::filesystem::temp_directory_path() /
                    ("tessera_lora_" + std::to_string(::getpid()) + "_" + name);
  std::filesystem::remove_all(path);
  return path.string();
}
const LoraOptions kInMlp{.names = {"fc1", "fc2"}, .rank = 2, .alpha = 6};

constexpr double kEps = 1.1920929e-7;

// ---- What it calculates ------------------------------------------------------------------------

TEST(Lora, AddsNothingBeforeItIsTrained) {
  Tied model;
  const Tensor before = model(tokens());
  add_lora(model, {.names = {"fc1", "fc2", "table"}, .rank = 2});
  // The perceptron is one op before and two layers after: the same within rounding.
  EXPECT_LE(distance(model(tokens()), before), 32 * kEps * before.abs().max().item());
  const Tensor with = model(tokens());
  const LoraDisabled off(model);
  EXPECT_EQ(elements(model(tokens())), elements(with));
}

TEST(Lora, AModelWhoseAdaptersAreDisabledIsWhatItWas) {
  Tied model;
  add_lora(model, kInMlp);
  const Tensor start = model(tokens());  // B is zeros
  shake(model);
  const Tensor trained = model(tokens());
  EXPECT_NE(elements(trained), elements(start));
  {
    const LoraDisabled off(model);
    EXPECT_EQ(elements(model(tokens())), elements(start));
  }
  EXPECT_EQ(elements(model(tokens())), elements(trained));
}

TEST(Lora, AddsTheScaledProductOfItsMatrices) {
  const Tensor x = noise({3, 6}, 1, kF64);
  for (const bool rslora : {false, true}) {
    const ParameterDefaultsGuard defaults({.dtype = kF64});
    Linear layer(6, 5);
    const Tensor base = layer(x);
    add_lora(layer, {.pattern = ".*", .rank = 4, .alpha = 6, .use_rslora = rslora});
    shake(layer);
    const Tensor a = part(layer, "lora_A.weight"), b = part(layer, "lora_B.weight");
    EXPECT_EQ(a.shape(), (Shape{4, 6}));
    EXPECT_EQ(b.shape(), (Shape{5, 4}));
    const Tensor change = matmul(matmul(x, transpose(a, 0, 1)), transpose(b, 0, 1));
    EXPECT_LE(distance(layer(x), base + change * (rslora ? 3.0 : 1.5)), 1e-14);
  }
}

TEST(Lora, GradientsAreThoseOfDifferences) {
  const ParameterDefaultsGuard defaults({.dtype = kF64});
  const auto check = [](ModuleBase& layer, const Tensor& x) {
    add_lora(layer, {.pattern = ".*", .rank = 2, .alpha = 3});
    shake(layer);
    TensorList inputs = {part(layer, "lora_A.weight"), part(layer, "lora_B.weight")};
    if (is_floating(x.dtype())) inputs.push_back(x);
    const auto result = gradcheck(
        [&](const TensorList& given) -> TensorList {
          return {layer.call_tensor(is_floating(x.dtype()) ? given.back() : x)};
        },
        inputs);
    EXPECT_TRUE(result.ok) << result.message;
  };
  Linear linear(4, 3);
  check(linear, noise({2, 4}, 2, kF64).set_requires_grad());
  Embedding table(5, 3);
  check(table, tensor({1, 4, 1}).to(kI64));
  Conv2d conv(2, 3, Shape{3, 2}, {.stride = {2}, .padding = {1}, .dilation = {1}});
  check(conv, noise({1, 2, 5, 4}, 3, kF64).set_requires_grad());
  Conv1d line(2, 3, 3, {.dilation = {2}, .same_padding = true});
  check(line, noise({1, 2, 6}, 4, kF64).set_requires_grad());
}

TEST(Lora, InitialValuesAreThoseOfPeft) {
  Linear uniform(400, 30), normal(400, 30);
  add_lora(uniform, {.pattern = ".*", .rank = 16});
  add_lora(normal, {.pattern = ".*", .rank = 16, .init = LoraInit::kGaussian});
  const Tensor a = part(uniform, "lora_A.weight"), g = part(normal, "lora_A.weight");
  EXPECT_LE(a.detach().abs().max().item(), 0.05);
  EXPECT_GT(a.detach().abs().max().item(), 0.0495);
  const double deviation = std::sqrt((g.detach() * g.detach()).mean().item());
  EXPECT_NEAR(deviation, 1.0 / 16, 0.03 / 16);
  EXPECT_EQ(part(uniform, "lora_B.weight").detach().abs().max().item(), 0);

  Embedding table(50, 40);
  add_lora(table, {.pattern = ".*", .rank = 8});
  EXPECT_EQ(part(table, "lora_A.weight").detach().abs().max().item(), 0);
  const Tensor b = part(table, "lora_B.weight").detach();
  EXPECT_NEAR(std::sqrt((b * b).mean().item()), 1, 0.15);
}

TEST(Lora, InitialValuesDependOnSeedAndNameAlone) {
  Tied first, second, other;
  add_lora(first, kInMlp);
  add_lora(second, {.names = {"fc2"}, .rank = 2});
  const InitialName name("other");
  add_lora(other, kInMlp);
  const std::string a = "mlp.fc2.lora_A.weight";
  EXPECT_EQ(elements(part(first, a)), elements(part(second, a)));
  EXPECT_NE(elements(part(first, a)), elements(part(other, a)));
  EXPECT_NE(elements(part(first, a)), elements(part(first, "mlp.fc1.lora_A.weight")));
}

TEST(Lora, DropoutIsOfTheAdapterAloneAndOfTrainingAlone) {
  Linear layer(6, 5);
  const Tensor x = noise({40, 6}, 5);
  const Tensor base = layer(x);
  add_lora(layer, {.pattern = ".*", .rank = 3, .dropout = 0.5});
  EXPECT_EQ(elements(layer(x)), elements(base));  // B is zeros
  shake(layer);
  EXPECT_NE(elements(layer(x)), elements(layer(x)));
  layer.eval();
  EXPECT_EQ(elements(layer(x)), elements(layer(x)));
}

// ---- What trains -------------------------------------------------------------------------------

TEST(Lora, OnlyAdaptersTrain) {
  Tied model;
  model(tokens()).sum().backward();  // leaves gradients that freezing must drop
  const auto before = values_by_name(model);
  const LoraSummary summary = add_lora(model, kInMlp);
  EXPECT_EQ(summary.adapted, (std::vector<std::string>{"mlp.fc1", "mlp.fc2"}));
  EXPECT_EQ(summary.trainable, 2 * (8 + 16) + 2 * (16 + 8));
  EXPECT_EQ(summary.total, 11 * 8 + 8 * 16 + 16 + 16 * 8 + 8 + summary.trainable);
  const NamedTensors trained = trainable_parameters(model);
  ASSERT_EQ(trained.size(), 4u);
  EXPECT_EQ(trained[0].name, "mlp.fc1.lora_A.weight");
  EXPECT_EQ(trained[3].name, "mlp.fc2.lora_B.weight");

  // All parameters: what is frozen has no gradient and is passed over.
  optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-2, .weight_decay = 0.1});
  std::vector<double> losses;
  for (int step = 0; step < 30; ++step) {
    const Tensor loss = cross_entropy(model(tokens()), classes());
    losses.push_back(loss.item());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  EXPECT_LT(losses.back(), 0.7 * losses.front());
  for (const auto& [name, values] : values_by_name(model)) {
    if (before.contains(name)) {
      EXPECT_EQ(values, before.at(name)) << name;
    } else {
      EXPECT_NE(name.find(".lora_"), std::string::npos);
    }
  }
  for (const auto& [name, values] : before) EXPECT_TRUE(model.state_dict().contains(name));
}

TEST(Lora, BiasesTrainWhereTheOptionsSay) {
  const auto trained_biases = [](LoraBias bias) {
    Tied model;
    add_lora(model, {.names = {"fc2"}, .rank = 2, .bias = bias});
    std::set<std::string> names;
    for (const auto& [name, tensor] : trainable_parameters(model)) names.insert(name);
    names.erase("mlp.fc2.lora_A.weight"), names.erase("mlp.fc2.lora_B.weight");
    return names;
  };
  EXPECT_EQ(trained_biases(LoraBias::kNone), std::set<std::string>());
  EXPECT_EQ(trained_biases(LoraBias::kLoraOnly), (std::set<std::string>{"mlp.fc2.bias"}));
  EXPECT_EQ(trained_biases(LoraBias::kAll),
            (std::set<std::string>{"mlp.fc1.bias", "mlp.fc2.bias"}));
}

TEST(Lora, ModulesToSaveTrainInFullAndAreNotAdapted) {
  Tied model;
  const LoraSummary summary =
      add_lora(model, {.names = {"all-linear"}, .rank = 2, .modules_to_save = {"fc2"}});
  EXPECT_EQ(summary.adapted, std::vector<std::string>{"mlp.fc1"});  // the head is tied
  EXPECT_TRUE(part(model, "mlp.fc2.weight").requires_grad());
  EXPECT_TRUE(part(model, "mlp.fc2.bias").requires_grad());
  EXPECT_FALSE(part(model, "mlp.fc1.weight").requires_grad());
  EXPECT_TRUE(lora_state_dict(model).contains("base_model.model.mlp.fc2.weight"));
}

TEST(Lora, PatternsChooseLayersRanksAndAlphas) {
  Tied model;
  const LoraSummary summary = add_lora(model, {.pattern = "mlp\\.fc[12]|table",
                                               .exclude = {"fc2"},
                                               .rank = 3,
                                               .alpha = 3,
                                               .rank_pattern = {{"fc.", 5}, {"fc1", 7}},
                                               .alpha_pattern = {{"mlp.fc1", 20}}});
  EXPECT_EQ(summary.adapted, (std::vector<std::string>{"table", "mlp.fc1"}));
  EXPECT_EQ(part(model, "mlp.fc1.lora_A.weight").shape(), (Shape{5, 8}));
  EXPECT_EQ(part(model, "table.lora_A.weight").shape(), (Shape{11, 3}));
  shake(model);
  const Tensor x = noise({2, 8}, 6);
  const Tensor change = matmul(matmul(x, transpose(part(model, "mlp.fc1.lora_A.weight"), 0, 1)),
                               transpose(part(model, "mlp.fc1.lora_B.weight"), 0, 1));
  const Tensor expected =
      linear(x, part(model, "mlp.fc1.weight"), part(model, "mlp.fc1.bias")) + change * 4.0;
  EXPECT_LE(distance(model.mlp.inner(x), expected), 16 * kEps * expected.abs().max().item());
}

// ---- Mistakes ----------------------------------------------------------------------------------

TEST(Lora, NamesThatMatchNothingAreToldWithWhatThereIs) {
  Tied model;
  const std::string message = message_of<ConfigError>([&] {
    add_lora(model, {.names = {"fc1", "q_proj", "c1"}});
  });
  EXPECT_NE(message.find("no module is named 'q_proj', 'c1'; there are 'table' (Embedding), "
                         "'fc1' (Linear), 'fc2' (Linear), 'head' (Linear)"),
            std::string::npos)
      << message;
  EXPECT_NE(message_of<ConfigError>([&] {
              add_lora(model, {.pattern = "fc1"});
            }).find("the pattern 'fc1' matches nothing"),
            std::string::npos);
  EXPECT_NE(message_of<UnsupportedError>([&] {
              add_lora(model, {.names = {"mlp"}});
            }).find("cannot adapt 'mlp' (Mlp)"),
            std::string::npos);
}

TEST(Lora, OptionsThatCannotBeAreRefusedAndNothingIsChanged) {
  Tied model;
  const auto refused = [&](const LoraOptions& options, const char* part_of_message) {
    const std::string message = message_of<ConfigError>([&] { add_lora(model, options); });
    EXPECT_NE(message.find(part_of_message), std::string::npos) << message;
  };
  refused({.names = {"fc1"}, .rank = 0}, "rank must be at least 1; got 0");
  refused({.names = {"fc1"}, .rank_pattern = {{"fc1", -1}}}, "the rank of 'fc1'");
  refused({.names = {"fc1"}, .rank_pattern = {{"fc3", 2}}}, "rank_pattern 'fc3' matches no");
  refused({.names = {"fc1"}, .dropout = 1}, "dropout must be in [0, 1); got 1");
  refused({}, "neither was given");
  refused({.names = {"fc1"}, .pattern = ".*"}, "both were given");
  refused({.names = {"all-linear", "fc1"}}, "stands alone");
  refused({.pattern = "(fc1"}, "is no regular expression");
  refused({.names = {"fc1"}, .exclude = {"fc1"}}, "name nothing that is not excluded");
  refused({.names = {"fc1"}, .modules_to_save = {"score"}}, "'score'");
  EXPECT_EQ(trainable_parameters(model).size(), model.named_parameters().size());
  Conv2d grouped(4, 4, 3, {.groups = 2});
  EXPECT_NE(message_of<UnsupportedError>([&] {
              add_lora(grouped, {.pattern = ".*"});
            }).find("(Conv2d in groups)"),
            std::string::npos);

  add_lora(model, kInMlp);
  refused(kInMlp, "the model has an adapter 'default'");
}

// ---- Merging -----------------------------------------------------------------------------------

TEST(Lora, MergedLayersCalculateTheSameAndUnmergingRestoresEveryBit) {
  Tied model;
  add_lora(model, {.names = {"fc1", "fc2", "table"}, .rank = 2, .alpha = 6});
  shake(model);
  const auto before = values_by_name(model);
  const Tensor with = model(tokens());
  merge_lora(model);
  EXPECT_TRUE(is_lora_merged(model));
  EXPECT_NE(elements(model.table.weight), before.at("table.weight"));
  // Each product is added up in another order: lengths of 16 at most, four products.
  EXPECT_LE(distance(model(tokens()), with), 64 * kEps * with.abs().max().item());
  EXPECT_EQ(elements(model.head.weight), before.at("head.weight"));  // tied, and not adapted
  unmerge_lora(model);
  EXPECT_EQ(values_by_name(model), before);
  EXPECT_EQ(elements(model(tokens())), elements(with));
  EXPECT_EQ(model.head.weight.impl(), model.table.weight.impl());
}

TEST(Lora, ConvolutionsMerge) {
  struct Convs : Module<Convs> {
    Convs()
        : plane(add<Conv2d>("plane", 2, 3, Shape{3, 2}, ConvLayerOptions{.padding = {1}})),
          line(add<Conv1d>("line", 3, 4, 3)) {}
    Tensor forward(const Tensor& x) { return line(flatten(plane(x), 2, 3)); }
    Conv2d& plane;
    Conv1d& line;
  } model;
  add_lora(model, {.names = {"plane", "line"}, .rank = 2});
  shake(model);
  const Tensor x = noise({2, 2, 4, 4}, 7);
  const Tensor with = model(x);
  merge_lora(model);
  EXPECT_LE(distance(model(x), with), 64 * kEps * with.abs().max().item());
}

TEST(Lora, WhatIsMergedStaysWhenAdaptersGo) {
  Tied model;
  const size_t parameters = model.state_dict().size();
  add_lora(model, kInMlp);
  shake(model);
  const Tensor with = model(tokens());
  merge_lora(model);
  remove_lora(model);
  EXPECT_EQ(model.state_dict().size(), parameters);
  EXPECT_FALSE(model.mlp.inner.has_hooks());
  EXPECT_LE(distance(model(tokens()), with), 64 * kEps * with.abs().max().item());
  EXPECT_EQ(lora_options(model), nullptr);
  add_lora(model, kInMlp);  // and can be adapted anew
}

TEST(Lora, MergingTwiceIsRefused) {
  Tied model;
  EXPECT_NE(message_of<ValueError>([&] { merge_lora(model); }).find("has no adapters"),
            std::string::npos);
  add_lora(model, kInMlp);
  EXPECT_NE(message_of<ValueError>([&] { unmerge_lora(model); }).find("is not merged"),
            std::string::npos);
  merge_lora(model);
  EXPECT_NE(message_of<ValueError>([&] { merge_lora(model); }).find("unmerge_lora() first"),
            std::string::npos);
}

TEST(Lora, AMergedWeightThatWasReplacedIsNotedInTheNextCall) {
  Tied model;
  add_lora(model, kInMlp);
  merge_lora(model);
  model.mlp.inner.share_parameter("weight", ones({16, 8}));
  EXPECT_NE(message_of<ValueError>([&] { model(tokens()); }).find("mlp.fc1: lora: the merged"),
            std::string::npos);
}

// ---- Company -----------------------------------------------------------------------------------

TEST(Lora, ClonesHaveAdaptersOfTheirOwn) {
  for (const bool merged : {false, true}) {
    Tied model;
    add_lora(model, {.names = {"fc1", "table"}, .rank = 2, .alpha = 6});
    shake(model);
    const auto apart = values_by_name(model);
    if (merged) merge_lora(model);
    const auto copy = model.clone();
    EXPECT_EQ(values_by_name(*copy), values_by_name(model));
    EXPECT_EQ(elements((*copy)(tokens())), elements(model(tokens())));
    EXPECT_EQ(trainable_parameters(*copy).size(), 4u);
    if (merged) {
      unmerge_lora(*copy);
      EXPECT_EQ(values_by_name(*copy), apart);
      EXPECT_EQ(copy->head.weight.impl(), copy->table.weight.impl());
    }
    shake(*copy);
    if (merged) unmerge_lora(model);
    EXPECT_EQ(values_by_name(model), apart);
  }
}

TEST(Lora, CheckpointedBlocksHaveTheSameGradients) {
  const auto gradients = [](bool recomputed, bool trained_below) {
    manual_seed(9);
    Tied model;
    add_lora(model, {.names = {"fc1", "fc2"}, .rank = 2, .dropout = 0.25});
    shake(model);
    manual_seed(9);
    const Tensor x = noise({6, 8}, 8).set_requires_grad(trained_below);
    const Tensor y =
        recomputed ? checkpoint([&](const Tensor& in) { return model.mlp(in); }, x) : model.mlp(x);
    (y * y).sum().backward();
    std::vector<std::vector<double>> result;
    if (trained_below) result.push_back(elements(x.grad()));
    for (const auto& [name, tensor] : trainable_parameters(model)) {
      result.push_back(elements(tensor.grad()));
    }
    return result;
  };
  for (const bool trained_below : {false, true}) {
    EXPECT_EQ(gradients(true, trained_below), gradients(false, trained_below));
  }
}

TEST(Lora, AutocastGivesAdaptersAndBaseOneDtype) {
  constexpr double kBf16Eps = 0x1p-7;
  for (const bool narrow_base : {false, true}) {
    Tied model;
    LoraOptions options = kInMlp;
    if (narrow_base) options.base_dtype = kBF16;
    add_lora(model, options);
    shake(model);
    EXPECT_EQ(model.table.weight.dtype(), narrow_base ? kBF16 : kF32);
    EXPECT_EQ(part(model, "mlp.fc1.lora_A.weight").dtype(), kF32);
    const Tensor exact = narrow_base ? Tensor() : model.mlp(noise({4, 8}, 9));
    const AutocastGuard autocast(kBF16);
    const Tensor y = model.mlp(noise({4, 8}, 9));
    EXPECT_EQ(y.dtype(), kBF16);
    if (exact.defined()) {
      EXPECT_LE(distance(y, exact), 4 * kBf16Eps * exact.abs().max().item());
    }
    const Tensor loss = cross_entropy(model(tokens()), classes());
    loss.backward();
    for (const auto& [name, tensor] : trainable_parameters(model)) {
      ASSERT_TRUE(tensor.grad().defined()) << name;
      EXPECT_EQ(tensor.grad().dtype(), kF32) << name;
    }
  }
}

TEST(Lora, ANarrowBaseRunsWithoutAutocastOnNarrowInputs) {
  Tied model;
  LoraOptions options = kInMlp;
  options.base_dtype = kBF16;
  add_lora(model, options);
  shake(model);
  const Tensor y = model(tokens());
  EXPECT_EQ(y.dtype(), kBF16);
  merge_lora(model);
  EXPECT_EQ(model.mlp.inner.weight.dtype(), kBF16);
  // A merged weight and each activation are rounded to 8 bits.
  EXPECT_LE(distance(model(tokens()), y), 8 * 0x1p-8 * y.to(kF32).abs().max().item());
}

// ---- Files -------------------------------------------------------------------------------------

TEST(Lora, AdaptersAreSavedAndLoaded) {
  Tied model;
  const LoraOptions options{.names = {"fc1", "table"},
                            .rank = 2,
                            .alpha = 6.5,
                            .dropout = 0.125,
                            .bias = LoraBias::kAll,
                            .use_rslora = true,
                            .init = LoraInit::kGaussian,
                            .modules_to_save = {"fc2"},
                            .rank_pattern = {{"table", 3}},
                            .alpha_pattern = {{"fc1", 2}}};
  add_lora(model, options);
  shake(model);
  model.eval();
  const Tensor with = model(tokens());
  const std::string folder = scratch_folder("round");
  save_lora(model, folder);

  Tied fresh;
  fresh.eval();
  const LoraSummary summary = load_lora(fresh, folder);
  EXPECT_EQ(summary.adapted, (std::vector<std::string>{"table", "mlp.fc1"}));
  EXPECT_EQ(summary.trainable, 0);
  EXPECT_EQ(elements(fresh(tokens())), elements(with));
  EXPECT_EQ(values_by_name(fresh), values_by_name(model));
  const LoraOptions& read = *lora_options(fresh);
  EXPECT_EQ(read.alpha, 6.5);
  EXPECT_EQ(read.dropout, 0.125);
  EXPECT_TRUE(read.use_rslora);
  EXPECT_EQ(read.init, LoraInit::kGaussian);

  // Into adapters that are there, which go on training.
  Tied trained;
  add_lora(trained, options);
  trained.eval();
  EXPECT_GT(load_lora(trained, folder).trainable, 0);
  EXPECT_EQ(elements(trained(tokens())), elements(with));
  Tied resumed;
  EXPECT_EQ(load_lora(resumed, folder, {.trainable = true}).trainable,
            2 * (8 + 16) + 3 * (11 + 8) + 16 + 128 + 8);
  std::filesystem::remove_all(folder);
}

TEST(Lora, WhatDoesNotFitIsToldInOneMessageAndNothingIsChanged) {
  Tied model;
  add_lora(model, kInMlp);
  const std::string folder = scratch_folder("misfit");
  save_lora(model, folder);
  auto tensors = load_safetensors(folder + "/adapter_model.safetensors");
  tensors.erase("base_model.model.mlp.fc1.lora_A.weight");
  tensors["base_model.model.mlp.fc1.lora_B.weight"] = ones({3, 2});
  tensors["base_model.model.mlp.fc9.lora_B.weight"] = ones({3, 2});
  save_safetensors(folder + "/adapter_model.safetensors", tensors);
  Tied other;
  const std::string message = message_of<ValueError>([&] { load_lora(other, folder); });
  for (const char* const expected :
       {"missing in the state (1):\n    base_model.model.mlp.fc1.lora_A.weight",
        "unexpected in the state (1):\n    base_model.model.mlp.fc9.lora_B.weight",
        "base_model.model.mlp.fc1.lora_B.weight: the model needs (16, 2), there is (3, 2)"}) {
    EXPECT_NE(message.find(expected), std::string::npos) << message;
  }
  EXPECT_EQ(lora_options(other), nullptr);
  EXPECT_EQ(trainable_parameters(other).size(), other.named_parameters().size());
  std::filesystem::remove_all(folder);
}

TEST(Lora, ConfigurationsThatAskForMoreAreRefused) {
  const std::string folder = scratch_folder("config");
  std::filesystem::create_directories(folder);
  const auto message = [&]<class E>(const std::string& text, E*) {
    std::ofstream(folder + "/adapter_config.json") << text;
    Tied model;
    return message_of<E>([&] { load_lora(model, folder); });
  };
  const auto unsupported = [&](const std::string& fields) {
    return message(R"({"peft_type": "LORA", "target_modules": ["fc1"], )" + fields + "}",
                   static_cast<UnsupportedError*>(nullptr));
  };
  EXPECT_NE(
      unsupported(R"("use_dora": true, "lora_bias": true)").find("asks for use_dora, lora_bias"),
      std::string::npos);
  EXPECT_NE(unsupported(R"("init_lora_weights": "pissa")").find("pissa"), std::string::npos);
  EXPECT_NE(unsupported(R"("exclude_modules": "fc.*")").find("exclude_modules as a pattern"),
            std::string::npos);
  EXPECT_NE(
      message(R"({"peft_type": "IA3"})", static_cast<UnsupportedError*>(nullptr)).find("'IA3'"),
      std::string::npos);
  const auto malformed = [&](const std::string& text) {
    return message(text, static_cast<FormatError*>(nullptr));
  };
  EXPECT_NE(malformed("[").find("no JSON object"), std::string::npos);
  EXPECT_NE(malformed(R"({"peft_type": "LORA"})").find("'target_modules' is missing"),
            std::string::npos);
  EXPECT_NE(malformed(R"({"peft_type": "LORA", "target_modules": ["fc1"], "r": "8"})")
                .find("'r' must be an integer; it is \"8\""),
            std::string::npos);
  EXPECT_NE(malformed(R"({"peft_type": "LORA", "target_modules": ["fc1"], "bias": "some"})")
                .find("'bias' must be"),
            std::string::npos);
  std::filesystem::remove_all(folder);
}

// ---- PEFT --------------------------------------------------------------------------------------

const SafeTensorsFile& golden() {
  static const SafeTensorsFile file(tests::golden_path("lora.safetensors"));
  return file;
}

std::unique_ptr<nn::models::Gpt> golden_gpt() {
  auto model = nn::models::Gpt::from_pretrained(tests::golden_path("gpt2"));
  load_lora(*model, tests::golden_path("lora"), {.trainable = true});
  return model;
}

TEST(Lora, AnAdapterInAFileOfTorchIsTheSame) {
  const std::string folder = scratch_folder("bin");
  std::filesystem::create_directories(folder);
  std::filesystem::copy(tests::golden_path("lora/adapter_config.json"),
                        folder + "/adapter_config.json");
  std::filesystem::copy(tests::golden_path("torch/adapter_model.bin"),
                        folder + "/adapter_model.bin");
  auto model = nn::models::Gpt::from_pretrained(tests::golden_path("gpt2"));
  load_lora(*model, folder);
  const StateDict expected = lora_state_dict(*golden_gpt());
  const StateDict loaded = lora_state_dict(*model);
  ASSERT_EQ(loaded.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    EXPECT_EQ(elements(loaded.at(name)), elements(tensor)) << name;
  }
  std::filesystem::remove_all(folder);
}

// check_target_module_exists of PEFT's tuners_utils.py.
TEST(Lora, LayersToTransformAreThoseOfPeft) {
  const auto gpt = [] { return nn::models::Gpt::from_pretrained(tests::golden_path("gpt2")); };
  const auto adapted = [&](const LoraOptions& options) {
    const auto model = gpt();
    return add_lora(*model, options).adapted;
  };
  using Names = std::vector<std::string>;
  EXPECT_EQ(adapted({.names = {"c_attn"}, .layers = {1}}), Names{"transformer.h.1.attn.c_attn"});
  EXPECT_EQ(adapted({.names = {"c_attn"}, .layers = {1, 0}}).size(), 2u);
  EXPECT_EQ(adapted({.names = {"c_attn"}, .layers = {1}, .layers_pattern = {"x", "h"}}).size(), 1u);
  EXPECT_EQ(adapted({.names = {"c_attn", "transformer.h.0.mlp.c_fc"}, .layers = {1}}),
            (Names{"transformer.h.0.mlp.c_fc", "transformer.h.1.attn.c_attn"}));
  EXPECT_EQ(adapted({.names = {"all-linear"}, .layers = {0}}).size(), 4u);
  EXPECT_THROW(adapted({.names = {"c_attn"}, .layers = {7}}), ConfigError);
  EXPECT_THROW(adapted({.names = {"c_attn"}, .layers = {1}, .layers_pattern = {"x"}}), ConfigError);
  EXPECT_THROW(adapted({.names = {"c_attn"}, .layers_pattern = {"h"}}), ConfigError);
  EXPECT_THROW(adapted({.pattern = ".*c_attn", .layers = {1}}), ConfigError);

  const std::string folder = scratch_folder("layers");
  const auto model = gpt();
  add_lora(*model, {.names = {"c_attn"}, .layers = {1}, .layers_pattern = {"h"}});
  shake(*model);
  save_lora(*model, folder);
  const auto config = [&] {
    std::ifstream file(folder + "/adapter_config.json");
    return nlohmann::json::parse(file);
  }();
  EXPECT_EQ(config.at("layers_to_transform"), nlohmann::json({1}));
  for (const nlohmann::json& layers : {nlohmann::json({1}), nlohmann::json(1)}) {
    for (const nlohmann::json& pattern :
         {nlohmann::json("h"), nlohmann::json({"h"}), nlohmann::json(""), nlohmann::json()}) {
      auto changed = config;
      changed["layers_to_transform"] = layers;
      changed["layers_pattern"] = pattern;
      std::ofstream(folder + "/adapter_config.json") << changed.dump();
      const auto other = gpt();
      EXPECT_EQ(load_lora(*other, folder).adapted, Names{"transformer.h.1.attn.c_attn"});
    }
  }
  std::filesystem::remove_all(folder);
}

TEST(Lora, LogitsLossAndGradientsAreThoseOfPeft) {
  const auto model = golden_gpt();
  const Tensor ids = SafeTensorsFile(tests::golden_path("gpt2.safetensors")).load("input_ids");
  const Tensor logits = (*model)(ids).logits;
  const Tensor expected = golden().load("logits");
  EXPECT_LE(distance(logits.narrow(1, ids.size(1) - 3, 3), expected),
            1e-5 * expected.abs().max().item());
  const int64_t T = ids.size(1);
  const Tensor loss = cross_entropy(flatten(logits.narrow(1, 0, T - 1), 0, 1),
                                    flatten(ids.narrow(1, 1, T - 1), 0, 1));
  EXPECT_NEAR(loss.item(), golden().load("loss").item(), 1e-6 * loss.item());
  loss.backward();
  size_t compared = 0;
  for (const auto& [name, tensor] : trainable_parameters(*model)) {
    std::string key = "grad.base_model.model." + name;
    Tensor grad = tensor.grad();
    if (name.starts_with("transformer.wpe.lora_")) {
      const bool is_a = name.ends_with("lora_A.weight");
      key =
          std::string("grad.base_model.model.transformer.wpe.lora_embedding_") + (is_a ? "A" : "B");
      if (is_a) grad = transpose(grad, 0, 1);
    } else if (name.ends_with("bias") && name.find("ln_f") == std::string::npos) {
      key = "grad.base_model.model." + name.substr(0, name.size() - 4) + "base_layer.bias";
    }
    const Tensor wanted = golden().load(key);
    EXPECT_LE(distance(grad, wanted), 1e-5 * wanted.abs().max().item()) << name;
    ++compared;
  }
  EXPECT_EQ(compared, 19u);
}

TEST(Lora, MergedWeightsAreThoseOfPeft) {
  const auto model = golden_gpt();
  merge_lora(*model);
  const Tensor table = golden().load("merged.transformer.wpe");
  EXPECT_LE(distance(part(*model, "transformer.wpe.weight"), table),
            4 * kEps * table.abs().max().item());
  // Conv1D of transformers: [in, out].
  const Tensor weight = golden().load("merged.transformer.h.1.attn.c_attn");
  EXPECT_LE(distance(part(*model, "transformer.h.1.attn.c_attn.weight"), transpose(weight, 0, 1)),
            4 * kEps * weight.abs().max().item());
}

TEST(Lora, TheFilesOfPeftAreWrittenAgain) {
  const auto model = golden_gpt();
  const std::string folder = scratch_folder("peft");
  save_lora(*model, folder);
  const auto own = load_safetensors(folder + "/adapter_model.safetensors");
  const auto peft = load_safetensors(tests::golden_path("lora/adapter_model.safetensors"));
  ASSERT_EQ(own.size(), peft.size());
  for (const auto& [key, tensor] : peft) {
    ASSERT_TRUE(own.contains(key)) << key;
    EXPECT_EQ(elements(own.at(key)), elements(tensor)) << key;
  }
  std::ifstream written(folder + "/adapter_config.json");
  const auto config = nlohmann::json::parse(written);
  const auto expected = tests::golden_json("lora/adapter_config.json");
  for (const auto& [key, value] : config.items()) {
    if (key == "fan_in_fan_out") continue;  // PEFT sets it by the layers that it finds
    EXPECT_EQ(value, expected.at(key)) << key;
  }
  std::filesystem::remove_all(folder);
}

// ---- Ranks -------------------------------------------------------------------------------------

using distributed::Way;

std::map<std::string, std::vector<float>> trained_on_two(Way way, bool narrow_base = false) {
  return trained_by_ranks(2, way, [&](Adapted& model) {
    LoraOptions options{.names = {"first", "third"}, .rank = 3, .bias = LoraBias::kLoraOnly};
    if (narrow_base) options.base_dtype = kBF16;
    add_lora(model, options);
  });
}

TEST(Lora, ReplicasTrainTheSameAdapters) {
  const auto values = trained_on_two(Way::kReplicate);
  manual_seed(3);
  Adapted start;
  for (const char* const frozen : {"first.weight", "second.weight", "second.bias"}) {
    EXPECT_EQ(values.at(frozen), part(start, frozen).to_vector<float>()) << frozen;
  }
  EXPECT_NE(values.at("first.bias"), part(start, "first.bias").to_vector<float>());
  EXPECT_NE(values.at("third.lora_B.weight"), std::vector<float>(12 * 3, 0.0f));
}

TEST(Lora, EveryShardedModeHasTheBitsOfReplicas) {
  const auto expected = trained_on_two(Way::kReplicate);
  for (const Way way : {Way::kZero1, Way::kZero2, Way::kFully, Way::kFullyKept, Way::kZero3}) {
    SCOPED_TRACE(distributed::name_of(way));
    EXPECT_EQ(trained_on_two(way), expected);
  }
}

TEST(Lora, ShardedAdaptersAreSavedWhole) {
  const std::string folder = scratch_folder("sharded");
  distributed::compared_ranks(2, [&](int rank) {
    manual_seed(3);
    Adapted model;
    add_lora(model, {.names = {"first", "third"}, .rank = 3});
    shake(model);
    const auto before = values_by_name(model);
    distributed::Mesh mesh(distributed::world());
    const auto parallel = distributed::shard_in(Way::kFully, model, mesh);
    EXPECT_NE(
        message_of<ValueError>([&] { merge_lora(model); }).find("before the model is sharded"),
        std::string::npos);
    EXPECT_NE(message_of<ConfigError>([&] {
                load_lora_state_dict(model, {});
              }).find("load adapters before the model is sharded"),
              std::string::npos);
    const auto whole = distributed::full_parameters(model);
    if (rank != 0) return;
    save_lora(model, folder);
    Adapted loaded;
    load_lora(loaded, folder);
    EXPECT_EQ(elements(part(loaded, "first.lora_B.weight")), before.at("first.lora_B.weight"));
  });
  std::filesystem::remove_all(folder);
}

TEST(Lora, AShardedModelTakesNoAdapters) {
  distributed::compared_ranks(2, [&](int) {
    Adapted model;
    distributed::Mesh mesh(distributed::world());
    const auto parallel = distributed::shard_in(Way::kFully, model, mesh);
    EXPECT_NE(message_of<ConfigError>([&] {
                add_lora(model, {.names = {"first"}});
              }).find("add adapters before the model is sharded"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace tessera::nn::test_lora
