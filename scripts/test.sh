#!/usr/bin/env bash
# test.sh [PRESET [CMAKE_OPTION...]]: installs what is missing, builds PRESET into build/PRESET and runs its tests.
# PRESET: release (default), dev, asan, tsan (see CMakePresets.json).
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-release}

scripts/install_packages.sh g++ cmake ninja-build libeigen3-dev nlohmann-json3-dev zlib1g-dev \
  libicu-dev libyaml-cpp-dev libprotobuf-dev protobuf-compiler libpng-dev libdnnl-dev libxxhash-dev libpcre2-dev libsentencepiece-dev libgtest-dev libbenchmark-dev libcli11-dev libopenmpi-dev openmpi-bin \
  libboost-context-dev valgrind

# Tests that need data sets skip, and say so, where there are none.
if [[ -z ${TESSERA_DATA_DIR:-} && -d ../shared/data ]]; then
  TESSERA_DATA_DIR=$(realpath ../shared/data)
  export TESSERA_DATA_DIR
fi

# shellcheck source=scripts/compiler_cache.sh
source scripts/compiler_cache.sh
cmake --preset "$preset" "${@:2}"
cmake --build --preset "$preset"
ctest --preset "$preset"
