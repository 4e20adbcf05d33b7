// distributed/transport/nccl/api.h against NCCL's own header: values, layouts and functions.
#include <nccl.h>

#include <type_traits>

#include <tessera/distributed/transport/nccl/api.h>

namespace ours = tessera::distributed::nccl;

#define TS_SAME(name) static_assert(static_cast<int>(ours::name) == static_cast<int>(::name))
TS_SAME(ncclSuccess);
TS_SAME(ncclUnhandledCudaError);
TS_SAME(ncclSystemError);
TS_SAME(ncclInternalError);
TS_SAME(ncclInvalidArgument);
TS_SAME(ncclInvalidUsage);
TS_SAME(ncclRemoteError);
TS_SAME(ncclInProgress);
TS_SAME(ncclSum);
TS_SAME(ncclProd);
TS_SAME(ncclMax);
TS_SAME(ncclMin);
TS_SAME(ncclAvg);
TS_SAME(ncclUint8);
TS_SAME(ncclInt32);
TS_SAME(ncclInt64);
TS_SAME(ncclFloat16);
TS_SAME(ncclFloat32);
TS_SAME(ncclFloat64);
TS_SAME(ncclBfloat16);
static_assert(ours::kNcclNoColor == NCCL_SPLIT_NOCOLOR);
static_assert(sizeof(ours::ncclUniqueId) == sizeof(::ncclUniqueId));
static_assert(sizeof(ours::ncclConfig_t) <= sizeof(::ncclConfig_t));
#define TS_SAME_FIELD(name) \
  static_assert(offsetof(ours::ncclConfig_t, name) == offsetof(::ncclConfig_t, name))
TS_SAME_FIELD(size);
TS_SAME_FIELD(magic);
TS_SAME_FIELD(version);
TS_SAME_FIELD(blocking);
TS_SAME_FIELD(cgaClusterSize);
TS_SAME_FIELD(minCTAs);
TS_SAME_FIELD(maxCTAs);
TS_SAME_FIELD(netName);
TS_SAME_FIELD(splitShare);

// Parameters by size: handles and enumerations are types of their own on either side.
template <class... P>
constexpr size_t sizes(size_t seed) {
  ((seed = seed * 1000 + sizeof(P)), ...);
  return seed;
}
template <class R, class... P>
constexpr size_t shape_of(R (*)(P...)) {
  return sizes<P...>(sizeof(R));
}
#define TS_SAME_FUNCTION(result, name, parameters) \
  static_assert(shape_of(static_cast<result(*) parameters>(nullptr)) == shape_of(&::nccl##name));
namespace tessera::distributed::nccl {
TS_NCCL_FUNCTIONS(TS_SAME_FUNCTION)
}
