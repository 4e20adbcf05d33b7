#!/usr/bin/env bash
# Muon beside AdamW on a text, each with the best of four rates: validation losses by step, as a
# table for a page of docs/measurements.
#
#     bench/compare/muon_curve.sh TRAIN TEXT [FLAGS OF TRAIN...]
#     bench/compare/muon_curve.sh build/quickstart/examples/gpt2/train shakespeare.txt --steps 300
#
# TRAIN: examples/gpt2/train. A rate is that of Muon, whose rest AdamW trains at the best of its own.
# Rates and seeds are variables: ADAMW_RATES, MUON_RATES, SEEDS (a mean over them). Logs stay in
# $OUT, which is made where it is not given; a run whose log is complete is not run again.
set -euo pipefail
[[ $# -ge 2 ]] || { sed -n '2,11s/^# \?//p' "$0" >&2; exit 2; }
train=$1 text=$2
shift 2
read -ra adamw_rates <<< "${ADAMW_RATES:-1e-3 2e-3 4e-3 8e-3}"
read -ra muon_rates <<< "${MUON_RATES:-0.01 0.02 0.04 0.08}"
read -ra seeds <<< "${SEEDS:-1337}"
out=${OUT:-$(mktemp -d)}
mkdir -p "$out"

# min-lr: a tenth of the rate, of both.
run() {  # NAME RATE SEED FLAGS...
  local log=$out/$1-$2-$3.jsonl rate=$2 seed=$3
  shift 3
  [[ -e $log.done ]] && return
  "$train" --data "$text" --seed "$seed" --log "$log" "$@" > "${log%.jsonl}.txt"
  touch "$log.done"
  echo "$(basename "$log" .jsonl): $(tail -n 1 "$log" | grep -oE '"val_loss":[^,]*')" >&2
}
tenth() { awk -v rate="$1" 'BEGIN { printf "%.6g", rate / 10 }'; }
# STEP MEAN of the validation losses over the seeds.
losses() {  # NAME RATE
  local seed logs=()
  for seed in "${seeds[@]}"; do logs+=("$out/$1-$2-$seed.jsonl"); done
  sed -nE 's/.*"step":([0-9]+).*/& STEP \1/p' "${logs[@]}" |
    sed -nE 's/.*"val_loss":([0-9.eE+-]+).* STEP ([0-9]+)$/\2 \1/p' |
    awk '{ sum[$1] += $2; ++n[$1] } END { for (s in sum) printf "%d %.4f\n", s, sum[s] / n[s] }' | sort -n
}
last() { losses "$1" "$2" | tail -n 1 | cut -d' ' -f2; }
# The rate whose last loss is lowest.
best() {  # NAME RATES...
  local name=$1 rate
  shift
  for rate in "$@"; do echo "$(last "$name" "$rate") $rate"; done | sort -g | head -n 1 | cut -d' ' -f2
}

for rate in "${adamw_rates[@]}"; do
  for seed in "${seeds[@]}"; do
    run adamw "$rate" "$seed" "$@" --lr "$rate" --min-lr "$(tenth "$rate")"
  done
done
adamw=$(best adamw "${adamw_rates[@]}")
for rate in "${muon_rates[@]}"; do
  for seed in "${seeds[@]}"; do
    run muon "$rate" "$seed" "$@" --optimizer muon --muon-lr "$rate" \
      --lr "$adamw" --min-lr "$(tenth "$adamw")"
  done
done
muon=$(best muon "${muon_rates[@]}")

echo "| | $(printf '%s | ' "${adamw_rates[@]}")"
echo "|---|$(printf -- '---|%.0s' "${adamw_rates[@]}")"
echo "| AdamW, last validation loss | $(for rate in "${adamw_rates[@]}"; do printf '%s | ' "$(last adamw "$rate")"; done)"
echo
echo "| | $(printf '%s | ' "${muon_rates[@]}")"
echo "|---|$(printf -- '---|%.0s' "${muon_rates[@]}")"
echo "| Muon, last validation loss | $(for rate in "${muon_rates[@]}"; do printf '%s | ' "$(last muon "$rate")"; done)"
echo
echo "| step | AdamW, $adamw | Muon, $muon |"
echo "|---|---|---|"
join -j 1 <(losses adamw "$adamw" | sort -k1,1) <(losses muon "$muon" | sort -k1,1) | sort -n |
  awk '{ printf "| %d | %s | %s |\n", $1, $2, $3 }'
