#include "mock_nccl.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <tessera/core/half.h>

// As NCCL's own, at file level.
using namespace tessera::distributed::nccl;

namespace {

// One collective of a group: what each rank brought, and the function that the last one runs.
struct Rendezvous {
  int arrived = 0;
  // On streams only:
  std::set<int> ranks;  // that have come
  bool ran = false;
  int left = 0;
  std::vector<const void*> sends;
  std::vector<void*> receives;
};

struct MockGroup {
  int size = 0;
  int joined = 0;
  std::shared_ptr<int> missing;  // of a split: ranks of the parent that have not called yet
  std::map<long, Rendezvous> collectives;  // by sequence number
  std::map<std::pair<int, int>, std::vector<std::pair<const void*, size_t>>> sent;  // from, to
  std::map<std::pair<int, int>, std::vector<std::pair<void*, size_t>>> awaited;
  // On streams only:
  std::map<std::pair<int, int>, std::vector<std::vector<char>>> mail;  // from, to
  std::map<std::pair<int, int>, size_t> posted, expected;  // messages that a stream has come to
  std::set<int> aborted;
};
using GroupPtr = std::shared_ptr<MockGroup>;

std::mutex mutex;
std::condition_variable changed;
std::map<std::string, std::shared_ptr<MockGroup>> groups;  // by unique id
std::map<std::string, std::shared_ptr<int>> splits;        // see MockGroup::missing
std::map<std::string, int> calls;
std::map<std::string, std::pair<ncclResult_t, int>> failures;
ncclResult_t async_error = ncclSuccess;
int ids = 0, alive = 0;
MockEnqueue enqueue = nullptr;

}  // namespace

struct tessera::distributed::nccl::ncclComm {
  std::shared_ptr<MockGroup> group;
  int rank = 0;
  long sequence = 0;
  int splits = 0;
  // On streams only: collectives that its stream has come to. A graph comes to them at each replay.
  std::shared_ptr<long> come_to = std::make_shared<long>(0);
};

namespace {

bool intercepted(const char* function, ncclResult_t* result) {
  ++calls[function];
  auto found = failures.find(function);
  if (found == failures.end() || found->second.second == 0) return false;
  --found->second.second;
  *result = found->second.first;
  return true;
}

template <class T>
void combine(T* into, const T* from, size_t count, ncclRedOp_t op) {
  for (size_t i = 0; i < count; ++i) {
    switch (op) {
      case ncclSum:
      case ncclAvg:
        into[i] = static_cast<T>(into[i] + from[i]);
        break;
      case ncclProd:
        into[i] = static_cast<T>(into[i] * from[i]);
        break;
      case ncclMax:
        into[i] = into[i] > from[i] ? into[i] : from[i];
        break;
      default:
        into[i] = into[i] < from[i] ? into[i] : from[i];
        break;
    }
  }
}

template <class T>
void reduce_typed(const std::vector<const void*>& sends, size_t offset, void* into, size_t count,
                  ncclRedOp_t op) {
  std::vector<T> sum(count);
  std::memcpy(sum.data(), static_cast<const T*>(sends[0]) + offset, count * sizeof(T));
  for (size_t r = 1; r < sends.size(); ++r) {
    combine(sum.data(), static_cast<const T*>(sends[r]) + offset, count, op);
  }
  if (op == ncclAvg) {
    for (T& value : sum) value = static_cast<T>(value / static_cast<T>(sends.size()));
  }
  std::memcpy(into, sum.data(), count * sizeof(T));
}

// Of 16 bits: in f32, rounded once.
template <class T>
void reduce_narrow(const std::vector<const void*>& sends, size_t offset, void* into, size_t count,
                   ncclRedOp_t op) {
  std::vector<std::vector<float>> wide;
  std::vector<const void*> pointers;
  for (const void* send : sends) {
    const T* const from = static_cast<const T*>(send) + offset;
    wide.emplace_back(count);
    for (size_t i = 0; i < count; ++i) wide.back()[i] = static_cast<float>(from[i]);
  }
  for (const auto& values : wide) pointers.push_back(values.data());
  std::vector<float> sum(count);
  reduce_typed<float>(pointers, 0, sum.data(), count, op);
  for (size_t i = 0; i < count; ++i) static_cast<T*>(into)[i] = T(sum[i]);
}

void reduce(const std::vector<const void*>& sends, size_t offset, void* into, size_t count,
            ncclDataType_t type, ncclRedOp_t op) {
  if (type == ncclBfloat16) reduce_narrow<tessera::bf16>(sends, offset, into, count, op);
  if (type == ncclFloat16) reduce_narrow<tessera::f16>(sends, offset, into, count, op);
  if (type == ncclFloat32) reduce_typed<float>(sends, offset, into, count, op);
  if (type == ncclFloat64) reduce_typed<double>(sends, offset, into, count, op);
  if (type == ncclInt64) reduce_typed<int64_t>(sends, offset, into, count, op);
}

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclFloat64:
    case ncclInt64:
      return 8;
    case ncclFloat32:
    case ncclInt32:
      return 4;
    case ncclFloat16:
    case ncclBfloat16:
      return 2;
    default:
      return 1;
  }
}

// A rank's stream has come to the collective. Whether it can go on.
bool come(MockGroup& group, int rank, long sequence, const void* send, void* receive) {
  const std::lock_guard lock(mutex);
  if (group.aborted.contains(rank)) return true;
  Rendezvous& rendezvous = group.collectives[sequence];
  if (rendezvous.ranks.insert(rank).second) {
    rendezvous.sends.resize(static_cast<size_t>(group.size));
    rendezvous.receives.resize(static_cast<size_t>(group.size));
    rendezvous.sends[static_cast<size_t>(rank)] = send;
    rendezvous.receives[static_cast<size_t>(rank)] = receive;
  }
  return rendezvous.ran || rendezvous.ranks.size() == static_cast<size_t>(group.size);
}

// The first rank to go on does the work of all: the others' streams still stand here.
void go_on(MockGroup& group, int rank, long sequence,
           const std::function<void(const Rendezvous&)>& body) {
  const std::lock_guard lock(mutex);
  if (group.aborted.contains(rank)) return;
  Rendezvous& rendezvous = group.collectives[sequence];
  if (!rendezvous.ran) body(rendezvous);
  rendezvous.ran = true;
  if (++rendezvous.left == group.size) group.collectives.erase(sequence);
}

// Queues this rank's part of a collective; the last rank runs `body` for all.
ncclResult_t meet(const char* function, ncclComm_t communicator, const void* send, void* receive,
                  CudaStream stream, const std::function<void(const Rendezvous&)>& body) {
  std::unique_lock lock(mutex);
  ncclResult_t result;
  if (intercepted(function, &result)) return result;
  if (enqueue != nullptr) {
    const GroupPtr group = communicator->group;
    const int rank = communicator->rank;
    const std::shared_ptr<long> come_to = communicator->come_to;
    const auto sequence = std::make_shared<std::optional<long>>();  // while its stream stands here
    lock.unlock();  // streams may run meanwhile, and they come here
    enqueue(
        stream,
        [=] {
          if (!*sequence) *sequence = (*come_to)++;
          return come(*group, rank, **sequence, send, receive);
        },
        [=] {
          go_on(*group, rank, **sequence, body);
          sequence->reset();
        });
    return ncclSuccess;
  }
  MockGroup& group = *communicator->group;
  const long sequence = communicator->sequence++;
  Rendezvous& rendezvous = group.collectives[sequence];
  rendezvous.sends.resize(static_cast<size_t>(group.size));
  rendezvous.receives.resize(static_cast<size_t>(group.size));
  rendezvous.sends[static_cast<size_t>(communicator->rank)] = send;
  rendezvous.receives[static_cast<size_t>(communicator->rank)] = receive;
  if (++rendezvous.arrived == group.size) {
    body(rendezvous);
    group.collectives.erase(sequence);
    changed.notify_all();
  }
  return ncclSuccess;
}

thread_local ncclComm_t last_used = nullptr;

// Sends and receives between ncclGroupStart and ncclGroupEnd, on streams.
struct Message {
  ncclComm_t communicator;
  CudaStream stream;
  int peer;
  const void* from;  // null: received
  void* to;
  size_t bytes;
};
thread_local std::vector<Message> messages;

// Longer messages are not sent ahead: they end when their receiver's stream has come to them.
constexpr size_t kSentAhead = 4096;

void queue_messages() {
  if (messages.empty()) return;
  const auto all = std::make_shared<std::vector<Message>>(std::exchange(messages, {}));
  const GroupPtr group = all->front().communicator->group;
  const int rank = all->front().communicator->rank;
  const auto places = std::make_shared<std::vector<size_t>>();  // among the messages of two ranks
  const auto ready = [=] {
    const std::lock_guard lock(mutex);
    if (group->aborted.contains(rank)) return true;
    for (size_t i = places->size(); i < all->size(); ++i) {
      const Message& message = (*all)[i];
      if (message.from == nullptr) {
        places->push_back(++group->expected[{message.peer, rank}]);
        continue;
      }
      const char* bytes = static_cast<const char*>(message.from);
      group->mail[{rank, message.peer}].emplace_back(bytes, bytes + message.bytes);
      places->push_back(++group->posted[{rank, message.peer}]);
    }
    for (size_t i = 0; i < all->size(); ++i) {
      const Message& message = (*all)[i];
      const bool is_sent = message.from != nullptr;
      const size_t there =
          is_sent ? group->expected[{rank, message.peer}] : group->posted[{message.peer, rank}];
      if (!(is_sent && message.bytes <= kSentAhead) && there < (*places)[i]) return false;
    }
    return true;
  };
  const auto receive = [=] {
    const std::lock_guard lock(mutex);
    if (group->aborted.contains(rank)) return;
    for (const Message& message : *all) {
      if (message.from != nullptr) continue;
      auto& mail = group->mail[{message.peer, rank}];
      std::memcpy(message.to, mail.front().data(), std::min(mail.front().size(), message.bytes));
      mail.erase(mail.begin());
    }
    places->clear();  // a graph comes again
  };
  enqueue(all->front().stream, ready, receive);
}

}  // namespace

extern "C" {

void mock_nccl_fail(const char* function, ncclResult_t result, int times) {
  std::lock_guard lock(mutex);
  failures[function] = {result, times};
}
void mock_nccl_set_async_error(ncclResult_t result) {
  std::lock_guard lock(mutex);
  async_error = result;
}
bool mock_nccl_synchronize() {
  std::unique_lock lock(mutex);
  const MockGroup& group = *last_used->group;
  const int rank = last_used->rank;
  return changed.wait_for(lock, std::chrono::seconds(10), [&] {
    bool done =
        group.collectives.empty() || group.collectives.begin()->first >= last_used->sequence;
    for (const auto& [pair, parts] : group.sent) done &= pair.first != rank;
    for (const auto& [pair, parts] : group.awaited) done &= pair.second != rank;
    return done;
  });
}
int mock_nccl_calls(const char* function) {
  std::lock_guard lock(mutex);
  return calls[function];
}
int mock_nccl_alive() {
  std::lock_guard lock(mutex);
  return alive;
}
void mock_nccl_use_streams(MockEnqueue function) {
  std::lock_guard lock(mutex);
  enqueue = function;
}
void mock_nccl_reset() {
  std::lock_guard lock(mutex);
  calls.clear();
  failures.clear();
  async_error = ncclSuccess;
}

ncclResult_t ncclGetVersion(int* version) {
  const char* pretended = std::getenv("MOCK_NCCL_VERSION");
  *version = pretended ? std::atoi(pretended) : 22809;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  std::lock_guard lock(mutex);
  ncclResult_t result;
  if (intercepted("ncclGetUniqueId", &result)) return result;
  std::memset(id->internal, 0, sizeof id->internal);
  const std::string text = "mock " + std::to_string(++ids);
  std::memcpy(id->internal, text.data(), text.size());
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  return result == ncclInvalidArgument ? "invalid argument" : "unhandled system error";
}
const char* ncclGetLastError(ncclComm_t) { return "said by the mock"; }

ncclResult_t ncclCommInitRankConfig(ncclComm_t* communicator, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  std::lock_guard lock(mutex);
  ncclResult_t result;
  if (intercepted("ncclCommInitRankConfig", &result)) return result;
  if (config->blocking != 0) return ncclInvalidUsage;  // could not be aborted
  auto& group = groups[id.internal];
  if (!group) group = std::make_shared<MockGroup>();
  group->size = size;
  ++group->joined;
  ++alive;
  *communicator = new ncclComm{group, rank};
  return ncclInProgress;
}
static std::string name_of_split(ncclComm_t parent) {
  return std::to_string(reinterpret_cast<uintptr_t>(parent->group.get())) + " split " +
         std::to_string(parent->splits++);
}
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* part,
                           ncclConfig_t* config) {
  std::lock_guard lock(mutex);
  ncclResult_t result;
  if (intercepted("ncclCommSplit", &result)) return result;
  if (config->blocking != 0) return ncclInvalidUsage;
  *part = nullptr;
  const std::string split = name_of_split(parent);
  auto& missing = splits[split];
  if (!missing) missing = std::make_shared<int>(parent->group->size);
  --*missing;
  if (color == kNcclNoColor) return ncclSuccess;
  auto& group = groups[split + " color " + std::to_string(color)];
  if (!group) group = std::make_shared<MockGroup>();
  group->missing = missing;
  // The callers number their keys as ranks.
  ++group->size;
  ++group->joined;
  ++alive;
  *part = new ncclComm{group, key};
  return ncclInProgress;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t communicator, ncclResult_t* state) {
  std::lock_guard lock(mutex);
  ++calls["ncclCommGetAsyncError"];
  const MockGroup& group = *communicator->group;
  if (group.joined < group.size || (group.missing && *group.missing > 0)) {
    *state = ncclInProgress;
  } else {
    *state = async_error;
  }
  return ncclSuccess;
}
ncclResult_t ncclCommFinalize(ncclComm_t) {
  std::lock_guard lock(mutex);
  ncclResult_t result;
  return intercepted("ncclCommFinalize", &result) ? result : ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t communicator) {
  std::lock_guard lock(mutex);
  ++calls["ncclCommDestroy"];
  --alive;
  delete communicator;
  return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t communicator) {
  std::lock_guard lock(mutex);
  ++calls["ncclCommAbort"];
  --alive;
  communicator->group->aborted.insert(communicator->rank);
  delete communicator;
  return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t communicator, CudaStream stream) {
  last_used = communicator;
  return meet("ncclAllReduce", communicator, send, receive, stream, [=](const Rendezvous& all) {
    std::vector<char> result(count * size_of(type));
    reduce(all.sends, 0, result.data(), count, type, op);
    for (void* to : all.receives) std::memcpy(to, result.data(), result.size());
  });
}
ncclResult_t ncclReduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t communicator, CudaStream stream) {
  last_used = communicator;
  return meet("ncclReduce", communicator, send, receive, stream, [=](const Rendezvous& all) {
    reduce(all.sends, 0, all.receives[static_cast<size_t>(root)], count, type, op);
  });
}
ncclResult_t ncclBroadcast(const void* send, void* receive, size_t count, ncclDataType_t type,
                           int root, ncclComm_t communicator, CudaStream stream) {
  last_used = communicator;
  return meet("ncclBroadcast", communicator, send, receive, stream, [=](const Rendezvous& all) {
    const void* from = all.sends[static_cast<size_t>(root)];
    for (void* to : all.receives) std::memmove(to, from, count * size_of(type));
  });
}
ncclResult_t ncclAllGather(const void* send, void* receive, size_t count, ncclDataType_t type,
                           ncclComm_t communicator, CudaStream stream) {
  last_used = communicator;
  return meet("ncclAllGather", communicator, send, receive, stream, [=](const Rendezvous& all) {
    const size_t bytes = count * size_of(type);
    for (void* to : all.receives) {
      for (size_t r = 0; r < all.sends.size(); ++r) {
        std::memmove(static_cast<char*>(to) + r * bytes, all.sends[r], bytes);
      }
    }
  });
}
ncclResult_t ncclReduceScatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t communicator, CudaStream stream) {
  last_used = communicator;
  return meet("ncclReduceScatter", communicator, send, receive, stream, [=](const Rendezvous& all) {
    for (size_t r = 0; r < all.receives.size(); ++r) {
      reduce(all.sends, r * count, all.receives[r], count, type, op);
    }
  });
}

static void deliver(MockGroup& group, std::pair<int, int> pair) {
  auto& sent = group.sent[pair];
  auto& awaited = group.awaited[pair];
  while (!sent.empty() && !awaited.empty()) {
    std::memcpy(awaited.front().first, sent.front().first, sent.front().second);
    sent.erase(sent.begin());
    awaited.erase(awaited.begin());
  }
  if (sent.empty()) group.sent.erase(pair);
  if (awaited.empty()) group.awaited.erase(pair);
  changed.notify_all();
}
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t communicator, CudaStream stream) {
  last_used = communicator;
  std::lock_guard lock(mutex);
  ncclResult_t result;
  if (intercepted("ncclSend", &result)) return result;
  if (enqueue != nullptr) {
    messages.push_back({communicator, stream, peer, data, nullptr, count * size_of(type)});
    return ncclSuccess;
  }
  const std::pair pair{communicator->rank, peer};
  communicator->group->sent[pair].emplace_back(data, count * size_of(type));
  deliver(*communicator->group, pair);
  return ncclSuccess;
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t communicator, CudaStream stream) {
  last_used = communicator;
  std::lock_guard lock(mutex);
  ncclResult_t result;
  if (intercepted("ncclRecv", &result)) return result;
  if (enqueue != nullptr) {
    messages.push_back({communicator, stream, peer, nullptr, data, count * size_of(type)});
    return ncclSuccess;
  }
  const std::pair pair{peer, communicator->rank};
  communicator->group->awaited[pair].emplace_back(data, count * size_of(type));
  deliver(*communicator->group, pair);
  return ncclSuccess;
}
ncclResult_t ncclGroupStart() {
  std::lock_guard lock(mutex);
  ncclResult_t result;
  return intercepted("ncclGroupStart", &result) ? result : ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  {
    std::lock_guard lock(mutex);
    ncclResult_t result;
    if (intercepted("ncclGroupEnd", &result)) return result;
    if (enqueue == nullptr) return ncclSuccess;
  }
  queue_messages();
  return ncclSuccess;
}

}  // extern "C"
