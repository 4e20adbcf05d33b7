#!/usr/bin/env python3
"""The losses of a GPT in fp8 beside torchao's emulation, from the same weights and batches.

Both sides train with AdamW and clipping as pytorch_gpt.py does, in bf16 autocast with the linear
layers in fp8, and once more without fp8. torchao runs with emulate=True, which needs no GPU.

    .venv/bin/pip install -r bench/requirements.txt torchao==0.18.0
    python bench/compare/fp8_losses.py --build build/release --text tinyshakespeare.txt

Prints a table of losses and relative differences, and the largest of them; --json FILE keeps all.
"""
import argparse
import dataclasses
import json
import os
import subprocess
import tempfile

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--build", required=True, help="folder with bench/bench_step")
parser.add_argument("--text", required=True, help="a text, whose bytes are the tokens")
parser.add_argument("--recipe", default="tensorwise",
                    choices=["tensorwise", "rowwise", "rowwise_with_gw_hp"])
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--heads", type=int, default=4)
parser.add_argument("--context", type=int, default=64)
parser.add_argument("--batch-size", type=int, default=12)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--json")
arguments = parser.parse_args()

import torch  # noqa: E402  (after argparse: --help needs no torch)
from safetensors.torch import save_file  # noqa: E402
from torchao.float8 import convert_to_float8_training  # noqa: E402
from torchao.float8.config import Float8LinearConfig  # noqa: E402

from pytorch_models import Gpt  # noqa: E402

VOCAB = 256
torch.set_num_threads(arguments.threads)
torch.manual_seed(arguments.seed)
model = Gpt(arguments.layers, arguments.width, arguments.heads, arguments.context, VOCAB)
initial = {name: value.clone() for name, value in model.state_dict().items()}
text = torch.frombuffer(bytearray(open(arguments.text, "rb").read()), dtype=torch.uint8)
starts = torch.randint(len(text) - arguments.context - 1, (arguments.steps, arguments.batch_size))
tokens = torch.stack([torch.stack([text[s:s + arguments.context + 1] for s in row]) for row in starts.tolist()]).long()


def write_gpt2(folder):
    """config.json and model.safetensors of transformers' GPT2LMHeadModel."""
    names = {"c_attn": "attn.c_attn", "c_proj": "attn.c_proj", "c_fc": "mlp.c_fc", "mlp_proj": "mlp.c_proj"}
    weights = {}
    for name, value in initial.items():
        parts = name.split(".")
        if parts[0] == "blocks":
            if parts[2] in names and parts[3] == "weight":  # Conv1D: [in, out]
                value = value.t()
            name = ".".join(["h", parts[1], names.get(parts[2], parts[2]), parts[3]])
        weights[f"transformer.{name}"] = value.contiguous()
    save_file(weights, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    config = {"model_type": "gpt2", "vocab_size": VOCAB, "n_positions": arguments.context,
              "n_embd": arguments.width, "n_layer": arguments.layers, "n_head": arguments.heads,
              "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new",
              "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    save_file({"tokens": tokens}, os.path.join(folder, "batches.safetensors"))


def torch_losses(fp8):
    model.load_state_dict(initial)
    trained = model
    if fp8:
        # The head is a product of its own (F.linear), no module: it stays in bf16.
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(arguments.recipe), emulate=True)
        trained = convert_to_float8_training(model, config=config)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    losses = []
    for batch in tokens:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = trained(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses


def tessera_losses(folder, dtype):
    command = [os.path.join(arguments.build, "bench", "bench_step"), "--dtype", dtype, "--threads",
               str(arguments.threads), "--fp8-filter", "default", "--weights", folder, "--batches",
               os.path.join(folder, "batches.safetensors")]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["losses"]


with tempfile.TemporaryDirectory() as folder:
    write_gpt2(folder)
    ours = {"bf16": tessera_losses(folder, "autocast-bf16"), "fp8": tessera_losses(folder, f"fp8-{arguments.recipe}")}
theirs = {"bf16": torch_losses(False), "fp8": torch_losses(True)}  # fp8 last: it changes the model


def relative(a, b):
    return [abs(x - y) / abs(y) for x, y in zip(a, b)]


differences = {kind: relative(ours[kind], theirs[kind]) for kind in ours}
effect = relative(theirs["fp8"], theirs["bf16"])
print("| step | torchao | tessera | apart | bf16: PyTorch | tessera | apart | fp8 from bf16, PyTorch |")
print("|---|---|---|---|---|---|---|---|")
for i in range(arguments.steps):
    print(f"| {i + 1} | {theirs['fp8'][i]:.5f} | {ours['fp8'][i]:.5f} | {differences['fp8'][i]:.1e} "
          f"| {theirs['bf16'][i]:.5f} | {ours['bf16'][i]:.5f} | {differences['bf16'][i]:.1e} | {effect[i]:.1e} |")
print(f"\nlargest relative difference of {arguments.steps} losses: fp8 {max(differences['fp8']):.2e}, "
      f"bf16 {max(differences['bf16']):.2e}")
if arguments.json:
    with open(arguments.json, "w") as file:
        json.dump({"torch": torch.__version__, "options": vars(arguments), "tessera": ours, "pytorch": theirs}, file, indent=1)
