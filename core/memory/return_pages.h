// Large blocks of host memory whose pages return to the system when they are freed, instead of
// going to the allocator's cache: for the few blocks that dominate a training's memory at rest.
#pragma once

#include <cstddef>

namespace tessera {

// `block`: a live block of the CPU allocator. It takes effect at the next deallocation, and only
// from 32 MiB on: smaller blocks are needed again soon, and new pages would cost more than they
// save. The allocator keeps the addresses.
void return_pages_when_freed(void* block, size_t bytes);

}  // namespace tessera
