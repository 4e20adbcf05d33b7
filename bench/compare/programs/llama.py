import argparse
import codecs
import json
import math
import sys
import time
import zlib
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from huggingface_hub import save_torch_model
from safetensors.torch import load_file, save_file
from torch import nn


@dataclass
class LlamaConfig:
    model_type: str = "llama"
    vocab_size: int = 256
    max_position_embeddings: int = 128
    hidden_size: int = 128
    intermediate_size: int = 344
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = 2
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_parameters: dict = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    sliding_window: int | None = None
    max_window_layers: int = 0
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self):
        for name in ("vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size",
                     "num_hidden_layers", "num_attention_heads"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive; got {getattr(self, name)}")
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        if self.head_dim % 2 != 0:
            raise ValueError(f"a head has an even number of features; got {self.head_dim}")
        if self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads; got "
                             f"{self.num_attention_heads} and {self.num_key_value_heads}")

    @property
    def qkv_bias(self):
        return self.model_type == "qwen2" or self.attention_bias

    @property
    def end_of_text(self):
        ids = self.eos_token_id
        return ids if isinstance(ids, list) else [] if ids is None else [ids]

    def window_of(self, layer):
        return self.sliding_window if layer >= self.max_window_layers else None

    @classmethod
    def read(cls, path):
        given = {name: value for name, value in json.loads(path.read_text()).items()
                 if value is not None}
        kind = given.get("model_type")
        if kind not in ("llama", "mistral", "qwen2"):
            raise ValueError(f"{path}: the model_type is {kind!r}; known are llama, mistral, qwen2")
        if given.get("hidden_act", "silu") != "silu":
            raise ValueError(f"{path}: hidden_act is {given['hidden_act']!r}; known is silu")
        values = {"max_position_embeddings": 2048, "tie_word_embeddings": False,
                  "num_key_value_heads": 8 if kind == "mistral" else None}
        values.update({f.name: given[f.name] for f in fields(cls) if f.name in given})
        rope = dict(given.get("rope_parameters") or given.get("rope_scaling") or {})
        rope.setdefault("rope_type", rope.get("type", "default"))
        rope.setdefault("rope_theta", given.get("rope_theta", 10000.0))
        if rope["rope_type"] not in ("default", "linear", "dynamic", "llama3"):
            raise ValueError(f"{path}: the rotary scaling {rope['rope_type']!r} is not known")
        if rope.get("partial_rotary_factor", 1) != 1:
            raise ValueError(f"{path}: partial_rotary_factor other than 1")
        values["rope_parameters"] = rope
        if kind != "llama":
            values.update(attention_bias=False, mlp_bias=False)
        if kind == "llama" or (kind == "qwen2" and not given.get("use_sliding_window")):
            values["sliding_window"] = None
        if kind == "qwen2":
            values["max_window_layers"] = given.get("max_window_layers", 28)
            types = given.get("layer_types", [])
            if types and values.get("sliding_window"):
                full = values["max_window_layers"] = types.count("full_attention")
                if "full_attention" in types[full:]:
                    raise ValueError(f"{path}: layer_types other than full and then sliding ones")
        else:
            values["max_window_layers"] = 0
        return cls(**values)

    def write(self, path, dtype):
        name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}[self.model_type]
        rope = self.rope_parameters
        dtype = str(dtype).removeprefix("torch.")
        values = asdict(self) | {
            "architectures": [name + "ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu",
            "dtype": dtype, "torch_dtype": dtype, "rope_theta": rope["rope_theta"],
            "rope_scaling": None if rope["rope_type"] == "default" else rope}
        if self.model_type == "qwen2":
            values["use_sliding_window"] = self.sliding_window is not None
        path.write_text(json.dumps(values, indent=2) + "\n")


def rotary_angles(config, begin, count, device):
    rope, E = config.rope_parameters, config.head_dim
    kind, theta, factor = rope["rope_type"], rope["rope_theta"], rope.get("factor", 1)
    longer = (begin + count) / config.max_position_embeddings
    if kind == "dynamic" and longer > 1:
        theta *= (factor * longer - (factor - 1)) ** (E / (E - 2))
    rates = theta ** (-torch.arange(0, E, 2, dtype=torch.float64, device=device) / E)
    if kind == "linear":
        rates = rates / factor
    if kind == "llama3":
        low, high = rope.get("low_freq_factor", 1), rope.get("high_freq_factor", 4)
        trained = rope.get("original_max_position_embeddings", config.max_position_embeddings)
        fast = ((rates * trained / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        rates = rates * (fast + (1 - fast) / factor)
    positions = torch.arange(begin, begin + count, dtype=torch.float64, device=device)
    angles = torch.outer(positions, rates).repeat(1, 2)
    return angles.cos().float(), angles.sin().float()


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return (x * cos + torch.cat([-second, first], -1) * sin).type_as(x)


def visible(past, T, window, device):
    S = past + T
    cut = window is not None and window < S
    if past == 0 and not cut:
        return {"is_causal": True}
    if T == 1 and not cut:
        return {}
    mask = torch.ones(T, S, dtype=torch.bool, device=device).tril(past)
    return {"attn_mask": mask.triu(past - window + 1) if cut else mask}


class KvCache:
    def __init__(self, config, batch, capacity, dtype, device):
        shape = (config.num_hidden_layers, batch, config.num_key_value_heads, capacity,
                 config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.length = 0

    def append(self, layer, keys, values):
        end = self.length + keys.size(2)
        if end > self.keys.size(3):
            raise ValueError(f"the cache has room for {self.keys.size(3)} tokens, not for {end}")
        self.keys[layer, :, :, self.length:end] = keys
        self.values[layer, :, :, self.length:end] = values
        return self.keys[layer, :, :, :end], self.values[layer, :, :, :end]


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config, self.layer = config, layer
        width, heads = config.hidden_size, config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, heads, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.qkv_bias)
        self.o_proj = nn.Linear(heads, width, bias=config.attention_bias)

    def forward(self, x, angles, masks, cache):
        B, T, _ = x.shape
        q, k, v = (project(x).view(B, T, -1, self.config.head_dim).transpose(1, 2)
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, *angles), rotate(k, *angles)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        mask = masks[self.config.window_of(self.layer)]
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **mask)
        return self.o_proj(mixed.transpose(1, 2).reshape(B, T, -1))


class GatedMlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(width, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, width, bias=config.mlp_bias)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, layer)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMlp(config)

    def forward(self, x, angles, masks, cache):
        x = x + self.self_attn(self.input_layernorm(x), angles, masks, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, tokens, cache):
        past, T = cache.length if cache is not None else 0, tokens.size(1)
        angles = rotary_angles(self.config, past, T, tokens.device)
        masks = {window: visible(past, T, window, tokens.device)
                 for window in {None, self.config.sliding_window}}
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, angles, masks, cache)
        if cache is not None:
            cache.length += T
        return self.norm(x)


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.apply(self.initialise)
        self.tie()

    def initialise(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, 0, self.config.initializer_range)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)

    def tie(self):
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens, targets=None, last_only=False, cache=None):
        x = self.model(tokens, cache)
        if targets is None:
            return self.lm_head(x[:, -1:] if last_only else x)
        return F.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())

    @classmethod
    def load(cls, folder):
        folder = Path(folder)
        config = LlamaConfig.read(folder / "config.json")
        state = {}
        for file in folder.glob("model*.safetensors"):
            state.update(load_file(file))
        state = {name: tensor for name, tensor in state.items()
                 if not name.endswith("rotary_emb.inv_freq")}
        if config.tie_word_embeddings:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        with torch.device("meta"):
            model = cls(config)
        model.load_state_dict(state, assign=True)
        model.tie()
        return model

    def save(self, folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        tied = ["lm_head.weight"] if self.config.tie_word_embeddings else None
        save_torch_model(self, folder, max_shard_size="10GB", shared_tensors_to_discard=tied)
        self.config.write(Path(folder) / "config.json", self.model.embed_tokens.weight.dtype)


class LoraLinear(nn.Module):
    def __init__(self, base, rank, scaling):
        super().__init__()
        self.base_layer, self.scaling = base, scaling
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        y = self.base_layer(x)
        return (y + self.scaling * self.lora_B(self.lora_A(x.float()))).type_as(y)

    @torch.no_grad()
    def merge(self):
        weight = self.base_layer.weight
        weight.copy_(weight + self.scaling * (self.lora_B.weight @ self.lora_A.weight))
        return self.base_layer


def lora_layers(model):
    return {name: module for name, module in model.named_modules()
            if isinstance(module, LoraLinear)}


def add_lora(model, rank, alpha):
    model.requires_grad_(False)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if model.config.tie_word_embeddings:
        names.remove("lm_head")
    for name in names:
        model.set_submodule(name, LoraLinear(model.get_submodule(name), rank, alpha / rank))
    total = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"adapters on {len(names)} layers: {trainable} of {total} numbers learn")


def save_lora(model, folder, rank, alpha):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    state = {f"base_model.model.{name}.{part}.weight": getattr(module, part).weight.contiguous()
             for name, module in lora_layers(model).items() for part in ("lora_A", "lora_B")}
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0,
              "bias": "none", "target_modules": list(lora_layers(model))}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_lora(model, folder):
    config = json.loads((Path(folder) / "adapter_config.json").read_text())
    if config.get("use_dora") or config.get("bias", "none") != "none":
        raise ValueError(f"{folder}: adapters with DoRA or biases are not known")
    root = math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
    state = {name.removeprefix("base_model.model."): tensor for name, tensor
             in load_file(Path(folder) / "adapter_model.safetensors").items()}
    for name in [key.removesuffix(".lora_A.weight") for key in state if "lora_A" in key]:
        base = model.get_submodule(name)
        model.set_submodule(name, LoraLinear(base, config["r"], config["lora_alpha"] / root))
    unexpected = model.load_state_dict(state, strict=False).unexpected_keys
    if unexpected:
        raise ValueError(f"{folder}: the model has no place for {unexpected}")


def merge_lora(model):
    for name, module in lora_layers(model).items():
        model.set_submodule(name, module.merge())


def read_tokens(path):
    data = np.memmap(path, np.uint8, "r")
    if data[:8].tobytes() != b"TSTOKENS":
        return data, 256
    width, count, vocab_size, checksum = (
        data[begin:end].view(dtype)[0] for begin, end, dtype in
        ((12, 16, "<u4"), (16, 24, "<u8"), (24, 32, "<u8"), (32, 36, "<u4")))
    ids = data[64:]
    if ids.size != width * count or zlib.crc32(ids) != checksum:
        raise ValueError(f"{path} is damaged; write it again")
    return ids.view(f"<u{width}"), int(vocab_size)


def windows(tokens, starts, context):
    rows = np.stack([tokens[start:start + context + 1] for start in starts])
    rows = torch.from_numpy(rows.astype(np.int64))
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def validation_loss(model, tokens, context):
    model.eval()
    starts = range(0, len(tokens) - 1, context)[:32]
    losses = [model(*windows(tokens, [start], context)).item() for start in starts]
    model.train()
    return sum(losses) / len(losses)


def train(o):
    torch.manual_seed(o.seed)
    tokens, vocab_size = read_tokens(o.data)
    if o.model:
        model = Llama.load(o.model)
    else:
        model = Llama(LlamaConfig(
            num_hidden_layers=o.layers, hidden_size=o.width, intermediate_size=o.inner,
            num_attention_heads=o.heads, num_key_value_heads=o.kv_heads))
    if vocab_size > model.config.vocab_size:
        raise ValueError(f"{o.data!r} has ids below {vocab_size}, the model knows "
                         f"{model.config.vocab_size}; make the ids with the model's own tokenizer")
    if o.lora:
        add_lora(model, o.lora, 2 * o.lora)
    context = o.context or model.config.max_position_embeddings
    boundary = len(tokens) * 9 // 10
    if boundary <= context or len(tokens) - boundary < 2:
        raise ValueError(f"{o.data!r} has {len(tokens)} tokens; windows of {context} need more. "
                         "Give a longer text or a shorter --context")
    known, held_out = tokens[:boundary], tokens[boundary:]
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=o.lr, betas=(0.9, 0.95), weight_decay=0.01)
    warmup = o.steps // 20

    def rate(step):
        if step < warmup:
            return step / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (o.steps - warmup))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    print(f"before: validation loss {validation_loss(model, held_out, context):.4f}")
    begin = time.perf_counter()
    for step in range(1, o.steps + 1):
        starts = torch.randint(len(known) - context, (o.batch_size,)).tolist()
        loss = model(*windows(known, starts, context))
        loss.backward()
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == o.steps:
            speed = step * o.batch_size * context / (time.perf_counter() - begin)
            print(f"step {step}  loss {loss.item():.4f}  {speed:.0f} tokens/s", flush=True)
    print(f"after: validation loss {validation_loss(model, held_out, context):.4f}")
    if not o.save:
        return
    if o.lora and not o.merge:
        save_lora(model, o.save, o.lora, 2 * o.lora)
        return
    merge_lora(model)
    model.save(o.save)


def sample(logits, o, generator):
    if o.temperature == 0:
        return logits.argmax().item()
    logits, order = logits.double().sort(descending=True, stable=True)
    if o.top_k > 0:
        logits = logits[:o.top_k]
    weights = torch.softmax(logits / o.temperature, 0)
    weights[weights.cumsum(0) - weights >= o.top_p] = 0
    return order[torch.multinomial(weights, 1, generator=generator)].item()


@torch.no_grad()
def generate(model, prompt, o):
    model.eval()
    table = model.model.embed_tokens.weight
    generator = torch.Generator().manual_seed(o.seed)
    cache = KvCache(model.config, 1, len(prompt) + o.tokens, table.dtype, table.device)
    fresh = torch.tensor([prompt], device=table.device)
    for _ in range(o.tokens):
        logits = model(fresh, last_only=True, cache=cache)
        token = sample(logits.flatten().cpu(), o, generator)
        if token in model.config.end_of_text:
            return
        yield token
        fresh = torch.tensor([[token]], device=table.device)


def write(o):
    model = Llama.load(o.model)
    if o.adapter:
        load_lora(model, o.adapter)
        merge_lora(model)
    if o.dtype:
        model.to({"f32": torch.float32, "bf16": torch.bfloat16}[o.dtype])
    if bool(o.ids) == bool(o.prompt):
        raise ValueError("give either --prompt or --ids, numbers with spaces between")
    if o.temperature < 0 or o.top_k < 0 or o.top_p <= 0:
        raise ValueError("needs temperature >= 0, top_k >= 0 and top_p > 0; got "
                         f"{o.temperature}, {o.top_k}, {o.top_p}")
    if o.prompt and model.config.vocab_size != 256:
        raise ValueError("bytes are tokens of models with 256 of them, and this one has "
                         f"{model.config.vocab_size}; give --ids, made by its tokenizer")
    tokens = [int(word) for word in o.ids.split()] or list(o.prompt.encode())
    text = codecs.getincrementaldecoder("utf-8")("replace")
    print(o.ids or o.prompt, end="")
    for token in generate(model, tokens, o):
        print(f" {token}" if o.ids else text.decode(bytes([token])), end="", flush=True)
    print(text.decode(b"", True))


def positive(text):
    if int(text) <= 0:
        raise argparse.ArgumentTypeError("must be positive")
    return int(text)


def main():
    parser = argparse.ArgumentParser(description="Trains a Llama, and lets it go on with a text.")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("train", help="a Llama, or adapters on one")
    command.set_defaults(run=train)
    add = command.add_argument
    add("--data", required=True, help="a token file, or a text, whose bytes are tokens")
    add("--model", help="folder of transformers to go on from")
    add("--save", help="folder for the model, or for the adapters")
    add("--lora", type=int, default=0, help="rank of adapters on all linear layers; 0: train all")
    add("--merge", action="store_true", help="save the model with the adapters in it")
    add("--layers", type=int, default=4, help="of a new model, as those below")
    add("--width", type=int, default=128, help="features of a token")
    add("--inner", type=int, default=344, help="features within the perceptron")
    add("--heads", type=int, default=4, help="of queries")
    add("--kv-heads", type=int, default=2, help="of keys and values")
    add("--context", type=int, default=0, help="tokens of a window; default: the model's")
    add("--steps", type=positive, default=200, help="batches")
    add("--batch-size", type=positive, default=16, help="windows")
    add("--lr", type=float, default=1e-3, help="highest rate")
    add("--seed", type=int, default=1, help="of values and windows")
    add("--threads", type=int, default=0, help="0: one a core")
    command = commands.add_parser("generate", help="lets a Llama go on with a text")
    command.set_defaults(run=write)
    add = command.add_argument
    add("--model", required=True, help="folder with config.json and safetensors")
    add("--adapter", help="folder with adapter_config.json")
    add("--prompt", default="", help="a text whose bytes are tokens; the result is printed so")
    add("--ids", default="", help="token ids instead; the result is printed as ids")
    add("--tokens", type=int, default=100, help="new tokens")
    add("--temperature", type=float, default=1, help="0: always the most likely token")
    add("--top-k", type=int, default=0, help="only the k most likely tokens; 0: all")
    add("--top-p", type=float, default=1, help="only tokens that together have this probability")
    add("--seed", type=int, default=0, help="of the random choices")
    add("--dtype", choices=["f32", "bf16"], help="default: as saved")
    add("--threads", type=int, default=0, help="0: one a core")
    options = parser.parse_args()
    if options.threads > 0:
        torch.set_num_threads(options.threads)
    try:
        options.run(options)
    except Exception as error:
        print(f"llama: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
