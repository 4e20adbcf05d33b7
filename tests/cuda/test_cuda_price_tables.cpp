// Launches of whole training steps and the bytes that they move, beside committed tables
// (price_tables.json): another count, or bytes that change by more than 1%, fails and is printed. A change that
// is meant is written down with
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

namespace tessera::test_cuda_price_tables {
namespace {

namespace dry = gpu::dry;
using dry::Bill, dry::Launch, dry::LaunchKind;
using Json = nlohmann::ordered_json;

constexpr double kTolerance = 0.01;
constexpr double kLeastShare = 5e-3;  // of the bytes; rows below are one

std::string file() { return std::string(tests::source_dir()) + "/tests/cuda/price_tables.json"; }

dry::Machine machine() {
  return dry::Machine::read(std::string(tests::source_dir()) +
                            "/examples/price/machines/h200.json");
}

// {"layer | op | kernel": [calls, bytes]}, rows of few bytes together.
Json table_of(const Bill& bill) {
  Json rows;
  int64_t rest_calls = 0, rest = 0, all = 0;
  for (const dry::BillRow& row : bill.rows) all += row.bytes;
  for (const dry::BillRow& row : bill.rows) {
    if (static_cast<double>(row.bytes) < kLeastShare * static_cast<double>(all)) {
      rest_calls += row.calls;
      rest += row.bytes;
      continue;
    }
    rows[row.layer + " | " + row.op + " | " + row.name] = Json::array({row.calls, row.bytes});
  }
  rows["rows below 0.5%"] = Json::array({rest_calls, rest});
  return {{"rows", rows}};
}

// A line for each row that changed.
std::vector<std::string> differences(const Json& before, const Json& after) {
  std::vector<std::string> lines;
  const auto differ = [](double a, double b) { return std::abs(a - b) > kTolerance * std::abs(a); };
  if (before.contains("peak_bytes") && differ(before.at("peak_bytes"), after.at("peak_bytes"))) {
    lines.push_back("peak_bytes: " + before.at("peak_bytes").dump() + " became " +
                    after.at("peak_bytes").dump());
  }
  const auto said = [](const Json& row) {
    return row.at(0).dump() + " launches that move " + row.at(1).dump() + " bytes";
  };
  for (const auto& [name, row] : before.at("rows").items()) {
    if (!after.at("rows").contains(name)) {
      lines.push_back(name + ": was " + said(row) + " and is gone");
    } else if (row.at(0) != after.at("rows").at(name).at(0) ||
               differ(row.at(1), after.at("rows").at(name).at(1))) {
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
    out << between << Json(name) << ": {\"peak_bytes\": " << table.at("peak_bytes")
        << ", \"rows\": {";
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

// The hook is there in both: it keeps the norm from being fused with what stands beside it.
TEST_F(CudaPriceChanges, ADoubledPassIsOne) {
  bool again = false;
  model_->submodule("transformer.ln_f")
      .register_forward_hook([&](nn::ModuleBase&, nn::TensorRefs inputs, nn::TensorRefs) {
        const NoGradGuard guard;
        if (again) layer_norm(*inputs[0], {inputs[0]->size(-1)});
      });
  const Json before = table(step());
  again = true;
  const std::string changes = joined(differences(before, table(step())));
  EXPECT_NE(changes.find("| layer_norm: was "), std::string::npos) << changes;
  EXPECT_EQ(changes.find("| matmul"), std::string::npos) << changes;
}

TEST_F(CudaPriceChanges, AKernelMoreIsOne) {
  const Json before = table(step());
  const HookHandle hook =
      model_->submodule("transformer.h.1.mlp.c_fc")
          .register_forward_hook([](nn::ModuleBase&, nn::TensorRefs, nn::TensorRefs outputs) {
            const NoGradGuard guard;
            cumsum(*outputs[0], -1);
          });
  const std::string changes = joined(differences(before, table(step())));
  EXPECT_NE(changes.find(" | cumsum | "), std::string::npos) << changes;
  EXPECT_NE(changes.find("is new"), std::string::npos) << changes;
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
}  // namespace tessera::test_cuda_price_tables
