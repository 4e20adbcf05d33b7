"""Device maps and balanced limits of Accelerate for models of transformers and random trees: device_maps.json, and
for folders with a config.json: device_map_folders.json.

    python tests/golden/device_map_cases.py tests/golden   # accelerate, transformers, torch

A tree is [class, [[name, numel, dtype, is_buffer, tied_to]...], [[name, tree]...]]; limits are [[place, bytes]...].
"""

import json
import random
import sys
import warnings
from unittest import mock

import torch
from torch import nn
from accelerate import init_empty_weights
from accelerate.utils import compute_module_sizes, get_balanced_memory, infer_auto_device_map

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64", torch.bool: "bool", torch.float64: "f64"}


def tree_of(model):
    first = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)

    def tree(module, prefix):
        weights = []
        for name, tensor in module._parameters.items():
            if tensor is not None:
                own = prefix + name
                weights.append([name, tensor.numel(), DTYPES[tensor.dtype], False, "" if first[id(tensor)] == own else first[id(tensor)]])
        for name, tensor in module._buffers.items():
            if tensor is not None:
                weights.append([name, tensor.numel(), DTYPES[tensor.dtype], True, ""])
        return [type(module).__name__, weights, [[name, tree(child, prefix + name + ".")] for name, child in module.named_children()]]

    return tree(model, "")


def transformers_models():
    import transformers as t

    small = dict(vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4)
    with init_empty_weights():
        yield "gpt2", t.GPT2LMHeadModel(t.GPT2Config(vocab_size=97, n_embd=32, n_layer=4, n_head=4, n_positions=64))
        yield "gpt2_untied", t.GPT2LMHeadModel(t.GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=64, tie_word_embeddings=False))
        yield "bert", t.BertForSequenceClassification(t.BertConfig(**small, intermediate_size=64))
        yield "llama", t.LlamaForCausalLM(t.LlamaConfig(**small, intermediate_size=64, num_key_value_heads=2))
        yield "llama_tied", t.LlamaForCausalLM(t.LlamaConfig(**small, intermediate_size=64, tie_word_embeddings=True))
        yield "qwen2", t.Qwen2ForCausalLM(t.Qwen2Config(**small, intermediate_size=48, num_key_value_heads=4))
        yield "t5", t.T5ForConditionalGeneration(t.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4))


class Leaf(nn.Module):
    def __init__(self, numel):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numel, device="meta"))
        if numel % 3 == 0:
            self.bias = nn.Parameter(torch.empty(numel // 3, device="meta"))
        if numel % 5 == 0:
            self.register_buffer("mean", torch.empty(numel // 5, device="meta"))


class Block(nn.Module):
    pass


class Group(nn.Module):
    pass


def random_model(rng):
    def make(depth):
        if depth == 0 or rng.random() < 0.3:
            return Leaf(rng.randint(1, 60))
        module = Block() if rng.random() < 0.4 else Group()
        if rng.random() < 0.2:
            module.own = nn.Parameter(torch.empty(rng.randint(1, 40), device="meta"))
        if rng.random() < 0.15:
            module.register_buffer("table", torch.empty(rng.randint(1, 40), dtype=torch.float16, device="meta"))
        if rng.random() < 0.1:
            module.drop = nn.Dropout()
        for i in range(rng.randint(1, 4)):
            setattr(module, "abcd"[i], make(depth - 1))
        return module

    root = Group()
    for i in range(rng.randint(1, 4)):
        setattr(root, "wxyz"[i], make(rng.randint(0, 3)))
    leaves = [m for m in root.modules() if isinstance(m, Leaf)]
    if len(leaves) > 2 and rng.random() < 0.5:
        a, b = rng.sample(leaves, 2)
        b.weight = a.weight
    return root


NO_SPLIT = ["GPT2Block", "BertLayer", "LlamaDecoderLayer", "Qwen2DecoderLayer", "T5Block", "Block"]


def place(key):
    return f"cuda:{key}" if isinstance(key, int) else key


def case(model, rng):
    total = max(1, compute_module_sizes(model)[""])
    keys = [0, 1, 2][: rng.choice([0, 1, 1, 2, 2, 3])]
    limits = {key: int(total * rng.choice([0.1, 0.2, 0.35, 0.5, 0.8, 1.2])) for key in keys}
    limits["cpu"] = int(total * rng.choice([0.05, 0.3, 0.6, 2]))
    options = dict(
        no_split_module_classes=rng.choice([[], NO_SPLIT]),
        dtype=rng.choice([None, None, torch.float16]),
        clean_result=rng.random() < 0.8,
        fallback_allocation=rng.random() < 0.3,
    )
    row = {
        "limits": [[place(k), v] for k, v in limits.items()],
        "no_split": options["no_split_module_classes"],
        "dtype": "f16" if options["dtype"] else "",
        "clean": options["clean_result"],
        "fallback": options["fallback_allocation"],
    }
    try:
        row["map"] = {name: place(where) for name, where in infer_auto_device_map(model, max_memory=dict(limits), **options).items()}
    except IndexError:  # Accelerate's own: a tied module that it has placed already
        return None
    low = rng.random() < 0.4
    row["low_zero"] = low
    with mock.patch("torch.cuda.device_count", lambda: 3):
        row["balanced"] = [[place(k), int(v)] for k, v in get_balanced_memory(
            model, max_memory=dict(limits), no_split_module_classes=options["no_split_module_classes"], dtype=options["dtype"], low_zero=low
        ).items()]
    return row


def folders():
    import transformers as t

    small = dict(vocab_size=97, hidden_size=32, num_hidden_layers=4, num_attention_heads=4)
    gated = dict(**small, intermediate_size=64, num_key_value_heads=2)
    configs = [
        (t.GPT2LMHeadModel, t.GPT2Config(vocab_size=97, n_embd=32, n_layer=4, n_head=4, n_positions=64)),
        (t.GPT2LMHeadModel, t.GPT2Config(vocab_size=97, n_embd=32, n_layer=4, n_head=4, n_positions=64, tie_word_embeddings=False)),
        (t.BertForSequenceClassification, t.BertConfig(**small, intermediate_size=64, max_position_embeddings=40)),
        (t.LlamaForCausalLM, t.LlamaConfig(**gated)),
        (t.LlamaForCausalLM, t.LlamaConfig(**gated, tie_word_embeddings=True)),
        (t.MistralForCausalLM, t.MistralConfig(**gated)),
        (t.Qwen2ForCausalLM, t.Qwen2Config(**gated)),
        (t.Qwen3ForCausalLM, t.Qwen3Config(**gated, head_dim=8)),
    ]
    out = []
    for make, config in configs:
        config.architectures = [make.__name__]
        with init_empty_weights():
            model = make(config)
        model.tie_weights()
        total = compute_module_sizes(model)[""]
        for cpu, gpu, dtype in [(0.7, None, "f32"), (0.9, 0.5, "f32"), (0.4, 0.6, "f16"), (2.5, None, "f32"), (0.02, None, "f32")]:
            limits = {} if gpu is None else {0: int(total * gpu)}
            limits["cpu"] = int(total * cpu)
            found = infer_auto_device_map(
                model, max_memory=dict(limits), no_split_module_classes=model._no_split_modules, dtype=torch.float16 if dtype == "f16" else None
            )
            out.append({"config": json.loads(config.to_json_string(use_diff=False)), "dtype": dtype,
                        "max_memory": ",".join(f"{place(k)}={v}" for k, v in limits.items()), "map": {k: place(v) for k, v in found.items()}})
    return out


def write(path, rows):
    with open(path, "w") as f:
        f.write("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n")


def main():
    warnings.simplefilter("ignore")
    rng = random.Random(7)
    library = list(transformers_models())
    for _, model in library:
        model.tie_weights()  # without effect where weights are not made yet
    models = library + [(f"random{i}", random_model(rng)) for i in range(60)]
    out = []
    for name, model in models:
        rows = [case(model, rng) for _ in range(20 if not name.startswith("random") else 6)]
        out.append({"name": name, "tree": tree_of(model), "sizes": dict(compute_module_sizes(model)) if name in ("gpt2", "llama") else {}, "cases": [r for r in rows if r]})
    write(sys.argv[1] + "/device_maps.json", out)
    write(sys.argv[1] + "/device_map_folders.json", folders())


main()
