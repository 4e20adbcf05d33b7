#!/usr/bin/env bash
# without_gpu.sh (PROGRAM COUNT)...: where no GPU is to be seen, each program lists COUNT tests or more,
# and runs none: it says that there is no GPU and exits with 77.
set -euo pipefail
while [[ $# -gt 0 ]]; do
  program=$1 expected=$2
  shift 2
  listed=$("$program" --gtest_list_tests | grep -c '^  ')
  if ((listed < expected)); then
    echo "$program lists $listed tests, fewer than $expected" >&2
    exit 1
  fi
  code=0
  said=$("$program" 2>&1) || code=$?
  if [[ $code -ne 77 || $said != *"there is no GPU: "* || $said == *"[ RUN"* ]]; then
    printf '%s exits with %d and says\n%s\n' "$program" "$code" "$said" >&2
    exit 1
  fi
  printf '%s: %d tests; %s\n' "${program##*/}" "$listed" "$said"
done
