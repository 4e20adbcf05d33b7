// Marks memory that must not be touched, where AddressSanitizer watches; nothing elsewhere.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define TS_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TS_ASAN 1
#endif
#endif
#if defined(TS_ASAN)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(pointer, size) ((void)(pointer), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(pointer, size) ((void)(pointer), (void)(size))
#endif
