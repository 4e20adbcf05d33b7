// Where the modules of a model lie that does not fit on one device. Accelerate's own maps are the expected values
// (tests/golden/device_map_cases.py); BIG-1, BIG-2 are its tests' numbers.
#include <gtest/gtest.h>

#include <map>

#include <tessera/accelerate/big_model/device_map.h>
#include <tessera/accelerate/big_model/transformers_tree.h>
#include <tessera/nn/linear.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/nn/norm.h>
#include <nlohmann/json.hpp>

#include "finished_process.h"
#include "golden_files.h"
#include "message_of.h"

namespace tessera::test_device_map {
namespace {

using namespace accelerate;
using tests::golden_json;
using Json = nlohmann::json;

DType dtype_named(const std::string& name) {
  static const std::map<std::string, DType> kNames = {
      {"f32", kF32}, {"f16", kF16}, {"bf16", kBF16}, {"f64", kF64}, {"i64", kI64}, {"bool", kBool}};
  return kNames.at(name);
}

ModelTree tree_of(const Json& json, const std::string& name = "") {
  ModelTree tree{.name = name, .class_name = json[0]};
  for (const Json& weight : json[1]) {
    tree.weights.push_back({.name = weight[0],
                            .numel = weight[1],
                            .dtype = dtype_named(weight[2]),
                            .is_buffer = weight[3],
                            .tied_to = weight[4]});
  }
  for (const Json& child : json[2]) tree.children.push_back(tree_of(child[1], child[0]));
  return tree;
}

MaxMemory limits_of(const Json& json) {
  MaxMemory limits;
  for (const Json& row : json) {
    limits.emplace_back(WeightPlace::parse(row[0].get<std::string>()), row[1].get<int64_t>());
  }
  return limits;
}

std::map<std::string, std::string> by_name(const DeviceMap& map) {
  std::map<std::string, std::string> result;
  for (const auto& [name, place] : map) result[name] = place.describe();
  EXPECT_EQ(result.size(), map.size()) << "a name stands twice";
  return result;
}

TEST(DeviceMap, IsAcceleratesOfTransformersModelsAndRandomTrees) {
  const Json models = golden_json("device_maps.json");
  size_t cases = 0;
  for (const Json& model : models) {
    const ModelTree tree = tree_of(model["tree"]);
    const auto sizes = compute_module_sizes(tree);
    for (const auto& [name, bytes] : model["sizes"].items()) {
      EXPECT_EQ(sizes.contains(name) ? sizes.at(name) : 0, bytes) << model["name"] << ' ' << name;
    }
    for (const Json& one : model["cases"]) {
      std::optional<DType> dtype;
      if (one["dtype"] != "") dtype = dtype_named(one["dtype"]);
      const std::vector<std::string> no_split = one["no_split"];
      const DeviceMap map = infer_auto_device_map(tree, {.max_memory = limits_of(one["limits"]),
                                                         .no_split = no_split,
                                                         .dtype = dtype,
                                                         .clean_result = one["clean"],
                                                         .fallback_allocation = one["fallback"]});
      EXPECT_EQ(by_name(map), one["map"].get<decltype(by_name(map))>())
          << model["name"] << ' ' << one.dump();
      const MaxMemory balanced = get_balanced_memory(tree, {.max_memory = limits_of(one["limits"]),
                                                            .no_split = no_split,
                                                            .dtype = dtype,
                                                            .low_zero = one["low_zero"]});
      const MaxMemory expected = limits_of(one["balanced"]);
      ASSERT_EQ(balanced.size(), expected.size());
      for (size_t i = 0; i < balanced.size(); ++i) {
        EXPECT_EQ(balanced[i].place, expected[i].place);
        EXPECT_EQ(balanced[i].bytes, expected[i].bytes)
            << model["name"] << ' ' << balanced[i].place.describe() << ' ' << one.dump();
      }
      ++cases;
    }
  }
  EXPECT_GT(cases, 400U);
}

TEST(DeviceMap, IsAcceleratesForFoldersOfTransformers) {
  const Json folders = golden_json("device_map_folders.json");
  for (const Json& one : folders) {
    TestFolder folder;
    folder.write("config.json", one["config"].dump());
    const DeviceMap map =
        infer_auto_device_map(transformers_tree(PlannedModel::read(folder.path(""))),
                              {.max_memory = parse_max_memory(one["max_memory"].get<std::string>()),
                               .no_split = {kUndivided},
                               .dtype = dtype_named(one["dtype"])});
    EXPECT_EQ(by_name(map), one["map"].get<decltype(by_name(map))>())
        << one["config"]["model_type"] << ' ' << one["max_memory"];
  }
  EXPECT_GE(folders.size(), 40U);
}

// Accelerate's ModelForTest.
struct ThreeLayers : nn::Module<ThreeLayers> {
  ThreeLayers()
      : linear1(add<nn::Linear>("linear1", 3, 4)),
        batchnorm(add<nn::BatchNorm1d>("batchnorm", 4)),
        linear2(add<nn::Linear>("linear2", 4, 5)) {}
  Tensor forward(const Tensor& x) { return linear2(batchnorm(linear1(x))); }
  nn::Linear& linear1;
  nn::BatchNorm1d& batchnorm;
  nn::Linear& linear2;
};

TEST(DeviceMap, BIG2_SizesAndPlacesOfAModelOfThreeLayers) {
  ThreeLayers model;
  const auto sizes = compute_module_sizes(model);
  EXPECT_EQ(sizes.at("linear1"), 64);
  EXPECT_EQ(sizes.at("batchnorm"), 72);
  EXPECT_EQ(sizes.at("linear2"), 100);
  EXPECT_EQ(sizes.at(""), 236);
  EXPECT_EQ(compute_module_sizes(model, kF16).at("batchnorm"), 4 * 4 * 2 + 8)
      << "counters keep their bytes";
  using Map = std::map<std::string, std::string>;
  EXPECT_EQ(by_name(infer_auto_device_map(model, {.max_memory = {{cuda(0), 200}, {cuda(1), 200}}})),
            (Map{{"linear1", "cuda:0"}, {"batchnorm", "cuda:1"}, {"linear2", "cuda:1"}}));
  const MaxMemory balanced =
      get_balanced_memory(model, {.max_memory = {{cuda(0), 300}, {cuda(1), 300}}});
  EXPECT_EQ(balanced[0].bytes, 215);
  EXPECT_EQ(balanced[1].bytes, 300);
}

TEST(DeviceMap, TiedTablesOfAModelLieTogetherAndCountOnce) {
  const nn::ParameterDefaultsGuard without_memory({.device = kMeta});
  nn::models::Gpt model({.vocab_size = 100, .context = 16, .width = 8, .layers = 2, .heads = 2});
  const auto sizes = compute_module_sizes(model);
  EXPECT_EQ(sizes.contains("lm_head") ? sizes.at("lm_head") : 0, 0);
  EXPECT_EQ(sizes.at(""), model.num_parameters() * 4);
  const DeviceMap map = infer_auto_device_map(
      model, {.max_memory = {{kCpu, sizes.at("") * 3 / 4}}, .no_split = {"Block"}});
  EXPECT_EQ(place_of(map, "lm_head.weight"), place_of(map, "transformer.wte.weight"));
  check_device_map(model, map);
}

TEST(DeviceMap, ALimitIsBytesOrAText) {
  const MaxMemory limits = parse_max_memory("cpu=30GB,1=2GiB,cuda:0=500");
  ASSERT_EQ(limits.size(), 3U);
  EXPECT_EQ(limits[0].place, WeightPlace(cuda(0)));
  EXPECT_EQ(limits[0].bytes, 500);
  EXPECT_EQ(limits[1].bytes, int64_t{2} << 30);
  EXPECT_EQ(limits[2].bytes, 30'000'000'000);
  EXPECT_GT(get_max_memory().back().bytes, 1 << 20) << "the processor's memory is read";
}

TEST(DeviceMap, RefusesWrongLimitsAndMapsByName) {
  const auto names = [](const std::string& word, const auto& call) {
    EXPECT_NE(message_of<ConfigError>(call).find(word), std::string::npos)
        << message_of<ConfigError>(call);
  };
  names("tpu", [] { parse_max_memory("tpu=1GB"); });
  names("PLACE=BYTES", [] { parse_max_memory("cuda:0"); });
  names("meta", [] { parse_max_memory("meta=1GB"); });
  names("twice", [] { parse_max_memory("0=1GB,cuda:0=2GB"); });
  names("negative", [] { get_max_memory({{kCpu, int64_t{-1}}}); });
  ThreeLayers model;
  names("linear2.weight, linear2.bias", [&] {
    check_device_map(model, {{"linear1", kCpu}, {"batchnorm", kCpu}});
  });
  names("\"linear3\"", [&] { check_device_map(model, {{"", kCpu}, {"linear3", kCpu}}); });
  names("twice", [&] { check_device_map(model, {{"", kCpu}, {"", cuda(0)}}); });
  model.batchnorm.share_parameter("weight", model.linear1.bias);
  names("\"batchnorm.weight\" and \"linear1.bias\"", [&] {
    check_device_map(model, {{"", kCpu}, {"linear1", WeightPlace::disk()}});
  });
}

}  // namespace
}  // namespace tessera::test_device_map
