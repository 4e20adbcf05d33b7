#!/usr/bin/env bash
# fuzz.sh [SECONDS [DRIVER...]]: builds the fuzz drivers (preset fuzz: clang, libFuzzer, ASan, UBSan)
# and runs each of them, or those named (csv, jsonl, ...), for SECONDS (default 60). Findings and grown
# corpora stay in build/fuzz/corpus/DRIVER; a finding makes the script fail. What it finds becomes a
# test.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
shift || true
[[ $seconds =~ ^[1-9][0-9]*$ ]] || { echo "fuzz.sh: SECONDS must be a positive number; got '$seconds'" >&2; exit 2; }

scripts/install_packages.sh clang libomp-dev cmake ninja-build libeigen3-dev nlohmann-json3-dev \
  zlib1g-dev libicu-dev libyaml-cpp-dev libprotobuf-dev protobuf-compiler libpng-dev libxxhash-dev libpcre2-dev
# shellcheck source=scripts/compiler_cache.sh
source scripts/compiler_cache.sh
cmake --preset fuzz
cmake --build --preset fuzz

drivers=("$@")
if [[ ${#drivers[@]} -eq 0 ]]; then
  for source in tests/fuzz/fuzz_*.cpp; do
    name=$(basename "$source" .cpp)
    drivers+=("${name#fuzz_}")
  done
fi
failed=()
for driver in "${drivers[@]}"; do
  program=build/fuzz/tests/fuzz/fuzz_$driver
  [[ -x $program ]] || { echo "fuzz.sh: no driver '$driver'" >&2; exit 2; }
  corpus=build/fuzz/corpus/$driver
  mkdir -p "$corpus"
  seeds=tests/fuzz/seeds/$driver
  echo "== $driver, $seconds s"
  # A gigabyte for an input of at most 16 KiB: an allocation that believes a hostile size is a finding.
  if ! "$program" -max_total_time="$seconds" -max_len=16384 -timeout=10 -rss_limit_mb=1024 \
    -print_final_stats=1 -print_funcs=0 -artifact_prefix="$corpus/finding-" "$corpus" \
    $([[ -d $seeds ]] && echo "$seeds") > "$corpus.log" 2>&1; then
    failed+=("$driver")
    tail -n 30 "$corpus.log"
  fi
  grep -E "stat::(number_of_executed_units|average_exec_per_sec|peak_rss_mb)" "$corpus.log" || true
done
if [[ ${#failed[@]} -gt 0 ]]; then
  echo "fuzz.sh: findings in ${failed[*]}: see build/fuzz/corpus" >&2
  exit 1
fi
