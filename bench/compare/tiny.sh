#!/bin/sh
# tiny.sh BENCH_STEP BENCH_GENERATE: the comparisons with PyTorch, JAX where it is and transformers where it is, at a
# size that says nothing, to see that they run.
# Skips (77) where python3, or $TESSERA_PYTHON, has no torch.
set -eu
python=${TESSERA_PYTHON:-python3}
"$python" -c 'import torch' 2> /dev/null || { echo "skipped: $python has no torch"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export PYTHONDONTWRITEBYTECODE=1
"$python" "$(dirname "$0")/run.py" --tessera "$1" --models tiny tiny-bert tiny-llama tiny-lstm tiny-vit tiny-cnn --dtype f32 --no-compile \
  --warmup 1 --steps 2 --rounds 2 --json "$folder/tiny.json" | tee "$folder/table"
test "$(grep -c 'tessera  .*[0-9]x' "$folder/table")" -eq 6
test "$(grep -c 'pytorch-eager .*[0-9]x' "$folder/table")" -eq 6
test "$(grep -c '^speed of tessera over' "$folder/table")" -eq 1
grep -q '^instruction sets: tessera .*, pytorch-eager ' "$folder/table"
"$python" - "$folder/tiny.json" << 'END'
import json
import sys
cells = json.load(open(sys.argv[1]))["cells"]
assert [cell["cell"] for cell in cells] == ["tiny", "tiny-bert", "tiny-llama", "tiny-lstm", "tiny-vit",
                                            "tiny-cnn"], cells
for cell in cells:
    for program in ("tessera", "pytorch-eager"):
        row = cell[program]
        assert row["ms_per_step"] > 0 and row["tokens_per_s"] > 0 and row["loss"] > 0, row
    # Nothing is learned in so few steps: the logarithm of the number of classes.
    expected = {"tiny-bert": 0.7, "tiny-vit": 2.3, "tiny-cnn": 2.3}.get(cell["cell"], 5.5)
    for program in [name for name in ("tessera", "pytorch-eager", "jax") if name in cell]:
        assert abs(cell[program]["loss"] - expected) < 0.7, cell[program]
END
"$python" -c 'import transformers' 2> /dev/null || exit 0
"$python" "$(dirname "$0")/generate.py" --bench "$2" --models tiny tiny-llama --dtype f32 --batch-size 3 --tokens 8 --rounds 1 \
  --json "$folder/generate.json" | tee "$folder/table"
test "$(grep -c '^tiny.*[0-9]x' "$folder/table")" -eq 2
"$python" - "$folder/generate.json" << 'END'
import json
import sys
for cell in json.load(open(sys.argv[1])):
    assert cell["equal"] == cell["tokens"] == 8 * cell["batch_size"], cell
    assert cell["ratio"] > 0 and 0 < cell["floor"] < 1 and cell["weight_bytes"] > 0, cell
END
