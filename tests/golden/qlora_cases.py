"""Losses of QLoRA by peft and bitsandbytes on the CPU: a small Llama in qlora/, its adapter as it begins
in qlora/adapter, qlora.json.

qlora.json: tokens [steps, rows, length], and by CASE (FORMAT.DTYPE; dtype f32 or bf16, by autocast) the
losses of 20 steps of AdamW(lr) on the adapters of all layers but lm_head. Weights of the base are bf16
numbers, so that bitsandbytes' way through float16 keeps them, and small, so that in bf16 the losses of two programs which round in
different places stay together: under 0.001 apart from those in f32.

Run with torch, transformers, peft and bitsandbytes: python3 qlora_cases.py. Not a part of generate.py,
which needs no bitsandbytes.
"""

import json
import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what is compiled may be rounded otherwise

import peft
import torch
import transformers

from golden_io import HERE
from lora_cases import settle_config

FOLDER = os.path.join(HERE, "qlora")
LR = 2e-3
FORMATS = {
    "int8": dict(load_in_8bit=True),
    "nf4": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4_double": dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    "fp4": dict(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
}


def load(**options):
    quantization = None
    if options:
        quantization = transformers.BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.float32)
    return transformers.AutoModelForCausalLM.from_pretrained(
        FOLDER, quantization_config=quantization, dtype=torch.float32, attn_implementation="eager")


def clean(folder, keep):
    for name in set(os.listdir(folder)) - keep:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            os.remove(path)
    for name in keep:
        os.chmod(os.path.join(folder, name), 0o644)


def write_base():
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, initializer_range=0.05,
        bos_token_id=1, eos_token_id=None)
    torch.manual_seed(61)
    model = transformers.LlamaForCausalLM(config).bfloat16()
    model.save_pretrained(FOLDER)
    clean(FOLDER, {"config.json", "model.safetensors"})
    adapted = peft.get_peft_model(load(), peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
    folder = os.path.join(FOLDER, "adapter")
    adapted.save_pretrained(folder)
    clean(folder, {"adapter_config.json", "adapter_model.safetensors"})
    settle_config(folder)


def losses_of(options, low, tokens):
    model = load(**options)
    model = peft.PeftModel.from_pretrained(model, os.path.join(FOLDER, "adapter"), is_trainable=True).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    losses = []
    for batch in tokens:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=low):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def write_all():
    write_base()
    torch.manual_seed(67)
    tokens = torch.randint(0, 96, (2, 8, 33)).repeat(10, 1, 1)  # two batches again and again
    cases = {"none.f32": losses_of({}, False, tokens)}
    for name, options in FORMATS.items():
        for short, low in (("f32", False), ("bf16", True)):
            cases[f"{name}.{short}"] = losses_of(options, low, tokens)
    with open(os.path.join(HERE, "qlora.json"), "w") as file:
        json.dump({"lr": LR, "tokens": tokens.tolist(), "losses": cases}, file, separators=(",", ":"))
        file.write("\n")
    for name, losses in cases.items():
        print(f"qlora {name}: {losses[0]:.6f} to {losses[-1]:.6f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_all()
