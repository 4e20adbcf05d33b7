#!/usr/bin/env bash
# test_aarch64.sh SYSROOT [TEST_FILE...]: cross-compiles for 64-bit ARM into build/aarch64 and runs tests under qemu,
# those named here or these: values of the dtypes, formulas, all ops, products, convolutions, attention, recurrent layers.
#     scripts/test_aarch64.sh --objects            a library file of each kind, compiled alone
#     scripts/test_aarch64.sh --make-sysroot DIR   unpacks Debian's arm64 packages into DIR (network)
#
# Needs g++-aarch64-linux-gnu and, to run what was built, qemu-user; both are said where they are missing.
# .ci/run compiles the objects alone: no network, no qemu. Under qemu nothing is learned about time and
# about the order of memory accesses.
set -euo pipefail
cd "$(dirname "$0")/.."

tests=(test_half test_math test_ops test_golden_ops test_gemm test_matmul test_conv test_attention test_recurrent_layer)
packages=(libc6-dev libstdc++-12-dev libgcc-12-dev linux-libc-dev libgomp1 libyaml-cpp-dev libprotobuf-dev libpng-dev
  zlib1g-dev libicu-dev libxxhash-dev libpcre2-dev libgtest-dev libeigen3-dev nlohmann-json3-dev libcli11-dev)

need_compiler() {
  if ! command -v aarch64-linux-gnu-g++ > /dev/null; then
    echo "test_aarch64: there is no aarch64-linux-gnu-g++; apt install g++-aarch64-linux-gnu"
    exit 77
  fi
}

# A file of each kind: with and without intrinsics, kernels of the baseline, tensors, autograd.
objects() {
  need_compiler
  local file
  folder=$(mktemp -d)  # not local: the trap runs after this function has returned
  trap 'rm -rf "$folder"' EXIT
  mkdir "$folder/include"
  ln -s "$PWD" "$folder/include/tessera"
  local flags=(-std=c++20 -O1 -Wall -Wextra -Werror -Wno-psabi -Wno-maybe-uninitialized -ffp-contract=off "-I$folder/include")
  for file in core/isa.cpp core/kernels/gemm/gemm_cpu.cpp autograd/engine.cpp nn/recurrent/recurrent.cpp; do
    echo "aarch64: $file"
    aarch64-linux-gnu-g++ "${flags[@]}" -c "$file" -o "$folder/object.o"
  done
  for file in core/kernels/gemm/gemm_rows_simd.cpp core/kernels/recurrent/recurrent_simd.cpp core/kernels/reduce/reduce_simd.cpp; do
    echo "aarch64: $file"
    aarch64-linux-gnu-g++ "${flags[@]}" -DTS_SIMD=neon -c "$file" -o "$folder/object.o"
  done
}

# With a state of apt's own: the machine's packages and architectures stay as they are.
make_sysroot() {
  local root package
  mkdir -p "$1"
  root=$(realpath "$1")
  state=$(mktemp -d)  # not local: the trap runs after this function has returned
  trap 'rm -rf "$state"' EXIT
  mkdir -p "$state"/lists/partial "$state"/archives/partial
  touch "$state/status"
  local apt=(apt-get -qq -o "Dir::State=$state" -o "Dir::State::Lists=$state/lists" -o "Dir::State::status=$state/status"
    -o "Dir::Cache=$state" -o "Dir::Cache::archives=$state/archives" -o APT::Architecture=arm64 -o APT::Architectures=arm64)
  "${apt[@]}" update
  "${apt[@]}" install -y --no-install-recommends --download-only "${packages[@]}"
  for package in "$state"/archives/*.deb; do dpkg-deb -x "$package" "$root"; done
  echo "test_aarch64: unpacked $(find "$state/archives" -name '*.deb' | wc -l) packages into $root"
}

case ${1:-} in
  --objects)
    objects
    exit 0
    ;;
  --make-sysroot)
    make_sysroot "${2:?a folder outside of the sources}"
    exit 0
    ;;
  "")
    echo "usage: scripts/test_aarch64.sh SYSROOT [TEST_FILE...]; see its head"
    exit 2
    ;;
esac

need_compiler
sysroot=$(realpath "$1")
shift
if (($# > 0)); then tests=("$@"); fi
launcher=()
if command -v ccache > /dev/null; then
  export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
  launcher=(-DCMAKE_CXX_COMPILER_LAUNCHER=ccache)
fi
cmake -S . -B build/aarch64 -G Ninja -DCMAKE_COMPILE_WARNING_AS_ERROR=ON -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake "-DTESSERA_SYSROOT=$sysroot" \
  -DCMAKE_BUILD_TYPE=Release -DTESSERA_WITH_CUDA=OFF -DTESSERA_WITH_MPI=OFF -DTESSERA_WITH_NCCL=OFF -DTESSERA_WITH_ONEDNN=OFF \
  -DTESSERA_EMULATE_GPU=OFF -DTESSERA_BUILD_BENCH=OFF -DTESSERA_UNITY=ON "-DTESSERA_TEST_FILES=$(IFS=";"; echo "${tests[*]}")" "${launcher[@]}"
# Most test files are one program, some are their own.
program_of() { grep -q '^// ctest own program:' tests/*/"$1.cpp" && echo "$1" || echo tests; }
readarray -t programs < <(for name in "${tests[@]}"; do program_of "$name"; done | sort -u)
ninja -C build/aarch64 "${programs[@]}"
qemu=$(command -v qemu-aarch64 || command -v qemu-aarch64-static || true)
if [[ -z $qemu ]]; then
  echo "test_aarch64: built, and not run: there is no qemu-aarch64; apt install qemu-user"
  exit 77
fi
failed=0
for name in "${tests[@]}"; do
  program=("build/aarch64/tests/$(program_of "$name")")
  if [[ ${program[0]} == */tests ]]; then program+=("--file=$name"); fi
  echo "==== $name under $qemu"
  "$qemu" -L "$sysroot" "${program[@]}" --gtest_brief=1 || failed=1
done
exit "$failed"
