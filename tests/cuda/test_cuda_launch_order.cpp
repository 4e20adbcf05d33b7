// What bench_step --launch-times writes: on the emulation, launch after launch the same that the
// dry device notes of the same step.
#include <gtest/gtest.h>

#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <tessera/core/cuda/dry/launches.h>
#include <tessera/core/cuda/dry/price.h>
#include <tessera/core/factory/factory.h>
#include <tessera/nn/models/gpt2.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>
#include <tessera/precision/autocast.h>

#include "../finished_process.h"
#include "../source_dir.h"

namespace tessera::test_cuda_launch_order {
namespace {

namespace dry = gpu::dry;
using nlohmann::json;

constexpr int64_t kLayers = 2, kWidth = 32, kHeads = 2, kContext = 16, kVocabulary = 48, kBatch = 2;

std::string key_of(const std::string& layer, const std::string& op, const std::string& name) {
  return layer + " | " + op + " | " + name;
}

// As bench_step has it, of the step after the first ones.
std::vector<dry::Launch> noted() {
  dry::set_libraries(false);  // as on the emulation
  const Device device = cuda(0);
  nn::models::Gpt model({.vocab_size = kVocabulary,
                         .context = kContext,
                         .width = kWidth,
                         .layers = kLayers,
                         .heads = kHeads});
  const Tensor tokens = randint(0, kVocabulary, {kBatch, kContext + 1});
  const Tensor inputs = tokens.narrow(1, 0, kContext).contiguous().to(device),
               targets = tokens.narrow(1, 1, kContext).contiguous().to(device);
  model.to(device);
  precision::AppliedPolicy applied = apply(model, precision::Policy::pure(kBF16));
  optim::AdamW optimizer(model.named_parameters(),
                         {.lr = 3e-4, .betas = {0.9, 0.99}, .weight_decay = 0.1});
  optimizer.begin_masters(applied.take_originals());
  const auto step = [&] {
    model(inputs, targets).loss.backward();
    optim::clip_grad_norm(model.parameters(), 1.0, {.fold_into = &optimizer});
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  step();
  return dry::record(step).launches;
}

std::string output_of(const std::string& command) {
  std::string text;
  FILE* const pipe = ::popen((command + " 2>&1").c_str(), "r");
  for (char line[4096]; std::fgets(line, sizeof line, pipe) != nullptr;) text += line;
  const int status = ::pclose(pipe);
  EXPECT_EQ(WEXITSTATUS(status), 0) << command << "\n" << text;
  return text;
}

TEST(CudaLaunchOrder, IsThatOfTheDryDevice) {
  TestFolder folder;
  const std::string measured_file = folder.path("launches.json");
  const auto option = [](const char* name, int64_t value) {
    return std::string(" --") + name + " " + std::to_string(value);
  };
  output_of(TESSERA_BENCH_STEP " --device cuda --dtype bf16 --warmup 1 --steps 1 --launch-times " +
            measured_file + option("layers", kLayers) + option("width", kWidth) +
            option("heads", kHeads) + option("context", kContext) + option("vocab", kVocabulary) +
            option("batch-size", kBatch));
  const json measured = json::parse(std::ifstream(measured_file));
  const std::vector<dry::Launch> launches = noted();
  std::vector<std::string> got, expected;
  for (const json& row : measured) {
    got.push_back(key_of(row.at("layer"), row.at("op"), row.at("name")));
    EXPECT_GE(row.at("ms").get<double>(), 0) << row;
  }
  for (const dry::Launch& launch : launches) {
    expected.push_back(key_of(launch.layer, launch.op, launch.name));
  }
  EXPECT_GT(got.size(), 50u);
  EXPECT_EQ(got, expected);

  if (std::system("python3 -c ''") != 0) GTEST_SKIP() << "python3 is not installed";
  dry::Machine machine;
  machine.name = "made up";
  machine.bandwidth = 4e12;
  machine.gemm = {{"bf16", 7e14}, {"f32", 5e13}};
  machine.attention_forward = machine.attention_backward = 3e14;
  machine.gelu_epilogue = 1e12;
  machine.launch_gap = 1e-6;
  const std::string price = folder.write(
      "price.json", dry::to_json(dry::price(launches, machine), machine, {.tokens = 1}));
  const std::string trace = folder.write("trace.json", dry::chrome_trace(launches, machine));
  const std::string beside = std::string(tests::source_dir()) + "/scripts/beside_price.py ";
  const std::string count = std::to_string(launches.size());
  for (const std::string& rest : {price, trace, trace + " --by name"}) {
    const std::string table = output_of(beside + measured_file + " " + rest + " --rows 1000");
    const std::string all = table.substr(table.find("| **all** |"));
    EXPECT_NE(all.find(" | " + count + " | " + count + " | "), std::string::npos) << table;
  }
  const std::string table = output_of(beside + measured_file + " " + price + " --rows 1000");
  EXPECT_NE(table.find("| transformer.h.*.attn.c_attn | linear |"), std::string::npos) << table;
  // Each launch has its price: no cell of the last column is empty.
  const std::string ordered = output_of(beside + measured_file + " " + trace + " --ordered");
  EXPECT_NE(ordered.find("| transformer.h.1.attn.c_attn | linear |"), std::string::npos) << ordered;
  EXPECT_EQ(ordered.find("|  |"), std::string::npos) << ordered;
  EXPECT_EQ(ordered.find("not launched"), std::string::npos) << ordered;
}

}  // namespace
}  // namespace tessera::test_cuda_launch_order
