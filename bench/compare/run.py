#!/usr/bin/env python3
"""Trains the same GPT in tessera and in PyTorch, in turn, and compares time and memory.

    python bench/compare/run.py --tessera build/bench/bench_step --json out/compare.json

Each cell (vocabulary, dtype) starts tessera, PyTorch eager and torch.compile, warms each up, and
then runs a few steps of one after the other, round after round, so that a change of the machine's
speed meets all of them. Medians over all rounds are reported. PyTorch's bf16 is autocast; tessera's
bf16 is a bf16 model with f32 master weights. Memory is resident memory over that at start-up.

Needs the packages of bench/requirements.txt in the Python that runs this.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent


class Program:
    """One side of a comparison: a process that runs steps when asked."""

    def __init__(self, name, command, threads):
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
        self.name = name
        self.times = []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.DEVNULL, text=True, env=environment)
        self.read()  # ready

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with code {self.process.wait()}")
        return json.loads(line)

    def steps(self, count):
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        self.times += self.read()["ms"]

    def finish(self):
        self.process.stdin.close()
        result = self.read()
        self.process.wait()
        result["ms_per_step"] = statistics.median(self.times)
        result["ms_fastest"] = min(self.times)
        return result


def gemm_share(arguments, vocab, dtype):
    """The share of matrix products in PyTorch's own profile of an eager step."""
    command = [sys.executable, str(HERE / "pytorch_gpt.py"), "--vocab", str(vocab), "--dtype", dtype,
               "--threads", str(arguments.threads), "--steps", "1", "--profile"]
    output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL).stdout
    profile = json.loads(output.splitlines()[-1])
    return profile["gemm_share"], profile["top_ops_ms"]


def compare(arguments, vocab, dtype):
    shape = ["--vocab", str(vocab), "--dtype", dtype, "--threads", str(arguments.threads),
             "--warmup", str(arguments.warmup), "--serve"]
    torch_command = [sys.executable, str(HERE / "pytorch_gpt.py"), *shape]
    programs = [Program("tessera", [arguments.tessera, *shape], arguments.threads),
                Program("pytorch-eager", torch_command, arguments.threads)]
    if not arguments.no_compile:
        programs.append(Program("pytorch-compile", [*torch_command, "--compile"],
                                arguments.threads))
    for _ in range(arguments.rounds):
        for program in programs:
            program.steps(arguments.steps)
    cell = {"vocab": vocab, "dtype": dtype}
    for program in programs:
        cell[program.name] = program.finish()
    if arguments.profile:
        cell["gemm_share"], cell["pytorch_profile_ms"] = gemm_share(arguments, vocab, dtype)
    return cell


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tessera", default="build/bench/bench_step", help="the program bench_step")
    parser.add_argument("--vocab", type=int, nargs="+", default=[256, 50304])
    parser.add_argument("--dtype", nargs="+", default=["f32", "bf16"],
                        choices=["f32", "bf16", "autocast-bf16", "autocast-fp16"],
                        help="bf16: parameters too in tessera, torch.autocast in PyTorch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--profile", action="store_true",
                        help="also the share of GEMM in PyTorch's profile")
    parser.add_argument("--json", help="write the results to this file")
    arguments = parser.parse_args()

    cells = []
    print(f"{'vocab':>6} {'dtype':>13}  {'program':<16} {'ms/step':>9} {'tokens/s':>9} "
          f"{'speed of tessera':>17} {'memory MiB':>11} {'peak MiB':>9}")
    for vocab in arguments.vocab:
        for dtype in arguments.dtype:
            cell = compare(arguments, vocab, dtype)
            cells.append(cell)
            ours = cell["tessera"]["ms_per_step"]
            for name in ("tessera", "pytorch-eager", "pytorch-compile"):
                if name not in cell:
                    continue
                row = cell[name]
                print(f"{vocab:>6} {dtype:>13}  {name:<16} {row['ms_per_step']:>9.1f} "
                      f"{2048 / row['ms_per_step'] * 1e3:>9.0f} "
                      f"{row['ms_per_step'] / ours:>16.2f}x {row['resident_bytes'] / 2**20:>11.0f} "
                      f"{row['peak_resident_bytes'] / 2**20:>9.0f}", flush=True)
            if "gemm_share" in cell:
                share = cell["gemm_share"]
                print(f"{'':>22}GEMM is {share:.0%} of PyTorch's eager step: at equal GEMM, at most "
                      f"{1 / share:.2f}x", flush=True)
    if arguments.json:
        path = pathlib.Path(arguments.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"threads": arguments.threads, "cells": cells}, indent=2) + "\n")


if __name__ == "__main__":
    main()
