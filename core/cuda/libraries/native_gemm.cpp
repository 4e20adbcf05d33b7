// The only file that knows cuBLASLt: it loads the library when the first product asks for it, keeps
// a plan (descriptors and an algorithm) for each problem that it has seen, and measures algorithms
// where the environment names a table to keep them in.
#include <cublasLt.h>
#include <cuda_runtime.h>

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <tessera/core/context.h>
#include <tessera/core/cuda/capture.h>
#include <tessera/core/cuda/check.h>
#include <tessera/core/cuda/graph.h>
#include <tessera/core/cuda/launch_log.h>
#include <tessera/core/cuda/libraries/gemm.h>
#include <tessera/core/cuda/libraries/gemm_table.h>
#include <tessera/core/cuda/libraries/lazy_library.h>
#include <tessera/core/cuda/streams.h>
#include <tessera/core/error.h>
#include <tessera/core/tensor/empty.h>

namespace tessera::gpu {
namespace {

constexpr int kCandidates = 16;                    // that are asked for and measured
constexpr int kRounds = 7;                         // of which the median counts
constexpr size_t kFlushBytes = size_t{128} << 20;  // more than any L2 cache holds

// ---- The library --------------------------------------------------------------------------------

// clang-format off
#define TS_CUBLASLT_FUNCTIONS(F)                                                                 \
  F(GetVersion) F(Create) F(GetStatusName) F(Matmul) F(MatmulAlgoGetHeuristic)                   \
  F(MatmulDescCreate) F(MatmulDescDestroy) F(MatmulDescSetAttribute)                             \
  F(MatrixLayoutCreate) F(MatrixLayoutDestroy) F(MatrixLayoutSetAttribute)                       \
  F(MatmulPreferenceCreate) F(MatmulPreferenceDestroy) F(MatmulPreferenceSetAttribute)
// clang-format on

struct Library {
#define TS_MEMBER(name) decltype(&cublasLt##name) name = nullptr;
  TS_CUBLASLT_FUNCTIONS(TS_MEMBER)
#undef TS_MEMBER
  std::string reason;  // why it is not there; empty where it is
  size_t version = 0;

  Library() {
    LazyLibrary file("libcublasLt.so." + std::to_string(CUBLAS_VER_MAJOR), "cuBLAS");
#define TS_FIND(name) file.find("cublasLt" #name, name);
    TS_CUBLASLT_FUNCTIONS(TS_FIND)
#undef TS_FIND
    reason = file.reason();
    if (reason.empty()) version = GetVersion();
  }
};
const Library& library() {
  static const Library* const the_library = new Library;
  return *the_library;
}

void check(cublasStatus_t status, const char* what, const GemmProblem& problem) {
  TS_CHECK_AS(CudaError, status == CUBLAS_STATUS_SUCCESS, "cublasLt", what, " failed with ",
              library().GetStatusName(status), " for ", describe(problem),
              "; this should have been refused by validate()");
}

cudaDataType_t type_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return CUDA_R_64F;
    case DType::kFloat32:
      return CUDA_R_32F;
    case DType::kFloat16:
      return CUDA_R_16F;
    case DType::kBFloat16:
      return CUDA_R_16BF;
    case DType::kFloat8E4M3:
      return CUDA_R_8F_E4M3;
    case DType::kFloat8E5M2:
      return CUDA_R_8F_E5M2;
    default:
      TS_THROW(DTypeError, "cublasLt", "has no products of ", dtype);
  }
}

static_assert(CUBLASLT_EPILOGUE_DEFAULT == 1 && CUBLASLT_EPILOGUE_BIAS == 4 &&
              CUBLASLT_EPILOGUE_GELU_AUX_BIAS == (32 | 4 | 128) &&
              CUBLASLT_EPILOGUE_DGELU_BGRAD == (64 | 128 | 16) && CUBLASLT_EPILOGUE_BGRADA == 256 &&
              CUBLASLT_EPILOGUE_BGRADB == 512);

static_assert(CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F == 0 &&
              CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F == 3 &&
              CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F == 4 &&
              CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F == 5);

// ---- Descriptors --------------------------------------------------------------------------------

template <class T>
using Owned = std::unique_ptr<std::remove_pointer_t<T>, cublasStatus_t (*)(T)>;

Owned<cublasLtMatrixLayout_t> make_layout(const LibraryMatrix& x, int64_t batch,
                                          const GemmProblem& problem) {
  cublasLtMatrixLayout_t layout = nullptr;
  check(library().MatrixLayoutCreate(&layout, type_of(x.dtype), static_cast<uint64_t>(x.rows),
                                     static_cast<uint64_t>(x.columns), x.leading),
        "a matrix layout", problem);
  Owned<cublasLtMatrixLayout_t> result(layout, library().MatrixLayoutDestroy);
  if (batch > 1) {
    const auto count = static_cast<int32_t>(batch);
    const auto set = [&](cublasLtMatrixLayoutAttribute_t attribute, const auto& value) {
      check(library().MatrixLayoutSetAttribute(layout, attribute, &value, sizeof value),
            "a batch of matrices", problem);
    };
    set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, count);
    set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, x.batch_stride);
  }
  return result;
}

struct Descriptors {
  Owned<cublasLtMatmulDesc_t> operation{nullptr, nullptr};
  Owned<cublasLtMatrixLayout_t> a{nullptr, nullptr}, b{nullptr, nullptr}, d{nullptr, nullptr};
  Owned<cublasLtMatmulPreference_t> preference{nullptr, nullptr};
};

template <class T>
void set(const Descriptors& all, cublasLtMatmulDescAttributes_t attribute, const T& value,
         const GemmProblem& problem) {
  check(library().MatmulDescSetAttribute(all.operation.get(), attribute, &value, sizeof value),
        "an attribute of the product", problem);
}

// Addresses of a call; the rest of the operation stays from call to call.
void set_pointers(const Descriptors& all, const LibraryCall& call, const GemmProblem& problem) {
  const auto set_where = [&](cublasLtMatmulDescAttributes_t attribute, const void* pointer) {
    if (pointer != nullptr) set(all, attribute, pointer, problem);
  };
  set_where(CUBLASLT_MATMUL_DESC_BIAS_POINTER, problem.bias);
  set_where(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, call.aux.data);
  set_where(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, call.a_scale);
  set_where(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, call.b_scale);
  set_where(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, call.d_scale);
}

Descriptors make_descriptors(const GemmProblem& problem, int64_t workspace_bytes) {
  const Library& lt = library();
  const LibraryCall call = library_call(problem);
  const bool is_double = problem.a.dtype == kF64;
  Descriptors all;
  cublasLtMatmulDesc_t operation = nullptr;
  const cublasComputeType_t compute = is_double      ? CUBLAS_COMPUTE_64F
                                      : problem.tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32
                                                     : CUBLAS_COMPUTE_32F;
  check(lt.MatmulDescCreate(&operation, compute, is_double ? CUDA_R_64F : CUDA_R_32F),
        "the descriptor of the product", problem);
  all.operation = {operation, lt.MatmulDescDestroy};
  const cublasOperation_t transpose_a = call.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  const cublasOperation_t transpose_b = call.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N;
  set(all, CUBLASLT_MATMUL_DESC_TRANSA, transpose_a, problem);
  set(all, CUBLASLT_MATMUL_DESC_TRANSB, transpose_b, problem);
  set(all, CUBLASLT_MATMUL_DESC_EPILOGUE, call.epilogue, problem);
  if (problem.bias != nullptr) {
    const auto dtype = static_cast<int32_t>(type_of(problem.bias_dtype));
    set(all, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, dtype, problem);
  }
  if (call.aux.data != nullptr) {
    const auto dtype = static_cast<int32_t>(type_of(call.aux.dtype));
    set(all, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, dtype, problem);
    set(all, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, call.aux.leading, problem);
  }
  if (problem.fast_accumulation) {
    set(all, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{1}, problem);
  }
  if (call.a_scale_mode != 0) {
    set(all, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, call.a_scale_mode, problem);
    set(all, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, call.b_scale_mode, problem);
  }
  set_pointers(all, call, problem);
  all.a = make_layout(call.a, call.batch, problem);
  all.b = make_layout(call.b, call.batch, problem);
  all.d = make_layout(call.d, call.batch, problem);

  cublasLtMatmulPreference_t preference = nullptr;
  check(lt.MatmulPreferenceCreate(&preference), "the preference", problem);
  all.preference = {preference, lt.MatmulPreferenceDestroy};
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
    check(lt.MatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value),
          "an attribute of the preference", problem);
  };
  const auto alignment = [](const LibraryMatrix& x) {
    return static_cast<uint32_t>(alignment_of(x.data));
  };
  const auto workspace = static_cast<uint64_t>(workspace_bytes);
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(call.a));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(call.b));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(call.c));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(call.d));
  return all;
}

// ---- Plans --------------------------------------------------------------------------------------

struct Plan {
  Descriptors descriptors;
  cublasLtMatmulAlgo_t algorithm{};
  bool serves = true;  // false: the library has no algorithm for the problem
};

// Of one device, for as long as the program runs. The lock is held while a product is queued, as
// the addresses stand in the plan's descriptor.
struct DevicePlans {
  std::mutex mutex;
  cublasLtHandle_t handle = nullptr;
  std::string gpu;
  int64_t workspace_bytes = 0;
  std::map<std::string, Plan> plans;
};
DevicePlans& device_plans() {
  constexpr int kMaxDevices = 64;
  static auto* const all = new DevicePlans[kMaxDevices];
  int device = 0;
  TS_CUDA(cudaGetDevice(&device));
  return all[device % kMaxDevices];
}

GemmTable* table() {
  static GemmTable* const the_table = gemm_table_of_environment().release();
  return the_table;
}

void begin(DevicePlans& device) {
  if (device.handle != nullptr) return;
  int index = 0;
  TS_CUDA(cudaGetDevice(&index));
  cudaDeviceProp properties;
  TS_CUDA(cudaGetDeviceProperties(&properties, index));
  const cublasStatus_t status = library().Create(&device.handle);
  TS_CHECK_AS(CudaError, status == CUBLAS_STATUS_SUCCESS, "cublasLt",
              "cannot begin on this device: ", library().GetStatusName(status),
              "; is there memory left on it?");
  int driver = 0;
  TS_CUDA(cudaDriverGetVersion(&driver));
  device.gpu = std::string(properties.name) + ", driver " + std::to_string(driver);
  device.workspace_bytes = gemm_workspace_bytes(static_cast<int64_t>(properties.totalGlobalMem));
}

// What was measured with less to work with is measured again.
std::string table_key(const DevicePlans& device, const std::string& name) {
  return "cublasLt " + std::to_string(library().version) + ", " + device.gpu + ", " +
         std::to_string(device.workspace_bytes >> 20) + " MiB: " + name;
}

std::vector<cublasLtMatmulHeuristicResult_t> candidates(DevicePlans& device, const Descriptors& all,
                                                        int wanted) {
  std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(wanted));
  int count = 0;
  const cublasStatus_t status = library().MatmulAlgoGetHeuristic(
      device.handle, all.operation.get(), all.a.get(), all.b.get(), all.d.get(), all.d.get(),
      all.preference.get(), wanted, found.data(), &count);
  found.resize(status == CUBLAS_STATUS_SUCCESS ? static_cast<size_t>(count) : 0);
  std::erase_if(found, [](const auto& one) { return one.state != CUBLAS_STATUS_SUCCESS; });
  return found;
}

cublasStatus_t queue(DevicePlans& device, const Plan& plan, const GemmProblem& problem,
                     void* target, void* workspace) {
  const LibraryCall call = library_call(problem);
  const float alpha = static_cast<float>(problem.alpha), beta = static_cast<float>(problem.beta);
  const bool is_double = problem.a.dtype == kF64;
  const void* const a = is_double ? static_cast<const void*>(&problem.alpha) : &alpha;
  const void* const b = is_double ? static_cast<const void*>(&problem.beta) : &beta;
  const Descriptors& all = plan.descriptors;
  return library().Matmul(device.handle, all.operation.get(), a, call.a.data, all.a.get(),
                          call.b.data, all.b.get(), b, problem.c != nullptr ? problem.c : target,
                          all.d.get(), target, all.d.get(), &plan.algorithm, workspace,
                          static_cast<size_t>(device.workspace_bytes), current_stream());
}

struct TimingEvent {
  cudaEvent_t event = nullptr;
  TimingEvent() { TS_CUDA(cudaEventCreateWithFlags(&event, cudaEventDefault)); }
  ~TimingEvent() { cudaEventDestroy(event); }
  TimingEvent(const TimingEvent&) = delete;
  TimingEvent& operator=(const TimingEvent&) = delete;
};

// On the problem's own operands, from memory that the L2 cache has forgotten, into a result that
// nobody else sees.
std::optional<FastestCandidate> measure(DevicePlans& device, Plan& plan, const GemmProblem& problem,
                                        void* workspace,
                                        const std::vector<cublasLtMatmulHeuristicResult_t>& found) {
  int index = 0;
  TS_CUDA(cudaGetDevice(&index));
  const int64_t elements =
      (problem.batch - 1) * problem.d.batch_stride + problem.M * problem.d.leading;
  const Tensor result = raw::empty({elements}, problem.d.dtype, cuda(index));
  const Tensor flush = raw::empty({static_cast<int64_t>(kFlushBytes)}, kU8, cuda(index));
  const TimingEvent start, end;
  const cudaStream_t stream = current_stream();
  TS_CUDA(cudaMemsetAsync(result.data(), 0, static_cast<size_t>(elements * size_of(result.dtype())),
                          stream));
  return fastest_candidate(found.size(), kRounds, [&](size_t i) -> std::optional<double> {
    plan.algorithm = found[i].algo;
    TS_CUDA(cudaMemsetAsync(flush.data(), 0, kFlushBytes, stream));
    TS_CUDA(cudaEventRecord(start.event, stream));
    if (queue(device, plan, problem, result.data(), workspace) != CUBLAS_STATUS_SUCCESS) return {};
    TS_CUDA(cudaEventRecord(end.event, stream));
    TS_CUDA(cudaEventSynchronize(end.event));
    float milliseconds = 0;
    TS_CUDA(cudaEventElapsedTime(&milliseconds, start.event, end.event));
    return 1e3 * static_cast<double>(milliseconds);
  });
}

// Outputs beside the result (bias gradients, aux) would be written while measuring: they are what
// the product that follows writes anyway, with the same operands.
bool choose_algorithm(DevicePlans& device, Plan& plan, const GemmProblem& problem,
                      const std::string& name, void* workspace) {
  GemmTable* const known = table();
  const std::string key = table_key(device, name);
  if (known != nullptr) {
    if (const auto entry = known->find(key)) {
      TS_CHECK_AS(FormatError, entry->bytes.size() == sizeof plan.algorithm, known->path(),
                  "the algorithm of '", key, "' has ", entry->bytes.size(), " bytes, not ",
                  sizeof plan.algorithm, "; delete the file, and it is measured anew");
      std::memcpy(&plan.algorithm, entry->bytes.data(), sizeof plan.algorithm);
      return true;
    }
  }
  // A capture cannot wait for what it measures.
  const bool measures = known != nullptr && Capture::current() == nullptr;
  const auto found = candidates(device, plan.descriptors, measures ? kCandidates : 1);
  if (found.empty()) return false;
  size_t best = 0;
  if (measures) {
    const auto fastest = measure(device, plan, problem, workspace, found);
    if (!fastest) return false;
    best = fastest->index;
    known->add(key, {std::string(reinterpret_cast<const char*>(&found[best].algo),
                                 sizeof found[best].algo),
                     fastest->microseconds});
  }
  plan.algorithm = found[best].algo;
  return true;
}

// The algorithm of a problem on its device, chosen when it comes up first.
Plan& plan_of(DevicePlans& device, const GemmProblem& problem, void* workspace) {
  const std::string name = describe(problem);
  auto place = device.plans.find(name);
  if (place == device.plans.end()) {
    const RelaxedCapture relaxed;  // the library loads kernels
    Plan plan{.descriptors = make_descriptors(problem, device.workspace_bytes)};
    plan.serves = choose_algorithm(device, plan, problem, name, workspace);
    place = device.plans.emplace(name, std::move(plan)).first;
  }
  return place->second;
}

Tensor new_workspace(const DevicePlans& device) {
  int index = 0;
  TS_CUDA(cudaGetDevice(&index));
  // The allocator hands it out again to the same stream only.
  return raw::empty({device.workspace_bytes}, kU8, cuda(index));
}

// Microseconds of what `work` queues, from memory that the L2 cache has forgotten.
double measure_rest(const std::function<void()>& work) {
  int index = 0;
  TS_CUDA(cudaGetDevice(&index));
  const Tensor flush = raw::empty({static_cast<int64_t>(kFlushBytes)}, kU8, cuda(index));
  const TimingEvent start, end;
  const cudaStream_t stream = current_stream();
  return fastest_candidate(1, kRounds,
                           [&](size_t) -> std::optional<double> {
                             TS_CUDA(cudaMemsetAsync(flush.data(), 0, kFlushBytes, stream));
                             TS_CUDA(cudaEventRecord(start.event, stream));
                             work();
                             TS_CUDA(cudaEventRecord(end.event, stream));
                             TS_CUDA(cudaEventSynchronize(end.event));
                             float milliseconds = 0;
                             TS_CUDA(cudaEventElapsedTime(&milliseconds, start.event, end.event));
                             return 1e3 * static_cast<double>(milliseconds);
                           })
      .value_or(FastestCandidate{})
      .microseconds;
}

}  // namespace

bool fused_gemm_wins(const GemmProblem& problem, const std::function<void()>& rest) {
  const GemmFusion fusion = Context::current().slot<GemmOptions>().fusion;
  if (fusion == GemmFusion::kNever || !library().reason.empty() || !validate(problem).empty()) {
    return false;
  }
  if (fusion == GemmFusion::kAlways) return true;
  GemmTable* const known = table();
  if (known == nullptr) return false;
  const GemmProblem apart = without_epilogue(problem);
  DevicePlans& device = device_plans();
  std::optional<GemmAlgorithm> whole, product;
  std::string decision;
  {
    const std::lock_guard lock(device.mutex);
    begin(device);
    decision = table_key(device, "fused? " + describe(problem));
    if (const auto entry = known->find(decision)) return entry->bytes == "fused";
    if (Capture::current() != nullptr) return false;
    const Tensor workspace = new_workspace(device);
    if (!plan_of(device, problem, workspace.data()).serves) return false;
    if (!plan_of(device, apart, workspace.data()).serves) return true;
    whole = known->find(table_key(device, describe(problem)));
    product = known->find(table_key(device, describe(apart)));
  }
  if (!whole || !product) return false;
  const double passes = measure_rest(rest);
  const bool wins = whole->microseconds < product->microseconds + passes;
  known->add(decision, {wins ? "fused" : "apart",
                        wins ? whole->microseconds : product->microseconds + passes});
  return wins;
}

bool run_gemm(const GemmProblem& given) {
  if (!library().reason.empty()) return false;
  const GemmProblem problem = fold_batch(given);
  if (!validate(problem).empty()) return false;
  DevicePlans& device = device_plans();
  const std::lock_guard lock(device.mutex);
  begin(device);
  const Tensor workspace = new_workspace(device);
  Plan& plan = plan_of(device, problem, workspace.data());
  if (!plan.serves) return false;
  set_pointers(plan.descriptors, library_call(problem), problem);
  note_operation("matmul", current_stream());
  check(queue(device, plan, problem, problem.d.data, workspace.data()), "the product", problem);
  if (times_launches()) note_request(describe(problem));
  finish_launch(cudaGetLastError(), "matmul", current_stream());
  return true;
}

std::string gemm_library() {
  const Library& lt = library();
  if (!lt.reason.empty()) return "products run on own kernels, as " + lt.reason;
  return "cuBLASLt " + std::to_string(lt.version / 10000) + "." +
         std::to_string(lt.version / 100 % 100) + "." + std::to_string(lt.version % 100);
}

void try_gemm_descriptors(const GemmProblem& problem) {
  TS_CHECK_AS(UnsupportedError, library().reason.empty(), "cublasLt", library().reason);
  make_descriptors(problem, gemm_workspace_bytes(0));
}

int count_gemm_algorithms(const GemmProblem& problem) {
  TS_CHECK_AS(UnsupportedError, library().reason.empty(), "cublasLt", library().reason);
  DevicePlans& device = device_plans();
  const std::lock_guard lock(device.mutex);
  begin(device);
  return static_cast<int>(
      candidates(device, make_descriptors(problem, device.workspace_bytes), kCandidates).size());
}

}  // namespace tessera::gpu
