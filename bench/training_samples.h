// The ops of a GPT-2 124M training step at its shapes, for bench_ops on a GPU: C = 768, 12 heads of
// 64, T = 1024, 50304 tokens in the vocabulary. Attributes read as in the table of ops.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "autograd/op_samples.h"

namespace tessera::tests {

// The share of the limit that a kernel is to reach on a GPU at 32768 tokens; 0: none was set.
struct WantedShares {
  double forward = 0, backward = 0;
};

struct TrainingSample {
  std::string title;
  std::string op;  // of the table
  Sample sample;
  WantedShares wanted = {};
};

// `tokens`: rows of the activations, B * T. Below 1024 they are those of a model of width 64: to
// try the program.
inline std::vector<TrainingSample> training_samples(int64_t tokens) {
  const bool real = tokens >= 1024;
  const int64_t C = real ? 768 : 64, V = real ? 50304 : 512, NH = C / 64, HS = 64;
  const char* const over_rows =
      real ? R"({"normalized_shape": [768]})" : R"({"normalized_shape": [64]})";
  const int64_t T = std::min<int64_t>(tokens, 1024), B = tokens / T, N = B * T;
  const auto rows = [&](int64_t width) { return normal({N, width}); };
  const auto heads = [&] { return normal({B, NH, T, HS}); };
  return {
      {"add", "add", {{rows(C), rows(C)}}},
      {"gelu (tanh)", "gelu", {{rows(4 * C)}, R"({"approximate": "tanh"})"}, {0.9, 0.9}},
      {"silu", "silu", {{rows(4 * C)}}, {0.9, 0.9}},
      {"dropout", "dropout", {{rows(C)}, R"({"p": 0.1})"}, {0.9, 0.9}},
      {"softmax", "softmax", {{rows(T)}, R"({"dim": 1})"}},
      {"layer_norm", "layer_norm", {{rows(C), normal({C}), normal({C})}, over_rows}, {0.88, 0.8}},
      {"residual_layer_norm",
       "residual_layer_norm",
       {{rows(C), rows(C), normal({C}), normal({C})}, over_rows},
       {0.88, 0.8}},
      {"rms_norm", "rms_norm", {{rows(C), normal({C})}, over_rows}, {0.88, 0.8}},
      {"cross_entropy", "cross_entropy", {{rows(V), integers(V, {N})}}, {0.85, 0.85}},
      {"cross_entropy_inplace, with a copy",
       "cross_entropy_inplace",
       {{rows(V), integers(V, {N})}}},
      {"embedding", "embedding", {{integers(V, {N}), normal({V, C})}}, {0.85, 0.6}},
      {"sum of columns", "sum", {{rows(4 * C)}, R"({"dim": 0})"}, {0.85, 0}},
      {"sum of rows", "sum", {{rows(4 * C)}, R"({"dim": 1})"}, {0.9, 0}},
      {"topk", "topk", {{normal({std::max<int64_t>(N / 64, 1), V})}, R"({"k": 40})"}},
      {"linear C to 3C", "linear", {{rows(C), normal({3 * C, C}), normal({3 * C})}}, {0.8, 0.8}},
      {"linear C to C", "linear", {{rows(C), normal({C, C}), normal({C})}}, {0.8, 0.8}},
      {"linear C to 4C", "linear", {{rows(C), normal({4 * C, C}), normal({4 * C})}}, {0.8, 0.8}},
      {"linear 4C to C", "linear", {{rows(4 * C), normal({C, 4 * C}), normal({C})}}, {0.8, 0.8}},
      {"linear C to V", "linear", {{rows(C), normal({V, C})}}, {0.8, 0.8}},
      {"linear_gelu C to 4C", "linear_gelu", {{rows(C), normal({4 * C, C}), normal({4 * C})}}},
      {"linear_gelu_linear C to 4C to C",
       "linear_gelu_linear",
       {{rows(C), normal({4 * C, C}), normal({4 * C}), normal({C, 4 * C}), normal({C})}}},
      {"scaled_dot_product_attention",
       "scaled_dot_product_attention",
       {{heads(), heads(), heads()}, R"({"is_causal": true})"}},
      {"packed_attention",
       "packed_attention",
       {{normal({B, T, 3, NH, HS})}, R"({"is_causal": true})"}},
  };
}

}  // namespace tessera::tests
