// What gpu_rates writes, of the emulation: all that a machine file holds, which then loads.
#include <gtest/gtest.h>

#include <sys/wait.h>

#include <cstdio>
#include <fstream>
#include <set>
#include <string>

#include <nlohmann/json.hpp>

#include <tessera/core/cuda/dry/machine.h>

#include "../finished_process.h"

namespace tessera::test_cuda_rates {
namespace {

using nlohmann::json;

FinishedProcess gpu_rates(std::vector<std::string> words, const launch::Environment& changes = {}) {
  words.insert(words.begin(), TESSERA_GPU_RATES);
  launch::Environment environment = changes;
  environment.emplace("TESSERA_GEMM_TABLE", "");
  return run_process(words, environment);
}

TEST(CudaRates, AreAMachineFile) {
  TestFolder folder;
  const std::string rates_file = folder.path("rates.json");
  const FinishedProcess outcome = gpu_rates({"--seconds", "0.1", "--json", rates_file});
  ASSERT_EQ(outcome.code(), 0) << outcome;
  const json report = json::parse(std::ifstream(rates_file));
  EXPECT_EQ(report.at("backend"), "emulated");
  EXPECT_TRUE(report.at("missing").empty()) << report.at("missing");
  EXPECT_NE(report.at("card").get<std::string>().find("emulated"), std::string::npos);
  std::set<std::string> names;
  for (const json& rate : report.at("rates")) {
    EXPECT_LE(rate.at("min"), rate.at("seconds_median")) << rate;
    EXPECT_LE(rate.at("seconds_median"), rate.at("max")) << rate;
    EXPECT_GE(rate.at("samples"), 3) << rate;
    const auto unit = rate.contains("bytes") ? "bytes" : rate.contains("flops") ? "flops" : "count";
    EXPECT_NEAR(rate.at("rate").get<double>() * rate.at("seconds_median").get<double>(),
                rate.at(unit).get<double>(), 1e-6 * rate.at(unit).get<double>())
        << rate;
    names.insert(rate.at("name"));
  }
  for (const char* const name : {"memory.copy",
                                 "memory.write",
                                 "memory.read",
                                 "launch.eager",
                                 "launch.graph",
                                 "launch.upload",
                                 "launch.host",
                                 "issue.fma",
                                 "issue.exp",
                                 "square.bf16",
                                 "product.qkv.forward.bias",
                                 "product.expansion.forward.gelu",
                                 "product.contraction.input.gelu_bias_gradient",
                                 "product.projection.weight.bias_gradient",
                                 "product.qkv.weight.beta",
                                 "product.fp8.qkv.forward",
                                 "product.head.weight",
                                 "attention.forward.gpt2",
                                 "attention.backward.bert",
                                 "first.product"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
  const std::string machine_file = folder.write("machine.json", report.at("machine").dump());
  const auto machine = gpu::dry::Machine::read(machine_file);
  EXPECT_EQ(machine.gemm.size(), 6u);
  EXPECT_FALSE(machine.sources.empty());
}

TEST(CudaRates, OptionsFilterAndExplain) {
  TestFolder folder;
  const std::string rates_file = folder.path("rates.json");
  const FinishedProcess outcome = gpu_rates(
      {"--only", "memory.read", "--only", "issue.fma", "--seconds", "0.1", "--json", rates_file});
  ASSERT_EQ(outcome.code(), 0) << outcome;
  const json report = json::parse(std::ifstream(rates_file));
  std::set<std::string> names;
  for (const json& rate : report.at("rates")) names.insert(rate.at("name"));
  EXPECT_EQ(names, (std::set<std::string>{"memory.read", "issue.fma"}));
  const auto missing = report.at("missing").get<std::set<std::string>>();
  EXPECT_TRUE(missing.contains("bandwidth") && missing.contains("gemm.bf16"));

  const FinishedProcess help = gpu_rates({"--help"});
  EXPECT_EQ(help.code(), 0);
  for (const char* const option : {"--seconds", "--only", "--json"}) {
    EXPECT_TRUE(help.printed(option)) << help;
  }
  EXPECT_NE(gpu_rates({"--seconds", "0"}).code(), 0);
  const FinishedProcess without = gpu_rates({}, {{"TESSERA_EMULATED_DEVICES", "0"}});
  EXPECT_EQ(without.code(), 77) << without;
  EXPECT_TRUE(without.printed("there is no GPU: ")) << without;
}

}  // namespace
}  // namespace tessera::test_cuda_rates
