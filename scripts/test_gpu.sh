#!/usr/bin/env bash
# test_gpu.sh [PART...] [--out DIR] [--quick] [--prefix DIR] [--rehearse]: all that needs a GPU.
# Builds the release preset and runs
#   the table of ops, bad input, cuBLASLt's and cuDNN's descriptors with choosing and running
#   compute-sanitizer's four tools over the table (its shapes are small)
#   a training beside the same one on the CPU, and ones twice, to the bit
#   bench_ops beside a copy and a product, trainings of 124M and 355M parameters and BERT's, each beside
#   its price (tessera price), and beside PyTorch, where a Python with torch and a GPU is
#   ($TESSERA_PYTHON, else python3)
# Writes DIR/report.md (default: out/gpu) with device, driver, versions, commit and the result of each
# part, and DIR/*.log, *.json.
#   PART        some parts alone, each of which is meant for less than ten minutes of a GPU; the
#               report goes on where it is. --list names them. "build" comes first, once
#   --machine F what prices are calculated from (default: h100.json beside the program that prices)
#   --quick     without the sanitizer, the large trainings and PyTorch
#   --prefix D  libraries that portable_prefix.sh has gathered in D
#   --rehearse  the same way with the emulated programs and tiny sizes, on a machine without a GPU: it
#               tries the script and the programs' options, and its figures mean nothing
# Exit code: 0 where every part passed, 1 where one failed, 77 where there is no GPU or no nvcc.
# shellcheck disable=SC2317  # the functions are called through part()
set -euo pipefail
cd "$(dirname "$0")/.."

known_parts=(build op_table bad_input cublaslt cudnn sanitizer_memcheck sanitizer_racecheck
  sanitizer_initcheck sanitizer_synccheck training_parity deterministic_twice deterministic_wide
  bench_ops speed_small speed_graph speed_124m speed_124m_graph speed_124m_fp8 speed_355m speed_bert
  compare)

out=out/gpu
prefix=
machine=examples/price/machines/h100.json
quick=0
rehearse=0
wanted=()
while [[ $# -gt 0 ]]; do
  case $1 in
    --list)
      printf '%s\n' "${known_parts[@]}"
      exit 0
      ;;
    --out | --prefix | --machine)
      [[ $# -ge 2 ]] || { echo "test_gpu.sh: $1 needs a path" >&2; exit 2; }
      if [[ $1 == --out ]]; then out=$2; elif [[ $1 == --machine ]]; then machine=$2; else
        [[ -r $2/environment ]] || { echo "test_gpu.sh: $2 was not made by portable_prefix.sh" >&2; exit 2; }
        prefix=$2
        # shellcheck disable=SC1091
        source "$2/environment"
      fi
      shift
      ;;
    --quick) quick=1 ;;
    --rehearse) rehearse=1 ;;
    *)
      if [[ " ${known_parts[*]} " != *" $1 "* ]]; then
        echo "test_gpu.sh: unknown option or part $1; there are --out, --prefix, --machine, --quick," \
          "--rehearse, --list, and the parts that --list names" >&2
        exit 2
      fi
      wanted+=("$1")
      ;;
  esac
  shift
done

export PATH="$PATH:/usr/local/cuda/bin"
command -v nvcc > /dev/null || { echo "test_gpu.sh: skipped: there is no nvcc" >&2; exit 77; }
if [[ $rehearse -eq 1 ]]; then
  gpu="none: a rehearsal on the emulation"
elif ! gpu=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2> /dev/null) ||
  [[ -z $gpu ]]; then
  echo "test_gpu.sh: skipped: nvidia-smi finds no GPU" >&2
  exit 77
fi

mkdir -p "$out"
report=$out/report.md
build=${TESSERA_GPU_BUILD:-build/release}
price=$build/bin/tessera-price
python=${TESSERA_PYTHON:-python3}
failed=0
header() {
  printf '# GPU report\n\n'
  printf -- '- date: %s\n' "$(date -u +%FT%TZ)"
  while IFS= read -r line; do printf -- '- GPU, driver, memory: %s\n' "$line"; done <<< "$gpu"
  printf -- '- toolkit: %s\n' "$(nvcc --version | sed -n 's/.*release //p')"
  printf -- '- compiler: %s\n' "$(c++ --version | head -n 1)"
  printf -- '- libraries: %s\n' "${prefix:-of the system}"
  if [[ $rehearse -eq 1 ]]; then
    printf -- '- emulated programs and tiny sizes under the names of the large ones: no figure below means anything\n'
  fi
  printf -- '- commit: %s%s\n\n' "$(git rev-parse HEAD 2> /dev/null || echo unknown)" \
    "$([[ -z $(git status --porcelain 2> /dev/null) ]] || echo ', changed')"
}
# Some parts alone go on with what is there.
rows=$out/parts.md
if [[ ${#wanted[@]} -eq 0 || ! -s $rows ]]; then
  { header
    printf '| part | result | seconds |\n|---|---|---|\n'; } > "$rows"
fi

is_wanted() { [[ ${#wanted[@]} -eq 0 || " ${wanted[*]} " == *" $1 "* ]]; }
part() {  # part NAME COMMAND...: runs it into DIR/NAME.log and adds a row
  local name=$1 start=$SECONDS result=passed
  is_wanted "$name" || return 0
  shift
  printf '==> %s\n' "$name"
  if ! "$@" > "$out/$name.log" 2>&1; then
    result="FAILED ($name.log)"
    failed=1
    tail -n 20 "$out/$name.log"
  fi
  printf '| %s | %s | %d |\n' "$name" "$result" $((SECONDS - start)) >> "$rows"
}
skip() {  # skip NAME REASON
  is_wanted "$1" || return 0
  printf '==> %s skipped: %s\n' "$1" "$2"
  printf '| %s | skipped: %s | 0 |\n' "$1" "$2" >> "$rows"
}

# What is run, and how much of it.
if [[ $rehearse -eq 1 ]]; then
  ops=$build/tests/cuda/test_cuda_ops
  bad_input=$build/tests/cuda/test_cuda_bad_input
  train=$build/examples/gpt2/train_emulated
  bench_ops=$build/bench/bench_ops_emulated
  bench_step=$build/bench/bench_step_emulated
  targets=(test_cuda_ops test_cuda_bad_input test_cublaslt gpt2_train_emulated bench_ops_emulated
    bench_step_emulated bench_step tessera_price)
  op_filter='*/gelu:*/layer_norm:*/matmul:-CudaDevice.*'
  bench_options=(--tokens 32 --seconds 0 --filter add)
  small=(--layers 1 --width 32 --heads 2 --context 16 --batch-size 2 --steps 3 --warmup 1)
  wide=("${small[@]}")
  tiny=(--layers 1 --width 32 --heads 2 --context 16 --batch-size 2 --vocab 64 --warmup 1 --steps 2)
else
  ops=$build/tests/gpu_ops
  bad_input=$build/tests/gpu_bad_input
  train=$build/examples/gpt2/train
  bench_ops=$build/bench/bench_ops
  bench_step=$build/bench/bench_step
  targets=(gpu_ops gpu_bad_input test_cublaslt gpt2_train bench_ops bench_step tessera_price)
  op_filter='-CudaDevice.*'
  bench_options=()
  small=(--layers 2 --width 64 --heads 4 --context 64 --batch-size 4 --steps 20 --warmup 2)
  wide=(--layers 2 --width 128 --heads 2 --context 1024 --batch-size 4 --steps 20 --warmup 2)
  tiny=()
fi

build_all() {
  TESSERA_REQUIRE_CUDA=1 cmake --preset release -B "$build" \
    -DTESSERA_BUILD_TESTS=ON -DTESSERA_BUILD_BENCH=ON -DTESSERA_BUILD_EXAMPLES=ON || return 1
  # Not every version of the sources has it.
  if cmake --build "$build" --target help | grep -q 'test_cudnn'; then targets+=(test_cudnn); fi
  cmake --build "$build" --target "${targets[@]}"
}
part build build_all
if [[ $failed -ne 0 ]]; then
  echo "test_gpu.sh: the build failed; see $out/build.log" >&2
  exit 1
fi

# ---- What is right

part op_table "$ops" --gtest_filter="$op_filter"
part bad_input "$bad_input"
part cublaslt "$build/tests/test_cublaslt"
if [[ -x $build/tests/test_cudnn ]]; then
  part cudnn "$build/tests/test_cudnn"
else
  skip cudnn "there is no test_cudnn"
fi

sanitize() {  # sanitize TOOL
  compute-sanitizer --tool "$1" --error-exitcode 1 "$ops" --gtest_filter="$op_filter"
}
for tool in memcheck racecheck initcheck synccheck; do
  if [[ $quick -eq 1 ]]; then
    skip "sanitizer_$tool" "--quick"
  elif [[ $rehearse -eq 1 ]]; then
    skip "sanitizer_$tool" "a rehearsal; the emulation has its own"
  elif ! command -v compute-sanitizer > /dev/null; then
    skip "sanitizer_$tool" "no compute-sanitizer on PATH"
  else
    part "sanitizer_$tool" sanitize "$tool"
  fi
done

# A text to train on: the sources themselves.
find core autograd nn optim data docs -type f \( -name '*.md' -o -name '*.h' -o -name '*.cpp' \) -print0 |
  LC_ALL=C sort -z | xargs -0 cat > "$out/corpus.txt"
if [[ $rehearse -eq 1 ]]; then  # the last tenth validates, which the emulation does slowly
  head -c 4000 "$out/corpus.txt" > "$out/short.txt"
  mv "$out/short.txt" "$out/corpus.txt"
fi
train() {  # train LOG OPTION...
  local log=$1
  shift
  "$train" --data "$out/corpus.txt" --tokenizer bytes --eval-every 0 --log "$log" "$@"
}
field() {  # field LOG NAME: of its last row
  tail -n 1 "$1" | sed -n "s/.*\"$2\": *\([-+0-9.eE]*\).*/\1/p"
}
parity() {
  rm -f "$out"/parity-*.jsonl
  train "$out/parity-cpu.jsonl" "${small[@]}" --device cpu || return 1
  train "$out/parity-cuda.jsonl" "${small[@]}" --device cuda || return 1
  local cpu cuda  # the functions run in a condition: nothing but return ends them
  cpu=$(field "$out/parity-cpu.jsonl" loss)
  cuda=$(field "$out/parity-cuda.jsonl" loss)
  echo "last loss: cpu $cpu, cuda $cuda"
  # Products sum in another order than the CPU's.
  [[ -n $cpu && -n $cuda ]] || return 1
  awk -v a="$cpu" -v b="$cuda" 'BEGIN { d = a - b; if (d < 0) d = -d; exit !(d <= 1e-3 * a) }'
}
part training_parity parity

twice() {  # twice OPTION...: a training has the same bits again
  local run file
  for run in once again; do
    rm -rf "${out:?}/$run" "$out/$run.jsonl"
    train "$out/$run.jsonl" "$@" --dropout 0.1 --dtype bf16 --device cuda --deterministic \
      --save "$out/$run" || return 1
  done
  for file in "$out"/once/*.safetensors; do
    cmp "$file" "$out/again/${file##*/}" || return 1
    echo "equal: ${file##*/}"
  done
}
part deterministic_twice twice "${small[@]}"
# Contexts of a kilotoken, of which gradients of attention add up several tiles.
part deterministic_wide twice "${wide[@]}"

# ---- How fast it is

part bench_ops "$bench_ops" --device cuda --dtype bf16 --json "$out/bench_ops.json" \
  "${bench_options[@]}"

export TESSERA_GEMM_TABLE=${TESSERA_GEMM_TABLE:-$out/gemm.json}
# Products and attention of a step run by the libraries, or it fails and says why.
[[ $rehearse -eq 1 ]] || export TESSERA_REQUIRE_LIBRARIES=1
speed() {  # speed NAME OPTION...: a row of tokens/s
  local name=$1 line
  shift
  line=$("$bench_step" --device cuda --dtype bf16 --warmup 5 --steps 20 "$@" "${tiny[@]}" | tail -n 1) ||
    return 1
  printf '%s: %s\n' "$name" "$line" | tee -a "$out/speeds.txt"
  [[ $line == *tokens_per_s* ]]
}
priced() {  # priced NAME "MODEL PRICE-OPTION..." OPTION...: speed, and its launches beside their price
  local name=$1 options
  read -ra options <<< "$2"
  shift 2
  speed "$name" "$@" --launch-times "$out/launches-$name.json" || return 1
  "$price" "${options[@]}" --machine "$machine" --json "$out/price-$name.json" > /dev/null || return 1
  { printf '\n%s, launch by launch, beside its price (%s):\n\n' "$name" "$machine"
    scripts/beside_price.py "$out/launches-$name.json" "$out/price-$name.json"; } |
    tee "$out/beside-$name.md"
}
[[ ${#wanted[@]} -gt 0 ]] || rm -f "$out"/speeds.txt "$out"/beside-*.md
part speed_small speed small --layers 6 --width 384 --heads 6 --context 1024 --batch-size 16 --vocab 256
part speed_graph speed small-graph --layers 6 --width 384 --heads 6 --context 1024 --batch-size 16 \
  --vocab 256 --graph
if [[ $quick -eq 0 ]]; then
  part speed_124m priced 124m "gpt2 --size 124m --batch-size 64 --dtype bf16" --layers 12 --width 768 \
    --heads 12 --context 1024 --batch-size 64 --vocab 50304
  part speed_124m_graph speed 124m-graph --layers 12 --width 768 --heads 12 --context 1024 \
    --batch-size 64 --vocab 50304 --graph
  # The emulation's products in float8 come from tests alone.
  if [[ $rehearse -eq 1 ]]; then skip speed_124m_fp8 "a rehearsal"; else
    part speed_124m_fp8 priced 124m-fp8 "gpt2 --size 124m --batch-size 64 --dtype fp8" --dtype fp8-delayed \
      --layers 12 --width 768 --heads 12 --context 1024 --batch-size 64 --vocab 50304
  fi
  part speed_355m priced 355m "gpt2 --size 355m --batch-size 32 --dtype bf16" --layers 24 --width 1024 \
    --heads 16 --context 1024 --batch-size 32 --vocab 50304
  part speed_bert priced bert "bert --size base --batch-size 64 --dtype bf16" --model bert --layers 12 \
    --width 768 --heads 12 --context 512 --batch-size 64 --vocab 30528
fi

compare() {
  "$python" bench/compare/run.py --tessera "$1" --device "$2" --json "$out/compare.json" "${@:3}"
}
if [[ $quick -eq 1 ]]; then
  skip compare "--quick"
elif ! "$python" -c 'import torch' 2> /dev/null; then
  skip compare "$python has no torch; see bench/requirements.txt"
elif [[ $rehearse -eq 1 ]]; then
  part compare compare "$build/bench/bench_step" cpu --models tiny tiny-bert --dtype f32 --no-compile \
    --warmup 1 --steps 1 --rounds 2
elif ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())'; then
  skip compare "the torch of $python finds no GPU"
else
  part compare compare "$bench_step" cuda --models 124m 355m bert --warmup 10 --steps 20 --rounds 5
fi

# ---- The report

cp "$rows" "$report"
for table in "$out"/beside-*.md; do
  if [[ -s $table ]]; then cat "$table" >> "$report"; fi
done
if [[ -s $out/speeds.txt ]]; then
  { printf '\nTraining steps in bf16 (bench_step):\n\n'
    sed 's/^/- /' "$out/speeds.txt"; } >> "$report"
fi
for table in bench_ops compare; do
  if [[ -s $out/$table.log ]]; then
    { printf '\n%s:\n\n```\n' "$table"
      cat "$out/$table.log"
      printf '```\n'; } >> "$report"
  fi
done
cat "$report"
exit "$failed"
