#!/usr/bin/env python3
"""One training step of a GPT in plain PyTorch: the number that bench_step is measured against.

The model is GPT-2's: pre-LayerNorm blocks, learned positions, tanh GELU, biases, a head tied to the
token embedding, causal scaled_dot_product_attention. A step is forward, cross entropy, backward,
clip_grad_norm_(1.0), AdamW, zero_grad. It is written the way that is fastest in PyTorch without
custom kernels: fused AdamW, foreach clipping, set_to_none.

Prints one JSON line: median ms/step, tokens/s, resident memory over start-up.
"""
import argparse
import json
import resource
import statistics
import time


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def peak_resident_bytes():
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    raise RuntimeError("VmHWM is missing from /proc/self/status")


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--width", type=int, default=384)
parser.add_argument("--heads", type=int, default=6)
parser.add_argument("--context", type=int, default=256)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--vocab", type=int, default=256)
parser.add_argument("--dtype", choices=["f32", "bf16", "autocast-bf16", "autocast-fp16"],
                    default="f32", help="all but f32 are torch.autocast; fp16 with a GradScaler")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--warmup", type=int, default=3)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--profile", action="store_true", help="also report the share of GEMM in a step")
parser.add_argument("--serve", action="store_true",
                    help="after the warm-up, read lines from stdin: each number N runs N steps and "
                    "prints their times; used by run.py to alternate between programs")
arguments = parser.parse_args()

import torch  # noqa: E402  (after argparse: --help needs no torch)
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402

torch.set_num_threads(arguments.threads)
torch.manual_seed(1)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(width)
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = nn.Linear(width, 4 * width)
        self.mlp_proj = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time_, width = x.shape
        q, k, v = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, time_, self.heads, width // self.heads).transpose(1, 2)
                   for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(batch, time_, width))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, width, heads, context, vocab):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.wpe = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


start_up_bytes = resident_bytes()
model = Gpt(arguments.layers, arguments.width, arguments.heads, arguments.context, arguments.vocab)
forward = torch.compile(model) if arguments.compile else model
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.1,
                              fused=True)
tokens = torch.randint(arguments.vocab, (arguments.batch_size, arguments.context + 1))
inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

low = torch.float16 if arguments.dtype == "autocast-fp16" else torch.bfloat16
scaler = torch.amp.GradScaler("cpu", enabled=low == torch.float16)


def step():
    with torch.autocast("cpu", dtype=low, enabled=arguments.dtype != "f32"):
        loss = forward(inputs, targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


cpu_times = []  # of all threads: what a busy machine leaves comparable, with one thread


def timed_step():
    start, cpu_start = time.perf_counter(), time.process_time()
    loss = step()
    cpu_times.append((time.process_time() - cpu_start) * 1e3)
    return (time.perf_counter() - start) * 1e3, loss


for _ in range(arguments.warmup):
    step()

result = {
    "program": "pytorch-compile" if arguments.compile else "pytorch-eager",
    "version": torch.__version__,
    "vocab": arguments.vocab,
    "dtype": arguments.dtype,
    "threads": arguments.threads,
}

if arguments.serve:
    print(json.dumps({**result, "ready": True}), flush=True)
    times, loss = [], float("nan")
    try:
        while True:
            count = int(input())
            part = []
            for _ in range(count):
                ms, loss = timed_step()
                part.append(ms)
            times += part
            print(json.dumps({"ms": part}), flush=True)
    except EOFError:
        pass
else:
    times = []
    for _ in range(arguments.steps):
        ms, loss = timed_step()
        times.append(ms)

ms = statistics.median(times) if times else float("nan")
result.update({
    "ms_per_step": round(ms, 3),
    "cpu_ms_per_step": round(statistics.median(cpu_times), 3) if cpu_times else None,
    "tokens_per_s": round(arguments.batch_size * arguments.context / ms * 1e3, 1),
    "resident_bytes": resident_bytes() - start_up_bytes,
    "peak_resident_bytes": peak_resident_bytes() - start_up_bytes,
    "loss": loss,
})

if arguments.profile:
    gemm_names = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise",
             "aten::mkldnn_linear", "mkl::_mkl_linear")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        start = time.perf_counter()
        for _ in range(5):
            step()
        profiled_ms = (time.perf_counter() - start) * 1e3 / 5
    averages = profile.key_averages()
    gemm_ms = sum(e.self_cpu_time_total for e in averages if e.key in gemm_names) / 5e3
    result["gemm_ms"] = round(gemm_ms, 3)
    result["gemm_share"] = round(gemm_ms / profiled_ms, 4)
    result["top_ops_ms"] = {
        e.key: round(e.self_cpu_time_total / 5e3, 3)
        for e in sorted(averages, key=lambda e: -e.self_cpu_time_total)[:14]
    }

print(json.dumps(result), flush=True)
