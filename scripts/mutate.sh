#!/usr/bin/env bash
# mutate.sh [OPTION...] [FILE[:FIRST-LAST]...]: puts small mistakes into source files, one by one, and says which of
# them the tests notice. See docs/testing.md and scripts/mutate.py --help. For the desk, not for CI.
set -euo pipefail
cd "$(dirname "$0")/.."
exec python3 scripts/mutate.py "$@"
