#include <tessera/core/error.h>
#include <tessera/core/gpu/backend.h>
#include <tessera/distributed/transport/nccl/backend.h>

namespace tessera::distributed {

std::unique_ptr<Backend> make_nccl_backend(std::shared_ptr<Store> store, int rank, int size,
                                           const Device& device, const BackendOptions& options) {
  auto queues = nccl::make_device_queues(device);
  const gpu::CurrentDevice scope(device.index);  // communicators are of the current one
  return nccl::make_backend(nccl::Library::load(), std::move(store), "world", rank, size,
                            std::move(queues), options);
}

}  // namespace tessera::distributed
