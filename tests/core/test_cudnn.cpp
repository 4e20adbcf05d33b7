// cuDNN as tessera asks for it. Rules, keys and the shape of graphs are pure functions. With the
// library installed, and without a GPU, every descriptor is made and the heuristics are asked for
// an H200, described by text: they refuse illegal graphs and layouts that no engine reads.
// ctest own program: it runs on GPUs too
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdlib>
#include <iostream>
#include <set>
#include <string>
#include <vector>

#include <tessera/autograd/autograd.h>
#include <tessera/autograd/ops.h>
#include <tessera/core/context.h>
#include <tessera/core/cuda/libraries/attention_graph.h>
#include <tessera/core/cuda/libraries/conv_graph.h>
#include <tessera/core/cuda/libraries/norm_graph.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/core/kernels/attention/attention.h>

#include "core/library_rules.h"

namespace tessera::gpu::test_cudnn {
namespace {

alignas(256) char some_memory[4096];
constexpr int kVersion = 91900;

// Public figures of an H200 SXM; the library names a key that it misses.
constexpr const char* kH200 = R"({
  "cudaDeviceId": 0, "deviceName": "NVIDIA H200", "deviceVer": 900, "driverVer": 13000,
  "isTccDriver": 0, "l2CacheSize": 52428800, "maxBlockSize": [1024, 1024, 64], "maxCtasPerSM": 32,
  "maxGridSize": [2147483647, 65535, 65535], "maxRegistersPerSM": 65536,
  "maxSharedMemoryPerBlock": 49152, "maxSharedMemoryPerBlockOptin": 232448,
  "maxThreadsPerBlock": 1024, "maxThreadsPerSM": 2048, "memClockRateKHz": 3201000,
  "multiProcessorCount": 132, "pciDeviceId": 0, "regsPerBlock": 65536,
  "reservedSharedMemoryPerBlock": 1024, "smClockRateKHz": 1980000, "supportCoopLaunch": 1,
  "totalGlobalMem": 150754820096, "warpSize": 32})";

AttentionOperand rows_of(int64_t T, int64_t row, int64_t E) {
  return {T * row, E, row, 1, some_memory};
}

// The causal self attention of GPT-2: query, key and value in one [B, T, 3 C].
AttentionProblem packed(int64_t E = 64, int64_t T = 1024, int64_t B = 2, int64_t H = 12) {
  const int64_t C = H * E;
  AttentionProblem p{.B = B, .H = H, .Hk = H, .T = T, .S = T, .E = E, .Ev = E};
  p.scale = 0.125;
  p.causal = true;
  p.query = p.key = p.value = rows_of(T, 3 * C, E);
  p.output = rows_of(T, C, E);
  p.log_sums = some_memory;
  return p;
}
// Key heads shared by groups of four, in tensors of their own.
AttentionProblem grouped() {
  AttentionProblem p = packed(128, 512, 2, 8);
  p.Hk = 2;
  p.query = rows_of(512, 8 * 128, 128);
  p.key = p.value = rows_of(512, 2 * 128, 128);
  return p;
}
AttentionProblem padded() {  // BERT
  AttentionProblem p = packed(64, 512);
  p.causal = false;
  p.has_lengths = true;
  return p;
}
// A mask of keys, or a number for each pair, as what is added to the scores.
AttentionProblem biased(AttentionProblem p, int64_t B, int64_t H, int64_t T, DType dtype = kF32) {
  p.causal = false;
  p.bias = {dtype, B, H, T, H * T * p.S, T * p.S, p.S, some_memory};
  return p;
}
AttentionProblem with_dropout(AttentionProblem p) {
  p.dropout = 0.1;
  return p;
}
AttentionProblem deterministic(AttentionProblem p) {
  p.deterministic = true;
  return p;
}

void expect_refused(const std::string& said, const std::string& reason) {
  EXPECT_NE(said.find(reason), std::string::npos)
      << "expected '" << reason << "', got '" << said << "'";
}
template <class Change>
void expect_refused_when(Change change, const std::string& reason,
                         AttentionProblem problem = packed()) {
  ASSERT_EQ(validate(problem, kVersion), "");
  change(problem);
  expect_refused(validate(problem, kVersion), reason);
}

// ---- Rules --------------------------------------------------------------------------------------

TEST(AttentionRules, ReleasesThatAreTooOldOrWrongAreRefused) {
  EXPECT_EQ(validate_library(91900), "");
  EXPECT_EQ(validate_library(91002), "");
  EXPECT_EQ(validate_library(90800), "");
  for (const int version : {91000, 91001}) {
    expect_refused(validate_library(version), "gives wrong results; install 9.15.1");
    expect_refused(validate(packed(), version), "9.10." + std::to_string(version % 100));
  }
  expect_refused(validate_library(90702), "cuDNN 9.7.2 is too old");
  expect_refused(validate_library(0), "too old");
  expect_refused(validate_library(100000), "another interface");
  EXPECT_EQ(version_text(91501), "9.15.1");
}

TEST(AttentionRules, ShapesDtypesAndWidths) {
  for (const DType dtype : {kF16, kBF16}) {
    AttentionProblem p = packed();
    p.dtype = dtype;
    EXPECT_EQ(validate(p, kVersion), "");
    EXPECT_EQ(validate(backward_of(p), kVersion), "");
  }
  for (const DType dtype : {kF64, kF32, kF8E4M3}) {
    expect_refused_when([&](AttentionProblem& p) { p.dtype = dtype; }, "f16 and bf16, not");
  }
  expect_refused_when([](AttentionProblem& p) { p.T = 0; }, "sizes must be");
  expect_refused_when([](AttentionProblem& p) { p.S = int64_t{1} << 31; }, "sizes must be");
  expect_refused_when([](AttentionProblem& p) { p.Hk = 5; }, "12 heads do not share 5");
  expect_refused_when([](AttentionProblem& p) { p.E = 60; }, "multiples of 8 up to 256; got 60");
  expect_refused_when([](AttentionProblem& p) { p.Ev = 264; }, "got 264");
  expect_refused_when([](AttentionProblem& p) { p.E = 264; }, "up to 256; got 264",
                      backward_of(packed()));
  expect_refused_when([](AttentionProblem& p) { p.scale = INFINITY; }, "the scale is inf");
  EXPECT_EQ(validate(with_dropout(packed()), kVersion), "");
  expect_refused_when([](AttentionProblem& p) { p.dropout = 1; }, "keeps nothing");
  const AttentionProblem good = biased(packed(), 1, 1, 1024, kBF16);
  expect_refused_when([](AttentionProblem& p) { p.bias.dtype = kF16; }, "f32 or bf16, not f16",
                      good);
  expect_refused_when([](AttentionProblem& p) { p.bias.H = 2; }, "does not fit", good);
  expect_refused_when([](AttentionProblem& p) { p.bias.row = 1020; }, "multiple of 8, 1020", good);
  expect_refused_when([](AttentionProblem& p) { p.bias.data = some_memory + 8; }, "16 bytes", good);
}

TEST(AttentionRules, StridesAndAddresses) {
  expect_refused_when([](AttentionProblem& p) { p.key.data = nullptr; }, "key is missing");
  expect_refused_when([](AttentionProblem& p) { p.value.data = some_memory + 8; },
                      "value does not begin at a multiple of 16 bytes");
  expect_refused_when([](AttentionProblem& p) { p.query.column = 2; }, "columns of query are 2");
  expect_refused_when([](AttentionProblem& p) { p.query.row = 2300; }, "no multiple of 8, 2300");
  expect_refused_when([](AttentionProblem& p) { p.output.batch = 0; }, "output has a stride of 0");
  const AttentionProblem backward = backward_of(packed());
  expect_refused_when([](AttentionProblem& p) { p.log_sums = nullptr; }, "log_sums", backward);
  expect_refused_when([](AttentionProblem& p) { p.grad_output.column = 0; },
                      "columns of grad_output are 0", backward);
  expect_refused_when([](AttentionProblem& p) { p.grad_key.head = 0; },
                      "grad_key has a stride of 0", backward);
  AttentionProblem shared = packed();  // one query for all samples is only read
  shared.query.batch = 0;
  EXPECT_EQ(validate(shared, kVersion), "");
}

TEST(AttentionRules, BackwardOfOddLengthsNeedsTheReleaseThatHasIt) {
  const AttentionProblem odd = backward_of(packed(64, 1000));
  expect_refused(validate(odd, 91500), "multiples of 128; got 1000");
  EXPECT_EQ(validate(odd, 91501), "");
  EXPECT_EQ(validate(packed(64, 1000), 91500), "");  // forward
  auto padded = packed();
  padded.has_lengths = true;
  for (const int version : {90800, 90900}) {
    expect_refused(validate(padded, version), "different lengths need cuDNN 9.10");
    EXPECT_EQ(validate(packed(), version), "");
  }
  EXPECT_EQ(validate(backward_of(packed()), 91500), "");
}

TEST(ConvRules, ShapesAndDtypes) {
  const ConvProblem good{.x = {2, 8, 6, 6},
                         .weight = {4, 4, 3, 3},
                         .y = {2, 4, 4, 4},
                         .groups = 2,
                         .x_data = some_memory,
                         .weight_data = some_memory,
                         .y_data = some_memory};
  EXPECT_EQ(validate(good, kVersion), "");
  const auto refused = [&](auto change, const std::string& reason) {
    ConvProblem p = good;
    change(p);
    expect_refused(validate(p, kVersion), reason);
  };
  expect_refused(validate(good, 91000), "9.10.0");
  refused([](ConvProblem& p) { p.dtype = kF64; }, "not f64");
  refused([](ConvProblem& p) { p.tf32 = true; }, "tf32 is for f32");
  refused([](ConvProblem& p) { p.groups = 3; }, "3 groups do not divide");
  refused([](ConvProblem& p) { p.x = {2, 8, 6}; }, "x has 3 dimensions");
  refused([](ConvProblem& p) { p.y = {2, 4, 0, 4}; }, "y has a size of 0");
  refused([](ConvProblem& p) { p.x = {1 << 20, 8, 60, 60}; }, "2^31 - 1");
  refused([](ConvProblem& p) { p.y_data = nullptr; }, "y is missing");
  refused([](ConvProblem& p) { p.y = {2, 4, 3, 4}; }, "3 positions in a dimension where");
  refused([](ConvProblem& p) { p.weight_data = some_memory + 4; }, "16 bytes");
}

// ---- Graphs -------------------------------------------------------------------------------------

TEST(AttentionGraphs, HaveTheOperationsOfTheLibrarysPatterns) {
  EXPECT_EQ(attention_graph(packed()).nodes.size(), 14U);
  EXPECT_EQ(attention_graph(with_dropout(packed())).nodes.size(), 17U);
  EXPECT_EQ(attention_graph(padded()).nodes.size(), 16U);
  EXPECT_EQ(attention_graph(backward_of(packed())).nodes.size(), 22U);
  EXPECT_EQ(attention_graph(deterministic(backward_of(packed()))).nodes.size(), 21U);
  EXPECT_EQ(attention_graph(backward_of(grouped())).nodes.size(), 24U);
}

TEST(AttentionGraphs, ScratchLiesInTheWorkspaceWithoutOverlap) {
  const LibraryGraph graph = attention_graph(backward_of(packed(64, 100, 3, 2)));
  const ScratchLayout layout = scratch_layout(graph);
  // delta [3, 2, 100, 1] and the query's gradient [3, 2, 100, 64], both f32
  EXPECT_EQ(layout.bytes, 2560 + 153600);
  EXPECT_EQ(
      scratch_layout(attention_graph(deterministic(backward_of(packed(64, 100, 3, 2))))).bytes,
      2560);
  EXPECT_EQ(scratch_layout(attention_graph(packed())).bytes, 0);
  std::set<int64_t> offsets;
  for (size_t i = 0; i < graph.tensors.size(); ++i) {
    if (graph.tensors[i].role == GraphRole::kScratch) offsets.insert(layout.offsets[i]);
  }
  EXPECT_EQ(offsets, (std::set<int64_t>{0, 2560}));
}

TEST(AttentionGraphs, WhatAPlanDependsOnIsInItsKey) {
  std::set<std::string> keys;
  size_t count = 0;
  for (const AttentionProblem& base :
       {packed(), backward_of(packed()), with_dropout(packed()), padded()}) {
    for (const auto& change : std::initializer_list<void (*)(AttentionProblem&)>{
             [](AttentionProblem&) {}, [](AttentionProblem& p) { p.dtype = kF16; },
             [](AttentionProblem& p) { p.B = 3; }, [](AttentionProblem& p) { p.T = 1000; },
             [](AttentionProblem& p) { p.S = 1000; }, [](AttentionProblem& p) { p.Hk = 6; },
             [](AttentionProblem& p) { p.E = 32; }, [](AttentionProblem& p) { p.Ev = 32; },
             [](AttentionProblem& p) { p.scale = 0.12500001; },
             [](AttentionProblem& p) { p.causal = !p.causal; },
             [](AttentionProblem& p) { p.dropout = 0.2; },
             [](AttentionProblem& p) { p.has_lengths = !p.has_lengths; },
             [](AttentionProblem& p) { p.deterministic = true; },
             [](AttentionProblem& p) { p.log_sums = nullptr; },
             [](AttentionProblem& p) { p.query.row += 8; },
             [](AttentionProblem& p) { p.key.head += 8; },
             [](AttentionProblem& p) { p.value.batch += 8; },
             [](AttentionProblem& p) { p.output.row += 8; }}) {
      AttentionProblem problem = base;
      change(problem);
      keys.insert(describe(problem));
      ++count;
    }
  }
  EXPECT_EQ(keys.size(), count - 1);  // two of them have a dropout of 0.2
  AttentionProblem elsewhere = packed();
  elsewhere.query.data = some_memory + 256;
  EXPECT_EQ(describe(elsewhere), describe(packed()));
}

// ---- The library, without a GPU -----------------------------------------------------------------

// Engines ask for the driver's library before they say that they serve. Where there is no driver,
// the stub that the toolkit links with is found under the driver's name once it is loaded.
bool has_driver_or_stub() {
  if (dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL) != nullptr) return true;
  const char* home = std::getenv("CUDA_HOME");
  for (const std::string& root :
       {std::string(home != nullptr ? home : ""), std::string("/usr/local/cuda")}) {
    const std::string stub = root + "/lib64/stubs/libcuda.so";
    if (dlopen(stub.c_str(), RTLD_NOW | RTLD_GLOBAL) != nullptr) return true;
  }
  return false;
}

class Cudnn : public testing::Test {
 protected:
  void SetUp() override {
    device_count();  // is asked before there is a stub
    std::string reason = graph_library_version() != 0 ? "" : graph_library();
    if (reason.empty() && !has_driver_or_stub()) reason = "there is no libcuda.so, nor its stub";
    if (reason.empty()) return;
    // A build without the GPU backend, as those with sanitizers are, has no cuDNN to require.
    if (backend_kind() == BackendKind::kCuda && environment_flag("TESSERA_REQUIRE_CUDA")) {
      FAIL() << "TESSERA_REQUIRE_CUDA is set, and " << reason;
    }
    TS_NEEDS_LIBRARY(reason);
  }
  static std::vector<GraphEngine> engines_of(const LibraryGraph& graph, const std::string& what) {
    std::vector<GraphEngine> engines;
    EXPECT_NO_THROW(engines = list_engines(graph, kH200)) << what;
    EXPECT_FALSE(engines.empty()) << what;
    return engines;
  }
  static void expect_attention(const AttentionProblem& problem) {
    ASSERT_EQ(validate(problem, kVersion), "");
    const auto engines = engines_of(attention_graph(problem), describe(problem));
    for (const GraphEngine& engine : engines) {
      EXPECT_TRUE(engine.captures) << describe(problem) << ", engine " << engine.index;
    }
  }
};

TEST_F(Cudnn, HasEnginesForEveryAttentionThatTheRulesAllow) {
  for (const DType dtype : {kF16, kBF16}) {
    for (const int64_t E : {8, 64, 128}) {
      AttentionProblem problem = packed(E);
      problem.dtype = dtype;
      expect_attention(problem);
      expect_attention(backward_of(problem));
    }
  }
  for (const AttentionProblem& problem :
       {grouped(), padded(), with_dropout(packed()), packed(80, 1000), with_dropout(padded())}) {
    expect_attention(problem);
    expect_attention(backward_of(problem));
    expect_attention(deterministic(backward_of(problem)));
  }
  for (const DType dtype : {kF32, kBF16}) {
    for (const auto& [B, H, T] : std::initializer_list<std::array<int64_t, 3>>{
             {2, 12, 1024}, {1, 1, 1024}, {1, 12, 1024}, {2, 1, 1024}, {2, 1, 1}}) {
      const AttentionProblem problem = biased(packed(), B, H, T, dtype);
      for (const AttentionProblem& each : {problem, with_dropout(problem)}) {
        expect_attention(each);
        if (T == 1) {
          EXPECT_EQ(validate(backward_of(each), kVersion),
                    "backward takes a bias of all rows, not of one for all");
          continue;
        }
        expect_attention(backward_of(each));
        expect_attention(deterministic(backward_of(each)));
      }
    }
  }
  expect_attention(packed(256));
  AttentionProblem narrow = packed();  // values of another width than keys
  narrow.Ev = 32;
  expect_attention(narrow);
  expect_attention(backward_of(narrow));
}

TEST_F(Cudnn, KeepsNothingOfTheSizeOfTheScoresButInTheDeterministicForm) {
  const AttentionProblem backward = backward_of(packed(64, 4096, 1, 12));
  const int64_t scores = int64_t{12} * 4096 * 4096 * 2;
  const auto first = [](const AttentionProblem& problem) {
    return engines_of(attention_graph(problem), describe(problem)).at(0).workspace_bytes;
  };
  EXPECT_LT(first(packed(64, 4096, 1, 12)), scores / 8);
  EXPECT_LT(first(backward), scores / 8);
  EXPECT_GE(first(deterministic(backward)), scores);
}

TEST_F(Cudnn, NamesTheKeyThatTheDescriptionOfAGpuLacks) {
  const std::string device = kH200;
  for (const std::string key : {"warpSize", "multiProcessorCount", "maxGridSize"}) {
    std::string lacking = device;
    const size_t at = lacking.find(key);
    ASSERT_NE(at, std::string::npos);
    lacking.replace(at, key.size(), "other");
    try {
      list_engines(attention_graph(packed()), lacking);
      ADD_FAILURE() << "no error without " << key;
    } catch (const FormatError& error) {
      EXPECT_NE(std::string(error.what()).find(key), std::string::npos) << error.what();
    }
  }
}

ConvProblem convolution(GraphOp op, DType dtype) {
  return {.op = op,
          .dtype = dtype,
          .x = {16, 64, 28, 28},
          .weight = {128, 64, 3, 3},
          .y = {16, 128, 14, 14},
          .window = {.stride = {2, 2}, .padding = {1, 1}},
          .x_data = some_memory,
          .weight_data = some_memory,
          .y_data = some_memory};
}

TEST_F(Cudnn, HasEnginesForConvolutionsAndTheirGradients) {
  for (const GraphOp op : {GraphOp::kConvolution, GraphOp::kConvolutionInputGradient,
                           GraphOp::kConvolutionWeightGradient}) {
    for (const DType dtype : {kF32, kF16, kBF16}) {
      const ConvProblem problem = convolution(op, dtype);
      ASSERT_EQ(validate(problem, kVersion), "");
      engines_of(conv_graph(problem), describe(problem));
    }
  }
}

TEST_F(Cudnn, BatchNormOfPlanesGoesThroughCopies) {
  NormProblem rows{.dtype = kBF16, .N = 4096, .C = 256, .S = 1};
  for (const DType dtype : {kF32, kF16, kBF16}) {
    rows.dtype = dtype;
    ASSERT_EQ(validate(rows, kVersion), "");
    engines_of(norm_graph(rows), describe(rows));
  }
  // Why validate() refuses planes: a workspace of x and its gradients.
  const NormProblem planes{.dtype = kBF16, .N = 32, .C = 64, .S = 28 * 28};
  expect_refused(validate(planes, kVersion), "copied to channels last");
  for (const GraphEngine& engine : engines_of(norm_graph(planes), describe(planes))) {
    EXPECT_GE(engine.workspace_bytes, 2 * planes.N * planes.C * planes.S * 2);
  }
}

// ---- On a GPU -----------------------------------------------------------------------------------

// Attention that the rules allow and that they refuse, forward and backward.
std::vector<AttentionProblem> attentions() {
  std::vector<AttentionProblem> forward = {grouped(),
                                           padded(),
                                           with_dropout(packed()),
                                           with_dropout(padded()),
                                           biased(packed(), 2, 12, 1024),
                                           with_dropout(biased(packed(), 2, 1, 1, kBF16))};
  for (const int64_t E : {8, 60, 64, 80, 128, 136, 256, 264}) {
    forward.push_back(packed(E, E == 80 ? 1000 : 512));
  }
  AttentionProblem half = packed(), other_values = packed(), cross = packed(64, 20);
  half.dtype = kF16;
  other_values.Ev = 32;
  cross.S = 36;
  cross.causal = false;
  forward.insert(forward.end(), {half, other_values, cross});
  std::vector<AttentionProblem> all = forward;
  for (const AttentionProblem& p : forward) {
    all.push_back(backward_of(p));
    all.push_back(deterministic(backward_of(p)));
  }
  return all;
}

TEST_F(Cudnn, TheRulesAndTheLibraryAgreeOnAGpu) {
  if (device_count() == 0) GTEST_SKIP() << unavailable_reason();
  require_device(0, "test");
  Disagreements all;
  const auto compare = [&](const std::string& problem, const std::string& refused,
                           const GraphRequest& request) {
    bool serves = false;
    std::string words = "no engine";
    try {
      serves = has_engine(request);
    } catch (const Error& error) {
      words = error.what();
    }
    all.compare(problem, refused, serves, words);
  };
  const int version = graph_library_version();
  for (const AttentionProblem& p : attentions()) {
    compare(describe(p), validate(p, version), attention_request(p));
  }
  for (const GraphOp op : {GraphOp::kConvolution, GraphOp::kConvolutionInputGradient,
                           GraphOp::kConvolutionWeightGradient}) {
    for (const DType dtype : {kF32, kF16, kBF16, kF64}) {
      const ConvProblem p = convolution(op, dtype);
      compare(describe(p), validate(p, version), conv_request(p));
    }
  }
  for (const DType dtype : {kF32, kF16, kBF16}) {
    const NormProblem p{.dtype = dtype, .N = 4096, .C = 256, .S = 1};
    compare(describe(p), validate(p, version), norm_request(p));
  }
  EXPECT_GT(all.compared(), 60U);
  EXPECT_EQ(all.not_served(), 0U);
  std::cout << all.table();
}

using Values = std::vector<std::vector<double>>;

// Output and gradients of packed attention and of a convolution.
Values results(const Device& device, DType dtype, double dropout) {
  manual_seed(17);
  const auto leaf = [&](const Shape& shape) {
    return randn(shape).to(kBF16).to(dtype).to(device).set_requires_grad();
  };
  const Tensor qkv = leaf({2, 256, 3, 4, 64}), x = leaf({4, 16, 14, 14}), w = leaf({32, 16, 3, 3});
  const Tensor y =
      packed_attention(qkv, {.dropout = dropout, .causal = true, .stream = RandomStream{3, 1}});
  const Tensor z = conv2d(x, w, {}, {.padding = {1}});
  backward(add(sum(mul(y, randn(y.shape()).to(dtype).to(device))), sum(mul(z, z))));
  return {y.to_vector(), qkv.grad().to_vector(), z.to_vector(), x.grad().to_vector(),
          w.grad().to_vector()};
}

TEST_F(Cudnn, OnAGpuHasTheValuesOfTheCpu) {
  if (device_count() == 0) GTEST_SKIP() << unavailable_reason();
  auto& policy = Context::current().slot<kernels::AttentionPolicy>();
  for (const bool deterministic : {false, true}) {
    const ScopedValue scope(policy.deterministic, deterministic);
    const Values expected = results(kCpu, kF32, 0), got = results(cuda(0), kBF16, 0);
    for (size_t i = 0; i < got.size(); ++i) {
      double largest = 0, furthest = 0;
      for (size_t j = 0; j < got[i].size(); ++j) {
        largest = std::fmax(largest, std::fabs(expected[i][j]));
        furthest = std::fmax(furthest, std::fabs(got[i][j] - expected[i][j]));
      }
      EXPECT_LE(furthest, 0.03 * largest) << i;
    }
    if (deterministic) {
      EXPECT_EQ(results(cuda(0), kBF16, 0), got);
    }
  }
  EXPECT_EQ(results(cuda(0), kBF16, 0.2)[0], results(cuda(0), kBF16, 0.2)[0]);
}

}  // namespace
}  // namespace tessera::gpu::test_cudnn
