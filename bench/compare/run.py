#!/usr/bin/env python3
"""Trains the same model in tessera and in PyTorch, in turn, and compares time and memory.

    python bench/compare/run.py --tessera build/bench/bench_step --json out/compare.json
    python bench/compare/run.py --models cnn vit lstm llama bert-small --dtype f32 bf16
    python bench/compare/run.py --device cuda --models 124m 355m bert --json out/compare-gpu.json

Each cell (model or vocabulary, dtype) starts tessera, PyTorch eager and torch.compile, warms each
up, and then runs a few steps of one after the other, round after round, so that a change of the
machine's speed meets all of them. Medians over all rounds are reported. PyTorch's bf16 is autocast;
tessera's bf16 is a bf16 model with f32 master weights. At the end stands one table of speed ratios.

On a GPU tessera also repeats its step as a CUDA graph, and PyTorch runs with FlashAttention and with
cuDNN's attention, compiled with and without graphs ("reduce-overhead"). There the programs of a cell
run one after the other: their memory together is more than a device has. MFU is the share of
--peak-tflops that 6 operations for each weight in a product and token, and the attention's, make.
Memory is what tensors held at most; on the CPU it is resident memory over that at start-up.

Needs the packages of bench/requirements.txt in the Python that runs this.
"""
import argparse
import collections
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading

HERE = pathlib.Path(__file__).resolve().parent


class Shape:
    """A model with its batch."""

    def __init__(self, model="gpt2", layers=6, width=384, heads=6, context=256, batch_size=8,
                 vocab=256, turn=1):
        self.turn = turn  # times --steps: short steps start slowly after the other's turn
        self.model, self.layers, self.width, self.heads = model, layers, width, heads
        self.context, self.batch_size, self.vocab = context, batch_size, vocab

    def options(self):
        names = ("model", "layers", "width", "heads", "context", "batch_size", "vocab")
        return [word for name in names
                for word in ("--" + name.replace("_", "-"), str(getattr(self, name)))]

    def tokens(self):
        return self.batch_size * self.context

    def operations(self):
        """Of a training step, in products and attention (backward: 2.5 times forward)."""
        if self.model == "cnn":  # of an image: two convolutions and a linear layer
            return 6 * self.batch_size * (24**2 * 16 * 25 + 8**2 * 32 * 16 * 25 + 512 * 10)
        if self.model == "lstm":
            weights = 8 * self.layers * self.width**2 + self.vocab * self.width
            return self.tokens() * 6 * weights
        weights = 12 * self.layers * self.width**2
        if self.model == "llama":
            inner = (8 * self.width // 3 + 63) // 64 * 64
            weights = self.layers * (3 * self.width**2 + 3 * self.width * inner)
        attended = 2 * self.context * self.width * self.layers  # scores and values, causal: half
        if self.model in ("gpt2", "llama"):
            weights += self.vocab * self.width
        else:
            attended *= 2
        return self.tokens() * (6 * weights + 3.5 * attended)


# Vocabularies are padded to a multiple of 64.
MODELS = {
    "124m": Shape(layers=12, width=768, heads=12, context=1024, batch_size=64, vocab=50304),
    "355m": Shape(layers=24, width=1024, heads=16, context=1024, batch_size=32, vocab=50304),
    "bert": Shape("bert", layers=12, width=768, heads=12, context=512, batch_size=64, vocab=30528),
    # Small ones, for CPUs.
    "bert-small": Shape("bert", layers=4, width=256, heads=4, context=128, batch_size=16,
                        vocab=30528),
    "llama": Shape("llama"),
    "lstm": Shape("lstm", layers=2, width=512, context=64, batch_size=32, vocab=10048),
    "vit": Shape("vit", context=64, batch_size=32, vocab=10),
    "cnn": Shape("cnn", context=1, batch_size=50, vocab=10, turn=20),
    # To try the programs.
    "tiny": Shape(layers=2, width=64, heads=2, context=32, batch_size=2, vocab=256),
    "tiny-bert": Shape("bert", layers=2, width=64, heads=2, context=32, batch_size=2, vocab=256),
    "tiny-llama": Shape("llama", layers=2, width=64, heads=2, context=32, batch_size=2, vocab=256),
    "tiny-lstm": Shape("lstm", layers=2, width=32, context=8, batch_size=2, vocab=256),
    "tiny-cnn": Shape("cnn", context=1, batch_size=50, vocab=10),
    "tiny-vit": Shape("vit", layers=2, width=64, heads=2, context=16, batch_size=16, vocab=10),
}


class ProgramEnded(RuntimeError):
    pass


class Program:
    """One side of a comparison: a process that runs steps when asked."""

    def __init__(self, name, command, threads):
        environment = dict(os.environ, OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
        self.name = name
        self.times = []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True, env=environment)
        self.errors = collections.deque(maxlen=20)
        threading.Thread(target=self.follow_errors, daemon=True).start()
        self.instruction_set = self.read()["instruction_set"]  # what it takes; it is ready

    def follow_errors(self):
        for line in self.process.stderr:
            self.errors.append(line)

    def read(self):
        line = self.process.stdout.readline()
        if not line:
            raise ProgramEnded(f"{self.name} ended with code {self.process.wait()}:\n"
                               + "".join(self.errors))
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
        result["instruction_set"] = self.instruction_set
        return result


def gemm_share(arguments, vocab, dtype):
    """The share of matrix products in PyTorch's own profile of an eager step."""
    command = [sys.executable, str(HERE / "pytorch_gpt.py"), "--vocab", str(vocab), "--dtype", dtype,
               "--threads", str(arguments.threads), "--steps", "1", "--profile"]
    output = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.DEVNULL).stdout
    profile = json.loads(output.splitlines()[-1])
    return profile["gemm_share"], profile["top_ops_ms"]


def commands(arguments, shape, dtype):
    """The programs of a cell, by name."""
    common = [*shape.options(), "--dtype", dtype, "--threads", str(arguments.threads),
              "--warmup", str(arguments.warmup), "--device", arguments.device, "--serve"]
    torch = [sys.executable, str(HERE / "pytorch_gpt.py"), *common]
    found = {"tessera": [arguments.tessera, *common]}
    on_gpu = arguments.device.startswith("cuda")
    if on_gpu:
        found["tessera-graph"] = [arguments.tessera, *common, "--graph"]
    for attention in ["flash", "cudnn"] if on_gpu else [None]:
        suffix, options = ("", []) if attention is None else (
            "-" + attention, ["--sdpa", attention])
        found["pytorch-eager" + suffix] = [*torch, *options]
        if not arguments.no_compile:
            found["pytorch-compile" + suffix] = [*torch, *options, "--compile"]
        if on_gpu and not arguments.no_compile:
            found["pytorch-graph" + suffix] = [*torch, *options, "--compile", "--compile-mode",
                                               "reduce-overhead"]
    if not on_gpu and dtype != "autocast-fp16" and importlib.util.find_spec("jax"):
        found["jax"] = [sys.executable, str(HERE / "jax_step.py"), *common]
    return found


def compare(arguments, shape, dtype):
    rows, failed = {}, {}
    found = list(commands(arguments, shape, dtype).items())
    # What runs in turns.
    for group in [[one] for one in found] if arguments.device.startswith("cuda") else [found]:
        programs = []
        for name, command in group:
            try:
                programs.append(Program(name, command, arguments.threads))
            except ProgramEnded as error:
                if name == "tessera":
                    raise
                failed[name] = str(error)
        for _ in range(arguments.rounds):
            for program in programs:
                program.steps(arguments.steps * shape.turn)
        rows.update((program.name, program.finish()) for program in programs)
    for row in rows.values():
        row["tokens_per_s"] = shape.tokens() / row["ms_per_step"] * 1e3
        row["tflop_per_s"] = shape.operations() / row["ms_per_step"] * 1e-9
        row["mfu"] = row["tflop_per_s"] / arguments.peak_tflops if arguments.peak_tflops else None
    return rows, failed


def show(title, rows, failed):
    ours = rows["tessera"]["ms_per_step"]
    for name, row in rows.items():
        peak = row.get("peak_tensor_bytes") if row.get("device", "cpu") != "cpu" else None
        memory = peak if peak is not None else row["peak_resident_bytes"]
        mfu = f"{row['mfu']:>6.1%}" if row["mfu"] is not None else f"{'-':>6}"
        print(f"{title:<24} {name:<22} {row['ms_per_step']:>9.1f} {row['tokens_per_s']:>10.0f} "
              f"{row['ms_per_step'] / ours:>16.2f}x {mfu} {memory / 2**20:>9.0f}", flush=True)
    for name, error in failed.items():
        print(f"{title:<24} {name:<22} failed: {error.strip().splitlines()[-1]}", flush=True)


def show_ratios(cells):
    """One line a cell: how many times the speed of each other program tessera's is."""
    others = list(dict.fromkeys(name for cell in cells for name, row in cell.items()
                                if name != "tessera" and isinstance(row, dict)
                                and "ms_per_step" in row))
    print("\nspeed of tessera over that of\n" + f"{'cell':<24} {'tessera ms':>10}"
          + "".join(f" {name:>22}" for name in others))
    for cell in cells:
        ours = cell["tessera"]["ms_per_step"]
        ratios = [f"{cell[name]['ms_per_step'] / ours:.2f}x" if name in cell else "-"
                  for name in others]
        print(f"{cell['cell'] + ' ' + cell['dtype']:<24} {ours:>10.1f}"
              + "".join(f" {ratio:>22}" for ratio in ratios))
    taken = {name: row["instruction_set"] for name, row in cells[0].items()
             if isinstance(row, dict) and "instruction_set" in row}
    print("instruction sets: " + ", ".join(f"{name} {value}" for name, value in taken.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tessera", default="build/bench/bench_step", help="the program bench_step")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=[],
                        help="default: the small GPT with each --vocab")
    parser.add_argument("--vocab", type=int, nargs="+", default=[256, 50304])
    parser.add_argument("--dtype", nargs="+", default=[],
                        choices=["f32", "bf16", "autocast-bf16", "autocast-fp16"],
                        help="bf16: parameters too in tessera, torch.autocast in PyTorch; default: "
                        "f32 and bf16, on a GPU bf16")
    parser.add_argument("--peak-tflops", type=float,
                        help="of the device, for MFU; default on a GPU: 989, an H100's or H200's")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="steps a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--profile", action="store_true",
                        help="also the share of GEMM in PyTorch's profile of the small GPT")
    parser.add_argument("--json", help="write the results to this file")
    arguments = parser.parse_args()
    on_gpu = arguments.device.startswith("cuda")
    if on_gpu and arguments.peak_tflops is None:
        arguments.peak_tflops = 989
    dtypes = arguments.dtype or (["bf16"] if on_gpu else ["f32", "bf16"])
    shapes = ({name: MODELS[name] for name in arguments.models} or
              {f"vocab {vocab}": Shape(vocab=vocab) for vocab in arguments.vocab})

    cells = []
    settings = cpu_settings()
    for name, value in settings.items():
        print(f"{name}: {value}")
    print(f"{'cell':<24} {'program':<22} {'ms/step':>9} {'tokens/s':>10} {'speed of tessera':>17} "
          f"{'MFU':>6} {'peak MiB':>9}")
    for title, shape in shapes.items():
        for dtype in dtypes:
            rows, failed = compare(arguments, shape, dtype)
            show(f"{title} {dtype}", rows, failed)
            cell = {"cell": title, "vocab": shape.vocab, "dtype": dtype, **rows}
            if failed:
                cell["failed"] = failed
            if arguments.profile and not arguments.models:
                share, profile = gemm_share(arguments, shape.vocab, dtype)
                cell["gemm_share"], cell["pytorch_profile_ms"] = share, profile
                print(f"{'':>25}GEMM is {share:.0%} of PyTorch's eager step: at equal GEMM, at "
                      f"most {1 / share:.2f}x", flush=True)
            cells.append(cell)
    show_ratios(cells)
    if arguments.json:
        path = pathlib.Path(arguments.json)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"threads": arguments.threads, "device": arguments.device,
                                    "settings": settings, "cells": cells}, indent=2) + "\n")


def cpu_settings():
    """The processor, and what keeps either side from using all of it: ONEDNN_MAX_CPU_ISA both
    sides' oneDNN, TESSERA_ISA tessera's kernels, the others PyTorch's."""
    processor, sets = "unknown", []
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                processor = value.strip()
            elif name.strip() == "flags":
                sets = [flag for flag in value.split()
                        if flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16")]
    except OSError:
        pass
    settings = {"processor": f"{processor} ({' '.join(sets) or 'instruction sets unknown'})"}
    for name in ("TESSERA_ISA", "ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY",
                 "MKL_ENABLE_INSTRUCTIONS"):
        settings[name] = os.environ.get(name) or "not set"
    return settings


if __name__ == "__main__":
    main()
