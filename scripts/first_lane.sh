#!/usr/bin/env bash
# first_lane.sh: the first answer to a change, in minutes: the format, a build of the library and of the
# tests that the change concerns, the layering, the table of ops. What passes here is not yet accepted:
# .ci/run is the whole, and nothing in it is left out for this.
#
#     scripts/first_lane.sh          what differs from origin/main or main, and what is not committed
#     scripts/first_lane.sh REV      what differs from REV
#
# Builds into build/first_lane with the preset dev, in batches of files, without nvcc, through ccache where it is
# installed: a warm cache is what makes it quick.
set -euo pipefail
cd "$(dirname "$0")/.."
start=$SECONDS
base=${1:-$(git rev-parse -q --verify origin/main || git rev-parse -q --verify main || echo HEAD)}
base=$(git merge-base "$base" HEAD)

scripts/format.sh --check
mkdir -p build
# shellcheck source=scripts/compiler_cache.sh
source scripts/compiler_cache.sh
if [[ -z ${TESSERA_DATA_DIR:-} && -d ../shared/data ]]; then
  TESSERA_DATA_DIR=$(realpath ../shared/data)
  export TESSERA_DATA_DIR
fi
# Tests that were changed, and tests that include a header of a unit that was: file names say it.
tests=(test_layering test_ops)
changed=$({ git diff --name-only "$base"; git ls-files --others --exclude-standard; } | sort -u)
while read -r file; do
  name=${file##*/}
  name=${name%%.*}
  case $file in
    tests/test_*.cpp | tests/*/test_*.cpp) tests+=("$name") ;;
    *.h | *.cpp | *.cu | *.cuh)
      header=${file%.*}
      [[ -f $header.h ]] || header=${header%_*}
      [[ -f $header.h ]] || continue
      while read -r test; do
        tests+=("$(basename "$test" .cpp)")
      done < <(grep -lF "<tessera/$header.h>" tests/test_*.cpp tests/*/test_*.cpp || true)
      ;;
  esac
done <<< "$changed"
mapfile -t tests < <(printf '%s\n' "${tests[@]}" | sort -u)
printf 'builds the library and %d tests: %s\n' ${#tests[@]} "${tests[*]}"
files=$(IFS=';'; echo "${tests[*]}")
cmake --preset dev -B build/first_lane -DBUILD_SHARED_LIBS=ON -DTESSERA_WITH_CUDA=OFF -DTESSERA_EMULATE_GPU=OFF \
  -DCMAKE_CXX_FLAGS_DEBUG=-Og -DTESSERA_UNITY=ON -DTESSERA_TEST_FILES="$files" > build/first_lane_configure.log 2>&1 ||
  { cat build/first_lane_configure.log; exit 1; }
cmake --build build/first_lane --target tessera_accelerate tests/all
pattern=$(IFS='|'; echo "^(${tests[*]})(_mpi[0-9]+)?$")
OMP_WAIT_POLICY=passive ctest --test-dir build/first_lane --output-on-failure --no-tests=error -j 2 -R "$pattern"
printf 'first lane passed in %d s\n' $((SECONDS - start))
