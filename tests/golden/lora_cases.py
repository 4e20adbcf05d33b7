"""Adapters of PEFT on the GPT-2 of gpt2/: lora/ is a folder as PEFT writes it, lora.safetensors what
it calculates in float64.

lora.safetensors: logits of the input_ids of gpt2.safetensors (the last three positions), grad.KEY of
the loss by PEFT's keys, merged.NAME for the weights of two adapted layers.
"""

import json
import os

import peft
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from golden_io import HERE, save_tensors

MERGED = ["transformer.h.1.attn.c_attn", "transformer.wpe"]


def settle_config(folder):
    """The configuration that PEFT wrote there, alike on every machine and in every process."""
    path = os.path.join(folder, "adapter_config.json")
    with open(path) as file:
        fields = json.load(file)
    fields["base_model_name_or_path"] = None  # where this machine had it
    fields["target_modules"].sort()  # a set of PEFT's
    with open(path, "w") as file:
        json.dump(fields, file, indent=2, sort_keys=True)
        file.write("\n")


def write_all():
    base = transformers.GPT2LMHeadModel.from_pretrained(os.path.join(HERE, "gpt2"))
    config = peft.LoraConfig(
        r=4, lora_alpha=6, target_modules=["c_attn", "c_proj", "wpe"], exclude_modules=["h.0.mlp.c_proj"],
        bias="lora_only", use_rslora=True, modules_to_save=["ln_f"],
        rank_pattern={"h.1.attn.c_attn": 2}, alpha_pattern={"attn.c_proj": 3})
    torch.manual_seed(41)
    model = peft.get_peft_model(base, config)
    with torch.no_grad():  # B is zeros: that would hide mistakes
        for name, p in model.named_parameters():
            if p.requires_grad:
                p += 0.05 * torch.randn_like(p)
    folder = os.path.join(HERE, "lora")
    model.save_pretrained(folder)
    for stray in set(os.listdir(folder)) - {"adapter_config.json", "adapter_model.safetensors"}:
        os.remove(os.path.join(folder, stray))
    settle_config(folder)
    os.chmod(os.path.join(folder, "adapter_model.safetensors"), 0o644)

    model = model.double().train()
    ids = load_file(os.path.join(HERE, "gpt2.safetensors"))["input_ids"]
    logits = model(ids).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    tensors = {"logits": logits[:, -3:], "loss": loss}
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    for name, grad in grads.items():
        key = name.replace("modules_to_save.default.", "").replace(".default", "")
        tensors[f"grad.{key}"] = grad.float()
    model.merge_adapter()
    for name in MERGED:
        weight = model.base_model.model.get_submodule(name).base_layer.weight
        tensors[f"merged.{name}"] = weight.float()
    save_tensors("lora.safetensors", tensors)
    print(f"lora: loss {loss.item():.6f}, {len(grads)} trained tensors")


if __name__ == "__main__":
    write_all()
