#!/usr/bin/env bash
# complete_nlp.sh PROGRAM FOLDER: complete_nlp_example in one go, and stopped by SIGTERM and resumed,
# ends with the same weights and the same last line.
set -euo pipefail
program=$1 folder=$2
[[ -n ${TESSERA_DATA_DIR:-} ]] || { echo "TESSERA_DATA_DIR is unset"; exit 77; }
rm -rf "$folder"
mkdir -p "$folder"
options=(--data "$TESSERA_DATA_DIR" --train-rows 256 --width 32 --heads 2 --layers 1 --batch-size 8
  --accumulate 2 --epochs 3 --max-length 24 --track jsonl)

"$program" "${options[@]}" --project-dir "$folder/whole" --save "$folder/whole/model" > "$folder/whole.txt"

"$program" "${options[@]}" --project-dir "$folder/cut" --checkpoint-every 5 > "$folder/cut.txt" &
pid=$!
# As soon as there is a checkpoint, wherever the training is.
for _ in $(seq 600); do
  compgen -G "$folder/cut/checkpoints/checkpoint_*" > /dev/null && break
  sleep 0.05
done
kill -TERM $pid 2> /dev/null || true
wait $pid
"$program" "${options[@]}" --project-dir "$folder/cut" --resume --save "$folder/cut/model" > "$folder/resumed.txt"

cat "$folder/cut.txt" "$folder/resumed.txt"
cmp "$folder/whole/model/model.safetensors" "$folder/cut/model/model.safetensors"
[[ $(tail -1 "$folder/whole.txt") == $(tail -1 "$folder/resumed.txt") ]]
test -s "$folder/whole/metrics.jsonl"
