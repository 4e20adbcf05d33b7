#include <tessera/distributed/fully_shard/host_transfers.h>

#include <map>
#include <utility>

#include <tessera/core/context.h>
#include <tessera/core/error.h>
#include <tessera/core/factory/pinned.h>

namespace tessera::distributed {
namespace {

struct TransfersOfDevices {
  std::map<int, std::weak_ptr<HostTransfers>> known;
};

std::shared_ptr<gpu::StreamHandle> stream_of(const Device& device) {
  TS_CHECK_DEVICE(device.is_cuda(), "offload", "copies between the host and a GPU; got ", device,
                  "; give the model memory on the GPU that calculates");
  return gpu::make_stream(device.index);
}

}  // namespace

std::shared_ptr<HostTransfers> HostTransfers::of(const Device& device) {
  auto& known = Context::current().slot<TransfersOfDevices>().known[device.index];
  std::shared_ptr<HostTransfers> transfers = known.lock();
  if (!transfers) known = transfers = std::make_shared<HostTransfers>(device);
  return transfers;
}

HostTransfers::HostTransfers(const Device& device)
    : device_(device), up_(stream_of(device)), down_(stream_of(device)) {}

HostTransfers::EventPtr HostTransfers::run_on(const std::shared_ptr<gpu::StreamHandle>& stream,
                                              const EventPtr& after,
                                              const std::function<void()>& work) const {
  const gpu::CurrentDevice device(device_.index);
  gpu::wait_event(*stream, *after);
  const gpu::CurrentStream scope(stream);
  work();
  return gpu::record_event(*stream);
}

HostTransfers::EventPtr HostTransfers::on_upload_stream(const std::function<void()>& work) {
  return last_upload_ = run_on(up_, record_here(), work);
}

HostTransfers::EventPtr HostTransfers::on_download_stream(const EventPtr& after,
                                                          const std::function<void()>& work) {
  return run_on(down_, after, work);
}

void HostTransfers::upload(const Tensor& target, const Tensor& source) {
  gpu::copy_bytes(target.data(), device_, source.data(), kCpu, static_cast<size_t>(source.nbytes()),
                  /*non_blocking=*/true);
  uploaded_ += source.nbytes();
}

void HostTransfers::download(const Tensor& target, const Tensor& source) {
  gpu::copy_bytes(target.data(), kCpu, source.data(), device_, static_cast<size_t>(source.nbytes()),
                  /*non_blocking=*/true);
  downloaded_ += source.nbytes();
  downloads_.push_back({source, gpu::record_event(*down_)});
}

HostTransfers::EventPtr HostTransfers::record_here() const {
  return gpu::record_event(*gpu::current_stream_handle(device_.index));
}

void HostTransfers::wait_here(const EventPtr& event) const {
  gpu::wait_event(*gpu::current_stream_handle(device_.index), *event);
}

void HostTransfers::let_go(bool keep_newest) {
  const size_t kept = keep_newest ? 1 : 0;
  if (downloads_.size() <= kept) return;
  // They end in their order.
  wait_here(downloads_[downloads_.size() - kept - 1].end);
  downloads_.erase(downloads_.begin(), downloads_.end() - static_cast<int64_t>(kept));
}

void HostTransfers::wait(const EventPtr& event) {
  if (event) gpu::synchronize_event(*event);
}

// see [Note: who may write]
void HostTransfers::wait_uploads() { wait(std::exchange(last_upload_, nullptr)); }

void HostTransfers::wait_all() {
  wait_uploads();
  if (!downloads_.empty()) wait(downloads_.back().end);
  let_go(false);
}

Tensor HostTransfers::empty(const Shape& shape, DType dtype, MemoryCategory category) {
  return raw::empty_pinned(shape, dtype, category);
}

}  // namespace tessera::distributed
