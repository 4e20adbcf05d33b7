"""Losses and gradient norms of torch's tensor parallelism with sequence parallelism, of a perceptron
behind a norm on two processes, for tests/parallel/test_tensor_parallel_sharded.cpp.
"""

import json
import os
import pathlib

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, Replicate
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel,
                                               SequenceParallel, parallelize_module)

WIDTH, INNER, STEPS, RANKS = 8, 16, 10, 2


def numbers(shape, salt):
    count = 1
    for size in shape:
        count *= size
    return torch.tensor([((i * 37 + salt * 11) % 23 - 11) / 16 for i in range(count)],
                        dtype=torch.float64).reshape(shape)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.fc = torch.nn.Linear(WIDTH, INNER, dtype=torch.float64)
        self.proj = torch.nn.Linear(INNER, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            for salt, parameter in enumerate(self.parameters(), 1):
                parameter.copy_(numbers(tuple(parameter.shape), salt))

    def forward(self, x):
        return self.proj(torch.nn.functional.gelu(self.fc(self.norm(x))))


def run(rank, path):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533")
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    model = Block()
    parallelize_module(model, mesh, {
        "norm": SequenceParallel(),
        "fc": ColwiseParallel(input_layouts=Shard(1)),
        "proj": RowwiseParallel(output_layouts=Replicate()),
    })
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(numbers((2, 4, WIDTH), 100 + step)).square().mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        with open(path, "w") as file:
            json.dump({"torch": torch.__version__, "losses": losses, "norms": norms}, file, indent=1)
            file.write("\n")
    dist.destroy_process_group()


def write_all():
    path = pathlib.Path(__file__).parent / "tensor_parallel.json"
    mp.spawn(run, args=(str(path),), nprocs=RANKS)


if __name__ == "__main__":
    write_all()
