// A computation as data, in the form that NVIDIA's cuDNN takes: tensors and the operations between
// them. What is asked for is built, checked and keyed here without CUDA's headers or a GPU;
// native_graph.cpp hands it to the library, which it loads when the first graph is run, and is the
// only file that knows it. The library is never required: what it does not serve, and everything
// where it is missing, runs on own kernels.
//
// On the emulated device a model of the library (emulation/graph_model.h) evaluates the same data
// operation by operation, so that tests see the graph itself, its strides and its memory.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include <tessera/core/dtype.h>
#include <tessera/core/shape.h>

namespace tessera::gpu {

enum class GraphRole : uint8_t {
  kMemory,   // the caller's, one pointer a slot
  kScratch,  // written and read within the graph: lies in the workspace
  kVirtual,  // exists between operations only
  kScalar,   // one number, by value
};

struct GraphTensor {
  DType dtype = kF32;
  GraphRole role = GraphRole::kVirtual;
  Shape sizes = {}, strides = {};  // in elements; a size of 1 is repeated where operands meet
  int slot = -1;                   // of memory
  double value = 0;                // of a scalar
};

// Operands in their order; -1: there is none.
enum class GraphOp : uint8_t {
  kMatmul,        // (a, b, rows, columns, inner) -> c; the last three: i32 lengths of each sample
  kAdd,           // (a, b) -> c, and so the next three
  kSubtract,      //
  kMultiply,      //
  kDivide,        //
  kExp,           // (x) -> y, and so the next three
  kLog,           //
  kIdentity,      //
  kIndex,         // of `axis`, as i32
  kLess,          // (a, b) -> bool, and so the next two
  kGreaterEqual,  //
  kAnd,           //
  kSelect,        // (a, b, condition) -> a where it holds, else b
  kMax,           // (x) -> y, over the dimensions of which y has fewer
  kSum,           // the same
  kReshape,       // (x) -> y, the same memory by y's strides
  kBernoulli,     // (seed, offset) -> 1 with probability `number`, else 0; numbers of the library
  kConvolution,   // (x [N, C, H, W], w [O, C / groups, KH, KW]) -> y
  kConvolutionInputGradient,   // (dy, w) -> dx
  kConvolutionWeightGradient,  // (dy, x) -> dw
  kBatchNorm,                  // (x, scale, bias, eps) -> (y, mean, rstd), statistics of x
  kBatchNormGradient,          // (x, dy, scale, mean, rstd) -> (dx, dscale, dbias)
};
const char* name_of(GraphOp op);

struct GraphWindow {  // of a convolution: height, width
  int64_t stride[2] = {1, 1}, padding[2] = {0, 0}, dilation[2] = {1, 1};
};

struct GraphNode {
  GraphOp op;
  std::vector<int> inputs, outputs;
  int axis = 0;
  double number = 0;
  GraphWindow window = {};
};

struct LibraryGraph {
  std::vector<GraphTensor> tensors;
  std::vector<GraphNode> nodes;
  // Engines of which the library notes it are left out: that sum in another order from run to run;
  // that multiply f32 on tensor cores, with 10 bits of mantissa.
  bool deterministic = true, tf32 = false;

  // Add a tensor and give its number. `interim` and `scratch` lie row-major.
  int memory(int slot, DType dtype, const Shape& sizes, const Shape& strides);
  int scalar(double value);
  int interim(DType dtype, const Shape& sizes);
  int interim(DType dtype, const Shape& sizes, const Shape& strides);
  int scratch(DType dtype, const Shape& sizes);
  // Adds an operation and gives its (first) output.
  int node(GraphOp op, std::vector<int> inputs, int output);
};

// Where each scratch tensor begins within the workspace, in units of 256 bytes, after the
// library's own part; offsets[i] of tensor i, and the bytes of all.
struct ScratchLayout {
  std::vector<int64_t> offsets;
  int64_t bytes = 0;
};
ScratchLayout scratch_layout(const LibraryGraph& graph);

// What a request is worth to who counts work and puts a price on it (dry/price.h).
enum class GraphWork : uint8_t {
  kMemory,  // moves its tensors
  kAttention,
  kAttentionGradient,
  kConvolution,  // or one of its gradients
};

// What the library is asked for: the key names everything that the graph depends on.
struct GraphRequest {
  const char* name;  // of the op, for errors and profiles
  std::string key;
  LibraryGraph (*build)(const void* problem);  // called where the key is new
  const void* problem;
  GraphWork work = GraphWork::kMemory;
  bool causal = false;  // of attention: about half of the pairs are masked, and left out
};

// "9.19.0"
std::string version_text(int version);
// Who ran the attention, convolutions and gradients of batch norm that a context asked a GPU for: a
// slot of the context. What the library did not get ran on own kernels, which are slower; a
// single query, which it is not asked for, does not count.
struct GraphCounts {
  int64_t library = 0, own = 0;
};
// Counts, and gives the answer back. With TESSERA_REQUIRE_LIBRARIES=1 what own kernels are to run,
// of graphs as of products (gemm.h), is an UnsupportedError with the reason(), which is made for
// nothing else: training in a dtype that the libraries serve has nothing of that kind.
bool count_graph(const char* op, bool by_library, const std::function<std::string()>& reason);
void refuse_own_kernels(const char* op, const std::function<std::string()>& reason);

// Empty where this release of the library (90101 is 9.1.1) is one that graphs run on.
std::string validate_library(int version);

// ---- On the device (native_graph.cpp, emulation/graph_model.cpp, none/graph_none.cpp) -----------

// 91900 for 9.19.0; 0 where there is no library that graphs run on.
int graph_library_version();
// "cuDNN 9.19.0", or why graphs do not run.
std::string graph_library();

// Whether an engine of the library serves the request on the current device: finds (and compiles)
// it where the key is new, which takes up to a second, and remembers the answer.
bool has_engine(const GraphRequest& request);

// Queues the graph on the current stream and says true; or does nothing and says false, where there
// is no library or none of its engines serves. memory[slot]: device pointers, nullptr for a slot
// that the graph does not have. Throws CudaError.
bool run_graph(const GraphRequest& request, std::span<void* const> memory);

// What the library offers, on a device that is described by text and need not be there.
struct GraphEngine {
  int64_t index = 0;
  int64_t workspace_bytes = 0;
  std::vector<int> numerical_notes;                     // cudnnBackendNumericalNote_t
  bool compiles_at_run_time = false, captures = false;  // in CUDA graphs
};
// Makes all descriptors and asks the heuristics for `device`, a JSON object as the library writes
// them (23 keys; a FormatError names one that is missing). Needs the library but no GPU, and for
// engines that compile at run time a loadable libcuda.so.1, be it the toolkit's stub: they load it
// before they say that they serve. Throws CudaError with the library's words where it refuses.
std::vector<GraphEngine> list_engines(const LibraryGraph& graph, const std::string& device);

}  // namespace tessera::gpu
