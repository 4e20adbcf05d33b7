"""One function for each group of ops: the cases of ops_GROUP.{json,safetensors}.

An op takes its tensors in the order of torch's signature and everything else by torch's keywords.
Where tensors do not stand first in that signature, or form a list, `fn` says how torch is called.
"""

import numpy as np
import torch
import torch.nn.functional as F

from golden_io import Group


def creation(g):
    g.case("zeros", size=[2, 3])
    g.case("zeros", size=[0, 4], dtype="int64")
    g.case("zeros", size=[], dtype="float64")
    g.case("ones", size=[3, 1, 2], dtype="bfloat16")
    g.case("ones", size=[4], dtype="bool")
    g.case("full", size=[2, 3], fill_value=1.5)
    g.case("full", size=[2], fill_value=7)
    g.case("full", size=[2], fill_value=True)
    g.case("full", size=[2, 2], fill_value=-3, dtype="float32")
    g.case("arange", end=7)
    g.case("arange", start=2, end=11, step=3)
    g.case("arange", start=5, end=-4, step=-2, dtype="int32")
    g.case("arange", start=0.0, end=1.0, step=0.125)
    g.case("arange", start=-1, end=1, step=0.25, dtype="float64")
    g.case("arange", start=0, end=6, dtype="bfloat16")
    g.case("linspace", start=-1.0, end=2.0, steps=7)
    g.case("linspace", start=3, end=10, steps=5, dtype="float64")
    g.case("linspace", start=0.0, end=5.0, steps=1)
    g.case("eye", n=3)
    g.case("eye", n=2, m=5, dtype="float64", fn=lambda n, m, dtype: torch.eye(n, m, dtype=dtype))
    g.case("eye", n=4, m=2, dtype="int64", fn=lambda n, m, dtype: torch.eye(n, m, dtype=dtype))
    for op in ("zeros_like", "ones_like"):
        g.case(op, g.normal(2, 3), grad=False, dtypes=["float32", "bfloat16"])
        g.case(op, g.integers(0, 9, 4))
        g.case(op, g.normal(0, 2), grad=False, dtypes=["float64"])
    g.case("zeros_like", g.normal(2), grad=False, dtypes=["float32"], dtype="int64")
    g.case("full_like", g.normal(2, 3), grad=False, dtypes=["float32", "bfloat16"], fill_value=2.5)
    g.case("full_like", g.integers(0, 9, 3), fill_value=4)


def unary(g):
    def cover(op, make, grad=True, **attrs):
        """Odd matrix, 0-d, empty, three dimensions, a length beyond one vector."""
        g.case(op, make(3, 5), grad=grad, **attrs)
        g.case(op, make(2, 1, 7), grad=grad, **attrs)
        g.case(op, make(), grad=grad, **attrs)
        g.case(op, make(2, 0, 3), grad=grad, **attrs)
        g.case(op, make(37), grad=grad, **attrs)

    positive = lambda *shape: g.uniform(0.1, 4.0, *shape)
    for op in ("neg", "exp", "expm1", "sin", "cos", "tanh", "sigmoid", "erf", "silu", "softplus"):
        cover(op, g.normal)
    for op in ("abs", "relu", "elu", "leaky_relu"):
        cover(op, g.away)
    for op in ("log", "log1p", "sqrt", "rsqrt"):
        cover(op, positive)
    cover("reciprocal", g.away)
    for op in ("sign", "floor", "ceil", "round"):
        cover(op, lambda *shape: g.away(*shape, gap=0.05, high=3.9))
    cover("gelu", g.normal, floor=0.5)
    cover("gelu", g.normal, floor=0.5, approximate="tanh")
    cover("clamp", lambda *shape: g.distinct(*shape) + 0.01, min=-0.5, max=0.75)

    g.case("exp", g.uniform(-87, 80, 13), dtypes=["float32", "float64"])
    g.case("tanh", g.uniform(-12, 12, 9))
    g.case("erf", g.uniform(-5, 5, 9))
    g.case("sigmoid", g.uniform(-30, 30, 9))
    g.case("sin", g.uniform(-40, 40, 9), dtypes=["float32", "float64"])
    g.case("cos", g.uniform(-40, 40, 9), dtypes=["float32", "float64"])
    g.case("expm1", g.uniform(-1e-3, 1e-3, 9), dtypes=["float32", "float64"])
    g.case("log1p", g.uniform(-1e-3, 1e-3, 9), dtypes=["float32", "float64"])
    g.case("log", g.uniform(1e-30, 1e-28, 5), dtypes=["float32", "float64"])
    special = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.5])
    for op in ("exp", "tanh", "sigmoid", "erf", "neg", "abs", "relu", "isnan", "isinf", "isfinite", "sqrt", "reciprocal", "floor", "log"):
        g.case(op, special, grad=False, dtypes=["float32", "bfloat16", "float64"])

    g.case("elu", g.away(3, 4), alpha=0.7)
    g.case("leaky_relu", g.away(3, 4), negative_slope=0.2)
    g.case("softplus", g.normal(3, 4), beta=2.0, threshold=3.0)
    g.case("softplus", g.uniform(15, 25, 5))
    g.case("clamp", g.distinct(3, 4) + 0.01, min=-0.25)
    g.case("clamp", g.distinct(3, 4) + 0.01, max=0.25)
    g.case("clamp", g.distinct(3, 4), g.distinct(3, 4) - 1.015, g.distinct(4) + 1.015)
    g.case("clamp", g.integers(-9, 9, 7), min=-3, max=4)
    g.case("round", np.array([0.5, 1.5, 2.5, -0.5, -1.5, 2.4]), grad=False)
    g.case("round", g.uniform(-2, 2, 6), decimals=2, grad=False, dtypes=["float64"])
    g.case("glu", g.normal(3, 4))
    g.case("glu", g.normal(4, 5), dim=0)
    g.case("glu", g.normal(2, 6, 3), dim=1)
    g.case("nan_to_num", np.array([np.nan, np.inf, -np.inf, 1.0]), grad=False, nan=0.5, posinf=9.0, neginf=-7.0)
    g.case("nan_to_num", np.array([[np.nan, 2.0], [np.inf, -np.inf]]), grad=False, posinf=5.0, neginf=-5.0)
    g.case("nan_to_num", g.normal(2, 3))
    for op in ("isnan", "isinf", "isfinite", "logical_not"):
        g.case(op, g.normal(2, 3), grad=False)
        g.case(op, g.integers(0, 2, 5))
    g.case("logical_not", np.array([0.0, 1.0, np.nan]), grad=False)
    g.case("logical_not", g.booleans(2, 3))
    for op in ("neg", "abs", "sign", "relu", "floor"):
        g.case(op, g.integers(-5, 6, 2, 5))
    for op in ("exp", "sqrt", "sigmoid", "tanh", "reciprocal"):
        g.case(op, g.integers(1, 6, 5))  # integers become float32
    g.case("sin", g.integers(0, 9, 4, dtype=np.int32))


def binary(g):
    def cover(op, make, other=None, grad=True, **attrs):
        other = other or make
        g.case(op, make(3, 5), other(3, 5), grad=grad, **attrs)
        g.case(op, make(3, 1, 5), other(4, 1), grad=grad, **attrs)
        g.case(op, make(5), other(2, 3, 1), grad=grad, **attrs)
        g.case(op, make(), other(3, 2), grad=grad, **attrs)
        g.case(op, make(3, 0), other(1), grad=grad, **attrs)
        g.case(op, make(), other(), grad=grad, **attrs)
        g.case(op, make(1, 33), other(2, 33), grad=grad, **attrs)

    cover("add", g.normal)
    cover("sub", g.normal)
    cover("mul", g.normal)
    cover("div", g.normal, g.away)
    positive = lambda *shape: g.uniform(0.2, 2.5, *shape)
    cover("pow", positive, g.normal)
    cover("maximum", g.distinct, lambda *shape: g.distinct(*shape) + 0.03)
    cover("minimum", g.distinct, lambda *shape: g.distinct(*shape) + 0.03)
    for op in ("floor_divide", "remainder"):
        # Quotients stay 1/4 away from an integer, where rounding would decide.
        g.case(op, np.array([[7.25, -7.25, 0.75], [2.5, -2.5, 4.25]]), np.array([2.0, -1.0, 0.5]), grad=False)
        g.case(op, np.array([1.25, -1.25]), np.array([[0.5], [-2.0], [3.0]]), grad=False)
        g.case(op, g.integers(-20, 20, 3, 4), np.array([[3], [-4], [7]]))
        g.case(op, g.integers(-20, 20, 6, dtype=np.int32), other=-3)
        g.case(op, np.array([7.25, -7.25, 0.75]), other=-2.0, grad=False)
    g.case("remainder", np.array([7.25, -7.25, 0.75]), other=2.0)
    g.case("remainder", np.array([7.25, -7.25]), np.array([2.0, -3.0]))
    for op in ("eq", "ne", "lt", "le", "gt", "ge"):
        small = lambda *shape: g.integers(-2, 3, *shape).astype(np.float64)
        cover(op, small, grad=False)
        g.case(op, g.integers(-2, 3, 4), g.integers(-2, 3, 3, 1))
        g.case(op, g.booleans(5), g.booleans(5))
        g.case(op, small(7), other=1.0, grad=False)
        g.case(op, g.integers(-2, 3, 7), other=0)
        g.case(op, np.array([np.nan, 1.0, np.inf]), np.array([np.nan, np.nan, np.inf]), grad=False)
        g.case(op, g.integers(0, 3, 4), small(4), grad=False)
    for op in ("logical_and", "logical_or", "logical_xor"):
        g.case(op, g.booleans(2, 5), g.booleans(5))
        g.case(op, g.integers(0, 2, 4), g.booleans(3, 1))
        g.case(op, g.integers(0, 2, 6).astype(np.float64), g.integers(0, 2, 6).astype(np.float64), grad=False)
        g.case(op, g.booleans(0, 2), g.booleans(2))
    for op in ("add", "sub", "mul", "div", "pow"):
        g.case(op, positive(3, 4), other=1.5, fn=lambda x, other, op=op: getattr(torch, op)(x, other)) if op != "pow" else g.case(
            op, positive(3, 4), exponent=1.5)
    g.case("pow", g.normal(3, 4), exponent=2)
    g.case("pow", g.normal(3, 4), exponent=3.0)
    g.case("pow", g.away(3, 4), exponent=-1)
    g.case("pow", positive(3), exponent=0.5)
    g.case("pow", g.normal(3), exponent=0)
    g.case("pow", positive(2, 3), self=2.0, fn=lambda x, self: torch.pow(self, x))
    g.case("pow", g.integers(-3, 4, 5), exponent=3)
    g.case("add", g.normal(3, 4), g.normal(4), alpha=-0.5)
    g.case("sub", g.normal(3, 4), g.normal(4), alpha=2)
    for op in ("add", "sub", "mul", "maximum", "minimum"):
        g.case(op, g.integers(-9, 9, 2, 3), g.integers(-9, 9, 3))
        g.case(op, g.integers(-9, 9, 3, dtype=np.int32), g.integers(-9, 9, 2, 1))
    g.case("add", g.integers(-9, 9, 4), other=2.5)  # becomes float32
    g.case("mul", g.integers(-9, 9, 4, dtype=np.int32), other=3)
    g.case("mul", g.integers(1, 9, 3), g.normal(3), grad=[1])  # integer beside floating
    g.case("add", g.booleans(3), g.integers(0, 4, 3))
    g.case("mul", g.booleans(3), g.booleans(3))
    g.case("add", g.integers(0, 200, 4, dtype=np.uint8), g.integers(0, 200, 4, dtype=np.uint8))  # wraps
    g.case("div", g.integers(-9, 9, 4), g.integers(1, 5, 4))  # true division
    g.case("div", g.integers(-9, 9, 4), g.integers(1, 5, 4), rounding_mode="floor")
    g.case("div", g.integers(-9, 9, 4), g.integers(1, 5, 4), rounding_mode="trunc")
    g.case("div", np.array([7.25, -7.25]), np.array([2.0, 2.0]), rounding_mode="trunc", grad=False)
    g.case("addcmul", g.normal(3, 4), g.normal(3, 4), g.normal(4), sums=True, terms=8)
    g.case("addcmul", g.normal(4), g.normal(3, 1), g.normal(2, 1, 1), value=0.5, sums=True, terms=8)
    g.case("addcmul", g.normal(), g.normal(0, 2), g.normal(2), value=-1, sums=True, terms=8)
    g.case("addcmul", g.integers(0, 9, 3), g.integers(0, 9, 3), g.integers(0, 9, 3), value=2)
    g.case("lerp", g.normal(3, 4), g.normal(3, 4), g.uniform(0, 1, 4))
    g.case("lerp", g.normal(3, 4), g.normal(4), weight=0.3)
    g.case("lerp", g.normal(3), g.normal(2, 1), weight=0.9)
    g.case("where", g.booleans(3, 4), g.normal(3, 4), g.normal(3, 4))
    g.case("where", g.booleans(3, 1), g.normal(4), g.normal(2, 1, 1))
    g.case("where", g.booleans(0, 2), g.normal(2), g.normal())
    g.case("where", g.booleans(4), g.integers(0, 9, 4), g.integers(0, 9, 3, 1))
    g.case("where", g.booleans(4), g.normal(4), g.integers(0, 9, 4), grad=[1])
    g.case("masked_fill", g.normal(3, 4), g.booleans(3, 4), value=-2.0)
    g.case("masked_fill", g.normal(2, 3, 4), g.booleans(4), value=0)
    g.case("masked_fill", g.integers(0, 9, 5), g.booleans(5), value=3)
    g.case("masked_select", g.normal(3, 4), g.booleans(3, 4))
    g.case("masked_select", g.normal(3, 4), g.booleans(4))
    g.case("masked_select", g.integers(0, 9, 5), np.zeros(5, bool))
    g.case("nonzero", g.integers(0, 2, 3, 4))
    g.case("nonzero", g.integers(0, 2, 7).astype(np.float64), grad=False)
    g.case("nonzero", g.booleans(2, 2, 3))
    g.case("nonzero", np.zeros((2, 3), bool))


def reduce(g):
    shapes = [((4, 7), {}), ((3, 5, 2), {"dim": 1}), ((3, 5, 2), {"dim": [0, 2], "keepdim": True}), ((2, 41), {"dim": -1}), ((), {})]

    def count(shape, attrs):
        dims = attrs.get("dim", range(len(shape)))
        return max(1, int(np.prod([shape[d] for d in ([dims] if isinstance(dims, int) else dims)])))

    for op in ("sum", "mean"):
        for shape, attrs in shapes:
            g.case(op, g.normal(*shape), terms=count(shape, attrs), grad_terms=1, sums=True, **attrs)
        g.case(op, g.normal(2, 3), terms=3, grad_terms=1, sums=True, dim=1, dtype="float32", dtypes=["bfloat16"])
    g.case("sum", g.normal(0, 3), sums=True)
    g.case("sum", g.normal(0, 3), dim=0, sums=True)
    g.case("sum", g.integers(-9, 9, 2, 5))
    g.case("sum", g.integers(-9, 9, 2, 5, dtype=np.int32), dim=0)
    g.case("sum", g.booleans(3, 5), dim=1, keepdim=True)
    g.case("mean", g.integers(-9, 9, 2, 5), dtype="float32")
    for op in ("var", "std"):
        for shape, attrs in shapes[:4]:
            g.case(op, g.normal(*shape), terms=count(shape, attrs), **attrs)
        g.case(op, g.normal(3, 6), terms=6, dim=1, correction=0)
        g.case(op, g.normal(3, 6), terms=18, unbiased=False)
        g.case(op, g.normal(3, 6) + 100, terms=6, floor=100, grad_floor=100, dim=1, dtypes=["float64"])
    for shape, attrs in [((4, 3), {}), ((3, 5, 2), {"dim": 1}), ((3, 5, 2), {"dim": -1, "keepdim": True}), ((), {}), ((0, 2), {"dim": 0})]:
        g.case("prod", g.away(*shape), terms=count(shape, attrs), **attrs)
    g.case("prod", np.array([[0.0, 2.0, -3.0], [1.0, 0.0, 0.0], [0.5, 2.0, 4.0]]), dim=1)
    g.case("prod", g.integers(1, 5, 2, 4), dim=1)
    g.case("prod", g.integers(1, 5, 4))
    for op in ("amax", "amin"):
        for shape, attrs in shapes:
            g.case(op, g.distinct(*shape), **attrs)
        g.case(op, np.array([[1.0, 3.0, 3.0], [-1.0, -1.0, -2.0]]), dim=1)  # ties share the gradient
        g.case(op, g.integers(-9, 9, 3, 4), dim=0)
        g.case(op, np.array([[1.0, np.nan], [2.0, 3.0]]), dim=1, grad=False)
    for op in ("max", "min"):
        g.case(op, g.distinct(4, 7))
        g.case(op, g.distinct(4, 7), dim=1)
        g.case(op, g.distinct(3, 5, 2), dim=0, keepdim=True)
        g.case(op, g.distinct(3, 5), g.distinct(5) + 0.03)
        g.case(op, g.integers(-99, 99, 4, 6), dim=-1)
        g.case(op, g.integers(-99, 99, 9))
    for op in ("argmax", "argmin"):
        g.case(op, g.distinct(4, 7), grad=False)
        g.case(op, g.distinct(4, 7), grad=False, dim=1)
        g.case(op, g.distinct(3, 5, 2), grad=False, dim=-2, keepdim=True)
        g.case(op, g.integers(-99, 99, 5, 7), dim=0)
        g.case(op, np.array([1.0, np.nan, 3.0]), grad=False)
    for op in ("any", "all"):
        g.case(op, g.booleans(3, 4))
        g.case(op, g.booleans(3, 4), dim=1)
        g.case(op, g.integers(0, 2, 3, 2, 2), dim=0, keepdim=True)
        g.case(op, g.integers(0, 2, 3, 4).astype(np.float64), grad=False, dim=0)
        g.case(op, g.booleans(0))
        g.case(op, g.booleans(2, 3, 2), dim=[0, 2])
    for attrs, shape, length in [({}, (3, 5), 15), ({"dim": 1}, (3, 5), 5), ({"dim": [0, 2], "keepdim": True}, (2, 3, 4), 8),
                                 ({"p": 1, "dim": 1}, (3, 5), 5), ({"p": 3, "dim": 0}, (3, 5), 3),
                                 ({"p": "inf", "dim": 1}, (3, 5), 1), ({"p": 0, "dim": 1}, (3, 4), 4), ({"p": 1.5}, (7,), 7)]:
        g.case("norm", g.distinct(*shape) + 0.03, terms=length, fn=lambda x, p="fro", **a: torch.norm(x, float("inf") if p == "inf" else p, **a), **attrs)
    g.case("logsumexp", g.normal(4, 7), dim=1, terms=7)
    g.case("logsumexp", g.normal(3, 5, 2), dim=[0, 2], keepdim=True, terms=6)
    g.case("logsumexp", g.normal(3, 5) * 60, dim=0, terms=3)
    g.case("logsumexp", np.array([[-np.inf, -np.inf], [0.0, -np.inf]]), dim=1, grad=False)
    for op in ("cumsum", "cumprod"):
        g.case(op, g.away(4, 6), dim=1, terms=6, sums=op == "cumsum")
        g.case(op, g.away(3, 5, 2), dim=0, terms=3, sums=op == "cumsum")
        g.case(op, g.away(2, 4, 3), dim=-2, terms=4, sums=op == "cumsum")
        g.case(op, g.integers(1, 4, 2, 5), dim=1)
        g.case(op, g.away(0, 3), dim=0)
    g.case("cumprod", np.array([[2.0, 0.0, 3.0, -1.5], [0.0, 0.0, 2.0, 1.0]]), dim=1)
    g.case("cumsum", g.booleans(7), dim=0)


def matmul(g):
    bilinear = [((3, 4), (4, 5)), ((1, 17), (17, 9)), ((7,), (7,)), ((3, 4), (4,)), ((4,), (4, 3)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)),
                ((2, 1, 3, 4), (5, 4, 2)), ((3, 4), (2, 4, 5)), ((4,), (2, 4, 3)), ((2, 3, 4), (4,)), ((0, 4), (4, 3)), ((3, 0), (0, 2)),
                ((19, 33), (33, 17))]
    for a, b in bilinear:
        n = max(1, a[-1])
        g.case("matmul", g.normal(*a), g.normal(*b), terms=n, grad_terms=max(n, 20), sums=True)
    g.case("matmul", g.integers(-5, 5, 3, 4), g.integers(-5, 5, 4, 2))
    g.case("bmm", g.normal(2, 3, 4), g.normal(2, 4, 5), terms=4, sums=True)
    g.case("bmm", g.normal(3, 1, 9), g.normal(3, 9, 2), terms=9, sums=True)
    g.case("bmm", g.normal(0, 3, 4), g.normal(0, 4, 5), terms=4, sums=True)
    g.case("linear", g.normal(3, 4), g.normal(5, 4), g.normal(5), terms=4, sums=True)
    g.case("linear", g.normal(2, 3, 6), g.normal(5, 6), None, terms=6, sums=True)
    g.case("linear", g.normal(7), g.normal(2, 7), g.normal(2), terms=7, sums=True)
    g.case("linear", g.normal(0, 4), g.normal(3, 4), g.normal(3), terms=4, sums=True)
    g.case("addmm", g.normal(3, 5), g.normal(3, 4), g.normal(4, 5), terms=5, sums=True)
    g.case("addmm", g.normal(5), g.normal(3, 4), g.normal(4, 5), terms=5, sums=True, beta=0.5, alpha=2.0)
    g.case("addmm", g.normal(3, 1), g.normal(3, 4), g.normal(4, 5), terms=5, sums=True, beta=0)
    g.case("dot", g.normal(7), g.normal(7), terms=7, sums=True)
    g.case("dot", g.normal(64), g.normal(64), terms=64, sums=True)
    g.case("dot", g.normal(0), g.normal(0), sums=True)
    g.case("outer", g.normal(4), g.normal(5), terms=5, sums=True)
    g.case("outer", g.normal(1), g.normal(9), terms=9, sums=True)
    for equation, shapes in [("ij,jk->ik", [(3, 4), (4, 5)]), ("bij,bjk->bik", [(2, 3, 4), (2, 4, 5)]), ("ij->ji", [(3, 4)]), ("ii->i", [(4, 4)]),
                             ("ii", [(4, 4)]), ("ij,ij->", [(3, 4), (3, 4)]), ("i,j->ij", [(3,), (4,)]), ("bhqd,bhkd->bhqk", [(2, 2, 3, 4), (2, 2, 5, 4)]),
                             ("...ij,jk->...ik", [(2, 3, 3, 4), (4, 5)]), ("ij,jk,kl->il", [(2, 3), (3, 4), (4, 2)]), ("ij,jk", [(3, 4), (4, 2)]),
                             ("abc->b", [(2, 3, 4)]), ("...a->...", [(2, 3, 4)]), ("bn,anm,bm->ba", [(2, 3), (4, 3, 5), (2, 5)])]:
        g.case("einsum", *[g.normal(*s) for s in shapes], terms=20, sums=True, equation=equation, fn=lambda *x, equation: torch.einsum(equation, *x))


def shape(g):
    tensors_of = lambda name: lambda *x, **a: getattr(torch, name)(list(x), **a)
    g.case("cat", g.normal(2, 3), g.normal(1, 3), fn=tensors_of("cat"))
    g.case("cat", g.normal(2, 3), g.normal(2, 1), g.normal(2, 4), dim=-1, fn=tensors_of("cat"))
    g.case("cat", g.normal(2, 0), g.normal(2, 3), dim=1, fn=tensors_of("cat"))
    g.case("cat", g.integers(0, 9, 3), g.integers(0, 9, 2, dtype=np.int32), fn=tensors_of("cat"))
    g.case("cat", g.normal(3), g.integers(0, 9, 2), grad=[0], fn=tensors_of("cat"))
    g.case("stack", g.normal(2, 3), g.normal(2, 3), fn=tensors_of("stack"))
    g.case("stack", g.normal(2, 3), g.normal(2, 3), g.normal(2, 3), dim=-1, fn=tensors_of("stack"))
    g.case("stack", g.normal(), g.normal(), fn=tensors_of("stack"))
    g.case("split", g.normal(5, 3), split_size_or_sections=2, fn=torch.split)
    g.case("split", g.normal(2, 6), split_size_or_sections=[1, 3, 2], dim=1, fn=torch.split)
    g.case("chunk", g.normal(7, 2), chunks=3)
    g.case("chunk", g.normal(2, 4), chunks=4, dim=-1)
    g.case("chunk", g.normal(2, 5), chunks=9, dim=1)
    g.case("unbind", g.normal(3, 4))
    g.case("unbind", g.normal(2, 3, 2), dim=-1)
    g.case("reshape", g.normal(4, 3), shape=[2, -1])
    g.case("reshape", g.normal(2, 3, 2), shape=[12])
    g.case("reshape", g.normal(1), shape=[])
    g.case("reshape", g.normal(0, 4), shape=[2, 0])
    g.case("view", g.normal(4, 3), size=[6, 2], fn=lambda x, size: x.view(size))
    g.case("view", g.normal(8), size=[2, 2, -1], fn=lambda x, size: x.view(size))
    g.case("flatten", g.normal(2, 3, 4))
    g.case("flatten", g.normal(2, 3, 4), start_dim=1)
    g.case("flatten", g.normal(2, 3, 4, 2), start_dim=-3, end_dim=-2)
    g.case("flatten", g.normal())
    g.case("permute", g.normal(2, 3, 4), dims=[2, 0, 1])
    g.case("permute", g.normal(2, 3), dims=[-1, 0])
    g.case("transpose", g.normal(2, 3, 4), dim0=1, dim1=2)
    g.case("transpose", g.normal(2, 3), dim0=0, dim1=-1)
    g.case("t", g.normal(3, 4))
    expand = lambda x, size: x.expand(size)
    g.case("expand", g.normal(3, 1), size=[3, 4], fn=expand)
    g.case("expand", g.normal(1, 3), size=[2, -1, 3], fn=expand)
    g.case("expand", g.normal(), size=[2, 2], fn=expand)
    g.case("expand", g.normal(1), size=[0], fn=expand)
    g.case("squeeze", g.normal(1, 3, 1))
    g.case("squeeze", g.normal(1, 3, 1), dim=0)
    g.case("squeeze", g.normal(1, 3, 1, 2), dim=[0, 2])
    g.case("squeeze", g.normal(2, 3), dim=1)
    g.case("unsqueeze", g.normal(2, 3), dim=1)
    g.case("unsqueeze", g.normal(2, 3), dim=-1)
    g.case("repeat", g.normal(2, 3), repeats=[2, 2], fn=lambda x, repeats: x.repeat(repeats))
    g.case("repeat", g.normal(3), repeats=[2, 1, 2], fn=lambda x, repeats: x.repeat(repeats))
    g.case("repeat", g.normal(2), repeats=[0], fn=lambda x, repeats: x.repeat(repeats))
    g.case("repeat_interleave", g.normal(2, 3), repeats=2)
    g.case("repeat_interleave", g.normal(2, 3), repeats=3, dim=1)
    g.case("repeat_interleave", g.normal(3, 2), np.array([1, 0, 2]), dim=0)
    g.case("flip", g.normal(3, 4), dims=[0])
    g.case("flip", g.normal(2, 3, 2), dims=[0, -1])
    g.case("roll", g.normal(3, 4), shifts=2)
    g.case("roll", g.normal(3, 4), shifts=-1, dims=1)
    g.case("roll", g.normal(3, 4), shifts=[1, 3], dims=[0, 1])
    g.case("narrow", g.normal(5, 3), dim=0, start=1, length=3)
    g.case("narrow", g.normal(2, 6), dim=-1, start=4, length=2)
    g.case("select", g.normal(3, 4), dim=0, index=2)
    g.case("select", g.normal(2, 3, 4), dim=1, index=-1)

    def sliced(x, dim=0, start=None, end=None, step=1):
        key = [slice(None)] * x.dim()
        key[dim] = slice(start, end, step)
        return x[tuple(key)]

    g.case("slice", g.normal(6, 3), dim=0, start=1, end=6, step=2, fn=sliced)
    g.case("slice", g.normal(2, 7), dim=1, start=-5, end=-1, fn=sliced)
    g.case("slice", g.normal(4), start=3, end=100, fn=sliced)
    g.case("slice", g.normal(4), start=3, end=1, fn=sliced)
    g.case("pad", g.normal(2, 3), pad=[1, 2])
    g.case("pad", g.normal(2, 3), pad=[0, 1, 2, 0], value=0.5)
    g.case("pad", g.normal(4, 5), pad=[-1, 1], mode="constant")
    g.case("pad", g.integers(0, 9, 3), pad=[1, 1], value=7)
    for mode in ("reflect", "replicate", "circular"):
        g.case("pad", g.normal(1, 2, 5), pad=[2, 1], mode=mode)
    g.case("pad", g.normal(1, 2, 3, 4), pad=[1, 2, 2, 0], mode="reflect")


def index(g):
    index_select = lambda x, index, dim: torch.index_select(x, dim, index)
    g.case("index_select", g.normal(5, 3), np.array([4, 0, 0, 2]), dim=0, fn=index_select)
    g.case("index_select", g.normal(2, 5, 3), np.array([1, 3, 1]), dim=-2, fn=index_select)
    g.case("index_select", g.normal(2, 5), np.array([], np.int64), dim=1, fn=index_select)
    g.case("index_select", g.integers(0, 99, 6), np.array([5, 2], np.int32), dim=0, fn=index_select)
    gather = lambda x, index, dim: torch.gather(x, dim, index)
    g.case("gather", g.normal(4, 5), g.integers(0, 4, 3, 5), dim=0, fn=gather)
    g.case("gather", g.normal(2, 3, 6), g.integers(0, 6, 2, 2, 4), dim=-1, fn=gather)
    g.case("gather", g.normal(4, 5), g.integers(0, 5, 4, 0), dim=1, fn=gather)
    scatter = lambda x, index, src, dim, **a: torch.scatter(x, dim, index, src, **a)
    unique = np.stack([g.rng.permutation(5)[:3] for _ in range(4)])
    g.case("scatter", g.normal(4, 5), unique, g.normal(4, 3), dim=1, fn=scatter)
    g.case("scatter", g.normal(5, 4), unique.T.copy(), g.normal(3, 4), dim=0, fn=scatter)
    g.case("scatter", g.normal(4, 5), unique, dim=1, value=1.5, fn=lambda x, index, dim, value: torch.scatter(x, dim, index, value))
    g.case("scatter_add", g.normal(4, 5), g.integers(0, 5, 4, 7), g.normal(4, 7), dim=1, terms=7, sums=True,
           fn=lambda x, index, src, dim: torch.scatter_add(x, dim, index, src))
    g.case("scatter_add", g.normal(3, 2, 2), g.integers(0, 3, 6, 2, 1), g.normal(6, 2, 1), dim=0, terms=6, sums=True,
           fn=lambda x, index, src, dim: torch.scatter_add(x, dim, index, src))
    g.case("scatter_add", g.integers(0, 9, 5), g.integers(0, 5, 8), g.integers(0, 9, 8), dim=0, fn=lambda x, index, src, dim: torch.scatter_add(x, dim, index, src))

    def index_put(x, *rest, accumulate=False):
        *indices, values = rest
        key = tuple(slice(None) if i is None else i for i in indices)
        if not accumulate:
            y = x.clone()
            y[key] = values.to(y.dtype)
            return y
        full = [torch.arange(n) for n in x.shape]  # None: every position of that dimension
        if any(i is None for i in indices):
            y = x.clone()
            flat = torch.arange(x.numel()).reshape(x.shape)[key]
            return y.reshape(-1).index_add(0, flat.reshape(-1), values.expand(flat.shape).reshape(-1)).reshape(x.shape)
        return torch.index_put(x, list(indices), values, accumulate=accumulate)

    g.case("index_put", g.normal(4, 5), np.array([0, 3, 2]), np.array([1, 4, 0]), g.normal(3), fn=index_put)
    g.case("index_put", g.normal(4, 5), np.array([0, 3, 0]), np.array([1, 4, 1]), g.normal(3), accumulate=True, terms=2, fn=index_put)
    g.case("index_put", g.normal(5, 3), np.array([4, 1]), g.normal(2, 3), fn=index_put)
    g.case("index_put", g.normal(5, 3), np.array([4, 1, 4]), g.normal(3), accumulate=True, terms=2, fn=index_put)
    g.case("index_put", g.normal(3, 5), None, np.array([4, 1]), g.normal(3, 2), fn=index_put)
    for op in ("tril", "triu"):
        g.case(op, g.normal(4, 4))
        g.case(op, g.normal(2, 3, 5), diagonal=1)
        g.case(op, g.normal(5, 3), diagonal=-2)
        g.case(op, g.integers(0, 9, 3, 3))
        g.case(op, g.booleans(3, 3), diagonal=-1)
    g.case("sort", g.distinct(7))
    g.case("sort", g.distinct(3, 5), descending=True)
    g.case("sort", g.distinct(4, 3), dim=0)
    g.case("sort", g.integers(0, 3, 9), stable=True, fn=lambda x, stable: torch.sort(x, stable=stable))
    g.case("sort", g.integers(0, 3, 2, 6), stable=True, descending=True, fn=lambda x, **a: torch.sort(x, **a))
    g.case("sort", np.array([2.0, np.nan, -np.inf, 1.0]), grad=False)
    g.case("argsort", g.distinct(3, 5), grad=False, dim=0, descending=True)
    g.case("argsort", g.distinct(6), grad=False)
    g.case("topk", g.distinct(9), k=4)
    g.case("topk", g.distinct(3, 7), k=2, largest=False)
    g.case("topk", g.distinct(6, 2), k=3, dim=0)
    g.case("topk", g.integers(-99, 99, 2, 11), k=5, dim=1)
    g.case("bincount", g.integers(0, 6, 12))
    g.case("bincount", g.integers(0, 3, 5), minlength=8)
    g.case("bincount", g.integers(0, 4, 7), g.normal(7), grad=False)
    g.case("bincount", np.array([], np.int64), minlength=2)
    g.case("one_hot", g.integers(0, 5, 4), num_classes=6)
    g.case("one_hot", g.integers(0, 5, 2, 3))
    embedding = lambda ids, weight, **a: F.embedding(ids, weight, **a)
    g.case("embedding", g.integers(0, 7, 5), g.normal(7, 3), fn=embedding)
    g.case("embedding", g.integers(0, 7, 2, 6), g.normal(7, 4), fn=embedding)
    g.case("embedding", np.array([[2, 0], [2, 2]]), g.normal(5, 3), padding_idx=2, fn=embedding)
    g.case("embedding", np.array(3), g.normal(5, 3), fn=embedding)
    g.case("embedding", g.integers(0, 7, 0), g.normal(7, 3), fn=embedding)


def normalise(g):
    for op in ("softmax", "log_softmax"):
        g.case(op, g.normal(3, 7), dim=-1, terms=7)
        g.case(op, g.normal(3, 5, 2), dim=1, terms=5)
        g.case(op, g.normal(4, 3) * 30, dim=0, terms=4, grad_floor=1)
        g.case(op, g.normal(2, 37), dim=1, terms=37)
        g.case(op, g.normal(0, 3), dim=1)
        g.case(op, g.normal(3, 4), dim=1, dtype="float32", dtypes=["bfloat16"], terms=4)
    g.case("softmax", np.array([[0.5, -np.inf, 1.0], [-np.inf, -np.inf, 2.0]]), dim=1, terms=3)
    g.case("normalize", g.normal(3, 5), terms=5)
    g.case("normalize", g.normal(2, 3, 4), dim=2, p=1.0, terms=4)
    g.case("normalize", g.normal(3, 5), dim=0, eps=1e-6, terms=3)
    g.case("cosine_similarity", g.normal(3, 5), g.normal(3, 5), terms=5)
    g.case("cosine_similarity", g.normal(2, 3, 4), g.normal(3, 4), dim=-1, terms=4)
    layer_norm = lambda x, w, b, normalized_shape, **a: F.layer_norm(x, normalized_shape, w, b, **a)
    g.case("layer_norm", g.normal(3, 7), g.normal(7), g.normal(7), normalized_shape=[7], terms=7, fn=layer_norm)
    g.case("layer_norm", g.normal(2, 3, 4), g.normal(3, 4), g.normal(3, 4), normalized_shape=[3, 4], eps=1e-3, terms=12, fn=layer_norm)
    g.case("layer_norm", g.normal(2, 2, 9), g.normal(9), None, normalized_shape=[9], terms=9, fn=layer_norm)
    g.case("layer_norm", g.normal(2, 33), None, None, normalized_shape=[33], terms=33, fn=layer_norm)
    g.case("layer_norm", g.normal(4, 6) * 0.1 + 20, g.normal(6), g.normal(6), normalized_shape=[6], terms=6, floor=200, grad_floor=2000, fn=layer_norm, dtypes=["float64"])
    g.case("layer_norm", g.normal(0, 4), g.normal(4), g.normal(4), normalized_shape=[4], fn=layer_norm)
    rms_norm = lambda x, w, normalized_shape, **a: F.rms_norm(x, normalized_shape, w, **a)
    g.case("rms_norm", g.normal(3, 7), g.normal(7), normalized_shape=[7], eps=1e-6, terms=7, fn=rms_norm)
    g.case("rms_norm", g.normal(2, 2, 9), None, normalized_shape=[9], eps=1e-5, terms=9, fn=rms_norm)
    g.case("rms_norm", g.normal(2, 3, 4), g.normal(3, 4), normalized_shape=[3, 4], eps=1e-2, terms=12, fn=rms_norm)
    group_norm = lambda x, w, b, num_groups, **a: F.group_norm(x, num_groups, w, b, **a)
    g.case("group_norm", g.normal(2, 4, 5), g.normal(4), g.normal(4), num_groups=2, terms=10, fn=group_norm)
    g.case("group_norm", g.normal(2, 6, 2, 3), g.normal(6), g.normal(6), num_groups=3, eps=1e-3, terms=12, fn=group_norm)
    g.case("group_norm", g.normal(3, 4), None, None, num_groups=1, terms=4, fn=group_norm)

    def batch_norm(x, mean, var, w=None, b=None, **a):
        mean, var = (None if s is None else s.detach().clone() for s in (mean, var))  # F.batch_norm updates them in place
        return F.batch_norm(x, mean, var, w, b, **a)

    statistics = lambda n: (g.normal(n), g.uniform(0.5, 2, n))
    g.case("batch_norm", g.normal(5, 3), *statistics(3), g.normal(3), g.normal(3), training=True, terms=5, grad=[0, 3, 4], fn=batch_norm)
    g.case("batch_norm", g.normal(2, 3, 4), *statistics(3), g.normal(3), g.normal(3), terms=8, grad=[0, 3, 4], fn=batch_norm)
    g.case("batch_norm", g.normal(2, 3, 2, 2), None, None, g.normal(3), g.normal(3), training=True, eps=1e-3, terms=8, fn=batch_norm)
    g.case("batch_norm", g.normal(2, 3, 4), *statistics(3), None, None, training=True, momentum=0.3, terms=8, grad=[0], fn=batch_norm)
    g.case("dropout", g.normal(3, 4), p=0.4, training=False)
    g.case("dropout", g.normal(3, 4), p=0.0, training=True)


def loss(g):
    ids = g.integers(0, 5, 6)
    ignored = np.array([1, -100, 4, 0, -100, 2])
    g.case("cross_entropy", g.normal(6, 5), ids, terms=30)
    g.case("cross_entropy", g.normal(6, 5), ignored, terms=30)
    g.case("cross_entropy", g.normal(6, 5), ids, reduction="sum", label_smoothing=0.1, terms=30)
    g.case("cross_entropy", g.normal(6, 5), ids, g.uniform(0.2, 2, 5), terms=30, grad=[0])
    g.case("cross_entropy", g.normal(6, 5), ignored, g.uniform(0.2, 2, 5), label_smoothing=0.2, terms=30, grad=[0])
    g.case("cross_entropy", g.normal(6, 5), ids, reduction="none", terms=5)
    g.case("cross_entropy", g.normal(6, 5), np.array([1, 3, 3, 0, 2, 4]), ignore_index=3, terms=30)
    g.case("cross_entropy", g.normal(2, 5, 3), g.integers(0, 5, 2, 3), terms=30)
    g.case("cross_entropy", g.normal(5), np.array(3), terms=5)
    soft = g.uniform(0.1, 1, 4, 5)
    g.case("cross_entropy", g.normal(4, 5), soft / soft.sum(1, keepdims=True), terms=20)
    log_probabilities = lambda *s: np.log(g.uniform(0.05, 1, *s))
    g.case("nll_loss", log_probabilities(6, 5), ids, terms=6)
    g.case("nll_loss", log_probabilities(6, 5), ignored, g.uniform(0.2, 2, 5), terms=6, grad=[0])
    g.case("nll_loss", log_probabilities(6, 5), ids, reduction="none", terms=6)
    g.case("nll_loss", log_probabilities(2, 5, 3), g.integers(0, 5, 2, 3), reduction="sum", terms=6)
    far = lambda *s: g.away(*s, gap=0.2, high=3.0)
    for op, options in [("mse_loss", [{}]), ("l1_loss", [{}]), ("smooth_l1_loss", [{}, {"beta": 0.5}, {"beta": 0.0}]), ("huber_loss", [{}, {"delta": 0.7}])]:
        for attrs in options:
            base = g.normal(3, 4)
            g.case(op, base, base + far(3, 4) * 0.9, terms=12, **attrs)
        for reduction in ("sum", "none"):
            base = g.normal(2, 5)
            g.case(op, base, base + far(2, 5) * 0.9, terms=10, reduction=reduction)
    probability = lambda *s: g.uniform(0.05, 0.95, *s)
    bce = lambda x, t, w=None, p=None, **a: F.binary_cross_entropy_with_logits(x, t, weight=w, pos_weight=p, **a)
    op = "binary_cross_entropy_with_logits"
    g.case(op, g.normal(3, 4), probability(3, 4), terms=12, fn=bce)
    g.case(op, g.normal(3, 4) * 20, g.integers(0, 2, 3, 4).astype(np.float64), terms=12, grad=[0], fn=bce)
    g.case(op, g.normal(3, 4), probability(3, 4), g.uniform(0.5, 2, 4), g.uniform(0.5, 2, 4), reduction="sum", terms=12, grad=[0], fn=bce)
    g.case(op, g.normal(3, 4), probability(3, 4), reduction="none", fn=bce)
    g.case("binary_cross_entropy", probability(3, 4), g.integers(0, 2, 3, 4).astype(np.float64), terms=12, grad=[0], fn=lambda x, t, **a: F.binary_cross_entropy(x, t, **a))
    g.case("kl_div", log_probabilities(3, 4), probability(3, 4), terms=12, reduction="batchmean")
    g.case("kl_div", log_probabilities(3, 4), probability(3, 4), terms=12)
    g.case("kl_div", log_probabilities(3, 4), log_probabilities(3, 4), terms=12, reduction="sum", log_target=True)
    g.case("kl_div", log_probabilities(3, 4), probability(3, 4), reduction="none")


def convolution(g):
    def conv(op, x, w, bias, **attrs):
        n = int(np.prod(w[1:]))
        b = g.normal(w[0]) if bias else None
        g.case(op, g.normal(*x), g.normal(*w), b, terms=n, grad_terms=max(n, 64), sums=True, **attrs)

    conv("conv1d", (2, 3, 8), (4, 3, 3), True)
    conv("conv1d", (1, 2, 9), (3, 2, 2), False, stride=2, padding=1)
    conv("conv1d", (2, 4, 7), (4, 2, 3), True, padding=2, dilation=2, groups=2)
    conv("conv1d", (2, 2, 6), (3, 2, 3), True, padding="same")
    conv("conv1d", (3, 7), (2, 3, 1), True)
    conv("conv2d", (2, 3, 5, 6), (4, 3, 3, 3), True)
    conv("conv2d", (1, 2, 7, 5), (3, 2, 3, 2), False, stride=[2, 1], padding=[1, 0])
    conv("conv2d", (2, 4, 5, 5), (4, 1, 3, 3), True, padding=1, groups=4)
    conv("conv2d", (1, 2, 7, 7), (2, 2, 3, 3), True, dilation=2, padding=2)
    conv("conv2d", (1, 2, 4, 4), (2, 2, 3, 3), True, padding="same")
    conv("conv2d", (2, 4, 4), (3, 2, 1, 1), True, stride=2)
    g.case("max_pool2d", g.distinct(2, 2, 6, 6), kernel_size=2)
    g.case("max_pool2d", g.distinct(1, 2, 7, 7), kernel_size=3, stride=2, padding=1)
    g.case("max_pool2d", g.distinct(1, 1, 7, 8), kernel_size=[2, 3], stride=[1, 2], ceil_mode=True)
    g.case("max_pool2d", g.distinct(2, 7, 7), kernel_size=3, stride=1, dilation=2)
    g.case("avg_pool2d", g.normal(2, 2, 6, 6), kernel_size=2, terms=4, sums=True)
    g.case("avg_pool2d", g.normal(1, 2, 7, 7), kernel_size=3, stride=2, padding=1, terms=9, sums=True)
    g.case("avg_pool2d", g.normal(1, 2, 7, 7), kernel_size=3, stride=2, padding=1, count_include_pad=False, terms=9, sums=True)
    g.case("avg_pool2d", g.normal(1, 1, 6, 7), kernel_size=[2, 3], ceil_mode=True, terms=6, sums=True)
    g.case("avg_pool2d", g.normal(1, 1, 4, 4), kernel_size=2, divisor_override=3, terms=4, sums=True)
    g.case("adaptive_avg_pool2d", g.normal(2, 2, 6, 6), output_size=[3, 2], terms=6, sums=True)
    g.case("adaptive_avg_pool2d", g.normal(1, 3, 7, 5), output_size=1, terms=35, sums=True)
    g.case("adaptive_avg_pool2d", g.normal(1, 2, 7, 5), output_size=[3, 4], terms=9, sums=True)
    g.case("interpolate", g.normal(1, 2, 3, 4), scale_factor=2, mode="nearest", terms=4)
    g.case("interpolate", g.normal(1, 2, 3, 4), size=[5, 3], terms=4)
    g.case("interpolate", g.normal(2, 2, 5), size=8, terms=4)
    g.case("interpolate", g.normal(2, 1, 4, 4), scale_factor=[0.5, 1.5], terms=4)


def attention(g):
    def sdpa(shape_q, shape_kv, mask=None, **attrs):
        q, k, v = g.normal(*shape_q), g.normal(*shape_kv), g.normal(*shape_kv[:-1], shape_q[-1] if "wide" not in attrs else attrs.pop("wide"))
        inputs = [q, k, v] + ([] if mask is None else [mask])
        g.case("scaled_dot_product_attention", *inputs, terms=shape_kv[-2], grad=[0, 1, 2] if mask is None or mask.dtype == bool else True,
               fn=F.scaled_dot_product_attention, **attrs)

    sdpa((1, 2, 5, 4), (1, 2, 5, 4))
    sdpa((2, 2, 5, 4), (2, 2, 5, 4), is_causal=True)
    sdpa((1, 2, 3, 4), (1, 2, 7, 4))
    keep = g.booleans(5, 7)
    keep[:, 0] = True
    sdpa((2, 1, 5, 4), (2, 1, 7, 4), keep)
    keep = g.booleans(2, 1, 1, 6)
    keep[..., 2] = True
    sdpa((2, 3, 4, 4), (2, 3, 6, 4), keep)
    sdpa((1, 2, 5, 4), (1, 2, 6, 4), g.normal(5, 6))
    sdpa((1, 2, 5, 4), (1, 2, 6, 4), g.normal(1, 2, 5, 6), scale=0.3)
    sdpa((1, 4, 5, 4), (1, 2, 5, 4), is_causal=True, enable_gqa=True)
    sdpa((1, 4, 3, 4), (1, 1, 6, 4), enable_gqa=True)
    sdpa((5, 4), (6, 4))
    sdpa((2, 5, 4), (2, 6, 4), scale=1.0)
    sdpa((1, 1, 19, 6), (1, 1, 19, 6), is_causal=True)
    sdpa((1, 2, 3, 4), (1, 2, 7, 4), is_causal=True)
    sdpa((1, 2, 5, 4), (1, 2, 5, 4), wide=6)


def inplace(g):
    def on_copy(op):
        return lambda x, *rest, **attrs: getattr(x.clone(), op)(*rest, **attrs)

    for op in ("add_", "sub_", "mul_", "div_"):
        g.case(op, g.away(3, 4), g.away(4), terms=3, fn=on_copy(op))
        g.case(op, g.away(5), other=1.5, fn=on_copy(op))
    for op in ("neg_", "exp_", "tanh_", "sigmoid_", "relu_"):
        g.case(op, g.away(3, 4), floor=1, grad_floor=1, fn=on_copy(op))
    g.case("sqrt_", g.uniform(0.2, 3, 5), fn=on_copy("sqrt_"))
    g.case("pow_", g.uniform(0.2, 3, 5), exponent=2.5, terms=4, fn=on_copy("pow_"))
    g.case("clamp_", g.distinct(3, 4) + 0.01, min=-0.25, max=0.25, fn=on_copy("clamp_"))
    g.case("lerp_", g.normal(3, 4), g.normal(4), weight=0.25, terms=3, fn=on_copy("lerp_"))
    g.case("addcmul_", g.normal(3, 4), g.normal(3, 4), g.normal(4), value=0.5, terms=3, sums=True, fn=on_copy("addcmul_"))
    g.case("addcdiv_", g.normal(3, 4), g.normal(3, 4), g.away(4), value=0.5, terms=3, floor=1, grad_floor=20, fn=on_copy("addcdiv_"))
    g.case("masked_fill_", g.normal(3, 4), g.booleans(4), value=-2.0, fn=on_copy("masked_fill_"))
    g.case("fill_", g.normal(3), value=0.5, fn=on_copy("fill_"))
    g.case("copy_", g.normal(3, 4), g.normal(4), terms=3, sums=True, fn=on_copy("copy_"))


def fused(g):
    """Ops without a name in torch: their composed form is the reference."""

    def rotary(x, cos, sin, interleaved=False):
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        parts = [a * cos - b * sin, b * cos + a * sin]
        return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)

    for interleaved in (False, True):
        angle = g.uniform(-3, 3, 5, 3)
        g.case("rotary_embedding", g.normal(2, 2, 5, 6), np.cos(angle), np.sin(angle), interleaved=interleaved, grad=[0], terms=2, fn=rotary)

    def residual_layer_norm(x, residual, w, b, normalized_shape, **a):
        total = x + residual
        return total, F.layer_norm(total, normalized_shape, w, b, **a)

    g.case("residual_layer_norm", g.normal(3, 7), g.normal(3, 7), g.normal(7), g.normal(7), normalized_shape=[7], terms=14, fn=residual_layer_norm)
    g.case("residual_layer_norm", g.normal(2, 2, 9), g.normal(2, 2, 9), g.normal(9), None, normalized_shape=[9], eps=1e-3, terms=18, fn=residual_layer_norm)
    for approximate in ("tanh", "none"):
        g.case("linear_gelu", g.normal(3, 4), g.normal(5, 4), g.normal(5), approximate=approximate, terms=10, sums=True,
               fn=lambda x, w, b, approximate: F.gelu(F.linear(x, w, b), approximate=approximate))

    def linear_cross_entropy(x, w, target, **a):  # logits and loss are float32 for 16-bit operands
        logits = F.linear(x, w)
        return F.cross_entropy(logits if logits.dtype == torch.float64 else logits.float(), target, **a)

    g.case("linear_cross_entropy", g.normal(6, 4), g.normal(5, 4), g.integers(0, 5, 6), terms=30, fn=linear_cross_entropy)
    g.case("linear_cross_entropy", g.normal(6, 4), g.normal(5, 4), np.array([0, 3, 1, 3, 4, 2]), ignore_index=3, reduction="sum", terms=30, fn=linear_cross_entropy)
    g.case("cross_entropy_inplace", g.normal(6, 5), np.array([0, -100, 1, 3, 4, 2]), terms=30, fn=F.cross_entropy)

    def packed_attention(packed, **a):  # [B, T, 3, H, E]
        q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
        return F.scaled_dot_product_attention(q, k, v, **a).transpose(1, 2).flatten(2)

    g.case("packed_attention", g.normal(2, 5, 3, 2, 4), is_causal=True, terms=5, fn=packed_attention)
    g.case("packed_attention", g.normal(1, 7, 3, 1, 3), terms=7, fn=packed_attention)

    def linear_gelu_linear(x, w, b, out_w, out_b, approximate):
        return F.linear(F.gelu(F.linear(x, w, b), approximate=approximate), out_w, out_b)

    g.case("linear_gelu_linear", g.normal(3, 4), g.normal(5, 4), g.normal(5), g.normal(2, 5), g.normal(2), approximate="tanh", terms=20, sums=True, fn=linear_gelu_linear)
    g.case("linear_gelu_linear", g.normal(2, 3, 4), g.normal(5, 4), None, g.normal(4, 5), None, approximate="none", terms=20, sums=True, fn=linear_gelu_linear)


def linalg(g):
    """float32 and float64; the largest component of each singular and eigenvector is positive."""

    def matrix(*shape, shift=0):
        """Well conditioned, singular values and eigenvalues apart."""
        ramp = np.zeros(shape)
        for row in range(shape[-2]):
            if row < shape[-1] or shift:
                ramp[..., row, (row + shift) % shape[-1]] = 1.5 + row
        return 0.3 * g.normal(*shape) + ramp

    def symmetric(*shape):
        x = matrix(*shape)
        return (x + np.swapaxes(x, -1, -2)) / 2

    def both(op, *inputs, **options):
        g.case(op, *inputs, dtypes=["float32", "float64"], **options)

    def signs(vectors):
        columns = vectors.shape[-1]
        if vectors.numel() == 0:
            return vectors.new_ones(vectors.shape[:-2] + (1, columns))
        return torch.sign(vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))).detach()

    def svd(x, **attrs):
        u, s, vh = torch.linalg.svd(x, **attrs)
        k = s.shape[-1]
        sign = signs(u[..., :k])
        tail = lambda y, n: torch.cat([sign, y.new_ones(sign.shape[:-1] + (n - k,))], -1)
        return u * tail(u, u.shape[-1]), s, vh * tail(vh, vh.shape[-2]).mT

    def eigh(x, **attrs):
        values, vectors = torch.linalg.eigh(x, **attrs)
        return values, vectors * signs(vectors)

    both("linalg_solve", matrix(3, 3, shift=1), g.normal(3, 2), terms=9)
    both("linalg_solve", matrix(4, 4), g.normal(4), terms=16)
    both("linalg_solve", matrix(2, 3, 3, shift=2), g.normal(2, 3), terms=9)
    both("linalg_solve", matrix(2, 1, 3, 3), g.normal(3, 3, 2), terms=27)
    both("linalg_solve", matrix(3, 3, shift=1), g.normal(2, 2, 3), left=False, terms=18)
    both("linalg_solve", matrix(2, 0, 3, 3), g.normal(0, 3, 2))
    both("linalg_solve", np.zeros((0, 0)), np.zeros((0, 2)))
    both("linalg_solve", matrix(9, 9, shift=4), g.normal(9, 3), terms=81)
    for attrs in ({"upper": True}, {"upper": False}, {"upper": True, "unitriangular": True}):
        both("linalg_solve_triangular", matrix(3, 3), g.normal(3, 2), terms=9, **attrs)
        both("linalg_solve_triangular", matrix(2, 1, 4, 4), g.normal(3, 4, 1), terms=48, **attrs)
        both("linalg_solve_triangular", matrix(3, 3), g.normal(2, 2, 3), left=False, terms=18, **attrs)
    for shape in ((3, 3), (2, 4, 4), (1, 1), (2, 0, 0), (0, 3, 3)):
        shift = min(1, shape[-1] - 1)
        for op in ("linalg_inv", "linalg_det", "linalg_slogdet"):
            both(op, matrix(*shape, shift=max(shift, 0)), terms=max(1, shape[-1] ** 2))
    both("linalg_det", np.array([[1.0, 2.0], [2.0, 4.0]]), grad=False)
    both("linalg_slogdet", np.array([[1.0, 2.0], [2.0, 4.0]]), grad=False)
    for shape in ((3, 3), (2, 4, 4), (1, 1), (2, 0, 0)):
        both("linalg_cholesky", symmetric(*shape), terms=max(1, shape[-1] ** 2))
        both("linalg_eigh", symmetric(*shape), terms=max(1, shape[-1] ** 2), fn=eigh)
    both("linalg_cholesky", symmetric(3, 3), upper=True, terms=9)
    both("linalg_eigh", symmetric(3, 3), UPLO="U", terms=9, fn=eigh)
    for shape in ((3, 3), (5, 3), (2, 2, 4), (2, 3, 3), (3, 0), (0, 3)):
        n = max(1, shape[-1] * shape[-2])
        grad = min(shape[-2:]) > 0
        both("linalg_qr", matrix(*shape), terms=n, grad=grad)
        both("linalg_svd", matrix(*shape), full_matrices=False, terms=n, grad=grad, fn=svd)
        both("linalg_pinv", matrix(*shape), terms=n, grad=grad)
    both("linalg_qr", matrix(2, 4), mode="complete", terms=8)
    both("linalg_qr", matrix(4, 2), mode="r", terms=8, grad=False)
    both("linalg_svd", matrix(4, 4), terms=16, fn=svd)
    both("linalg_pinv", np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 6.0]]), terms=6)
    both("linalg_pinv", np.diag([4.0, 1.0, 0.01]), rtol=0.01, terms=9, grad=False)
    both("linalg_pinv", np.diag([4.0, 1.0, 0.01]), atol=0.1, terms=9, grad=False)
    both("linalg_pinv", symmetric(3, 3), hermitian=True, terms=9)
    for driver in ("gelsy", "gelsd", "gelss", "gels"):
        both("linalg_lstsq", matrix(4, 2), g.normal(4, 3), driver=driver, terms=16)
        both("linalg_lstsq", matrix(2, 2, 4), g.normal(2, 2), driver=driver, terms=16)
        both("linalg_lstsq", matrix(2, 1, 3, 3), g.normal(1, 2, 3, 2), driver=driver, terms=36)
    both("linalg_lstsq", np.array([[1.0, 2.0], [2.0, 4.0], [0.0, 0.0]]), g.normal(3, 2), grad=False, terms=6)
    both("linalg_lstsq", np.diag([4.0, 1.0, 0.01]), g.normal(3, 1), rcond=0.01, grad=False, terms=9)


def special(g):
    def cover(op, make, **attrs):
        for shape in ((3, 5), (2, 1, 7), (), (2, 0, 3), (37,)):
            g.case(op, make(*shape), **attrs)

    positive = lambda *shape: g.uniform(0.1, 4.0, *shape)
    cover("log2", positive)
    cover("log10", positive)
    cover("tan", lambda *shape: g.uniform(-1.3, 1.3, *shape))
    cover("erfinv", lambda *shape: g.uniform(-0.95, 0.95, *shape))
    cover("lgamma", positive)
    # torch's trigamma has ten digits.
    cover("digamma", positive, dtypes=["float32", "bfloat16"])
    g.case("digamma", g.uniform(-0.9, -0.1, 7), dtypes=["float32"])
    cover("trunc", lambda *shape: g.away(*shape, gap=0.05, high=3.9))
    for n in (1, 2, 3):
        g.case("polygamma", positive(3, 4), n=n, dtypes=["float32"], fn=lambda x, n: torch.polygamma(n, x))
    special = np.array([np.inf, np.nan, 0.0, -0.0, 1.5])
    for op in ("log2", "log10", "tan", "lgamma", "trunc", "erfinv"):
        g.case(op, special, grad=False, dtypes=["float32", "bfloat16", "float64"])
        g.case(op, g.integers(0, 2, 4), grad=False)
    for a, b in (((3, 5), (3, 5)), ((3, 1, 5), (4, 1)), ((), (3, 2)), ((3, 0), (1,))):
        g.case("atan2", g.away(*a), g.away(*b))
    g.case("atan2", np.array([0.0, -0.0, 0.0, -0.0]), np.array([0.0, 0.0, -0.0, -0.0]), grad=False)
    g.case("fmod", np.array([7.25, -7.25, 0.75]), np.array([2.0, -3.0, 0.5]))
    g.case("fmod", np.array([7.25, -7.25, 0.75]), other=-2.0)
    g.case("fmod", g.integers(-20, 20, 3, 4), np.array([[3], [-4], [7]]))
    for op in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        g.case(op, g.integers(-20, 20, 3, 4), g.integers(-20, 20, 4))
        g.case(op, g.booleans(3), g.booleans(2, 1))
        g.case(op, g.booleans(3), g.integers(-20, 20, 3))
        g.case(op, g.integers(0, 200, 5, dtype=np.uint8), other=-3)
    for x in (g.integers(-20, 20, 5), g.booleans(5), g.integers(0, 200, 5, dtype=np.uint8)):
        g.case("bitwise_not", x)


def order(g):
    g.case("isclose", np.array([1.0, np.nan, np.inf]), np.array([1.000001, np.nan, np.inf]), grad=False)
    g.case("isclose", np.array([1.0, np.nan]), np.array([1.1, np.nan]), grad=False, rtol=0.2, equal_nan=True)
    g.case("isclose", g.integers(0, 4, 5), g.integers(0, 4, 2, 1), rtol=0.5)
    for attrs in ({}, {"dim": 1}, {"dim": 0, "keepdim": True}):
        g.case("median", g.distinct(3, 6), **attrs)
    g.case("median", np.array([[1.0, np.nan, 0.0, np.nan], [3.0, 1.0, 2.0, 0.0]]), grad=False, dim=1)
    g.case("median", np.array([2.0, 2.0, 1.0, 2.0, 3.0]))
    g.case("median", g.distinct(), dim=0)
    for attrs in ({"q": 0.3}, {"q": 0.3, "dim": 1}, {"q": 0.6, "dim": 0, "keepdim": True}, {"q": 0.4, "interpolation": "midpoint"},
                  {"q": 0.4, "interpolation": "nearest"}, {"q": 0.4, "interpolation": "lower"}, {"q": 0.4, "interpolation": "higher"}):
        g.case("quantile", g.distinct(4, 6), dtypes=["float32", "float64"], **attrs)
    quantiles = np.array([0.125, 0.75])
    g.case("quantile", g.distinct(4, 6), quantiles, grad=[0], dim=1, dtypes=["float32", "float64"])
    g.case("quantile", np.array([[1.0, np.nan], [2.0, 3.0]]), quantiles, grad=False, dim=1, keepdim=True, dtypes=["float32"])
    unique = lambda x, **a: torch.unique(x, **a)
    g.case("unique", g.integers(0, 4, 3, 5), return_inverse=True, return_counts=True, fn=unique)
    g.case("unique", np.array([3.0, 1.0, np.nan, np.nan, 1.0]), grad=False, return_inverse=True, return_counts=True, fn=unique)
    g.case("unique", g.integers(0, 2, 6, 2), dim=0, return_inverse=True, return_counts=True, fn=unique)
    g.case("unique", g.integers(0, 2, 2, 5), dim=1, fn=unique)
    for op in ("cummax", "cummin"):
        g.case(op, g.distinct(4, 6), dim=1)
        g.case(op, g.distinct(3, 5, 2), dim=-2)
        g.case(op, np.array([1.0, 3.0, 3.0, np.nan, 2.0, np.nan]), grad=False, dim=0)
        g.case(op, g.integers(0, 4, 3, 7), dim=1)
    ascending = np.array([1.0, 3.0, 5.0])
    g.case("searchsorted", ascending, np.array([[0.0, 1.0, 2.0], [5.0, 6.0, np.nan]]), grad=False)
    g.case("searchsorted", ascending, np.array([1.0, 5.0]), grad=False, right=True)
    g.case("searchsorted", np.array([[1, 2], [3, 4]]), np.array([[2], [3]]), side="right", out_int32=True)
    g.case("bucketize", g.integers(0, 9, 2, 4), np.array([2, 4, 6]), right=True)


def rearrange(g):
    g.case("meshgrid", g.normal(3), g.normal(2), indexing="xy", fn=lambda *x, indexing: torch.meshgrid(*x, indexing=indexing))
    g.case("meshgrid", g.normal(3), g.normal(), g.normal(2), indexing="ij", fn=lambda *x, indexing: torch.meshgrid(*x, indexing=indexing))
    g.case("movedim", g.normal(2, 3, 4), source=[0, 1], destination=[2, 0])
    for attrs in ({}, {"offset": -2}, {"offset": 1, "dim1": 2, "dim2": 0}):
        g.case("diag_embed", g.normal(2, 3), **attrs)
    geometry = {"kernel_size": [3, 2], "stride": [2, 1], "padding": 1, "dilation": [1, 2]}
    g.case("unfold", g.normal(2, 3, 5, 6), kernel_size=2, terms=4, sums=True)
    g.case("unfold", g.normal(2, 5, 6), terms=6, sums=True, **geometry)
    g.case("fold", g.normal(2, 4, 9), output_size=[4, 4], kernel_size=2, terms=4, sums=True)
    g.case("fold", g.normal(1, 6, 12), output_size=[5, 4], terms=6, sums=True, **geometry)
    scatter_reduce = lambda x, index, src, dim, reduce, **a: torch.scatter_reduce(x, dim, index, src, reduce, **a)
    for reduce in ("sum", "prod", "mean", "amax", "amin"):
        for include in (True, False):
            g.case("scatter_reduce", g.distinct(3, 5), g.integers(0, 5, 3, 6), g.distinct(3, 6), dim=1, reduce=reduce, include_self=include, terms=7,
                   sums=reduce in ("sum", "mean"), dtypes=["float32", "float64"], fn=scatter_reduce)
            g.case("scatter_reduce", g.integers(-9, 9, 4), g.integers(0, 4, 7), g.integers(-9, 9, 7), dim=0, reduce=reduce, include_self=include, fn=scatter_reduce)
    g.case("scatter_reduce", np.array([2.0, 3.0, 0.0]), np.array([0, 0, 1, 1, 2]), np.array([0.0, 3.0, 0.0, 0.0, 4.0]), dim=0, reduce="prod", fn=scatter_reduce)
    g.case("scatter_reduce", np.array([2.0, 3.0]), np.array([0, 0, 0]), np.array([2.0, 2.0, 1.0]), dim=0, reduce="amax", fn=scatter_reduce)
    g.case("tensordot", g.normal(2, 3, 4), g.normal(3, 4, 5), terms=12, sums=True)
    g.case("tensordot", g.normal(3, 4, 2), g.normal(2, 5, 3), dims=[[0, 2], [2, 0]], terms=6, sums=True)
    g.case("tensordot", g.normal(3), g.normal(2), dims=0, terms=3, sums=True)
    for p in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, "Infinity"):
        g.case("cdist", g.distinct(3, 4), g.distinct(2, 5, 4) + 0.01, p=p, terms=20, dtypes=["float32", "float64"], fn=lambda x, y, p: torch.cdist(x, y, float(p)))
    g.case("cdist", g.normal(30, 4), g.normal(5, 4) + 5, terms=30, floor=40, grad_floor=100, dtypes=["float32", "float64"])
    for mode in ("bilinear", "nearest"):
        for padding in ("zeros", "border", "reflection"):
            for align in (True, False):
                g.case("grid_sample", g.normal(2, 3, 4, 5), g.uniform(-1.7, 1.7, 2, 2, 3, 2), mode=mode, padding_mode=padding, align_corners=align,
                       terms=8, grad_floor=16, sums=False, dtypes=["float32", "float64"])
    g.case("grid_sample", g.normal(1, 2, 2, 3, 2), g.uniform(-0.9, 0.9, 1, 2, 1, 2, 3), align_corners=False, terms=16, grad_floor=16, dtypes=["float32", "float64"])
    for shape, mode, size in (((2, 2, 5), "linear", [8]), ((1, 2, 3, 4), "bilinear", [5, 3]), ((1, 1, 2, 3, 2), "trilinear", [3, 2, 4])):
        for align in (True, False):
            g.case("interpolate", g.normal(*shape), size=size, mode=mode, align_corners=align, terms=8, sums=True)
    g.case("interpolate", g.normal(1, 2, 3, 4), scale_factor=1.7, mode="bilinear", terms=8, sums=True)


GROUPS = {f.__name__: f for f in (creation, unary, binary, reduce, matmul, shape, index, normalise, loss, convolution, attention, inplace, fused, linalg, special, order, rearrange)}


def write_all():
    total = 0
    for position, (name, function) in enumerate(GROUPS.items()):
        group = Group(f"ops_{name}", seed=1000 + position)
        function(group)
        group.save()
        total += len(group.records)
        print(f"ops_{name}: {len(group.records)} cases of {len(group.counts)} ops")
    return total


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"{write_all()} cases")
