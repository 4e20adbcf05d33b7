"""Derivatives of functions (functional.safetensors), distributions.* and L-BFGS (lbfgs.*).

functional.safetensors: a, b, the directions v.* and what torch.autograd.functional gives for
lists(a, b) and scalar(a, b) below, all float64.
distributions.json: {"name", "distribution", "of", "method", ["other"]}; the tensors NAME/pI are the
parameters, NAME/qI those of a second distribution, NAME/value, NAME/y, NAME/dy, NAME/grad.pI...
lbfgs.json: {"name", "options", "losses", "evaluations", "iterations"} after each step, of loss_of or, where the
name begins so, waves_of or peaks_of; in
lbfgs.safetensors NAME/pI [steps, ...] from start/pI.
"""

import torch
import torch.distributions as D

from golden_io import save_tensors, write_lines


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


def distributions():
    generator = torch.Generator().manual_seed(71)
    tensors, records = {}, []

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def uniform(low, high, *shape):
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

    def add(kind, of, method, p, value=None, q=None):
        name = f"{len(records)}.{kind}.{method}"
        leaves = {f"p{i}": x.clone().requires_grad_() for i, x in enumerate(p)} | {f"q{i}": x.clone().requires_grad_() for i, x in enumerate(q or [])}
        if value is not None:
            leaves["value"] = value.clone().requires_grad_() if value.is_floating_point() else value

        def make(prefix):
            values = [x for key, x in leaves.items() if key.startswith(prefix)]
            arguments = {of: values[0]} if of else dict(enumerate(values))
            return getattr(D, kind)(**arguments, validate_args=False) if of else getattr(D, kind)(*values, validate_args=False)

        first = make("p")
        if method == "kl_divergence":
            y = D.kl_divergence(first, make("q"))
        elif value is not None:
            y = getattr(first, method)(leaves["value"])
        else:
            y = getattr(first, method)
            y = y() if callable(y) else y
        dy = normal(*y.shape)
        wanted = [key for key, x in leaves.items() if x.requires_grad]
        grads = torch.autograd.grad(y, [leaves[key] for key in wanted], dy, allow_unused=True, materialize_grads=True)
        for key, x in leaves.items():
            tensors[f"{name}/{key}"] = x
        tensors[f"{name}/y"], tensors[f"{name}/dy"] = y, dy
        for key, g in zip(wanted, grads):
            tensors[f"{name}/grad.{key}"] = g
        records.append({"name": name, "distribution": kind, "of": of, "method": method})

    for method in ("mean", "variance", "entropy"):
        add("Normal", "", method, [normal(2, 1), uniform(0.3, 2, 3)])
        add("Uniform", "", method, [normal(3), normal(3) + 4])
    add("Normal", "", "log_prob", [normal(3), uniform(0.3, 2, 3)], normal(2, 3))
    add("Normal", "", "log_prob", [normal(), uniform(0.3, 2)], normal(4))
    add("Normal", "", "cdf", [normal(3), uniform(0.3, 2, 3)], normal(2, 3))
    add("Normal", "", "kl_divergence", [normal(2, 3), uniform(0.3, 2, 3)], q=[normal(3), uniform(0.3, 2, 2, 3)])
    low, high = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64), torch.tensor([1.5, 0.5, 4.0], dtype=torch.float64)
    add("Uniform", "", "log_prob", [low, high], torch.tensor([[-1.0, 0.25, 3.0], [0.0, 0.1, 2.5]], dtype=torch.float64))
    add("Uniform", "", "cdf", [low, high], torch.tensor([[-2.0, 0.25, 3.0], [0.0, 0.6, 2.5]], dtype=torch.float64))
    add("Uniform", "", "kl_divergence", [low, high], q=[low - 0.5, high + 1])
    for of in ("probs", "logits"):
        parameter = lambda *shape: uniform(0.05, 0.95, *shape) if of == "probs" else normal(*shape)
        zeros_and_ones = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
        add("Bernoulli", of, "log_prob", [parameter(3)], zeros_and_ones)
        for method in ("mean", "variance", "entropy"):
            add("Bernoulli", of, method, [parameter(2, 3)])
        add("Bernoulli", of, "kl_divergence", [parameter(2, 3)], q=[parameter(2, 3)])
        classes = lambda *shape: uniform(0.1, 2, *shape) if of == "probs" else normal(*shape)
        add("Categorical", of, "log_prob", [classes(2, 4)], torch.tensor([[0, 3], [2, 2], [1, 0]]))
        add("Categorical", of, "entropy", [classes(2, 4)])
        add("Categorical", of, "kl_divergence", [classes(2, 4)], q=[classes(4)])
    save_tensors("distributions.safetensors", tensors)
    write_lines("distributions.json", records)
    return len(records)


def lbfgs():
    generator = torch.Generator().manual_seed(72)
    start = [torch.randn(s, generator=generator, dtype=torch.float64) for s in [(2, 3), (4,)]]
    tensors = {f"start/p{i}": p for i, p in enumerate(start)}
    records = []

    def loss_of(a, b):  # a valley that bends
        valley = (10 * (b[1:] - b[:-1] ** 2) ** 2 + (1 - b[:-1]) ** 2).sum()
        return valley + ((torch.exp(a) - 2) ** 2).sum() + 0.1 * torch.tanh(a.sum()) * b.sum()

    def waves_of(a, b):  # many minima, and slopes that mislead
        return sum(0.05 * (x * x).sum() + torch.sin(3 * x).sum() for x in (a, b))

    def peaks_of(a, b):  # whose curvature changes its sign
        return sum(torch.log1p(50 * x * x).sum() for x in (a, b))

    cases = [("search", {"line_search_fn": "strong_wolfe"}, 3),
             ("search_short", {"lr": 0.5, "max_iter": 4, "history_size": 3, "line_search_fn": "strong_wolfe"}, 6),
             ("search_few_calls", {"max_iter": 5, "max_eval": 7, "line_search_fn": "strong_wolfe", "tolerance_change": 1e-6}, 5),
             ("search_from_far", {"lr": 40.0, "max_iter": 6, "line_search_fn": "strong_wolfe"}, 5),
             ("search_from_near", {"lr": 1e-4, "max_iter": 6, "max_eval": 40, "line_search_fn": "strong_wolfe"}, 4),
             ("waves", {"max_iter": 6, "line_search_fn": "strong_wolfe"}, 5),
             ("waves_from_near", {"lr": 0.01, "max_iter": 5, "max_eval": 60, "line_search_fn": "strong_wolfe"}, 5),
             ("waves_from_far", {"lr": 9.0, "max_iter": 6, "max_eval": 60, "line_search_fn": "strong_wolfe"}, 5),
             ("peaks", {"max_iter": 6, "max_eval": 60, "line_search_fn": "strong_wolfe"}, 2),
             ("peaks_from_far", {"lr": 10.0, "max_iter": 6, "max_eval": 60, "line_search_fn": "strong_wolfe"}, 4),
             ("fixed", {"lr": 0.05, "max_iter": 5}, 5),
             ("fixed_history", {"lr": 0.1, "max_iter": 7, "history_size": 2}, 4),
             ("maximize", {"max_iter": 4, "line_search_fn": "strong_wolfe", "maximize": True}, 3)]
    def run(name, options, steps, begin):
        sign = -1 if options.get("maximize") else 1
        function = {"waves": waves_of, "peaks": peaks_of}.get(name.split("_")[0], loss_of)
        parameters = [torch.nn.Parameter(p.clone()) for p in begin]
        optimizer = torch.optim.LBFGS(parameters, **options)
        losses, counts, history = [], [], [[] for _ in parameters]

        def closure():
            optimizer.zero_grad()
            loss = sign * function(*parameters)
            loss.backward()
            return loss

        for _ in range(steps):
            losses.append(optimizer.step(closure).item())
            state = optimizer.state[parameters[0]]
            counts.append((state["func_evals"], state["n_iter"]))
            for kept, p in zip(history, parameters):
                kept.append(p.detach().clone())
        return losses, counts, [torch.stack(kept) for kept in history]

    # Searches may magnify a rounding a million times a step: only steps are kept that starts which differ
    # in their last bits have in common.
    moved = [[p * (1 + 2.0**-51 * torch.randn(p.shape, generator=generator, dtype=torch.float64)) for p in start] for _ in range(40)]
    for name, options, steps in cases:
        losses, counts, history = run(name, options, steps, start)
        kept = steps
        for begin in moved:
            _, other_counts, other = run(name, options, steps, begin)
            for step in range(kept):
                apart = max((a[step] - b[step]).abs().max().item() for a, b in zip(history, other))
                if apart > 1e-11 or counts[step] != other_counts[step]:
                    kept = step
                    break
        assert kept > 0, name
        for i, values in enumerate(history):
            tensors[f"{name}/p{i}"] = values[:kept]
        evaluations, iterations = zip(*counts[:kept])
        records.append({"name": name, "options": options, "losses": losses[:kept], "evaluations": list(evaluations), "iterations": list(iterations)})
    save_tensors("lbfgs.safetensors", tensors)
    write_lines("lbfgs.json", records)
    return len(records)


def write_all():
    functional()
    print(f"distributions: {distributions()} cases, lbfgs: {lbfgs()} cases")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_all()
