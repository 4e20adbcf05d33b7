// What a GPU reaches: the constants of a machine file (core/cuda/dry/machine.h), and the products,
// attention, copies and launches that a training step of GPT-2 124M is made of, each alone.
//
//     gpu_rates --json rates.json                # some 35 s on an H100, estimated
//     gpu_rates --only product --seconds 10
//
// A rate is the median of up to 15 measurements after two that do not count, by events of the
// device. Before each one the device gets fills to do, so that the host has queued the work before
// its turn and the caches have forgotten its operands. Products run by the algorithms that
// TESSERA_GEMM_TABLE has, or that are measured first, as in a training.
//
// --json: {"card", "backend", "rates": [{"name", "shape", "seconds_median", "min", "max",
// "samples", "bytes" or "flops" or "count", "rate"}], "machine": what a machine file holds, as far
// as it was measured, "missing": [names of its fields that were not]}. A rate is bytes, operations
// or things a second. gpu_rates_emulated writes the same with "backend": "emulated", for the sake
// of the form; its figures mean nothing.
#include <CLI/CLI.hpp>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <tessera/autograd/ops.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/cuda/libraries/attention_graph.h>
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/error.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/kernels/attention/attention.h>

#include "rates/kernels.h"

namespace tessera::bench {
namespace {

using Clock = std::chrono::steady_clock;
using Json = nlohmann::ordered_json;
using gpu::GemmEpilogue, gpu::GemmProblem;

constexpr size_t kSamples = 15, kLeastSamples = 3;
constexpr double kExpectedRates = 80;  // shares of --seconds

const Device kGpu = cuda(0);

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Options {
  double seconds = 35;
  std::vector<std::string> only;
  std::string json;
};

// What is counted in a measurement, of which a rate comes.
struct Amount {
  const char* unit;  // "bytes", "flops" or "count"
  double value;
};

class Rates {
 public:
  explicit Rates(const Options& options)
      : options_(options),
        small_(gpu::backend_kind() == gpu::BackendKind::kEmulated),
        runway_(
            empty({small_ ? int64_t{4096} : int64_t{256} << 20}, {.dtype = kU8, .device = kGpu})) {}

  bool small() const { return small_; }
  int64_t size_or(int64_t full, int64_t little) const { return small_ ? little : full; }
  bool wants(const std::string& name) const {
    return options_.only.empty() || std::ranges::any_of(options_.only, [&](const auto& part) {
             return name.find(part) != std::string::npos;
           });
  }

  // The median of the seconds on the device of what `work` queues.
  double measure(const std::string& name, const std::string& shape, Amount amount,
                 const std::function<void()>& work, int fills = 2) {
    const double share = options_.seconds / kExpectedRates;
    const Clock::time_point start = Clock::now();
    std::vector<double> samples;
    for (size_t i = 0; samples.size() < kSamples; ++i) {
      for (int fill = 0; fill < fills; ++fill) fill_(runway_, static_cast<int64_t>(i % 2));
      const auto begin = event();
      work();
      const auto end = event();
      gpu::synchronize_event(*end);
      if (i >= 2) {
        samples.push_back(static_cast<double>(gpu::elapsed_milliseconds(*begin, *end)) * 1e-3);
      }
      if (samples.size() >= kLeastSamples && seconds_since(start) > share) break;
    }
    return add(name, shape, amount, std::move(samples));
  }

  // Of the host's clock.
  double add(const std::string& name, const std::string& shape, Amount amount,
             std::vector<double> samples) {
    std::ranges::sort(samples);
    const double median = samples[samples.size() / 2];
    Json rate = {{"name", name},           {"shape", shape},        {"seconds_median", median},
                 {"min", samples.front()}, {"max", samples.back()}, {"samples", samples.size()}};
    rate[amount.unit] = amount.value;
    rate["rate"] = median > 0 ? amount.value / median : 0;
    std::printf("%-34s %-38s %11.2f us %11.2f to %11.2f %10.3g %s/s\n", name.c_str(), shape.c_str(),
                median * 1e6, samples.front() * 1e6, samples.back() * 1e6,
                rate["rate"].get<double>(), amount.unit);
    std::fflush(stdout);
    rates_.push_back(std::move(rate));
    return median;
  }
  void not_served(const std::string& name, const std::string& shape) {
    std::printf("%-34s %-38s not served\n", name.c_str(), shape.c_str());
  }

  // A field of the machine file: "gemm.bf16", with where it comes from.
  void machine(const std::string& field, double value, const std::string& source) {
    const size_t dot = field.find('.');
    if (dot == std::string::npos) {
      machine_[field] = value;
    } else {
      machine_[field.substr(0, dot)][field.substr(dot + 1)] = value;
    }
    machine_["sources"][field] = source;
  }
  // Whole numbers stay whole.
  void machine(const std::string& field, int64_t value, const std::string& source) {
    machine_[field] = value;
    machine_["sources"][field] = source;
  }
  void name_machine(const std::string& name) { machine_["name"] = name; }

  Json report() const {
    Json missing = Json::array();
    for (const char* const field :
         {"name", "bandwidth", "gemm.bf16", "gemm.f16", "gemm.fp8", "gemm.f32", "gemm.tf32",
          "gemm.f64", "attention.forward", "attention.backward", "gelu_epilogue", "launch_gap",
          "memory_bytes"}) {
      const std::string text = field;
      const size_t dot = text.find('.');
      const bool there = dot == std::string::npos
                             ? machine_.contains(text)
                             : machine_.contains(text.substr(0, dot)) &&
                                   machine_.at(text.substr(0, dot)).contains(text.substr(dot + 1));
      if (!there) missing.push_back(text);
    }
    return {{"card", gpu::describe_device(0)},
            {"backend", small_ ? "emulated" : "cuda"},
            {"libraries", gpu::gemm_library() + "; " + gpu::graph_library()},
            {"rates", rates_},
            {"machine", machine_},
            {"missing", missing}};
  }

  std::shared_ptr<gpu::EventHandle> event() const {
    return gpu::record_event(*gpu::current_stream_handle(0));
  }

 private:
  const Options& options_;
  const bool small_;
  const Tensor runway_;
  Json rates_ = Json::array(), machine_ = Json::object();
};

Tensor normal(const Shape& shape, DType dtype) {
  const Tensor x = empty(shape, {.dtype = dtype, .device = kGpu});
  // Rows at a time, so that the f32 numbers take little room.
  const int64_t rows = std::max<int64_t>(1, (int64_t{1} << 26) / std::max<int64_t>(1, shape[1]));
  for (int64_t begin = 0; begin < shape[0]; begin += rows) {
    const int64_t count = std::min(rows, shape[0] - begin);
    copy_(x.narrow(0, begin, count), randn({count, shape[1]}, {.device = kGpu}));
  }
  return x;
}

std::string megabytes(int64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

// ---- Memory -------------------------------------------------------------------------------------

void measure_memory(Rates& rates) {
  for (const int64_t bytes :
       {rates.size_or(int64_t{64} << 20, 1 << 12), rates.size_or(int64_t{1} << 30, 1 << 14)}) {
    const std::string shape = rates.small() ? std::to_string(bytes) + " bytes" : megabytes(bytes);
    const bool large = bytes >= rates.size_or(int64_t{1} << 30, 1 << 14);
    const Tensor x = ones({bytes / 4}, {.device = kGpu}), y = zeros({bytes / 4}, {.device = kGpu});
    const auto wants = [&](const char* name) { return rates.wants(std::string("memory.") + name); };
    const auto count = static_cast<double>(bytes);
    if (wants("copy")) {
      const double seconds =
          rates.measure("memory.copy", shape, {"bytes", 2 * count}, [&] { copy_(y, x); });
      if (large) rates.machine("bandwidth", 2 * count / seconds, "a copy of " + shape);
    }
    if (wants("write")) {
      rates.measure("memory.write", shape, {"bytes", count}, [&] { fill_(y, 2); });
    }
    if (wants("read")) {
      rates.measure("memory.read", shape, {"bytes", count}, [&] { (void)sum(x); });
    }
  }
}

// ---- Products -----------------------------------------------------------------------------------

struct Product {
  const char* name;
  int64_t M, N, K;
  bool a_transposed = false, b_transposed = false;
};

struct Around {
  const char* name = "";
  GemmEpilogue epilogue = GemmEpilogue::kNone;
  double beta = 0;
};

// Seconds, where the library serves it.
std::optional<double> measure_product(Rates& rates, const std::string& group, const Product& p,
                                      DType dtype, const Around& around = {}, bool tf32 = false) {
  using enum GemmEpilogue;
  const std::string name =
      group + "." + p.name + (around.name[0] != 0 ? std::string(".") + around.name : "");
  if (!rates.wants(name)) return {};
  const std::string shape = std::to_string(p.M) + "x" + std::to_string(p.N) + "x" +
                            std::to_string(p.K) + (p.a_transposed ? " ta" : "") +
                            (p.b_transposed ? " tb" : "") + " " +
                            std::string(tf32 ? "tf32" : name_of(dtype));
  const DType out = is_fp8(dtype) ? kBF16 : dtype;
  const Tensor a = normal(p.a_transposed ? Shape{p.K, p.M} : Shape{p.M, p.K}, dtype),
               b = normal(p.b_transposed ? Shape{p.N, p.K} : Shape{p.K, p.N}, dtype);
  const Tensor d = zeros({p.M, p.N}, {.dtype = out, .device = kGpu});
  GemmProblem problem{.M = p.M, .N = p.N, .K = p.K, .beta = around.beta};
  problem.a = {dtype, p.a_transposed, p.a_transposed ? p.M : p.K, 0, a.data()};
  problem.b = {dtype, p.b_transposed, p.b_transposed ? p.K : p.N, 0, b.data()};
  problem.d = {out, false, p.N, 0, d.data()};
  problem.tf32 = tf32;
  problem.epilogue = around.epilogue;
  const bool has_aux = around.epilogue == kGeluBias || around.epilogue == kGeluGradBiasGrad;
  const Tensor aux = has_aux ? normal({p.M, p.N}, out) : Tensor();
  if (has_aux) problem.aux = {out, false, p.N, 0, aux.data()};
  const Tensor bias =
      zeros({around.epilogue == kBiasGradOfA ? p.M : p.N}, {.dtype = out, .device = kGpu});
  if (around.epilogue != kNone) {
    problem.bias = bias.data();
    problem.bias_dtype = out;
  }
  const Tensor scale = ones({1}, {.device = kGpu});
  if (is_fp8(dtype)) problem.a_scale = problem.b_scale = scale.data();
  if (!gpu::run_gemm(problem)) {  // and so its algorithm is chosen
    rates.not_served(name, shape);
    return {};
  }
  const double flops =
      2.0 * static_cast<double>(p.M) * static_cast<double>(p.N) * static_cast<double>(p.K);
  return rates.measure(name, shape, {"flops", flops}, [&] { gpu::run_gemm(problem); });
}

void measure_products(Rates& rates) {
  using enum GemmEpilogue;
  const int64_t tokens = rates.size_or(65536, 32), width = rates.size_or(768, 16);
  const struct {
    const char* name;
    int64_t in, out;
  } layers[] = {{"qkv", width, 3 * width},
                {"projection", width, width},
                {"expansion", width, 4 * width},
                {"contraction", 4 * width, width}};
  for (const auto& [layer, in, out] : layers) {
    const std::string y = std::string(layer) + ".forward", dx = std::string(layer) + ".input",
                      dw = std::string(layer) + ".weight";
    std::optional<double> plain, with_gelu;
    for (const Around& around :
         {Around{}, Around{"bias", kBias}, Around{"gelu", kGeluBias}, Around{"beta", kNone, 1}}) {
      const auto seconds = measure_product(
          rates, "product", {y.c_str(), tokens, out, in, false, true}, kBF16, around);
      if (around.epilogue == kNone && around.beta == 0) plain = seconds;
      if (around.epilogue == kGeluBias) with_gelu = seconds;
    }
    // Of the layer that has GELU. On the emulation, or by chance, it may cost nothing.
    if (layer == std::string_view("expansion") && plain && with_gelu) {
      const double results = static_cast<double>(tokens) * static_cast<double>(out);
      rates.machine("gelu_epilogue", results / std::max(*with_gelu - *plain, 1e-9),
                    "what GELU adds to the product of expansion.forward");
    }
    for (const Around& around :
         {Around{}, Around{"gelu_bias_gradient", kGeluGradBiasGrad}, Around{"beta", kNone, 1}}) {
      measure_product(rates, "product", {dx.c_str(), tokens, in, out}, kBF16, around);
    }
    for (const Around& around :
         {Around{}, Around{"bias_gradient", kBiasGradOfA}, Around{"beta", kNone, 1}}) {
      measure_product(rates, "product", {dw.c_str(), out, in, tokens, true, false}, kBF16, around);
    }
    // fp8 has operands along K alone.
    measure_product(rates, "product.fp8", {y.c_str(), tokens, out, in, false, true}, kF8E4M3);
    measure_product(rates, "product.fp8", {dw.c_str(), out, in, tokens, false, true}, kF8E4M3);
  }
  const int64_t vocabulary = rates.size_or(50304, 48);
  measure_product(rates, "product", {"head.forward", tokens, vocabulary, width, false, true},
                  kBF16);
  measure_product(rates, "product", {"head.input", tokens, width, vocabulary}, kBF16);
  measure_product(rates, "product", {"head.weight", vocabulary, width, tokens, true, false}, kBF16);
}

// Large squares: what products reach that fill the machine.
void measure_squares(Rates& rates) {
  const struct {
    const char* name;
    DType dtype;
    int64_t side;
    bool tf32 = false;
  } squares[] = {{"bf16", kBF16, 8192}, {"f16", kF16, 8192},        {"fp8", kF8E4M3, 8192},
                 {"f32", kF32, 4096},   {"tf32", kF32, 8192, true}, {"f64", kF64, 4096}};
  for (const auto& [name, dtype, side, tf32] : squares) {
    const int64_t n = rates.size_or(side, 32);
    const auto seconds =
        measure_product(rates, "square", {name, n, n, n, false, true}, dtype, {}, tf32);
    if (!seconds) continue;
    const auto edge = static_cast<double>(n);
    rates.machine(std::string("gemm.") + name, 2 * edge * edge * edge / *seconds,
                  "a product of " + std::to_string(n) + "^3");
  }
}

// ---- Attention ----------------------------------------------------------------------------------

struct AttentionCase {
  const char* name;
  int64_t B, H, T, E;
  bool causal;
};

void measure_attention(Rates& rates) {
  std::vector<AttentionCase> cases = {{"gpt2", 64, 12, 1024, 64, true},
                                      {"bert", 64, 12, 512, 64, false},
                                      {"wide", 16, 16, 1024, 128, true},
                                      {"long", 4, 12, 8192, 64, true}};
  if (rates.small()) cases = {{"gpt2", 1, 2, 16, 16, true}, {"bert", 1, 2, 16, 16, false}};
  for (const auto& [name, B, H, T, E, causal] : cases) {
    const std::string forward = std::string("attention.forward.") + name,
                      backward = std::string("attention.backward.") + name;
    if (!rates.wants(forward) && !rates.wants(backward)) continue;
    const std::string shape = std::to_string(B) + "x" + std::to_string(H) + "x" +
                              std::to_string(T) + "x" + std::to_string(E) +
                              (causal ? " causal" : "") + " bf16";
    const auto made = [&, B = B, H = H, T = T, E = E] {
      return normal({B * T, H * E}, kBF16).view({B, T, H, E}).transpose(1, 2);
    };
    const Tensor q = made(), k = made(), v = made(), up = made();
    const Tensor dq = empty_like(q), dk = empty_like(k), dv = empty_like(v);
    const kernels::AttentionSpec spec{.scale = 1 / std::sqrt(static_cast<double>(E)),
                                      .causal = causal};
    const auto result = kernels::attention(q, k, v, spec);
    // Two products forward and five backward; half of the pairs are masked.
    const double product = 2.0 * static_cast<double>(B * H) * static_cast<double>(T) *
                           static_cast<double>(T) * static_cast<double>(E) * (causal ? 0.5 : 1);
    const std::string source = "attention of " + shape + ", pairs that no mask hides";
    const bool first = std::string_view(name) == "gpt2";
    if (rates.wants(forward)) {
      const double seconds = rates.measure(forward, shape, {"flops", 2 * product},
                                           [&] { (void)kernels::attention(q, k, v, spec); });
      if (first) rates.machine("attention.forward", 2 * product / seconds, source);
    }
    if (rates.wants(backward)) {
      const double seconds = rates.measure(backward, shape, {"flops", 5 * product}, [&] {
        kernels::attention_backward(up, q, k, v, result.output, result.log_sums, spec, dq, dk, dv);
      });
      if (first) rates.machine("attention.backward", 5 * product / seconds, source);
    }
  }
}

// ---- Launches -----------------------------------------------------------------------------------

void measure_launches(Rates& rates) {
  const int64_t count = rates.size_or(500, 4);
  const int ahead = rates.small() ? 1 : 40;  // fills, of 3.5 ms together
  const auto launches = static_cast<double>(count);
  const std::string shape = std::to_string(count) + " launches";
  const auto many = [&] {
    for (int64_t i = 0; i < count; ++i) launch_nothing();
  };
  if (rates.wants("launch.eager")) {
    const double seconds = rates.measure("launch.eager", shape, {"count", launches}, many, ahead);
    rates.machine("launch_gap", seconds / launches, "empty kernels, one after the other");
  }
  if (rates.wants("launch.graph")) {
    gpu::synchronize(0);  // a graph's stream is not the null stream
    const auto stream = gpu::make_stream(0);
    const gpu::CurrentStream current(stream);
    gpu::Graph graph(stream, many);
    rates.measure(
        "launch.graph", shape, {"count", launches}, [&] { graph.replay(); }, ahead);
    gpu::synchronize(0);
  }
  if (rates.wants("launch.upload")) {
    // 16 KiB, as tables of an optimizer's step, before each kernel.
    constexpr size_t kBytes = size_t{16} << 10;
    const std::vector<char> table(kBytes, 1);
    const Tensor target = empty({static_cast<int64_t>(kBytes)}, {.dtype = kU8, .device = kGpu});
    const int64_t uploads = rates.size_or(100, 2);
    rates.measure(
        "launch.upload", std::to_string(uploads) + " uploads of 16 KiB, a launch behind each",
        {"count", static_cast<double>(uploads)},
        [&] {
          for (int64_t i = 0; i < uploads; ++i) {
            gpu::upload_constants(target.data(), 0, table.data(), kBytes);
            launch_nothing();
          }
        },
        ahead);
  }
  if (rates.wants("launch.host")) {
    // What the host takes for a launch, which a device that is waited for does not hold back.
    std::vector<double> samples;
    for (size_t i = 0; i < kSamples; ++i) {
      gpu::synchronize(0);
      const Clock::time_point start = Clock::now();
      many();
      samples.push_back(seconds_since(start));
    }
    gpu::synchronize(0);
    rates.add("launch.host", shape, {"count", launches}, std::move(samples));
  }
}

void measure_issue(Rates& rates, const DeviceFacts& facts) {
  // 2048 threads a multiprocessor, four times over.
  const int64_t threads = rates.size_or(facts.multiprocessors * 2048 * 4, 256);
  const int turns = static_cast<int>(rates.size_or(8192, 16));
  const Tensor out = empty({threads}, {.device = kGpu});
  const double members =
      static_cast<double>(threads) * static_cast<double>(turns) * static_cast<double>(kChains);
  const std::string shape = std::to_string(threads) + " threads";
  if (rates.wants("issue.fma")) {
    rates.measure("issue.fma", shape, {"count", members},
                  [&] { launch_chains(out.data_as<float>(), threads, turns, false); });
  }
  if (rates.wants("issue.exp")) {
    rates.measure("issue.exp", shape, {"count", members},
                  [&] { launch_chains(out.data_as<float>(), threads, turns, true); });
  }
}

// ---- First times --------------------------------------------------------------------------------

// What a shape costs that comes up first, by the host's clock: shapes that nothing else asks for.
void measure_first_times(Rates& rates) {
  if (rates.wants("first.product")) {
    std::vector<double> samples;
    for (const int64_t extra : {8, 16, 24}) {
      const int64_t n = rates.size_or(2048, 16) + extra;
      const Tensor a = normal({n, n}, kBF16), b = normal({n, n}, kBF16), d = normal({n, n}, kBF16);
      GemmProblem problem{.M = n, .N = n, .K = n};
      problem.a = {kBF16, false, n, 0, a.data()};
      problem.b = {kBF16, false, n, 0, b.data()};
      problem.d = {kBF16, false, n, 0, d.data()};
      gpu::synchronize(0);
      const Clock::time_point start = Clock::now();
      const bool served = gpu::run_gemm(problem);
      gpu::synchronize(0);
      if (served) samples.push_back(seconds_since(start));
    }
    if (samples.empty()) {
      rates.not_served("first.product", "");
    } else {
      rates.add("first.product", rates.small() ? "16^3 and a little" : "2048^3 and a little",
                {"count", 1}, std::move(samples));
    }
  }
  if (rates.wants("first.attention")) {
    std::vector<double> samples;
    for (const int64_t T : {611, 613, 617}) {
      gpu::AttentionProblem problem{.B = 1, .H = 2, .Hk = 2, .T = T, .S = T, .E = 64, .Ev = 64};
      problem.causal = true;
      const Tensor memory = normal({T, 2 * 64}, kBF16);
      for (auto* const operand : {&problem.query, &problem.key, &problem.value, &problem.output}) {
        *operand = {T * 128, 64, 128, 1, memory.data()};
      }
      if (gpu::graph_library_version() == 0 ||
          !gpu::validate(problem, gpu::graph_library_version()).empty()) {
        break;
      }
      const Clock::time_point start = Clock::now();
      if (!gpu::has_engine(gpu::attention_request(problem))) break;
      samples.push_back(seconds_since(start));
    }
    if (samples.empty()) {
      rates.not_served("first.attention", "");
    } else {
      rates.add("first.attention", "a plan of cuDNN", {"count", 1}, std::move(samples));
    }
  }
}

int run(const Options& options) {
  gpu::require_device(0, "gpu_rates");
  const gpu::CurrentDevice device(0);
  manual_seed(1);
  Rates rates(options);
  const DeviceFacts facts = device_facts();
  const std::string card = gpu::describe_device(0);
  if (rates.small()) std::printf("on the emulation: the figures mean nothing\n");
  std::printf("%s; %s; %s\n", card.c_str(), gpu::gemm_library().c_str(),
              gpu::graph_library().c_str());
  rates.name_machine(card.substr(0, card.find(',')));
  rates.machine("memory_bytes", facts.memory_bytes, "the device");
  measure_memory(rates);
  measure_launches(rates);
  measure_issue(rates, facts);
  measure_squares(rates);
  measure_attention(rates);
  measure_products(rates);
  measure_first_times(rates);
  gpu::synchronize(0);
  if (!options.json.empty()) {
    std::ofstream out(options.json);
    out << rates.report().dump(1) << "\n";
    out.close();
    TS_CHECK_AS(IoError, out.good(), "gpu_rates", "cannot write '", options.json, "'");
  }
  return 0;
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera;
  bench::Options options;
  CLI::App app("what a GPU reaches: the constants of a machine file and more", "gpu_rates");
  app.add_option("--seconds", options.seconds, "about how long, in all")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--only", options.only,
                 "parts of names: memory, launch, issue, square, attention, product, first");
  app.add_option("--json", options.json, "a file for all of it");
  CLI11_PARSE(app, argc, argv);
  if (gpu::device_count() == 0) {
    std::printf("there is no GPU: %s\n", gpu::unavailable_reason().c_str());
    return 77;
  }
  try {
    return bench::run(options);
  } catch (const Error& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
