#!/usr/bin/env bash
# quickstart.sh [--data FILE] [--steps N] [--prompt TEXT]: from a bare Debian 12 to a language model
# that you trained. Installs packages, builds the training program, trains a small GPT on the CPU on
# FILE (default: the sources and documents of this repository), plots its losses, saves it and lets
# it write. Everything it makes is under out/quickstart.
set -euo pipefail
cd "$(dirname "$0")/.."

data=""
steps=1500
prompt=$'#include <'
while [[ $# -gt 0 ]]; do
  [[ $# -ge 2 ]] || { echo "quickstart.sh: $1 needs a value" >&2; exit 2; }
  case $1 in
    --data) data=$2 ;;
    --steps) steps=$2 ;;
    --prompt) prompt=$2 ;;
    *) echo "quickstart.sh: unknown option $1; there are --data FILE, --steps N, --prompt TEXT" >&2; exit 2 ;;
  esac
  shift 2
done
[[ -z $data || -r $data ]] || { echo "quickstart.sh: cannot read $data" >&2; exit 2; }

echo "==> Packages"
scripts/install_packages.sh g++ cmake ninja-build libeigen3-dev nlohmann-json3-dev zlib1g-dev \
  libicu-dev libyaml-cpp-dev libprotobuf-dev protobuf-compiler libpng-dev libdnnl-dev libxxhash-dev libpcre2-dev libsentencepiece-dev libcli11-dev gnuplot-nox

echo "==> Build"
cmake --preset quickstart
cmake --build --preset quickstart

out=out/quickstart
mkdir -p "$out"
if [[ -z $data ]]; then
  data=$out/corpus.txt
  find README.md CONTRIBUTING.md docs core autograd nn optim data examples -type f \
    \( -name '*.md' -o -name '*.h' -o -name '*.cpp' \) -print0 | LC_ALL=C sort -z | xargs -0 cat > "$data"
fi

echo "==> Train on $data ($(wc -c < "$data") bytes)"
rm -f "$out/log.jsonl"
build/quickstart/examples/gpt2/train --data "$data" --tokenizer bytes --layers 4 --width 128 --heads 4 \
  --context 64 --batch-size 12 --steps "$steps" --eval-every 250 --save "$out/model" --log "$out/log.jsonl"

echo "==> Plot"
columns() {  # columns FIELD: "step value" for each row of the log that has the field
  awk -v name="$1" '
    function field(key) {
      if (!match($0, "\"" key "\": *[-+0-9.eE]+")) return ""
      value = substr($0, RSTART, RLENGTH)
      sub(/.*: */, "", value)
      return value
    }
    field(name) != "" { print field("step"), field(name) }' "$out/log.jsonl"
}
columns loss > "$out/loss.dat"
columns val_loss > "$out/val_loss.dat"
gnuplot << END
set terminal pngcairo size 900,540 font "sans,11"
set output "$out/loss.png"
set xlabel "step"
set ylabel "cross entropy (nats a byte)"
set grid
plot "$out/loss.dat" with lines lw 1 lc rgb "#9db4d3" title "training", \
     "$out/val_loss.dat" with linespoints lw 2 pt 7 lc rgb "#c0392b" title "validation"
END

echo "==> Sample"
build/quickstart/examples/gpt2/generate --model "$out/model" --prompt "$prompt" --tokens 400 --seed 1
echo
echo "The model is in $out/model, the loss curve in $out/loss.png, the log in $out/log.jsonl."
