// What launches cost on machines of stated rates.
#include <gtest/gtest.h>

#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/dry/launches.h>
#include <tessera/core/cuda/dry/price.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/nn/container.h>
#include <tessera/nn/linear.h>

#include "../message_of.h"
#include "../source_dir.h"
#include "price/step.h"

namespace tessera::test_cuda_price {
namespace {

namespace dry = gpu::dry;
using dry::Bound, dry::Launch, dry::LaunchKind;
using nlohmann::json;

constexpr double kGap = 1e-6;

class CudaPrices : public testing::Test {
 protected:
  // Rates of round numbers; a source of none.
  static json made_up() {
    return {{"name", "made up"},
            {"bandwidth", 4e12},
            {"gemm", {{"bf16", 7e14}, {"fp8", 1.4e15}, {"f32", 5e13}}},
            {"attention", {{"forward", 2.88e14}, {"backward", 2.3e14}}},
            {"gelu_epilogue", 1e12},
            {"launch_gap", kGap}};
  }
  dry::Machine machine(const std::string& text) {
    const std::string path = testing::TempDir() + "machine.json";
    std::ofstream(path) << text;
    const dry::Machine machine = dry::Machine::read(path);
    std::filesystem::remove(path);
    return machine;
  }
  dry::Machine machine(const json& fields) { return machine(fields.dump()); }
  std::string refusal(const json& fields) {
    return message_of<FormatError>([&] { machine(fields); });
  }
};

TEST_F(CudaPrices, OfSingleLaunches) {
  const dry::Machine m = machine(made_up());
  const auto expect = [&](const Launch& launch, double seconds, double floor, Bound bound) {
    const dry::Price price = dry::price(launch, m);
    EXPECT_NEAR(price.seconds, seconds + kGap, 1e-12 * seconds + 1e-18) << launch.name;
    EXPECT_NEAR(price.floor_seconds, floor, 1e-12 * floor) << launch.name;
    EXPECT_EQ(price.bound, bound) << launch.name;
  };
  expect({.name = "kernel", .traffic = {3'000'000'000, 1'000'000'000}}, 1e-3, 1e-3, Bound::kMemory);
  expect({.name = "little", .traffic = {4000, 0}}, 1e-9, 1e-9, Bound::kGap);
  expect({.kind = LaunchKind::kProduct,
          .traffic = {4000, 0},
          .gelu_results = 5e8,
          .dtype = kBF16,
          .flops = 7e11},
         1.5e-3, 1e-3, Bound::kProduct);
  expect({.name = "silent"}, 0, 0, Bound::kUnknown);
  expect({.kind = LaunchKind::kAttention, .causal = true, .flops = 2 * 2.88e11}, 1e-3, 1e-3,
         Bound::kAttention);
  expect({.kind = LaunchKind::kAttention, .flops = 2.88e11}, 1e-3, 1e-3, Bound::kAttention);
  expect({.kind = LaunchKind::kAttentionGradient, .flops = 2.3e11}, 1e-3, 1e-3, Bound::kAttention);
  expect({.kind = LaunchKind::kConvolution, .traffic = {4000, 0}, .dtype = kBF16, .flops = 7e11},
         1e-3, 1e-3, Bound::kProduct);
  expect({.kind = LaunchKind::kGraph, .traffic = {4'000'000'000, 0}}, 1e-3, 1e-3, Bound::kMemory);
  expect({.kind = LaunchKind::kCopy, .traffic = {2'000'000'000, 2'000'000'000}}, 1e-3, 1e-3,
         Bound::kMemory);
  expect({.kind = LaunchKind::kFill, .traffic = {0, 4'000'000'000}}, 1e-3, 1e-3, Bound::kMemory);
}

// [m, k] times [k, n], in bf16.
Launch product(int64_t m, int64_t n, int64_t k, DType dtype = kBF16) {
  return {.kind = LaunchKind::kProduct,
          .name = "matmul",
          .traffic = {2 * (m + n) * k, 2 * m * n},
          .dtype = dtype,
          .product = {1, m, n, k},
          .flops = 2.0 * static_cast<double>(m * n) * static_cast<double>(k)};
}

TEST_F(CudaPrices, OfProductsAreThoseOfTheirDtype) {
  json fields = made_up();
  const dry::Machine m = machine(fields);
  EXPECT_EQ(m.gemm_rate(kBF16, false), 7e14);
  EXPECT_EQ(m.gemm_rate(kF16, false), 7e14);
  EXPECT_EQ(m.gemm_rate(kF8E4M3, false), 1.4e15);
  EXPECT_EQ(m.gemm_rate(kF32, false), 5e13);
  const std::string f64 = message_of<UnsupportedError>([&] { m.gemm_rate(kF64, false); });
  EXPECT_NE(f64.find("gemm.f64"), std::string::npos) << f64;
  EXPECT_THROW(m.gemm_rate(kF32, true), UnsupportedError);
  fields["gemm"]["tf32"] = 3e14;
  EXPECT_EQ(machine(fields).gemm_rate(kF32, true), 3e14);
  // A thin one waits for its operands.
  const dry::Price thin = dry::price(product(1, 1 << 15, 1 << 15), m);
  EXPECT_EQ(thin.bound, Bound::kMemory);
}

// Every key, missing, of a wrong kind or wrong size, is named.
TEST_F(CudaPrices, MachinesThatSayTooLittleAreNamed) {
  EXPECT_THROW(dry::Machine::read("/nowhere.json"), IoError);
  EXPECT_NE(message_of<FormatError>([&] { machine(std::string("[1]")); }).find("not a JSON object"),
            std::string::npos);
  EXPECT_NE(message_of<FormatError>([&] { machine(std::string("{")); }).find("not a JSON object"),
            std::string::npos);
  for (const char* key :
       {"/name", "/bandwidth", "/gemm", "/gemm/bf16", "/gemm/fp8", "/gemm/f32", "/attention",
        "/attention/forward", "/attention/backward", "/gelu_epilogue", "/launch_gap"}) {
    SCOPED_TRACE(key);
    const json::json_pointer place(key);
    std::string name = std::string(key).substr(1);
    std::ranges::replace(name, '/', '.');
    json fields = made_up();
    fields.at(place.parent_pointer()).erase(place.back());
    EXPECT_NE(refusal(fields).find("': " + name + " must be"), std::string::npos)
        << refusal(fields);
    for (const json& wrong : {json(0), json(-1.0), json(true), json(nullptr), json::array({1})}) {
      fields = made_up();
      fields[place] = wrong;
      const std::string message = refusal(fields);
      EXPECT_NE(message.find("': " + name + " must be"), std::string::npos) << message;
    }
  }
  const auto with = [](const char* place, const json& value) {
    json fields = made_up();
    fields[json::json_pointer(place)] = value;
    return fields;
  };
  EXPECT_NE(refusal(with("/memory_bytes", 1.5)).find("memory_bytes must be a whole number"),
            std::string::npos);
  EXPECT_NE(refusal(with("/bandwith", 1)).find("bandwith is unknown; there are"),
            std::string::npos);
  EXPECT_NE(refusal(with("/gemm/int4", 1)).find("gemm.int4 is unknown"), std::string::npos);
  EXPECT_NE(refusal(with("/attention/both", 1)).find("attention.both is unknown"),
            std::string::npos);
  EXPECT_NE(refusal(with("/sources/gemm.i4", "x")).find("sources.gemm.i4"), std::string::npos);
  EXPECT_NE(refusal(with("/sources/launch_gap", 3)).find("sources.launch_gap must be a text"),
            std::string::npos);
}

TEST_F(CudaPrices, MachinesThatAreInstalledSayWhereTheirRatesComeFrom) {
  for (const char* name : {"h100", "h200"}) {
    const std::string path =
        std::string(tests::source_dir()) + "/examples/price/machines/" + name + ".json";
    const dry::Machine m = dry::Machine::read(path);
    const json fields = json::parse(std::ifstream(path)).flatten();
    for (const auto& [place, value] : fields.items()) {
      if (!value.is_number()) continue;
      std::string key = place.substr(1);
      std::ranges::replace(key, '/', '.');
      EXPECT_TRUE(m.sources.contains(key)) << path << ": " << key;
    }
  }
}

struct Net : nn::Module<Net> {
  explicit Net(int64_t layers) : h(add<nn::ModuleList>("h")) {
    for (int64_t i = 0; i < layers; ++i) h.append<nn::Linear>(256, 256);
  }
  Tensor forward(Tensor x) {
    for (size_t i = 0; i < h.size(); ++i) x = gelu(h.at<nn::Linear>(i)(x));
    return x;
  }
  nn::ModuleList& h;
};

// Ops and their backwards bear the layer that called them.
TEST_F(CudaPrices, RowsAreOfLayers) {
  const nn::ParameterDefaultsGuard on_device({.device = cuda(0)});
  Net net(3);
  const Tensor x = zeros({512, 256}, {.device = cuda(0)});
  const dry::Recording recording = dry::record([&] { net(x).sum().backward(); });
  std::map<std::string, int64_t> products;
  for (const Launch& launch : recording.launches) {
    if (launch.kind == LaunchKind::kProduct) ++products[launch.layer + "|" + launch.op];
  }
  EXPECT_EQ(products, (std::map<std::string, int64_t>{{"h.0|linear", 1},
                                                      {"h.0|linear backward", 1},
                                                      {"h.1|linear", 1},
                                                      {"h.1|linear backward", 2},
                                                      {"h.2|linear", 1},
                                                      {"h.2|linear backward", 2}}));
  const dry::Bill bill = dry::price(recording.launches, machine(made_up()));
  std::map<std::string, int64_t> rows;
  for (const dry::BillRow& row : bill.rows) {
    if (row.name == "matmul") rows[row.layer + "|" + row.op] = row.calls;
  }
  EXPECT_EQ(rows, (std::map<std::string, int64_t>{{"h.*|linear", 3}, {"h.*|linear backward", 5}}));
  EXPECT_TRUE(bill.unpriced.empty()) << bill.unpriced.begin()->first;
  // Nobody listens any more.
  dry::take_launches();
  net(x);
  for (const Launch& launch : dry::take_launches()) EXPECT_TRUE(launch.layer.empty());
}

TEST_F(CudaPrices, TablesAndTracesHaveAllOfIt) {
  const nn::ParameterDefaultsGuard on_device({.device = cuda(0)});
  Net net(2);
  const Tensor x = zeros({512, 256}, {.device = cuda(0)});
  const dry::Recording recording = dry::record([&] { net(x).sum().backward(); });
  const dry::Machine m = machine(made_up());
  const dry::Bill bill = dry::price(recording.launches, m);
  const json table =
      json::parse(dry::to_json(bill, m, {.tokens = 512, .peak_bytes = 77, .host_seconds = 3e-3}));
  EXPECT_DOUBLE_EQ(table.at("ms"), bill.seconds * 1e3);
  EXPECT_DOUBLE_EQ(table.at("tokens_per_s"), 512 / bill.seconds);
  EXPECT_EQ(table.at("peak_bytes"), 77);
  EXPECT_DOUBLE_EQ(table.at("host_ms"), 3);
  double ms = 0, flops = 0;
  int64_t calls = 0;
  for (const json& row : table.at("launches")) {
    ms += row.at("ms").get<double>();
    flops += row.at("flops").get<double>();
    calls += row.at("calls").get<int64_t>();
    EXPECT_LE(row.at("floor_ms"), row.at("ms"));
  }
  EXPECT_NEAR(ms, bill.seconds * 1e3, 1e-12);
  EXPECT_EQ(flops, table.at("flops"));
  // Two layers forward, and backward but for the gradient of the input.
  EXPECT_EQ(flops, 5.0 * 2 * 512 * 256 * 256);
  EXPECT_EQ(calls, static_cast<int64_t>(recording.launches.size()));
  const std::string text = dry::table(bill);
  EXPECT_NE(text.find("h.*"), std::string::npos) << text;
  const json trace = json::parse(dry::chrome_trace(recording.launches, m));
  double kernels = 0, end = 0;
  size_t at = 0;
  for (const json& event : trace.at("traceEvents")) {
    if (event.at("ph") != "X") continue;
    end = std::max(end, event.at("ts").get<double>() + event.at("dur").get<double>());
    if (event.at("tid") != 2) continue;
    kernels += event.at("dur").get<double>();
    const Launch& launch = recording.launches.at(at++);
    EXPECT_EQ(event.at("name"), launch.name);
    EXPECT_EQ(event.at("args").at("op"), launch.op);
    EXPECT_EQ(event.at("args").at("layer"), launch.layer);
    EXPECT_EQ(event.at("args").at("request"), launch.request);
  }
  EXPECT_EQ(at, recording.launches.size());
  EXPECT_NEAR(kernels, bill.seconds * 1e6, 1e-6);
  EXPECT_NEAR(end, bill.seconds * 1e6, 1e-6);
}

// ---- The command -------------------------------------------------------------------------------

struct Outcome {
  int code;
  std::string text;  // of both streams
};
Outcome run(const std::string& arguments) {
  Outcome outcome{};
  FILE* const pipe = ::popen((TESSERA_COMMAND " price " + arguments + " 2>&1").c_str(), "r");
  for (char line[4096]; std::fgets(line, sizeof line, pipe) != nullptr;) outcome.text += line;
  outcome.code = WEXITSTATUS(::pclose(pipe));
  return outcome;
}

TEST(PriceCommand, WritesATableAndFiles) {
  const std::string json_file = testing::TempDir() + "price.json",
                    trace_file = testing::TempDir() + "price-trace.json";
  const std::string step = "gpt2 --size 124m --batch_size 2 --context 128 --machine h100 ";
  const Outcome outcome = run(step + "--json " + json_file + " --trace " + trace_file);
  ASSERT_EQ(outcome.code, 0) << outcome.text;
  for (const char* part :
       {"transformer.h.*.mlp", "optimizer step", "/floor", "H100 SXM5: ", "not measured"}) {
    EXPECT_NE(outcome.text.find(part), std::string::npos) << part << "\n" << outcome.text;
  }
  const json table = json::parse(std::ifstream(json_file));
  EXPECT_EQ(table.at("machine"), "H100 SXM5");
  EXPECT_NEAR(table.at("tokens_per_s").get<double>() * table.at("ms").get<double>(), 2 * 128 * 1e3,
              1);
  EXPECT_GT(table.at("host_ms"), 0);
  // Parameters, masters, gradients and two states: 16 bytes and more each.
  EXPECT_GT(table.at("peak_bytes"), 16 * 124e6);
  EXPECT_TRUE(table.at("unpriced").empty()) << table.at("unpriced");
  EXPECT_FALSE(json::parse(std::ifstream(trace_file)).at("traceEvents").empty());
  std::filesystem::remove(json_file);
  std::filesystem::remove(trace_file);
  const Outcome output = run(step + "--json -");
  ASSERT_EQ(output.code, 0) << output.text;
  EXPECT_EQ(json::parse(output.text).at("ms"), table.at("ms"));
  for (const char* way : {"--graph", "--graph --accelerator"}) {
    const Outcome graph =
        run("bert --size base --batch-size 2 --machine h200 --json - " + std::string(way));
    ASSERT_EQ(graph.code, 0) << graph.text;
    EXPECT_TRUE(json::parse(graph.text).at("unpriced").empty()) << graph.text;
  }
}

TEST(PriceCommand, SaysWhatIsWrong) {
  const auto expect = [](const std::string& arguments, int code, const char* part) {
    const Outcome outcome = run(arguments);
    EXPECT_EQ(outcome.code, code) << arguments;
    EXPECT_NE(outcome.text.find(part), std::string::npos) << outcome.text;
  };
  expect("gpt2 --batch-size 2", 2, "--machine is required");
  expect("gpt2 --batch-size 2 --machin h100", 2, "--machine");
  expect("gpt3 --batch-size 2 --machine h100", 2, "gpt3");
  expect("gpt2 --batch-size 0 --machine h100", 2, "--batch-size");
  expect("gpt2 --batch-size 2 --machine h300", 1, "h300.json");
  expect("gpt2 --batch-size 2 --machine /nowhere.json", 1, "cannot read '/nowhere.json'");
  expect("gpt2 --size base --batch-size 2 --machine h100", 1, "--size of gpt2");
  expect("gpt2 --batch-size 4096 --machine h100", 1, "cannot allocate");
}

}  // namespace
}  // namespace tessera::test_cuda_price
