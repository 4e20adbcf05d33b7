#!/usr/bin/env python3
"""A training step of GPT-2 under PyTorch's FSDP2, DDP, tensor or pipeline parallelism on gloo: what
bench_ddp is measured beside.

Ranks are processes of this machine with one thread each, as `tessera launch -n 2 bench_ddp`. Every
block is a unit and so is the rest (fully_shard); a step is forward, cross entropy, backward,
clip_grad_norm_(1.0), AdamW, zero_grad. Ranks of tp and tp_sequence have one batch together, shard
the vocabulary and take the loss of its parts (loss_parallel). Ranks of pp and its kin are stages of an
untied model and take --micro-batches of --batch-size sequences a step, by torch.distributed.pipelining's
schedules. Prints one JSON line: median ms/step, tokens/s of all ranks, resident memory of rank 0 over
that at start-up, at the end and at its peak.
"""
import argparse
import contextlib
import json
import os
import resource
import statistics
import time

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
for name, value in (("layers", 6), ("width", 384), ("heads", 6), ("context", 256), ("batch-size", 8),
                    ("vocab", 256), ("ranks", 2), ("threads", 1), ("warmup", 2), ("steps", 10),
                    ("micro-batches", 1)):
    parser.add_argument("--" + name, type=int, default=value)
# Of stages: the schedule, and how many each rank has.
PIPELINES = {"pp": ("Schedule1F1B", 1), "pp_gpipe": ("ScheduleGPipe", 1),
             "pp_interleaved": ("ScheduleInterleaved1F1B", 2),
             "pp_zero_bubble": ("ScheduleInterleavedZeroBubble", 1)}
parser.add_argument("--mode", choices=["fsdp", "ddp", "tp", "tp_sequence", *PIPELINES], default="fsdp")
parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32",
                    help="bf16: by FSDP2's policy with reductions in f32, or by autocast")
arguments = parser.parse_args()
if arguments.micro_batches > 1 and arguments.mode not in PIPELINES:
    parser.error("--micro-batches is for pp")

import torch  # noqa: E402  (after argparse: --help needs no torch)
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch.distributed.tensor.parallel import loss_parallel  # noqa: E402

from pytorch_models import Gpt  # noqa: E402


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


def divide(model):
    """Megatron's plan for a block; its c_attn has the queries, keys and values of a rank's heads."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput,
                                                   RowwiseParallel, SequenceParallel,
                                                   parallelize_module)
    mesh = init_device_mesh("cpu", (arguments.ranks,))
    sequence = arguments.mode == "tp_sequence"
    tokens = Shard(1) if sequence else Replicate()
    plan = {"wte": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "head": ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1),
                                    use_local_output=False)}
    for name in ("c_attn", "c_fc"):
        plan["blocks.*." + name] = ColwiseParallel(input_layouts=tokens)
    for name in ("c_proj", "mlp_proj"):
        plan["blocks.*." + name] = RowwiseParallel(output_layouts=tokens)
    if sequence:
        plan["blocks.0"] = PrepareModuleInput(input_layouts=(Replicate(),),
                                              desired_input_layouts=(Shard(1),),
                                              use_local_output=True)
        for name in ("blocks.*.ln_1", "blocks.*.ln_2", "ln_f"):
            plan[name] = SequenceParallel()
    parallelize_module(model, mesh, plan)
    model.head.weight = model.wte.weight


def kinds_of(parameters):
    """Foreach forms take DTensors or tensors, never both."""
    parameters = list(parameters)
    kinds = [[one for one in parameters if hasattr(one, "full_tensor") == kind]
             for kind in (True, False)]
    return [kind for kind in kinds if kind]


def clip(parameters):
    """clip_grad_norm_(1.0), which takes no mixture of DTensors and tensors."""
    kinds = kinds_of(parameters)
    norms = [torch.nn.utils.get_total_norm([one.grad for one in kind]) for kind in kinds]
    norms = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, 1.0, norm)


class Stage(torch.nn.Module):
    """The blocks of one of `count` stages, with what comes before the first and behind the last."""

    def __init__(self, model, number, count):
        super().__init__()
        first, last = number * arguments.layers // count, (number + 1) * arguments.layers // count
        self.blocks = torch.nn.ModuleList(model.blocks[first:last])
        self.wte, self.wpe = (model.wte, model.wpe) if number == 0 else (None, None)
        self.ln_f, self.head = (model.ln_f, model.head) if number == count - 1 else (None, None)

    def forward(self, x):
        if self.wte is not None:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.ln_f(x))


def loss_of(logits, targets):
    return torch.nn.functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def make_pipeline(model, rank):
    """This rank's stages, and what takes a step of them."""
    from torch.distributed import pipelining
    name, own = PIPELINES[arguments.mode]
    count = own * arguments.ranks
    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())
    numbers = range(rank, count, arguments.ranks)
    modules = torch.nn.ModuleList(Stage(model, number, count) for number in numbers)
    stages = [pipelining.PipelineStage(module, number, count, torch.device("cpu"))
              for module, number in zip(modules, numbers)]
    schedule = getattr(pipelining, name)
    is_multi = issubclass(schedule, pipelining.schedules.PipelineScheduleMulti)
    schedule = schedule(stages if is_multi else stages[0], arguments.micro_batches, loss_fn=loss_of)
    is_first, is_last = 0 in numbers, count - 1 in numbers

    def step(inputs, targets):
        schedule.step(*([inputs] if is_first else []), **({"target": targets} if is_last else {}))

    return modules, step


def clip_stages(parameters):
    """clip_grad_norm_(1.0) of all stages."""
    parameters = list(parameters)
    square = torch.nn.utils.get_total_norm([one.grad for one in parameters]) ** 2
    dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, square.sqrt())


def train(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29511"))
    torch.set_num_threads(arguments.threads)
    dist.init_process_group("gloo", rank=rank, world_size=arguments.ranks)
    torch.manual_seed(1)
    start_up_bytes = resident_bytes()
    model = Gpt(arguments.layers, arguments.width, arguments.heads, arguments.context,
                arguments.vocab)
    if arguments.mode == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        mesh = init_device_mesh("cpu", (arguments.ranks,))
        policy = MixedPrecisionPolicy()
        if arguments.dtype == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        forward = model
    elif arguments.mode in PIPELINES:
        model, pipeline_step = make_pipeline(model, rank)
    elif arguments.mode.startswith("tp"):
        divide(model)
        forward = model
    else:
        forward = torch.nn.parallel.DistributedDataParallel(model)
    divided, by_stages = arguments.mode.startswith("tp"), arguments.mode in PIPELINES
    plain = arguments.mode == "ddp" or by_stages
    optimizers = [torch.optim.AdamW(kind, lr=3e-4, fused=plain, foreach=not plain)
                  for kind in (kinds_of(model.parameters()) if divided else [model.parameters()])]
    sequences = arguments.batch_size * arguments.micro_batches
    tokens = torch.randint(arguments.vocab, (sequences, arguments.context + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    times = []
    for step in range(arguments.warmup + arguments.steps):
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16,
                            enabled=arguments.mode != "fsdp" and arguments.dtype == "bf16"), \
                loss_parallel() if divided else contextlib.nullcontext():
            if by_stages:
                pipeline_step(inputs, targets)
            else:
                loss = forward(inputs, targets)
            if divided:
                loss.backward()
        if divided:
            clip(model.parameters())
        elif by_stages:
            clip_stages(model.parameters())
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step >= arguments.warmup:
            times.append((time.perf_counter() - start) * 1e3)
    if rank == 0:
        ms = statistics.median(times)
        tokens_in_step = sequences * arguments.context
        if not divided and not by_stages:
            tokens_in_step *= arguments.ranks
        print(json.dumps({
            "program": "pytorch-" + arguments.mode,
            "dtype": arguments.dtype,
            "version": torch.__version__,
            "ranks": arguments.ranks,
            "threads": arguments.threads,
            "ms_per_step": round(ms, 3),
            "tokens_per_s": round(tokens_in_step / ms * 1e3, 1),
            "resident_bytes": resident_bytes() - start_up_bytes,
            "peak_resident_bytes":
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - start_up_bytes,
        }), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(train, nprocs=arguments.ranks)
