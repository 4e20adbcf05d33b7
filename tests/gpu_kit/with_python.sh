#!/bin/sh
# with_python.sh FILE [ARGUMENT...]: a test, FILE from this folder on; skipped, and said, without a Python.
if ! command -v python3 > /dev/null; then
  echo "skipped: there is no python3 here"
  exit 77
fi
file=$1
shift
exec python3 "$(dirname "$0")/$file" "$@"
