// Stands in for mpi/backend_mpi.cpp where MPI is not installed.
#include <tessera/core/error.h>
#include <tessera/distributed/transport/backend.h>

namespace tessera::distributed {

std::unique_ptr<Backend> make_mpi_backend(const BackendOptions&) {
  TS_THROW(UnsupportedError, "mpi",
           "groups of processes need MPI; this build was made without it; install libopenmpi-dev "
           "and openmpi-bin and build again");
}

}  // namespace tessera::distributed
