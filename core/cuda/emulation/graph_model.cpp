#include <tessera/core/cuda/emulation/graph_model.h>

#include <cuda_runtime.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

#include <tessera/core/context.h>
#include <tessera/core/cuda/launch.h>
#include <tessera/core/cuda/launch_log.h>
#include <tessera/core/cuda/libraries/library_graph.h>
#include <tessera/core/dispatch.h>
#include <tessera/core/factory/factory.h>
#include <tessera/core/random.h>

namespace tessera::gpu {
namespace {

constexpr const char* kReason = "the emulation has no cuDNN; graphs run on own kernels";

emulation::GraphModel& model() { return Context::current().slot<emulation::GraphModel>(); }

// ---- Tensors of a run ---------------------------------------------------------------------------

struct Value {
  DType dtype = kF32;
  Shape sizes, strides;
  char* data = nullptr;
  std::shared_ptr<char[]> owned;  // of what exists between operations only

  double read(int64_t offset) const {
    const char* const at = data + offset * size_of(dtype);
    switch (dtype) {
      case DType::kFloat64:
        return *reinterpret_cast<const double*>(at);
      case DType::kFloat32:
        return static_cast<double>(*reinterpret_cast<const float*>(at));
      case DType::kFloat16:
        return static_cast<double>(to_float(*reinterpret_cast<const f16*>(at)));
      case DType::kBFloat16:
        return static_cast<double>(to_float(*reinterpret_cast<const bf16*>(at)));
      case DType::kInt64:
        return static_cast<double>(*reinterpret_cast<const int64_t*>(at));
      case DType::kInt32:
        return *reinterpret_cast<const int32_t*>(at);
      default:
        return *reinterpret_cast<const uint8_t*>(at);
    }
  }
  void write(int64_t offset, double value) const {
    char* const at = data + offset * size_of(dtype);
    switch (dtype) {
      case DType::kFloat64:
        *reinterpret_cast<double*>(at) = value;
        break;
      case DType::kFloat32:
        *reinterpret_cast<float*>(at) = static_cast<float>(value);
        break;
      case DType::kFloat16:
        *reinterpret_cast<f16*>(at) = store<f16>(static_cast<float>(value));
        break;
      case DType::kBFloat16:
        *reinterpret_cast<bf16*>(at) = store<bf16>(static_cast<float>(value));
        break;
      case DType::kInt32:
        *reinterpret_cast<int32_t*>(at) = static_cast<int32_t>(value);
        break;
      default:
        *reinterpret_cast<uint8_t*>(at) = static_cast<uint8_t>(value);
    }
  }
  // Where an index of another tensor falls: sizes of 1 are repeated, fewer heads shared.
  int64_t offset(const Shape& index, const Shape& index_sizes) const {
    int64_t result = 0;
    for (int i = 0; i < sizes.size(); ++i) {
      result += index[i] / (index_sizes[i] / sizes[i]) * strides[i];
    }
    return result;
  }
  int64_t offset(const Shape& index) const {
    int64_t result = 0;
    for (int i = 0; i < sizes.size(); ++i) result += index[i] * strides[i];
    return result;
  }
};

template <class Body>
void for_each_index(const Shape& sizes, const Body& body) {
  Shape index = Shape::filled(sizes.size(), 0);
  const int64_t count = numel_of(sizes);
  for (int64_t i = 0; i < count; ++i) {
    body(std::as_const(index));
    for (int d = sizes.size() - 1; d >= 0 && ++index[d] == sizes[d]; --d) index[d] = 0;
  }
}

// ---- Operations ---------------------------------------------------------------------------------

class Run {
 public:
  Run(const LibraryGraph& graph, const std::vector<void*>& memory, char* workspace)
      : graph_(graph) {
    const ScratchLayout layout = scratch_layout(graph);
    for (size_t i = 0; i < graph.tensors.size(); ++i) {
      const GraphTensor& x = graph.tensors[i];
      Value value{
          .dtype = x.dtype, .sizes = x.sizes, .strides = x.strides, .data = {}, .owned = {}};
      if (x.role == GraphRole::kMemory) {
        value.data = static_cast<char*>(memory[static_cast<size_t>(x.slot)]);
      } else if (x.role == GraphRole::kScratch) {
        value.data = workspace + layout.offsets[i];
      } else {
        const auto bytes = static_cast<size_t>(numel_of(x.sizes) * size_of(x.dtype));
        value.owned = std::shared_ptr<char[]>(new char[bytes]);
        value.data = value.owned.get();
        if (x.role == GraphRole::kScalar) value.write(0, x.value);
      }
      values_.push_back(std::move(value));
    }
  }

  void run() {
    for (const GraphNode& node : graph_.nodes) evaluate(node);
  }

 private:
  Value& input(const GraphNode& node, size_t i) {
    return values_[static_cast<size_t>(node.inputs[i])];
  }
  Value& output(const GraphNode& node, size_t i = 0) {
    return values_[static_cast<size_t>(node.outputs[i])];
  }

  void evaluate(const GraphNode& node) {
    switch (node.op) {
      case GraphOp::kMatmul:
        return matmul(node);
      case GraphOp::kMax:
      case GraphOp::kSum:
        return reduce(node);
      case GraphOp::kReshape:
        return reshape(node);
      case GraphOp::kBernoulli:
        return bernoulli(node);
      case GraphOp::kConvolution:
      case GraphOp::kConvolutionInputGradient:
      case GraphOp::kConvolutionWeightGradient:
        return convolution(node);
      case GraphOp::kBatchNorm:
        return batch_norm(node);
      case GraphOp::kBatchNormGradient:
        return batch_norm_gradient(node);
      default:
        return pointwise(node);
    }
  }

  static double combine(GraphOp op, double a, double b, double c) {
    switch (op) {
      case GraphOp::kAdd:
        return a + b;
      case GraphOp::kSubtract:
        return a - b;
      case GraphOp::kMultiply:
        return a * b;
      case GraphOp::kDivide:
        return a / b;
      case GraphOp::kExp:
        return std::exp(a);
      case GraphOp::kLog:
        return std::log(a);
      case GraphOp::kLess:
        return a < b;
      case GraphOp::kGreaterEqual:
        return a >= b;
      case GraphOp::kAnd:
        return a != 0 && b != 0;
      case GraphOp::kSelect:
        return c != 0 ? a : b;
      default:
        return a;  // identity
    }
  }
  void pointwise(const GraphNode& node) {
    const Value& y = output(node);
    for_each_index(y.sizes, [&](const Shape& index) {
      if (node.op == GraphOp::kIndex) {
        return y.write(y.offset(index), static_cast<double>(index[node.axis]));
      }
      double operands[3] = {};
      for (size_t i = 0; i < node.inputs.size(); ++i) {
        operands[i] = input(node, i).read(input(node, i).offset(index, y.sizes));
      }
      y.write(y.offset(index), combine(node.op, operands[0], operands[1], operands[2]));
    });
  }

  // Of sample `batch`, or `all` where the operation has no lengths.
  int64_t length(const GraphNode& node, size_t i, int64_t batch, int64_t all) {
    return node.inputs[i] < 0 ? all : static_cast<int64_t>(input(node, i).read(batch));
  }
  // Rows beyond a sample's length: 0 between operations, and not a number in memory, as nothing is
  // promised there.
  void matmul(const GraphNode& node) {
    const bool in_memory =
        graph_.tensors[static_cast<size_t>(node.outputs[0])].role == GraphRole::kMemory;
    const double beyond = in_memory ? std::numeric_limits<double>::quiet_NaN() : 0;
    const Value &a = input(node, 0), &b = input(node, 1), &c = output(node);
    for_each_index(c.sizes, [&](const Shape& index) {
      const int64_t rows = length(node, 2, index[0], c.sizes[2]);
      const int64_t columns = length(node, 3, index[0], c.sizes[3]);
      const int64_t inner = length(node, 4, index[0], a.sizes[3]);
      double sum = beyond;
      if (index[2] < rows && index[3] < columns) {
        sum = 0;
        const int64_t left =
            a.offset({index[0], index[1] / (c.sizes[1] / a.sizes[1]), index[2], 0});
        const int64_t right =
            b.offset({index[0], index[1] / (c.sizes[1] / b.sizes[1]), 0, index[3]});
        for (int64_t k = 0; k < inner; ++k) {
          sum += a.read(left + k * a.strides[3]) * b.read(right + k * b.strides[2]);
        }
      }
      c.write(c.offset(index), sum);
    });
  }

  void reduce(const GraphNode& node) {
    const Value &x = input(node, 0), &y = output(node);
    const bool is_max = node.op == GraphOp::kMax;
    std::vector<double> sums(static_cast<size_t>(numel_of(y.sizes)),
                             is_max ? -std::numeric_limits<double>::infinity() : 0.0);
    const Shape dense = contiguous_strides(y.sizes);
    const auto place = [&](const Shape& index, const Shape& strides) {
      int64_t result = 0;
      for (int i = 0; i < y.sizes.size(); ++i) {
        result += index[i] / (x.sizes[i] / y.sizes[i]) * strides[i];
      }
      return result;
    };
    for_each_index(x.sizes, [&](const Shape& index) {
      double& sum = sums[static_cast<size_t>(place(index, dense))];
      const double value = x.read(x.offset(index));
      sum = is_max ? std::fmax(sum, value) : sum + value;
    });
    size_t i = 0;
    for_each_index(y.sizes, [&](const Shape& index) { y.write(y.offset(index), sums[i++]); });
  }

  void reshape(const GraphNode& node) {
    const Value& x = input(node, 0);
    Value& y = output(node);
    if (x.dtype == y.dtype) {
      y.data = x.data;
      y.owned = x.owned;
      return;
    }
    for (int64_t i = 0; i < numel_of(x.sizes); ++i) y.write(i, x.read(i));
  }

  void bernoulli(const GraphNode& node) {
    const Value& y = output(node);
    const auto seed = *reinterpret_cast<const uint64_t*>(input(node, 0).data);
    const auto offset = *reinterpret_cast<const uint64_t*>(input(node, 1).data);
    const auto dropped = static_cast<float>(1 - node.number);
    // As the library does: a thread has a sequence of its own, of which it takes 16 numbers from
    // the offset on. Streams that differ in the offset alone give shifted copies.
    constexpr int64_t kEach = 16;
    for (int64_t i = 0; i < numel_of(y.sizes); ++i) {
      const auto thread = static_cast<uint64_t>(i / kEach);
      const uint64_t number = offset + static_cast<uint64_t>(i % kEach);
      const auto numbers = philox4x32(seed, thread, number / 4);
      y.write(i, uniform_from_bits(numbers[number % 4]) < dropped ? 0 : 1);
    }
  }

  void convolution(const GraphNode& node) {
    const bool forward = node.op == GraphOp::kConvolution;
    const bool to_input = node.op == GraphOp::kConvolutionInputGradient;
    const Value& x = forward ? input(node, 0) : to_input ? output(node) : input(node, 1);
    const Value& w = to_input || forward ? input(node, 1) : output(node);
    const Value& y = forward ? output(node) : input(node, 0);
    const Value& result = output(node);
    const GraphWindow& window = node.window;
    const int64_t each = w.sizes[1], outputs = y.sizes[1] / (x.sizes[1] / each);
    std::vector<double> sums(static_cast<size_t>(numel_of(result.sizes)), 0.0);
    const Shape dense = contiguous_strides(result.sizes);
    const auto place = [&](const Shape& index) {
      int64_t offset = 0;
      for (int i = 0; i < 4; ++i) offset += index[i] * dense[i];
      return static_cast<size_t>(offset);
    };
    for_each_index(y.sizes, [&](const Shape& at) {
      for_each_index({each, w.sizes[2], w.sizes[3]}, [&](const Shape& patch) {
        const int64_t h =
            at[2] * window.stride[0] - window.padding[0] + patch[1] * window.dilation[0];
        const int64_t v =
            at[3] * window.stride[1] - window.padding[1] + patch[2] * window.dilation[1];
        if (h < 0 || h >= x.sizes[2] || v < 0 || v >= x.sizes[3]) return;
        const Shape in = {at[0], at[1] / outputs * each + patch[0], h, v};
        const Shape weight = {at[1], patch[0], patch[1], patch[2]};
        if (forward) {
          sums[place(at)] += x.read(x.offset(in)) * w.read(w.offset(weight));
        } else if (to_input) {
          sums[place(in)] += y.read(y.offset(at)) * w.read(w.offset(weight));
        } else {
          sums[place(weight)] += y.read(y.offset(at)) * x.read(x.offset(in));
        }
      });
    });
    size_t i = 0;
    for_each_index(result.sizes,
                   [&](const Shape& index) { result.write(result.offset(index), sums[i++]); });
  }

  void batch_norm(const GraphNode& node) {
    const Value &x = input(node, 0), &scale = input(node, 1), &bias = input(node, 2);
    const Value &y = output(node, 0), &mean = output(node, 1), &rstd = output(node, 2);
    const double eps = input(node, 3).read(0);
    const int64_t C = x.sizes[1];
    const double count = static_cast<double>(numel_of(x.sizes) / C);
    for (int64_t c = 0; c < C; ++c) {
      double sum = 0, squares = 0;
      of_channel(x.sizes, c, [&](const Shape& i) { sum += x.read(x.offset(i)); });
      const double average = sum / count;
      of_channel(x.sizes, c, [&](const Shape& i) {
        const double away = x.read(x.offset(i)) - average;
        squares += away * away;
      });
      const double r = 1 / std::sqrt(squares / count + eps);
      mean.write(mean.offset({0, c, 0, 0}), average);
      rstd.write(rstd.offset({0, c, 0, 0}), r);
      const double factor = scale.read(scale.offset({0, c, 0, 0}));
      const double added = bias.read(bias.offset({0, c, 0, 0}));
      of_channel(x.sizes, c, [&](const Shape& i) {
        y.write(y.offset(i), (x.read(x.offset(i)) - average) * r * factor + added);
      });
    }
  }

  void batch_norm_gradient(const GraphNode& node) {
    const Value &x = input(node, 0), &dy = input(node, 1), &scale = input(node, 2),
                &mean = input(node, 3), &rstd = input(node, 4);
    const Value &dx = output(node, 0), &dscale = output(node, 1), &dbias = output(node, 2);
    const int64_t C = x.sizes[1];
    const double count = static_cast<double>(numel_of(x.sizes) / C);
    for (int64_t c = 0; c < C; ++c) {
      const Shape at = {0, c, 0, 0};
      const double m = mean.read(mean.offset(at)), r = rstd.read(rstd.offset(at));
      double sum = 0, along = 0;
      of_channel(x.sizes, c, [&](const Shape& i) {
        sum += dy.read(dy.offset(i));
        along += dy.read(dy.offset(i)) * (x.read(x.offset(i)) - m) * r;
      });
      dscale.write(dscale.offset(at), along);
      dbias.write(dbias.offset(at), sum);
      const double factor = scale.read(scale.offset(at)) * r;
      of_channel(x.sizes, c, [&](const Shape& i) {
        const double xhat = (x.read(x.offset(i)) - m) * r;
        dx.write(dx.offset(i), factor * (dy.read(dy.offset(i)) - (sum + xhat * along) / count));
      });
    }
  }
  template <class Body>
  static void of_channel(const Shape& sizes, int64_t channel, const Body& body) {
    for_each_index(sizes, [&](const Shape& index) {
      if (index[1] == channel) body(index);
    });
  }

  const LibraryGraph& graph_;
  std::vector<Value> values_;
};

}  // namespace

int graph_library_version() {
  return model().enabled && validate_library(model().version).empty() ? model().version : 0;
}

std::string graph_library() {
  return model().enabled ? "a model of cuDNN " + version_text(model().version) : kReason;
}

bool has_engine(const GraphRequest&) { return graph_library_version() != 0; }

bool run_graph(const GraphRequest& request, std::span<void* const> memory) {
  if (graph_library_version() == 0) return false;
  model().ran.push_back(request.key);
  int index = 0;
  TS_CUDA(cudaGetDevice(&index));
  auto graph = std::make_shared<const LibraryGraph>(request.build(request.problem));
  const Tensor workspace = raw::empty({scratch_layout(*graph).bytes}, kU8, cuda(index));
  char* const base = static_cast<char*>(workspace.data());
  std::vector<void*> pointers(memory.begin(), memory.end());
  const cudaError_t error =
      emulation::enqueue_launch(nullptr, request.name, 1, 1, 0, current_stream(),
                                [graph = std::move(graph), pointers = std::move(pointers), base] {
                                  Run(*graph, pointers, base).run();
                                });
  note_request(request.key);
  finish_launch(error, request.name, current_stream());
  return true;
}

std::vector<GraphEngine> list_engines(const LibraryGraph&, const std::string&) {
  TS_THROW(UnsupportedError, "cudnn", kReason);
}

}  // namespace tessera::gpu
