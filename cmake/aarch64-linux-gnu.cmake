# Toolchain file for 64-bit ARM Linux on another machine (scripts/test_aarch64.sh uses it):
#
#     cmake -S . -B build/aarch64 -G Ninja -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake \
#       -DTESSERA_SYSROOT=/somewhere/aarch64-sysroot
#
# TESSERA_SYSROOT: a folder with Debian's arm64 packages unpacked, outside of the sources. Installed as
# foreign packages beside the machine's own, development packages remove some of these.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TESSERA_SYSROOT)  # projects that test the compiler read this file, too
set(TESSERA_SYSROOT "" CACHE PATH "Folder with unpacked arm64 packages")
if(NOT IS_DIRECTORY "${TESSERA_SYSROOT}/usr/lib/aarch64-linux-gnu")
  message(FATAL_ERROR "TESSERA_SYSROOT is '${TESSERA_SYSROOT}', which has no usr/lib/aarch64-linux-gnu; "
    "scripts/test_aarch64.sh says how to make one")
endif()
set(CMAKE_SYSROOT ${TESSERA_SYSROOT})
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH ${TESSERA_SYSROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)  # protoc runs here
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
find_program(TESSERA_QEMU NAMES qemu-aarch64 qemu-aarch64-static)
if(TESSERA_QEMU)
  set(CMAKE_CROSSCOMPILING_EMULATOR ${TESSERA_QEMU} -L ${TESSERA_SYSROOT})
endif()
