#include <tessera/core/cuda/emulation/gemm.h>

#include <atomic>

#include <cuda_runtime.h>
#include <tessera/core/context.h>
#include <tessera/core/cuda/check.h>
#include <tessera/core/cuda/launch_log.h>
#include <tessera/core/cuda/streams.h>
#include <tessera/core/error.h>

namespace tessera::gpu {
namespace {

std::atomic<emulation::GemmModel> the_model{nullptr};
std::atomic<emulation::GemmLack> the_lack{nullptr};

constexpr const char* kReason = "the emulation has no library of matrix products";

}  // namespace

void emulation::set_gemm_model(GemmModel model) { the_model = model; }
void emulation::set_gemm_lack(GemmLack lack) { the_lack = lack; }

bool run_gemm(const GemmProblem& given) {
  const emulation::GemmModel model = the_model;
  const emulation::GemmLack lack = the_lack;
  const GemmProblem problem = fold_batch(given);
  if (model == nullptr || !validate(problem).empty()) return false;
  if (lack != nullptr && lack(problem)) return false;
  const cudaStream_t stream = current_stream();
  if (times_launches()) note_request(describe(problem));
  finish_launch(
      emulation::enqueue_launch(nullptr, "matmul", 1, 1, 0, stream,
                                [model, problem] { model(problem, library_call(problem)); }),
      "matmul", stream);
  return true;
}

bool fused_gemm_wins(const GemmProblem& problem, const std::function<void()>&) {
  if (the_model == nullptr || !validate(problem).empty()) return false;
  return fused_without_measuring(Context::current().slot<GemmOptions>().fusion, problem, {})
      .value_or(fused_by_rule(problem));
}

std::string gemm_library() {
  return the_model != nullptr ? "a model of a test"
                              : std::string("products run on own kernels, as ") + kReason;
}
GemmDescription describe_to_library(const GemmProblem&, const GemmProblem&) {
  TS_THROW(UnsupportedError, "cublasLt", kReason);
}
int count_gemm_algorithms(const GemmProblem&) { TS_THROW(UnsupportedError, "cublasLt", kReason); }

}  // namespace tessera::gpu
