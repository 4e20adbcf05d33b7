# Sourced from the root of a checkout: CMake compiles through ccache where it is installed, and finds
# the objects of every checkout.
# shellcheck shell=bash
if command -v ccache > /dev/null; then
  export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
  export CMAKE_CXX_COMPILER_LAUNCHER=ccache CMAKE_CUDA_COMPILER_LAUNCHER=ccache
fi
