# Four libraries define the functions of core/gpu/backend.h, and a program links one of them:
#   tessera_core_cuda           NVIDIA's runtime and the kernels, compiled by nvcc
#   tessera_core_cuda_emulated  the same sources on the CPU (core/cuda/emulation), for tests
#   tessera_core_cuda_dry       the same host code, on a device that calculates nothing (core/cuda/dry)
#   tessera_core_no_cuda        there is no GPU
# Programs get the first where nvcc was found, else the last. The target property TESSERA_GPU =
# emulated or dry asks for another one.
file(GLOB cuda_runtime_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/core/cuda/*.cpp
  ${CMAKE_CURRENT_SOURCE_DIR}/core/cuda/libraries/*.cpp)
# Algorithms of products that were measured on cards (core/cuda/libraries/tables) lie in the program:
# a copy of it on another machine has them too.
file(GLOB gemm_tables CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/core/cuda/libraries/tables/*.json)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${gemm_tables})
set(shipped_texts "")
foreach(table IN LISTS gemm_tables)
  file(READ ${table} text)
  string(APPEND shipped_texts "    R\"json(${text})json\",\n")
endforeach()
set(TESSERA_SHIPPED_TABLES ${CMAKE_CURRENT_BINARY_DIR}/shipped_gemm_tables.cpp)
file(CONFIGURE OUTPUT ${TESSERA_SHIPPED_TABLES} @ONLY CONTENT [=[
// Written by cmake/TesseraCuda.cmake from core/cuda/libraries/tables.
#include <tessera/core/cuda/libraries/gemm_table.h>

namespace tessera::gpu {

std::vector<std::string_view> shipped_gemm_texts() {
  return {
@shipped_texts@  };
}

}  // namespace tessera::gpu
]=])
file(GLOB cuda_kernel_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/core/kernels/*/*.cu)

set(without_cublaslt core/cuda/none/gemm_none.cpp)
set(without_cudnn core/cuda/none/graph_none.cpp)
add_library(tessera_core_no_cuda core/cuda/none/backend_none.cpp core/cuda/none/capture_none.cpp
  core/cuda/none/launch_times_none.cpp
  core/cuda/libraries/gemm.cpp
  core/cuda/libraries/library_graph.cpp core/cuda/libraries/attention_graph.cpp core/cuda/libraries/conv_graph.cpp
  core/cuda/libraries/norm_graph.cpp ${without_cublaslt} ${without_cudnn})
set_target_properties(tessera_core_no_cuda PROPERTIES EXPORT_NAME core_no_cuda POSITION_INDEPENDENT_CODE ON
  UNITY_BUILD ${TESSERA_UNITY})
target_link_libraries(tessera_core_no_cuda PRIVATE $<BUILD_INTERFACE:tessera_compile> PUBLIC tessera_core)
set(tessera_gpu tessera_core_no_cuda)

if(TESSERA_CUDA_FOUND)
  set(CMAKE_CUDA_COMPILER ${TESSERA_NVCC})
  list(TRANSFORM TESSERA_CUDA_ARCHITECTURES APPEND -real OUTPUT_VARIABLE CMAKE_CUDA_ARCHITECTURES)
  if(CMAKE_CXX_COMPILER_LAUNCHER AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})  # ccache knows nvcc too
  endif()
  enable_language(CUDA)
  find_package(CUDAToolkit REQUIRED)
  # cuBLASLt is loaded when a product asks for it; only its header is needed here.
  find_path(TESSERA_CUBLASLT_INCLUDE cublasLt.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  mark_as_advanced(TESSERA_CUBLASLT_INCLUDE)
  if(NOT TESSERA_CUBLASLT_INCLUDE)
    message(STATUS "tessera: no cublasLt.h: matrix products run on own kernels; install libcublas-dev")
    list(FILTER cuda_runtime_sources EXCLUDE REGEX "/native_gemm.cpp$")
    list(APPEND cuda_runtime_sources ${without_cublaslt})
  endif()
  # The same for cuDNN.
  find_path(TESSERA_CUDNN_INCLUDE cudnn.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  mark_as_advanced(TESSERA_CUDNN_INCLUDE)
  if(NOT TESSERA_CUDNN_INCLUDE)
    message(STATUS "tessera: no cudnn.h: attention and convolution run on own kernels; install libcudnn9-dev")
    list(FILTER cuda_runtime_sources EXCLUDE REGEX "/native_graph.cpp$")
    list(APPEND cuda_runtime_sources ${without_cudnn})
  endif()
  # C++20 is asked for by hand: CMake 3.25 does not know it for nvcc 13. No contraction: the kernels
  # give the bits of the CPU's formulas. A kernel that spills registers is a warning.
  function(tessera_compile_kernels target)
    target_include_directories(${target} PRIVATE ${TESSERA_INCLUDE_DIR})
    target_compile_options(${target} PRIVATE -std=c++20 -O3 --expt-relaxed-constexpr --fmad=false
      -Xfatbin=-compress-all -Xcompiler=-Wall,-Wextra,-ffp-contract=off)
    if(TESSERA_X86)
      target_compile_options(${target} PRIVATE -Xcompiler=-march=x86-64-v3)
    endif()
    set_target_properties(${target} PROPERTIES CUDA_STANDARD_REQUIRED OFF CXX_STANDARD_REQUIRED OFF
      CUDA_SEPARABLE_COMPILATION OFF POSITION_INDEPENDENT_CODE ON)
  endfunction()
  add_library(tessera_cuda_kernels OBJECT ${cuda_kernel_sources})
  tessera_compile_kernels(tessera_cuda_kernels)
  target_compile_options(tessera_cuda_kernels PRIVATE
    "SHELL:-Xptxas --warn-on-spills$<$<BOOL:${CMAKE_COMPILE_WARNING_AS_ERROR}>:,--warning-as-error>")
  # Tests read the kernels' PTX (tests/ptx), which nvcc has on its way: it is kept, where it has one
  # name, and where no ccache would leave it out.
  list(LENGTH TESSERA_CUDA_ARCHITECTURES architecture_count)
  if(TESSERA_BUILD_TESTS AND architecture_count EQUAL 1
     AND NOT CMAKE_CUDA_COMPILER_LAUNCHER MATCHES "ccache")
    set(TESSERA_KERNEL_PTX_DIR ${PROJECT_BINARY_DIR}/kernel_ptx)
    file(MAKE_DIRECTORY ${TESSERA_KERNEL_PTX_DIR})
    set(keep_ptx ${CMAKE_CURRENT_SOURCE_DIR}/cmake/keep_ptx.sh ${TESSERA_KERNEL_PTX_DIR}
      ${CMAKE_CUDA_COMPILER_LAUNCHER})
    set_target_properties(tessera_cuda_kernels PROPERTIES CUDA_COMPILER_LAUNCHER "${keep_ptx}")
  endif()
  add_library(tessera_core_cuda ${cuda_runtime_sources} ${TESSERA_SHIPPED_TABLES} $<TARGET_OBJECTS:tessera_cuda_kernels>)
  set_target_properties(tessera_core_cuda PROPERTIES EXPORT_NAME core_cuda LINKER_LANGUAGE CXX
    POSITION_INDEPENDENT_CODE ON)
  target_compile_definitions(tessera_core_cuda PRIVATE
    "TESSERA_CUDA_ARCHITECTURES=\"${TESSERA_CUDA_ARCHITECTURES}\"")
  target_include_directories(tessera_core_cuda SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS}
    $<$<BOOL:${TESSERA_CUDNN_INCLUDE}>:${TESSERA_CUDNN_INCLUDE}>)
  # The runtime is linked statically and finds the driver when it is asked for a device: the same
  # program runs where there is none.
  target_link_libraries(tessera_core_cuda PRIVATE $<BUILD_INTERFACE:tessera_compile>
    PUBLIC tessera_core CUDA::cudart_static)
  target_link_libraries(tessera_core_cuda PRIVATE $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>)
  set(tessera_gpu tessera_core_cuda)
endif()

set(tessera_gpu_emulated ${tessera_gpu})
set(tessera_gpu_dry ${tessera_gpu})
if(TESSERA_EMULATION)
  add_subdirectory(core/cuda/emulation)
  set(tessera_gpu_emulated tessera_core_cuda_emulated)
endif()
if(TESSERA_DRY)
  add_subdirectory(core/cuda/dry)
  set(tessera_gpu_dry tessera_core_cuda_dry)
endif()

# Installed programs take the backend that was built, or the dry device; tesseraConfig.cmake finds
# CUDA's runtime.
string(REPLACE tessera_ "" tessera_gpu_export ${tessera_gpu})
set(tessera_gpu_dry_export ${tessera_gpu_export})
if(TESSERA_DRY AND TESSERA_BUILD_CLI)  # it is built with tessera-price
  set(tessera_gpu_dry_export core_cuda_dry)
endif()
set(gpu_of_program
  $<BUILD_INTERFACE:$<IF:$<STREQUAL:$<TARGET_PROPERTY:TESSERA_GPU>,emulated>,${tessera_gpu_emulated},$<IF:$<STREQUAL:$<TARGET_PROPERTY:TESSERA_GPU>,dry>,${tessera_gpu_dry},${tessera_gpu}>>>
  $<INSTALL_INTERFACE:$<IF:$<STREQUAL:$<TARGET_PROPERTY:TESSERA_GPU>,dry>,tessera::${tessera_gpu_dry_export},tessera::${tessera_gpu_export}>>)
if(BUILD_SHARED_LIBS)  # the choice is the program's, not that of a library between
  list(TRANSFORM gpu_of_program REPLACE "(.+)"
    "$<$<STREQUAL:$<TARGET_PROPERTY:TYPE>,EXECUTABLE>:\\1>")
  target_link_options(tessera_core INTERFACE -Wl,--no-as-needed)  # no program names it itself
endif()
target_link_libraries(tessera_core INTERFACE ${gpu_of_program})
