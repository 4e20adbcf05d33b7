#!/usr/bin/env python3
"""What the host takes for a training step of GPT-2 124M, in PyTorch and in tessera, where no GPU is.

A step is forward, cross entropy, backward, clipping to a norm of 1, AdamW, zero_grad, on one thread,
with bf16 parameters (tessera has f32 masters beside them, PyTorch none). The driver, which is called
for each kernel, is in none of the three:

  tessera_ms       the dry device: host_ms of `tessera price`
  pytorch_meta_ms  the meta device, whose kernels are Python for many ops (layer norm, GELU, AdamW's):
                   several times what the dispatch to a GPU's kernels takes
  pytorch_tiny_ms  the CPU with as many layers and ops of a few numbers each (width 12, one token),
                   fused AdamW: PyTorch's dispatch in C++, and kernels that have next to nothing to do

    python bench/compare/meta_dispatch.py --tessera build/bin/tessera --machine h100

Prints a line of JSON: medians in milliseconds by the clock, of PyTorch also of the processor (_cpu).
"""
import argparse
import json
import statistics
import subprocess
import time

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--tessera", help="the command; without it PyTorch runs alone")
parser.add_argument("--machine", default="h100",
                    help="of tessera price: no rate changes what the host takes")
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--warmup", type=int, default=3)
parser.add_argument("--steps", type=int, default=10)
arguments = parser.parse_args()

import torch  # noqa: E402  (after argparse: --help needs no torch)

from pytorch_models import model_and_batch  # noqa: E402


def medians(device, width, context, vocab, batch_size, adamw):
    with torch.device(device):
        model, inputs, targets = model_and_batch("gpt2", 12, width, 12, context, vocab, batch_size)
    parameters = list(model.bfloat16().parameters())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.99), weight_decay=0.1,
                                  **{adamw: True})

    def step():
        model(inputs, targets).backward()
        # clip_grad_norm_ takes its foreach form on a GPU and refuses it elsewhere: its calls.
        gradients = [p.grad for p in parameters]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        torch._foreach_mul_(gradients, torch.clamp(1.0 / (norm + 1e-6), max=1.0))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    times, cpu_times = [], []
    for _ in range(arguments.warmup + arguments.steps):
        start, cpu_start = time.perf_counter(), time.process_time()
        step()
        times.append((time.perf_counter() - start) * 1e3)
        cpu_times.append((time.process_time() - cpu_start) * 1e3)
    return [round(statistics.median(part[arguments.warmup:]), 3) for part in (times, cpu_times)]


torch.set_num_threads(1)
result = {"pytorch": torch.__version__}
if arguments.tessera:
    price = subprocess.run(
        [arguments.tessera, "price", "gpt2", "--size", "124m", "--batch-size",
         str(arguments.batch_size), "--machine", arguments.machine, "--json", "-"],
        check=True, stdout=subprocess.PIPE, text=True).stdout
    result["tessera_ms"] = round(json.loads(price[price.index("{"):])["host_ms"], 3)
# Fused AdamW is refused on meta.
result["pytorch_meta_ms"], result["pytorch_meta_cpu_ms"] = medians(
    "meta", 768, 1024, 50304, arguments.batch_size, "foreach")
result["pytorch_tiny_ms"], result["pytorch_tiny_cpu_ms"] = medians("cpu", 12, 1, 64, 1, "fused")
print(json.dumps(result))
