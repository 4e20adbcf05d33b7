#include <array>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>

#include <tessera/core/error.h>
#include <tessera/distributed/transport/backend.h>

namespace tessera::distributed {
namespace {

class PairedBackend : public Backend {
 public:
  PairedBackend(std::shared_ptr<Backend> host, std::unique_ptr<Backend> device,
                const BackendOptions& options)
      : host_(std::move(host)),
        device_(std::move(device)),
        options_(options),
        name_(std::string(host_->name()) + " and " + std::string(device_->name())) {
    TS_CHECK(host_->rank() == device_->rank() && host_->size() == device_->size(), name_,
             "both backends must be of one group; they are rank ", host_->rank(), " of ",
             host_->size(), " and rank ", device_->rank(), " of ", device_->size());
  }

  std::string_view name() const override { return name_; }
  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  bool serves(const Device& device) const override {
    return host_->serves(device) || device_->serves(device);
  }

  void start(CallPtr call) override {
    if (!call->device.is_cuda()) return host_->start(std::move(call));
    const Operation operation = call->header.operation;
    const bool peer_call = is_message(operation);
    if (options_.compare_calls && !peer_call) {
      if (std::exception_ptr error = compare(*call)) return call->done(std::move(error));
    } else if (!peer_call) {
      note(*call);
    }
    device_->start(std::move(call));
  }

  void start_together(std::span<const CallPtr> calls) override {
    std::vector<CallPtr> of_host, of_device;
    for (const CallPtr& call : calls) {
      (call->device.is_cuda() ? of_device : of_host).push_back(call);
    }
    host_->start_together(of_host);
    device_->start_together(of_device);
  }

  void repeated(std::span<const CallPtr> calls) override {
    for (const CallPtr& call : calls) {
      if (!options_.compare_calls) {
        note(*call);
      } else if (const std::exception_ptr error = compare(*call)) {
        std::rethrow_exception(error);
      }
    }
    device_->repeated(calls);
  }

  // Ranks may use the other channels in an order of their own beside these.
  std::optional<uint64_t> fingerprint() const override {
    if (options_.compare_calls) return std::nullopt;
    uint64_t hash = 0;
    for (const Channel channel : {Channel::kGradient, Channel::kParameter, Channel::kModule}) {
      hash = mixed(hash, noted_[static_cast<size_t>(channel)]);
    }
    return hash;
  }

  // Only the host's calls are moved by their callers.
  void drive(const std::shared_ptr<void>& carrier,
             std::chrono::steady_clock::time_point deadline) override {
    host_->drive(carrier, deadline);
  }

  std::unique_ptr<Backend> split(int color, std::span<const int> members,
                                 const std::string& name) override {
    auto host = host_->split(color, members, name);
    auto device = device_->split(color, members, name);
    if (color < 0) return nullptr;
    return std::make_unique<PairedBackend>(std::move(host), std::move(device), options_);
  }

  void fail(std::exception_ptr error) override {
    device_->fail(error);
    host_->fail(std::move(error));
  }

  std::vector<std::optional<Position>> positions(Channel channel) override {
    return host_->positions(channel);
  }

  std::string shutdown(std::chrono::milliseconds limit) override {
    std::string report = device_->shutdown(limit);
    const std::string of_host = host_->shutdown(limit);
    return report.empty() || of_host.empty() ? report + of_host : report + "; " + of_host;
  }

 private:
  static uint64_t mixed(uint64_t hash, uint64_t value) {  // FNV-1a
    for (int byte = 0; byte < 8; ++byte, value >>= 8) {
      hash = (hash ^ (value & 0xff)) * 1099511628211u;
    }
    return hash;
  }
  void note(const Call& call) {
    const CallHeader& header = call.header;
    uint64_t& hash = noted_[static_cast<size_t>(call.channel)];
    hash = mixed(hash, static_cast<uint64_t>(header.operation) |
                           static_cast<uint64_t>(header.dtype) << 8 |
                           static_cast<uint64_t>(header.reduce) << 16 |
                           static_cast<uint64_t>(header.onto) << 24 |
                           static_cast<uint64_t>(static_cast<uint32_t>(header.root)) << 32);
    hash = mixed(hash, static_cast<uint64_t>(header.count));
    hash = mixed(hash, static_cast<uint64_t>(header.sequence));
    hash = mixed(hash, header.purpose);
  }

  // The same call without data, over the host's backend.
  std::exception_ptr compare(const Call& call) {
    struct Answer {
      std::mutex mutex;
      std::condition_variable changed;
      bool done = false;
      std::exception_ptr error;
    };
    const auto answer = std::make_shared<Answer>();
    const auto question = std::make_shared<Call>();
    question->header = call.header;
    question->channel = call.channel;
    question->text = call.text;
    question->timeout_seconds = call.timeout_seconds;
    question->sends.resize(static_cast<size_t>(size()));
    question->receives.resize(static_cast<size_t>(size()));
    question->done = [answer](std::exception_ptr error) {
      {
        const std::lock_guard lock(answer->mutex);
        answer->done = true;
        answer->error = std::move(error);
      }
      answer->changed.notify_all();
    };
    host_->start(question);
    const auto limit = std::chrono::duration<double>(std::min(call.timeout_seconds, 1e9));
    std::unique_lock lock(answer->mutex);
    if (answer->changed.wait_for(lock, limit, [&] { return answer->done; })) return answer->error;
    return std::make_exception_ptr(DistributedError(detail::concatenate(
        call.text.data(), " waited ", limit.count(), " s for the other ranks to call it")));
  }

  const std::shared_ptr<Backend> host_;
  const std::unique_ptr<Backend> device_;
  const BackendOptions options_;
  const std::string name_;
  std::array<uint64_t, kChannels> noted_{};  // by channel; of the thread that issues calls
};

}  // namespace

std::unique_ptr<Backend> make_paired_backend(std::shared_ptr<Backend> host,
                                             std::unique_ptr<Backend> device,
                                             const BackendOptions& options) {
  return std::make_unique<PairedBackend>(std::move(host), std::move(device), options);
}

}  // namespace tessera::distributed
