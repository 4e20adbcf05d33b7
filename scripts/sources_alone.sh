#!/usr/bin/env bash
# sources_alone.sh [FILE...]: compiles every source file of the library and the tessera command, or those,
# by itself, as a build without batches of files (TESSERA_UNITY) does, and looks at the syntax alone: in a
# batch a file is served by what those before it have included. Headers that no source begins with are
# compiled alone too. The compiler is CXX, else g++; another compiler than g++ gets examples and
# benchmarks too, which are in no batch. Left out is what no build has in batches: loops for instruction sets
# (*_simd.cpp), and what only the backends of a GPU have.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install_packages.sh g++ cmake ninja-build python3
folder=build/alone
mkdir -p build
rm -rf "$folder"  # of another compiler, perhaps
options=(-DTESSERA_BUILD_BENCH=OFF -DTESSERA_BUILD_EXAMPLES=OFF)
# oneDNN takes OpenMP, of which Debian installs one version: that of another clang.
[[ ${CXX:-g++} != clang* ]] ||
  options=(-DTESSERA_WITH_ONEDNN=OFF -DTESSERA_BUILD_BENCH=ON -DTESSERA_BUILD_EXAMPLES=ON)
cmake --preset dev -B "$folder" -DCMAKE_CXX_COMPILER="${CXX:-g++}" "${options[@]}" -DTESSERA_WITH_CUDA=OFF -DTESSERA_EMULATE_GPU=OFF \
  -DTESSERA_BUILD_TESTS=OFF > build/alone_configure.log 2>&1 ||
  { cat build/alone_configure.log; exit 1; }
ninja -C "$folder" generated/accelerate/tracking/tensorboard_event.pb.h > build/alone_configure.log 2>&1 ||
  { cat build/alone_configure.log; exit 1; }
exec python3 scripts/sources_alone.py "$folder" "$@"
