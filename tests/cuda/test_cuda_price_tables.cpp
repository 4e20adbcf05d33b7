// Prices of whole training steps beside committed tables (price_tables.json): what changes by more
// than 1% fails and is printed. A change that is meant is written down with
//
//     TESSERA_WRITE_GOLDEN=1 test_cuda_price_tables
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/device_memory.h>
#include <tessera/core/cuda/dry/launches.h>
#include <tessera/core/cuda/dry/price.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/nn/models/gpt2.h>

#include "../message_of.h"
#include "../source_dir.h"
#include "price/step.h"

namespace tessera {
namespace {

namespace dry = gpu::dry;
using dry::Bill, dry::Launch, dry::LaunchKind;
using Json = nlohmann::ordered_json;

constexpr double kTolerance = 0.01;
constexpr double kLeastShare = 1e-3;  // rows below are one

std::string file() { return std::string(tests::source_dir()) + "/tests/cuda/price_tables.json"; }

dry::Machine machine() {
  // Rates of a reading of the step by hand; docs/measurements/gpu-price.md stands beside it.
  const std::string path = testing::TempDir() + "price_tables_machine.json";
  std::ofstream(path) << R"({"name": "of the tables", "sms": 132, "bandwidth": 4.0e12,
    "gemm": {"bf16": 7.0e14, "fp8": 1.2e15, "f32": 5.0e13},
    "attention": {"forward": 2.88e14, "backward": 2.30e14},
    "issue": 2.96e13, "launch_gap": 1.4e-6, "l2_bytes": 5.2e7})";
  const dry::Machine machine = dry::Machine::read(path);
  std::remove(path.c_str());
  return machine;
}

// {"ms", "rows": {"layer | op | kernel": [calls, ms]}}, small rows together.
Json table_of(const Bill& bill) {
  Json rows;
  int64_t rest_calls = 0;
  double rest = 0;
  for (const dry::BillRow& row : bill.rows) {
    if (row.seconds < kLeastShare * bill.seconds) {
      rest += row.seconds;
      rest_calls += row.calls;
      continue;
    }
    rows[row.layer + " | " + row.op + " | " + row.name] =
        Json::array({row.calls, std::round(row.seconds * 1e7) / 1e4});
  }
  rows["rows below 0.1%"] = Json::array({rest_calls, std::round(rest * 1e7) / 1e4});
  return {{"ms", std::round(bill.seconds * 1e7) / 1e4}, {"rows", rows}};
}

// A line for each row that changed.
std::vector<std::string> differences(const Json& before, const Json& after) {
  std::vector<std::string> lines;
  const auto differ = [](double a, double b) { return std::abs(a - b) > kTolerance * std::abs(a); };
  for (const char* key : {"ms", "peak_bytes"}) {
    if (!before.contains(key)) continue;
    const double was = before.at(key), is = after.at(key);
    if (!differ(was, is)) continue;
    std::ostringstream line;
    line << key << ": " << was << " became " << is << " (" << std::showpos << 100 * (is - was) / was
         << "%)";
    lines.push_back(line.str());
  }
  const auto said = [](const Json& row) {
    std::ostringstream text;
    text << row.at(0) << " launches of " << row.at(1).get<double>() << " ms";
    return text.str();
  };
  for (const auto& [name, row] : before.at("rows").items()) {
    if (!after.at("rows").contains(name)) {
      lines.push_back(name + ": was " + said(row) + " and is gone");
    } else if (differ(row.at(1), after.at("rows").at(name).at(1))) {
      lines.push_back(name + ": was " + said(row) + " and is " + said(after.at("rows").at(name)));
    }
  }
  for (const auto& [name, row] : after.at("rows").items()) {
    if (!before.at("rows").contains(name)) lines.push_back(name + ": is new, " + said(row));
  }
  return lines;
}

// A line a row.
void write(const Json& golden) {
  std::ofstream out(file());
  const char* between = "{\n";
  for (const auto& [name, table] : golden.items()) {
    out << between << Json(name) << ": {\"ms\": " << table.at("ms")
        << ", \"peak_bytes\": " << table.at("peak_bytes") << ", \"rows\": {";
    const char* comma = "\n";
    for (const auto& [row, value] : table.at("rows").items()) {
      out << comma << "  " << Json(row) << ": " << value.dump();
      comma = ",\n";
    }
    out << "}}";
    between = ",\n";
  }
  out << "\n}\n";
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += "  " + line + "\n";
  return text;
}

struct Case {
  std::string name;
  cli::PriceOptions options;
};
std::vector<Case> cases() {
  std::vector<Case> cases;
  const cli::PriceOptions models[] = {{.model = "gpt2", .size = "124m", .batch_size = 64},
                                      {.model = "gpt2", .size = "355m", .batch_size = 32},
                                      {.model = "bert", .size = "base", .batch_size = 64}};
  for (const cli::PriceOptions& model : models) {
    for (const std::string way : {"eager", "graph", "Accelerator", "Accelerator's graph"}) {
      cli::PriceOptions options = model;
      options.graph = way.ends_with("graph");
      options.accelerator = way.starts_with("Accelerator");
      cases.push_back({model.model + " " + model.size + " " + way, options});
      if (options.graph || model.model == "bert") continue;
      options.dtype = "fp8";
      cases.push_back({model.model + " " + model.size + " fp8 " + way, options});
    }
  }
  return cases;
}

TEST(CudaPriceTables, OfStepsAreThoseThatWereWrittenDown) {
  const bool writes = std::getenv("TESSERA_WRITE_GOLDEN") != nullptr;
  Json golden;
  if (!writes) golden = Json::parse(std::ifstream(file()));
  const dry::Machine m = machine();
  for (const auto& [name, options] : cases()) {
    SCOPED_TRACE(name);
    gpu::caching_allocator(0).release_cached();
    const cli::StepPrice step = cli::price_step(options, m);
    Json now = table_of(step.bill);
    now["peak_bytes"] = step.facts.peak_bytes;
    EXPECT_TRUE(step.bill.unpriced.empty()) << step.bill.unpriced.begin()->first;
    if (writes) {
      golden[name] = now;
      continue;
    }
    const std::vector<std::string> changes = differences(golden.at(name), now);
    EXPECT_TRUE(changes.empty()) << name << " changed:\n" << joined(changes);
  }
  if (writes) write(golden);
  EXPECT_EQ(golden.size(), cases().size());
}

// Of no product that was measured it is less than what was measured, or much more.
TEST(CudaPriceTables, GeluInAnEpilogueTakesWhatWasMeasured) {
  struct Measured {
    int64_t rows, inputs, outputs;
    double seconds;
  };
  for (const Measured& one :
       {Measured{32760, 1536, 8960, 17.6e-6}, Measured{4096, 4096, 16384, 14.1e-6},
        Measured{4096, 3072, 12288, 17.1e-6}}) {
    const Tensor x = zeros({one.rows, one.inputs}, {.dtype = kBF16, .device = cuda(0)});
    const Tensor weight = zeros({one.outputs, one.inputs}, {.dtype = kBF16, .device = cuda(0)});
    const Tensor bias = zeros({one.outputs}, {.dtype = kBF16, .device = cuda(0)});
    const std::vector<Launch> launches =
        dry::record([&] { (void)linear_gelu(x, weight, bias, Gelu::kTanh); }).launches;
    ASSERT_EQ(launches.size(), 1u);
    const double seconds = launches[0].instructions / machine().issue;
    EXPECT_GE(seconds, 0.99 * one.seconds) << one.outputs;
    EXPECT_LE(seconds, 1.26 * one.seconds) << one.outputs;
  }
}

// Beside autocast to bf16, with the rate that products in fp8 are measured at.
TEST(CudaPriceTables, Fp8WithDelayedScalesIsWellBelowBf16) {
  dry::Machine m = machine();
  m.gemm["fp8"] = 1.1e15;
  const auto seconds = [&](const char* dtype) {
    gpu::caching_allocator(0).release_cached();
    const cli::PriceOptions options{
        .model = "gpt2", .size = "124m", .batch_size = 64, .dtype = dtype};
    return cli::price_step(options, m).bill.seconds;
  };
  EXPECT_LE(seconds("fp8"), 0.85 * seconds("autocast-bf16"));
}

TEST(CudaPriceTables, SizesThatAModelDoesNotHaveAreErrors) {
  const dry::Machine m = machine();
  EXPECT_THROW(cli::price_step({.model = "gpt2", .size = "base", .batch_size = 1}, m), ConfigError);
  EXPECT_THROW(cli::price_step({.model = "bert", .size = "355m", .batch_size = 1}, m), ConfigError);
  EXPECT_THROW(cli::price_step({.model = "bert", .batch_size = 1, .context = 513}, m), ConfigError);
}

// ---- What the tables catch ---------------------------------------------------------------------

class CudaPriceChanges : public testing::Test {
 protected:
  CudaPriceChanges()
      : model_([] {
          const nn::ParameterDefaultsGuard on_device({.device = cuda(0)});
          return std::make_unique<nn::models::Gpt>(
              nn::models::GptConfig{.vocab_size = 8192, .context = 1024, .layers = 2});
        }()),
        tokens_(zeros({16, 1024}, {.dtype = kI64, .device = cuda(0)})) {}
  std::vector<Launch> step() {
    return dry::record([&] {
             (*model_)(tokens_, tokens_).loss.backward();
             model_->zero_grad();
           })
        .launches;
  }
  Json table(const std::vector<Launch>& launches) {
    return table_of(dry::price(launches, machine()));
  }
  std::unique_ptr<nn::models::Gpt> model_;
  Tensor tokens_;
};

TEST_F(CudaPriceChanges, AnEqualStepHasNone) {
  EXPECT_EQ(joined(differences(table(step()), table(step()))), "");
}

TEST_F(CudaPriceChanges, ADoubledPassIsOne) {
  const std::vector<Launch> before = step();
  std::vector<Launch> after;
  for (const Launch& launch : before) {
    after.push_back(launch);
    if (launch.name == "cross_entropy") after.push_back(launch);
  }
  const std::string changes = joined(differences(table(before), table(after)));
  EXPECT_NE(changes.find("| cross_entropy: was "), std::string::npos) << changes;
  EXPECT_EQ(changes.find("| matmul"), std::string::npos) << changes;
}

// One with a few instructions more in its loop, which are what its time is.
TEST_F(CudaPriceChanges, ASlowerKernelIsOne) {
  const std::vector<Launch> before = step();
  std::vector<Launch> after = before;
  for (Launch& launch : after) {
    if (launch.name == "cross_entropy") launch.instructions += launch.instructions / 25;
  }
  const std::string changes = joined(differences(table(before), table(after)));
  EXPECT_NE(changes.find("| cross_entropy: was "), std::string::npos) << changes;
}

TEST_F(CudaPriceChanges, AKernelMoreIsOne) {
  const std::vector<Launch> before = step();
  std::vector<Launch> after = before;
  after.push_back({.name = "slow", .op = "mine", .traffic = {1'000'000'000, 0}});
  const std::string changes = joined(differences(table(before), table(after)));
  EXPECT_NE(changes.find(" | mine | slow: is new"), std::string::npos) << changes;
}

// A hook parts what an op did in one: the next norm adds to the residual stream, not the product.
TEST_F(CudaPriceChanges, ALostFusionIsOne) {
  const Json before = table(step());
  const HookHandle hook =
      model_->submodule("transformer.h.1.attn.c_proj")
          .register_forward_hook([](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs) {});
  const std::string changes = joined(differences(before, table(step())));
  EXPECT_NE(changes.find("| residual_layer_norm | layer_norm: is new"), std::string::npos)
      << changes;
}

}  // namespace
}  // namespace tessera
