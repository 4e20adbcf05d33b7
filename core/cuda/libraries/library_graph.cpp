#include <tessera/core/cuda/libraries/library_graph.h>

#include <utility>

#include <tessera/core/context.h>
#include <tessera/core/environment.h>
#include <tessera/core/error.h>

namespace tessera::gpu {

const char* name_of(GraphOp op) {
  switch (op) {
    case GraphOp::kMatmul:
      return "matmul";
    case GraphOp::kAdd:
      return "add";
    case GraphOp::kSubtract:
      return "subtract";
    case GraphOp::kMultiply:
      return "multiply";
    case GraphOp::kDivide:
      return "divide";
    case GraphOp::kExp:
      return "exp";
    case GraphOp::kLog:
      return "log";
    case GraphOp::kIdentity:
      return "identity";
    case GraphOp::kIndex:
      return "index";
    case GraphOp::kLess:
      return "less";
    case GraphOp::kGreaterEqual:
      return "greater_equal";
    case GraphOp::kAnd:
      return "and";
    case GraphOp::kSelect:
      return "select";
    case GraphOp::kMax:
      return "max";
    case GraphOp::kSum:
      return "sum";
    case GraphOp::kReshape:
      return "reshape";
    case GraphOp::kBernoulli:
      return "bernoulli";
    case GraphOp::kConvolution:
      return "convolution";
    case GraphOp::kConvolutionInputGradient:
      return "convolution_input_gradient";
    case GraphOp::kConvolutionWeightGradient:
      return "convolution_weight_gradient";
    case GraphOp::kBatchNorm:
      return "batch_norm";
    case GraphOp::kBatchNormGradient:
      return "batch_norm_gradient";
  }
  return "?";
}

namespace {

int add(LibraryGraph& graph, GraphTensor tensor) {
  graph.tensors.push_back(std::move(tensor));
  return static_cast<int>(graph.tensors.size()) - 1;
}

}  // namespace

int LibraryGraph::memory(int slot, DType dtype, const Shape& sizes, const Shape& strides) {
  return add(*this, {.dtype = dtype,
                     .role = GraphRole::kMemory,
                     .sizes = sizes,
                     .strides = strides,
                     .slot = slot});
}

int LibraryGraph::scalar(double value) {
  const Shape ones = {1, 1, 1, 1};
  return add(*this, {.role = GraphRole::kScalar, .sizes = ones, .strides = ones, .value = value});
}

int LibraryGraph::interim(DType dtype, const Shape& sizes) {
  return interim(dtype, sizes, contiguous_strides(sizes));
}

int LibraryGraph::interim(DType dtype, const Shape& sizes, const Shape& strides) {
  return add(*this, {.dtype = dtype, .sizes = sizes, .strides = strides});
}

int LibraryGraph::scratch(DType dtype, const Shape& sizes) {
  return add(*this, {.dtype = dtype,
                     .role = GraphRole::kScratch,
                     .sizes = sizes,
                     .strides = contiguous_strides(sizes)});
}

int LibraryGraph::node(GraphOp op, std::vector<int> inputs, int output) {
  nodes.push_back({.op = op, .inputs = std::move(inputs), .outputs = {output}});
  return output;
}

ScratchLayout scratch_layout(const LibraryGraph& graph) {
  constexpr int64_t kUnit = 256;
  ScratchLayout layout;
  layout.offsets.assign(graph.tensors.size(), 0);
  for (size_t i = 0; i < graph.tensors.size(); ++i) {
    const GraphTensor& x = graph.tensors[i];
    if (x.role != GraphRole::kScratch) continue;
    layout.offsets[i] = layout.bytes;
    layout.bytes += (numel_of(x.sizes) * size_of(x.dtype) + kUnit - 1) / kUnit * kUnit;
  }
  return layout;
}

std::string version_text(int version) {
  return tessera::detail::concatenate(version / 10000, ".", version / 100 % 100, ".",
                                      version % 100);
}

std::string validate_library(int version) {
  constexpr int kOldest = 90800;  // graphs without a handle, accumulators that it clears itself
  if (version < kOldest || version == 91000 || version == 91001) {
    return tessera::detail::concatenate(
        "cuDNN ", version_text(version), version < kOldest ? " is too old" : " gives wrong results",
        "; install 9.15.1 or later (at least ", version_text(kOldest), ", not 9.10.0 or 9.10.1)");
  }
  if (version >= 100000) {
    return tessera::detail::concatenate("cuDNN ", version_text(version),
                                        " has another interface than 9; install cuDNN 9");
  }
  return {};
}

// ---- Who runs them -----------------------------------------------------------------------------

void refuse_own_kernels(const char* op, const std::function<std::string()>& reason) {
  static const bool required = environment_flag("TESSERA_REQUIRE_LIBRARIES");
  TS_CHECK_AS(UnsupportedError, !required, op,
              "would run on own kernels, which TESSERA_REQUIRE_LIBRARIES refuses: ", reason());
}

bool count_graph(const char* op, bool by_library, const std::function<std::string()>& reason) {
  auto& counts = Context::current().slot<GraphCounts>();
  ++(by_library ? counts.library : counts.own);
  if (!by_library) refuse_own_kernels(op, reason);
  return by_library;
}

}  // namespace tessera::gpu
