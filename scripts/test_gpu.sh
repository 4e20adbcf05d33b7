#!/usr/bin/env bash
# test_gpu.sh [--out DIR] [--quick]: all that needs a GPU, as one command. Builds the release preset,
# runs the table of ops on the device and the tests of cuBLASLt, compute-sanitizer's four tools over
# the table (its shapes are small), a training beside the same one on the CPU, and trainings whose
# speed is measured. Writes DIR/report.md (default: out/gpu) with device, driver, versions, commit and
# the result of each part, and DIR/*.log. --quick leaves the sanitizer and the large trainings out.
# Exit code: 0 where every part passed, 1 where one failed, 77 where there is no GPU or no nvcc.
# shellcheck disable=SC2317  # the functions are called through part()
set -euo pipefail
cd "$(dirname "$0")/.."

out=out/gpu
quick=0
while [[ $# -gt 0 ]]; do
  case $1 in
    --out)
      [[ $# -ge 2 ]] || { echo "test_gpu.sh: --out needs a folder" >&2; exit 2; }
      out=$2
      shift
      ;;
    --quick) quick=1 ;;
    *) echo "test_gpu.sh: unknown option $1; there are --out DIR and --quick" >&2; exit 2 ;;
  esac
  shift
done

export PATH="$PATH:/usr/local/cuda/bin"
command -v nvcc > /dev/null || { echo "test_gpu.sh: skipped: there is no nvcc" >&2; exit 77; }
if ! gpu=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2> /dev/null) ||
  [[ -z $gpu ]]; then
  echo "test_gpu.sh: skipped: nvidia-smi finds no GPU" >&2
  exit 77
fi

mkdir -p "$out"
report=$out/report.md
build=build/release
failed=0
{
  printf '# GPU report\n\n'
  printf -- '- date: %s\n' "$(date -u +%FT%TZ)"
  while IFS= read -r line; do printf -- '- GPU, driver, memory: %s\n' "$line"; done <<< "$gpu"
  printf -- '- toolkit: %s\n' "$(nvcc --version | sed -n 's/.*release //p')"
  printf -- '- compiler: %s\n' "$(c++ --version | head -n 1)"
  printf -- '- commit: %s%s\n\n' "$(git rev-parse HEAD 2> /dev/null || echo unknown)" \
    "$([[ -z $(git status --porcelain 2> /dev/null) ]] || echo ', changed')"
  printf '| part | result | seconds |\n|---|---|---|\n'
} > "$report"

part() {  # part NAME COMMAND...: runs it into DIR/NAME.log and adds a row
  local name=$1 start=$SECONDS result=passed
  shift
  printf '==> %s\n' "$name"
  if ! "$@" > "$out/$name.log" 2>&1; then
    result="FAILED ($name.log)"
    failed=1
    tail -n 20 "$out/$name.log"
  fi
  printf '| %s | %s | %d |\n' "$name" "$result" $((SECONDS - start)) >> "$report"
}

build_all() {
  TESSERA_REQUIRE_CUDA=1 cmake --preset release &&
    cmake --build --preset release --target gpu_ops test_cublaslt gpt2_train
}
part build build_all
if [[ $failed -ne 0 ]]; then
  echo "test_gpu.sh: the build failed; see $out/build.log" >&2
  exit 1
fi

part op_table "$build/tests/gpu_ops" --gtest_filter=-CudaDevice.*
part cublaslt "$build/tests/test_cublaslt"

if [[ $quick -eq 0 ]] && command -v compute-sanitizer > /dev/null; then
  for tool in memcheck racecheck initcheck synccheck; do
    part "sanitizer_$tool" compute-sanitizer --tool "$tool" --error-exitcode 1 \
      "$build/tests/gpu_ops" --gtest_filter=-CudaDevice.*
  done
elif [[ $quick -eq 0 ]]; then
  printf '| sanitizer | skipped: no compute-sanitizer on PATH | 0 |\n' >> "$report"
fi

# A text to train on: the sources themselves.
find core autograd nn optim data docs -type f \( -name '*.md' -o -name '*.h' -o -name '*.cpp' \) -print0 |
  LC_ALL=C sort -z | xargs -0 cat > "$out/corpus.txt"
train() {  # train LOG OPTION...
  local log=$1
  shift
  "$build/examples/gpt2/train" --data "$out/corpus.txt" --tokenizer bytes --eval-every 0 --log "$log" "$@"
}
field() {  # field LOG NAME: of its last row
  tail -n 1 "$1" | sed -n "s/.*\"$2\": *\([-+0-9.eE]*\).*/\1/p"
}
parity() {
  local small=(--layers 2 --width 64 --heads 4 --context 64 --batch-size 4 --steps 20 --warmup 2)
  rm -f "$out"/parity-*.jsonl
  train "$out/parity-cpu.jsonl" "${small[@]}" --device cpu || return 1
  train "$out/parity-cuda.jsonl" "${small[@]}" --device cuda || return 1
  local cpu cuda  # the functions run in a condition: nothing but return ends them
  cpu=$(field "$out/parity-cpu.jsonl" loss)
  cuda=$(field "$out/parity-cuda.jsonl" loss)
  echo "loss after 20 steps: cpu $cpu, cuda $cuda"
  # Products sum in another order than the CPU's.
  [[ -n $cpu && -n $cuda ]] || return 1
  awk -v a="$cpu" -v b="$cuda" 'BEGIN { d = a - b; if (d < 0) d = -d; exit !(d <= 1e-3 * a) }'
}
part training_parity parity

speed() {  # speed NAME OPTION...: a table row of tokens/s
  local name=$1
  shift
  rm -f "$out/speed-$name.jsonl"
  train "$out/speed-$name.jsonl" --device cuda --dtype bf16 --context 1024 --log-every 10 --warmup 5 "$@" ||
    return 1
  printf '%s: %s tokens/s, loss %s\n' "$name" "$(field "$out/speed-$name.jsonl" tokens_per_s)" \
    "$(field "$out/speed-$name.jsonl" loss)" | tee -a "$out/speeds.txt"
}
rm -f "$out/speeds.txt"
part speed_small speed small --layers 6 --width 384 --heads 6 --batch-size 16 --steps 20
if [[ $quick -eq 0 ]]; then
  export TESSERA_GEMM_TABLE=${TESSERA_GEMM_TABLE:-$out/gemm.json}
  part speed_124m speed 124m --layers 12 --width 768 --heads 12 --batch-size 16 --steps 20
fi
if [[ -s $out/speeds.txt ]]; then
  { printf '\nTrainings in bf16, context 1024, byte tokens (last rows of the logs):\n\n'
    sed 's/^/- /' "$out/speeds.txt"; } >> "$report"
fi
cat "$report"
exit "$failed"
