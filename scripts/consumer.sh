#!/usr/bin/env bash
# consumer.sh: installs build/release into a fresh folder, builds examples/consumer against it as a
# project of its own, and runs its programs; once more with clang++ where it is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=$PWD/build/prefix
rm -rf "$prefix" build/consumer build/consumer_clang
cmake --install build/release --prefix "$prefix" > /dev/null

# consume FOLDER OPTION...
consume() {
  cmake -S examples/consumer -B "$1" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$prefix" "${@:2}"
  cmake --build "$1"
  "$1/consumer"
  "$1/price" "$prefix/share/tessera/machines/h100.json"
}
consume build/consumer
if command -v clang++ > /dev/null; then consume build/consumer_clang -DCMAKE_CXX_COMPILER=clang++; fi
