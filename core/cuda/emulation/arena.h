// The memory of the emulated devices: one range of addresses that only kernels and copies may
// touch. Outside of them it is poisoned for AddressSanitizer, and without it not mapped readable:
// a host read of device memory ends the program where it happens. New memory holds 0xff bytes,
// NaN in every floating dtype.
#pragma once

#include <cstddef>

namespace tessera::gpu::emulation::arena {

inline constexpr size_t kBytes = size_t{512} << 20;

// Null where the arena is full. Any number of bytes, aligned to 512.
void* allocate(size_t bytes);
bool release(void* pointer);  // false for an address that allocate() did not give
bool contains(const void* pointer);
size_t free_bytes();
char* shared_memory();  // of the running block
// Bytes inside of an allocation that kernels may or may not touch; for allocators on top.
void set_accessible(const void* pointer, size_t bytes, bool accessible, bool fills = true);
// "byte 12 of the 64 bytes at 0x..." for reports.
const char* describe(const void* pointer, char* text, size_t size);

// While one lives, device memory can be touched.
class Open {
 public:
  Open();
  ~Open();
  Open(const Open&) = delete;
  Open& operator=(const Open&) = delete;
};

}  // namespace tessera::gpu::emulation::arena
