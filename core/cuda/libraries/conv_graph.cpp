#include <tessera/core/cuda/libraries/conv_graph.h>

#include <limits>

#include <tessera/core/error.h>

namespace tessera::gpu {
namespace {

using tessera::detail::concatenate;

std::string check_tensor(const char* name, const Shape& sizes, const void* data) {
  if (sizes.size() != 4) return concatenate(name, " has ", sizes.size(), " dimensions, not 4");
  int64_t elements = 1;
  for (const int64_t size : sizes) {
    if (size < 1) return concatenate(name, " has a size of ", size);
    elements *= size;
    if (elements > std::numeric_limits<int32_t>::max()) {
      return concatenate(name, " has more than 2^31 - 1 elements");
    }
  }
  if (data == nullptr) return concatenate(name, " is missing");
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) {
    return concatenate(name, " does not begin at a multiple of 16 bytes");
  }
  return {};
}

}  // namespace

std::string validate(const ConvProblem& p, int version) {
  if (std::string reason = validate_library(version); !reason.empty()) return reason;
  if (p.dtype != kF32 && p.dtype != kF16 && p.dtype != kBF16) {
    return concatenate("the library takes f32, f16 and bf16, not ", p.dtype);
  }
  if (p.tf32 && p.dtype != kF32) return concatenate("tf32 is for f32 operands, they are ", p.dtype);
  std::string reason = check_tensor("x", p.x, p.x_data);
  if (reason.empty()) reason = check_tensor("the weight", p.weight, p.weight_data);
  if (reason.empty()) reason = check_tensor("y", p.y, p.y_data);
  if (!reason.empty()) return reason;
  if (p.groups < 1 || p.x[1] != p.weight[1] * p.groups || p.weight[0] % p.groups != 0) {
    return concatenate(p.groups, " groups do not divide ", p.x[1], " and ", p.weight[0],
                       " channels");
  }
  for (int d = 0; d < 2; ++d) {
    const int64_t reach = p.window.dilation[d] * (p.weight[2 + d] - 1) + 1;
    const int64_t room = p.x[2 + d] + 2 * p.window.padding[d] - reach;
    const int64_t fits = room < 0 ? 0 : room / p.window.stride[d] + 1;
    if (p.y[2 + d] != fits) {
      return concatenate("y has ", p.y[2 + d], " positions in a dimension where the window has ",
                         fits);
    }
  }
  return {};
}

LibraryGraph conv_graph(const ConvProblem& p) {
  LibraryGraph graph;
  graph.tf32 = p.tf32;
  const int x = graph.memory(kConvInputSlot, p.dtype, p.x, contiguous_strides(p.x));
  const int weight = graph.memory(kConvWeightSlot, p.dtype, p.weight, contiguous_strides(p.weight));
  const int y = graph.memory(kConvOutputSlot, p.dtype, p.y, contiguous_strides(p.y));
  switch (p.op) {
    case GraphOp::kConvolutionInputGradient:
      graph.node(p.op, {y, weight}, x);
      break;
    case GraphOp::kConvolutionWeightGradient:
      graph.node(p.op, {y, x}, weight);
      break;
    default:
      graph.node(p.op, {x, weight}, y);
  }
  graph.nodes.back().window = p.window;
  return graph;
}

std::string describe(const ConvProblem& p) {
  const auto pair = [](const int64_t(&values)[2]) {
    return concatenate(values[0], "x", values[1]);
  };
  return concatenate(name_of(p.op), " ", p.dtype, " x", p.x, " w", p.weight, " y", p.y, " stride ",
                     pair(p.window.stride), " padding ", pair(p.window.padding), " dilation ",
                     pair(p.window.dilation), " groups ", p.groups, p.tf32 ? " tf32" : "");
}

GraphRequest conv_request(const ConvProblem& problem) {
  return {.name = "conv2d",
          .key = describe(problem),
          .build = [](const void* p) { return conv_graph(*static_cast<const ConvProblem*>(p)); },
          .problem = &problem,
          .work = GraphWork::kConvolution};
}

}  // namespace tessera::gpu
