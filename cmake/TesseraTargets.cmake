# One target for each floor. Headers are included as <tessera/core/tensor/tensor.h>, in the tree as after
# installation, through a folder of links; tests/test_layering guards the direction of includes.
set(TESSERA_INCLUDE_DIR ${PROJECT_BINARY_DIR}/include)
set(TESSERA_FLOORS core autograd nn optim precision distributed data accelerate)
file(MAKE_DIRECTORY ${TESSERA_INCLUDE_DIR}/tessera)
foreach(floor IN LISTS TESSERA_FLOORS)
  file(CREATE_LINK ${CMAKE_CURRENT_SOURCE_DIR}/${floor} ${TESSERA_INCLUDE_DIR}/tessera/${floor} SYMBOLIC)
endforeach()
file(CREATE_LINK ${CMAKE_CURRENT_SOURCE_DIR}/tessera.h ${TESSERA_INCLUDE_DIR}/tessera.h SYMBOLIC)

# tessera_library(NAME SOURCES files... [DEPENDS targets...]): the library tessera::NAME, static
# unless BUILD_SHARED_LIBS is on.
function(tessera_library name)
  cmake_parse_arguments(arg "" "" "DEPENDS;SOURCES" ${ARGN})
  add_library(tessera_${name} ${arg_SOURCES})
  add_library(tessera::${name} ALIAS tessera_${name})
  set_target_properties(tessera_${name} PROPERTIES EXPORT_NAME ${name} POSITION_INDEPENDENT_CODE ON
    UNITY_BUILD ${TESSERA_UNITY} UNITY_BUILD_BATCH_SIZE 16)
  target_link_libraries(tessera_${name} PRIVATE $<BUILD_INTERFACE:tessera_compile> PUBLIC ${arg_DEPENDS})
  target_compile_features(tessera_${name} PUBLIC cxx_std_20)
  if(NOT PROJECT_IS_TOP_LEVEL)  # the project's warnings are not about these headers
    set_target_properties(tessera_${name} PROPERTIES SYSTEM ON)
  endif()
  if(TESSERA_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # A batch is one file to the compiler: it takes private classes for headers'.
    target_compile_options(tessera_${name} PRIVATE -Wno-subobject-linkage)
  endif()
endfunction()

# tessera_floor(NAME [DEPENDS targets...] [WITHOUT files...]): library of all sources of a folder but
# these.
function(tessera_floor name)
  cmake_parse_arguments(arg "" "" "DEPENDS;WITHOUT" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/${name}/*.cpp)
  # The command has a target of its own; a backend (X_mpi.cpp, mpi/) is compiled or its stub
  # (X_no_mpi.cpp), never an #ifdef.
  list(FILTER sources EXCLUDE REGEX "_simd\\.cpp$|/cuda/|/cli/")
  foreach(file IN LISTS arg_WITHOUT)
    list(REMOVE_ITEM sources ${CMAKE_CURRENT_SOURCE_DIR}/${name}/${file})
  endforeach()
  foreach(backend mpi nccl)
    string(TOUPPER ${backend} found)
    if(TESSERA_${found}_FOUND)
      list(FILTER sources EXCLUDE REGEX "_no_${backend}\\.cpp$")
    else()
      list(FILTER sources EXCLUDE REGEX "[^o]_${backend}\\.cpp$|/${backend}/")
    endif()
  endforeach()
  file(GLOB_RECURSE headers CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/${name}
       ${CMAKE_CURRENT_SOURCE_DIR}/${name}/*.h)
  list(FILTER headers EXCLUDE REGEX "^transport/(mpi|nccl)/|^models/config_reader|^io/bounded_json|^text/sentencepiece_module")  # private
  # Of the GPU backend only its interface is public, and what a dry device was asked for; the rest
  # needs CUDA's headers.
  list(FILTER headers EXCLUDE REGEX "^gpu/transfers|^cuda/(emulation/|[^dt]|device|dry/record)")
  list(TRANSFORM headers PREPEND ${TESSERA_INCLUDE_DIR}/tessera/${name}/)
  if(NOT sources)
    set(sources ${CMAKE_CURRENT_SOURCE_DIR}/cmake/empty.cpp)
  endif()
  tessera_library(${name} DEPENDS ${arg_DEPENDS} SOURCES ${sources})
  target_sources(tessera_${name} PUBLIC FILE_SET HEADERS BASE_DIRS ${TESSERA_INCLUDE_DIR} FILES ${headers})
endfunction()

tessera_floor(core)
target_compile_options(tessera_core PRIVATE ${TESSERA_ASAN_INLINE})
target_link_libraries(tessera_core PUBLIC Threads::Threads PRIVATE
  $<BUILD_INTERFACE:Eigen3::Eigen> $<BUILD_INTERFACE:nlohmann_json::nlohmann_json> PCRE2::8BIT)
# Factorisations keep to the thread that calls them: a team of their own would have a say in bits.
set_source_files_properties(core/kernels/linalg/linalg_cpu.cpp core/kernels/linalg/linalg_orthogonal_cpu.cpp
  PROPERTIES COMPILE_DEFINITIONS EIGEN_DONT_PARALLELIZE)
if(oneDNN_FOUND)
  # OpenMP only to keep oneDNN on the thread that calls it.
  target_link_libraries(tessera_core PRIVATE oneDNN::oneDNN OpenMP::OpenMP_CXX)
  target_compile_definitions(tessera_core PRIVATE TESSERA_WITH_ONEDNN)
endif()

# Kernels, once for each instruction set (see core/isa.h).
file(GLOB simd_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/core/kernels/*/*_simd.cpp)
if(NOT TESSERA_X86)
  set(base_level generic)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
    set(base_level neon)
  endif()
  if(TESSERA_SIMD STREQUAL "native")
    set(TESSERA_SIMD ${base_level})
  elseif(NOT TESSERA_SIMD STREQUAL base_level)
    message(FATAL_ERROR "TESSERA_SIMD is '${TESSERA_SIMD}'; for ${CMAKE_SYSTEM_PROCESSOR} it must be ${base_level} or native")
  endif()
elseif(TESSERA_SIMD STREQUAL "native")  # only what the processor here runs
  set(TESSERA_SIMD v3)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -march=native -dM -E ${CMAKE_CURRENT_LIST_DIR}/empty.cpp
    OUTPUT_VARIABLE macros ERROR_QUIET)
  if(macros MATCHES "__AVX512F__" AND macros MATCHES "__AVX512BW__" AND macros MATCHES "__AVX512DQ__"
     AND macros MATCHES "__AVX512VL__")
    set(TESSERA_SIMD v4)
  endif()
endif()
foreach(level IN LISTS TESSERA_SIMD)
  if(TESSERA_X86 AND NOT level MATCHES "^v[34]$")
    message(FATAL_ERROR "TESSERA_SIMD is '${TESSERA_SIMD}'; it must be v3, v4, 'v3;v4' or native")
  endif()
endforeach()
if(simd_sources)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # g++ 12 takes what an intrinsic without a mask ignores for an operand that is read.
    set_source_files_properties(core/kernels/attention/attention_simd.cpp
      core/kernels/gemm/gemm_simd.cpp core/kernels/gemm/gemm_rows_simd.cpp
      core/kernels/gemm/int8_rows_simd.cpp core/kernels/recurrent/recurrent_simd.cpp
      PROPERTIES COMPILE_OPTIONS -Wno-uninitialized)
  endif()
  foreach(level IN LISTS TESSERA_SIMD)
    add_library(tessera_kernels_${level} OBJECT ${simd_sources})
    target_link_libraries(tessera_kernels_${level} PRIVATE tessera_compile)
    target_include_directories(tessera_kernels_${level} PRIVATE ${TESSERA_INCLUDE_DIR})
    target_compile_definitions(tessera_kernels_${level} PRIVATE TS_SIMD=${level})
    target_compile_options(tessera_kernels_${level} PRIVATE ${TESSERA_ASAN_INLINE}
      $<$<CONFIG:Release>:${TESSERA_KERNEL_OPTIMIZATION}>)
    set_target_properties(tessera_kernels_${level} PROPERTIES POSITION_INDEPENDENT_CODE ON)
    if(level STREQUAL "v4" AND TESSERA_X86)
      set_target_properties(tessera_kernels_${level} PROPERTIES TESSERA_MARCH x86-64-v4)
      target_compile_options(tessera_kernels_${level} PRIVATE -mprefer-vector-width=512)
    endif()
    target_sources(tessera_core PRIVATE $<TARGET_OBJECTS:tessera_kernels_${level}>)
  endforeach()
endif()
set(tessera_simd_definitions "")
if("v4" IN_LIST TESSERA_SIMD)
  set(tessera_simd_definitions TESSERA_WITH_V4)
  if(NOT "v3" IN_LIST TESSERA_SIMD)
    list(APPEND tessera_simd_definitions TESSERA_ONLY_V4)
  endif()
endif()
target_compile_definitions(tessera_core PRIVATE ${tessera_simd_definitions})

tessera_floor(autograd DEPENDS tessera_core)
# Adapters, which models do without that are not fine-tuned.
set(lora_sources lora/lora.cpp lora/lora_files.cpp)
# Models of the field with their files, which programs do without that train models of their own.
file(GLOB model_sources CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/nn
  ${CMAKE_CURRENT_SOURCE_DIR}/nn/models/*.cpp)
tessera_floor(nn DEPENDS tessera_autograd WITHOUT ${lora_sources} ${model_sources})
list(TRANSFORM lora_sources PREPEND nn/)
list(TRANSFORM model_sources PREPEND nn/)
tessera_library(lora DEPENDS tessera_nn SOURCES ${lora_sources})
target_link_libraries(tessera_lora PRIVATE $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>)
tessera_library(models DEPENDS tessera_nn SOURCES ${model_sources})
target_link_libraries(tessera_models PRIVATE $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>)
tessera_floor(optim DEPENDS tessera_autograd)
tessera_floor(data DEPENDS tessera_core WITHOUT text/sentencepiece_module.cpp)
if(SentencePiece_FOUND)
  # A module that is loaded when a file asks for it: its protobuf is another one than ours (data/text/sentencepiece_module.h).
  add_library(tessera_sentencepiece MODULE data/text/sentencepiece_module.cpp)
  set_target_properties(tessera_sentencepiece PROPERTIES PREFIX "lib" LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR})
  target_include_directories(tessera_sentencepiece PRIVATE ${TESSERA_INCLUDE_DIR})
  target_link_libraries(tessera_sentencepiece PRIVATE tessera_compile SentencePiece::SentencePiece)
  add_dependencies(tessera_data tessera_sentencepiece)
endif()
include(GNUInstallDirs)
set_source_files_properties(data/text/sentencepiece.cpp PROPERTIES COMPILE_DEFINITIONS
  "TESSERA_WITH_SENTENCEPIECE=$<BOOL:${SentencePiece_FOUND}>;TESSERA_LIBDIR=\"${CMAKE_INSTALL_LIBDIR}\";TESSERA_INSTALL_DIR=\"${CMAKE_INSTALL_FULL_LIBDIR}\";TESSERA_BUILD_DIR=\"${PROJECT_BINARY_DIR}\"")
target_link_libraries(tessera_data PRIVATE ${CMAKE_DL_LIBS})
target_link_libraries(tessera_data PRIVATE ICU::uc $<$<BOOL:${TESSERA_STATIC}>:ICU::data> ZLIB::ZLIB
  $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>)
tessera_floor(precision DEPENDS tessera_nn)
# Saved trainings, which programs do without that read and write HuggingFace's folders.
file(GLOB checkpoint_sources CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/distributed
  ${CMAKE_CURRENT_SOURCE_DIR}/distributed/checkpoint/*.cpp)
# How ranks train one model, apart from how they talk: tests compile it a second time.
file(GLOB shard_sources CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_SOURCE_DIR}/distributed
  ${CMAKE_CURRENT_SOURCE_DIR}/distributed/backward/*.cpp
  ${CMAKE_CURRENT_SOURCE_DIR}/distributed/data_parallel/*.cpp
  ${CMAKE_CURRENT_SOURCE_DIR}/distributed/fully_shard/*.cpp
  ${CMAKE_CURRENT_SOURCE_DIR}/distributed/pipeline/even_cuts.cpp
  ${CMAKE_CURRENT_SOURCE_DIR}/distributed/pipeline/stage*.cpp
  ${CMAKE_CURRENT_SOURCE_DIR}/distributed/tensor_parallel/parallelize.cpp)
tessera_floor(distributed DEPENDS tessera_nn tessera_optim tessera_precision
  WITHOUT ${checkpoint_sources} ${shard_sources})
target_link_libraries(tessera_distributed PUBLIC nlohmann_json::nlohmann_json)  # objects are JSON
target_compile_options(tessera_distributed PRIVATE -fopenmp-simd)  # reductions in rank order
if(TESSERA_MPI_FOUND)
  target_link_libraries(tessera_distributed PRIVATE MPI::MPI_CXX)
  if(NOT BUILD_SHARED_LIBS)  # programs without groups do without the MPI library too
    target_link_options(tessera_distributed INTERFACE -Wl,--as-needed)
  endif()
endif()
if(TESSERA_NCCL_FOUND)
  target_link_libraries(tessera_distributed PRIVATE ${CMAKE_DL_LIBS})
endif()
list(TRANSFORM checkpoint_sources PREPEND distributed/)
list(TRANSFORM shard_sources PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/distributed/)
tessera_library(shard DEPENDS tessera_distributed SOURCES ${shard_sources})
tessera_library(checkpoint DEPENDS tessera_distributed SOURCES ${checkpoint_sources})
target_include_directories(tessera_checkpoint SYSTEM PRIVATE ${TESSERA_XXHASH_INCLUDE})
# The frame of a program and its rank's control: all that a program takes from the facade which
# writes its loop itself.
tessera_library(process DEPENDS tessera_distributed
  SOURCES accelerate/process/process_control.cpp accelerate/process/rank_device.cpp accelerate/process/run.cpp)
tessera_floor(accelerate DEPENDS tessera_lora tessera_models tessera_process tessera_shard tessera_checkpoint tessera_data
  WITHOUT process/process_control.cpp process/rank_device.cpp process/run.cpp)
target_link_libraries(tessera_accelerate PRIVATE $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>
  yaml-cpp protobuf::libprotobuf-lite PNG::PNG)
# Messages of TensorBoard's event files, lite runtime; generated into the build folder.
file(GLOB proto_files CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/accelerate/tracking/*.proto)
if(proto_files)
  add_library(tessera_protos OBJECT ${proto_files})
  target_link_libraries(tessera_protos PUBLIC protobuf::libprotobuf-lite)
  set_target_properties(tessera_protos PROPERTIES POSITION_INDEPENDENT_CODE ON)
  protobuf_generate(TARGET tessera_protos IMPORT_DIRS ${CMAKE_CURRENT_SOURCE_DIR}
    PROTOC_OUT_DIR ${PROJECT_BINARY_DIR}/generated)
  target_include_directories(tessera_protos SYSTEM PUBLIC ${PROJECT_BINARY_DIR}/generated)
  target_include_directories(tessera_accelerate SYSTEM PRIVATE ${PROJECT_BINARY_DIR}/generated)
  target_sources(tessera_accelerate PRIVATE $<TARGET_OBJECTS:tessera_protos>)
  add_dependencies(tessera_accelerate tessera_protos)
endif()
target_compile_definitions(tessera_accelerate PRIVATE TESSERA_VERSION="${PROJECT_VERSION}")

add_library(tessera INTERFACE)
add_library(tessera::tessera ALIAS tessera)
target_link_libraries(tessera INTERFACE tessera_accelerate)

# The `tessera` command, build/bin/tessera: one file a subcommand.
if(TESSERA_BUILD_CLI)
  file(GLOB cli_sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/accelerate/cli/*.cpp)
  if(cli_sources)
    add_executable(tessera_cli ${cli_sources})
    set_target_properties(tessera_cli PROPERTIES OUTPUT_NAME tessera
      UNITY_BUILD ${TESSERA_UNITY} UNITY_BUILD_BATCH_SIZE 4
      RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
    target_link_libraries(tessera_cli PRIVATE tessera_compile tessera_accelerate CLI11::CLI11
      nlohmann_json::nlohmann_json ${CMAKE_DL_LIBS})
    # It reads flags and starts programs: half the time to compile CLI11, none to notice.
    target_compile_options(tessera_cli PRIVATE $<$<CONFIG:Release>:-Og>)
    if(TESSERA_SANITIZE STREQUAL "address")
      target_compile_options(tessera_cli PRIVATE -fno-sanitize=undefined)
    endif()
    # What `tessera env` says of the build.
    set_source_files_properties(accelerate/cli/env.cpp PROPERTIES COMPILE_DEFINITIONS
      "TESSERA_BUILT_WITH_MPI=\"$<$<BOOL:${TESSERA_MPI_FOUND}>:${MPI_CXX_VERSION}>\";TESSERA_BUILT_WITH_NCCL=\"$<$<BOOL:${TESSERA_NCCL_FOUND}>:yes>\";TESSERA_BUILT_WITH_ONEDNN=\"$<$<BOOL:${oneDNN_FOUND}>:${oneDNN_VERSION}>\";TESSERA_BUILT_WITH_CUDA=\"$<$<BOOL:${TESSERA_CUDA_FOUND}>:CUDA>\"")
  endif()
endif()
