#!/usr/bin/env python3
"""One training step of a model in plain PyTorch: what bench_step is measured against.

The models are those of bench_step (pytorch_models.py). A step is forward, cross entropy,
backward, clip_grad_norm_(1.0), AdamW, zero_grad. It is written the way that is fastest in PyTorch
without custom kernels: fused AdamW, foreach clipping, set_to_none. On a GPU nothing is read back,
and the steps of a turn are timed together, as bench_step does it.

Prints one JSON line: median ms/step, tokens/s, memory of the process over start-up, and on a GPU the
most bytes that tensors held.
"""
import argparse
import json
import statistics
import time

from process_memory import peak_resident_bytes, resident_bytes

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--width", type=int, default=384)
parser.add_argument("--heads", type=int, default=6)
parser.add_argument("--context", type=int, default=256)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--vocab", type=int, default=256)
parser.add_argument("--dtype", choices=["f32", "bf16", "autocast-bf16", "autocast-fp16"],
                    default="f32", help="all but f32 are torch.autocast; fp16 with a GradScaler")
parser.add_argument("--model", choices=["gpt2", "bert", "llama", "lstm", "vit", "cnn"],
                    default="gpt2")
parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
parser.add_argument("--sdpa", choices=["any", "flash", "cudnn"], default="any",
                    help="on a GPU: the attention that scaled_dot_product_attention takes")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--compile-mode", default="default",
                    help="of torch.compile: default, reduce-overhead, max-autotune...")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--warmup", type=int, default=3)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--profile", action="store_true", help="also report the share of GEMM in a step")
parser.add_argument("--serve", action="store_true",
                    help="after the warm-up, read lines from stdin: each number N runs N steps and "
                    "prints their times; used by run.py to alternate between programs")
arguments = parser.parse_args()

import torch  # noqa: E402  (after argparse: --help needs no torch)

from pytorch_models import model_and_batch  # noqa: E402

torch.set_num_threads(arguments.threads)
torch.manual_seed(1)
device = torch.device(arguments.device)
on_gpu = device.type == "cuda"
if on_gpu:
    torch.cuda.set_device(device)
    torch.backends.cuda.enable_math_sdp(arguments.sdpa == "any")
    torch.backends.cuda.enable_mem_efficient_sdp(arguments.sdpa == "any")
    torch.backends.cuda.enable_flash_sdp(arguments.sdpa in ("any", "flash"))
    torch.backends.cuda.enable_cudnn_sdp(arguments.sdpa in ("any", "cudnn"))

start_up_bytes = resident_bytes()
model, inputs, targets = (part.to(device) for part in model_and_batch(
    arguments.model, arguments.layers, arguments.width, arguments.heads, arguments.context,
    arguments.vocab, arguments.batch_size))
forward = torch.compile(model, mode=arguments.compile_mode) if arguments.compile else model
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.1,
                              fused=True)
low = torch.float16 if arguments.dtype == "autocast-fp16" else torch.bfloat16
scaler = torch.amp.GradScaler(device.type, enabled=arguments.dtype == "autocast-fp16")


def step():
    with torch.autocast(device.type, dtype=low, enabled=arguments.dtype != "f32"):
        loss = forward(inputs, targets)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


cpu_times = []  # of all threads: what a busy machine leaves comparable, with one thread


def timed_steps(count):
    """The milliseconds of each step, and the last loss."""
    at_once, parts, loss = (count if on_gpu else 1), [], float("nan")
    for _ in range(count // at_once if at_once else 0):
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(at_once):
            last = step()
        loss = last.item()  # waits for the device
        parts += [(time.perf_counter() - start) * 1e3 / at_once] * at_once
        cpu_times.extend([(time.process_time() - cpu_start) * 1e3 / at_once] * at_once)
    return parts, loss


timed_steps(arguments.warmup)
cpu_times.clear()

result = {
    "program": "pytorch-compile" if arguments.compile else "pytorch-eager",
    "version": torch.__version__,
    "vocab": arguments.vocab,
    "dtype": arguments.dtype,
    "threads": arguments.threads,
    "device": arguments.device,
    "sdpa": arguments.sdpa,
}

if arguments.serve:
    capability = torch.backends.cpu.get_cpu_capability()
    print(json.dumps({**result, "ready": True, "instruction_set": capability}), flush=True)
    times, loss = [], float("nan")
    try:
        while True:
            count = int(input())
            part, loss = timed_steps(count)
            times += part
            print(json.dumps({"ms": part}), flush=True)
    except EOFError:
        pass
else:
    times, loss = timed_steps(arguments.steps)

ms = statistics.median(times) if times else float("nan")
result.update({
    "ms_per_step": round(ms, 3),
    "cpu_ms_per_step": round(statistics.median(cpu_times), 3) if cpu_times else None,
    "tokens_per_s": round(arguments.batch_size * arguments.context / ms * 1e3, 1),
    "resident_bytes": resident_bytes() - start_up_bytes,
    "peak_resident_bytes": peak_resident_bytes() - start_up_bytes,
    "peak_tensor_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
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
