#!/usr/bin/env python3
"""Single matrix products of a GPT's training step in tessera and in PyTorch, in turn.

    python bench/compare/products.py --bench build/bench/bench_gemm --dtype bf16 --threads 1

Takes names and shapes from bench_gemm, whose head says what they are. Each round runs bench_gemm for one
product and then PyTorch's matmul of the same operands with the same layouts into memory that is there;
medians over the rounds are reported.
"""
import argparse
import json
import os
import statistics
import subprocess
import time

from run import cpu_settings

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--bench", default="build/bench/bench_gemm", help="the program bench_gemm")
parser.add_argument("--dtype", choices=["f32", "bf16", "f16", "f64"], default="bf16")
parser.add_argument("--filter", default="", help="part of a product's name; default: all but decode")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--seconds", type=float, default=0.2, help="of a program in a round")
arguments = parser.parse_args()

import torch  # noqa: E402  (after argparse: --help needs no torch)

torch.set_num_threads(arguments.threads)
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}
environment = dict(os.environ, OMP_NUM_THREADS=str(arguments.threads))


def bench(name):
    """bench_gemm's results whose names are that one: [(name, shape, GFLOP/s)]."""
    output = subprocess.run([arguments.bench, f"--benchmark_filter={name}", "--benchmark_format=json",
                             f"--benchmark_min_time={arguments.seconds}"],
                            check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                            env=environment).stdout
    return [(one["name"].removesuffix("/real_time").split("/min_time")[0], one["label"],
             one["GFLOP/s"]) for one in json.loads(output)["benchmarks"]]


def operand(rows, columns, transposed):
    x = torch.full((columns, rows) if transposed else (rows, columns), 0.5,
                   dtype=DTYPES[arguments.dtype])
    return x.t() if transposed else x


def torch_rate(label):
    """GFLOP/s of a product like "nt 2048 1152 384": layouts, m, n, k."""
    layouts, *sizes = label.split()
    m, n, k = map(int, sizes)
    a, b = operand(m, k, layouts[0] == "t"), operand(k, n, layouts[1] == "t")
    c = torch.empty(m, n, dtype=a.dtype)
    torch.mm(a, b, out=c)
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < arguments.seconds:
        torch.mm(a, b, out=c)
        count += 1
    return 2e-9 * m * n * k * count / (time.perf_counter() - start)


for name, value in cpu_settings().items():
    print(f"{name}: {value}")
print(f"PyTorch {torch.__version__}: {torch.backends.cpu.get_cpu_capability()}")
listed = subprocess.run([arguments.bench, f"--benchmark_filter=^{arguments.dtype}/",
                         "--benchmark_list_tests"], check=True, text=True,
                        stdout=subprocess.PIPE).stdout.split()
print(f"{'product':<28} {'m n k':>18} {'tessera GFLOP/s':>16} {'pytorch GFLOP/s':>16} {'ratio':>7}")
for full in listed:
    if arguments.filter not in full or (not arguments.filter and "decode" in full):
        continue
    ours, theirs, label = [], [], ""
    for _ in range(arguments.rounds):
        _, label, rate = bench("^" + full + "$")[0]
        ours.append(rate)
        theirs.append(torch_rate(label))
    left, right = statistics.median(ours), statistics.median(theirs)
    title = "/".join(part for part in full.split("/") if ":" not in part and part != "real_time")
    print(f"{title:<28} {label[3:]:>18} {left:>16.1f} {right:>16.1f} {left / right:>6.2f}x", flush=True)
