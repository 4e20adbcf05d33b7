# Three libraries define the functions of core/cuda/backend.h, and a program links one of them:
#   tessera_core_cuda           NVIDIA's runtime and the kernels, compiled by nvcc
#   tessera_core_cuda_emulated  the same sources on the CPU (core/cuda/emulation), for tests
#   tessera_core_no_cuda        there is no GPU
# Programs get the first where nvcc was found, else the last. A program with the target property
# TESSERA_GPU = emulated gets the second.
add_library(tessera_core_no_cuda STATIC core/cuda/none/backend_none.cpp)
set_target_properties(tessera_core_no_cuda PROPERTIES EXPORT_NAME core_no_cuda POSITION_INDEPENDENT_CODE ON)
target_link_libraries(tessera_core_no_cuda PRIVATE $<BUILD_INTERFACE:tessera_compile> PUBLIC tessera_core)

set(tessera_gpu tessera_core_no_cuda)
set(tessera_gpu_emulated tessera_core_no_cuda)
if(TESSERA_EMULATION)
  add_subdirectory(core/cuda/emulation)
  set(tessera_gpu_emulated tessera_core_cuda_emulated)
endif()

target_link_libraries(tessera_core INTERFACE
  $<BUILD_INTERFACE:$<IF:$<STREQUAL:$<TARGET_PROPERTY:TESSERA_GPU>,emulated>,${tessera_gpu_emulated},${tessera_gpu}>>
  $<INSTALL_INTERFACE:tessera::core_no_cuda>)
