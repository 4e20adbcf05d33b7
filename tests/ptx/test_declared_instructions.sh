#!/usr/bin/env bash
# test_declared_instructions.sh RULES FOLDER: kernels whose launches say what they issue
# (LaunchConfig::instructions), in the sources below FOLDER, have lines in RULES that bound it from
# both sides, by `loop` or `f32`; so has each formula to which elementwise.cuh gives a number. Which
# instances of a kernel say it is the launch's to decide, and not seen here.
set -euo pipefail
rules=$1 folder=$2
# FILE KERNEL; of formulas the whole name.
declared() {
  local source kernel file formula number inputs
  grep -rlE '\.instructions =' "$folder" --include='*.cu' --include='*.cuh' | while read -r source; do
    awk '/\.instructions =/ { inside = 1 }
      inside && match($0, /[a-z0-9_]+(_kernel)</) { print substr($0, RSTART, RLENGTH - 1); inside = 0 }' \
      "$source" | sort -u | while read -r kernel; do
      # elementwise.cuh goes by its formulas.
      if [[ $source == *.cu ]]; then echo "$(basename "$source" .cu) $kernel"; fi
    done
  done
  grep -ohE '^TS_(APPROXIMATE_)?INSTRUCTIONS\([a-z]+, [A-Za-z0-9]+' "$folder"/elementwise/elementwise.cuh |
    sed -E 's/TS_A.*\((.*), (.*)/\1 \2 Approximate/; s/TS_I.*\((.*), (.*)/\1 \2 float/' |
    while read -r file formula number; do
      case $file in unary) inputs=1 ;; ternary) inputs=3 ;; *) inputs=2 ;; esac
      echo "elementwise_$file elementwise_kernel<$inputs,$formula,float,float,float,$number>"
  done
}
declared | awk -v rules="$rules" '
  BEGIN {
    while ((getline line < rules) > 0) {
      sub(/#.*/, "", line)
      if (split(line, word, /[ \t]+/) < 2) continue
      file[++lines] = word[1]; kernel[lines] = word[2]
      bounded[lines] = line ~ /[0-9]<=loop.* loop<=[0-9]/ || line ~ /[0-9]<=f32.* f32<=[0-9]/
    }
  }
  {
    ++count
    exact = $2 ~ />$/
    found = 0
    for (i = 1; i <= lines && !found; ++i) {
      if (file[i] != $1) continue
      if (exact) {
        if ($2 !~ ("^" kernel[i])) continue
        found = bounded[i]
        break
      }
      if (index(kernel[i], $2) == 1 && bounded[i]) found = 1
    }
    if (!found) { print $1 ".cu: " $2 ": its launch says what it issues, and no rule bounds it"; failed = 1 }
  }
  END {
    if (count < 10) { print count + 0 " launches that say what they issue were found"; failed = 1 }
    if (!failed) print count " are bounded"
    exit failed
  }'
