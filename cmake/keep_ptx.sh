#!/usr/bin/env bash
# keep_ptx.sh DIR COMMAND...: runs a compile of nvcc and keeps its PTX in DIR, and what ptxas says of its
# kernels (NAME.ptxas). Of what else nvcc's --keep leaves, ten times as much, nothing stays.
set -euo pipefail
dir=$1
shift
work=$(mktemp -d "$dir/XXXXXX")
trap 'rm -rf "$work"' EXIT
code=0
"$@" --keep --keep-dir="$work" -Xptxas=-v 2> "$work/messages" || code=$?
of_ptxas='^(ptxas info|    [0-9]+ bytes stack frame)'
grep -Ev "$of_ptxas" "$work/messages" >&2 || true
[[ $code -eq 0 ]] || exit "$code"
ptx=$(echo "$work"/*.ptx)
grep -E "$of_ptxas" "$work/messages" > "$work/ptxas" || true
mv "$ptx" "$dir"
name=${ptx##*/}
mv "$work/ptxas" "$dir/${name%.ptx}.ptxas"
