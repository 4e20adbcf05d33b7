#!/usr/bin/env python3
r"""Trains GPT-2 on two ranks under tessera's fsdp and PyTorch's FSDP2, or another mode of both, run
by run in turn.

    python bench/compare/sharded.py --build build --rounds 5
    python bench/compare/sharded.py --build build --sharding tp_sequence --mode tp
    python bench/compare/sharded.py --build build --sharding pp --mode pp \
        --options "--warmup 1 --steps 4 --micro-batches 8"

Each round starts bench_ddp (processes, by `tessera launch`) and pytorch_fsdp.py with the same
options, one after the other, so that a change of the machine's speed meets both. Prints both lines
of each round and at the end one JSON line: medians, and the median over the rounds of the ratios
(speed: tessera's tokens/s over PyTorch's; memory: tessera's resident bytes over PyTorch's, of rank 0,
over what each had before its model was made).

Needs the packages of bench/requirements.txt in the Python that runs this.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys

from run import cpu_settings

HERE = pathlib.Path(__file__).resolve().parent

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--build", default="build", help="build folder with bin/ and bench/")
parser.add_argument("--sharding", default="fsdp", help="tessera's mode")
parser.add_argument("--mode", default="fsdp", choices=["fsdp", "ddp", "tp", "tp_sequence", "pp", "pp_gpipe", "pp_interleaved",
                             "pp_zero_bubble"],
                    help="PyTorch's")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--ranks", type=int, default=2)
parser.add_argument("--options", default="--warmup 1 --steps 4",
                    help="of both programs, in one word: layers, width, batch-size, ...")
arguments = parser.parse_args()

build = pathlib.Path(arguments.build)
options = arguments.options.split()
programs = {
    "tessera": [build / "bin/tessera", "launch", "-n", str(arguments.ranks), "--",
                build / "bench/bench_ddp", "--sharding", arguments.sharding, *options],
    "pytorch": [sys.executable, HERE / "pytorch_fsdp.py", "--mode", arguments.mode, "--ranks",
                str(arguments.ranks), *options],
}
rounds = []
for _ in range(arguments.rounds):
    lines = {}
    for name, command in programs.items():
        output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout
        line = next(line for line in output.splitlines() if "ms_per_step" in line)
        lines[name] = json.loads(line[line.index("{"):])  # behind the rank that a launcher prints
        print(json.dumps({"program": name, **lines[name]}), flush=True)
    rounds.append(lines)


def median(value):
    return statistics.median(value(lines) for lines in rounds)


def ratio(key):
    return round(median(lambda lines: lines["tessera"][key] / lines["pytorch"][key]), 3)


print(json.dumps({
    "settings": cpu_settings(),
    "rounds": arguments.rounds,
    "tessera_tokens_per_s": median(lambda lines: lines["tessera"]["tokens_per_s"]),
    "pytorch_tokens_per_s": median(lambda lines: lines["pytorch"]["tokens_per_s"]),
    "speed": ratio("tokens_per_s"),
    "resident": ratio("resident_bytes"),
    "peak_resident": ratio("peak_resident_bytes"),
}))
