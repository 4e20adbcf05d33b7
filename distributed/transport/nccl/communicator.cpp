#include <tessera/distributed/transport/nccl/communicator.h>

#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include <tessera/core/error.h>

namespace tessera::distributed::nccl {
namespace {

using Clock = std::chrono::steady_clock;

std::string version_text(int version) {
  return detail::concatenate(version / 10000, '.', version / 100 % 100, '.', version % 100);
}

}  // namespace

Library::Library(const std::string& file) : path(file) {
  handle_ = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle_) {
    TS_THROW(UnsupportedError, "nccl", "the backend needs NCCL's library; ", dlerror(),
             "; install libnccl2, or give its path in TESSERA_NCCL");
  }
  std::string missing;
#define TS_NCCL_FIND(result, name, parameters)                           \
  name = reinterpret_cast<decltype(name)>(dlsym(handle_, "nccl" #name)); \
  if (!name) missing += " nccl" #name;
  TS_NCCL_FUNCTIONS(TS_NCCL_FIND)
#undef TS_NCCL_FIND
  if (GetVersion) GetVersion(&version);
  constexpr int kOldest = 21800;
  if (!missing.empty() || version < kOldest) {
    dlclose(handle_);
    TS_THROW(UnsupportedError, "nccl", "the backend needs NCCL ", version_text(kOldest),
             " or newer; ", file, " is ", version_text(version),
             missing.empty() ? "" : " and lacks", missing, "; install a newer libnccl2");
  }
}

Library::~Library() {
  // Not closed: NCCL leaves threads behind that run its code.
}

LibraryPtr Library::load() {
  static std::mutex mutex;
  static LibraryPtr& library = *new LibraryPtr;  // of the process, as the loader's handle is
  std::lock_guard lock(mutex);
  if (!library) {
    const char* path = std::getenv("TESSERA_NCCL");
    library = std::make_shared<const Library>(path && *path ? path : "libnccl.so.2");
  }
  return library;
}

ncclDataType_t data_type(DType dtype) {
  switch (dtype) {
    case kF64:
      return ncclFloat64;
    case kF32:
      return ncclFloat32;
    case kF16:
      return ncclFloat16;
    case kBF16:
      return ncclBfloat16;
    case kI64:
      return ncclInt64;
    case kI32:
      return ncclInt32;
    case kU8:
      return ncclUint8;
    default:
      break;
  }
  TS_THROW(DTypeError, "nccl", "reductions take f64, f32, f16, bf16, i64, i32 and u8; ", dtype,
           " was given; convert it first");
}

ncclRedOp_t reduction(ReduceOp op, DType dtype) {
  switch (op) {
    case ReduceOp::kSum:
      return ncclSum;
    case ReduceOp::kMean:
      TS_CHECK_DTYPE(is_floating(dtype), "nccl", "mean takes floating dtypes; ", dtype,
                     " was given; use sum");
      return ncclAvg;
    case ReduceOp::kMax:
      return ncclMax;
    case ReduceOp::kMin:
      return ncclMin;
    case ReduceOp::kProduct:
      return ncclProd;
  }
  TS_THROW(ValueError, "nccl", "unknown reduction ", static_cast<int>(op));
}

std::string make_unique_id(const Library& library) {
  ncclUniqueId id;
  const ncclResult_t result = library.GetUniqueId(&id);
  TS_CHECK_AS(DistributedError, result == ncclSuccess, "ncclGetUniqueId",
              library.GetErrorString(result), ": ", library.GetLastError(nullptr),
              "; NCCL_DEBUG=WARN says more");
  return {id.internal, sizeof id.internal};
}

Communicator::Communicator(LibraryPtr library, int rank, int size, std::string name,
                           Seconds timeout)
    : library_(std::move(library)),
      rank_(rank),
      size_(size),
      name_(std::move(name)),
      timeout_(timeout) {}

Communicator::Communicator(LibraryPtr library, const std::string& unique_id, int rank, int size,
                           const std::string& name, Seconds timeout)
    : Communicator(std::move(library), rank, size, name, timeout) {
  ncclUniqueId id;
  TS_CHECK(unique_id.size() == sizeof id.internal, "nccl", "a unique id has ", sizeof id.internal,
           " bytes; ", unique_id.size(), " were given; take it from make_unique_id on rank 0");
  std::memcpy(id.internal, unique_id.data(), sizeof id.internal);
  ncclConfig_t config;
  config.blocking = 0;
  call("ncclCommInitRankConfig",
       [&] { return library_->CommInitRankConfig(&communicator_, size_, id, rank_, &config); });
}

Communicator::~Communicator() { abort("its group has gone"); }

std::unique_ptr<Communicator> Communicator::split(int color, int key, int new_rank, int new_size,
                                                  const std::string& name, Seconds timeout) {
  std::unique_ptr<Communicator> part(new Communicator(library_, new_rank, new_size, name, timeout));
  ncclConfig_t config;
  config.blocking = 0;
  call("ncclCommSplit", [&] {
    return library_->CommSplit(communicator_, color < 0 ? kNcclNoColor : color, key,
                               &part->communicator_, &config);
  });
  if (color < 0) return nullptr;
  part->settle("ncclCommSplit", ncclInProgress);
  return part;
}

void Communicator::all_reduce(const void* send, void* receive, size_t count, DType dtype,
                              ReduceOp op, CudaStream stream) {
  const auto type = data_type(dtype);
  const auto reduce_op = reduction(op, dtype);
  call("ncclAllReduce", [&] {
    return library_->AllReduce(send, receive, count, type, reduce_op, communicator_, stream);
  });
}

void Communicator::reduce(const void* send, void* receive, size_t count, DType dtype, ReduceOp op,
                          int root, CudaStream stream) {
  const auto type = data_type(dtype);
  const auto reduce_op = reduction(op, dtype);
  call("ncclReduce", [&] {
    return library_->Reduce(send, receive, count, type, reduce_op, root, communicator_, stream);
  });
}

void Communicator::broadcast(void* data, size_t bytes, int root, CudaStream stream) {
  call("ncclBroadcast", [&] {
    return library_->Broadcast(data, data, bytes, ncclUint8, root, communicator_, stream);
  });
}

void Communicator::all_gather(const void* send, void* receive, size_t bytes, CudaStream stream) {
  call("ncclAllGather",
       [&] { return library_->AllGather(send, receive, bytes, ncclUint8, communicator_, stream); });
}

void Communicator::reduce_scatter(const void* send, void* receive, size_t receive_count,
                                  DType dtype, ReduceOp op, CudaStream stream) {
  const auto type = data_type(dtype);
  const auto reduce_op = reduction(op, dtype);
  call("ncclReduceScatter", [&] {
    return library_->ReduceScatter(send, receive, receive_count, type, reduce_op, communicator_,
                                   stream);
  });
}

void Communicator::exchange(std::span<const Part> sends, std::span<const Part> receives,
                            CudaStream stream) {
  std::vector<Message> messages;
  for (int peer = 0; peer < size_; ++peer) {
    const auto i = static_cast<size_t>(peer);
    const bool in_place = peer == rank_ && i < sends.size() && i < receives.size() &&
                          sends[i].data == receives[i].data;
    if (in_place) continue;
    if (i < sends.size()) messages.push_back({peer, true, sends[i]});
    if (i < receives.size()) messages.push_back({peer, false, receives[i]});
  }
  exchange(messages, stream);
}

void Communicator::exchange(std::span<const Message> messages, CudaStream stream) {
  call("ncclGroupEnd", [&] {
    // The group is closed whatever happens inside, or the thread's later calls would be queued.
    ncclResult_t first = library_->GroupStart();
    if (first != ncclSuccess) return first;
    auto note = [&](ncclResult_t result) {
      if (first == ncclSuccess && result != ncclInProgress) first = result;
    };
    for (const auto& [peer, is_sent, part] : messages) {
      const auto bytes = static_cast<size_t>(part.bytes);
      if (bytes == 0) continue;
      note(is_sent ? library_->Send(part.data, bytes, ncclUint8, peer, communicator_, stream)
                   : library_->Recv(part.data, bytes, ncclUint8, peer, communicator_, stream));
    }
    const ncclResult_t end = library_->GroupEnd();
    return first != ncclSuccess ? first : end;
  });
}

void Communicator::check_async() {
  ncclResult_t state = ncclSuccess, result = ncclInvalidUsage;
  {
    std::lock_guard lock(mutex_);
    if (!aborted_) result = library_->CommGetAsyncError(communicator_, &state);
  }
  if (result != ncclSuccess) fail("ncclCommGetAsyncError", result);
  if (state != ncclSuccess && state != ncclInProgress) fail("ncclCommGetAsyncError", state);
}

void Communicator::abort(const std::string& reason) noexcept {
  std::lock_guard lock(mutex_);  // no call is under way: none of them blocks
  if (aborted_.exchange(true)) return;
  reason_ = reason;
  // Frees the communicator as well, and ends its kernels.
  if (communicator_) library_->CommAbort(communicator_);
  communicator_ = nullptr;
}

void Communicator::shutdown() {
  if (aborted_) return;
  call("ncclCommFinalize", [&] { return library_->CommFinalize(communicator_); });
  std::lock_guard lock(mutex_);
  if (aborted_.exchange(true)) return;
  reason_ = "it has been shut down";
  library_->CommDestroy(communicator_);
  communicator_ = nullptr;
}

void Communicator::call(const char* name, const std::function<ncclResult_t()>& function) {
  ncclResult_t result;
  {
    std::lock_guard lock(mutex_);
    result = aborted_ ? ncclInvalidUsage : function();
  }
  settle(name, result);
}

// Follows a call to its end: NCCL answers "in progress" while its own thread works.
void Communicator::settle(const char* name, ncclResult_t result) {
  const Clock::time_point deadline =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(timeout_);
  auto pause = std::chrono::microseconds(1);
  while (result == ncclInProgress) {
    ncclResult_t answer = ncclInvalidUsage;
    {
      std::lock_guard lock(mutex_);
      if (!aborted_) answer = library_->CommGetAsyncError(communicator_, &result);
    }
    if (answer != ncclSuccess) fail(name, answer);
    if (result != ncclInProgress) break;
    if (Clock::now() > deadline) {
      const std::string text =
          detail::concatenate("rank ", rank_, " waited ", timeout_.count(), " s in ", name);
      abort(text);
      TS_THROW(DistributedError, name, "group '", name_, "': all ranks have to take part; ", text,
               "; see which rank is missing in the others' messages");
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(1000));
  }
  if (result != ncclSuccess) fail(name, result);
}

void Communicator::fail(const char* name, ncclResult_t result) {
  TS_CHECK_AS(DistributedError, !aborted_, name, "group '", name_,
              "' can no longer be used: ", reason(), "; start the job again");
  const std::string text = detail::concatenate(library_->GetErrorString(result), ": ",
                                               library_->GetLastError(communicator_));
  const bool usable = result == ncclInvalidArgument || result == ncclInvalidUsage;
  if (!usable) abort(detail::concatenate(name, " failed: ", text));
  TS_THROW(DistributedError, name, "group '", name_, "': ", text,
           usable ? "; the group can still be used" : "; the group is aborted",
           "; NCCL_DEBUG=WARN says more");
}

std::string Communicator::reason() const {
  std::lock_guard lock(mutex_);
  return reason_;
}

}  // namespace tessera::distributed::nccl
