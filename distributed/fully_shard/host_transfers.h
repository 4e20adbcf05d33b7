// Copies between a GPU and the parts that lie in page-locked memory of the host. Internal.
//
// [Note: streams of transfers] Uploads of parts have a stream, reductions and their downloads
// another one. What is queued there takes part in collectives by itself, so that the stream that
// calculates waits for no transfer before it needs the result. Memory of the
// device belongs to the stream that calculates: that one waits for the last use of a transfer, and
// lets go then. So a peak does not depend on which stream is fast.
//
// [Note: who may write] Copies read and write memory of the host behind its back. When a call of
// the model or its backward has ended, all have: whoever steps, loads or averages then finds
// gradients complete and may write the parts. The host waits there for uploads whose results are
// what the device calculates with last, which leaves the device something to do.
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

  // Of a GPU, shared by all models of this context. DeviceError for another device.
  static std::shared_ptr<HostTransfers> of(const Device& device);
  explicit HostTransfers(const Device& device);
  HostTransfers(const HostTransfers&) = delete;
  HostTransfers& operator=(const HostTransfers&) = delete;

  // What `work` queues goes to the stream of uploads (downloads), behind what the current stream
  // has to do (behind `after`). Returns the end of it.
  EventPtr on_upload_stream(const std::function<void()>& work);
  EventPtr on_download_stream(const EventPtr& after, const std::function<void()>& work);
  // In `work`. Contiguous tensors of one size, that of the host page-locked.
  void upload(const Tensor& target, const Tensor& source);
  void download(const Tensor& target, const Tensor& source);

  EventPtr record_here() const;                 // of the current stream
  void wait_here(const EventPtr& event) const;  // the current stream waits
  // Of the device's tensors that were downloaded all but the newest (none) are let go of, when the
  // current stream comes by.
  void let_go(bool keep_newest);
  // The host waits: until `event`, until nothing reads parts any more, until nothing is under way.
  static void wait(const EventPtr& event);
  void wait_uploads();
  void wait_all();

  // Bytes that were queued since the beginning.
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
