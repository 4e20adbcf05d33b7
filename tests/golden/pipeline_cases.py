"""Losses and gradient norms of torch's pipelines (torch.distributed.pipelining on gloo), of four
residual blocks on two processes, for tests/parallel/test_pipeline_torch.cpp.
"""

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

from tensor_parallel_cases import WIDTH, Block, numbers, write

BLOCKS, STEPS, RANKS, MICRO_BATCHES = 4, 10, 2, 4


class Residual(Block):
    def __init__(self, index):
        super().__init__()
        with torch.no_grad():
            for salt, parameter in enumerate(self.parameters(), 1):
                parameter.copy_(numbers(tuple(parameter.shape), 10 * index + salt))

    def forward(self, x):
        return x + super().forward(x)


def train(rank, schedule, stages_per_rank):
    count = RANKS * stages_per_rank
    each = BLOCKS // count
    own, stages = torch.nn.ModuleList(), []
    for number in range(rank, count, RANKS):
        blocks = [Residual(i) for i in range(number * each, (number + 1) * each)]
        own.append(torch.nn.Sequential(*blocks))
        stages.append(PipelineStage(own[-1], number, count, torch.device("cpu")))
    runs = schedule(stages if stages_per_rank > 1 else stages[0], MICRO_BATCHES,
                    loss_fn=lambda output, target: (output - target).square().mean())
    optimizer = torch.optim.SGD(own.parameters(), lr=0.005, momentum=0.9)
    losses, norms = [], []
    for step in range(STEPS):
        inputs = numbers((2 * MICRO_BATCHES, 3, WIDTH), 100 + step)
        targets = numbers((2 * MICRO_BATCHES, 3, WIDTH), 200 + step)
        of_micro_batches = []
        runs.step(*([inputs] if rank == 0 else []),
                  **({"target": targets, "losses": of_micro_batches} if rank == RANKS - 1 else {}))
        both = torch.zeros(2, dtype=torch.float64)
        both[0] = sum(p.grad.square().sum() for p in own.parameters())
        if of_micro_batches:
            both[1] = torch.stack(of_micro_batches).mean()
        dist.all_reduce(both)
        norms.append(both[0].sqrt().item())
        losses.append(both[1].item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def cases_of(rank):
    cases = []
    for name, schedule, stages_per_rank in [("gpipe", ScheduleGPipe, 1), ("1f1b", Schedule1F1B, 1),
                                            ("1f1b", ScheduleInterleaved1F1B, 2)]:
        losses, norms = train(rank, schedule, stages_per_rank)
        cases.append({"schedule": name, "stages_per_rank": stages_per_rank, "losses": losses,
                      "norms": norms})
    return {"cases": cases}


def write_all():
    mp.spawn(write, args=("pipeline.json", 29534, cases_of), nprocs=RANKS)


if __name__ == "__main__":
    write_all()
