// Scaled dot product attention, forward and backward, beside a matrix product of the same run:
//
//     bench_attention --benchmark_filter=bf16/causal
//     OMP_NUM_THREADS=1 bench_attention --benchmark_filter=f32/packed
//
// "packed" rows hold documents of uniform (64 to 2048) or log-normal (median 150) lengths: as one
// row with starts, each alone (the sum of the calls), and as one row with a mask.
//
// GFLOP/s counts pairs of a query and a key that it sees (autograd/op.h): two products forward,
// five backward. "of_gemm" is its share of the rate of the last "gemm" row of its dtype, which
// stands before each group because machines drift.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/op.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>

namespace tessera {
namespace {

struct Case {
  int64_t B, H, T, D;
};
constexpr Case kCases[] = {
    {8, 6, 256, 64},    // the model of bench_step
    {1, 12, 1024, 64},  // GPT-2 small
    {1, 16, 512, 128},
    {1, 4, 4096, 64},
};

double gemm_rate[kNumDTypes] = {};  // floating point operations a second

double& rate_of(DType dtype) { return gemm_rate[static_cast<size_t>(dtype)]; }

// Calls f() once a pass and reports the operations that it counts.
template <class F>
void measure(benchmark::State& state, DType dtype, bool is_gemm, F&& f) {
  FlopCounter& counter = Context::current().slot<FlopCounter>();
  counter = {.enabled = true};
  f();
  const double operations = counter.total;
  counter = {};
  double seconds = 0;
  for (auto _ : state) {
    const auto start = std::chrono::steady_clock::now();
    f();
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    state.SetIterationTime(time.count());
    seconds += time.count();
  }
  const double rate = operations * static_cast<double>(state.iterations()) / seconds;
  state.counters["GFLOP/s"] = rate * 1e-9;
  if (is_gemm) rate_of(dtype) = rate;
  if (rate_of(dtype) > 0) state.counters["of_gemm"] = rate / rate_of(dtype);
}

void add(const std::string& name, auto&& run) {
  benchmark::RegisterBenchmark(name.c_str(), run)->MinTime(0.2)->UseManualTime();
}

void add_all(DType dtype) {
  const std::string prefix = std::string(name_of(dtype)) + "/";
  for (const Case& c : kCases) {
    const std::string shape = "B" + std::to_string(c.B) + "_H" + std::to_string(c.H) + "_T" +
                              std::to_string(c.T) + "_D" + std::to_string(c.D);
    add(prefix + "gemm/" + shape, [dtype](benchmark::State& state) {
      const NoGradGuard no_grad;
      const Tensor a = randn({1024, 1024}, {.dtype = dtype}), b = randn_like(a);
      measure(state, dtype, true, [&] { (void)matmul(a, b); });
    });
    for (bool causal : {false, true}) {
      const auto inputs = [c, dtype] {
        // As a linear layer gives them: [B, T, H, D] in memory.
        TensorList list;
        for (int i = 0; i < 3; ++i) {
          const Tensor x = randn({c.B, c.T, c.H, c.D}, {.dtype = dtype});
          list.push_back(x.transpose(1, 2).set_requires_grad());
        }
        return list;
      };
      const std::string kind = prefix + (causal ? "causal/" : "full/");
      add(kind + "forward/" + shape, [=](benchmark::State& state) {
        const NoGradGuard no_grad;
        const TensorList x = inputs();
        measure(state, dtype, false,
                [&] { (void)scaled_dot_product_attention(x[0], x[1], x[2], {.causal = causal}); });
      });
      add(kind + "backward/" + shape, [=](benchmark::State& state) {
        const TensorList x = inputs();
        const Tensor y = scaled_dot_product_attention(x[0], x[1], x[2], {.causal = causal});
        const Tensor seed = ones_like(y);
        measure(state, dtype, false, [&] { grad(y, x, seed, {.retain_graph = true}); });
      });
    }
  }
}

std::vector<int64_t> document_lengths(bool uniform) {
  constexpr int64_t kTokens = 8192;
  std::mt19937 generator(7);
  std::vector<int64_t> lengths;
  for (int64_t total = 0; total < kTokens; total += lengths.back()) {
    const double u = (generator() + 0.5) / 4294967296.0, v = (generator() + 0.5) / 4294967296.0;
    const double normal = std::sqrt(-2 * std::log(u)) * std::cos(6.283185307179586 * v);
    const double length = uniform ? 64 + u * 1985 : 150 * std::exp(normal);
    lengths.push_back(
        std::min(std::max<int64_t>(static_cast<int64_t>(length), 4), kTokens - total));
  }
  return lengths;
}

void add_packed(DType dtype) {
  constexpr int64_t kHeads = 12, kWidth = 64;
  for (const bool uniform : {true, false}) {
    const std::vector<int64_t> lengths = document_lengths(uniform);
    int64_t T = 0;
    for (const int64_t length : lengths) T += length;
    // Of each call its queries, keys and values, and its options.
    struct Call {
      TensorList inputs;
      AttentionOptions options;
    };
    const auto calls_of = [=](const std::string& form) {
      const auto input = [&](int64_t tokens) {
        const Tensor x = randn({1, tokens, kHeads, kWidth}, {.dtype = dtype});
        return x.transpose(1, 2).set_requires_grad();
      };
      const auto inputs = [&](int64_t tokens) {
        return TensorList{input(tokens), input(tokens), input(tokens)};
      };
      std::vector<Call> calls;
      if (form == "alone") {
        for (const int64_t length : lengths) calls.push_back({inputs(length), {.causal = true}});
        return calls;
      }
      std::vector<double> starts;
      for (const int64_t length : lengths) {
        starts.insert(starts.end(), static_cast<size_t>(length),
                      static_cast<double>(starts.size()));
      }
      const Tensor bounds = tensor(starts, {1, T}, kI32);
      calls.push_back({inputs(T), {}});
      if (form == "packed") {
        calls[0].options.starts = bounds;
      } else {
        const Tensor keys = arange(0, T, 1, kI32);
        calls[0].options.mask =
            logical_and(ge(keys, bounds.reshape({1, 1, T, 1})), le(keys, keys.unsqueeze(1)));
      }
      return calls;
    };
    for (const std::string form : {"packed", "alone", "mask"}) {
      const std::string name =
          std::string(name_of(dtype)) + "/packed/" + (uniform ? "uniform/" : "log_normal/") + form;
      const auto attend = [](const Call& call) {
        return scaled_dot_product_attention(call.inputs[0], call.inputs[1], call.inputs[2],
                                            call.options);
      };
      add(name + "/forward", [=](benchmark::State& state) {
        const NoGradGuard no_grad;
        const std::vector<Call> calls = calls_of(form);
        measure(state, dtype, false, [&] {
          for (const Call& call : calls) (void)attend(call);
        });
      });
      add(name + "/backward", [=](benchmark::State& state) {
        const std::vector<Call> calls = calls_of(form);
        TensorList results, seeds;
        for (const Call& call : calls) {
          results.push_back(attend(call));
          seeds.push_back(ones_like(results.back()));
        }
        measure(state, dtype, false, [&] {
          for (size_t i = 0; i < calls.size(); ++i) {
            grad(results[i], calls[i].inputs, seeds[i], {.retain_graph = true});
          }
        });
      });
    }
  }
}

// Few queries beside a cache of keys and values, which query heads may share.
void add_decode(DType dtype) {
  struct Decode {
    int64_t T, S, H, Hk, D;
  };
  for (const Decode& c : {Decode{1, 100, 6, 6, 64},
                          {1, 1024, 12, 12, 64},
                          {1, 1024, 32, 8, 128},
                          {1, 4096, 32, 8, 128},
                          {4, 1024, 32, 8, 64},
                          {8, 1024, 32, 8, 128}}) {
    const std::string name = std::string(name_of(dtype)) + "/decode/T" + std::to_string(c.T) +
                             "_S" + std::to_string(c.S) + "_H" + std::to_string(c.H) + "_Hk" +
                             std::to_string(c.Hk) + "_D" + std::to_string(c.D);
    add(name, [c, dtype](benchmark::State& state) {
      const NoGradGuard no_grad;
      const Tensor query = randn({1, c.H, c.T, c.D}, {.dtype = dtype});
      const Tensor key = randn({1, c.Hk, c.S, c.D}, {.dtype = dtype}), value = randn_like(key);
      measure(state, dtype, false,
              [&] { (void)scaled_dot_product_attention(query, key, value, {.enable_gqa = true}); });
    });
  }
}

}  // namespace
}  // namespace tessera

int main(int argc, char** argv) {
  tessera::add_all(tessera::kF32);
  tessera::add_all(tessera::kBF16);
  for (const tessera::DType dtype : {tessera::kF32, tessera::kBF16}) tessera::add_packed(dtype);
  tessera::add_decode(tessera::kF32);
  tessera::add_decode(tessera::kBF16);
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
