# gpu_programs: all that is run on a machine with a GPU, built where nvcc is. Their paths stand in
# gpu_programs.txt, relative to the build's folder, a line each.
set(programs gpu_libraries gpu_ops gpu_bad_input gpu_suite gpu_shapes gpu_rates test_cublaslt test_cudnn bench_ops
  bench_step gpt2_train tessera_price)
set(paths "")
foreach(program IN LISTS programs)
  if(NOT TARGET ${program})
    message(FATAL_ERROR "there is no ${program}, which runs on GPUs: build it, or take it from this list")
  endif()
  string(APPEND paths "$<PATH:RELATIVE_PATH,$<TARGET_FILE:${program}>,${CMAKE_BINARY_DIR}>\n")
endforeach()
add_custom_target(gpu_programs ALL DEPENDS ${programs})
file(GENERATE OUTPUT ${CMAKE_BINARY_DIR}/gpu_programs.txt CONTENT "${paths}")
