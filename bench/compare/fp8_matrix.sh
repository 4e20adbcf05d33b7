#!/usr/bin/env bash
# Accuracy of the intent example in fp8, by what ranks hold and by recipe, beside bf16: a table for
# a page of docs/measurements.
#
#     bench/compare/fp8_matrix.sh BUILD DATA [FLAGS OF nlp_example...]
#     bench/compare/fp8_matrix.sh build/release "$TESSERA_DATA_DIR" --epochs 12
#
# One rank with the batch of two, else two ranks with a thread each; filter all. Logs stay in $OUT,
# which is made where it is not given; a run whose log is complete is not run again.
set -euo pipefail
[[ $# -ge 2 ]] || { sed -n '2,9s/^# \?//p' "$0" >&2; exit 2; }
build=$1 data=$2
shift 2
out=${OUT:-$(mktemp -d)}
batch=${BATCH_SIZE:-32}  # of all ranks
mkdir -p "$out"
export OMP_NUM_THREADS=1

run() {  # MODE RECIPE FLAGS...
  local log=$out/$1-$2.txt mode=$1 recipe=$2
  shift 2
  [[ -e $log.done ]] && return
  local program=("$build/examples/bert/nlp_example" --data "$data" "$@")
  if [[ $recipe == bf16 ]]; then
    program+=(--dtype bf16)
  else
    program+=(--dtype fp8 --fp8-recipe "$recipe" --fp8-filter all)
  fi
  if [[ $mode == one ]]; then
    "${program[@]}" --batch-size "$batch" > "$log"
  else
    TESSERA_SHARDING=$mode "$build/bin/tessera" launch -n 2 "${program[@]}" --batch-size $((batch / 2)) > "$log"
  fi
  touch "$log.done"
}
last() { tail -n 1 "$out/$1-$2.txt"; }
number() { grep -oE "$1 [0-9.]+" <<< "$2" | tail -n 1 | cut -d' ' -f2; }

echo "| ranks | recipe | loss | accuracy | calls in fp8 | fallbacks |"
echo "|---|---|---|---|---|---|"
for mode in one ddp zero1 zero2 zero3 fsdp; do
  for recipe in bf16 tensorwise delayed; do
    [[ $recipe == bf16 && $mode != one && $mode != ddp ]] && continue
    run "$mode" "$recipe" "$@"
    line=$(grep -E '^epoch|epoch ' "$out/$mode-$recipe.txt" | tail -n 1)
    echo "| $mode | $recipe | $(number loss "$line") | $(number accuracy "$line") | $(number fp8_calls "$line" || echo -) | $(number fp8_fallbacks "$line" || echo -) |"
  done
done
