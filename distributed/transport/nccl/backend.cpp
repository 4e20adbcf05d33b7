#include <tessera/distributed/transport/nccl/backend.h>

#include <algorithm>
#include <functional>
#include <mutex>
#include <vector>

#include <tessera/core/error.h>

namespace tessera::distributed::nccl {
namespace {

// Whether the parts lie one after the other and are of one size: then one call of NCCL serves them.
bool is_one_buffer(const std::vector<Part>& parts) {
  for (size_t r = 1; r < parts.size(); ++r) {
    if (parts[r].bytes != parts[0].bytes) return false;
    if (parts[r].data != parts[r - 1].data + parts[r - 1].bytes) return false;
  }
  return true;
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& failure) {
    return failure.what();
  } catch (...) {
    return "it failed";
  }
}

// What a failure ends. Transfers that are watched hold it, and not the backend. Failures are text,
// thrown anew for each call.
struct Channels {
  std::mutex mutex;  // of `failure` and of who sees `communicators`
  std::string failure;
  std::array<std::unique_ptr<Communicator>, kChannels> communicators;

  std::exception_ptr failed() {
    const std::lock_guard lock(mutex);
    return failure.empty() ? nullptr : std::make_exception_ptr(DistributedError(failure));
  }
  void fail(const std::string& text) {
    const std::lock_guard lock(mutex);
    if (failure.empty()) failure = text;
    for (const auto& communicator : communicators) {
      if (communicator) communicator->abort(text);
    }
  }
  void check(Channel channel) {
    Communicator* communicator;
    {
      const std::lock_guard lock(mutex);
      if (!failure.empty()) return;
      communicator = communicators[static_cast<size_t>(channel)].get();
    }
    try {
      communicator->check_async();
    } catch (const std::exception& error) {
      fail(error.what());
      throw;
    }
  }
};

class NcclBackend : public Backend {
 public:
  NcclBackend(std::unique_ptr<Communicator> communicator, std::shared_ptr<Store> store,
              std::string name, std::shared_ptr<DeviceQueues> queues, const BackendOptions& options)
      : store_(std::move(store)),
        group_(std::move(name)),
        queues_(std::move(queues)),
        options_(options),
        rank_(communicator->rank()),
        size_(communicator->size()) {
    channels_->communicators[0] = std::move(communicator);
  }
  ~NcclBackend() override { channels_->fail("the group has gone"); }

  std::string_view name() const override { return "nccl"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool serves(const Device& device) const override { return device == queues_->device(); }

  void start(CallPtr call) override {
    try {
      if (const std::exception_ptr failure = channels_->failed()) std::rethrow_exception(failure);
      const Operation operation = call->header.operation;
      // What this rank did wrong nobody else can know here.
      if (call->refused || operation == Operation::kInvalid) return call->done(nullptr);
      if (operation == Operation::kBarrier) {
        meet(*call);
        call->done(nullptr);
        return;
      }
      communicator(call->channel);
      call->order = queues_->run(
          call->channel, [&](CudaStream stream) { launch(*call, stream); }, watch({call}));
    } catch (...) {
      call->done(std::current_exception());
    }
  }

  // One group of NCCL's: a rank may send where its peer sends too. Its messages match in their
  // order, so that order is the tags'.
  void start_together(std::span<const CallPtr> calls) override {
    std::vector<CallPtr> moved;
    for (const CallPtr& call : calls) {
      if (call->refused) {
        call->done(nullptr);
      } else {
        moved.push_back(call);
      }
    }
    if (moved.empty()) return;
    std::ranges::stable_sort(moved, {}, [](const CallPtr& call) { return call->tag; });
    try {
      if (const std::exception_ptr failure = channels_->failed()) std::rethrow_exception(failure);
      const Channel channel = moved.front()->channel;
      std::vector<Communicator::Message> messages;
      for (const CallPtr& call : moved) {
        const bool is_sent = call->header.operation == Operation::kSend;
        const auto peer = static_cast<size_t>(call->header.root);
        messages.push_back(
            {call->header.root, is_sent, (is_sent ? call->sends : call->receives)[peer]});
      }
      Communicator& ranks = communicator(channel);
      const std::function<void()> order = queues_->run(
          channel, [&](CudaStream stream) { ranks.exchange(messages, stream); }, watch(moved));
      for (const CallPtr& call : moved) call->order = order;
    } catch (...) {
      for (const CallPtr& call : moved) call->done(std::current_exception());
    }
  }

  void repeated(std::span<const CallPtr> calls) override {
    if (const std::exception_ptr failure = channels_->failed()) std::rethrow_exception(failure);
    queues_->watch(watch({calls.back()}));
  }

  std::unique_ptr<Backend> split(int color, std::span<const int> members,
                                 const std::string& name) override {
    const auto self = std::find(members.begin(), members.end(), rank_);
    const int key = static_cast<int>(self - members.begin());
    auto part = channels_->communicators[0]->split(
        color, key, key, static_cast<int>(members.size()), name, timeout());
    if (!part) return nullptr;
    return std::make_unique<NcclBackend>(std::move(part), store_,
                                         group_ + "/" + name + "/" + std::to_string(color), queues_,
                                         options_);
  }

  void fail(std::exception_ptr error) override { channels_->fail(text_of(error)); }

  std::string shutdown(std::chrono::milliseconds) override {
    std::string report;
    try {
      queues_->synchronize();
    } catch (const std::exception& error) {
      report = error.what();
    }
    for (const auto& communicator : channels_->communicators) {
      try {
        if (communicator) communicator->shutdown();
      } catch (const std::exception& error) {
        report = error.what();
      }
    }
    return report;
  }

 private:
  Communicator::Seconds timeout() const { return Communicator::Seconds(options_.timeout_seconds); }

  Communicator& communicator(Channel channel) {
    const auto index = static_cast<size_t>(channel);
    auto& all = channels_->communicators;
    if (!all[index]) {
      auto made = all[0]->split(0, rank_, rank_, size_,
                                group_ + " " + std::string(name_of(channel)), timeout());
      const std::lock_guard lock(channels_->mutex);
      all[index] = std::move(made);
    }
    return *all[index];
  }

  // Of calls of one channel that end together.
  Watch watch(std::vector<CallPtr> calls) const {
    const auto channels = channels_;
    const Call& first = *calls.front();
    return {.timeout_seconds = first.timeout_seconds,
            .check = [channels, channel = first.channel] { channels->check(channel); },
            .expired =
                [channels, text = first.text](double waited) {
                  channels->fail(detail::concatenate(
                      text.data(), " waited ", waited,
                      " s on the GPU; a rank did not call it, called something else or is stuck"));
                },
            // What ended because the communicator was aborted did not end well.
            .done =
                [channels, calls = std::move(calls)](const std::exception_ptr& error) {
                  for (const CallPtr& call : calls) call->done(error ? error : channels->failed());
                }};
  }

  void launch(const Call& call, CudaStream stream) {
    Communicator& ranks = communicator(call.channel);
    const auto self = static_cast<size_t>(rank_), root = static_cast<size_t>(call.header.root);
    const CallHeader& header = call.header;
    const OperationTraits& traits = traits_of(header.operation);
    switch (traits.movement) {
      case Movement::kReduction: {
        if (traits.delivery == Delivery::kOwner) return reduce_scatter(call, stream);
        // The pieces of one buffer.
        char* const data = call.sends[0].data;
        int64_t bytes = 0;
        for (const Part& part : call.sends) bytes += part.bytes;
        const auto count = static_cast<size_t>(bytes / size_of(header.dtype));
        if (count == 0) return;
        if (traits.delivery == Delivery::kAll) {
          ranks.all_reduce(data, data, count, header.dtype, header.reduce, stream);
        } else {
          ranks.reduce(data, data, count, header.dtype, header.reduce, header.root, stream);
        }
        return;
      }
      case Movement::kBroadcast: {
        const Part& part = root == self ? call.sends[root] : call.receives[root];
        if (part.bytes > 0) {
          ranks.broadcast(part.data, static_cast<size_t>(part.bytes), header.root, stream);
        }
        return;
      }
      case Movement::kParts:
        if (header.operation == Operation::kAllGather && is_one_buffer(call.receives)) {
          if (call.receives[0].bytes == 0) return;
          ranks.all_gather(call.sends[self].data, call.receives[0].data,
                           static_cast<size_t>(call.receives[0].bytes), stream);
          return;
        }
        [[fallthrough]];
      case Movement::kMessage:
        ranks.exchange(call.sends, call.receives, stream);
        return;
      case Movement::kNothing:
        return;
    }
  }

  void reduce_scatter(const Call& call, CudaStream stream) {
    Communicator& ranks = communicator(call.channel);
    const CallHeader& header = call.header;
    const auto self = static_cast<size_t>(rank_);
    const int64_t element = size_of(header.dtype);
    if (is_one_buffer(call.sends)) {
      if (call.sends[0].bytes == 0) return;
      ranks.reduce_scatter(call.sends[0].data, call.receives[self].data,
                           static_cast<size_t>(call.sends[0].bytes / element), header.dtype,
                           header.reduce, stream);
      return;
    }
    for (size_t r = 0; r < call.sends.size(); ++r) {
      const Part& part = call.sends[r];
      if (part.bytes == 0) continue;
      ranks.reduce(part.data, r == self ? call.receives[self].data : part.data,
                   static_cast<size_t>(part.bytes / element), header.dtype, header.reduce,
                   static_cast<int>(r), stream);
    }
  }

  // Barriers are rare and of the host, so they go through the store.
  void meet(const Call& call) {
    const std::string key = group_ + "/barrier/" + std::string(name_of(call.channel)) + "/" +
                            std::to_string(call.header.sequence);
    if (store_->add(key, 1) == size_) store_->set(key + "/met", "");
    const auto deadline = std::chrono::steady_clock::now() +
                          std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                              Communicator::Seconds(call.timeout_seconds));
    while (true) {
      try {
        store_->wait(key + "/met", Milliseconds(100));
        return;
      } catch (const StoreTimeout&) {
        if (const std::exception_ptr failure = channels_->failed()) {
          std::rethrow_exception(failure);
        }
        if (std::chrono::steady_clock::now() > deadline) throw;
      }
    }
  }

  const std::shared_ptr<Store> store_;
  const std::string group_;
  const std::shared_ptr<DeviceQueues> queues_;
  const BackendOptions options_;
  const int rank_, size_;
  const std::shared_ptr<Channels> channels_ = std::make_shared<Channels>();
};

}  // namespace

std::unique_ptr<Backend> make_backend(LibraryPtr library, std::shared_ptr<Store> store,
                                      const std::string& name, int rank, int size,
                                      std::shared_ptr<DeviceQueues> queues,
                                      const BackendOptions& options) {
  // A rank's first, second, ... group of this name: ids that were used are not taken again.
  const int64_t form = store->add(name + "/nccl forms/" + std::to_string(rank), 1);
  const std::string group = name + " " + std::to_string(form), key = group + "/nccl id";
  if (rank == 0) store->set(key, make_unique_id(*library));
  const std::string id =
      store->wait(key, Milliseconds(static_cast<int64_t>(options.timeout_seconds * 1000)));
  auto communicator = std::make_unique<Communicator>(
      std::move(library), id, rank, size, name, Communicator::Seconds(options.timeout_seconds));
  return std::make_unique<NcclBackend>(std::move(communicator), std::move(store), group,
                                       std::move(queues), options);
}

}  // namespace tessera::distributed::nccl
