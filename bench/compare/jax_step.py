#!/usr/bin/env python3
"""One training step of a model in JAX, jitted as a whole: a second peer of bench_step.

The models are those of pytorch_models.py, as functions of a tree of f32 parameters. In bf16 parameters and
activations are converted where they are read; norms, softmax and the loss stay in f32, as under
torch.autocast. A step is value_and_grad, clipping by the norm, AdamW; parameters and moments are donated.

Takes the options of pytorch_gpt.py that run.py gives and prints the same JSON lines.
"""
import json
import math
import os
import time

from step_program import measure, option_parser, resident_bytes

parser = option_parser(__doc__.splitlines()[0])
parser.add_argument("--dtype", choices=["f32", "bf16", "autocast-bf16"], default="f32")
parser.add_argument("--device", choices=["cpu"], default="cpu")
options = parser.parse_args()

# Its pool of threads is as large as the set of processors, read when it is imported.
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:options.threads])

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import lax, nn, random  # noqa: E402

LOW = jnp.float32 if options.dtype == "f32" else jnp.bfloat16
DROPOUT = 0.1


class Keys:
    """One key after the other."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        self.key, key = random.split(self.key)
        return key


def linear_parameters(key, inputs, outputs, bias=True):
    bound = 1 / math.sqrt(inputs)
    weight = random.uniform(key(), (inputs, outputs), minval=-bound, maxval=bound)
    return {"weight": weight, **({"bias": jnp.zeros(outputs)} if bias else {})}


def norm_parameters(width):
    return {"weight": jnp.ones(width), "bias": jnp.zeros(width)}


def table(key, rows, width):
    return 0.02 * random.normal(key(), (rows, width))


def linear(p, x):
    y = x.astype(LOW) @ p["weight"].astype(LOW)
    return y + p["bias"].astype(LOW) if "bias" in p else y


def layer_norm(p, x, eps=1e-5):
    x = x.astype(jnp.float32)
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + eps) * p["weight"] + p["bias"]


def rms_norm(weight, x):
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * weight


def cross_entropy(logits, targets):
    logs = nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.take_along_axis(logs, targets[..., None], -1).mean()


def dropout(key, x, rate):
    return jnp.where(random.bernoulli(key(), 1 - rate, x.shape), x / (1 - rate), 0)


def attention(q, k, v, causal):
    """[B, T, heads, D] each; of k and v there may be fewer heads."""
    return nn.dot_product_attention(q, k, v, is_causal=causal)


def pre_norm_parameters(key, width):
    return {"ln_1": norm_parameters(width), "c_attn": linear_parameters(key, width, 3 * width),
            "c_proj": linear_parameters(key, width, width), "ln_2": norm_parameters(width),
            "c_fc": linear_parameters(key, width, 4 * width),
            "mlp_proj": linear_parameters(key, 4 * width, width)}


def pre_norm_block(p, x, heads, causal):
    batch, steps, width = x.shape
    q, k, v = (part.reshape(batch, steps, heads, -1)
               for part in jnp.split(linear(p["c_attn"], layer_norm(p["ln_1"], x)), 3, -1))
    x = x + linear(p["c_proj"], attention(q, k, v, causal).reshape(batch, steps, width))
    return x + linear(p["mlp_proj"], nn.gelu(linear(p["c_fc"], layer_norm(p["ln_2"], x)), causal))


def gpt(o):
    def make(key):
        return {"wte": table(key, o.vocab, o.width), "wpe": table(key, o.context, o.width),
                "blocks": [pre_norm_parameters(key, o.width) for _ in range(o.layers)],
                "ln_f": norm_parameters(o.width)}

    def loss(p, tokens, targets, key):
        x = p["wte"][tokens] + p["wpe"]
        for block in p["blocks"]:
            x = pre_norm_block(block, x, o.heads, True)
        logits = layer_norm(p["ln_f"], x).astype(LOW) @ p["wte"].T.astype(LOW)
        return cross_entropy(logits, targets)

    return make, loss


def bert(o):
    def make(key):
        blocks = [{**{name: linear_parameters(key, o.width, o.width)
                      for name in ("query", "key", "value", "dense")},
                   "intermediate": linear_parameters(key, o.width, 4 * o.width),
                   "output": linear_parameters(key, 4 * o.width, o.width),
                   "ln_1": norm_parameters(o.width), "ln_2": norm_parameters(o.width)}
                  for _ in range(o.layers)]
        return {"words": table(key, o.vocab, o.width), "positions": table(key, o.context, o.width),
                "types": table(key, 2, o.width), "norm": norm_parameters(o.width), "blocks": blocks,
                "pooler": linear_parameters(key, o.width, o.width),
                "classifier": linear_parameters(key, o.width, 2)}

    def loss(p, ids, labels, key):
        x = layer_norm(p["norm"], p["words"][ids] + p["positions"] + p["types"][0], 1e-12)
        x = dropout(key, x, DROPOUT)
        batch, steps, width = x.shape
        for b in p["blocks"]:
            q, k, v = (linear(b[name], x).reshape(batch, steps, o.heads, -1)
                       for name in ("query", "key", "value"))
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(width // o.heads)
            weights = dropout(key, nn.softmax(scores.astype(jnp.float32)), DROPOUT).astype(LOW)
            y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, steps, width)
            x = layer_norm(b["ln_1"], x + dropout(key, linear(b["dense"], y), DROPOUT), 1e-12)
            y = linear(b["output"], nn.gelu(linear(b["intermediate"], x), False))
            x = layer_norm(b["ln_2"], x + dropout(key, y, DROPOUT), 1e-12)
        pooled = dropout(key, jnp.tanh(linear(p["pooler"], x[:, 0])), DROPOUT)
        return cross_entropy(linear(p["classifier"], pooled), labels)

    return make, loss


def convolution(p, x, stride):
    y = lax.conv_general_dilated(x.astype(LOW), p["weight"].astype(LOW), (stride, stride), "VALID")
    return y + p["bias"].astype(LOW)[:, None, None]


def convolution_parameters(key, inputs, outputs, size):
    bound = 1 / math.sqrt(inputs * size * size)
    return {"weight": random.uniform(key(), (outputs, inputs, size, size), minval=-bound, maxval=bound),
            "bias": jnp.zeros(outputs)}


def cnn(o):
    def make(key):
        return {"conv_1": convolution_parameters(key, 1, 16, 5),
                "conv_2": convolution_parameters(key, 16, 32, 5),
                "classifier": linear_parameters(key, 32 * 4 * 4, 10)}

    def pooled(x):
        return lax.reduce_window(nn.relu(x), -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")

    def loss(p, images, labels, key):
        x = pooled(convolution(p["conv_2"], pooled(convolution(p["conv_1"], images, 1)), 1))
        x = dropout(key, x.reshape(x.shape[0], -1), 0.25)
        return cross_entropy(linear(p["classifier"], x), labels)

    return make, loss


def vit(o):
    def make(key):
        return {"patch": convolution_parameters(key, 3, o.width, 4),
                "positions": table(key, o.context, o.width),
                "blocks": [pre_norm_parameters(key, o.width) for _ in range(o.layers)],
                "norm": norm_parameters(o.width), "head": linear_parameters(key, o.width, o.vocab)}

    def loss(p, images, labels, key):
        x = convolution(p["patch"], images, 4)
        x = x.reshape(*x.shape[:2], -1).transpose(0, 2, 1) + p["positions"]
        for block in p["blocks"]:
            x = pre_norm_block(block, x, o.heads, False)
        return cross_entropy(linear(p["head"], layer_norm(p["norm"], x).mean(1)), labels)

    return make, loss


def lstm(o):
    def make(key):
        layers = [{"input": linear_parameters(key, o.width, 4 * o.width),
                   "state": linear_parameters(key, o.width, 4 * o.width)} for _ in range(o.layers)]
        return {"embedding": table(key, o.vocab, o.width), "layers": layers,
                "head": linear_parameters(key, o.width, o.vocab)}

    def loss(p, tokens, targets, key):
        x = p["embedding"][tokens].transpose(1, 0, 2)
        for layer in p["layers"]:
            def step(carry, gates, layer=layer):
                h, c = carry
                i, f, g, output = jnp.split(gates + linear(layer["state"], h), 4, -1)
                c = nn.sigmoid(f) * c + nn.sigmoid(i) * jnp.tanh(g)
                h = nn.sigmoid(output) * jnp.tanh(c)
                return (h, c), h

            start = jnp.zeros((x.shape[1], o.width), LOW)
            x = lax.scan(step, (start, start), linear(layer["input"], x))[1]
        return cross_entropy(linear(p["head"], x.transpose(1, 0, 2)), targets)

    return make, loss


def llama(o):
    head_width = o.width // o.heads
    inner = (8 * o.width // 3 + 63) // 64 * 64
    rates = jnp.exp(jnp.arange(head_width // 2) * (-2 * math.log(10000.0) / head_width))
    angles = jnp.arange(o.context)[:, None] * rates
    cos, sin = (f(angles)[:, None].astype(LOW) for f in (jnp.cos, jnp.sin))

    def make(key):
        sizes = {"q": (o.width, o.width), "k": (o.width, o.width // 2), "v": (o.width, o.width // 2),
                 "o": (o.width, o.width), "gate": (o.width, inner), "up": (o.width, inner),
                 "down": (inner, o.width)}
        blocks = [{**{name: linear_parameters(key, *size, bias=False) for name, size in sizes.items()},
                   "norm_1": jnp.ones(o.width), "norm_2": jnp.ones(o.width)} for _ in range(o.layers)]
        return {"embedding": table(key, o.vocab, o.width), "blocks": blocks, "norm": jnp.ones(o.width),
                "head": linear_parameters(key, o.width, o.vocab, bias=False)}

    def rotated(x):
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    def loss(p, tokens, targets, key):
        x = p["embedding"][tokens]
        batch, steps, width = x.shape
        for b in p["blocks"]:
            y = rms_norm(b["norm_1"], x)
            q, k, v = (linear(b[name], y).reshape(batch, steps, -1, head_width) for name in "qkv")
            y = attention(rotated(q), rotated(k), v, True).reshape(batch, steps, width)
            x = x + linear(b["o"], y)
            z = rms_norm(b["norm_2"], x)
            x = x + linear(b["down"], nn.silu(linear(b["gate"], z)) * linear(b["up"], z))
        return cross_entropy(linear(p["head"], rms_norm(p["norm"], x)), targets)

    return make, loss


def batch_of(o, key):
    """Inputs and targets, as model_and_batch() of pytorch_models.py."""
    def numbers(most, *shape):
        return random.randint(key(), shape, 0, most)

    if o.model == "cnn":
        return random.normal(key(), (o.batch_size, 1, 28, 28)), numbers(10, o.batch_size)
    if o.model == "vit":
        side = 4 * math.isqrt(o.context)
        return random.normal(key(), (o.batch_size, 3, side, side)), numbers(o.vocab, o.batch_size)
    if o.model == "bert":
        return numbers(o.vocab, o.batch_size, o.context), numbers(2, o.batch_size)
    tokens = numbers(o.vocab, o.batch_size, o.context + 1)
    return tokens[:, :-1], tokens[:, 1:]


start_up_bytes = resident_bytes()
keys = Keys(random.key(1))
make_parameters, loss_of = {"gpt2": gpt, "bert": bert, "cnn": cnn, "vit": vit, "lstm": lstm,
                            "llama": llama}[options.model](options)


def train_step(state, inputs, targets):
    parameters, first, second, count, key = state
    key, now = random.split(key)
    loss, gradients = jax.value_and_grad(loss_of)(parameters, inputs, targets, Keys(now))
    norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(gradients)))
    scale = jnp.minimum(1.0, 1.0 / (norm + 1e-6))
    rate, beta_1, beta_2, decay, eps = 3e-4, 0.9, 0.99, 0.1, 1e-8
    count = count + 1

    def moved(p, g, m, v):
        g = g * scale
        m, v = beta_1 * m + (1 - beta_1) * g, beta_2 * v + (1 - beta_2) * g * g
        direction = m / (1 - beta_1**count) / (jnp.sqrt(v / (1 - beta_2**count)) + eps)
        return p * (1 - rate * decay) - rate * direction, m, v

    leaves = jax.tree.map(moved, parameters, gradients, first, second)
    parameters, first, second = jax.tree.transpose(jax.tree.structure(parameters),
                                                   jax.tree.structure((0, 0, 0)), leaves)
    return (parameters, first, second, count, key), loss


jitted = jax.jit(train_step, donate_argnums=0)
weights = make_parameters(keys)
state = (weights, jax.tree.map(jnp.zeros_like, weights), jax.tree.map(jnp.zeros_like, weights),
         jnp.zeros((), jnp.float32), keys())
inputs, targets = batch_of(options, keys)


def timed_steps(count):
    global state
    times, cpu_times, loss = [], [], float("nan")
    for _ in range(count):
        start, cpu_start = time.perf_counter(), time.process_time()
        state, last = jitted(state, inputs, targets)
        loss = float(last)
        jax.block_until_ready(state)
        times.append((time.perf_counter() - start) * 1e3)
        cpu_times.append((time.process_time() - cpu_start) * 1e3)
    return times, cpu_times, loss


print(json.dumps(measure(options, timed_steps, {"program": "jax", "version": jax.__version__},
                         "as XLA finds", start_up_bytes)), flush=True)
