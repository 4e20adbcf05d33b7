#!/usr/bin/env bash
# compile_errors.sh COMPILER INCLUDE_DIR: compiles each file of compile_errors/, which is wrong, and looks whether the
# first line with `error:` says what the file's first line, `// error: TEXT`, expects, and comes soon. With -DRIGHT it is
# right.
set -uo pipefail
export LC_ALL=C  # plain quotes
compiler=$1 include=$2
failed=0
for file in "$(dirname "$0")"/compile_errors/*.cpp; do
  name=$(basename "$file")
  expected=$(sed -n '1s|^// error: ||p' "$file")
  compile=("$compiler" -std=c++20 -fsyntax-only -Werror=unused-result "-I$include")
  message=$("${compile[@]}" "$file" 2>&1)
  first=$(grep -m 1 'error:' <<< "$message")
  if [[ -z $expected || $first != *"$expected"* ]]; then
    printf '%s: expected: %s\n  first error: %s\n' "$name" "$expected" "${first:-none, it compiles}"
    failed=1
  fi
  if ((before = $(grep -n -m 1 'error:' <<< "$message" | cut -d: -f1), before > 15)); then
    printf '%s: the error comes after %d lines\n' "$name" "$before"
    failed=1
  fi
  if ! message=$("${compile[@]}" -DRIGHT "$file" 2>&1); then
    printf '%s: what is right does not compile: %s\n' "$name" "$(grep -m 1 'error:' <<< "$message")"
    failed=1
  fi
done
exit $failed
