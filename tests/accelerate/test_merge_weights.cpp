// `tessera merge-weights`.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <set>

#include <nlohmann/json.hpp>

#include <tessera/autograd/ops.h>
#include <tessera/core/state/safetensors.h>
#include <tessera/distributed/checkpoint/commit.h>

#include "accelerate/tessera_command.h"

namespace tessera::test_merge_weights {
namespace {

class MergeWeights : public testing::Test {
 protected:
  MergeWeights() {
    for (int i = 0; i < 6; ++i) tensors_["layer." + std::to_string(i)] = randn({5, 3 + i});
    tensors_["half"] = randn({7}).to(kBF16);
    tensors_["none"] = zeros({0, 4});
    std::map<std::string, Tensor> first, second;
    nlohmann::json index = {{"metadata", {{"total_size", 1}}}};
    for (const auto& [name, tensor] : tensors_) {
      auto& shard = first.size() < 4 ? first : second;
      shard[name] = tensor;
      index["weight_map"][name] = &shard == &first ? "a.safetensors" : "b.safetensors";
    }
    std::filesystem::create_directories(folder_.path("in"));
    save_safetensors(folder_.path("in/a.safetensors"), first, {{"format", "pt"}});
    save_safetensors(folder_.path("in/b.safetensors"), second, {{"format", "pt"}});
    write_index(index);
  }
  void write_index(const nlohmann::json& index) {
    index_ = index;
    folder_.write("in/model.safetensors.index.json", index.dump());
  }
  FinishedProcess merge(std::vector<std::string> words) {
    words.insert(words.begin(), "merge-weights");
    return tessera_command(words);
  }
  void expect_refused(const std::string& part, const std::vector<std::string>& words = {},
                      int code = 1) {
    std::vector<std::string> all = {folder_.path("in"), folder_.path("refused.safetensors")};
    if (!words.empty()) all = words;
    const FinishedProcess process = merge(all);
    EXPECT_EQ(process.code(), code) << process;
    EXPECT_TRUE(process.complained(part)) << part << "\n" << process;
    EXPECT_FALSE(std::filesystem::exists(folder_.path("refused.safetensors")));
  }
  void expect_tensors(const std::map<std::string, Tensor>& got) {
    ASSERT_EQ(got.size(), tensors_.size());
    for (const auto& [name, tensor] : tensors_) {
      ASSERT_EQ(got.at(name).dtype(), tensor.dtype());
      ASSERT_EQ(got.at(name).shape(), tensor.shape());
      EXPECT_EQ(got.at(name).to_vector<float>(), tensor.to_vector<float>()) << name;
    }
  }

  TestFolder folder_;
  std::map<std::string, Tensor> tensors_;
  nlohmann::json index_;
};

TEST_F(MergeWeights, ShardsBecomeOneFile) {
  const FinishedProcess merged = merge({folder_.path("in"), folder_.path("out.safetensors")});
  EXPECT_EQ(merged.code(), 0) << merged;
  expect_tensors(load_safetensors(folder_.path("out.safetensors")));
  EXPECT_EQ(SafeTensorsFile(folder_.path("out.safetensors")).metadata().at("format"), "pt");
  EXPECT_TRUE(std::filesystem::exists(folder_.path("in/a.safetensors")));
  // Into a folder, which is made, by the usual name; not over what is there.
  EXPECT_EQ(merge({folder_.path("in"), folder_.path("to")}).code(), 0);
  EXPECT_TRUE(std::filesystem::exists(folder_.path("to/model.safetensors")));
  const FinishedProcess again = merge({folder_.path("in"), folder_.path("to")});
  EXPECT_TRUE(again.code() == 1 && again.complained("--overwrite")) << again;
  EXPECT_EQ(merge({folder_.path("in"), folder_.path("to"), "--overwrite"}).code(), 0);
}

TEST_F(MergeWeights, OrFewerShardsWithTheirIndex) {
  const FinishedProcess merged =
      merge({folder_.path("in"), folder_.path("out"), "--max-shard-size", "150"});
  EXPECT_EQ(merged.code(), 0) << merged;
  const auto index = nlohmann::json::parse(folder_.read("out/model.safetensors.index.json"));
  std::map<std::string, Tensor> all;
  std::set<std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) {
    files.insert(file.get<std::string>());
    all[name] = SafeTensorsFile(folder_.path("out/" + file.get<std::string>())).load(name);
  }
  expect_tensors(all);
  EXPECT_GT(files.size(), 3u);
  int64_t bytes = 0;
  for (const auto& [name, tensor] : tensors_) bytes += tensor.numel() * size_of(tensor.dtype());
  EXPECT_EQ(index["metadata"]["total_size"], bytes);
  // Its own result can be merged again.
  EXPECT_EQ(merge({folder_.path("out"), folder_.path("one.safetensors")}).code(), 0);
  expect_tensors(load_safetensors(folder_.path("one.safetensors")));
}

TEST_F(MergeWeights, TheSourceGoesWhereThatIsAsked) {
  folder_.write("in/notes.txt", "keep me");
  EXPECT_EQ(merge({folder_.path("in"), folder_.path("x.safetensors"), "--remove-source"}).code(),
            0);
  EXPECT_FALSE(std::filesystem::exists(folder_.path("in/a.safetensors")));
  EXPECT_FALSE(std::filesystem::exists(folder_.path("in/model.safetensors.index.json")));
  EXPECT_EQ(folder_.read("in/notes.txt"), "keep me");
  expect_tensors(load_safetensors(folder_.path("x.safetensors")));
}

TEST_F(MergeWeights, WhatIsIncompleteOrContradictoryIsRefused) {
  const nlohmann::json whole = index_;
  nlohmann::json index = whole;
  index["weight_map"]["missing"] = "a.safetensors";
  write_index(index);
  expect_refused("lacks \"missing\"");
  index = whole;
  index["weight_map"].erase("half");
  write_index(index);
  expect_refused("\"half\", which the index does not know");
  index = whole;
  index["weight_map"]["half"] = "../b.safetensors";
  write_index(index);
  expect_refused("not the name of a file beside it");
  index = whole;
  index["weight_map"]["half"] = "c.safetensors";
  write_index(index);
  expect_refused("c.safetensors, which is not there");
  folder_.write("in/model.safetensors.index.json", "{}");
  expect_refused("weight_map");
  write_index(whole);
  std::filesystem::resize_file(folder_.path("in/b.safetensors"), 100);
  expect_refused("b.safetensors");
}

TEST_F(MergeWeights, ACheckpointGivesTheWeightsOfItsModels) {
  tensors_["large"] = randn({3000, 1000});  // of several chunks
  std::vector<distributed::SaveItem> items;
  for (const auto& [name, tensor] : tensors_) {
    items.push_back(distributed::SaveItem::whole("model.1." + name, tensor));
    items.push_back(distributed::SaveItem::whole("optimizer.0." + name, tensor));
  }
  distributed::CheckpointSaver saver;
  saver.save(folder_.path("saved"), items, {.metadata = {{"tied:model.1.head", "model.1.half"}}});
  const std::string out = folder_.path("of_checkpoint.safetensors");
  const FinishedProcess merged = merge({folder_.path("saved"), out, "--model", "1"});
  EXPECT_EQ(merged.code(), 0) << merged;
  expect_tensors(load_safetensors(out));
  EXPECT_EQ(SafeTensorsFile(out).metadata().at("head"), "half");  // tied: the other name stays
  expect_refused("no model with the number 0",
                 {folder_.path("saved"), folder_.path("refused.safetensors")});
  expect_refused("whole training", {folder_.path("saved"), folder_.path("refused.safetensors"),
                                    "--model", "1", "--remove-source"});
  // One byte of an element is enough.
  std::fstream chunk(folder_.path("saved/rank-0-0.bin"), std::ios::in | std::ios::out);
  chunk.seekp(4096 * 3 + 1);
  chunk.put('!');
  chunk.close();
  expect_refused("rank-0-0.bin",
                 {folder_.path("saved"), folder_.path("refused.safetensors"), "--model", "1"});
}

TEST_F(MergeWeights, MistakesOnTheCommandLineAreTold) {
  expect_refused("there is no", {folder_.path("nowhere"), folder_.path("refused.safetensors")});
  std::filesystem::create_directories(folder_.path("empty"));
  expect_refused("has 0 files", {folder_.path("empty"), folder_.path("refused.safetensors")});
  folder_.write("out.bin", "a file");
  expect_refused("*.safetensors", {folder_.path("in"), folder_.path("out.bin")});
  expect_refused("byte size", {folder_.path("in"), folder_.path("out"), "--max-shard-size", "many"},
                 2);
  expect_refused("OUT has to be a folder",
                 {folder_.path("in"), folder_.path("o.safetensors"), "--max-shard-size", "1GB"}, 2);
  expect_refused("among those that are read",
                 {folder_.path("in"), folder_.path("in"), "--max-shard-size", "1GB"});
  expect_refused("one of the shards",
                 {folder_.path("in"), folder_.path("in/a.safetensors"), "--overwrite"});
}

}  // namespace
}  // namespace tessera::test_merge_weights
