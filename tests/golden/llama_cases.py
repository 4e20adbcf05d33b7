"""Small Llama, Mistral and Qwen2 of transformers with random weights: the folders llama/, mistral/ and
qwen2/ as transformers writes them, llama.safetensors and llama.json what it calculates in float64.

llama/ has grouped queries, a head of its own, frequencies scaled by "llama3", and its weights in shards;
mistral/ a sliding window; qwen2/ biases of queries, keys and values, a tied head, and a window from its
second layer on. Two further cases are the weights of llama/ with another rotary scaling (rope_parameters).

llama.safetensors: input_ids, prompt, and of each case CASE.logits (the last six positions) and CASE.greedy
(prompt and what follows, by a cache). llama.json: {CASE: {"folder", "rope_parameters", "loss",
"norms": {parameter: norm of its gradient}}}.
"""

import json
import os
import shutil

import torch
import transformers
from torch import nn

from golden_io import HERE, save_tensors

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 2, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": None}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
          "original_max_position_embeddings": 12}


def models():
    t = transformers
    yield "llama", t.LlamaForCausalLM, t.LlamaConfig(**SIZES, rope_parameters=LLAMA3, rms_norm_eps=1e-5), "30KB"
    yield "mistral", t.MistralForCausalLM, t.MistralConfig(**SIZES, sliding_window=5), "1GB"
    yield "qwen2", t.Qwen2ForCausalLM, t.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=1, tie_word_embeddings=True), "1GB"


def write_folder(name, kind, config, shard_size):
    torch.manual_seed(70)
    model = kind(config)
    with torch.no_grad():
        for p in model.parameters():  # biases and norms too: zeros and ones would hide mistakes
            p += 0.3 * torch.randn_like(p)
    folder = os.path.join(HERE, name)
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder, max_shard_size=shard_size)
    os.remove(os.path.join(folder, "generation_config.json"))
    for file in os.listdir(folder):
        os.chmod(os.path.join(folder, file), 0o644)


def case(folder, rope=None):
    path = os.path.join(HERE, folder)
    config = transformers.AutoConfig.from_pretrained(path)
    if rope:
        config.rope_parameters = rope
    model = transformers.AutoModelForCausalLM.from_pretrained(path, config=config, attn_implementation="eager").double().eval()
    generator = torch.Generator().manual_seed(71)
    ids = torch.randint(0, 61, (2, 22), generator=generator)
    prompt = ids[:1, :6]
    logits = model(ids).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    norms = {name: p.grad.norm().item() for name, p in model.named_parameters()}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, config=config, attn_implementation="eager").double().eval()
    with torch.no_grad():
        greedy = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=18, do_sample=False, pad_token_id=0)
    return ids, prompt, logits[:, -6:].detach(), greedy, {"folder": folder, "rope_parameters": rope, "loss": loss.item(), "norms": norms}


def write_all():
    tensors, records = {}, {}
    for model in models():
        write_folder(*model)
    for name, folder, rope in (("llama", "llama", None), ("mistral", "mistral", None), ("qwen2", "qwen2", None),
                               ("linear", "llama", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}),
                               ("dynamic", "llama", {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0})):
        tensors["input_ids"], tensors["prompt"], tensors[f"{name}.logits"], tensors[f"{name}.greedy"], records[name] = case(folder, rope)
    save_tensors("llama.safetensors", tensors)
    with open(os.path.join(HERE, "llama.json"), "w") as file:
        json.dump(records, file, indent=1)
        file.write("\n")
    print({name: (record["loss"], tensors[f"{name}.greedy"][0, 6:].tolist()) for name, record in records.items()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_all()
