"""Speed of PyTorch's optimizer steps and gradient norm, for the tensors of bench_optim.

    python bench/compare/pytorch_optim.py [--threads N] [--millions N]
"""
import argparse
import statistics
import time

import torch

from run import cpu_settings


def median_ms(call, repeat=9):
    call()
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def tensors(millions, dtype):
    shapes = [(1024, 1024), (1024,), (768,)] * millions
    return [torch.randn(shape).to(dtype) for shape in shapes]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--millions", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name, value in cpu_settings().items():
        print(f"{name}: {value}")
    print(f"torch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()}), "
          f"{options.threads} threads")
    for dtype in (torch.float32, torch.bfloat16):
        parameters = tensors(options.millions, dtype)
        for parameter, gradient in zip(parameters, tensors(options.millions, dtype)):
            parameter.requires_grad_()
            parameter.grad = gradient
        for form in ("fused", "foreach"):
            optimizer = torch.optim.AdamW(parameters, weight_decay=0.1, **{form: True})
            print(f"AdamW {form:8} {dtype}: {median_ms(optimizer.step):9.3f} ms")
            optimizer = torch.optim.SGD(parameters, lr=1e-4, momentum=0.9, **{form: True})
            print(f"SGD   {form:8} {dtype}: {median_ms(optimizer.step):9.3f} ms")
        gradients = [parameter.grad for parameter in parameters]
        print(f"norm           {dtype}: "
              f"{median_ms(lambda: torch.nn.utils.get_total_norm(gradients)):9.3f} ms")


if __name__ == "__main__":
    main()
