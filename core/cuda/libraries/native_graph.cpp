// The only file that knows cuDNN: it loads the library when the first graph asks for it, turns
// graphs into descriptors of the plain C interface, and keeps a plan (an engine with its compiled
// kernels) for each key that it has seen.
#include <cuda_runtime.h>
#include <cudnn.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <tessera/core/cuda/capture.h>
#include <tessera/core/cuda/check.h>
#include <tessera/core/cuda/launch_log.h>
#include <tessera/core/cuda/libraries/lazy_library.h>
#include <tessera/core/cuda/libraries/library_graph.h>
#include <tessera/core/cuda/streams.h>
#include <tessera/core/error.h>
#include <tessera/core/tensor/empty.h>

namespace tessera::gpu {
namespace {

// ---- The library --------------------------------------------------------------------------------

// clang-format off
#define TS_CUDNN_FUNCTIONS(F)                                                                   \
  F(GetVersion) F(Create) F(SetStream) F(GetErrorString) F(GetLastErrorString)                  \
  F(BackendCreateDescriptor) F(BackendDestroyDescriptor) F(BackendSetAttribute)                 \
  F(BackendGetAttribute) F(BackendFinalize) F(BackendExecute)
// clang-format on

struct Library {
#define TS_MEMBER(name) decltype(&cudnn##name) name = nullptr;
  TS_CUDNN_FUNCTIONS(TS_MEMBER)
#undef TS_MEMBER
  std::string reason;  // why graphs do not run; empty where they do
  int version = 0;

  Library() {
    LazyLibrary file("libcudnn.so." + std::to_string(CUDNN_MAJOR), "cuDNN");
#define TS_FIND(name) file.find("cudnn" #name, name);
    TS_CUDNN_FUNCTIONS(TS_FIND)
#undef TS_FIND
    reason = file.reason();
    if (!reason.empty()) return;
    version = static_cast<int>(GetVersion());
    reason = validate_library(version);
  }
};
const Library& library() {
  static const Library* const the_library = new Library;
  return *the_library;
}
void require_library() {
  TS_CHECK_AS(UnsupportedError, library().reason.empty(), "cudnn", library().reason);
}

std::string words_of(cudnnStatus_t status) {
  std::array<char, 1024> more{};
  library().GetLastErrorString(more.data(), more.size());
  return std::string(library().GetErrorString(status)) + ": " + more.data();
}
void check(cudnnStatus_t status, const char* what) {
  TS_CHECK_AS(CudaError, status == CUDNN_STATUS_SUCCESS, "cudnn", what, " failed with ",
              words_of(status), "; this should have been refused by validate()");
}

// ---- Descriptors --------------------------------------------------------------------------------

class Descriptor {
 public:
  Descriptor(cudnnBackendDescriptorType_t type, const char* what) : what_(what) {
    check(library().BackendCreateDescriptor(type, &handle_), what_);
  }
  ~Descriptor() {
    if (handle_ != nullptr) library().BackendDestroyDescriptor(handle_);
  }
  Descriptor(Descriptor&& other) noexcept
      : what_(other.what_), handle_(std::exchange(other.handle_, nullptr)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(what_, other.what_);
    std::swap(handle_, other.handle_);
    return *this;
  }

  cudnnBackendDescriptor_t get() const { return handle_; }

  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, int64_t count,
           const void* values) {
    check(library().BackendSetAttribute(handle_, name, type, count, values), what_);
  }
  template <class T>
  void set(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type, const T& value) {
    set(name, type, 1, &value);
  }
  void set(cudnnBackendAttributeName_t name, const Descriptor& other) {
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &other.handle_);
  }
  void set(cudnnBackendAttributeName_t name, const std::vector<Descriptor>& others) {
    std::vector<cudnnBackendDescriptor_t> handles;
    for (const Descriptor& other : others) handles.push_back(other.get());
    set(name, CUDNN_TYPE_BACKEND_DESCRIPTOR, static_cast<int64_t>(handles.size()), handles.data());
  }
  // An attribute of at most `capacity` values.
  template <class T>
  std::vector<T> get(cudnnBackendAttributeName_t name, cudnnBackendAttributeType_t type,
                     size_t capacity) const {
    std::vector<T> values(capacity);
    int64_t count = 0;
    check(library().BackendGetAttribute(handle_, name, type, static_cast<int64_t>(capacity), &count,
                                        values.data()),
          what_);
    values.resize(std::min(capacity, static_cast<size_t>(count)));
    return values;
  }

  cudnnStatus_t try_finalize() { return library().BackendFinalize(handle_); }
  void finalize() { check(try_finalize(), what_); }

 private:
  const char* what_;
  cudnnBackendDescriptor_t handle_ = nullptr;
};

cudnnDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return CUDNN_DATA_DOUBLE;
    case DType::kFloat32:
      return CUDNN_DATA_FLOAT;
    case DType::kFloat16:
      return CUDNN_DATA_HALF;
    case DType::kBFloat16:
      return CUDNN_DATA_BFLOAT16;
    case DType::kInt64:
      return CUDNN_DATA_INT64;
    case DType::kInt32:
      return CUDNN_DATA_INT32;
    case DType::kBool:
      return CUDNN_DATA_BOOLEAN;
    default:
      TS_THROW(DTypeError, "cudnn", "has no tensors of ", dtype);
  }
}

int64_t uid_of(size_t tensor) { return static_cast<int64_t>(tensor) + 1; }

Descriptor make_tensor(const GraphTensor& x, int64_t uid) {
  constexpr int64_t kAlignment = 16;
  Descriptor result(CUDNN_BACKEND_TENSOR_DESCRIPTOR, "a tensor");
  result.set(CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, type_of(x.dtype));
  result.set(CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, x.sizes.size(), x.sizes.data());
  result.set(CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, x.strides.size(), x.strides.data());
  result.set(CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, uid);
  result.set(CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, kAlignment);
  if (x.role == GraphRole::kVirtual) {
    result.set(CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, true);
  }
  if (x.role == GraphRole::kScalar) {
    result.set(CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, true);
  }
  result.finalize();
  return result;
}

// Makes the operations of one graph from its tensors. What an operation is made of stays until the
// graph has been finalised.
class Operations {
 public:
  Operations(const LibraryGraph& graph, std::vector<Descriptor>& parts)
      : graph_(graph), parts_(parts) {
    for (size_t i = 0; i < graph.tensors.size(); ++i) {
      tensors_.push_back(make_tensor(graph.tensors[i], uid_of(i)));
    }
  }
  ~Operations() {
    for (Descriptor& tensor : tensors_) parts_.push_back(std::move(tensor));
  }
  Operations(const Operations&) = delete;
  Operations& operator=(const Operations&) = delete;

  Descriptor make(const GraphNode& node) {
    switch (node.op) {
      case GraphOp::kMatmul:
        return matmul(node);
      case GraphOp::kMax:
        return reduction(node, CUDNN_REDUCE_TENSOR_MAX);
      case GraphOp::kSum:
        return reduction(node, CUDNN_REDUCE_TENSOR_ADD);
      case GraphOp::kReshape: {
        Descriptor result(CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR, "a reshape");
        result.set(CUDNN_ATTR_OPERATION_RESHAPE_XDESC, input(node, 0));
        result.set(CUDNN_ATTR_OPERATION_RESHAPE_YDESC, output(node));
        return finalized(std::move(result));
      }
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

 private:
  const Descriptor& input(const GraphNode& node, size_t i) const {
    return tensors_[static_cast<size_t>(node.inputs[i])];
  }
  const Descriptor& output(const GraphNode& node, size_t i = 0) const {
    return tensors_[static_cast<size_t>(node.outputs[i])];
  }
  static Descriptor finalized(Descriptor descriptor) {
    descriptor.finalize();
    return descriptor;
  }
  const Descriptor& keep(Descriptor descriptor) {
    parts_.push_back(finalized(std::move(descriptor)));
    return parts_.back();
  }

  Descriptor matmul(const GraphNode& node) {
    Descriptor kind(CUDNN_BACKEND_MATMUL_DESCRIPTOR, "a product");
    kind.set(CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    Descriptor result(CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR, "a product");
    result.set(CUDNN_ATTR_OPERATION_MATMUL_DESC, keep(std::move(kind)));
    result.set(CUDNN_ATTR_OPERATION_MATMUL_ADESC, input(node, 0));
    result.set(CUDNN_ATTR_OPERATION_MATMUL_BDESC, input(node, 1));
    result.set(CUDNN_ATTR_OPERATION_MATMUL_CDESC, output(node));
    constexpr cudnnBackendAttributeName_t kLengths[] = {
        CUDNN_ATTR_OPERATION_MATMUL_GEMM_M_OVERRIDE_DESC,
        CUDNN_ATTR_OPERATION_MATMUL_GEMM_N_OVERRIDE_DESC,
        CUDNN_ATTR_OPERATION_MATMUL_GEMM_K_OVERRIDE_DESC};
    for (size_t i = 0; i < 3; ++i) {
      if (node.inputs[i + 2] >= 0) result.set(kLengths[i], input(node, i + 2));
    }
    return finalized(std::move(result));
  }

  Descriptor reduction(const GraphNode& node, cudnnReduceTensorOp_t op) {
    Descriptor kind(CUDNN_BACKEND_REDUCTION_DESCRIPTOR, "a reduction");
    kind.set(CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, op);
    kind.set(CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, CUDNN_DATA_FLOAT);
    Descriptor result(CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR, "a reduction");
    result.set(CUDNN_ATTR_OPERATION_REDUCTION_DESC, keep(std::move(kind)));
    result.set(CUDNN_ATTR_OPERATION_REDUCTION_XDESC, input(node, 0));
    result.set(CUDNN_ATTR_OPERATION_REDUCTION_YDESC, output(node));
    return finalized(std::move(result));
  }

  static std::pair<cudnnPointwiseMode_t, cudnnDataType_t> mode_of(GraphOp op) {
    switch (op) {
      case GraphOp::kAdd:
        return {CUDNN_POINTWISE_ADD, CUDNN_DATA_FLOAT};
      case GraphOp::kSubtract:
        return {CUDNN_POINTWISE_SUB, CUDNN_DATA_FLOAT};
      case GraphOp::kMultiply:
        return {CUDNN_POINTWISE_MUL, CUDNN_DATA_FLOAT};
      case GraphOp::kDivide:
        return {CUDNN_POINTWISE_DIV, CUDNN_DATA_FLOAT};
      case GraphOp::kExp:
        return {CUDNN_POINTWISE_EXP, CUDNN_DATA_FLOAT};
      case GraphOp::kLog:
        return {CUDNN_POINTWISE_LOG, CUDNN_DATA_FLOAT};
      case GraphOp::kIdentity:
        return {CUDNN_POINTWISE_IDENTITY, CUDNN_DATA_FLOAT};
      case GraphOp::kIndex:
        return {CUDNN_POINTWISE_GEN_INDEX, CUDNN_DATA_INT32};
      case GraphOp::kLess:
        return {CUDNN_POINTWISE_CMP_LT, CUDNN_DATA_BOOLEAN};
      case GraphOp::kGreaterEqual:
        return {CUDNN_POINTWISE_CMP_GE, CUDNN_DATA_BOOLEAN};
      case GraphOp::kAnd:
        return {CUDNN_POINTWISE_LOGICAL_AND, CUDNN_DATA_BOOLEAN};
      case GraphOp::kSelect:
        return {CUDNN_POINTWISE_BINARY_SELECT, CUDNN_DATA_FLOAT};
      default:
        TS_THROW(UnsupportedError, "cudnn", "has no pointwise ", name_of(op));
    }
  }

  Descriptor pointwise(const GraphNode& node) {
    const auto [mode, compute] = mode_of(node.op);
    Descriptor kind(CUDNN_BACKEND_POINTWISE_DESCRIPTOR, name_of(node.op));
    kind.set(CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, mode);
    kind.set(CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, compute);
    if (node.op == GraphOp::kIndex) {
      kind.set(CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, int64_t{node.axis});
    }
    Descriptor result(CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR, name_of(node.op));
    result.set(CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, keep(std::move(kind)));
    result.set(CUDNN_ATTR_OPERATION_POINTWISE_XDESC, input(node, 0));
    if (node.inputs.size() > 1) result.set(CUDNN_ATTR_OPERATION_POINTWISE_BDESC, input(node, 1));
    if (node.inputs.size() > 2) result.set(CUDNN_ATTR_OPERATION_POINTWISE_TDESC, input(node, 2));
    result.set(CUDNN_ATTR_OPERATION_POINTWISE_YDESC, output(node));
    return finalized(std::move(result));
  }

  Descriptor bernoulli(const GraphNode& node) {
    Descriptor kind(CUDNN_BACKEND_RNG_DESCRIPTOR, "a random mask");
    kind.set(CUDNN_ATTR_RNG_DISTRIBUTION, CUDNN_TYPE_RNG_DISTRIBUTION,
             CUDNN_RNG_DISTRIBUTION_BERNOULLI);
    kind.set(CUDNN_ATTR_RNG_BERNOULLI_DIST_PROBABILITY, CUDNN_TYPE_DOUBLE, node.number);
    Descriptor result(CUDNN_BACKEND_OPERATION_RNG_DESCRIPTOR, "a random mask");
    result.set(CUDNN_ATTR_OPERATION_RNG_DESC, keep(std::move(kind)));
    result.set(CUDNN_ATTR_OPERATION_RNG_SEED, input(node, 0));
    result.set(CUDNN_ATTR_OPERATION_RNG_OFFSET_DESC, input(node, 1));
    result.set(CUDNN_ATTR_OPERATION_RNG_YDESC, output(node));
    return finalized(std::move(result));
  }

  Descriptor convolution(const GraphNode& node) {
    const DType dtype = graph_.tensors[static_cast<size_t>(node.inputs[0])].dtype;
    constexpr int64_t kSpatial = 2;
    Descriptor kind(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR, "a convolution");
    kind.set(CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE,
             dtype == kF64 ? CUDNN_DATA_DOUBLE : CUDNN_DATA_FLOAT);
    kind.set(CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE,
             CUDNN_CROSS_CORRELATION);
    kind.set(CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, kSpatial);
    const GraphWindow& window = node.window;
    kind.set(CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, kSpatial, window.padding);
    kind.set(CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, kSpatial, window.padding);
    kind.set(CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, kSpatial, window.dilation);
    kind.set(CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, kSpatial, window.stride);

    struct Names {
      cudnnBackendDescriptorType_t type;
      cudnnBackendAttributeName_t kind, first, second, result, alpha, beta;
    };
    const Names names = node.op == GraphOp::kConvolution
                            ? Names{CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA}
                        : node.op == GraphOp::kConvolutionInputGradient
                            ? Names{CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA}
                            : Names{CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA,
                                    CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA};
    Descriptor result(names.type, "a convolution");
    result.set(names.kind, keep(std::move(kind)));
    result.set(names.first, input(node, 0));
    result.set(names.second, input(node, 1));
    result.set(names.result, output(node));
    if (dtype == kF64) {
      result.set(names.alpha, CUDNN_TYPE_DOUBLE, 1.0);
      result.set(names.beta, CUDNN_TYPE_DOUBLE, 0.0);
    } else {
      result.set(names.alpha, CUDNN_TYPE_FLOAT, 1.0f);
      result.set(names.beta, CUDNN_TYPE_FLOAT, 0.0f);
    }
    return finalized(std::move(result));
  }

  Descriptor batch_norm(const GraphNode& node) {
    Descriptor result(CUDNN_BACKEND_OPERATION_NORM_FORWARD_DESCRIPTOR, "a batch norm");
    result.set(CUDNN_ATTR_OPERATION_NORM_FWD_MODE, CUDNN_TYPE_NORM_MODE, CUDNN_BATCH_NORM);
    result.set(CUDNN_ATTR_OPERATION_NORM_FWD_PHASE, CUDNN_TYPE_NORM_FWD_PHASE,
               CUDNN_NORM_FWD_TRAINING);
    result.set(CUDNN_ATTR_OPERATION_NORM_FWD_XDESC, input(node, 0));
    result.set(CUDNN_ATTR_OPERATION_NORM_FWD_SCALE_DESC, input(node, 1));
    result.set(CUDNN_ATTR_OPERATION_NORM_FWD_BIAS_DESC, input(node, 2));
    result.set(CUDNN_ATTR_OPERATION_NORM_FWD_EPSILON_DESC, input(node, 3));
    result.set(CUDNN_ATTR_OPERATION_NORM_FWD_YDESC, output(node, 0));
    result.set(CUDNN_ATTR_OPERATION_NORM_FWD_MEAN_DESC, output(node, 1));
    result.set(CUDNN_ATTR_OPERATION_NORM_FWD_INV_VARIANCE_DESC, output(node, 2));
    return finalized(std::move(result));
  }

  Descriptor batch_norm_gradient(const GraphNode& node) {
    Descriptor result(CUDNN_BACKEND_OPERATION_NORM_BACKWARD_DESCRIPTOR, "a batch norm's gradient");
    result.set(CUDNN_ATTR_OPERATION_NORM_BWD_MODE, CUDNN_TYPE_NORM_MODE, CUDNN_BATCH_NORM);
    result.set(CUDNN_ATTR_OPERATION_NORM_BWD_XDESC, input(node, 0));
    result.set(CUDNN_ATTR_OPERATION_NORM_BWD_DYDESC, input(node, 1));
    result.set(CUDNN_ATTR_OPERATION_NORM_BWD_SCALE_DESC, input(node, 2));
    result.set(CUDNN_ATTR_OPERATION_NORM_BWD_MEAN_DESC, input(node, 3));
    result.set(CUDNN_ATTR_OPERATION_NORM_BWD_INV_VARIANCE_DESC, input(node, 4));
    result.set(CUDNN_ATTR_OPERATION_NORM_BWD_DXDESC, output(node, 0));
    result.set(CUDNN_ATTR_OPERATION_NORM_BWD_DSCALE_DESC, output(node, 1));
    result.set(CUDNN_ATTR_OPERATION_NORM_BWD_DBIAS_DESC, output(node, 2));
    return finalized(std::move(result));
  }

  const LibraryGraph& graph_;
  std::vector<Descriptor>& parts_;
  std::vector<Descriptor> tensors_;
};

// No engine has such a graph, shape, type or layout; what else goes wrong is an error.
bool is_unsupported(cudnnStatus_t status) {
  return CUDNN_STATUS_CATEGORY(status) == CUDNN_STATUS_NOT_SUPPORTED;
}

struct OperationGraph {
  std::vector<Descriptor> parts, operations;
  Descriptor whole;
  bool is_supported = true;

  OperationGraph(const LibraryGraph& graph, cudnnHandle_t handle)
      : whole(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR, "the graph") {
    {
      Operations make(graph, parts);
      for (const GraphNode& node : graph.nodes) operations.push_back(make.make(node));
    }
    whole.set(CUDNN_ATTR_OPERATIONGRAPH_OPS, operations);
    if (handle != nullptr) whole.set(CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, handle);
    const cudnnStatus_t status = whole.try_finalize();
    is_supported = !is_unsupported(status);
    if (is_supported) check(status, "the graph");
  }
};

// ---- Engines ------------------------------------------------------------------------------------

constexpr size_t kMostEngines = 32, kMostNotes = 32;

// The library's suggestions, best first; none where it has none. `device`: nullptr for the current
// one.
std::vector<Descriptor> suggestions(const OperationGraph& graph, const Descriptor* device,
                                    cudnnBackendHeurMode_t mode) {
  std::vector<Descriptor> configs;
  if (!graph.is_supported) return configs;
  Descriptor heuristics(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR, "the choice of an engine");
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, graph.whole);
  heuristics.set(CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, mode);
  if (device != nullptr) heuristics.set(CUDNN_ATTR_ENGINEHEUR_DEVICEPROP, *device);
  const cudnnStatus_t status = heuristics.try_finalize();
  if (is_unsupported(status)) return configs;
  check(status, "the choice of an engine");
  std::vector<cudnnBackendDescriptor_t> handles;
  for (size_t i = 0; i < kMostEngines; ++i) {
    configs.emplace_back(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, "an engine");
    handles.push_back(configs.back().get());
  }
  int64_t count = 0;
  check(library().BackendGetAttribute(heuristics.get(), CUDNN_ATTR_ENGINEHEUR_RESULTS,
                                      CUDNN_TYPE_BACKEND_DESCRIPTOR, int64_t{kMostEngines}, &count,
                                      handles.data()),
        "the choice of an engine");
  while (configs.size() > static_cast<size_t>(count)) configs.pop_back();
  return configs;
}

GraphEngine engine_of(const Descriptor& config) {
  Descriptor engine(CUDNN_BACKEND_ENGINE_DESCRIPTOR, "an engine");
  cudnnBackendDescriptor_t handle = engine.get();
  int64_t count = 0;
  check(library().BackendGetAttribute(config.get(), CUDNN_ATTR_ENGINECFG_ENGINE,
                                      CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &count, &handle),
        "an engine");
  GraphEngine result;
  result.index = engine.get<int64_t>(CUDNN_ATTR_ENGINE_GLOBAL_INDEX, CUDNN_TYPE_INT64, 1).at(0);
  const auto workspace =
      config.get<int64_t>(CUDNN_ATTR_ENGINECFG_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1);
  result.workspace_bytes = workspace.empty() ? 0 : workspace[0];
  for (const auto note : engine.get<cudnnBackendNumericalNote_t>(
           CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE, kMostNotes)) {
    result.numerical_notes.push_back(note);
  }
  for (const auto note : engine.get<cudnnBackendBehaviorNote_t>(
           CUDNN_ATTR_ENGINE_BEHAVIOR_NOTE, CUDNN_TYPE_BEHAVIOR_NOTE, kMostNotes)) {
    if (note == CUDNN_BEHAVIOR_NOTE_RUNTIME_COMPILATION) result.compiles_at_run_time = true;
    if (note == CUDNN_BEHAVIOR_NOTE_SUPPORTS_CUDA_GRAPH_NATIVE_API) result.captures = true;
  }
  return result;
}

bool is_wanted(const LibraryGraph& graph, const GraphEngine& engine) {
  bool has_f32_operands = false;
  for (const GraphTensor& x : graph.tensors) {
    has_f32_operands |=
        x.role == GraphRole::kMemory && x.dtype == kF32 && x.sizes.size() == 4 && x.slot == 0;
  }
  for (const int note : engine.numerical_notes) {
    if (note == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC && graph.deterministic) return false;
    if (note == CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION ||
        note == CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_6x6 ||
        note == CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_13x13) {
      return false;
    }
    if (has_f32_operands && note == CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS) return false;
    if (has_f32_operands && note == CUDNN_NUMERICAL_NOTE_TENSOR_CORE && !graph.tf32) return false;
  }
  return true;
}

// What the library wants to know of a GPU that is not there; it does not name what it misses.
constexpr const char* kDeviceKeys[] = {"cudaDeviceId",
                                       "deviceName",
                                       "deviceVer",
                                       "driverVer",
                                       "isTccDriver",
                                       "l2CacheSize",
                                       "maxBlockSize",
                                       "maxCtasPerSM",
                                       "maxGridSize",
                                       "maxRegistersPerSM",
                                       "maxSharedMemoryPerBlock",
                                       "maxSharedMemoryPerBlockOptin",
                                       "maxThreadsPerBlock",
                                       "maxThreadsPerSM",
                                       "memClockRateKHz",
                                       "multiProcessorCount",
                                       "pciDeviceId",
                                       "regsPerBlock",
                                       "reservedSharedMemoryPerBlock",
                                       "smClockRateKHz",
                                       "supportCoopLaunch",
                                       "totalGlobalMem",
                                       "warpSize"};

// ---- Plans --------------------------------------------------------------------------------------

struct Plan {
  OperationGraph operations;
  Descriptor config, plan;
  std::vector<int64_t> uids = {};  // of memory, scratch and scalars, in this order for `pointers`
  std::vector<int> slots = {};     // of memory; -1 for the others
  std::vector<int64_t> scratch = {};  // offset within the workspace; -1 for the others
  std::vector<float> scalars = {};
  int64_t library_bytes = 0, bytes = 0;  // of the workspace: the library's part, and all
};

// Of one device, for as long as the program runs.
struct DevicePlans {
  std::mutex mutex;
  cudnnHandle_t handle = nullptr;
  std::map<std::string, std::unique_ptr<Plan>> plans;  // nullptr: no engine serves the key
};
DevicePlans& device_plans() {
  constexpr int kMaxDevices = 64;
  static auto* const all = new DevicePlans[kMaxDevices];
  int device = 0;
  TS_CUDA(cudaGetDevice(&device));
  return all[device % kMaxDevices];
}

void bind_memory(Plan& plan, const LibraryGraph& graph) {
  const ScratchLayout layout = scratch_layout(graph);
  plan.library_bytes = (plan.library_bytes + 255) / 256 * 256;
  plan.bytes = plan.library_bytes + layout.bytes;
  for (size_t i = 0; i < graph.tensors.size(); ++i) {
    const GraphTensor& x = graph.tensors[i];
    if (x.role == GraphRole::kVirtual) continue;
    plan.uids.push_back(uid_of(i));
    plan.slots.push_back(x.role == GraphRole::kMemory ? x.slot : -1);
    plan.scratch.push_back(x.role == GraphRole::kScratch ? plan.library_bytes + layout.offsets[i]
                                                         : -1);
    plan.scalars.push_back(static_cast<float>(x.value));
  }
}

// The first engine that is wanted and supported here; nullptr where there is none.
std::unique_ptr<Plan> make_plan(const LibraryGraph& graph, cudnnHandle_t handle) {
  OperationGraph operations(graph, handle);
  cudnnStatus_t failure = CUDNN_STATUS_SUCCESS;
  for (const auto mode : {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_FALLBACK}) {
    for (Descriptor& config : suggestions(operations, nullptr, mode)) {
      if (!is_wanted(graph, engine_of(config))) continue;
      Descriptor plan(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR, "a plan");
      plan.set(CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, handle);
      plan.set(CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, config);
      // The next may be supported.
      if (const cudnnStatus_t status = plan.try_finalize(); status != CUDNN_STATUS_SUCCESS) {
        if (!is_unsupported(status)) failure = status;
        continue;
      }
      auto result = std::make_unique<Plan>(Plan{.operations = std::move(operations),
                                                .config = std::move(config),
                                                .plan = std::move(plan)});
      result->library_bytes =
          result->plan.get<int64_t>(CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1)
              .at(0);
      bind_memory(*result, graph);
      return result;
    }
  }
  // Memory that was short, or a driver, is no answer that may be remembered.
  check(failure, "a plan");
  return nullptr;
}

Plan* find_plan(DevicePlans& device, const GraphRequest& request) {
  auto place = device.plans.find(request.key);
  if (place == device.plans.end()) {
    const RelaxedCapture relaxed;  // the library allocates and loads kernels
    if (device.handle == nullptr) check(library().Create(&device.handle), "beginning on this GPU");
    place =
        device.plans.emplace(request.key, make_plan(request.build(request.problem), device.handle))
            .first;
  }
  return place->second.get();
}

}  // namespace

int graph_library_version() { return library().reason.empty() ? library().version : 0; }

std::string graph_library() {
  if (!library().reason.empty()) return "graphs run on own kernels, as " + library().reason;
  return "cuDNN " + version_text(library().version);
}

bool has_engine(const GraphRequest& request) {
  if (!library().reason.empty()) return false;
  DevicePlans& device = device_plans();
  const std::lock_guard lock(device.mutex);
  return find_plan(device, request) != nullptr;
}

bool run_graph(const GraphRequest& request, std::span<void* const> memory) {
  if (!library().reason.empty()) return false;
  DevicePlans& device = device_plans();
  const std::lock_guard lock(device.mutex);
  Plan* const plan = find_plan(device, request);
  if (plan == nullptr) return false;
  int index = 0;
  TS_CUDA(cudaGetDevice(&index));
  // The allocator hands it out again to the same stream only.
  const Tensor workspace = raw::empty({plan->bytes}, kU8, cuda(index));
  char* const base = static_cast<char*>(workspace.data());
  std::vector<void*> pointers;
  for (size_t i = 0; i < plan->uids.size(); ++i) {
    pointers.push_back(plan->slots[i] >= 0     ? memory[static_cast<size_t>(plan->slots[i])]
                       : plan->scratch[i] >= 0 ? base + plan->scratch[i]
                                               : static_cast<void*>(&plan->scalars[i]));
  }
  Descriptor pack(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR, "the memory of a graph");
  const auto count = static_cast<int64_t>(pointers.size());
  pack.set(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, count, plan->uids.data());
  pack.set(CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, count, pointers.data());
  pack.set(CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &base);
  pack.finalize();
  note_operation(request.name, current_stream());
  check(library().SetStream(device.handle, current_stream()), "choosing a stream");
  check(library().BackendExecute(device.handle, plan->plan.get(), pack.get()), request.name);
  note_request(request.key);
  finish_launch(cudaGetLastError(), request.name, current_stream());
  return true;
}

std::vector<GraphEngine> list_engines(const LibraryGraph& graph, const std::string& device) {
  require_library();
  for (const char* const key : kDeviceKeys) {
    TS_CHECK_AS(FormatError, device.find('"' + std::string(key) + '"') != std::string::npos,
                "cudnn", "the description of a GPU lacks '", key, "'; add it");
  }
  Descriptor properties(CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR, "the description of a GPU");
  properties.set(CUDNN_ATTR_DEVICEPROP_JSON_REPRESENTATION, CUDNN_TYPE_CHAR,
                 static_cast<int64_t>(device.size()), device.data());
  properties.finalize();
  const OperationGraph operations(graph, nullptr);
  std::vector<GraphEngine> engines;
  for (const Descriptor& config : suggestions(operations, &properties, CUDNN_HEUR_MODE_A)) {
    GraphEngine engine = engine_of(config);
    if (is_wanted(graph, engine)) engines.push_back(std::move(engine));
  }
  return engines;
}

}  // namespace tessera::gpu
