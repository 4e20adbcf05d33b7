// Speed of every op that has a `perf` sample in the table of ops, beside a copy and a matrix
// product of the same run:
//
//     bench_ops [--filter TEXT] [--dtype f32|bf16] [--threads N] [--seconds S] [--json FILE]
//
// A row shows forward and backward: milliseconds (median), GB/s, GFLOP/s and the share of the
// limit. Bytes are those that must move at least: inputs and results once; in backward gradients
// and inputs once. The limit is the larger of bytes over the copy's bandwidth and operations over
// the matrix product's rate; copy and product are measured again before every op, because machines
// drift.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/op.h>
#include <tessera/core/parallel.h>

#include "op_samples.h"

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

// What the machine can do at this moment.
struct Reference {
  double bytes_per_second, operations_per_second;
};

class References {
 public:
  explicit References(DType dtype)
      : source_(randn({1 << 22}, {.dtype = dtype})),
        target_(empty_like(source_)),
        a_(randn({1024, 1024}, {.dtype = dtype})),
        b_(randn({1024, 1024}, {.dtype = dtype})) {}

  Reference measure() const {
    const NoGradGuard no_grad;
    std::vector<double> copies, products;
    for (int i = 0; i < 7; ++i) {
      Clock::time_point start = Clock::now();
      copy_(target_, source_);
      copies.push_back(seconds_since(start));
      start = Clock::now();
      matmul(a_, b_);
      products.push_back(seconds_since(start));
    }
    return {2.0 * static_cast<double>(source_.nbytes()) / median(copies),
            2.0 * 1024 * 1024 * 1024 / median(products)};
  }

 private:
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
TensorList require_grads(const OpRow& row, const TensorList& inputs) {
  TensorList wanted;
  if (row.differentiable == Differentiable::kNo) return wanted;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (!row.perf->inputs[i].grad || !inputs[i].defined() || !is_floating(inputs[i].dtype())) {
      continue;
    }
    wanted.push_back(inputs[i].set_requires_grad());
  }
  return wanted;
}

Measured measure(const OpRow& row, DType dtype, double seconds) {
  const Sample& sample = *row.perf;
  const TensorList inputs = make_inputs(row, sample, dtype);
  const Attrs attrs = Attrs::parse(sample.attrs);
  const TensorList wanted = require_grads(row, inputs);
  FlopCounter& counter = Context::current().slot<FlopCounter>();
  Measured result;
  std::vector<double> forward, backward;
  const Clock::time_point begin = Clock::now();
  for (int turn = 0; turn < 4 || (seconds_since(begin) < seconds && turn < 1000); ++turn) {
    counter = {.enabled = turn == 0, .total = 0};
    Clock::time_point start = Clock::now();
    const Result outputs = call_op(row, inputs, attrs);
    forward.push_back(seconds_since(start));
    if (turn == 0) {
      result.forward.bytes = static_cast<double>(bytes_of(inputs) + bytes_of(outputs.tensors));
      result.forward.operations = counter.total;
    }
    TensorList roots, seeds;
    for (const Tensor& output : outputs.tensors) {
      if (!output.requires_grad()) continue;
      roots.push_back(output);
      seeds.push_back(ones_like(output));
    }
    if (wanted.empty() || roots.empty()) continue;
    counter = {.enabled = turn == 0, .total = 0};
    start = Clock::now();
    const TensorList gradients = grad(roots, wanted, seeds, {.allow_unused = true});
    backward.push_back(seconds_since(start));
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

nlohmann::json report(const Figures& figures, const Reference& reference) {
  return {{"ms", figures.seconds * 1e3},
          {"gb_per_s", figures.bytes / figures.seconds * 1e-9},
          {"gflop_per_s", figures.operations / figures.seconds * 1e-9},
          {"share_of_limit", figures.share(reference)}};
}

void print(const Figures& figures, const Reference& reference) {
  std::printf(" | %9.3f %7.1f %8.1f %5.0f%%", figures.seconds * 1e3,
              figures.bytes / figures.seconds * 1e-9, figures.operations / figures.seconds * 1e-9,
              100 * figures.share(reference));
}

int run(int argc, char** argv) {
  CLI::App app("Speed of every op, beside a copy and a matrix product.");
  std::string filter, dtype_name = "f32", json_path;
  int threads = 0;
  double seconds = 0.3;
  app.add_option("--filter", filter, "only ops whose name holds this text");
  app.add_option("--dtype", dtype_name, "f32, bf16, f16 or f64")->capture_default_str();
  app.add_option("--threads", threads, "0: one a core");
  app.add_option("--seconds", seconds, "time for each op")->capture_default_str();
  app.add_option("--json", json_path, "file for the figures");
  CLI11_PARSE(app, argc, argv);
  const std::optional<DType> dtype = parse_dtype(dtype_name);
  TS_CHECK(dtype && is_floating(*dtype) && !is_float8(*dtype), "bench_ops",
           "--dtype must be f32, bf16, f16 or f64; got '", dtype_name, "'");
  if (threads > 0) set_num_threads(threads);

  const References references(*dtype);
  const Reference first = references.measure();
  std::printf("%s, %d threads; copy %.1f GB/s, matrix product %.1f GFLOP/s\n", dtype_name.c_str(),
              num_threads(), first.bytes_per_second * 1e-9, first.operations_per_second * 1e-9);
  std::printf("%-32s | %9s %7s %8s %6s | %9s %7s %8s %6s\n", "op", "fwd ms", "GB/s", "GFLOP/s",
              "limit", "bwd ms", "GB/s", "GFLOP/s", "limit");
  nlohmann::json rows = nlohmann::json::array();
  for (const OpRow& row : op_rows()) {
    if (!row.perf || row.name.find(filter) == std::string_view::npos) continue;
    const Reference reference = references.measure();
    const Measured measured = measure(row, *dtype, seconds);
    std::printf("%-32.*s", static_cast<int>(row.name.size()), row.name.data());
    print(measured.forward, reference);
    if (measured.backward) print(*measured.backward, reference);
    std::printf("\n");
    std::fflush(stdout);
    nlohmann::json entry{{"op", row.name}, {"forward", report(measured.forward, reference)}};
    if (measured.backward) entry["backward"] = report(*measured.backward, reference);
    rows.push_back(std::move(entry));
  }
  if (!json_path.empty()) {
    std::ofstream file(json_path);
    file << nlohmann::json{{"dtype", dtype_name},
                           {"threads", num_threads()},
                           {"copy_gb_per_s", first.bytes_per_second * 1e-9},
                           {"matmul_gflop_per_s", first.operations_per_second * 1e-9},
                           {"ops", rows}}
                .dump(1)
         << '\n';
    TS_CHECK_AS(IoError, file.good(), "bench_ops", "cannot write '", json_path, "'");
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
