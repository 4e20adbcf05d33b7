# PCRE2 of bytes by its header and library: target PCRE2::8BIT, PCRE2_VERSION. Debian's package has no
# configuration file.
find_path(PCRE2_INCLUDE_DIR NAMES pcre2.h)
find_library(PCRE2_LIBRARY NAMES pcre2-8)
mark_as_advanced(PCRE2_INCLUDE_DIR PCRE2_LIBRARY)

set(PCRE2_VERSION "")
if(PCRE2_INCLUDE_DIR)
  file(STRINGS ${PCRE2_INCLUDE_DIR}/pcre2.h lines REGEX "define PCRE2_(MAJOR|MINOR) +[0-9]+")
  string(REGEX MATCHALL " [0-9]+" numbers "${lines}")
  list(JOIN numbers "." PCRE2_VERSION)
  string(REPLACE " " "" PCRE2_VERSION "${PCRE2_VERSION}")
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(PCRE2 REQUIRED_VARS PCRE2_LIBRARY PCRE2_INCLUDE_DIR
  VERSION_VAR PCRE2_VERSION)
if(PCRE2_FOUND AND NOT TARGET PCRE2::8BIT)
  add_library(PCRE2::8BIT UNKNOWN IMPORTED)
  set_target_properties(PCRE2::8BIT PROPERTIES IMPORTED_LOCATION ${PCRE2_LIBRARY}
    INTERFACE_INCLUDE_DIRECTORIES ${PCRE2_INCLUDE_DIR})
endif()
