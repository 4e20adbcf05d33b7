#!/usr/bin/env bash
# static_program.sh [CMAKE_OPTION...]: builds the programs of examples/llama without shared libraries, and tries the one
# that trains as an application would ship it: stripped, alone in a folder with its data, without an
# environment. It must be one file of at most 25 MB that needs no other, train a model and adapters on
# it.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=scripts/compiler_cache.sh
source scripts/compiler_cache.sh
cmake --preset static "$@"
cmake --build --preset static

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
strip -o "$folder/llama_train" build/static/examples/llama/llama_train
head -c 4000 README.md > "$folder/text"
cd "$folder"
size=$(stat -c %s llama_train)
echo "llama_train: $size bytes"
if [[ $size -gt 25000000 ]]; then
  echo "static_program.sh: llama_train has grown over 25 MB" >&2
  exit 1
fi
if ldd llama_train > needed 2>&1; then
  echo "static_program.sh: llama_train needs shared libraries:" >&2
  cat needed >&2
  exit 1
fi
train() { env -i ./llama_train --data text --steps 5 "$@"; }
train --layers 1 --width 32 --inner 64 --heads 2 --kv-heads 1 --context 16 --save base
train --model base --lora 2 --save adapters
[[ -s adapters/adapter_model.safetensors ]]
