"""torch.optim.Muon over 10 steps: muon.json, muon.safetensors.

muon.json: {"name", "options", "dtype", ["groups"]}; muon.safetensors holds the start values
`start/pI` and the gradients `grads/pI` [10, ...] that all cases share, f32, and for each case
`NAME/pI` [10, ...]: the parameters after each step, in the dtype of the case.
"""

import torch

from golden_io import save_tensors, write_lines

STEPS = 10
SHAPES = [(6, 4), (3, 8), (5, 5), (1, 7), (20, 12)]
CASES = [
    ("default", {"lr": 0.02}, "float32"),
    ("double", {"lr": 0.02}, "float64"),
    ("plain", {"lr": 0.05, "nesterov": False, "momentum": 0.8, "weight_decay": 0.0}, "float32"),
    ("adamw_rate", {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3}, "float32"),
    ("spectral", {"lr": 0.02, "adjust_lr_fn": "spectral_unclamped"}, "float32"),
    ("original", {"lr": 0.02, "adjust_lr_fn": "original", "momentum": 0.0}, "float32"),
    ("other_iteration", {"lr": 0.03, "ns_coefficients": [2.0, -1.5, 0.5], "ns_steps": 7, "eps": 1e-3}, "float32"),
    ("no_iteration", {"lr": 0.1, "ns_steps": 0, "eps": 50.0}, "float32"),
    ("groups", {"lr": 0.02, "weight_decay": 0.2}, "float32"),
]
# Options of parameter groups: the even parameters with the case's, the odd ones with these.
GROUPS = {"groups": {"lr": 0.005, "weight_decay": 0.0, "momentum": 0.5}}


def write_all():
    generator = torch.Generator().manual_seed(21)
    start = [torch.randn(s, generator=generator) for s in SHAPES]
    grads = [torch.randn((STEPS, *s), generator=generator) for s in SHAPES]
    tensors = {f"start/p{i}": p for i, p in enumerate(start)} | {f"grads/p{i}": g for i, g in enumerate(grads)}
    records = []
    for name, options, dtype in CASES:
        parameters = [torch.nn.Parameter(p.to(getattr(torch, dtype), copy=True)) for p in start]
        groups = parameters
        record = {"name": name, "options": options, "dtype": dtype}
        if name in GROUPS:
            groups = [{"params": parameters[0::2]}, {"params": parameters[1::2], **GROUPS[name]}]
            record["groups"] = [{}, GROUPS[name]]
        optimizer = torch.optim.Muon(groups, **{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})
        history = [[] for _ in parameters]
        for step in range(STEPS):
            for p, g in zip(parameters, grads):
                p.grad = g[step].to(p.dtype, copy=True)
            optimizer.step()
            for kept, p in zip(history, parameters):
                kept.append(p.detach().clone())
        for i, kept in enumerate(history):
            tensors[f"{name}/p{i}"] = torch.stack(kept)
        records.append(record)
    save_tensors("muon.safetensors", tensors)
    write_lines("muon.json", records)
    print(f"muon: {len(records)} cases")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_all()
