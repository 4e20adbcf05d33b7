#!/usr/bin/env bash
# shards.sh COUNT [TOOL [OPTION...]] PROGRAM [OPTION...]: the tests of a GoogleTest program in COUNT processes at once. Prints, one
# process after the other, all but the tests that passed. Tests that failed before ($ONLY) are all that is run.
set -euo pipefail
count=$1
shift
[[ -z ${ONLY:-} ]] || export GTEST_FILTER=$ONLY
name=${1##*/}  # with what stands before the program, a sanitizer say
for word in "$@"; do
  [[ $word != "$BIN"/* || $word == "$1" ]] || name+=-${word##*/}
done
processes=()
for ((i = 0; i < count; ++i)); do
  GTEST_TOTAL_SHARDS=$count GTEST_SHARD_INDEX=$i "$@" > "$WORK/$name-$i.log" 2>&1 &
  processes+=($!)
done
status=0
for ((i = 0; i < count; ++i)); do
  code=0
  wait "${processes[i]}" || code=$?
  # 77 of a program without a GPU; any other is worth more.
  if [[ $status -eq 0 || $status -eq 77 ]] && [[ $code -ne 0 ]]; then status=$code; fi
  # What a test prints is kept until its end is known.
  awk '/^\[ RUN / { held = $0; next }
       /^\[ +OK \]/ { held = ""; next }
       held != "" && !/^\[  (FAILED|SKIPPED) / { held = held "\n" $0; next }
       { if (held != "") print held; held = ""; print }
       END { if (held != "") print held }' "$WORK/$name-$i.log"
  [[ $code -eq 0 ]] || echo "$name: process $i of $count ended with code $code"
done
exit "$status"
