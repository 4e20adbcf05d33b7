#!/bin/sh
# with_python.sh FILE: a test of this folder; skipped, and said, without a Python.
if ! command -v python3 > /dev/null; then
  echo "skipped: there is no python3 here"
  exit 77
fi
exec python3 "$(dirname "$0")/$1"
