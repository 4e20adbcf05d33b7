# How everything is compiled: C++20, warnings, x86-64-v3 baseline, sanitizers. CMAKE_COMPILE_WARNING_AS_ERROR
# makes errors of warnings: the presets have it on. All of it is of this folder and those below: a project that
# adds it by add_subdirectory() keeps its own.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT PROJECT_IS_TOP_LEVEL)
  # Warnings that the project asks for are about its own code; with -Werror they would end its build.
  set(CMAKE_COMPILE_WARNING_AS_ERROR OFF)
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-w>)
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)  # kernels that nobody optimises take 10 times as long
    add_compile_options($<$<COMPILE_LANGUAGE:CXX>:-O2>)
  endif()
elseif(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
# Checks with consequences are TS_CHECK, never assert: NDEBUG changes no behaviour.
# Under sanitizers reports stay readable and builds quick: -Og compiles in two thirds of -O1's time.
if(TESSERA_SANITIZE)
  set(TESSERA_KERNEL_OPTIMIZATION -O1)
  set(CMAKE_CXX_FLAGS_RELEASE "-Og")
  if(TESSERA_SANITIZE STREQUAL "thread")  # fewer accesses to watch
    set(CMAKE_CXX_FLAGS_RELEASE "-O1")
  endif()
else()
  set(TESSERA_KERNEL_OPTIMIZATION -O3)
  set(CMAKE_CXX_FLAGS_RELEASE "-O2")
endif()

# tessera_reuse_header(TARGET): <tessera.h> is parsed once for all targets with the options of this folder in a
# build from nothing (TESSERA_UNITY). ccache does not cache what is built with precompiled headers: it does without.
function(tessera_reuse_header target)
  if(NOT TESSERA_UNITY OR CMAKE_CXX_COMPILER_LAUNCHER MATCHES "ccache")
    return()
  endif()
  get_property(options DIRECTORY PROPERTY COMPILE_OPTIONS)
  string(MD5 name "${options}")
  string(SUBSTRING ${name} 0 8 name)
  set(name tessera_header_${name})
  if(NOT TARGET ${name})
    add_library(${name} OBJECT ${PROJECT_SOURCE_DIR}/cmake/empty.cpp)
    target_link_libraries(${name} PRIVATE tessera_compile tessera::tessera)
    target_precompile_headers(${name} PRIVATE <tessera.h>)
  endif()
  target_precompile_headers(${target} REUSE_FROM ${name})
endfunction()

add_library(tessera_compile INTERFACE)
target_compile_options(tessera_compile INTERFACE -Wall -Wextra -fno-math-errno -fno-trapping-math
  -fno-semantic-interposition)  # nobody replaces single functions: they may be inlined
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # g++ 12 reports these falsely from inlined standard containers at -O2 and above.
  target_compile_options(tessera_compile INTERFACE -Wno-array-bounds -Wno-stringop-overflow
    -Wno-stringop-overread -Wno-maybe-uninitialized -Wno-restrict -Wno-psabi)
  # Batches of files reach the size at which g++ looks for garbage again and again: a tenth of their time.
  cmake_host_system_information(RESULT memory QUERY TOTAL_PHYSICAL_MEMORY)
  cmake_host_system_information(RESULT cores QUERY NUMBER_OF_LOGICAL_CORES)
  math(EXPR memory_of_core "${memory} / ${cores}")  # MiB
  if(TESSERA_UNITY AND memory_of_core GREATER 6000)
    target_compile_options(tessera_compile INTERFACE $<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=2097152>)
  endif()
elseif(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  # GCC's pragmas are hints to GCC; `a & b ? x : y` reads as it is meant. libstdc++ 12's stable_sort calls
  # what C++17 deprecates.
  target_compile_options(tessera_compile INTERFACE -Wno-unknown-pragmas -Wno-bitwise-conditional-parentheses
    -Wno-deprecated-declarations)
endif()
set(TESSERA_X86 OFF)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(TESSERA_X86 ON)
  # A target with the property TESSERA_MARCH (the v4 kernels) names its own: of two -march options
  # the last one on the command line would win.
  target_compile_options(tessera_compile INTERFACE
    $<IF:$<BOOL:$<TARGET_PROPERTY:TESSERA_MARCH>>,-march=$<TARGET_PROPERTY:TESSERA_MARCH>,-march=x86-64-v3>)
endif()
# fma is written where it is meant: the same formula gives the same bits in every file and device.
target_compile_options(tessera_compile INTERFACE -ffp-contract=off)

if(TESSERA_SANITIZE STREQUAL "address")
  # What is undefined traps, and AddressSanitizer says where (handle_sigill=1): a fifth of a compile's time less
  # than sentences about it. Casts to the wrong class (vptr) have no form that traps.
  add_compile_options(-fsanitize=address,undefined -fno-sanitize=vptr -fsanitize-undefined-trap-on-error
    -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  # Accesses are checked by calls, which takes a quarter of a compile's time away, but where loops are.
  set(TESSERA_ASAN_CALLS "")
  set(TESSERA_ASAN_INLINE "")
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    set(TESSERA_ASAN_CALLS --param=asan-instrumentation-with-call-threshold=0)
    set(TESSERA_ASAN_INLINE --param=asan-instrumentation-with-call-threshold=7000)  # the compiler's own
  endif()
  add_compile_options(${TESSERA_ASAN_CALLS})
  add_link_options(-fsanitize=address)
elseif(TESSERA_SANITIZE STREQUAL "thread")
  add_compile_options(-fsanitize=thread -g1)
  add_link_options(-fsanitize=thread)
elseif(NOT TESSERA_SANITIZE STREQUAL "")
  message(FATAL_ERROR "TESSERA_SANITIZE is '${TESSERA_SANITIZE}'; it must be empty, address or thread")
endif()
