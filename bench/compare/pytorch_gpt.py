#!/usr/bin/env python3
"""One training step of a model in plain PyTorch: what bench_step is measured against.

The models are those of bench_step (pytorch_models.py). A step is forward, cross entropy,
backward, clip_grad_norm_(1.0), AdamW, zero_grad. It is written the way that is fastest in PyTorch
without custom kernels: fused AdamW, foreach clipping, set_to_none. On a GPU nothing is read back,
and the steps of a turn are timed together, as bench_step does it.

Prints one JSON line: median ms/step, tokens/s, memory of the process over start-up, and on a GPU the
most bytes that tensors held.
"""
import json
import time

from step_program import measure, option_parser, resident_bytes

parser = option_parser(__doc__.splitlines()[0])
parser.add_argument("--dtype", choices=["f32", "bf16", "autocast-bf16", "autocast-fp16"],
                    default="f32", help="all but f32 are torch.autocast; fp16 with a GradScaler")
parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N")
parser.add_argument("--sdpa", choices=["any", "flash", "cudnn"], default="any",
                    help="on a GPU: the attention that scaled_dot_product_attention takes")
parser.add_argument("--compile", action="store_true")
parser.add_argument("--compile-mode", default="default",
                    help="of torch.compile: default, reduce-overhead, max-autotune...")
parser.add_argument("--profile", action="store_true", help="also report the share of GEMM in a step")
arguments = parser.parse_args()

import torch  # noqa: E402  (after argparse: --help needs no torch)

from pytorch_models import model_and_batch  # noqa: E402

torch.set_num_threads(arguments.threads)
torch.manual_seed(1)
device = torch.device(arguments.device)
if device.type == "cuda" and device.index is None:
    device = torch.device("cuda", 0)  # set_device() wants a number
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


def timed_steps(count):
    at_once, times, cpu_times, loss = (count if on_gpu else 1), [], [], float("nan")
    for _ in range(count // at_once if at_once else 0):
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(at_once):
            last = step()
        loss = last.item()  # waits for the device
        times += [(time.perf_counter() - start) * 1e3 / at_once] * at_once
        cpu_times += [(time.process_time() - cpu_start) * 1e3 / at_once] * at_once
    return times, cpu_times, loss


result = measure(arguments, timed_steps,
                 {"program": "pytorch-compile" if arguments.compile else "pytorch-eager",
                  "version": torch.__version__, "sdpa": arguments.sdpa},
                 torch.backends.cpu.get_cpu_capability(), start_up_bytes)
if on_gpu:
    result["peak_tensor_bytes"] = torch.cuda.max_memory_allocated()

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
