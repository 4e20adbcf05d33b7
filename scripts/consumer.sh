#!/usr/bin/env bash
# consumer.sh: installs build/release into a fresh folder, builds examples/consumer against it as a
# project of its own, and runs its programs; so tests/embed, an application with habits of its own;
# once more with clang++ where it is installed.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/install_packages.sh locales  # what localedef reads
prefix=$PWD/build/prefix
rm -rf "$prefix" build/consumer build/consumer_clang build/embed build/embed_clang build/embed_parent
cmake --install build/release --prefix "$prefix" > /dev/null

# consume FOLDER OPTION...
consume() {
  cmake -S examples/consumer -B "$1" -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$prefix" "${@:2}"
  cmake --build "$1"
  "$1/consumer"
  "$1/price" "$prefix/share/tessera/machines/h100.json"
}
# embed FOLDER OPTION...
embed() {
  mkdir -p "$1/locales"  # a locale with a decimal comma
  localedef -i de_DE -f UTF-8 "$1/locales/de_DE.UTF-8" ||
    echo "consumer.sh: NOT RUN: no locale de_DE can be made here, so that no decimal comma is tried" >&2
  cmake -S tests/embed -B "$1" -G Ninja -DCMAKE_PREFIX_PATH="$prefix" "${@:2}"
  cmake --build "$1"
  ctest --test-dir "$1" --output-on-failure
}
consume build/consumer
embed build/embed
# Added by add_subdirectory(), with warnings that this tree does not know: its headers alone are compiled.
cmake -S tests/embed/parent -B build/embed_parent -G Ninja -DTESSERA_WITH_CUDA=OFF > /dev/null
cmake --build build/embed_parent --target parent_object
if command -v clang++ > /dev/null; then
  consume build/consumer_clang -DCMAKE_CXX_COMPILER=clang++
  embed build/embed_clang -DCMAKE_CXX_COMPILER=clang++
fi
