"""Small decoders of every kind that nn::models::Llama reads, from transformers with random weights: decoders/NAME/
as transformers writes them (weights in bf16, so that the files are small), decoders.safetensors and decoders.json
what it calculates with them in float64; texts in float32.

decoders.safetensors: input_ids, and of each case NAME.logits (the last six positions). decoders.json: {NAME: {"loss",
"norms": {parameter: norm of its gradient}, "prompts", "ends", "greedy", "beams": [{options, "texts", "scores"}],
"repetition"}}. Texts are new tokens without the end.
"""

import json
import os
import shutil
import warnings

import torch
import transformers
from torch import nn

from golden_io import HERE, save_tensors

t = transformers
SIZES = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 3, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": None}
THREE = ["sliding_attention", "full_attention", "sliding_attention"]
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.0, 2.0, 3.5, 6.0]}


def sizes(**more):
    return {**SIZES, **more}


def configs():
    yield "llama1", t.LlamaConfig(**sizes(num_key_value_heads=None, attention_bias=True, mlp_bias=True, num_hidden_layers=2))
    yield "llama_yarn", t.LlamaConfig(**sizes(head_dim=16, rope_parameters={
        "rope_type": "yarn", "rope_theta": 300.0, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 3.0, "beta_slow": 0.5}))
    yield "mistral_heads", t.MistralConfig(**sizes(sliding_window=5, head_dim=8, rms_norm_eps=1e-5))
    yield "mistral_full", t.MistralConfig(**sizes(sliding_window=None, tie_word_embeddings=True, rope_parameters={
        "rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}))
    yield "qwen2_layers", t.Qwen2Config(**sizes(use_sliding_window=True, sliding_window=4, layer_types=THREE, tie_word_embeddings=True))
    yield "qwen3", t.Qwen3Config(**sizes(head_dim=8, attention_bias=True, use_sliding_window=True, sliding_window=6, max_window_layers=2))
    yield "qwen3_yarn", t.Qwen3Config(**sizes(head_dim=8, tie_word_embeddings=True, rope_parameters={
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 2.0, "original_max_position_embeddings": 16, "beta_fast": 2.0, "truncate": False,
        "mscale": 0.7, "mscale_all_dim": 1.2}))
    yield "gemma", t.GemmaConfig(**sizes(tie_word_embeddings=False, num_key_value_heads=1, head_dim=8))
    yield "gemma2", t.Gemma2Config(**sizes(tie_word_embeddings=False, head_dim=8, query_pre_attn_scalar=24, sliding_window=5, attn_logit_softcapping=2.0, final_logit_softcapping=3.0))
    yield "gemma3", t.Gemma3TextConfig(**sizes(head_dim=8, query_pre_attn_scalar=12, sliding_window=4, layer_types=THREE, rope_parameters={
        "full_attention": {"rope_type": "linear", "rope_theta": 2000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}))
    yield "gemma3_capped", t.Gemma3TextConfig(**sizes(head_dim=4, query_pre_attn_scalar=4, sliding_window=6, final_logit_softcapping=5.0, attention_bias=True,
                                                       sliding_window_pattern=2, tie_word_embeddings=False))
    yield "phi3", t.Phi3Config(**sizes(sliding_window=6, original_max_position_embeddings=32, num_key_value_heads=4, tie_word_embeddings=True))
    yield "phi3_long", t.Phi3Config(**sizes(hidden_size=32, original_max_position_embeddings=12, rope_parameters={
        "rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 1.0, **FACTORS}))
    yield "phi3_part", t.Phi3Config(**sizes(hidden_size=64, num_hidden_layers=2, original_max_position_embeddings=32, rope_parameters={
        "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}))


def write_folder(name, config):
    torch.manual_seed(80)
    model = t.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for p in model.parameters():  # biases and norms too: zeros and ones would hide mistakes
            p += 0.35 * torch.randn_like(p)
    folder = os.path.join(HERE, "decoders", name)
    shutil.rmtree(folder, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(folder)
    os.remove(os.path.join(folder, "generation_config.json"))
    for file in os.listdir(folder):
        os.chmod(os.path.join(folder, file), 0o644)


def load(name, dtype=torch.float64):
    return t.AutoModelForCausalLM.from_pretrained(os.path.join(HERE, "decoders", name), dtype=dtype, attn_implementation="eager").eval()


def new_tokens(texts, length, ends):
    result = []
    for text in texts[:, length:].tolist():
        cut = [i for i, token in enumerate(text) if token in ends]
        result.append(text[:cut[0]] if cut else text)
    return result


def generations(name, ids):
    """Prompts of different lengths, padded at the left; ends that some of the texts reach."""
    model = load(name, torch.float32)  # transformers' mask of a row that sees nothing is NaN in float64
    length = 6

    def generate(**options):
        padded = torch.tensor([[0] * (length - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts])
        with torch.no_grad():
            return model.generate(padded, attention_mask=mask, do_sample=False, pad_token_id=0, max_new_tokens=14, **options)

    best = []
    for seed in range(25):  # until texts end, and late
        generator = torch.Generator().manual_seed(seed)
        tried = [torch.randint(2, 61, (n,), generator=generator).tolist() for n in (3, 6, 5)]
        prompts = tried
        late = [[token for token in text if 2 <= text.index(token) <= 10] for text in generate()[:, length:].tolist()]
        ends = sorted({tokens[len(tokens) // 2] for tokens in late[:2] if tokens})
        if not ends:
            continue
        score = sum(2 < len(text) < 12 for text in new_tokens(generate(eos_token_id=ends), length, ends))
        best = max(best, [score, -seed, tried, ends])
        if score == 3:
            break
    prompts, ends = best[2:]
    record = {"prompts": prompts, "ends": ends, "greedy": new_tokens(generate(eos_token_id=ends), length, ends), "beams": []}
    for options in ({"num_beams": 3}, {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True},
                    {"num_beams": 2, "length_penalty": -0.5, "early_stopping": "never"}, {"num_beams": 3, "length_penalty": 0.7, "early_stopping": "never"}):
        out = generate(eos_token_id=ends, return_dict_in_generate=True, output_scores=True, **options)
        record["beams"].append({**options, "texts": new_tokens(out.sequences, length, ends), "scores": out.sequences_scores.tolist()})
    with torch.no_grad():
        again = model.generate(ids[:, :5], attention_mask=torch.ones_like(ids[:, :5]), do_sample=False, pad_token_id=0, max_new_tokens=12, repetition_penalty=1.7)
    record["repetition"] = again[:, 5:].tolist()
    return record


def case(name, ids):
    model = load(name)
    logits = model(ids).logits
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    norms = {key: p.grad.norm().item() for key, p in model.named_parameters()}
    return logits[:, -6:].detach(), {"loss": loss.item(), "norms": norms, **generations(name, ids)}


def write_all():
    warnings.filterwarnings("ignore")
    t.logging.set_verbosity_error()
    generator = torch.Generator().manual_seed(81)
    ids = torch.randint(2, 61, (2, 22), generator=generator)
    tensors, records = {"input_ids": ids}, {}
    for name, config in configs():
        write_folder(name, config)
        tensors[f"{name}.logits"], records[name] = case(name, ids)
    save_tensors("decoders.safetensors", tensors)
    with open(os.path.join(HERE, "decoders.json"), "w") as file:
        json.dump(records, file)
        file.write("\n")
    print({name: (record["loss"], record["greedy"][0]) for name, record in records.items()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_all()
