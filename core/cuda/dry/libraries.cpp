// cuBLASLt and cuDNN of a dry device: they serve what the rules of gemm.h and library_graph.h let
// pass, and note it.
#include <cuda_runtime.h>

#include <atomic>

#include <tessera/core/context.h>
#include <tessera/core/cuda/check.h>
#include <tessera/core/cuda/dry/record.h>
#include <tessera/core/cuda/gemm.h>
#include <tessera/core/cuda/library_graph.h>
#include <tessera/core/cuda/streams.h>
#include <tessera/core/error.h>
#include <tessera/core/factory.h>

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

// The products among its operations: [..., rows, inner] with [..., inner, columns].
double flops_of(const LibraryGraph& graph) {
  double flops = 0;
  for (const GraphNode& node : graph.nodes) {
    if (node.op != GraphOp::kMatmul) continue;
    const Shape& a = graph.tensors[static_cast<size_t>(node.inputs[0])].sizes;
    const Shape& c = graph.tensors[static_cast<size_t>(node.outputs[0])].sizes;
    flops += 2.0 * static_cast<double>(numel_of(c)) * static_cast<double>(a[a.size() - 1]);
  }
  return flops;
}

// Matrices that all of a batch share come once.
Traffic traffic_of(const GemmProblem& p) {
  const auto bytes = [&](const GemmMatrix& x, int64_t rows, int64_t columns) {
    return rows * columns * size_of(x.dtype) * (x.batch_stride == 0 ? 1 : p.batch);
  };
  const int64_t d = p.M * p.N * p.batch * size_of(p.d.dtype);
  Traffic traffic{bytes(p.a, p.M, p.K) + bytes(p.b, p.K, p.N) + (p.beta != 0 ? d : 0), d};
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
  const Tensor workspace = workspace_of(kGemmWorkspaceBytes);
  dry::record({.kind = dry::LaunchKind::kProduct,
               .name = "matmul",
               .request = describe(problem),
               .traffic = traffic_of(problem),
               .dtype = problem.a.dtype,
               .flops = 2.0 * static_cast<double>(problem.M) * static_cast<double>(problem.N) *
                        static_cast<double>(problem.K) * static_cast<double>(problem.batch)},
              current_stream());
  finish_launch(cudaSuccess, "matmul", current_stream());
  return true;
}

// As without a table: what was not measured is not fused.
bool fused_gemm_wins(const GemmProblem& problem, const std::function<void()>&) {
  return serves && validate(problem).empty() &&
         Context::current().slot<GemmOptions>().fusion == GemmFusion::kAlways;
}

std::string gemm_library() { return "requests for cuBLASLt are noted"; }
void try_gemm_descriptors(const GemmProblem&) { TS_THROW(UnsupportedError, "cublasLt", kReason); }
int count_gemm_algorithms(const GemmProblem&) { TS_THROW(UnsupportedError, "cublasLt", kReason); }

int graph_library_version() { return serves ? kGraphLibrary : 0; }
std::string graph_library() { return "requests for cuDNN are noted"; }
bool has_engine(const GraphRequest&) { return serves; }

bool run_graph(const GraphRequest& request, std::span<void* const>) {
  if (!serves) return false;
  const LibraryGraph graph = request.build(request.problem);
  // What an engine asks for beside it is not known here.
  const Tensor workspace = workspace_of(scratch_layout(graph).bytes);
  dry::record({.kind = dry::LaunchKind::kGraph,
               .name = request.name,
               .request = request.key,
               .causal = request.key.find(" causal") != std::string::npos,
               .backward = request.key.starts_with("attention backward"),
               .flops = flops_of(graph)},
              current_stream());
  finish_launch(cudaSuccess, request.name, current_stream());
  return true;
}

std::vector<GraphEngine> list_engines(const LibraryGraph&, const std::string&) {
  TS_THROW(UnsupportedError, "cudnn", kReason);
}

}  // namespace tessera::gpu
