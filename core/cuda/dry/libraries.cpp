// cuBLASLt and cuDNN of a dry device: they serve what the rules of gemm.h and library_graph.h let
// pass, and note it.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <set>

#include <tessera/core/context.h>
#include <tessera/core/cuda/check.h>
#include <tessera/core/cuda/dry/record.h>
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/cuda/libraries/library_graph.h>
#include <tessera/core/cuda/streams.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/factory.h>

namespace tessera::gpu {
namespace {

constexpr int kGraphLibrary = 91900;
std::atomic<bool> serves{true};
constexpr const char* kReason = "a dry device has no library that could be asked";

Tensor workspace_of(int64_t bytes) {
  int index = 0;
  TS_CUDA(cudaGetDevice(&index));
  return raw::empty({bytes}, kU8, cuda(index));
}

const GraphTensor& tensor_at(const LibraryGraph& graph, int number) {
  return graph.tensors[static_cast<size_t>(number)];
}

// Products are [..., rows, inner] with [..., inner, columns]. Of a convolution each element of y
// [N, O, H, W] is a sum over the weight's [O, C / groups, KH, KW] but the first; its gradients have
// as many products.
double flops_of(const LibraryGraph& graph) {
  double flops = 0;
  for (const GraphNode& node : graph.nodes) {
    const auto sizes = [&](int number) -> const Shape& { return tensor_at(graph, number).sizes; };
    const auto count = [&](const Shape& y, const Shape& weight) {
      flops += 2.0 * static_cast<double>(numel_of(y)) * static_cast<double>(numel_of(weight)) /
               static_cast<double>(weight[0]);
    };
    switch (node.op) {
      case GraphOp::kMatmul: {
        const Shape& a = sizes(node.inputs[0]);
        flops += 2.0 * static_cast<double>(numel_of(sizes(node.outputs[0]))) *
                 static_cast<double>(a[a.size() - 1]);
        break;
      }
      case GraphOp::kConvolution:
        count(sizes(node.outputs[0]), sizes(node.inputs[1]));
        break;
      case GraphOp::kConvolutionInputGradient:
        count(sizes(node.inputs[0]), sizes(node.inputs[1]));
        break;
      case GraphOp::kConvolutionWeightGradient:
        count(sizes(node.inputs[0]), sizes(node.outputs[0]));
        break;
      default:
        break;
    }
  }
  return flops;
}

// Each tensor of the caller's once: what comes out of an operation is written, the rest is read.
// Strides of 0 repeat what is there once. What engines keep for themselves is not known.
Traffic traffic_of(const LibraryGraph& graph) {
  std::set<int> written;
  for (const GraphNode& node : graph.nodes) {
    written.insert(node.outputs.begin(), node.outputs.end());
  }
  Traffic traffic{0, 0};
  for (size_t i = 0; i < graph.tensors.size(); ++i) {
    const GraphTensor& tensor = graph.tensors[i];
    if (tensor.role != GraphRole::kMemory) continue;
    int64_t bytes = size_of(tensor.dtype);
    for (int d = 0; d < tensor.sizes.size(); ++d) {
      if (tensor.strides[d] != 0) bytes *= tensor.sizes[d];
    }
    (written.contains(static_cast<int>(i)) ? traffic.writes : traffic.reads) += bytes;
  }
  return traffic;
}

// Of the first tensor that comes in: an operand, for what has products.
DType dtype_of(const LibraryGraph& graph) {
  return tensor_at(graph, graph.nodes.at(0).inputs.at(0)).dtype;
}

dry::LaunchKind kind_of(GraphWork work) {
  switch (work) {
    case GraphWork::kAttention:
      return dry::LaunchKind::kAttention;
    case GraphWork::kAttentionGradient:
      return dry::LaunchKind::kAttentionGradient;
    case GraphWork::kConvolution:
      return dry::LaunchKind::kConvolution;
    case GraphWork::kMemory:
      return dry::LaunchKind::kGraph;
  }
  return dry::LaunchKind::kGraph;
}

// Matrices that all of a batch share come once.
Traffic traffic_of(const GemmProblem& p) {
  const auto bytes = [&](const GemmMatrix& x, int64_t rows, int64_t columns) {
    return rows * columns * size_of(x.dtype) * (x.batch_stride == 0 ? 1 : p.batch);
  };
  const int64_t d = p.M * p.N * p.batch * size_of(p.d.dtype);
  Traffic traffic{bytes(p.a, p.M, p.K) + bytes(p.b, p.K, p.N) + (p.beta != 0 ? d : 0), d};
  if (p.a_scaling != GemmScale::kTensor) {
    traffic.reads +=
        4 * (count_scales(p.a_scaling, p.M, p.K) + count_scales(p.b_scaling, p.N, p.K));
  }
  const bool sums_bias = p.epilogue == GemmEpilogue::kGeluGradBiasGrad ||
                         p.epilogue == GemmEpilogue::kBiasGradOfA ||
                         p.epilogue == GemmEpilogue::kBiasGradOfB;
  const int64_t biases = p.epilogue == GemmEpilogue::kBiasGradOfA ? p.M : p.N;
  if (p.bias != nullptr) {
    (sums_bias ? traffic.writes : traffic.reads) += biases * size_of(p.bias_dtype);
  }
  if (p.aux.data != nullptr) {
    const bool reads =
        p.epilogue == GemmEpilogue::kGeluGrad || p.epilogue == GemmEpilogue::kGeluGradBiasGrad;
    (reads ? traffic.reads : traffic.writes) += bytes(p.aux, p.M, p.N);
  }
  return traffic;
}

}  // namespace

void dry::set_libraries(bool serve) { serves = serve; }

bool run_gemm(const GemmProblem& given) {
  const GemmProblem problem = fold_batch(given);
  if (!serves || !validate(problem).empty()) return false;
  size_t free = 0, total = 0;
  TS_CUDA(cudaMemGetInfo(&free, &total));
  const Tensor workspace = workspace_of(gemm_workspace_bytes(static_cast<int64_t>(total)));
  dry::note({.kind = dry::LaunchKind::kProduct,
             .name = "matmul",
             .request = describe(problem),
             .traffic = traffic_of(problem),
             .gelu_results = makes_gelu(problem.epilogue)
                                 ? static_cast<double>(problem.M) * static_cast<double>(problem.N)
                                 : 0,
             .dtype = problem.a.dtype,
             .tf32 = problem.tf32,
             .product = {problem.batch, problem.M, problem.N, problem.K},
             .flops = 2.0 * static_cast<double>(problem.M) * static_cast<double>(problem.N) *
                      static_cast<double>(problem.K) * static_cast<double>(problem.batch)},
            current_stream());
  finish_launch(cudaSuccess, "matmul", current_stream());
  return true;
}

// As where no table has the shape: by rule.
bool fused_gemm_wins(const GemmProblem& problem, const std::function<void()>&) {
  if (!serves || !validate(problem).empty()) return false;
  const GemmFusion fusion = Context::current().slot<GemmOptions>().fusion;
  return fused_without_measuring(fusion, problem, {}).value_or(fused_by_rule(problem));
}

std::string gemm_library() { return "requests for cuBLASLt are noted"; }
GemmDescription describe_to_library(const GemmProblem&, const GemmProblem&) {
  TS_THROW(UnsupportedError, "cublasLt", kReason);
}
int count_gemm_algorithms(const GemmProblem&) { TS_THROW(UnsupportedError, "cublasLt", kReason); }

int graph_library_version() { return serves ? kGraphLibrary : 0; }
std::string graph_library() { return "requests for cuDNN are noted"; }
bool has_engine(const GraphRequest&) { return serves; }

bool run_graph(const GraphRequest& request, std::span<void* const>) {
  if (!serves) return false;
  const LibraryGraph graph = request.build(request.problem);
  // What an engine asks for beside it is not known here.
  const Tensor workspace = workspace_of(scratch_layout(graph).bytes);
  dry::note({.kind = kind_of(request.work),
             .name = request.name,
             .request = request.key,
             .traffic = traffic_of(graph),
             .dtype = dtype_of(graph),
             .tf32 = graph.tf32 && dtype_of(graph) == kF32,
             .causal = request.causal,
             .flops = flops_of(graph)},
            current_stream());
  finish_launch(cudaSuccess, request.name, current_stream());
  return true;
}

std::vector<GraphEngine> list_engines(const LibraryGraph&, const std::string&) {
  TS_THROW(UnsupportedError, "cudnn", kReason);
}

}  // namespace tessera::gpu
