// A program without cuBLASLt: that of no GPU, and one built without its header.
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/error.h>

namespace tessera::gpu {
namespace {

constexpr const char* kNoCublasLt =
    "this program was built without cuBLASLt; build it with nvcc and cublasLt.h";

}  // namespace

bool run_gemm(const GemmProblem&) { return false; }
bool fused_gemm_wins(const GemmProblem&, const std::function<void()>&) { return false; }
std::string gemm_library() { return std::string("products run on own kernels, as ") + kNoCublasLt; }
GemmDescription describe_to_library(const GemmProblem&, const GemmProblem&) {
  TS_THROW(UnsupportedError, "cublasLt", kNoCublasLt);
}
int count_gemm_algorithms(const GemmProblem&) {
  TS_THROW(UnsupportedError, "cublasLt", kNoCublasLt);
}

}  // namespace tessera::gpu
