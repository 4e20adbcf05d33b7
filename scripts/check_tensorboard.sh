#!/usr/bin/env bash
# check_tensorboard.sh [PRESET]: lets the real TensorBoard read what the tensorboard tracker writes.
# Needs a Python with tensorboard: TESSERA_TENSORBOARD_PYTHON names it; otherwise one is made under
# build/venv-tensorboard (from PyPI, the only step here that needs a network).
set -euo pipefail
cd "$(dirname "$0")/.."
preset=${1:-release}
if [[ -z ${TESSERA_TENSORBOARD_PYTHON:-} ]]; then
  venv=build/venv-tensorboard
  [[ -x $venv/bin/python ]] || python3 -m venv "$venv"
  "$venv/bin/python" -c 'import tensorboard' 2> /dev/null || "$venv/bin/pip" install -q tensorboard
  TESSERA_TENSORBOARD_PYTHON=$PWD/$venv/bin/python
fi
export TESSERA_TENSORBOARD_PYTHON
cmake --preset "$preset" > /dev/null
cmake --build --preset "$preset" --target test_tracking
"build/$preset/tests/test_tracking" --gtest_filter='*TensorBoardReads*'
