// Control of the mock of libnccl: a shared library with NCCL's symbols whose ranks are threads of
// one process and whose memory is the host's. A collective is queued by the call and runs when its
// last rank has called, as on a stream.
#pragma once

#include <nccl.h>

extern "C" {
// The next calls of `function` ("ncclAllReduce") answer `result`, `times` times.
void mock_nccl_fail(const char* function, ncclResult_t result, int times);
// The communicator of each rank reports `result` as its asynchronous error from now on.
void mock_nccl_set_async_error(ncclResult_t result);
// Waits until what the calling rank has queued on `communicator`'s group has run. False after 10 s.
bool mock_nccl_synchronize();
// Calls of `function` since the last reset; communicators that are alive.
int mock_nccl_calls(const char* function);
int mock_nccl_alive();
void mock_nccl_reset();
}
