#!/usr/bin/env bash
# keep_ptx.sh DIR COMMAND...: runs a compile of nvcc and keeps its PTX in DIR. Of what else nvcc's
# --keep leaves, ten times as much, nothing stays.
set -euo pipefail
dir=$1
shift
work=$(mktemp -d "$dir/XXXXXX")
trap 'rm -rf "$work"' EXIT
"$@" --keep --keep-dir="$work"
mv "$work"/*.ptx "$dir"
