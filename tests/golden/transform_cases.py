"""Derivatives of functions (functional.safetensors).

functional.safetensors: a, b, the directions v.* and what torch.autograd.functional gives for
lists(a, b) and scalar(a, b) below, all float64.
"""

import torch

from golden_io import save_tensors


def functional():
    generator = torch.Generator().manual_seed(70)
    normal = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    a, b = normal(2, 3), normal(3)

    def lists(a, b):
        return torch.exp(a * b), (a * a).sum(1) * b.sum()

    def scalar(a, b):
        return torch.exp(a * b).sum() + (torch.tanh(a) ** 3).sum() * b[0]

    va, vb, w0, w1 = normal(2, 3), normal(3), normal(2, 3), normal(2)
    f = torch.autograd.functional
    tensors = {"a": a, "b": b, "v.a": va, "v.b": vb, "v.0": w0, "v.1": w1}
    for name, (outputs, products) in (("vjp", f.vjp(lists, (a, b), (w0, w1))), ("jvp", f.jvp(lists, (a, b), (va, vb)))):
        for i, y in enumerate(outputs):
            tensors[f"{name}.y{i}"] = y
        for i, p in enumerate(products):
            tensors[f"{name}.p{i}"] = p
    for o, row in enumerate(f.jacobian(lists, (a, b))):
        for i, block in enumerate(row):
            tensors[f"jacobian.{o}{i}"] = block
    for o, row in enumerate(f.hessian(scalar, (a, b))):
        for i, block in enumerate(row):
            tensors[f"hessian.{o}{i}"] = block
    for name in ("hvp", "vhp"):
        value, products = getattr(f, name)(scalar, (a, b), (va, vb))
        tensors[f"{name}.y0"] = value
        for i, p in enumerate(products):
            tensors[f"{name}.p{i}"] = p
    save_tensors("functional.safetensors", tensors)


def write_all():
    functional()


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_all()
