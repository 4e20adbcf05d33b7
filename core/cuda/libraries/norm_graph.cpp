#include <tessera/core/cuda/libraries/norm_graph.h>

#include <bit>
#include <limits>

#include <tessera/core/error.h>

namespace tessera::gpu {
namespace {

using tessera::detail::concatenate;

}  // namespace

std::string validate(const NormProblem& p, int version) {
  if (std::string reason = validate_library(version); !reason.empty()) return reason;
  if (p.dtype != kF32 && p.dtype != kF16 && p.dtype != kBF16) {
    return concatenate("the library takes f32, f16 and bf16, not ", p.dtype);
  }
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  for (const int64_t size : {p.N, p.C, p.S}) {
    if (size < 1 || size > kMost) return concatenate("sizes must be 1 to 2^31 - 1; one is ", size);
  }
  // Engines read channels last: planes would be copied there and back through the workspace, which
  // is more traffic than own kernels have.
  if (p.S > 1) return concatenate("planes of ", p.S, " positions are copied to channels last");
  if (p.N > kMost / p.C || p.N * p.C > kMost / p.S) return "x has more than 2^31 - 1 elements";
  return {};
}

LibraryGraph norm_graph(const NormProblem& p) {
  const Shape sizes = {p.N, p.C, p.S, 1}, channels = {1, p.C, 1, 1};
  const Shape strides = contiguous_strides(sizes), channel_strides = contiguous_strides(channels);
  LibraryGraph graph;
  const auto plane = [&](int slot) { return graph.memory(slot, p.dtype, sizes, strides); };
  const auto channel = [&](int slot) {
    return graph.memory(slot, kF32, channels, channel_strides);
  };
  const int x = plane(kNormInputSlot), scale = channel(kNormScaleSlot);
  const int mean = channel(kNormMeanSlot), rstd = channel(kNormRstdSlot);
  if (p.backward) {
    graph.nodes.push_back({.op = GraphOp::kBatchNormGradient,
                           .inputs = {x, plane(kNormGradOutputSlot), scale, mean, rstd},
                           .outputs = {plane(kNormGradInputSlot), channel(kNormGradScaleSlot),
                                       channel(kNormGradBiasSlot)}});
  } else {
    const int bias = channel(kNormGradScaleSlot);
    graph.nodes.push_back({.op = GraphOp::kBatchNorm,
                           .inputs = {x, scale, bias, graph.scalar(p.eps)},
                           .outputs = {plane(kNormGradInputSlot), mean, rstd}});
  }
  return graph;
}

std::string describe(const NormProblem& p) {
  return concatenate("batch_norm ", p.backward ? "backward " : "forward ", p.dtype, " N", p.N, " C",
                     p.C, " S", p.S, " eps ", std::bit_cast<uint64_t>(p.eps));
}

GraphRequest norm_request(const NormProblem& problem) {
  return {.name = "batch_norm",
          .key = describe(problem),
          .build = [](const void* p) { return norm_graph(*static_cast<const NormProblem*>(p)); },
          .problem = &problem};
}

}  // namespace tessera::gpu
