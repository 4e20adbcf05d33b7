// Stands in for backend_nccl.cpp where nccl.h is not installed.
#include <tessera/core/error.h>
#include <tessera/distributed/backend.h>

namespace tessera::distributed {

std::unique_ptr<Backend> make_nccl_backend(Store&, int, int, const BackendOptions&) {
  TS_THROW(UnsupportedError, "nccl",
           "groups of GPUs need NCCL; this build was made without its header; install libnccl-dev "
           "and the CUDA headers and build again");
}

}  // namespace tessera::distributed
