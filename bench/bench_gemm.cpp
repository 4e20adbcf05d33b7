// Matrix products at the shapes of a training step: GFLOP/s by dtype.
//     bench_gemm --benchmark_filter=f32
// bench/compare/products.py runs it beside PyTorch. "decode/" rows are few tokens times weights:
//     products.py --filter decode/ --threads 1
#include <benchmark/benchmark.h>

#include <string>
#include <utility>
#include <vector>

#include <tessera/core/dispatch.h>
#include <tessera/core/kernels/gemm/gemm.h>
#include <tessera/core/kernels/gemm/int8_rows.h>

namespace tessera::kernels {
namespace {

struct Case {
  const char* name;
  bool transpose_a, transpose_b;
  int64_t m, n, k;
};

// GPT with width 384, batch 8 x 256; the head in chunks of 512 rows.
constexpr Case kCases[] = {
    {"qkv/forward", false, true, 2048, 1152, 384},
    {"proj/forward", false, true, 2048, 384, 384},
    {"fc/forward", false, true, 2048, 1536, 384},
    {"mlp/forward", false, true, 2048, 384, 1536},
    {"qkv/input_gradient", false, false, 2048, 384, 1152},
    {"fc/input_gradient", false, false, 2048, 384, 1536},
    {"mlp/input_gradient", false, false, 2048, 1536, 384},
    {"qkv/weight_gradient", true, false, 1152, 384, 2048},
    {"proj/weight_gradient", true, false, 384, 384, 2048},
    {"fc/weight_gradient", true, false, 1536, 384, 2048},
    {"mlp/weight_gradient", true, false, 384, 1536, 2048},
    {"head/forward", false, true, 512, 50304, 384},
    {"head/input_gradient", false, false, 512, 384, 50304},
    {"head/weight_gradient", true, false, 50304, 384, 512},
    {"attention/scores", false, true, 64, 256, 64},
    {"mlp/decode", false, true, 1, 384, 1536},  // one token: the weight's bytes are the limit
    {"head/decode", false, true, 1, 50304, 384},
    {"head/decode_rows", false, false, 1, 50304, 384},
};

template <class T>
void run(benchmark::State& state, const Case& shape) {
  std::vector<T> a(static_cast<size_t>(shape.m * shape.k), store<T>(0.5f));
  std::vector<T> b(static_cast<size_t>(shape.k * shape.n), store<T>(0.25f));
  std::vector<T> c(static_cast<size_t>(shape.m * shape.n));
  const GemmOperand left =
      shape.transpose_a ? GemmOperand{a.data(), 1, shape.m} : GemmOperand{a.data(), shape.k, 1};
  const GemmOperand right =
      shape.transpose_b ? GemmOperand{b.data(), 1, shape.k} : GemmOperand{b.data(), shape.n, 1};
  for (auto _ : state) {
    gemm({.m = shape.m,
          .n = shape.n,
          .k = shape.k,
          .dtype = dtype_of<T>,
          .result_dtype = dtype_of<T>,
          .a = left,
          .b = right,
          .c = c.data(),
          .c_row_stride = shape.n});
    benchmark::ClobberMemory();
  }
  state.counters["GFLOP/s"] =
      benchmark::Counter(2e-9 * static_cast<double>(shape.m * shape.n * shape.k) *
                             static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate);
  // Layouts, n or t, and sizes: bench/compare/products.py multiplies the same.
  state.SetLabel(std::string(shape.transpose_a ? "t" : "n") + (shape.transpose_b ? "t " : "n ") +
                 std::to_string(shape.m) + " " + std::to_string(shape.n) + " " +
                 std::to_string(shape.k));
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(sizeof(T)) *
                          (shape.m * shape.k + shape.k * shape.n + shape.m * shape.n));
}

// "int8/decode/": rows of T times a weight of one byte a number (int8_rows.h).
template <class T>
void run_int8(benchmark::State& state, int64_t m, int64_t n, int64_t k) {
  const std::vector<T> x(static_cast<size_t>(m * k), store<T>(0.5f));
  const std::vector<int8_t> weight(static_cast<size_t>(n * k), 3);
  const std::vector<float> absmax(static_cast<size_t>(n), 2.0f);
  std::vector<T> y(static_cast<size_t>(m * n));
  for (auto _ : state) {
    int8_rows({.m = m,
               .n = n,
               .k = k,
               .dtype = dtype_of<T>,
               .x = x.data(),
               .x_row_stride = k,
               .weight = weight.data(),
               .weight_row_stride = k,
               .absmax = absmax.data(),
               .y = y.data(),
               .y_row_stride = n});
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * n * k);
}

void add_int8() {
  for (const int64_t m : {1, 2, 4, 8}) {
    for (const auto& [k, n] :
         {std::pair<int64_t, int64_t>{384, 1536}, {4096, 4096}, {384, 50257}}) {
      const std::string name =
          "int8/decode/" + std::to_string(m) + "_" + std::to_string(n) + "_" + std::to_string(k);
      benchmark::RegisterBenchmark(name.c_str(), [m, n = n, k = k](benchmark::State& state) {
        run_int8<float>(state, m, n, k);
      });
    }
  }
}

template <class T>
void add(const std::string& name, const Case& shape) {
  benchmark::RegisterBenchmark(name.c_str(), [shape](benchmark::State& s) { run<T>(s, shape); })
      ->MinTime(0.2)
      ->UseRealTime();
}

template <class T>
void add_all(const std::string& dtype) {
  for (const Case& shape : kCases) add<T>(dtype + "/" + shape.name, shape);
  for (const int64_t m : {1, 2, 4, 8, 16, 32, 64}) {
    for (const auto& [k, n] :
         {std::pair<int64_t, int64_t>{384, 1536}, {4096, 4096}, {384, 50257}}) {
      for (const bool transposed : {true, false}) {
        add<T>(dtype + "/decode/" + (transposed ? "nt_" : "nn_") + std::to_string(m) + "_" +
                   std::to_string(n) + "_" + std::to_string(k),
               {"", false, transposed, m, n, k});
      }
    }
  }
}

}  // namespace
}  // namespace tessera::kernels

int main(int argc, char** argv) {
  tessera::kernels::add_all<float>("f32");
  tessera::kernels::add_all<tessera::bf16>("bf16");
  tessera::kernels::add_all<tessera::f16>("f16");
  tessera::kernels::add_all<double>("f64");
  tessera::kernels::add_int8();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
}
