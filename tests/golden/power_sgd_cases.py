"""PyTorch's PowerSGD hooks on two gloo ranks, with and without their 16-bit wrappers: power_sgd.json.

One case a line: {"name", "shape" of the only parameter, "batched", "rank", "wrapper", "gradients": what
both ranks have after each step}. Rank r brings sin(1 + 0.7 i (r + 1) + 1.3 step) at element i, the first
Q is cos(0.5 + 1.1 row + 2.3 column), and compression is on from the first step.

batched_powerSGD_hook fails by itself in torch 2.15: it hands matrices to a function that takes batches of them.
"""

import json
import math
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

orthogonalize = powerSGD_hook._orthogonalize
powerSGD_hook._orthogonalize = lambda x, epsilon=0: orthogonalize(x if x.dim() == 3 else x.unsqueeze(0), epsilon)

HERE = os.path.dirname(os.path.abspath(__file__))
STEPS, RANK = 5, 2
WRAPPERS = {
    "none": (lambda hook: hook, torch.float32),
    "fp16": (default_hooks.fp16_compress_wrapper, torch.float16),
    "bf16": (default_hooks.bf16_compress_wrapper, torch.bfloat16),
}


class Weighted(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(shape))

    def forward(self, x):
        return (self.weight * x).sum()


def train(rank, shape, batched, wrapper):
    wrap, dtype = WRAPPERS[wrapper]
    numel = math.prod(shape)
    columns = math.ceil(math.sqrt(numel)) if batched else shape[1]
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=RANK, start_powerSGD_iter=2, min_compression_rate=0)
    state.iter = state.start_powerSGD_iter
    first = torch.tensor([[math.cos(0.5 + 1.1 * i + 2.3 * j) for j in range(RANK)] for i in range(columns)])
    rows = columns if batched else shape[0]
    factors = first.to(dtype), torch.zeros(rows, RANK, dtype=dtype)
    state.q_memory_dict[0], state.p_memory_dict[0] = factors if batched else (x.flatten() for x in factors)
    model = torch.nn.parallel.DistributedDataParallel(Weighted(shape))
    hook = powerSGD_hook.batched_powerSGD_hook if batched else powerSGD_hook.powerSGD_hook
    model.register_comm_hook(state, wrap(hook))
    gradients = []
    for step in range(STEPS):
        x = torch.tensor([math.sin(1 + 0.7 * i * (rank + 1) + 1.3 * step) for i in range(numel)])
        model.zero_grad()
        model(x.view(shape)).backward()
        gradients.append([float(f"{g:.9g}") for g in model.module.weight.grad.flatten().tolist()])
    return gradients


def work(rank, meeting_point, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2)
    records = []
    for batched, shape in (False, [6, 5]), (True, [19]):
        for wrapper in WRAPPERS:
            name = f"{'batched_' if batched else ''}power_sgd.{wrapper}"
            records.append({"name": name, "shape": shape, "batched": batched, "rank": RANK, "wrapper": wrapper,
                            "gradients": train(rank, shape, batched, wrapper)})
    if rank == 0:
        with open(path, "w") as file:
            file.write("[\n" + ",\n".join(json.dumps(record, separators=(",", ":")) for record in records) + "\n]\n")
    dist.destroy_process_group()


def write_all(path=os.path.join(HERE, "power_sgd.json")):
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (os.path.join(folder, "meeting_point"), path), nprocs=2)


if __name__ == "__main__":
    write_all()
