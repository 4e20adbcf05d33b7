#!/bin/sh
# Usage: gpt2_ranks.sh TESSERA TRAIN RANKS
# RANKS launched processes with one micro-batch each against one process that accumulates as many,
# in every mode of sharding: losses, gradient norms and saved parameters must be the same to the
# last digit and bit. Then a training that changes its mode and its number of ranks on the way.
set -eu
tessera=$1 train=$2 ranks=$3
command -v mpirun > /dev/null || { echo "skipped: mpirun is not installed"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# A text that a model of a few thousand parameters learns.
awk 'BEGIN { for (i = 0; i < 3000; ++i) printf "%d times %d is %d.\n", i % 13, i % 17, i % 13 * (i % 17) }' \
  > "$folder/text"
flags="--data $folder/text --layers 2 --width 36 --heads 3 --context 32 --batch-size 3 --steps 12
  --warmup 2 --dropout 0.1 --eval-every 6 --threads 1 --lr 3e-3"

fields() { grep -oE '"(step|loss|val_loss|grad_norm|lr)":[^,}]*' "$1"; }
# The training in $folder/$1 goes on alone for two steps, by all that its checkpoint holds, which
# one process then lays out in one way.
go_on_alone() {
  "$train" --resume "$folder/$1" --accumulate "$ranks" --steps 14 --save "$folder/$1" --log "$folder/$1.jsonl"
}
# It has the digits and bits of the one in $folder/$one, but for fields that match $2.
one=one
same_as_one() {
  go_on_alone "$1"
  for log in "$one" "$1"; do fields "$folder/$log.jsonl" | grep -v "${2:-^$}" > "$folder/$log.fields"; done
  diff "$folder/$one.fields" "$folder/$1.fields"
  cmp "$folder/$one/model.safetensors" "$folder/$1/model.safetensors"
  cmp "$folder/$one/training/rank-0-0.bin" "$folder/$1/training/rank-0-0.bin"
}

# shellcheck disable=SC2086  # flags are words
"$train" $flags --accumulate "$ranks" --save "$folder/one" --log "$folder/one.jsonl"
test "$(fields "$folder/one.jsonl" | grep -c '"loss"')" -eq 12
go_on_alone one
for mode in ddp zero1 zero2 zero3 fsdp; do
  # shellcheck disable=SC2086
  TESSERA_COMPARE_TRACES=1 "$tessera" launch -n "$ranks" "$train" $flags --sharding "$mode" \
    --save "$folder/$mode" --log "$folder/$mode.jsonl"
  grep -q "\"peak_bytes_by_rank\":\[[0-9.]*,[0-9.,]*\]" "$folder/$mode.jsonl"
  same_as_one "$mode"
done

# Sums go on over micro-batches where every backward reduces: any ranks x micro-batches are one sum.
# shellcheck disable=SC2086
"$tessera" launch -n "$ranks" "$train" $flags --sharding fsdp --stop-at 5 \
  --save "$folder/moved" --log "$folder/moved.jsonl"
"$train" --resume "$folder/moved" --accumulate "$ranks" --stop-at 8 --save "$folder/moved" \
  --log "$folder/moved.jsonl"
"$tessera" launch -n "$ranks" "$train" --resume "$folder/moved" --accumulate 1 --sharding zero2 \
  --save "$folder/moved" --log "$folder/moved.jsonl"
same_as_one moved val_loss  # it validates where it stops, too

# A signal to one rank ends all of them after one step, which they save.
endless=$(echo "$flags" | sed 's/--steps 12/--steps 1000000/; s/--eval-every 6/--eval-every 0/')
# shellcheck disable=SC2086
"$tessera" launch -n "$ranks" "$train" $endless --save "$folder/stopped" --log "$folder/stopped.jsonl" &
launched=$!
until test -s "$folder/stopped.jsonl"; do sleep 0.1; done
for process in /proc/[0-9]*; do  # the last one that is a rank
  if tr '\0' ' ' 2> /dev/null < "$process/cmdline" | grep -q "^$train .*$folder/stopped"; then rank=${process#/proc/}; fi
done
kill -TERM "$rank"
wait "$launched"
step=$(fields "$folder/stopped.jsonl" | sed -n 's/"step"://p' | tail -n 1)
one=one_stopped
# shellcheck disable=SC2086
"$train" $endless --accumulate "$ranks" --stop-at "$step" --save "$folder/$one" --log "$folder/$one.jsonl"
for log in "$one" stopped; do fields "$folder/$log.jsonl" > "$folder/$log.fields"; done
diff "$folder/$one.fields" "$folder/stopped.fields"
cmp "$folder/$one/model.safetensors" "$folder/stopped/model.safetensors"

# Muon, whose matrices lie in parts, with states that are rounded; --resume knows both.
muon="$flags --optimizer muon --states bf16"
one=one_muon
# shellcheck disable=SC2086
"$train" $muon --accumulate "$ranks" --save "$folder/$one" --log "$folder/$one.jsonl"
go_on_alone "$one"
for mode in zero1 fsdp; do
  # shellcheck disable=SC2086
  TESSERA_COMPARE_TRACES=1 "$tessera" launch -n "$ranks" "$train" $muon --sharding "$mode" \
    --stop-at 7 --save "$folder/muon_$mode" --log "$folder/muon_$mode.jsonl"
  "$tessera" launch -n "$ranks" "$train" --resume "$folder/muon_$mode" --sharding zero2 \
    --save "$folder/muon_$mode" --log "$folder/muon_$mode.jsonl"
  same_as_one "muon_$mode" val_loss
done
if cmp -s "$folder/one/model.safetensors" "$folder/one_muon/model.safetensors"; then
  echo "--optimizer muon trained as AdamW does"; exit 1
fi
echo "$ranks ranks: 12 losses, norms and all parameters are those of one process in every mode"
