# oneDNN by its header and library: target oneDNN::oneDNN, oneDNN_VERSION. The configuration file of
# Debian's package is not used, for it demands OpenCL's development files, which nothing here needs.
find_path(oneDNN_INCLUDE_DIR NAMES dnnl.hpp)
find_library(oneDNN_LIBRARY NAMES dnnl)
mark_as_advanced(oneDNN_INCLUDE_DIR oneDNN_LIBRARY)

set(oneDNN_VERSION "")
if(oneDNN_INCLUDE_DIR)
  foreach(header oneapi/dnnl/dnnl_version.h dnnl_version.h)
    if(EXISTS ${oneDNN_INCLUDE_DIR}/${header} AND NOT oneDNN_VERSION)
      file(STRINGS ${oneDNN_INCLUDE_DIR}/${header} lines REGEX "define DNNL_VERSION_(MAJOR|MINOR|PATCH) +[0-9]+")
      string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
      list(JOIN numbers "." oneDNN_VERSION)
    endif()
  endforeach()
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(oneDNN REQUIRED_VARS oneDNN_LIBRARY oneDNN_INCLUDE_DIR
  VERSION_VAR oneDNN_VERSION)
if(oneDNN_FOUND AND NOT TARGET oneDNN::oneDNN)
  add_library(oneDNN::oneDNN UNKNOWN IMPORTED)
  set_target_properties(oneDNN::oneDNN PROPERTIES IMPORTED_LOCATION ${oneDNN_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${oneDNN_INCLUDE_DIR})
endif()
