#!/bin/sh
# Usage: tensor_parallel_programs.sh TESSERA GPT2_TRAIN LLAMA_TRAIN NLP_EXAMPLE
# Each program alone and as two ranks with --tp-size 2 that share its layers: the losses that it prints
# are the same up to rounding. A training of GPT-2 that two ranks saved goes on alone.
set -eu
tessera=$1 gpt2=$2 llama=$3 bert=$4
command -v mpirun > /dev/null || { echo "skipped: mpirun is not installed"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
awk 'BEGIN { for (i = 0; i < 3000; ++i) printf "%d times %d is %d.\n", i % 13, i % 17, i % 13 * (i % 17) }' \
  > "$folder/text"
together() { TESSERA_COMPARE_TRACES=1 "$tessera" launch -n 2 "$@" --tp-size 2; }

# same NAME COUNT: in $folder/NAME.one and NAME.two there are COUNT numbers that differ by no more than
# f32 and the digits that are printed allow.
same() {
  paste "$folder/$1.one" "$folder/$1.two" | awk -v name="$1" -v count="$2" '
    { difference = $1 - $2; if (difference < 0) difference = -difference
      if (NF != 2 || difference > 2e-4 + 1e-4 * $1) { print name ": " $0; wrong = 1 } }
    END { if (NR != count) { print name ": " NR " numbers, not " count; wrong = 1 } exit wrong }'
}

logged() { grep -oE '"(loss|val_loss|grad_norm)":[0-9.e+-]+' "$1" | cut -d: -f2; }
flags="--data $folder/text --layers 2 --width 32 --heads 4 --context 32 --batch-size 3 --warmup 2
  --dropout 0.1 --eval-every 6 --threads 1 --lr 3e-3"
# shellcheck disable=SC2086  # flags are words
"$gpt2" $flags --steps 12 --accumulate 2 --log "$folder/one.jsonl" > /dev/null
# shellcheck disable=SC2086
together "$gpt2" $flags --steps 12 --accumulate 2 --stop-at 9 --save "$folder/gpt2" \
  --log "$folder/two.jsonl" > /dev/null
"$gpt2" --resume "$folder/gpt2" --accumulate 2 --log "$folder/two.jsonl" > /dev/null
logged "$folder/one.jsonl" > "$folder/gpt2.one"
logged "$folder/two.jsonl" | awk 'NR != 20' > "$folder/gpt2.two"  # it validates where it stops, too
same gpt2 26

printed() { grep -oE 'loss [0-9.]+' "$1" | cut -d' ' -f2; }
flags="--data $folder/text --layers 2 --width 32 --inner 48 --heads 4 --kv-heads 2 --context 32
  --batch-size 4 --steps 40 --threads 1"
# shellcheck disable=SC2086
"$llama" $flags > "$folder/one.txt"
# shellcheck disable=SC2086
together "$llama" $flags > "$folder/two.txt"
for run in one two; do printed "$folder/$run.txt" > "$folder/llama.$run"; done
same llama 4

if test -z "${TESSERA_DATA_DIR:-}"; then echo "without BERT: TESSERA_DATA_DIR is unset"; exit 0; fi
flags="--data $TESSERA_DATA_DIR --train-rows 256 --width 32 --heads 2 --layers 2 --epochs 1 --max-length 32
  --batch-size 16 --dropout 0.1"
# shellcheck disable=SC2086
"$bert" $flags > "$folder/one.txt"
# shellcheck disable=SC2086
together "$bert" $flags > "$folder/two.txt"
for run in one two; do printed "$folder/$run.txt" > "$folder/bert.$run"; done
same bert 1
echo "gpt2, llama and bert: losses of two ranks that share layers are those of one process"
