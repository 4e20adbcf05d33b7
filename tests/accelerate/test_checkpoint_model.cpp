// Models alone, in the files of HuggingFace: written, sharded, read again; and out of checkpoints.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include <tessera/accelerate/state/model_io.h>
#include <tessera/accelerate/state/state_io.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/nn/embedding.h>
#include <tessera/nn/linear.h>

#include "distributed/compared_ranks.h"
#include "finished_process.h"
#include "message_of.h"

namespace tessera::accelerate::test_checkpoint_model {
namespace {

namespace fs = std::filesystem;

void expect_in(const std::string& part, const std::string& text) {
  EXPECT_NE(text.find(part), std::string::npos) << "'" << part << "' is not in: " << text;
}

// Weights of 64 (embed and head, tied), 48 + 12 and 12 + 4 bytes... all f32.
struct TiedNet : nn::Module<TiedNet> {
  TiedNet()
      : embed(add<nn::Embedding>("embed", 8, 2)),
        hidden(add<nn::Linear>("hidden", 2, 30)),
        out(add<nn::Linear>("out", 30, 2)),
        head(add<nn::Linear>("head", 2, 8, nn::LinearOptions{.bias = false})) {
    head.share_parameter("weight", embed.weight);
  }
  Tensor forward(const Tensor& x) { return head(out(relu(hidden(embed(x))))); }
  nn::Embedding& embed;
  nn::Linear& hidden;
  nn::Linear& out;
  nn::Linear& head;
};

std::vector<std::vector<double>> values_of(const nn::ModuleBase& model) {
  std::vector<std::vector<double>> values;
  for (const auto& [name, tensor] : model.state_dict()) values.push_back(tensor.to_vector());
  return values;
}
void fill(nn::ModuleBase& model, double value) {
  const NoGradGuard no_grad;
  for (const Tensor& parameter : model.parameters()) fill_(parameter, value);
}

class ModelFiles : public ::testing::Test {
 protected:
  std::string path(const std::string& name) const { return folder_.path(name); }
  std::set<std::string> names_in(const std::string& folder) const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(path(folder))) {
      names.insert(entry.path().filename().string());
    }
    return names;
  }
  TestFolder folder_;
};

TEST_F(ModelFiles, ACC2AModelWithTiedWeightsComesBackFromOneFile) {
  TiedNet model;
  const auto before = values_of(model);
  const SavedModel saved = save_model(model, path("out"));
  EXPECT_EQ(saved.files, std::vector<std::string>{"model.safetensors"});
  EXPECT_EQ(names_in("out"), std::set<std::string>{"model.safetensors"});
  const SafeTensorsFile file(path("out/model.safetensors"));
  EXPECT_EQ(file.metadata().at("format"), "pt");
  EXPECT_EQ(file.metadata().at("head.weight"), "embed.weight");
  EXPECT_FALSE(file.contains("head.weight")) << "tied weights are written once";
  EXPECT_EQ(saved.bytes, 4 * (16 + 60 + 30 + 60 + 2));

  for (const char* from : {"out", "out/model.safetensors"}) {
    fill(model, 7);
    EXPECT_TRUE(load_model(model, path(from)).complete());
    EXPECT_EQ(values_of(model), before);
    EXPECT_EQ(model.head.weight.data(), model.embed.weight.data()) << "tied as before";
  }
  EXPECT_TRUE(load_weights(path("out")).contains("head.weight")) << "each name has its tensor";
}

TEST_F(ModelFiles, ACC3ShardsOfAHundredBytesHaveAnIndexThatTransformersReads) {
  TiedNet model;
  const auto before = values_of(model);
  const SavedModel saved = save_model(model, path("out"), {.max_shard_size = "100B"});
  // embed 64; hidden.weight 240; hidden.bias 120; out.weight 240; out.bias 8
  EXPECT_EQ(saved.files.size(), 6u);
  EXPECT_EQ(saved.files.front(), "model-00001-of-00005.safetensors");
  EXPECT_EQ(saved.files.back(), "model.safetensors.index.json");
  const auto index = nlohmann::json::parse(folder_.read("out/model.safetensors.index.json"));
  EXPECT_EQ(index.at("metadata").at("total_size"), saved.bytes);
  EXPECT_EQ(index.at("weight_map").at("hidden.bias"), "model-00003-of-00005.safetensors");
  EXPECT_EQ(index.at("weight_map").size(), 5u);
  for (const char* from : {"out", "out/model.safetensors.index.json"}) {
    fill(model, 7);
    load_model(model, path(from));
    EXPECT_EQ(values_of(model), before);
  }
  // Two to a shard where they fit.
  EXPECT_EQ(save_model(model, path("out"), {.max_shard_size = "360B"}).files.size(), 4u);
}

TEST_F(ModelFiles, ShardsOfAnEarlierSaveGoAndOtherFilesStay) {
  TiedNet model;
  save_model(model, path("out"), {.max_shard_size = "100B"});
  folder_.write("out/config.json", "{}");
  folder_.write("out/model-of-mine.safetensors", "");
  save_model(model, path("out"), {.max_shard_size = "300B"});
  for (const std::string& name : names_in("out")) {
    EXPECT_EQ(name.find("-of-00005"), std::string::npos) << name;
  }
  save_model(model, path("out"));
  EXPECT_EQ(names_in("out"), (std::set<std::string>{"config.json", "model-of-mine.safetensors",
                                                    "model.safetensors"}));
}

// Trap 29: a path that is a file is only logged, and nothing saved.
TEST_F(ModelFiles, TrapAPathThatIsAFileIsAnErrorOnEveryRank) {
  folder_.write("out", "text");
  std::atomic<int> threw{0};
  distributed::compared_ranks(2, [&](int) {
    TiedNet model;
    expect_in("it is a file: nothing was saved",
              message_of<IoError>([&] { save_model(model, path("out")); }));
    ++threw;
  });
  EXPECT_EQ(threw, 2);
  EXPECT_EQ(folder_.read("out"), "text");
}

TEST_F(ModelFiles, AModelWithoutBytesIsAnError) {
  const nn::ParameterDefaultsGuard meta({.device = kMeta});
  nn::Linear model(3, 4);
  expect_in("has no elements", message_of<DeviceError>([&] { save_model(model, path("out")); }));
}

TEST_F(ModelFiles, ByteSizesHaveUnitsAndNothingIsGuessed) {
  EXPECT_EQ(parse_byte_size("10GB"), 10'000'000'000);
  EXPECT_EQ(parse_byte_size("1.5 MB"), 1'500'000);
  EXPECT_EQ(parse_byte_size("2GiB"), int64_t{2} << 30);
  EXPECT_EQ(parse_byte_size("123"), 123);
  EXPECT_EQ(parse_byte_size("7B"), 7);
  for (const char* bad : {"", "GB", "10Gb", "10 gigabytes", "-1GB", "0", "1.5", "1e3", "99999999TB",
                          "10GBs", "1.2.3MB"}) {
    EXPECT_THROW(parse_byte_size(bad), ConfigError) << bad;
  }
  expect_in("counts bits", message_of<ConfigError>([] { parse_byte_size("10Gb"); }));
}

TEST_F(ModelFiles, WhatIsMissingUnexpectedAndMisshapenIsListedAtOnce) {
  TiedNet model;
  StateDict weights = model.state_dict().clone();
  StateDict other;
  for (const auto& [name, tensor] : weights) {
    if (name == "out.bias") continue;
    other.set(name, name == "hidden.bias" ? raw::zeros({5}, kF32) : tensor);
  }
  other.set("extra", raw::zeros({1}, kF32));
  save_weights(other, path("out"));
  const auto before = values_of(model);
  const std::string text = message_of<ValueError>([&] { load_model(model, path("out")); });
  for (const char* part : {"out.bias", "extra", "hidden.bias", "f32[30]", "f32[5]"}) {
    expect_in(part, text);
  }
  EXPECT_EQ(values_of(model), before);
  other.set("hidden.bias", raw::zeros({30}, kF32));
  save_weights(other, path("out"));
  const nn::LoadReport report = load_model(model, path("out"), {.strict = false});
  EXPECT_EQ(report.missing, std::vector<std::string>{"out.bias"});
  EXPECT_EQ(report.unexpected, std::vector<std::string>{"extra"});
}

TEST_F(ModelFiles, AnIndexThatLiesIsAFormatError) {
  TiedNet model;
  save_model(model, path("out"), {.max_shard_size = "100B"});
  const std::string index = "out/model.safetensors.index.json";
  const auto with = [&](const std::string& text) {
    folder_.write(index, text);
    return message_of<FormatError>([&] { load_model(model, path("out")); });
  };
  expect_in("weight_map", with("[]"));
  expect_in("weight_map", with("{\"weight_map\": 3}"));
  expect_in("beside the index", with(R"({"weight_map": {"x": "../../etc/passwd"}})"));
  expect_in("a file's name", with(R"({"weight_map": {"x": 5}})"));
  expect_in("the index says that 'x' is here",
            with(R"({"weight_map": {"x": "model-00001-of-00005.safetensors"}})"));
  folder_.write(index, R"({"weight_map": {"x": "model-00009-of-00009.safetensors"}})");
  EXPECT_THROW(load_model(model, path("out")), IoError);
  fs::remove(path(index));
  expect_in("has neither", message_of<IoError>([&] { load_model(model, path("out")); }));
  EXPECT_THROW(load_model(model, path("none")), IoError);
}

TEST_F(ModelFiles, ACheckpointOfThreeRanksIsMergedChunkByChunkIntoTheFilesOfTheModel) {
  TiedNet model;
  TrainingState state;
  state.models = {&model};
  distributed::compared_ranks(3, [&](int rank) {
    // The threads only read the model.
    StateIo().save_state(state, path("checkpoint"));
    static_cast<void>(rank);
  });
  for (const char* size : {"10GB", "100B"}) {
    const SavedModel merged =
        export_checkpoint(path("checkpoint"), path("merged"), {.max_shard_size = size});
    EXPECT_EQ(merged.bytes, 4 * (16 + 60 + 30 + 60 + 2));
    const auto before = values_of(model);
    fill(model, 7);
    EXPECT_TRUE(load_model(model, path("merged")).complete());
    EXPECT_EQ(values_of(model), before);
    EXPECT_TRUE(load_weights(path("merged")).contains("head.weight"));
  }
  expect_in("no tensor whose name begins with 'model.1.'", message_of<ValueError>([&] {
              export_checkpoint(path("checkpoint"), path("merged"), {.prefix = "model.1."});
            }));
}

}  // namespace
}  // namespace tessera::accelerate::test_checkpoint_model
