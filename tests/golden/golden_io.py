"""How golden cases are computed and stored: inputs rounded to a dtype, references in float64.

A case is an op_runner specification plus what must come out. `ops_GROUP.json` holds one case a line:

  {"name": "layer_norm.0.bf16",
   "spec": {"op": ..., "inputs": [...], "attrs": {...}, "grad_of": [...], "grad_output": ...},
   "outputs": [{"dtype": "bfloat16", "n": 7, "s": 2.5}],       # one for y, or for y0, y1, ...
   "grads": {"x0": {"n": 1, "s": 0.7}}}

and `ops_GROUP.safetensors` the tensors NAME/x0, NAME/dy, NAME/y, NAME/grad.x0. References of
floating results are float64; integer and boolean results are exact. n is the reduction length and s
the scale of the error bound k * eps * sqrt(n) * s.
"""

import json
import os

import numpy as np
import torch
from safetensors.torch import save_file

HERE = os.path.dirname(os.path.abspath(__file__))
SHORT = {"float32": "f32", "bfloat16": "bf16", "float64": "f64"}


def dtype_name(dtype):
    return str(dtype).removeprefix("torch.")


def largest(tensor):
    """Largest finite magnitude, 0 for an empty tensor."""
    values = tensor.detach().double().abs()
    values = values[torch.isfinite(values)]
    return float(values.max()) if values.numel() else 0.0


def significant(value):
    return float(f"{value:.3g}")


def as_list(value):
    return list(value) if isinstance(value, (tuple, list)) else [value]


class Group:
    """Collects the cases of one pair of files."""

    def __init__(self, name, seed):
        self.name = name
        self.rng = np.random.default_rng(seed)
        self.records = []
        self.tensors = {}
        self.counts = {}

    # --- inputs -------------------------------------------------------------------------------
    # float64 arrays are rounded to the dtype of the case; integer and bool arrays stay as they are.
    def normal(self, *shape):
        return self.rng.standard_normal(shape)

    def uniform(self, low, high, *shape):
        return self.rng.uniform(low, high, shape)

    def away(self, *shape, gap=0.125, high=2.0):
        """Magnitudes in [gap, high], either sign: for functions with a kink or a pole at 0."""
        return self.rng.uniform(gap, high, shape) * self.rng.choice([-1.0, 1.0], shape)

    def distinct(self, *shape):
        """Multiples of 1/16, all different and exact in bfloat16: no ties, kinks 1/16 away."""
        count = int(np.prod(shape))
        assert count <= 240
        grid = (np.arange(count) - count // 2 + 0.5) / 16 if count < 120 else (np.arange(count) - 120) / 16
        return self.rng.permutation(grid).reshape(shape)

    def integers(self, low, high, *shape, dtype=np.int64):
        return self.rng.integers(low, high, shape).astype(dtype)

    def booleans(self, *shape):
        return self.rng.integers(0, 2, shape).astype(bool)

    # --- cases --------------------------------------------------------------------------------
    def case(self, op, /, *inputs, grad=True, dtypes=None, terms=1, grad_terms=None, sums=False, floor=0.0, grad_floor=0.0, fn=None, **attrs):
        """Adds op(*inputs, **attrs), once for each dtype.

        grad: True for all floating inputs, False for none, or positions. sums: results are sums of
        products, whose error is measured against the same sums over absolute values. floor, grad_floor:
        least scale of the error, where differences of larger numbers are taken inside.
        """
        index = self.counts.get(op, 0)
        self.counts[op] = index + 1
        fn = fn or resolve(op)
        floating = [i for i, x in enumerate(inputs) if x is not None and x.dtype == np.float64]
        if dtypes is None:
            dtypes = ["float32", "bfloat16", "float64"] if index < 2 else ["float32"]
        if not floating:
            dtypes = [None]
        for dtype in dtypes:
            self._add(op, index, inputs, attrs, grad, dtype, terms, terms if grad_terms is None else grad_terms, sums, floor, grad_floor, fn, floating)

    def _add(self, op, index, inputs, attrs, grad, dtype, terms, grad_terms, sums, floor, grad_floor, fn, floating):
        name = f"{op}.{index}" + (f".{SHORT[dtype]}" if dtype else "")
        native = [None if x is None else torch.from_numpy(np.array(x, copy=True)) for x in inputs]
        for i in floating:
            native[i] = native[i].to(getattr(torch, dtype))
        wanted = [] if not grad else (floating if grad is True else list(grad))

        def run(tensors, **options):
            return [y for y in as_list(fn(*tensors, **call_attrs(options))) if y is not None]

        exact = [x.double() if i in floating else x for i, x in enumerate(native)]
        for i in wanted:
            exact[i].requires_grad_()
        f64_attrs = dict(attrs)
        if "dtype" in f64_attrs and f64_attrs["dtype"] in SHORT:
            f64_attrs["dtype"] = "float64"
        outputs = run(exact, **f64_attrs)
        real = run(native, **attrs)

        spec = {"op": op, "inputs": [None if x is None else f"x{i}" for i, x in enumerate(inputs)]}
        if attrs:
            spec["attrs"] = attrs
        record = {"name": name, "spec": spec, "outputs": []}
        for i, x in enumerate(native):
            if x is not None:
                self._store(f"{name}/x{i}", x)
        scales = [largest(y) for y in outputs]
        positive = None
        if sums:
            positive = [x.detach().abs().requires_grad_(i in wanted) if i in floating else x for i, x in enumerate(exact)]
            totals = run(positive, **f64_attrs)
            scales = [max(largest(y), scale) for y, scale in zip(totals, scales)]
        single = len(outputs) == 1 and not isinstance(fn(*native, **call_attrs(attrs)), (tuple, list))
        for i, (y, z) in enumerate(zip(outputs, real)):
            assert y.shape == z.shape, name
            stored = y.detach().double() if z.is_floating_point() else z
            self._store(f"{name}/y" if single else f"{name}/y{i}", stored)
            entry = {"dtype": dtype_name(z.dtype)}
            if z.is_floating_point():
                entry.update(n=terms, s=significant(max(scales[i], floor)))
            record["outputs"].append(entry)
        if not single:
            record["several"] = True

        followed = [i for i, y in enumerate(outputs) if y.requires_grad]
        if wanted:
            assert followed, f"{name}: nothing to differentiate; pass grad=False"
            names = [None] * len(outputs)
            gradients = [None] * len(outputs)
            for i in followed:
                names[i] = "dy" if single else f"dy{i}"
                values = torch.from_numpy(np.asarray(self.rng.standard_normal(tuple(outputs[i].shape))))
                gradients[i] = values.to(real[i].dtype)
                self._store(f"{name}/{names[i]}", gradients[i])
            spec["grad_of"] = [f"x{i}" for i in wanted]
            spec["grad_output"] = names[0] if single else names
            results = torch.autograd.grad([outputs[i] for i in followed], [exact[i] for i in wanted],
                                          [gradients[i].double() for i in followed], materialize_grads=True)
            scales = [largest(g) for g in results]
            if sums:
                totals = torch.autograd.grad([run(positive, **f64_attrs)[i] for i in followed], [positive[i] for i in wanted],
                                             [gradients[i].double().abs() for i in followed], materialize_grads=True)
                scales = [max(largest(g), scale) for g, scale in zip(totals, scales)]
            record["grads"] = {}
            for i, g, scale in zip(wanted, results, scales):
                self._store(f"{name}/grad.x{i}", g)
                record["grads"][f"x{i}"] = {"n": grad_terms, "s": significant(max(scale, grad_floor))}
        self.records.append(record)

    def _store(self, name, tensor):
        assert name not in self.tensors, name
        self.tensors[name] = tensor

    def save(self):
        save_tensors(f"{self.name}.safetensors", self.tensors)
        write_lines(f"{self.name}.json", self.records)


def save_tensors(name, tensors):
    path = os.path.join(HERE, name)
    save_file({key: value.detach().contiguous().clone() for key, value in tensors.items()}, path)
    os.chmod(path, 0o644)


def write_lines(name, records):
    """A JSON array with one record a line: diffs stay readable."""
    with open(os.path.join(HERE, name), "w") as file:
        lines = ",\n".join(json.dumps(record, separators=(",", ":"), allow_nan=False) for record in records)
        file.write("[\n" + lines + "\n]\n")


def call_attrs(attrs):
    """Attributes as torch takes them: a dtype is spelled as in torch.DTYPE."""
    return {key: getattr(torch, value) if key == "dtype" else value for key, value in attrs.items()}


def resolve(op):
    if op.startswith("linalg_"):
        return getattr(torch.linalg, op.removeprefix("linalg_"))
    for place in (torch.nn.functional, torch, torch.Tensor):
        if hasattr(place, op):
            return getattr(place, op)
    raise AttributeError(f"{op} is in neither torch.nn.functional, torch nor torch.Tensor")
