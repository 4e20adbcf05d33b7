"""Runs op_runner beside PyTorch on cases that the golden files do not have: unusual dtypes, dimensions
and keywords, 0-d and empty tensors. Prints what differs; exit code 1 where anything does.

    python tests/golden/compare.py build/tests/op_runner
"""

import json
import os
import subprocess
import sys
import tempfile

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import golden_io

EPS = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
golden_io.SHORT["float16"] = "f16"


class Comparison(golden_io.Group):
    """A group whose cases are run at once instead of being stored."""

    def __init__(self, runner, seed):
        super().__init__("compare", seed)
        self.runner, self.failures, self.cases = runner, [], 0

    def _add(self, *arguments):
        self.tensors = {}
        try:
            super()._add(*arguments)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            print(f"torch refuses {arguments[0]} {arguments[3]}: {str(error).splitlines()[0]}")
            return
        record = self.records.pop()
        name, self.cases = record["name"], self.cases + 1
        with tempfile.TemporaryDirectory() as folder:
            spec, given, out = (os.path.join(folder, f) for f in ("spec.json", "in.safetensors", "out.safetensors"))
            save_file({k.split("/")[1]: v.detach().contiguous().clone() for k, v in self.tensors.items() if "/x" in k or "/dy" in k}, given)
            with open(spec, "w") as file:
                json.dump(record["spec"], file)
            run = subprocess.run([self.runner, "--spec", spec, "--inputs", given, "--outputs", out], capture_output=True, text=True)
            complaint = f"exit {run.returncode}: {run.stderr.strip()}" if run.returncode else self.check(record, load_file(out))
        self.tensors = {}
        if complaint:
            self.failures.append(f"{name} {json.dumps(record['spec'])}: {complaint}")
            print(self.failures[-1], flush=True)

    def check(self, record, got):
        name = record["name"]
        dtypes = [o["dtype"] for o in record["outputs"]]
        computed = [golden_io.dtype_name(v.dtype) for k, v in self.tensors.items() if "/x" in k and v.is_floating_point()]
        for key, reference in self.tensors.items():
            key = key.split("/")[1]
            if not (key.startswith("y") or key.startswith("grad.")):
                continue
            if key not in got:
                return f"{key} is missing; there is {sorted(got)}"
            value = got[key]
            if value.shape != reference.shape:
                return f"{key} has shape {tuple(value.shape)}, torch {tuple(reference.shape)}"
            if key.startswith("y"):
                entry = record["outputs"][int(key[1:] or 0)]
                if golden_io.dtype_name(value.dtype) != entry["dtype"]:
                    return f"{key} is {value.dtype}, torch {entry['dtype']}"
            else:
                entry = record["grads"][key.removeprefix("grad.")]
            if not value.is_floating_point():
                if not torch.equal(value, reference):
                    return f"{key} is {value.flatten()[:8].tolist()}, torch {reference.flatten()[:8].tolist()}"
                continue
            eps = max(EPS[d] for d in [golden_io.dtype_name(value.dtype), *computed])
            bound = 8 * eps * np.sqrt(entry["n"]) * max(entry["s"], 1.0)
            a, b = value.double(), reference.double()
            close = (a == b) | ((a - b).abs() <= bound) | (a.isnan() & b.isnan())
            if not bool(close.all()):
                worst = (~close).flatten().nonzero()[0].item()
                return f"{key}[{worst}] is {a.flatten()[worst].item()}, torch {b.flatten()[worst].item()}"
        extra = [k for k in got if k.startswith("y") and f"{name}/{k}" not in self.tensors]
        return f"more outputs than torch's: {extra}" if extra else None


def cases(g):
    half = ["float16"]
    n, i = g.normal, g.integers
    i32 = lambda low, high, *s: g.integers(low, high, *s, dtype=np.int32)
    u8 = lambda *s: g.integers(0, 9, *s, dtype=np.uint8)
    for op in ("neg", "exp", "tanh", "sigmoid", "erf", "relu", "silu", "gelu", "softplus", "sin", "cos", "expm1", "abs", "elu", "leaky_relu"):
        g.case(op, g.away(4, 5), dtypes=half, floor=1)
    for op in ("log", "sqrt", "rsqrt", "reciprocal", "log1p"):
        g.case(op, g.uniform(0.25, 3, 9), dtypes=half)
        g.case(op, i(1, 9, 5), grad=False)
    for op in ("neg", "abs", "sign", "relu", "square"):
        g.case(op, u8(5), grad=False)
        g.case(op, i32(-5, 5, 4), grad=False)
    for op in ("ceil", "floor", "round", "isnan", "isinf", "isfinite", "logical_not"):
        g.case(op, i(-4, 4, 5))
    g.case("sign", g.booleans(4))
    g.case("isnan", g.booleans(4))
    g.case("clamp", i(-9, 9, 6), min=-1.5)
    g.case("clamp", i(-9, 9, 6), min=2, max=-2)
    g.case("clamp", np.array([np.nan, 1.0, -5.0]), min=-1.0, max=0.5, grad=False)
    g.case("clamp", n(3, 4), n(4) - 3, None, grad=False)
    g.case("nan_to_num", i(0, 5, 3))
    g.case("glu", n(2, 4, 3), dim=-2)
    for op in ("add", "sub", "mul", "div"):
        g.case(op, n(3), n(2, 1), dtypes=half)
        g.case(op, i(1, 9, 4), i32(1, 9, 2, 1))
        g.case(op, u8(4) + np.uint8(9), i(1, 9, 4))
        g.case(op, n(4), i(1, 9, 4), grad=[0], dtypes=["bfloat16"])
        g.case(op, i(1, 9, 4), other=2)
        g.case(op, i(1, 9, 4), other=0.5)
        g.case(op, n(4), other=3, dtypes=["bfloat16"])
    g.case("add", g.booleans(4), other=1)
    g.case("add", g.booleans(4), other=True)
    g.case("mul", g.booleans(4), other=2.5)
    g.case("add", i(0, 9, 3), i(0, 9, 3), alpha=3)
    g.case("sub", n(3), other=2, alpha=0.5)
    for op in ("floor_divide", "remainder"):
        g.case(op, i(-9, 9, 5), other=-4)
        g.case(op, i32(-9, 9, 5), i(1, 5, 5))
        g.case(op, np.array([5.5, -5.5, 0.0]), other=2, grad=False)
        g.case(op, i(-9, 9, 5), other=2.5)
    for rounding in ("floor", "trunc"):
        g.case("div", i(-9, 9, 5), other=4, rounding_mode=rounding)
        g.case("div", np.array([5.5, -5.5, 1.0]), other=2.0, rounding_mode=rounding, grad=False)
    g.case("pow", i(0, 5, 4), exponent=2)
    g.case("pow", i(0, 5, 4), exponent=0.5)
    g.case("pow", i(0, 5, 4), i(0, 4, 4))
    g.case("pow", i(1, 5, 4), n(4), grad=[1])
    g.case("pow", np.array([0.0, 0.0, 2.0]), np.array([0.0, 1.0, 0.0]), grad=False)
    g.case("pow", np.array([-2.0, -0.5]), exponent=3)
    g.case("pow", np.array([-2.0, -0.5]), exponent=0.5, grad=False)
    g.case("pow", i(0, 4, 4), self=2, fn=lambda x, self: torch.pow(self, x))
    for op in ("maximum", "minimum"):
        g.case(op, i(-9, 9, 4), g.distinct(4), grad=[1])
        g.case(op, np.array([np.nan, 1.0]), np.array([1.0, np.nan]), grad=False)
        g.case(op, g.booleans(4), g.booleans(4))
        g.case(op, np.array([1.0, 2.0]), np.array([1.0, 3.0]))  # a tie shares the gradient
    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        g.case(op, g.booleans(4), other=True)
        g.case(op, i(-2, 3, 4), other=0.5)
        g.case(op, u8(4), i(-2, 9, 4))
    g.case("logical_and", n(4), g.booleans(4), grad=False)
    g.case("logical_xor", u8(4), i(0, 2, 4))
    g.case("lerp", n(3), n(3), weight=0.5, dtypes=half)
    g.case("addcmul", n(2), i(0, 4, 2), n(2), grad=False)
    g.case("where", g.booleans(3), input=1.0, other=0.0, fn=lambda c, input, other: torch.where(c, input, other))
    g.case("where", g.booleans(3), input=1, other=0, fn=lambda c, input, other: torch.where(c, input, other))
    g.case("where", g.booleans(3), i(0, 4, 3), other=0.5, fn=lambda c, x, other: torch.where(c, x, other))
    g.case("where", g.booleans(3), n(3), n(2, 1), dtypes=half)
    g.case("masked_fill", i(0, 5, 4), g.booleans(4), value=-1)
    g.case("masked_fill", n(3, 4), g.booleans(3, 1), np.array(2.0), grad=[0])
    g.case("masked_fill", n(4), g.booleans(4), value=True, grad=False)
    # Reductions.
    for op in ("sum", "mean", "amax", "amin", "logsumexp", "var", "std"):
        attrs = {"dim": [-1]} if op == "logsumexp" else {}
        g.case(op, g.distinct(3, 4), dtypes=half, terms=12, **attrs)
        g.case(op, g.distinct(2, 3, 4), dim=[-1, 0], terms=8)
        g.case(op, g.distinct(2, 3, 4), dim=-2, keepdim=True, terms=3)
    for op in ("sum", "prod"):
        g.case(op, i32(-3, 4, 2, 3))
        g.case(op, u8(2, 3), dim=0)
        g.case(op, g.booleans(2, 3), dim=1)
        g.case(op, n(2, 3), dtype="float64", dtypes=["float32"])
        g.case(op, i(-3, 4, 2, 3), dtype="float32")
    g.case("sum", n(2, 3), dim=[], terms=6, sums=True)
    g.case("sum", n(), dim=0)
    g.case("sum", n(2, 0), dim=1)
    g.case("prod", n(2, 0), dim=1)
    g.case("mean", n(2, 0), dim=1, grad=False)
    g.case("mean", n(0), grad=False)
    g.case("var", n(1), grad=False)
    g.case("var", n(4), correction=2, terms=4)
    g.case("std", n(3, 4), dim=None, correction=0, keepdim=True, terms=12)
    for op in ("cumsum", "cumprod"):
        g.case(op, i32(-3, 4, 2, 3), dim=1)
        g.case(op, g.booleans(5), dim=0)
        g.case(op, n(), dim=0)
        g.case(op, n(3, 4), dim=-1, dtype="float64", dtypes=["float32"])
    for op in ("max", "min"):
        g.case(op, g.distinct(), dim=0)
        g.case(op, g.booleans(3, 4), dim=1)
        g.case(op, np.array([[1.0, np.nan, 2.0], [3.0, 3.0, 1.0]]), dim=1, grad=False)
        g.case(op, np.array([2.0, 2.0, 1.0]), dim=0)  # the first of equals
        g.case(op, u8(5))
        g.case(op, g.distinct(3, 4), dtypes=half)
    for op in ("argmax", "argmin"):
        g.case(op, g.distinct(3, 4), keepdim=True, grad=False)
        g.case(op, g.distinct(), grad=False)
        g.case(op, i(0, 3, 9))
        g.case(op, u8(3, 4), dim=-1)
    for op in ("any", "all"):
        g.case(op, u8(3, 4), dim=0)
        g.case(op, g.booleans(2, 0), dim=1)
        g.case(op, g.booleans(2, 3), dim=-1, keepdim=True)
    g.case("norm", n(3, 4), p=2, dim=-1, terms=4)
    g.case("norm", n(3, 4), terms=12, dtypes=half)
    g.case("norm", n(3, 4), p=float("-inf"), dim=1, grad=False, fn=lambda x, p, dim: torch.norm(x, p, dim))  # Infinity in JSON
    g.case("norm", np.zeros((2, 3)), dim=1)
    g.case("norm", n(0, 3), dim=0)
    g.case("logsumexp", np.array([[np.inf, 1.0], [-np.inf, -np.inf]]), dim=1, grad=False)
    # Products.
    for a, b in [((2, 3, 4), (2, 4, 5)), ((4,), (4,)), ((5, 1, 3, 4), (2, 4, 3))]:
        g.case("matmul", n(*a), n(*b), terms=20, sums=True, dtypes=half)
    g.case("matmul", n(2, 0, 3), n(3, 4), sums=True)
    g.case("matmul", n(3), n(5, 3, 2), terms=5, sums=True)
    g.case("matmul", n(5, 2, 3), n(3), terms=10, sums=True)
    g.case("matmul", i32(-5, 5, 3, 4), i32(-5, 5, 4, 2))
    g.case("mm", n(3, 4), n(4, 2), terms=4, sums=True)
    g.case("linear", n(2, 4), n(3, 4), n(3), terms=4, sums=True, dtypes=half)
    g.case("addmm", n(2, 3), n(2, 4), n(4, 3), terms=4, sums=True, beta=0.0, alpha=0.5)
    g.case("addmm", n(1), n(2, 4), n(4, 3), terms=6, sums=True)
    g.case("outer", i(0, 5, 3), i(0, 5, 2))
    einsum = lambda *x, equation: torch.einsum(equation, *x)
    for equation, shapes in [(" b i j , b j k -> b i k ", [(2, 3, 4), (2, 4, 5)]), ("i,i", [(3,), (3,)]), ("ij->", [(3, 4)]), ("iij->j", [(3, 3, 4)]), ("bij,bij->b", [(2, 3, 4)] * 2),
                             ("i,j,k->kji", [(2,), (3,), (4,)]), ("...i,...i->...", [(2, 3, 4), (3, 4)]), ("abcd,cdef->abef", [(2, 1, 3, 2), (3, 2, 2, 2)]), ("ba", [(2, 3)]), ("ij,kj->ik", [(1, 4), (3, 4)]),
                             ("nhwc,hwc->n", [(2, 2, 2, 3), (2, 2, 3)])]:
        g.case("einsum", *[n(*s) for s in shapes], terms=24, sums=True, equation=equation, fn=einsum)
    # Normalisation.
    for op in ("softmax", "log_softmax"):
        g.case(op, n(3, 5), dim=1, dtypes=half, terms=5)
        g.case(op, n(), dim=0)
        g.case(op, i(0, 5, 2, 3), dim=1, dtype="float32")
        g.case(op, n(2, 300), dim=-1, terms=300)
    g.case("normalize", n(4), dim=0, terms=4)
    g.case("normalize", n(2, 3, 2), p=3.0, terms=3)
    g.case("cosine_similarity", n(2, 4, 3), n(2, 1, 3), dim=2, terms=12)
    g.case("cosine_similarity", n(4), n(4), dim=0, terms=4)
    layer_norm = lambda x, w, b, normalized_shape, **a: F.layer_norm(x, normalized_shape, w, b, **a)
    g.case("layer_norm", n(2, 3, 5), n(5), n(5), normalized_shape=[5], dtypes=half, terms=6, fn=layer_norm)
    g.case("layer_norm", n(5), None, n(5), normalized_shape=[5], terms=5, fn=layer_norm)
    g.case("layer_norm", n(2, 3, 4), n(2, 3, 4), None, normalized_shape=[2, 3, 4], terms=24, fn=layer_norm)
    g.case("rms_norm", n(3, 5), n(5), normalized_shape=[5], terms=5, dtypes=["float32", "float64"], fn=lambda x, w, normalized_shape: F.rms_norm(x, normalized_shape, w))
    g.case("group_norm", n(2, 4), n(4), None, num_groups=4, eps=0.1, floor=4, fn=lambda x, w, b, num_groups, eps: F.group_norm(x, num_groups, w, b, eps))
    # Shapes.
    cat = lambda *x, **a: torch.cat(list(x), **a)
    g.case("cat", g.booleans(2), g.booleans(3), fn=cat)
    g.case("cat", n(0), n(2, 3), dim=1, grad=False, fn=cat)
    g.case("cat", n(2, 3), fn=cat)
    g.case("cat", n(2), n(3), dtypes=half, fn=cat)
    g.case("stack", i(0, 9, 2), i(0, 9, 2), dim=1, fn=lambda *x, **a: torch.stack(list(x), **a))
    g.case("split", i(0, 9, 7), split_size_or_sections=3, fn=torch.split)
    g.case("split", n(4, 2), split_size_or_sections=9, dim=-1, fn=torch.split)
    g.case("chunk", g.booleans(5), chunks=2)
    g.case("unbind", n(2, 0), dim=0, grad=False)
    g.case("flatten", n(2, 0, 3), start_dim=1)
    g.case("permute", n(), dims=[])
    g.case("transpose", n(2, 3), dim0=-2, dim1=-1)
    g.case("squeeze", n())
    g.case("squeeze", n(1, 1, 1))
    g.case("squeeze", n(1, 2), dim=[-2])
    g.case("unsqueeze", n(), dim=-1)
    g.case("narrow", n(4), dim=0, start=-3, length=2)
    g.case("select", n(4), dim=0, index=-1)
    g.case("flip", n(3, 2), dims=[])
    g.case("flip", g.booleans(3), dims=[-1])
    g.case("roll", n(3, 4), shifts=[5, -9], dims=[0, -1])
    g.case("roll", n(0), shifts=1)
    g.case("roll", n(5), shifts=-7, dims=0)
    g.case("repeat", g.booleans(2), repeats=[3, 2], fn=lambda x, repeats: x.repeat(repeats))
    g.case("repeat_interleave", n(4), np.array([2, 0, 1, 3]))
    g.case("repeat_interleave", n(2, 3), np.array([1, 2, 0]), dim=-1)
    g.case("repeat_interleave", n(2, 3), np.array([2]), dim=0)
    g.case("pad", n(2, 3, 4), pad=[1, 1, 0, 2, 1, 0])
    g.case("pad", n(2, 3), pad=[])
    g.case("pad", n(2, 3), pad=[2, -1], value=-np.float64(1.5))
    g.case("pad", n(2, 5), pad=[2, 2], mode="reflect")
    g.case("pad", n(1, 1, 3, 3), pad=[1, 2, 2, 1], mode="replicate")
    g.case("pad", n(1, 1, 3, 3), pad=[1, 2, 2, 1], mode="circular")
    g.case("pad", g.booleans(3), pad=[1, 0], value=True)
    # Indices.
    select = lambda x, index, dim: torch.index_select(x, dim, index)
    g.case("index_select", n(), np.array([0]), dim=0, fn=select)
    g.case("index_select", g.booleans(3, 2), np.array([2, 0]), dim=0, fn=select)
    gather = lambda x, index, dim: torch.gather(x, dim, index)
    g.case("gather", n(), np.array(0), dim=0, fn=gather)
    g.case("gather", i(0, 9, 3, 4), i(0, 4, 2, 6), dim=1, fn=gather)
    g.case("scatter", n(3, 4), i(0, 1, 3, 1), dim=1, value=2, fn=lambda x, index, dim, value: torch.scatter(x, dim, index, value))
    g.case("scatter", i(0, 9, 3, 4), i(0, 1, 3, 1), i(0, 9, 3, 1), dim=1, fn=lambda x, index, src, dim: torch.scatter(x, dim, index, src))
    g.case("scatter_add", n(4), i(0, 4, 3), n(3), dim=0, terms=3, fn=lambda x, index, src, dim: torch.scatter_add(x, dim, index, src))
    put = lambda x, *r, accumulate=False: torch.index_put(x, tuple(r[:-1]), r[-1], accumulate)
    g.case("index_put", n(4, 3), np.array([1, 3]), np.array(2.0), grad=[0], fn=put)
    g.case("index_put", n(4, 3), np.array([[1], [3]]), np.array([0, 2]), n(2, 2), fn=put)
    g.case("index_put", n(4, 3), g.booleans(4, 3), np.array(7.0), grad=[0], fn=put)
    g.case("index_put", i(0, 9, 4), np.array([-1, 0]), i(0, 9, 2), accumulate=True, fn=put)
    for op in ("tril", "triu"):
        g.case(op, n(3, 3), diagonal=5)
        g.case(op, n(2, 2, 3, 2), diagonal=-1)
        g.case(op, n(0, 3))
    g.case("sort", g.distinct(), dim=0)
    g.case("sort", g.booleans(5), stable=True, fn=lambda x, stable: torch.sort(x, stable=stable))
    g.case("sort", np.array([np.nan, 1.0, np.inf, -np.inf]), descending=True, grad=False)
    g.case("sort", g.distinct(2, 3, 4), dim=1)
    g.case("topk", g.distinct(), k=1)
    g.case("topk", g.distinct(5), k=0)
    g.case("topk", g.distinct(3, 5), k=5, dim=-1, sorted=True)
    g.case("topk", np.array([1.0, np.nan, 2.0]), k=2, grad=False)
    g.case("bincount", i32(0, 5, 7))
    g.case("bincount", i(0, 5, 6), i(0, 5, 6))
    g.case("one_hot", np.array(2), num_classes=4)
    g.case("one_hot", i(0, 3, 0), num_classes=2)
    embedding = lambda ids, weight, **a: F.embedding(ids, weight, **a)
    g.case("embedding", i32(0, 5, 4), n(5, 2), fn=embedding)
    g.case("embedding", i(0, 5, 2, 2), n(5, 2), padding_idx=-2, fn=embedding)
    g.case("nonzero", np.array(3))
    g.case("masked_select", n(2, 1), g.booleans(3))
    # Losses.
    ids, soft = i(0, 5, 4), g.uniform(0.1, 1, 4, 5)
    soft = soft / soft.sum(1, keepdims=True)
    g.case("cross_entropy", n(4, 5), ids, dtypes=half, terms=20)
    g.case("cross_entropy", n(4, 5), soft, g.uniform(0.5, 2, 5), label_smoothing=0.1, terms=20, grad=[0])
    g.case("cross_entropy", n(2, 5, 2, 3), i(0, 5, 2, 2, 3), g.uniform(0.5, 2, 5), reduction="sum", terms=60, grad=[0])
    g.case("cross_entropy", n(2, 5, 3), i(0, 5, 2, 3), reduction="none", label_smoothing=0.3, terms=5)
    g.case("cross_entropy", n(2, 5), np.array([-100, -100]), grad=False)
    g.case("nll_loss", n(5), np.array(2), terms=5)
    g.case("nll_loss", n(2, 5, 2, 2), i(0, 5, 2, 2, 2), terms=8)
    for op in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        x = n(3, 4)
        g.case(op, x, x + g.away(3, 4), dtypes=half, terms=12)
        g.case(op, n(0), n(0), reduction="sum", grad=False)
    for op in ("mse_loss", "l1_loss", "huber_loss"):
        for reduction in ("mean", "sum", "none"):
            g.case(op, n(3), n(3), g.uniform(0.5, 2, 3), grad=[0], terms=3, reduction=reduction, fn=lambda x, t, w, op=op, **a: getattr(F, op)(x, t, weight=w, **a))
    bce = lambda x, t, w=None, p=None, **a: F.binary_cross_entropy_with_logits(x, t, weight=w, pos_weight=p, **a)
    g.case("binary_cross_entropy_with_logits", n(3, 4), g.uniform(0, 1, 3, 4), None, g.uniform(0.5, 2, 4), grad=[0], terms=12, fn=bce)
    # Convolution, pooling, attention.
    g.case("conv1d", n(1, 2, 6), n(3, 2, 3), None, padding="valid", terms=18, sums=True)
    g.case("conv1d", n(1, 2, 6), n(4, 1, 2), None, padding="same", groups=2, terms=18, sums=True)
    g.case("conv1d", n(2, 2, 6), n(3, 2, 3), n(3), terms=18, sums=True, dtypes=half)
    g.case("conv2d", n(2, 5, 5), n(3, 2, 2, 3), n(3), stride=[2], padding=1, terms=48, sums=True)
    g.case("conv2d", n(1, 2, 5, 5), n(3, 2, 3, 3), n(3), padding="same", dilation=[2, 1], terms=48, sums=True)
    g.case("conv2d", n(0, 2, 5, 5), n(3, 2, 3, 3), n(3), sums=True)
    g.case("max_pool2d", g.distinct(2, 6, 6), kernel_size=[3, 2], stride=None, padding=[1, 0])
    g.case("max_pool2d", g.distinct(1, 1, 6, 6), kernel_size=2, dtypes=half)
    g.case("max_pool2d", g.distinct(2, 1, 7, 6), kernel_size=3, stride=2, padding=1, return_indices=True)
    g.case("max_pool1d", g.distinct(2, 3, 9), kernel_size=3, stride=2, padding=1, dilation=2)
    g.case("max_pool1d", g.distinct(3, 8), kernel_size=3, ceil_mode=True, return_indices=True)
    g.case("avg_pool2d", n(2, 6, 5), kernel_size=[3, 2], stride=[2, 1], padding=[1, 0], ceil_mode=True, terms=6)
    g.case("avg_pool2d", n(1, 1, 7, 7), kernel_size=3, stride=2, padding=1, ceil_mode=True, count_include_pad=False, terms=9)
    g.case("adaptive_avg_pool2d", n(2, 5, 7), output_size=[2, 3], terms=9)
    g.case("adaptive_avg_pool2d", n(1, 2, 5, 7), output_size=[None, 3], terms=9)
    g.case("interpolate", n(1, 2, 4, 3), size=6, terms=4)
    g.case("interpolate", n(1, 2, 5), scale_factor=1.7, terms=2)
    sdpa = "scaled_dot_product_attention"
    q = lambda *s: n(*s)
    g.case(sdpa, q(2, 2, 3, 4), q(2, 2, 5, 4), q(2, 2, 5, 4), dtypes=half, terms=5)
    g.case(sdpa, q(1, 2, 3, 4), q(1, 2, 5, 4), q(1, 2, 5, 4), g.booleans(1, 1, 3, 5) | np.eye(3, 5, dtype=bool), terms=5, grad=[0, 1, 2])
    g.case(sdpa, q(3, 2, 3, 4), q(3, 2, 5, 4), q(3, 2, 5, 4), n(2, 1, 5), terms=30)
    g.case(sdpa, q(1, 1, 2, 4), q(1, 1, 3, 4), q(1, 1, 3, 4), np.array([[True, False, True], [False, False, False]]), terms=3, grad=False)
    g.case(sdpa, q(1, 2, 130, 8), q(1, 2, 130, 8), q(1, 2, 130, 8), is_causal=True, terms=130)
    g.case(sdpa, q(4, 3, 5), q(4, 3, 5), q(4, 3, 5), is_causal=True, terms=3)
    # Creation.
    g.case("arange", start=1, end=4, dtype="float16")
    g.case("arange", start=0, end=1, step=0.1)
    g.case("arange", start=3, end=3)
    g.case("linspace", start=0, end=10, steps=4, dtype="int64")
    g.case("linspace", start=1, end=2, steps=0)
    g.case("full", size=[2], fill_value=2, dtype="bool")
    g.case("full", size=[], fill_value=float("inf"), fn=lambda size, fill_value: torch.full(size, fill_value))
    g.case("eye", n=0, fn=lambda n: torch.eye(n))
    g.case("zeros", size=[3])
    g.case("ones_like", g.booleans(2, 2))
    g.case("full_like", i(0, 3, 2), fill_value=2.7)
    g.case("zeros_like", n(2), dtype="bool", grad=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    comparison = Comparison(os.path.abspath(sys.argv[1]), seed=77)
    cases(comparison)
    print(f"{len(comparison.failures)} of {comparison.cases} cases differ")
    sys.exit(1 if comparison.failures else 0)
