#!/bin/sh
# Usage: gpt2_ranks.sh TESSERA TRAIN RANKS
# RANKS launched processes with one micro-batch each against one process that accumulates as many:
# losses, gradient norms and saved parameters must be the same to the last digit and bit.
set -eu
tessera=$1 train=$2 ranks=$3
command -v mpirun > /dev/null || { echo "skipped: mpirun is not installed"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# A text that a model of a few thousand parameters learns.
awk 'BEGIN { for (i = 0; i < 3000; ++i) printf "%d times %d is %d.\n", i % 13, i % 17, i % 13 * (i % 17) }' \
  > "$folder/text"
flags="--data $folder/text --layers 2 --width 32 --heads 2 --context 32 --batch-size 3 --steps 12
  --warmup 2 --dropout 0.1 --eval-every 6 --threads 1 --lr 3e-3"

# shellcheck disable=SC2086  # flags are words
"$train" $flags --accumulate "$ranks" --save "$folder/one" --log "$folder/one.jsonl"
# shellcheck disable=SC2086
TESSERA_COMPARE_TRACES=1 "$tessera" launch -n "$ranks" "$train" $flags --save "$folder/many" --log "$folder/many.jsonl"

fields() { grep -oE '"(step|loss|val_loss|grad_norm|lr)":[^,}]*' "$1"; }
fields "$folder/one.jsonl" > "$folder/one.fields"
fields "$folder/many.jsonl" > "$folder/many.fields"
test "$(grep -c '"loss"' "$folder/one.fields")" -eq 12
diff "$folder/one.fields" "$folder/many.fields"
cmp "$folder/one/model.safetensors" "$folder/many/model.safetensors"
cmp "$folder/one/training-12.safetensors" "$folder/many/training-12.safetensors"
echo "$ranks ranks: 12 losses, norms and all parameters are those of one process"
