#include <tessera/core/error.h>
#include <tessera/distributed/nccl/backend.h>

namespace tessera::distributed {

std::unique_ptr<Backend> make_nccl_backend(Store&, int, int, const BackendOptions&) {
  TS_THROW(UnsupportedError, "nccl",
           "groups of GPUs need streams of the CUDA backend, to which they are not connected yet; "
           "use the mpi backend and CPU tensors");
}

}  // namespace tessera::distributed
