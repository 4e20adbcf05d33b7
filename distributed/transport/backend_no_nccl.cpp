// Stands in for nccl/backend_nccl.cpp in a build without it.
#include <tessera/core/error.h>
#include <tessera/distributed/transport/backend.h>

namespace tessera::distributed {

std::unique_ptr<Backend> make_nccl_backend(std::shared_ptr<Store>, int, int, const Device&,
                                           const BackendOptions&) {
  TS_THROW(UnsupportedError, "nccl",
           "groups of GPUs need the nccl backend, which this build was made without; build with "
           "-DTESSERA_WITH_NCCL=ON");
}

}  // namespace tessera::distributed
