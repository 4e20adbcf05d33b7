"""Update rules over 10 steps, learning-rate schedules, clipping: optimizers.*, schedules.json.

optimizers.json: {"name", "optimizer", "options", ["groups"]}; optimizers.safetensors holds the start
values `start/pI` (f32), the gradients `grads/pI` [10, ...] (f32) that all share, and for each case
`NAME/pI` [10, ...]: the parameters after each step, in float64 from the same f32 numbers.
schedules.json: {"name", "schedule", "options", "lrs"}: the rate in use at steps 0, 1, 2, ...
"""

import math

import torch
import transformers

from golden_io import save_tensors, write_lines

STEPS = 10


class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023, algorithm 2."""

    def __init__(self, parameters, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = torch.sign(beta1 * m + (1 - beta1) * p.grad)
                p -= group["lr"] * (update + group["weight_decay"] * p)
                m.copy_(beta2 * m + (1 - beta2) * p.grad)


OPTIMIZERS = [
    ("sgd", "SGD", {"lr": 0.1}),
    ("sgd_momentum", "SGD", {"lr": 0.05, "momentum": 0.9}),
    ("sgd_dampening", "SGD", {"lr": 0.05, "momentum": 0.8, "dampening": 0.3, "weight_decay": 0.01}),
    ("sgd_nesterov", "SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.02}),
    ("adam", "Adam", {"lr": 0.01}),
    ("adam_l2", "Adam", {"lr": 0.02, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}),
    ("adam_amsgrad", "Adam", {"lr": 0.02, "amsgrad": True}),
    ("adamw", "AdamW", {"lr": 0.01}),
    ("adamw_decay", "AdamW", {"lr": 0.03, "betas": [0.9, 0.99], "weight_decay": 0.1}),
    ("adamw_amsgrad", "AdamW", {"lr": 0.01, "amsgrad": True, "weight_decay": 0.05}),
    ("adagrad", "Adagrad", {"lr": 0.1}),
    ("adagrad_decay", "Adagrad", {"lr": 0.1, "lr_decay": 0.05, "weight_decay": 0.01, "initial_accumulator_value": 0.2, "eps": 1e-8}),
    ("rmsprop", "RMSprop", {"lr": 0.01}),
    ("rmsprop_centered", "RMSprop", {"lr": 0.01, "alpha": 0.9, "centered": True, "eps": 1e-6}),
    ("rmsprop_momentum", "RMSprop", {"lr": 0.01, "momentum": 0.8, "weight_decay": 0.02}),
    ("rmsprop_all", "RMSprop", {"lr": 0.01, "alpha": 0.95, "momentum": 0.9, "centered": True, "weight_decay": 0.02}),
    ("lion", "Lion", {"lr": 0.01}),
    ("lion_decay", "Lion", {"lr": 0.02, "betas": [0.95, 0.98], "weight_decay": 0.3}),
    ("adamw_groups", "AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("adadelta", "Adadelta", {"lr": 0.5}),
    ("adadelta_decay", "Adadelta", {"lr": 1.0, "rho": 0.8, "eps": 1e-5, "weight_decay": 0.02, "maximize": True}),
    ("adamax", "Adamax", {"lr": 0.02}),
    ("adamax_decay", "Adamax", {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.05, "maximize": True}),
    ("nadam", "NAdam", {"lr": 0.02}),
    ("nadam_l2", "NAdam", {"lr": 0.01, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.05, "momentum_decay": 0.01, "maximize": True}),
    ("nadam_decoupled", "NAdam", {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    ("radam", "RAdam", {"lr": 0.02}),
    ("radam_l2", "RAdam", {"lr": 0.02, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.05, "maximize": True}),
    ("radam_decoupled", "RAdam", {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True}),
]
# Options of parameter groups: parameters 0 and 2 with the defaults, 1 with these.
GROUPS = {"adamw_groups": {"lr": 0.002, "weight_decay": 0.0}}


def optimizers():
    generator = torch.Generator().manual_seed(20)
    shapes = [(4, 3), (5,), (2, 1, 3)]
    start = [torch.randn(s, generator=generator) for s in shapes]
    grads = [torch.randn((STEPS, *s), generator=generator) for s in shapes]
    tensors = {f"start/p{i}": p for i, p in enumerate(start)} | {f"grads/p{i}": g for i, g in enumerate(grads)}
    records = []
    for name, kind, options in OPTIMIZERS:
        parameters = [torch.nn.Parameter(p.double()) for p in start]
        groups = parameters
        record = {"name": name, "optimizer": kind, "options": options}
        if name in GROUPS:
            groups = [{"params": [parameters[0], parameters[2]]}, {"params": [parameters[1]], **GROUPS[name]}]
            record["groups"] = [{"parameters": [0, 2]}, {"parameters": [1], "options": GROUPS[name]}]
        arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
        optimizer = (Lion if kind == "Lion" else getattr(torch.optim, kind))(groups, **arguments)
        history = [[] for _ in parameters]
        for step in range(STEPS):
            for p, g in zip(parameters, grads):
                p.grad = g[step].double()
            optimizer.step()
            for kept, p in zip(history, parameters):
                kept.append(p.detach().clone())
        for i, kept in enumerate(history):
            tensors[f"{name}/p{i}"] = torch.stack(kept)
        records.append(record)

    # Clipping and the moving average share the gradients of step 0 and the start values.
    for name, max_norm, kind in [("clip_l2", 1.0, 2.0), ("clip_loose", 100.0, 2.0), ("clip_l1", 2.0, 1.0), ("clip_max", 0.5, math.inf)]:
        parameters = [torch.nn.Parameter(p.double()) for p in start]
        for p, g in zip(parameters, grads):
            p.grad = g[0].double()
        total = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=kind)
        for i, p in enumerate(parameters):
            tensors[f"{name}/p{i}"] = p.grad
        records.append({"name": name, "clip_grad_norm": {"max_norm": max_norm, "norm_type": "inf" if kind == math.inf else kind}, "total": float(total)})
    for i, g in enumerate(grads):
        tensors[f"clip_value/p{i}"] = g[0].double().clamp(-0.4, 0.4)
    records.append({"name": "clip_value", "clip_grad_value": {"clip_value": 0.4}})
    average = [p.double() for p in start]
    for step in range(STEPS):
        average = [0.9 * a + 0.1 * (p.double() + g[step].double()) for a, p, g in zip(average, start, grads)]
    for i, a in enumerate(average):
        tensors[f"ema/p{i}"] = a
    records.append({"name": "ema", "ema": {"decay": 0.9}})
    save_tensors("optimizers.safetensors", tensors)
    write_lines("optimizers.json", records)
    return len(records)


def schedules():
    scheduler = torch.optim.lr_scheduler
    records = []

    def add(name, kind, make, steps=30, base=0.1, metrics=None, **options):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=base, momentum=0.9)
        schedule = make(optimizer, **options)
        lrs = []
        for step in range(steps):
            lrs.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step(metrics[step]) if metrics else schedule.step()
        record = {"name": name, "schedule": kind, "options": {"lr": base, **options}, "lrs": [float(f"{x:.15g}") for x in lrs]}
        if metrics:
            record["metrics"] = metrics
        records.append(record)

    def torch_schedule(name, kind, **options):
        add(name, kind, getattr(scheduler, kind), **options)

    torch_schedule("constant", "ConstantLR", factor=0.25, total_iters=7)
    torch_schedule("linear", "LinearLR", start_factor=0.2, end_factor=0.9, total_iters=12)
    torch_schedule("step", "StepLR", step_size=7, gamma=0.3)
    torch_schedule("multistep", "MultiStepLR", milestones=[3, 11, 20], gamma=0.5)
    torch_schedule("exponential", "ExponentialLR", gamma=0.9)
    torch_schedule("polynomial", "PolynomialLR", total_iters=20, power=1.7)
    torch_schedule("cosine", "CosineAnnealingLR", T_max=25, eta_min=0.01, steps=26)
    torch_schedule("cosine_restarts", "CosineAnnealingWarmRestarts", T_0=8, eta_min=0.001)
    torch_schedule("cosine_restarts_growing", "CosineAnnealingWarmRestarts", T_0=4, T_mult=2)
    torch_schedule("one_cycle", "OneCycleLR", max_lr=0.3, total_steps=30)
    torch_schedule("one_cycle_linear", "OneCycleLR", max_lr=0.3, total_steps=30, pct_start=0.4, anneal_strategy="linear", div_factor=10.0, final_div_factor=100.0)
    torch_schedule("one_cycle_three_phase", "OneCycleLR", max_lr=0.2, total_steps=30, three_phase=True)
    add("lambda", "LambdaLR", lambda optimizer: scheduler.LambdaLR(optimizer, lambda step: 0.95**step + 0.01 * (step % 3)))
    add("sequential", "SequentialLR", lambda optimizer: scheduler.SequentialLR(
        optimizer, [scheduler.LinearLR(optimizer, 0.1, 1.0, 5), scheduler.CosineAnnealingLR(optimizer, 20, 0.002), scheduler.ConstantLR(optimizer, 0.02, 1000)], [5, 25]))
    add("chained", "ChainedScheduler", lambda optimizer: scheduler.ChainedScheduler(
        [scheduler.ConstantLR(optimizer, 0.5, 6), scheduler.ExponentialLR(optimizer, 0.9)]))
    falling = [1.0, 0.8, 0.7, 0.7, 0.71, 0.7, 0.69, 0.695, 0.6999, 0.7, 0.69, 0.72, 0.7, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.51, 0.5, 0.5, 0.4, 0.41, 0.42, 0.43, 0.4, 0.4, 0.4, 0.4]
    torch_schedule("plateau", "ReduceLROnPlateau", factor=0.5, patience=2, metrics=falling)
    torch_schedule("plateau_cooldown", "ReduceLROnPlateau", factor=0.3, patience=1, cooldown=3, min_lr=0.002, threshold=0.05, metrics=falling)
    torch_schedule("plateau_max", "ReduceLROnPlateau", mode="max", factor=0.5, patience=2, threshold=0.01, threshold_mode="abs", metrics=[-m for m in falling])

    def warm(name, **options):
        add(name, f"get_{name}", getattr(transformers, f"get_{name}"), **options)

    warm("constant_schedule_with_warmup", num_warmup_steps=6)
    warm("linear_schedule_with_warmup", num_warmup_steps=6, num_training_steps=25)
    warm("cosine_schedule_with_warmup", num_warmup_steps=6, num_training_steps=28)
    warm("cosine_with_hard_restarts_schedule_with_warmup", num_warmup_steps=4, num_training_steps=28, num_cycles=3)
    warm("polynomial_decay_schedule_with_warmup", num_warmup_steps=4, num_training_steps=24, lr_end=0.001, power=2.0)
    warm("inverse_sqrt_schedule", num_warmup_steps=5)
    add("cosine_with_min_lr", "cosine_with_min_lr", lambda optimizer, **options: transformers.get_cosine_with_min_lr_schedule_with_warmup(optimizer, **options),
        num_warmup_steps=6, num_training_steps=28, min_lr=0.01)
    write_lines("schedules.json", records)
    return len(records)


def write_all():
    print(f"optimizers: {optimizers()} cases, schedules: {schedules()} cases")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_all()
