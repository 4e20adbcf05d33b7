"""Packed documents in PyTorch, beside the rows "packed" of bench_attention: one call with a mask,
and a loop over the documents.

    OMP_NUM_THREADS=1 python packed_attention.py 64 2048   # uniform lengths
    OMP_NUM_THREADS=1 python packed_attention.py LENGTH... # these lengths

Times are the process's own (CPU time), as the column "CPU" of bench_attention.
"""
import random
import statistics
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention as attend

torch.set_num_threads(1)
HEADS, WIDTH = 12, 64


def seconds(run):
    run()
    times = []
    for _ in range(3):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return statistics.median(times)


def inputs(tokens, dtype):
    return [
        torch.randn(1, tokens, HEADS, WIDTH, dtype=dtype).transpose(1, 2).requires_grad_()
        for _ in range(3)
    ]


def report(name, calls):
    """calls: of (inputs, keywords)."""
    with torch.no_grad():
        forward = seconds(lambda: [attend(*x, **k) for x, k in calls])
    results = [attend(*x, **k) for x, k in calls]
    seeds = [torch.ones_like(y) for y in results]
    backward = seconds(
        lambda: [
            torch.autograd.grad(y, x, seed, retain_graph=True)
            for y, seed, (x, _) in zip(results, seeds, calls)
        ]
    )
    print(f"{name}: forward {1e3 * forward:.1f} ms, backward {1e3 * backward:.1f} ms", flush=True)


def main():
    given = [int(word) for word in sys.argv[1:]]
    lengths = given
    if len(given) == 2:
        generator = random.Random(7)
        lengths = []
        while sum(lengths) < 8192:
            lengths.append(min(generator.randint(*given), 8192 - sum(lengths)))
    total = sum(lengths)
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = (document[:, None] == document[None, :]).tril()
    for dtype in (torch.float32, torch.bfloat16):
        loop = [(inputs(length, dtype), {"is_causal": True}) for length in lengths]
        report(f"{dtype} loop over {len(lengths)} documents", loop)
        report(f"{dtype} mask", [(inputs(total, dtype), {"attn_mask": mask})])


if __name__ == "__main__":
    main()
