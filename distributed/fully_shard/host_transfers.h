// Copies between a GPU and shards in page-locked host memory. Internal.
//
// [Note: streams of transfers] Uploads of shards have one stream, reductions and their downloads
// another. Their work takes part in collectives without the compute stream, which waits for a
// transfer only when it needs the result. Memory of the device belongs to the compute stream: that
// one waits for the last use of a transfer, and frees then. So a peak does not depend on which
// stream is fast.
//
// [Note: who may write] Copies read and write host memory asynchronously. When a call of the model
// or its backward has returned, all have ended: a step, a load or an average then finds complete
// gradients and may write the shards. The host waits there for uploads whose results the device
// computes with last, which leaves the device something to do.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

#include <tessera/core/gpu/backend.h>
#include <tessera/core/memory/allocator.h>
#include <tessera/core/tensor/tensor.h>

namespace tessera::distributed {

class HostTransfers {
 public:
  using EventPtr = std::shared_ptr<gpu::EventHandle>;

  // The transfers of a GPU, shared by all models of this context. DeviceError for another device.
  static std::shared_ptr<HostTransfers> of(const Device& device);
  explicit HostTransfers(const Device& device);
  HostTransfers(const HostTransfers&) = delete;
  HostTransfers& operator=(const HostTransfers&) = delete;

  // Queues `work` on the stream of uploads (downloads), after the work on the current stream (after
  // `after`). Returns the event of its end.
  EventPtr on_upload_stream(const std::function<void()>& work);
  EventPtr on_download_stream(const EventPtr& after, const std::function<void()>& work);
  // Within `work`. Contiguous tensors of one size, that of the host page-locked.
  void upload(const Tensor& target, const Tensor& source);
  void download(const Tensor& target, const Tensor& source);

  EventPtr record_here() const;                 // of the current stream
  void wait_here(const EventPtr& event) const;  // the current stream waits
  // Frees the device tensors that were downloaded, except the newest (none), when the current
  // stream comes by.
  void let_go(bool keep_newest);
  // The host waits: for `event`; until no transfer reads shards; until no transfer runs.
  static void wait(const EventPtr& event);
  void wait_uploads();
  void wait_all();

  // Bytes queued since the beginning.
  int64_t uploaded_bytes() const { return uploaded_; }
  int64_t downloaded_bytes() const { return downloaded_; }

  // Page-locked, counted under `category`, without values.
  static Tensor empty(const Shape& shape, DType dtype, MemoryCategory category);

 private:
  struct Download {
    Tensor source;
    EventPtr end;
  };
  EventPtr run_on(const std::shared_ptr<gpu::StreamHandle>& stream, const EventPtr& after,
                  const std::function<void()>& work) const;

  const Device device_;
  const std::shared_ptr<gpu::StreamHandle> up_, down_;
  EventPtr last_upload_;
  std::deque<Download> downloads_;
  int64_t uploaded_ = 0, downloaded_ = 0;
};

}  // namespace tessera::distributed
