// Large blocks of host memory whose pages go back to the system when they are freed, instead of
// into the allocator's cache: for the few that decide how much a training holds at rest.
#pragma once

#include <cstddef>

namespace tessera {

// `block`: what the CPU allocator gave and someone still holds. Its next deallocation is meant, and
// nothing happens under 32 MiB: smaller blocks are needed again soon, and new pages would cost more
// than what they hold. The addresses stay with the allocator.
void return_pages_when_freed(void* block, size_t bytes);

}  // namespace tessera
