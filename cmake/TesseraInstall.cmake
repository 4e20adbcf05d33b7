# `cmake --install BUILD --prefix P`, then find_package(tessera) and tessera::tessera.
# What static libraries link privately is found again by the package's configuration.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(tessera_installed tessera_core ${tessera_gpu} tessera_autograd tessera_nn tessera_lora tessera_models tessera_optim tessera_precision
  tessera_data tessera_distributed tessera_shard tessera_checkpoint tessera_process tessera_accelerate tessera)
set(tessera_programs "")
foreach(program IN ITEMS tessera_cli tessera_price)
  if(TARGET ${program})
    list(APPEND tessera_programs ${program})
  endif()
endforeach()
if(TARGET tessera_price)  # who prices programs of their own links to the dry device
  list(APPEND tessera_installed tessera_core_cuda_dry)
endif()
if(BUILD_SHARED_LIBS)  # they find each other, and the command finds them, wherever the prefix is
  foreach(target IN LISTS tessera_installed)
    get_target_property(type ${target} TYPE)
    if(type STREQUAL "SHARED_LIBRARY")
      set_target_properties(${target} PROPERTIES INSTALL_RPATH "$ORIGIN")
    endif()
  endforeach()
  if(tessera_programs)
    set_target_properties(${tessera_programs} PROPERTIES
      INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR}")
  endif()
endif()
install(TARGETS ${tessera_installed} EXPORT tesseraTargets
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
  ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
  FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
if(TARGET tessera_sentencepiece)
  install(TARGETS tessera_sentencepiece LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
if(tessera_programs)
  install(TARGETS ${tessera_programs} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()
if(TARGET tessera_price)
  install(DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/examples/price/machines
    DESTINATION ${CMAKE_INSTALL_DATADIR}/tessera)
endif()
install(FILES ${CMAKE_CURRENT_SOURCE_DIR}/tessera.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
set(tessera_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/tessera)
install(EXPORT tesseraTargets NAMESPACE tessera:: DESTINATION ${tessera_package_dir})

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/tesseraConfig.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/tesseraConfig.cmake INSTALL_DESTINATION ${tessera_package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/tesseraConfigVersion.cmake
  COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/tesseraConfig.cmake
  ${CMAKE_CURRENT_BINARY_DIR}/tesseraConfigVersion.cmake
  ${CMAKE_CURRENT_LIST_DIR}/FindoneDNN.cmake ${CMAKE_CURRENT_LIST_DIR}/FindPCRE2.cmake DESTINATION ${tessera_package_dir})
