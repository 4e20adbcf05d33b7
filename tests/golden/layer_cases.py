"""Ops that layers are made of, recurrent layers, and losses: ops_layers.{json,safetensors}."""

import numpy as np
import torch
import torch.nn.functional as F

from golden_io import Group


def layers(g):
    for op in ("selu", "mish", "hardswish"):
        g.case(op, g.away(3, 5))
        g.case(op, g.uniform(-8, 8, 21), floor=1, grad_floor=1)
        g.case(op, g.normal())
        g.case(op, g.normal(2, 0, 3))
    special = np.array([np.inf, -np.inf, np.nan, 0.0, 3.0, -3.0])
    g.case("hardswish", special, grad=False, dtypes=["float32", "float64"])
    g.case("hardswish", np.array([3.0, -3.0, 0.0]), dtypes=["float32", "float64"])
    g.case("prelu", g.away(2, 3, 4), g.normal(3), terms=8, grad_floor=2)
    g.case("prelu", g.away(3, 5), g.normal(1), terms=15, grad_floor=2)
    g.case("prelu", np.array([[0.0, -1.0, 2.0]]), g.normal(3), terms=3, grad_floor=1)

    def transposed(op, x, weight, bias, terms, **attrs):
        g.case(op, g.normal(*x), g.normal(*weight), None if bias is None else g.normal(bias), terms=terms, sums=True, **attrs)

    transposed("conv_transpose1d", (2, 3, 5), (3, 4, 3), 4, 30)
    transposed("conv_transpose1d", (1, 4, 5), (4, 2, 3), None, 20, stride=2, padding=1, output_padding=1, groups=2)
    transposed("conv_transpose1d", (3, 6), (3, 2, 2), 2, 18, dilation=3)
    transposed("conv_transpose2d", (2, 3, 4, 3), (3, 2, 3, 2), 2, 48)
    transposed("conv_transpose2d", (1, 4, 3, 5), (4, 3, 3, 3), 6, 60, stride=[2, 3], padding=[1, 0], output_padding=[1, 2], groups=2)
    transposed("conv_transpose2d", (1, 2, 3, 3), (2, 2, 2, 2), None, 32, dilation=2, output_padding=1, stride=2)
    transposed("conv3d", (2, 2, 4, 5, 4), (3, 2, 2, 3, 2), 3, 120)
    transposed("conv3d", (1, 4, 3, 4, 5), (4, 2, 3, 2, 2), None, 96, stride=[1, 2, 1], padding=[1, 0, 1], groups=2)
    transposed("conv3d", (2, 5, 4, 4), (2, 2, 2, 2, 2), 2, 64, dilation=[2, 1, 1], padding=1)
    g.case("avg_pool1d", g.normal(1, 2, 7), kernel_size=2, terms=2, sums=True)
    g.case("avg_pool1d", g.normal(2, 9), kernel_size=3, stride=2, padding=1, count_include_pad=False, terms=3, sums=True)
    g.case("avg_pool1d", g.normal(1, 2, 8), kernel_size=3, ceil_mode=True, terms=3, sums=True)

    g.case("instance_norm", g.normal(2, 3, 5), None, None, g.normal(3), g.normal(3), terms=20, floor=1, grad_floor=1)
    g.case("instance_norm", g.normal(2, 3, 4, 3), eps=1e-3, terms=24, floor=1, grad_floor=1)
    g.case("instance_norm", g.normal(2, 3, 5), g.normal(3), g.uniform(0.3, 2, 3), g.normal(3), g.normal(3), grad=[0, 3, 4], use_input_stats=False,
           terms=20, floor=1, grad_floor=1, dtypes=["float32", "float64"])

    def bags(index, weight, offsets=None, scales=None, **attrs):
        g.case("embedding_bag", index, weight, offsets, scales, terms=index.size, fn=lambda i, w, o=None, s=None, **a: F.embedding_bag(i, w, o, per_sample_weights=s, **a), **attrs)

    for mode in ("sum", "mean", "max"):
        bags(g.integers(0, 7, 3, 4), g.normal(7, 3), mode=mode)
        bags(g.integers(0, 5, 6), g.normal(5, 3), np.array([0, 2, 2]), mode=mode, dtypes=["float32", "float64"])
        bags(g.integers(0, 5, 8), g.normal(5, 3), np.array([0, 3, 7, 8]), mode=mode, include_last_offset=True, padding_idx=1, dtypes=["float32", "float64"])
    bags(g.integers(0, 5, 2, 3), g.normal(5, 3), None, g.normal(2, 3), mode="sum")

    counts = lambda *shape: g.integers(0, 6, *shape).astype(np.float64)
    g.case("poisson_nll_loss", g.normal(3, 4), counts(3, 4), terms=12, floor=1)
    g.case("poisson_nll_loss", g.normal(3, 4), counts(3, 4), grad=[0], full=True, reduction="sum", terms=24, floor=4)
    g.case("poisson_nll_loss", g.uniform(0.3, 3, 7), counts(7), grad=[0], log_input=False, full=True, reduction="none", terms=4, floor=4, grad_floor=2)
    g.case("poisson_nll_loss", g.uniform(0.3, 3, 3, 2), g.uniform(0.2, 3, 3, 2), log_input=False, eps=0.1, terms=8, floor=1)
    g.case("gaussian_nll_loss", g.normal(3, 4), g.normal(3, 4), g.uniform(0.2, 2, 3, 4), terms=24, floor=1)
    g.case("gaussian_nll_loss", g.normal(3, 4), g.normal(3, 4), g.uniform(0.2, 2, 3), full=True, reduction="sum", terms=24, floor=4)
    g.case("gaussian_nll_loss", g.normal(3, 4), g.normal(3, 4), g.uniform(0.2, 2, 3, 1), reduction="none", terms=8, floor=1)
    g.case("gaussian_nll_loss", g.normal(4), g.normal(4), np.array([0.0, 0.25, 1.0, 2.0]), eps=0.5, terms=8, floor=1)
    for shape in ((4, 3), (2, 3, 5), (6,)):
        triplet = lambda: (g.normal(*shape), g.normal(*shape), g.normal(*shape))
        g.case("triplet_margin_loss", *triplet(), terms=24, floor=2, grad_floor=1, margin=2.0)
        g.case("triplet_margin_loss", *triplet(), terms=24, floor=2, grad_floor=1, swap=True, p=3.0, reduction="none")
        g.case("triplet_margin_loss", *triplet(), terms=24, floor=2, grad_floor=1, p=1.0, eps=0.01, reduction="sum")
    for margin, reduction in ((0.0, "mean"), (-0.5, "none"), (0.25, "sum")):
        g.case("cosine_embedding_loss", g.normal(4, 3), g.normal(4, 3), np.array([1, -1, 1, -1]), margin=margin, reduction=reduction, terms=12, floor=1)
    g.case("cosine_embedding_loss", g.normal(5), g.normal(5), np.array(-1), margin=-0.9, terms=10, floor=1)

    def ctc(logits, targets, steps, lengths, **attrs):
        def fn(x, *rest, logits, **a):
            x = F.log_softmax(x, -1) if logits else x
            return F.ctc_loss(x if x.dtype == torch.float64 else x.float(), *rest, **a).to(x.dtype)

        g.case("ctc_loss", logits, targets, np.array(steps), np.array(lengths), logits=True, fn=fn, terms=40, floor=8, grad_floor=1, dtypes=["float32", "float64"], **attrs)

    for reduction in ("mean", "sum", "none"):
        ctc(g.normal(6, 3, 5), np.array([[1, 2, 2], [4, 1, 3], [3, 0, 0]]), [6, 5, 4], [3, 2, 1], reduction=reduction)
    ctc(g.normal(6, 2, 4), np.array([0, 0, 2]), [6, 3], [2, 1], blank=3)
    ctc(g.normal(6, 3), np.array([1, 2]), 6, 2)
    ctc(g.normal(4, 3, 3), np.array([[1, 1, 1], [1, 2, 0], [2, 0, 0]]), [4, 4, 2], [3, 2, 0], reduction="none", zero_infinity=True)
    # log_probs as they are: torch's gradient, which is meant for log_softmax.
    raw = np.log(np.random.default_rng(5).dirichlet(np.ones(4), (5, 2)))
    g.case("ctc_loss", raw, np.array([[1, 2], [3, 3]]), np.array([5, 4]), np.array([2, 2]), terms=40, floor=8, grad_floor=1, dtypes=["float32", "float64"])

    def recurrent(op, gates, width, hidden, sizes, bias=True, reverse=False, packed=False):
        """torch's layer with both directions alike, of which one is looked at."""
        cell = op == "lstm_layer"

        def fn(x, w_ih, w_hh, b_ih, b_hh, h, c=None, batch_sizes=None, reverse=False):
            weights = [w_ih, w_hh] + ([] if b_ih is None else [b_ih, b_hh])
            state = [torch.stack([s, s]) for s in ([h, c] if cell else [h])]
            state = state if cell else state[0]
            run = torch.lstm if cell else torch.gru
            options = (weights * 2, b_ih is not None, 1, 0.0, True, True)
            if batch_sizes is None:
                y, *last = run(x, state, *options, False)
            else:
                y, *last = run(x, torch.tensor(batch_sizes), state, *options)
            return [y.chunk(2, -1)[int(reverse)], *(s[int(reverse)] for s in last)]

        x = g.normal(sum(sizes), width) if packed else g.normal(len(sizes), sizes[0], width)
        biases = [g.normal(gates * hidden), g.normal(gates * hidden)] if bias else [None, None]
        states = [g.normal(sizes[0], hidden) for _ in range(2 if cell else 1)]
        attrs = {"reverse": True} if reverse else {}
        if packed:
            attrs["batch_sizes"] = sizes
        g.case(op, x, g.normal(gates * hidden, width), g.normal(gates * hidden, hidden), *biases, *states, fn=fn, terms=len(sizes) * (width + hidden), floor=1, grad_floor=1, **attrs)

    for op, gates in (("lstm_layer", 4), ("gru_layer", 3)):
        recurrent(op, gates, 3, 5, [2, 2, 2])
        recurrent(op, gates, 4, 3, [3, 2, 2, 1], packed=True, reverse=True)
        recurrent(op, gates, 4, 3, [3, 2, 2, 1], packed=True, bias=False)
        recurrent(op, gates, 2, 9, [1, 1], reverse=True)

    def cell(op, gates, bias):
        def fn(x, *rest):
            states, weights = (list(rest[:2]), rest[2:]) if gates == 4 else (rest[0], rest[1:])
            return getattr(torch, op)(x, states, *weights)

        states = [g.normal(4, 3) for _ in range(2 if gates == 4 else 1)]
        weights = [g.normal(gates * 3, 2), g.normal(gates * 3, 3)] + ([g.normal(gates * 3), g.normal(gates * 3)] if bias else [])
        g.case(op, g.normal(4, 2), *states, *weights, fn=fn, terms=10, floor=1, grad_floor=1)

    for bias in (True, False):
        cell("lstm_cell", 4, bias)
        cell("gru_cell", 3, bias)


def write_all():
    group = Group("ops_layers", seed=2000)
    layers(group)
    group.save()
    print(f"ops_layers: {len(group.records)} cases of {len(group.counts)} ops")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_all()
