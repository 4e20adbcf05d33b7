// Speed of every op that has a `perf` sample in the table of ops, beside a copy and a matrix
// product of the same run:
//
//     bench_ops [--filter TEXT] [--dtype f32|bf16] [--threads N] [--seconds S] [--json FILE]
//     bench_ops --device cuda --dtype bf16    # shapes of a GPT-2 step, timed by events
//
// A row shows forward and backward: milliseconds (median), GB/s, GFLOP/s and the share of the
// limit. Bytes are those that must move at least: inputs and results once; in backward gradients
// and inputs once. The limit is the larger of bytes over the copy's bandwidth and operations over
// the matrix product's rate; copy and product are measured again before every op, because machines
// drift.
//
// On a GPU the shapes are those of training_samples.h with --tokens rows, the share that a kernel
// is to reach stands in the last column, and the optimizer's step and the gradient norm are rows
// too. [Note: runway] Before each measurement the device is given copies to do, so that the host
// has queued the op long before its turn: the time between the two events is the device's alone,
// and what the op reads lies in memory, not in a cache.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/op.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/parallel.h>
#include <tessera/optim/clip.h>
#include <tessera/optim/optimizers.h>

#include "autograd/op_samples.h"
#include "training_samples.h"

namespace tessera::tests {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2),
                   values.end());
  return values[values.size() / 2];
}

int64_t bytes_of(std::span<const Tensor> tensors) {
  int64_t bytes = 0;
  for (const Tensor& tensor : tensors) bytes += tensor.defined() ? tensor.nbytes() : 0;
  return bytes;
}

// How long work takes: by the host's clock, or by events of a GPU's queue.
class Stopwatch {
 public:
  // `bytes`: of a copy of the runway.
  Stopwatch(const Device& device, int64_t bytes) : device_(device) {
    if (!device.is_cuda()) return;
    source_ = zeros({bytes}, {.dtype = kU8, .device = device});
    target_ = empty_like(source_);
    copy_(target_, source_);  // the first one pays for fresh memory
    const auto begin = event();
    copy_(target_, source_);
    const auto end = event();
    gpu::synchronize_event(*end);
    copy_seconds_ = static_cast<double>(gpu::elapsed_milliseconds(*begin, *end)) * 1e-3;
  }

  // Seconds of what `work` queues.
  template <class Work>
  double operator()(const Work& work) {
    if (!device_.is_cuda()) {
      const Clock::time_point start = Clock::now();
      work();
      return seconds_since(start);
    }
    for (int i = 0; i < runway_; ++i) copy_(target_, source_);
    const auto begin = event();
    const Clock::time_point start = Clock::now();
    work();
    const double queued = seconds_since(start);
    const auto end = event();
    gpu::synchronize_event(*end);
    // Long enough for the slowest queueing so far, within reason.
    const double wanted = 1.5 * queued / std::max(copy_seconds_, 1e-6);
    runway_ = std::clamp(static_cast<int>(wanted) + 1, runway_, 64);
    return static_cast<double>(gpu::elapsed_milliseconds(*begin, *end)) * 1e-3;
  }
  void begin_op() { runway_ = 1; }

 private:
  std::shared_ptr<gpu::EventHandle> event() const {
    return gpu::record_event(*gpu::current_stream_handle(device_.index));
  }

  Device device_;
  Tensor source_, target_;
  double copy_seconds_ = 0;
  int runway_ = 1;  // copies
};

// What the machine can do at this moment.
struct Reference {
  double bytes_per_second, operations_per_second;
};

struct ReferenceSizes {
  int64_t elements = 1 << 22;  // of the copy
  int64_t side = 1024;         // of the product's matrices
};

class References {
 public:
  References(DType dtype, const Device& device, const ReferenceSizes& sizes)
      : side_(static_cast<double>(sizes.side)),
        source_(randn({sizes.elements}, {.dtype = dtype, .device = device})),
        target_(empty_like(source_)),
        a_(randn({sizes.side, sizes.side}, {.dtype = dtype, .device = device})),
        b_(randn({sizes.side, sizes.side}, {.dtype = dtype, .device = device})) {}

  Reference measure(Stopwatch& watch) const {
    const NoGradGuard no_grad;
    std::vector<double> copies, products;
    for (int i = 0; i < 7; ++i) {
      copies.push_back(watch([&] { copy_(target_, source_); }));
      products.push_back(watch([&] { (void)matmul(a_, b_); }));
    }
    return {2.0 * static_cast<double>(source_.nbytes()) / median(copies),
            2.0 * side_ * side_ * side_ / median(products)};
  }

 private:
  double side_;
  Tensor source_, target_, a_, b_;
};

struct Figures {
  double seconds = 0, bytes = 0, operations = 0;
  double share(const Reference& reference) const {
    const double limit =
        std::max(bytes / reference.bytes_per_second, operations / reference.operations_per_second);
    return limit / seconds;
  }
};

struct Measured {
  Figures forward;
  std::optional<Figures> backward;
};

// The inputs whose gradients a training step would want.
TensorList require_grads(const OpRow& row, const Sample& sample, const TensorList& inputs) {
  TensorList wanted;
  if (row.differentiable == Differentiable::kNo) return wanted;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!sample.inputs[i].grad || !inputs[i].defined() || !is_floating(inputs[i].dtype())) {
      continue;
    }
    wanted.push_back(inputs[i].set_requires_grad());
  }
  return wanted;
}

Measured measure(const OpRow& row, const Sample& sample, const TensorList& inputs, double seconds,
                 Stopwatch& watch) {
  const Attrs attrs = Attrs::parse(sample.attrs);
  const TensorList wanted = require_grads(row, sample, inputs);
  FlopCounter& counter = Context::current().slot<FlopCounter>();
  Measured result;
  std::vector<double> forward, backward;
  watch.begin_op();
  const Clock::time_point begin = Clock::now();
  for (int turn = 0; turn < 4 || (seconds_since(begin) < seconds && turn < 1000); ++turn) {
    counter = {.enabled = turn == 0, .total = 0};
    std::optional<Result> outputs;
    forward.push_back(watch([&] { outputs.emplace(call_op(row, inputs, attrs)); }));
    if (turn == 0) {
      result.forward.bytes = static_cast<double>(bytes_of(inputs) + bytes_of(outputs->tensors));
      result.forward.operations = counter.total;
    }
    TensorList roots, seeds;
    for (const Tensor& output : outputs->tensors) {
      if (!output.requires_grad()) continue;
      roots.push_back(output);
      seeds.push_back(ones_like(output));
    }
    if (wanted.empty() || roots.empty()) continue;
    counter = {.enabled = turn == 0, .total = 0};
    TensorList gradients;
    backward.push_back(
        watch([&] { gradients = grad(roots, wanted, seeds, {.allow_unused = true}); }));
    if (turn == 0) {
      result.backward = Figures{};
      result.backward->bytes =
          static_cast<double>(bytes_of(inputs) + bytes_of(gradients) + bytes_of(seeds));
      result.backward->operations = counter.total;
    }
  }
  counter = {};
  // The first turn pays for fresh memory.
  forward.erase(forward.begin());
  result.forward.seconds = median(forward);
  if (result.backward) {
    backward.erase(backward.begin());
    result.backward->seconds = median(backward);
  }
  return result;
}

// AdamW over f32 parameters as large as GPT-2's for these tokens, and the norm of their gradients.
struct OptimizerFigures {
  Figures step, norm;
};
OptimizerFigures measure_optimizer(const Device& device, int64_t tokens, double seconds,
                                   Stopwatch& watch) {
  NamedTensors parameters;
  TensorList tensors;
  double count = 0;
  for (int i = 0; i < 48; ++i) {  // 124M at 32768 tokens
    const Tensor parameter = zeros({tokens, 79}, {.device = device}).set_requires_grad();
    parameter.set_grad(full({tokens, 79}, 1e-3, {.device = device}));
    parameters.push_back({"p" + std::to_string(i), parameter});
    tensors.push_back(parameter);
    count += static_cast<double>(parameter.numel());
  }
  optim::AdamW optimizer(parameters, {.lr = 1e-4});
  std::vector<double> steps, norms;
  watch.begin_op();
  const Clock::time_point begin = Clock::now();
  for (int turn = 0; turn < 4 || (seconds_since(begin) < seconds && turn < 1000); ++turn) {
    norms.push_back(watch([&] { optim::clip_grad_norm(tensors, 1.0, {.fold_into = &optimizer}); }));
    steps.push_back(watch([&] { optimizer.step(); }));
  }
  steps.erase(steps.begin());
  norms.erase(norms.begin());
  // Parameter, gradient and two states are read, all but the gradient written.
  return {{median(steps), 28 * count, 0}, {median(norms), 4 * count, 0}};
}

nlohmann::json report(const Figures& figures, const Reference& reference, double want) {
  nlohmann::json json = {{"ms", figures.seconds * 1e3},
                         {"gb_per_s", figures.bytes / figures.seconds * 1e-9},
                         {"gflop_per_s", figures.operations / figures.seconds * 1e-9},
                         {"share_of_limit", figures.share(reference)}};
  if (want > 0) json["wanted_share"] = want;
  return json;
}

void print(const Figures& figures, const Reference& reference, double want) {
  std::printf(" | %9.3f %7.1f %8.1f %5.0f%%", figures.seconds * 1e3,
              figures.bytes / figures.seconds * 1e-9, figures.operations / figures.seconds * 1e-9,
              100 * figures.share(reference));
  if (want > 0) std::printf(" (%2.0f%%)", 100 * want);
}

struct Options {
  std::string filter, dtype_name = "f32", json_path, device_name = "cpu";
  int threads = 0;
  double seconds = 0.3;
  int64_t tokens = 32768;
};

class Bench {
 public:
  Bench(const Options& options, DType dtype, const Device& device)
      : options_(options),
        dtype_(dtype),
        device_(device),
        watch_(device, options.tokens * 8192),
        references_(dtype, device,
                    device.is_cuda()
                        ? ReferenceSizes{options.tokens * 4096,
                                         std::clamp<int64_t>(options.tokens / 4, 8, 8192)}
                        : ReferenceSizes{}) {
    const Reference first = references_.measure(watch_);
    copy_gb_per_s_ = first.bytes_per_second * 1e-9;
    matmul_gflop_per_s_ = first.operations_per_second * 1e-9;
  }

  void print_head() const {
    if (device_.is_cuda()) {
      std::printf("%s, %s, %lld tokens", options_.dtype_name.c_str(),
                  gpu::describe_device(device_.index).c_str(),
                  static_cast<long long>(options_.tokens));
    } else {
      std::printf("%s, %d threads", options_.dtype_name.c_str(), num_threads());
    }
    std::printf("; copy %.1f GB/s, matrix product %.1f GFLOP/s\n", copy_gb_per_s_,
                matmul_gflop_per_s_);
    std::printf("%-32s | %9s %7s %8s %6s | %9s %7s %8s %6s\n", "op", "fwd ms", "GB/s", "GFLOP/s",
                "limit", "bwd ms", "GB/s", "GFLOP/s", "limit");
  }

  // The large samples of the table.
  void run_table() {
    for (const OpRow& row : op_rows()) {
      if (!row.perf || !is_wanted(row.name)) continue;
      const Reference reference = references_.measure(watch_);
      const TensorList inputs = make_inputs(row, *row.perf, dtype_);
      add(std::string(row.name), measure(row, *row.perf, inputs, options_.seconds, watch_),
          reference, {});
    }
  }

  // The shapes of a training step, made on the device.
  void run_training() {
    for (const TrainingSample& training : training_samples(options_.tokens)) {
      if (!is_wanted(training.title)) continue;
      const OpRow* const row = find_op_row(training.op);
      TS_CHECK(row != nullptr, "bench_ops", "the table has no op '", training.op, "'");
      try {
        const Reference reference = references_.measure(watch_);
        TensorList inputs;
        for (const Input& input : training.sample.inputs) {
          inputs.push_back(
              input.kind == Input::Kind::kInteger
                  ? randint(0, static_cast<int64_t>(input.high), input.shape).to(device_)
                  : randn(input.shape, {.dtype = dtype_, .device = device_}));
        }
        add(training.title, measure(*row, training.sample, inputs, options_.seconds, watch_),
            reference, training.wanted);
      } catch (const OutOfMemory&) {
        std::printf("%-32s | does not fit into the device's memory\n", training.title.c_str());
        rows_.push_back({{"op", training.title}, {"error", "out of memory"}});
      }
      allocator_for(device_).release_cached();
    }
    if (!is_wanted("AdamW and gradient norm")) return;
    const Reference reference = references_.measure(watch_);
    const OptimizerFigures figures =
        measure_optimizer(device_, options_.tokens, options_.seconds, watch_);
    add("AdamW", {figures.step, {}}, reference, {.forward = 0.88});
    add("gradient norm", {figures.norm, {}}, reference, {.forward = 0.9});
  }

  nlohmann::json json() const {
    nlohmann::json all = {{"dtype", options_.dtype_name},
                          {"threads", num_threads()},
                          {"device", options_.device_name},
                          {"copy_gb_per_s", copy_gb_per_s_},
                          {"matmul_gflop_per_s", matmul_gflop_per_s_},
                          {"ops", rows_}};
    if (device_.is_cuda()) {
      all["gpu"] = gpu::describe_device(device_.index);
      all["tokens"] = options_.tokens;
    }
    return all;
  }

 private:
  bool is_wanted(std::string_view title) const {
    return title.find(options_.filter) != std::string_view::npos;
  }
  void add(const std::string& title, const Measured& measured, const Reference& reference,
           const WantedShares& wanted) {
    std::printf("%-32s", title.c_str());
    print(measured.forward, reference, wanted.forward);
    if (measured.backward) print(*measured.backward, reference, wanted.backward);
    std::printf("\n");
    std::fflush(stdout);
    nlohmann::json entry{{"op", title},
                         {"forward", report(measured.forward, reference, wanted.forward)}};
    if (measured.backward) {
      entry["backward"] = report(*measured.backward, reference, wanted.backward);
    }
    rows_.push_back(std::move(entry));
  }

  const Options options_;
  const DType dtype_;
  const Device device_;
  Stopwatch watch_;
  const References references_;
  double copy_gb_per_s_ = 0, matmul_gflop_per_s_ = 0;
  nlohmann::json rows_ = nlohmann::json::array();
};

int run(int argc, char** argv) {
  CLI::App app("Speed of every op, beside a copy and a matrix product.");
  Options options;
  app.add_option("--filter", options.filter, "only ops whose name holds this text");
  app.add_option("--dtype", options.dtype_name, "f32, bf16, f16 or f64")->capture_default_str();
  app.add_option("--device", options.device_name, "cpu, cuda or cuda:N")->capture_default_str();
  app.add_option("--tokens", options.tokens, "on a GPU: rows of the activations")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--threads", options.threads, "0: one a core");
  app.add_option("--seconds", options.seconds, "time for each op")->capture_default_str();
  app.add_option("--json", options.json_path, "file for the figures");
  CLI11_PARSE(app, argc, argv);
  const std::optional<DType> dtype = parse_dtype(options.dtype_name);
  TS_CHECK(dtype && is_floating(*dtype) && !is_fp8(*dtype), "bench_ops",
           "--dtype must be f32, bf16, f16 or f64; got '", options.dtype_name, "'");
  if (options.threads > 0) set_num_threads(options.threads);
  const Device device = parse_device(options.device_name);
  if (device.is_cuda()) gpu::require_device(device.index, "bench_ops");

  Bench bench(options, *dtype, device);
  bench.print_head();
  device.is_cuda() ? bench.run_training() : bench.run_table();
  if (!options.json_path.empty()) {
    std::ofstream file(options.json_path);
    file << bench.json().dump(1) << '\n';
    TS_CHECK_AS(IoError, file.good(), "bench_ops", "cannot write '", options.json_path, "'");
  }
  return 0;
}

}  // namespace
}  // namespace tessera::tests

int main(int argc, char** argv) {
  try {
    return tessera::tests::run(argc, argv);
  } catch (const tessera::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
