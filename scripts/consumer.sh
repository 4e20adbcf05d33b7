#!/usr/bin/env bash
# consumer.sh: installs build/release into a fresh folder, builds examples/consumer against it as a
# project of its own, and runs its programs.
set -euo pipefail
cd "$(dirname "$0")/.."
prefix=$PWD/build/prefix
rm -rf "$prefix" build/consumer
cmake --install build/release --prefix "$prefix" > /dev/null
cmake -S examples/consumer -B build/consumer -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$prefix"
cmake --build build/consumer
build/consumer/consumer
build/consumer/price "$prefix/share/tessera/machines/h100.json"
