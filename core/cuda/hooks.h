// Where NVIDIA's runtime and the emulation differ. Defined in native_hooks.cpp and in
// emulation/hooks.cpp.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <string>

#include <tessera/core/gpu/backend.h>

namespace tessera::gpu {

BackendKind hook_kind();
// More about a failed kernel than CUDA tells, or empty.
std::string hook_failure_details();
// A new segment, of which nobody owns a byte yet.
void hook_segment(void* pointer, size_t bytes);
// Bytes that a tensor owns, or owns no more, as of what is queued on the stream by now. `fills`:
// the emulation makes them NaN, as new memory is.
void hook_accessible(void* pointer, size_t bytes, bool accessible, cudaStream_t stream,
                     bool fills = true) noexcept;

// The architectures that this program's device code is compiled for, as capability.h reads them.
const char* hook_architectures();

// See [Note: contexts] in contexts.h. Asking makes none.
bool hook_has_context(int device) noexcept;

// Queues a copy between the memories of two devices.
cudaError_t hook_copy_between(void* target, int to, const void* source, int from, size_t bytes,
                              cudaStream_t stream);

}  // namespace tessera::gpu
