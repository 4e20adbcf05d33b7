// The part of NCCL's C interface that the backend uses, as of version 2.18: later libraries keep
// its names, values and layouts. Declared here, so that neither nccl.h nor CUDA's headers are
// needed to build; the library is loaded when it is first asked for.
// tests/distributed/nccl_header.cpp compares these declarations with nccl.h where that is
// installed.
#pragma once

#include <climits>
#include <cstddef>

namespace tessera::distributed::nccl {

using CudaStream = void*;  // a cudaStream_t

struct ncclComm;
using ncclComm_t = ncclComm*;

struct ncclUniqueId {
  char internal[128];
};

enum ncclResult_t : int {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
};
enum ncclRedOp_t : int { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4 };
enum ncclDataType_t : int {
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclInt64 = 4,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
};

// Says by `size` and `version` which of its fields exist; a newer library takes its defaults for
// the others.
struct ncclConfig_t {
  size_t size = sizeof(ncclConfig_t);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = INT_MIN;  // INT_MIN: the library's choice, as below
  int cgaClusterSize = INT_MIN;
  int minCTAs = INT_MIN;
  int maxCTAs = INT_MIN;
  const char* netName = nullptr;
  int splitShare = INT_MIN;
};
inline constexpr int kNcclNoColor = -1;

// Every function: what it returns, its name without "nccl", its parameters.
// clang-format off
#define TS_NCCL_FUNCTIONS(F)                                                                     \
  F(ncclResult_t, GetVersion, (int* version))                                                    \
  F(ncclResult_t, GetUniqueId, (ncclUniqueId * id))                                              \
  F(const char*, GetErrorString, (ncclResult_t result))                                          \
  F(const char*, GetLastError, (ncclComm_t comm))                                                \
  F(ncclResult_t, CommInitRankConfig, (ncclComm_t * comm, int size, ncclUniqueId id, int rank,   \
                                       ncclConfig_t * config))                                   \
  F(ncclResult_t, CommSplit, (ncclComm_t comm, int color, int key, ncclComm_t * part,            \
                              ncclConfig_t * config))                                            \
  F(ncclResult_t, CommFinalize, (ncclComm_t comm))                                               \
  F(ncclResult_t, CommDestroy, (ncclComm_t comm))                                                \
  F(ncclResult_t, CommAbort, (ncclComm_t comm))                                                  \
  F(ncclResult_t, CommGetAsyncError, (ncclComm_t comm, ncclResult_t * state))                    \
  F(ncclResult_t, AllReduce, (const void* send, void* receive, size_t count,                     \
                              ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,              \
                              CudaStream stream))                                                \
  F(ncclResult_t, Reduce, (const void* send, void* receive, size_t count, ncclDataType_t type,   \
                           ncclRedOp_t op, int root, ncclComm_t comm, CudaStream stream))        \
  F(ncclResult_t, Broadcast, (const void* send, void* receive, size_t count,                     \
                              ncclDataType_t type, int root, ncclComm_t comm,                    \
                              CudaStream stream))                                                \
  F(ncclResult_t, AllGather, (const void* send, void* receive, size_t count,                     \
                              ncclDataType_t type, ncclComm_t comm, CudaStream stream))          \
  F(ncclResult_t, ReduceScatter, (const void* send, void* receive, size_t count,                 \
                                  ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,          \
                                  CudaStream stream))                                            \
  F(ncclResult_t, Send, (const void* data, size_t count, ncclDataType_t type, int peer,          \
                         ncclComm_t comm, CudaStream stream))                                    \
  F(ncclResult_t, Recv, (void* data, size_t count, ncclDataType_t type, int peer,                \
                         ncclComm_t comm, CudaStream stream))                                    \
  F(ncclResult_t, GroupStart, ())                                                                \
  F(ncclResult_t, GroupEnd, ())
// clang-format on

}  // namespace tessera::distributed::nccl
