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
#include <tessera/core/cuda/libraries/gemm_choice.h>
#include <tessera/core/cuda/libraries/gemm_table.h>
#include <tessera/core/cuda/libraries/lazy_library.h>
#include <tessera/core/cuda/streams.h>
#include <tessera/core/error.h>
#include <tessera/core/tensor/empty.h>

namespace tessera::gpu {
namespace {

constexpr int kRounds = 7;                         // of which the median counts
constexpr size_t kFlushBytes = size_t{128} << 20;  // more than any L2 cache holds

// ---- The library --------------------------------------------------------------------------------

// clang-format off
#define TS_CUBLASLT_FUNCTIONS(F)                                                                 \
  F(GetVersion) F(Create) F(GetStatusName) F(Matmul) F(MatmulAlgoGetHeuristic)                   \
  F(MatmulAlgoConfigGetAttribute)                                                                \
  F(MatmulDescCreate) F(MatmulDescDestroy) F(MatmulDescSetAttribute) F(MatmulDescGetAttribute)   \
  F(MatrixLayoutCreate) F(MatrixLayoutDestroy) F(MatrixLayoutSetAttribute)                       \
  F(MatrixLayoutGetAttribute)                                                                    \
  F(MatmulPreferenceCreate) F(MatmulPreferenceDestroy) F(MatmulPreferenceSetAttribute)           \
  F(MatmulPreferenceGetAttribute)
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
  if (status == CUBLAS_STATUS_SUCCESS) return;
  const bool refused = gemm_answer(status) != GemmAnswer::kFailed;
  TS_THROW(CudaError, "cublasLt", what, " failed with ", library().GetStatusName(status), " for ",
           describe(problem),
           refused
               ? "; this should have been refused by validate()"
               : "; is there memory left on the device? TESSERA_SYNC=1 names what failed before");
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

static_assert(kGemmReductionSchemes ==
              (CUBLASLT_REDUCTION_SCHEME_NONE | CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));

// ---- Descriptors --------------------------------------------------------------------------------

template <class T>
using Owned = std::unique_ptr<std::remove_pointer_t<T>, cublasStatus_t (*)(T)>;

struct Layout {
  Owned<cublasLtMatrixLayout_t> handle{nullptr, nullptr};
  LibraryMatrix matrix = {};  // as it was last described
  int64_t batch = 1;

  template <class T>
  void set(cublasLtMatrixLayoutAttribute_t attribute, const T& value, const GemmProblem& problem) {
    check(library().MatrixLayoutSetAttribute(handle.get(), attribute, &value, sizeof value),
          "the sizes of a matrix", problem);
  }
  // The same matrix with other sizes.
  void resize(const LibraryMatrix& x, int64_t count, const GemmProblem& problem) {
    if (x.rows != matrix.rows) {
      set(CUBLASLT_MATRIX_LAYOUT_ROWS, static_cast<uint64_t>(x.rows), problem);
    }
    if (x.columns != matrix.columns) {
      set(CUBLASLT_MATRIX_LAYOUT_COLS, static_cast<uint64_t>(x.columns), problem);
    }
    if (x.leading != matrix.leading) set(CUBLASLT_MATRIX_LAYOUT_LD, x.leading, problem);
    if (count != batch) {
      set(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(count), problem);
    }
    if (count > 1 && (batch == 1 || x.batch_stride != matrix.batch_stride)) {
      set(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, x.batch_stride, problem);
    }
    matrix = x;
    batch = count;
  }
};

Layout make_layout(const LibraryMatrix& x, int64_t batch, const GemmProblem& problem) {
  cublasLtMatrixLayout_t handle = nullptr;
  check(library().MatrixLayoutCreate(&handle, type_of(x.dtype), static_cast<uint64_t>(x.rows),
                                     static_cast<uint64_t>(x.columns), x.leading),
        "a matrix layout", problem);
  Layout layout{.handle = {handle, library().MatrixLayoutDestroy}, .matrix = x};
  layout.resize(x, batch, problem);
  return layout;
}

struct Descriptors {
  Owned<cublasLtMatmulDesc_t> operation{nullptr, nullptr};
  Layout a, b, d;
  Owned<cublasLtMatmulPreference_t> preference{nullptr, nullptr};
};

template <class T>
void set(const Descriptors& all, cublasLtMatmulDescAttributes_t attribute, const T& value,
         const GemmProblem& problem) {
  check(library().MatmulDescSetAttribute(all.operation.get(), attribute, &value, sizeof value),
        "an attribute of the product", problem);
}

// Addresses and sizes of a call; the rest stays from call to call.
void describe_call(Descriptors& all, const LibraryCall& call, const GemmProblem& problem) {
  const GemmAddresses addresses = addresses_of(problem, call);
  set(all, CUBLASLT_MATMUL_DESC_BIAS_POINTER, addresses.bias, problem);
  set(all, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, addresses.aux, problem);
  set(all, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, addresses.a_scale, problem);
  set(all, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, addresses.b_scale, problem);
  set(all, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, addresses.d_scale, problem);
  all.a.resize(call.a, call.batch, problem);
  all.b.resize(call.b, call.batch, problem);
  all.d.resize(call.d, call.batch, problem);
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
  all.a = make_layout(call.a, call.batch, problem);
  all.b = make_layout(call.b, call.batch, problem);
  all.d = make_layout(call.d, call.batch, problem);
  describe_call(all, call, problem);

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
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, kGemmReductionSchemes);
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(call.a));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(call.b));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(call.c));
  prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(call.d));
  return all;
}

// ---- Plans --------------------------------------------------------------------------------------

// Of one key.
struct Plan {
  Descriptors descriptors;
  GemmChoice choice = {};
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

Device current_gpu() {
  int index = 0;
  TS_CUDA(cudaGetDevice(&index));
  return cuda(index);
}

// What the user's table has, else that of the card.
std::optional<GemmAlgorithm> find_known(const GemmTable& table, const std::string& key) {
  std::optional<GemmAlgorithm> entry = table.find(key);
  return entry ? entry : find_shipped(key);
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

struct TimingEvent {
  cudaEvent_t event = nullptr;
  TimingEvent() { TS_CUDA(cudaEventCreateWithFlags(&event, cudaEventDefault)); }
  ~TimingEvent() { cudaEventDestroy(event); }
  TimingEvent(const TimingEvent&) = delete;
  TimingEvent& operator=(const TimingEvent&) = delete;
};

// Microseconds of what `work` queues, from memory that the L2 cache has forgotten; nothing where
// it queues nothing.
class Stopwatch {
 public:
  Stopwatch() : flush_(raw::empty({static_cast<int64_t>(kFlushBytes)}, kU8, current_gpu())) {}

  std::optional<double> time(const std::function<bool()>& work) const {
    const cudaStream_t stream = current_stream();
    TS_CUDA(cudaMemsetAsync(flush_.data(), 0, kFlushBytes, stream));
    TS_CUDA(cudaEventRecord(start_.event, stream));
    if (!work()) return {};
    TS_CUDA(cudaEventRecord(end_.event, stream));
    TS_CUDA(cudaEventSynchronize(end_.event));
    float milliseconds = 0;
    TS_CUDA(cudaEventElapsedTime(&milliseconds, start_.event, end_.event));
    return 1e3 * static_cast<double>(milliseconds);
  }

 private:
  Tensor flush_;
  TimingEvent start_, end_;
};

// One product of a plan.
class LibraryCalls final : public GemmCalls {
 public:
  LibraryCalls(DevicePlans& device, Plan& plan, const GemmProblem& problem, void* workspace)
      : device_(device), plan_(plan), problem_(problem), workspace_(workspace) {}

  GemmAnswer suggest(bool of_key, int most, std::vector<std::string>& algorithms) override {
    Descriptors& all = plan_.descriptors;
    const GemmProblem asked = of_key ? rounded(problem_) : problem_;
    describe_call(all, library_call(asked), asked);
    std::vector<cublasLtMatmulHeuristicResult_t> found(static_cast<size_t>(most));
    int count = 0;
    status_ = library().MatmulAlgoGetHeuristic(
        device_.handle, all.operation.get(), all.a.handle.get(), all.b.handle.get(),
        all.d.handle.get(), all.d.handle.get(), all.preference.get(), most, found.data(), &count);
    describe_call(all, library_call(problem_), problem_);
    if (status_ != CUBLAS_STATUS_SUCCESS) return gemm_answer(status_);
    found.resize(static_cast<size_t>(count));
    for (const auto& one : found) {
      if (one.state == CUBLAS_STATUS_SUCCESS) algorithms.push_back(bytes_of(one.algo));
    }
    if (algorithms.empty()) {  // what kept them from being offered
      for (const auto& one : found) status_ = one.state;
    }
    return gemm_answer(status_);
  }

  bool allows(const std::string& algorithm) override {
    const cublasLtMatmulAlgo_t algo = algorithm_of(algorithm);
    uint32_t scheme = 0;
    size_t written = 0;
    status_ = library().MatmulAlgoConfigGetAttribute(&algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME,
                                                     &scheme, sizeof scheme, &written);
    return status_ == CUBLAS_STATUS_SUCCESS && allows_reduction(scheme);
  }

  // On the problem's own operands, and into its own result where nothing is added to that. Outputs
  // beside the result (bias gradients, aux) would be written while measuring: they are what the
  // product that follows writes anyway, with the same operands.
  std::optional<FastestCandidate> measure(const std::vector<std::string>& algorithms) override {
    const Stopwatch watch;
    Tensor own;
    void* target = problem_.d.data;
    if (reads_result(problem_)) {
      const int64_t elements =
          (problem_.batch - 1) * problem_.d.batch_stride + problem_.M * problem_.d.leading;
      own = raw::empty({elements}, problem_.d.dtype, current_gpu());
      target = own.data();
      const int64_t bytes = elements * size_of(own.dtype());
      TS_CUDA(cudaMemsetAsync(target, 0, static_cast<size_t>(bytes), current_stream()));
    }
    return fastest_candidate(algorithms.size(), kRounds, [&](size_t i) {
      return watch.time([&] { return queue(algorithms[i], target) == CUBLAS_STATUS_SUCCESS; });
    });
  }

  GemmAnswer run(const std::string& algorithm) override {
    status_ = queue(algorithm, problem_.d.data);
    return gemm_answer(status_);
  }

  [[noreturn]] void fail(const char* what) override {
    check(status_, what, problem_);
    TS_THROW(CudaError, "cublasLt", what, " found nothing for ", describe(problem_));
  }

 private:
  static std::string bytes_of(const cublasLtMatmulAlgo_t& algorithm) {
    return {reinterpret_cast<const char*>(&algorithm), sizeof algorithm};
  }
  static cublasLtMatmulAlgo_t algorithm_of(const std::string& bytes) {
    cublasLtMatmulAlgo_t algorithm;
    TS_CHECK_AS(FormatError, bytes.size() == sizeof algorithm, "gemm table",
                "an algorithm of the table of products (TESSERA_GEMM_TABLE) has ", bytes.size(),
                " bytes, not ", sizeof algorithm, "; delete the file, and it is measured anew");
    std::memcpy(&algorithm, bytes.data(), sizeof algorithm);
    return algorithm;
  }

  cublasStatus_t queue(const std::string& bytes, void* target) {
    const GemmProblem& problem = problem_;
    const LibraryCall call = library_call(problem);
    const cublasLtMatmulAlgo_t algorithm = algorithm_of(bytes);
    const float alpha = static_cast<float>(problem.alpha), beta = static_cast<float>(problem.beta);
    const bool is_double = problem.a.dtype == kF64;
    const void* const a = is_double ? static_cast<const void*>(&problem.alpha) : &alpha;
    const void* const b = is_double ? static_cast<const void*>(&problem.beta) : &beta;
    const Descriptors& all = plan_.descriptors;
    return library().Matmul(device_.handle, all.operation.get(), a, call.a.data, all.a.handle.get(),
                            call.b.data, all.b.handle.get(), b,
                            problem.c != nullptr ? problem.c : target, all.d.handle.get(), target,
                            all.d.handle.get(), &algorithm, workspace_,
                            static_cast<size_t>(device_.workspace_bytes), current_stream());
  }

  DevicePlans& device_;
  Plan& plan_;
  const GemmProblem& problem_;
  void* workspace_;
  cublasStatus_t status_ = CUBLAS_STATUS_SUCCESS;
};

GemmKnowledge knowledge_of(const DevicePlans& device, const std::string& name) {
  GemmTable* const known = process_gemm_table();
  if (known == nullptr) return {};
  const std::string key = table_key(device, name);
  GemmKnowledge knowledge{.find = [known, key] { return find_known(*known, key); }};
  // A capture cannot wait for what it measures.
  if (Capture::current() == nullptr) {
    knowledge.keep = [known, key](const GemmAlgorithm& fastest) { known->add(key, fastest); };
  }
  return knowledge;
}

// For a product that validate() allows, with the addresses and sizes of its call in place.
Plan& plan_of(DevicePlans& device, const GemmProblem& problem, const std::string& name) {
  auto place = device.plans.find(name);
  if (place == device.plans.end()) {
    place =
        device.plans
            .emplace(name, Plan{.descriptors = make_descriptors(problem, device.workspace_bytes)})
            .first;
  } else {
    describe_call(place->second.descriptors, library_call(problem), problem);
  }
  return place->second;
}

Tensor new_workspace(const DevicePlans& device) {
  // The allocator hands it out again to the same stream only.
  return raw::empty({device.workspace_bytes}, kU8, current_gpu());
}

// Whether the library has an algorithm, which is then chosen.
bool is_served(DevicePlans& device, const GemmProblem& problem, void* workspace) {
  const std::string name = key_of(problem);
  Plan& plan = plan_of(device, problem, name);
  const RelaxedCapture relaxed;  // the library loads kernels
  LibraryCalls calls(device, plan, problem, workspace);
  settle(plan.choice, knowledge_of(device, name), calls);
  return plan.choice.is_served();
}

}  // namespace

bool fused_gemm_wins(const GemmProblem& problem, const std::function<void()>& rest) {
  if (!library().reason.empty() || !validate(problem).empty()) return false;
  const GemmFusion fusion = Context::current().slot<GemmOptions>().fusion;
  GemmTable* const known = process_gemm_table();
  const GemmProblem apart = without_epilogue(problem);
  DevicePlans& device = device_plans();
  std::optional<GemmAlgorithm> whole, product;
  std::string decision;
  {
    const std::lock_guard lock(device.mutex);
    begin(device);
    std::optional<std::string> entry;
    if (known != nullptr && fusion != GemmFusion::kNever && fusion != GemmFusion::kAlways) {
      decision = table_key(device, "fused? " + key_of(problem));
      if (const auto found = find_known(*known, decision)) entry = found->bytes;
    }
    if (const auto answer = fused_without_measuring(fusion, problem, entry)) return *answer;
    if (known == nullptr || Capture::current() != nullptr) return fused_by_rule(problem);
    const Tensor workspace = new_workspace(device);
    if (!is_served(device, problem, workspace.data())) return false;
    if (!is_served(device, apart, workspace.data())) return true;
    whole = find_known(*known, table_key(device, key_of(problem)));
    product = find_known(*known, table_key(device, key_of(apart)));
  }
  if (!whole || !product) return fused_by_rule(problem);  // there was no memory to measure with
  const Stopwatch watch;
  const auto passes = fastest_candidate(1, kRounds, [&](size_t) {
    return watch.time([&] {
      rest();
      return true;
    });
  });
  const double together = product->microseconds + passes.value_or(FastestCandidate{}).microseconds;
  const bool wins = whole->microseconds < together;
  known->add(decision, {wins ? "fused" : "apart", wins ? whole->microseconds : together});
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
  const std::string name = key_of(problem);
  Plan& plan = plan_of(device, problem, name);
  LibraryCalls calls(device, plan, problem, workspace.data());
  note_operation("matmul", current_stream());
  {
    std::optional<RelaxedCapture> relaxed;  // the library loads kernels
    GemmKnowledge knowledge;
    if (!plan.choice.settled) {
      relaxed.emplace();
      knowledge = knowledge_of(device, name);
    }
    if (!run_chosen(plan.choice, knowledge, calls)) return false;
  }
  if (GemmTable* const known = process_gemm_table()) known->write_due();
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

GemmDescription describe_to_library(const GemmProblem& first, const GemmProblem& then) {
  TS_CHECK_AS(UnsupportedError, library().reason.empty(), "cublasLt", library().reason);
  Descriptors all = make_descriptors(first, gemm_workspace_bytes(0));
  describe_call(all, library_call(then), then);
  GemmDescription result;
  size_t written = 0;
  const auto operation = [&](cublasLtMatmulDescAttributes_t attribute, const void*& value) {
    check(library().MatmulDescGetAttribute(all.operation.get(), attribute, &value, sizeof value,
                                           &written),
          "reading an attribute of the product", then);
  };
  operation(CUBLASLT_MATMUL_DESC_BIAS_POINTER, result.addresses.bias);
  operation(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, result.addresses.aux);
  operation(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, result.addresses.a_scale);
  operation(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, result.addresses.b_scale);
  operation(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, result.addresses.d_scale);
  check(library().MatmulPreferenceGetAttribute(
            all.preference.get(), CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
            &result.reduction_schemes, sizeof result.reduction_schemes, &written),
        "reading the preference", then);
  const auto matrix = [&](const Layout& layout, LibraryMatrix& x) {
    const auto read = [&](cublasLtMatrixLayoutAttribute_t attribute, auto& value) {
      check(library().MatrixLayoutGetAttribute(layout.handle.get(), attribute, &value, sizeof value,
                                               &written),
            "reading a matrix layout", then);
    };
    read(CUBLASLT_MATRIX_LAYOUT_ROWS, x.rows);
    read(CUBLASLT_MATRIX_LAYOUT_COLS, x.columns);
    read(CUBLASLT_MATRIX_LAYOUT_LD, x.leading);
    read(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, x.batch_stride);
    read(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, result.batch);
  };
  matrix(all.a, result.a);
  matrix(all.b, result.b);
  matrix(all.d, result.d);
  return result;
}

int count_gemm_algorithms(const GemmProblem& problem) {
  TS_CHECK_AS(UnsupportedError, library().reason.empty(), "cublasLt", library().reason);
  DevicePlans& device = device_plans();
  const std::lock_guard lock(device.mutex);
  begin(device);
  Plan plan{.descriptors = make_descriptors(problem, device.workspace_bytes)};
  LibraryCalls calls(device, plan, problem, nullptr);
  std::vector<std::string> found;
  const GemmAnswer answer = calls.suggest(false, kMeasuredCandidates, found);
  if (answer != GemmAnswer::kDone && answer != GemmAnswer::kNotSupported) {
    calls.fail("the choice of an algorithm");
  }
  return static_cast<int>(found.size());
}

}  // namespace tessera::gpu
