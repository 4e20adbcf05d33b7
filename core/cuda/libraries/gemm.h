// Matrix products by NVIDIA's library (cuBLASLt), as data: what is asked for, whether the library
// serves it, and how it is called. Nothing here needs CUDA's headers or a GPU, so the rules and the
// mapping are tested on the CPU; native_gemm.cpp makes the calls and is the only file that knows
// the library, which it loads when the first product asks for it. It is never required: what it
// does not serve, and everything where it is missing, runs on the kernels of
// core/kernels/gemm/matmul.cu.
//
// tessera's matrices lie row by row, the library's column by column. A row-major matrix read by
// columns is its transpose, so d = a b is asked for as d^T = b^T a^T: the operands change places,
// strides stay, and a bias for each column of d is one for each row of d^T, which epilogues know.
//
// Sums are f32 (f64 for f64). f32 operands are multiplied in full unless GemmOptions::tf32 says
// otherwise.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include <tessera/core/dtype.h>
#include <tessera/core/gemm_options.h>

namespace tessera::gpu {

using tessera::GemmFusion;
using tessera::GemmOptions;

// What is done to v = alpha a b + beta c before it is stored. GELU is the tanh approximation.
enum class GemmEpilogue : uint8_t {
  kNone,              // d = v
  kBias,              // d = v + bias; bias: [N]
  kGelu,              // aux = v where there is one; d = gelu(v)
  kGeluBias,          // the same of v + bias
  kGeluGrad,          // d = v gelu'(aux)
  kGeluGradBiasGrad,  // the same; bias = sum of d over rows: [N]
  kBiasGradOfA,       // d = v; bias = sum of a over K: [M]
  kBiasGradOfB,       // d = v; bias = sum of b over K: [N]
};
const char* name_of(GemmEpilogue epilogue);

// Elements lie `leading` apart from row to row; in a transposed matrix from column to column.
struct GemmMatrix {
  DType dtype = kF32;
  bool transposed = false;
  int64_t leading = 0;
  int64_t batch_stride = 0;  // from matrix to matrix; 0: all the same one
  void* data = nullptr;
};

// How many fp8 numbers a scale serves. Scales lie as written here, neighbors beside each other,
// from an address that is a multiple of 16. All but the first need compute capability 9.0.
enum class GemmScale : uint8_t {
  kTensor,  // one number
  kOuter,   // one for each row of a or column of b; in both operands or in none
  // One for 128 numbers along K, which K's end may cut; in both operands or in none, kSquares in
  // one of them at most.
  kVectors,  // [ceil(K / 128), M or N]
  kSquares,  // of 128 rows of a or columns of b: [ceil(M or N / 128), ceil(K / 128) up to a
             // multiple of 4]
};
const char* name_of(GemmScale scale);
inline constexpr int64_t kScaledTogether = 128;
// How many floats the scales of `outer` rows (columns) of K numbers are.
int64_t count_scales(GemmScale scale, int64_t outer, int64_t K);

// What the library gets to work with on a device of so much memory: a 256th of it, in [32, 128]
// MiB. NVIDIA's recommendation for Hopper is 32 MiB; a weight's gradient of a long batch has few
// tiles for many multiprocessors, and is cut along K only as far as its partial sums in f32 have
// room (9 MiB each of 768 x 3072).
int64_t gemm_workspace_bytes(int64_t device_bytes);

struct GemmProblem {
  int64_t M = 0, N = 0, K = 0, batch = 1;
  GemmMatrix a = {}, b = {}, d = {};  // [M, K], [K, N], [M, N]
  double alpha = 1, beta = 0;
  const void* c = nullptr;  // what beta multiplies: laid out as d, of its dtype; null: d itself
  GemmEpilogue epilogue = GemmEpilogue::kNone;
  void* bias = nullptr;
  DType bias_dtype = kF32;
  GemmMatrix aux = {};  // [M, N], for GELU and its gradient
  // fp8: f32 numbers on the device by which a, b and d (before it is rounded) are multiplied:
  // those of a and b undo the scaling of their values, that of d is the scaling of its own.
  const void* a_scale = nullptr;
  const void* b_scale = nullptr;
  const void* d_scale = nullptr;
  GemmScale a_scaling = GemmScale::kTensor, b_scaling = GemmScale::kTensor;
  // fp8: partial sums keep fewer bits; not with scales that change along K.
  bool fast_accumulation = false;
  bool tf32 = false;  // f32 operands are cut to 10 bits of mantissa
  // K counts rows of a batch though it lies along memory, as in weight gradients of fp8: a length
  // like any other, which key_of() rounds.
  bool sums_over_rows = false;
};

// Who ran the products of floats that a context asked a GPU for: a slot of the context. What the
// library did not get ran on own kernels, which are slower.
struct GemmCounts {
  int64_t library = 0;
  int64_t not_served = 0;        // there is no library, or validate() has a reason
  int64_t other_strides = 0;     // neither rows nor columns of an operand lie together
  int64_t unmerged_batches = 0;  // several batch dimensions that are not one stride
};

// Empty where the library serves the problem, else the reason why not.
std::string validate(const GemmProblem& problem);

// A batch of products with one b whose rows all follow each other is one product with more rows.
GemmProblem fold_batch(GemmProblem problem);

// A matrix as the library describes it: `rows` elements one after the other, columns `leading`
// apart.
struct LibraryMatrix {
  DType dtype = kF32;
  int64_t rows = 0, columns = 0, leading = 0, batch_stride = 0;
  void* data = nullptr;
};
// d[m, n] = op(a)[m, k] op(b)[k, n] by columns.
struct LibraryCall {
  int64_t m = 0, n = 0, k = 0, batch = 1;
  bool transpose_a = false, transpose_b = false;
  LibraryMatrix a = {}, b = {}, c = {}, d = {}, aux = {};
  uint32_t epilogue = 1;                                                  // cublasLtEpilogue_t
  const void *a_scale = nullptr, *b_scale = nullptr, *d_scale = nullptr;  // of its own a, b, d
  int32_t a_scale_mode = 0, b_scale_mode = 0;  // cublasLtMatmulMatrixScale_t
};
// For a problem that validate() accepts.
LibraryCall library_call(const GemmProblem& problem);

// What the library is to keep to when it suggests algorithms. Parts of a sum over K are joined in
// the compute type: cublasLtReductionScheme_t, none or CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE; the
// others keep them in the result's 16 bits.
inline constexpr uint32_t kGemmReductionSchemes = 0 | 2;
// Whether an algorithm of this scheme may be used.
inline bool allows_reduction(uint32_t scheme) { return (scheme & ~kGemmReductionSchemes) == 0; }

// The addresses that stand in the operation and not in the call:
// all of them are set for each product, as those that are null must not be of the one before.
struct GemmAddresses {
  const void *bias, *aux, *a_scale, *b_scale, *d_scale;
};
GemmAddresses addresses_of(const GemmProblem& problem, const LibraryCall& call);

// The power of two, at most 256, that the address is a multiple of.
int alignment_of(const void* pointer);

// All that the choice of an algorithm depends on but the GPU and the library's version:
// "m768 n1024 k3072 b1 a:bf16,n,768,0,@256 ... bias:bf16 beta0".
std::string describe(const GemmProblem& problem);

// The same product with nothing around it.
GemmProblem without_epilogue(GemmProblem problem);

// Lengths of batches come in any number; algorithms are chosen for rounded ones. Up to the next
// number of three significant bits: 1 to 8, 10, 12, 14, 16, 20 ...
int64_t rounded_length(int64_t length);
// The product of rounded lengths that this one's algorithm is chosen for: its batch, and of M and K
// those that count rows of a batch, on which no stride depends but from matrix to matrix. Addresses
// are those of the problem.
GemmProblem rounded(GemmProblem problem);
// The key of the algorithm: describe(rounded(problem)).
std::string key_of(const GemmProblem& problem);

// Forward; its gradients are others.
bool makes_gelu(GemmEpilogue epilogue);
// Whether epilogues pay where nothing was measured: GELU does, the gradients of GELU and of a bias
// do not. [Note: fused by rule]
bool fused_by_rule(const GemmProblem& problem);
// The answer of GemmOptions::fusion for a problem of which a table says `known` ("fused" or
// "apart"), or nothing; none where it is to be measured.
std::optional<bool> fused_without_measuring(GemmFusion fusion, const GemmProblem& problem,
                                            const std::optional<std::string>& known);

// Whether the product reads what lies in d, so that it may not be tried out there.
bool reads_result(const GemmProblem& problem);

// ---- On the device (native_gemm.cpp; emulation/gemm.cpp: a model that a test gives) -------------

// Queues the product on the current stream and says true; or does nothing and says false, where
// validate() has a reason or there is no library. Algorithms come from a table in a file
// (process_gemm_table()) or that of the card (find_shipped()); others are measured and added
// to the file, but within a capture, which takes the library's first suggestion; so do all where
// there is no table. Throws CudaError.
bool run_gemm(const GemmProblem& problem);

// Whether to ask for a product with an epilogue, by the context's GemmOptions: false where
// validate() has a reason or there is no library. For GemmFusion::kMeasured the product, the same
// one without its epilogue and `rest`, which queues what would then be left to do, are measured
// once where the table has no answer, and it is kept there.
bool fused_gemm_wins(const GemmProblem& problem, const std::function<void()>& rest);

// "cuBLASLt 13.1.0", or why products run without it.
std::string gemm_library();

// What the library has been told, read back from its descriptors.
struct GemmDescription {
  LibraryMatrix a = {}, b = {}, d = {};
  int32_t batch = 0;
  GemmAddresses addresses = {};
  uint32_t reduction_schemes = 0;
};
// Makes all descriptors of the first problem, gives them the sizes and addresses of the second, as
// a product does that finds them there, and throws them away; needs the library but no GPU. Throws
// CudaError naming what was refused, UnsupportedError without the library.
GemmDescription describe_to_library(const GemmProblem& first, const GemmProblem& then);

// How many algorithms the library offers on the current device.
int count_gemm_algorithms(const GemmProblem& problem);

}  // namespace tessera::gpu
