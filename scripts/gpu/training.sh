#!/usr/bin/env bash
# training.sh parity|twice|graph TRAIN TEXT [OPTION...]: trainings that must agree, by the program TRAIN.
#   parity  the last loss on the CPU and on the GPU, to a thousandth: products sum in another order
#   twice   the weights of two runs, to the bit
#   graph   those of a run step by step and of one that repeats a CUDA graph, to the bit
# In $WORK. Fused products or not is decided by a clock: the two runs share a table of their own.
set -euo pipefail
what=$1 train=$2 text=$3
shift 3
folder=$WORK/training-$what-$$
mkdir -p "$folder"
export TESSERA_GEMM_TABLE=$folder/gemm.json

run() {  # run NAME OPTION...: a row a step in NAME.jsonl
  local name=$1
  shift
  echo "== $name: $*"
  "$train" --data "$text" --tokenizer bytes --eval-every 0 --log "$folder/$name.jsonl" "$@"
}
last_loss() { tail -n 1 "$folder/$1.jsonl" | sed -n 's/.*"loss": *\([-+0-9.eE]*\).*/\1/p'; }

if [[ $what == parity ]]; then
  run cpu "$@" --device cpu
  run cuda "$@" --device cuda
  cpu=$(last_loss cpu) cuda=$(last_loss cuda)
  echo "last loss: cpu $cpu, cuda $cuda"
  awk -v a="$cpu" -v b="$cuda" 'BEGIN { if (a == "" || b == "") exit 1; d = a > b ? a - b : b - a; exit !(d <= 1e-3 * a) }'
  exit
fi
other=()
[[ $what != graph ]] || other=(--graph)
run once "$@" --device cuda --deterministic --save "$folder/once"
run again "$@" --device cuda --deterministic "${other[@]}" --save "$folder/again"
for file in model.safetensors training/rank-0-0.bin; do
  cmp "$folder/once/$file" "$folder/again/$file"
  echo "equal: $file"
done
