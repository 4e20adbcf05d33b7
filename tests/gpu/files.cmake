# Which files of tests/cuda run on a GPU too: each stands in one of these lists.

set(gpu_suite_files test_cuda_accelerator test_cuda_accelerator_graphs test_cuda_attention test_cuda_big_model test_cuda_fp8
  test_cuda_fp8_layers test_cuda_gemm test_cuda_gemm_choice test_cuda_gemm_table test_cuda_graph test_cuda_graphed_step test_cuda_kernels
  test_cuda_loader test_cuda_one_device test_cuda_optim test_cuda_rows test_cuda_runtime test_cuda_square_sum test_cuda_training)
# As programs of their own: gpu_ops, gpu_bad_input.
set(gpu_program_files test_cuda_ops test_cuda_bad_input)
# Of both, those that include cuda_runtime.h. The others are compiled once for both backends.
set(gpu_runtime_files test_cuda_graph test_cuda_graphed_step test_cuda_loader test_cuda_runtime)

# FILE: why it does not run there.
set(not_on_a_gpu
  "test_emulation: kernels with deliberate bugs, which the emulation finds"
  "test_cuda_traffic: bytes of launches, which the emulation counts"
  "test_cuda_dry: the device that calculates nothing"
  "test_cuda_price: the device that calculates nothing"
  "test_cuda_price_tables: the device that calculates nothing"
  "test_cuda_launch_order: bench_step on the emulation, beside its price"
  "test_cuda_rates: gpu_rates on the emulation"
  "test_cuda_nccl: ranks on a device each, with a mock of NCCL that queues work on emulated streams"
  "test_cuda_sharding: the same ranks"
  "test_cuda_fp8_sharding: the same ranks"
  "test_cuda_offload: the same ranks"
  "test_cuda_accelerator_offload: the same ranks"
  "test_cuda_accelerator_graph_ranks: the same ranks")

file(GLOB sources CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_LIST_DIR}/../cuda
  ${CMAKE_CURRENT_LIST_DIR}/../cuda/test_*.cpp)
list(TRANSFORM sources REPLACE "\\.cpp$" "")
list(TRANSFORM not_on_a_gpu REPLACE ":.*" "" OUTPUT_VARIABLE others)
set(listed ${gpu_suite_files} ${gpu_program_files} ${others})
foreach(name IN LISTS sources)
  if(NOT name IN_LIST listed)
    message(FATAL_ERROR "tests/cuda/${name}.cpp: does it run on a GPU? tests/gpu/files.cmake has a list of those "
      "that do, and one of the others with the reason")
  endif()
  list(REMOVE_ITEM listed ${name})
endforeach()
if(listed)
  message(FATAL_ERROR "tests/gpu/files.cmake names what is not in tests/cuda: ${listed}")
endif()
