#!/usr/bin/env python3
"""A training step in PyTorch beside which ours is measured, within a plan of gpu_run.py.

    torch_step.py --steps 20 --go FILE -- --model gpt2 --layers 12 --width 768 --heads 12 --context 1024 \\
        --batch-size 64 --vocab 50304 --dtype bf16 --device cuda --compile --warmup 5

What follows -- are options of bench/compare/pytorch_gpt.py, which warms up and compiles at once and measures when
FILE is there (--wait seconds at most): so it compiles beside other parts and is measured alone. --rounds: medians
are over so many turns of --steps. Prints its line of JSON, with the first seconds as "warm_up_s".

--dry-run needs no torch: the programs compile, and their options are those that they know.
"""
import argparse
import importlib.abc
import json
import os
import pathlib
import runpy
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
PEER = next((folder for folder in (HERE, HERE.parents[1] / "bench/compare") if (folder / "pytorch_gpt.py").exists()),
            None)


class TorchWasAskedFor(Exception):
    pass


class NoTorch(importlib.abc.MetaPathFinder):
    """Ends a program where it imports torch: its options have been read by then."""

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise TorchWasAskedFor
        return None


def dry_run(options):
    for name in ("pytorch_gpt.py", "pytorch_models.py", "step_program.py"):
        compile((PEER / name).read_text(), name, "exec")
    sys.meta_path.insert(0, NoTorch())
    sys.path.insert(0, str(PEER))
    sys.argv = [str(PEER / "pytorch_gpt.py"), *options]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except TorchWasAskedFor:
        print("dry run: the options are known, torch was not asked for")
        return 0
    print("dry run: the program never came to torch", file=sys.stderr)
    return 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--go", help="measure when this file is there")
    parser.add_argument("--wait", type=float, default=300)
    parser.add_argument("--dry-run", action="store_true")
    given, options = sys.argv[1:], []
    if "--" in given:
        at = given.index("--")
        given, options = given[:at], given[at + 1:]
    arguments = parser.parse_args(given)
    if arguments.dry_run:
        return dry_run(options)
    start = time.monotonic()
    command = [sys.executable, str(PEER / "pytorch_gpt.py"), *options, "--serve"]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(text):
        if text is not None:
            peer.stdin.write(text)
            peer.stdin.flush()
        line = peer.stdout.readline()
        if not line:
            raise SystemExit(f"torch_step.py: pytorch_gpt.py ended with code {peer.wait()}")
        return json.loads(line)

    ask(None)  # it is warm
    warm_up = time.monotonic() - start
    print(f"torch_step.py: warm after {warm_up:.1f} s", flush=True)
    while arguments.go and not os.path.exists(arguments.go):
        if time.monotonic() - start > arguments.wait:
            raise SystemExit(f"torch_step.py: {arguments.go} did not come in {arguments.wait:.0f} s")
        time.sleep(0.1)
    times = []
    for _ in range(arguments.rounds):
        times += ask(f"{arguments.steps}\n")["ms"]
    peer.stdin.close()
    result = ask(None)
    peer.kill()  # the compiler's workers take their time
    peer.wait()
    result.update(warm_up_s=round(warm_up, 1), fastest_ms=round(min(times), 3),
                  ms_per_step=round(statistics.median(times), 3))
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
