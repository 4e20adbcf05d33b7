// Control of the mock of libnccl: a shared library with NCCL's symbols whose ranks are threads of
// one process. Its memory is the host's, and a collective is queued by the call and runs when its
// last rank has called, as on a stream; or it is an emulated device's, see mock_nccl_use_streams.
#pragma once

#include <functional>

#include <tessera/distributed/transport/nccl/api.h>

extern "C" {
// The next calls of `function` ("ncclAllReduce") answer `result`, `times` times.
void mock_nccl_fail(const char* function, tessera::distributed::nccl::ncclResult_t result,
                    int times);
// The communicator of each rank reports `result` as its asynchronous error from now on.
void mock_nccl_set_async_error(tessera::distributed::nccl::ncclResult_t result);
// Waits until what the calling rank has queued on `communicator`'s group has run. False after 10 s.
bool mock_nccl_synchronize();
// Calls of `function` since the last reset; communicators that are alive.
int mock_nccl_calls(const char* function);
int mock_nccl_alive();
void mock_nccl_reset();

// Runs `work` on the stream when all before it has run there and `ready` says so, which is asked
// again and again from then on.
using MockEnqueue = void (*)(void* stream, std::function<bool()> ready, std::function<void()> work);
// From now on collectives are queued on their streams: one begins when every rank's stream has come
// to it.
void mock_nccl_use_streams(MockEnqueue enqueue);
}
