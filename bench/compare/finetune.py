"""Fine-tunes a tiny Llama with peft and transformers, and with llama_finetune, on equal batches.

    python bench/compare/finetune.py FOLDER [PROGRAM]

FOLDER gets a model, a tokenizer, an adapter, data.jsonl and losses.json: {"lora", "full": the losses of fifty steps in f32}.
With PROGRAM (build/release/examples/llama/llama_finetune) it is run on them, and the largest relative difference is printed.
tests/golden/finetune is such a folder.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

STEPS, BATCH, RATE, CLIP, LENGTH = 50, 2, 5e-3, 1.0, 40
GOLDEN = Path(__file__).parents[2] / "tests/golden"
SAID = ["the war is over", "a peace of it", "Pierre and the Prince", "yes, and so on", "caf\u00e9s of 1812", "no"]


def lines():
    for i in range(20):
        question, answer = f"What is {i} and {SAID[i % 6]}?", f" {SAID[(i + 2) % 6]} of {i * 7 % 13}."
        if i % 3 == 0:
            yield {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer.strip()},
                                {"role": "user", "content": "And?"}, {"role": "assistant", "content": SAID[i % 5]}]}
        else:
            yield {"prompt": question, "completion": answer * (1 + i % 4)}


def example(tokenizer, line):
    if "messages" in line:
        out = tokenizer.apply_chat_template(line["messages"], return_dict=True, return_assistant_tokens_mask=True)
        ids, learned = out["input_ids"], out["assistant_masks"]
    else:
        out = tokenizer(line["prompt"] + line["completion"] + tokenizer.eos_token, return_offsets_mapping=True)
        ids, border = out["input_ids"], len(line["prompt"])
        learned = [int(end > border) for _, end in out["offset_mapping"]]
    ids, learned = ids[:LENGTH], learned[:LENGTH]
    return ids, [i if on else -100 for i, on in zip(ids, learned)]


def losses_of(model, batches):
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        loss = model(**batches[step % len(batches)]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make(folder):
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(GOLDEN / "tokenizers/llama3/tokenizer.json", folder)
    tokens = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "pad_token": "<|end_of_text|>"}
    chat = (GOLDEN / "chat_templates/marked.jinja").read_text()
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "chat_template": chat}) + "\n")
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), chat_template=chat, **tokens)
    (folder / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines()))
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=40, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.2)
    model = LlamaForCausalLM(config).float()
    model.save_pretrained(folder)
    examples = [example(tokenizer, line) for line in lines()]
    batches = []
    for i in range(0, len(examples), BATCH):
        rows = examples[i:i + BATCH]
        width = max(len(ids) for ids, _ in rows)
        fill = lambda values, by: torch.tensor([v + [by] * (width - len(v)) for v in values])
        ids, labels = fill([r[0] for r in rows], tokenizer.pad_token_id), fill([r[1] for r in rows], -100)
        mask = fill([[1] * len(r[0]) for r in rows], 0)
        batches.append({"input_ids": ids, "labels": labels, "attention_mask": mask})
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    adapted.save_pretrained(folder / "adapter")
    result = {"lora": losses_of(adapted, batches)}
    result["adapted"] = sorted({n.split(".lora_A")[0].removeprefix("base_model.model.")
                                for n, _ in adapted.named_modules() if ".lora_A." in n})
    result["full"] = losses_of(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32), batches)
    (folder / "losses.json").write_text(json.dumps(result, indent=0) + "\n")
    (folder / "adapter/README.md").unlink(missing_ok=True)
    return result


def run(program, folder, more):
    log = folder / "log"
    subprocess.run([program, "--model", folder, "--data", folder / "data.jsonl", "--eval", folder / "data.jsonl", "--output",
                    folder / "out", "--in-order", "--epochs", str(STEPS * BATCH / 20), "--batch-size", str(BATCH), "--lr", str(RATE),
                    "--schedule", "constant", "--clip", str(CLIP), "--max-length", str(LENGTH), "--log", log, *more], check=True)
    return [float(line) for line in log.read_text().split()]


if __name__ == "__main__":
    where = Path(sys.argv[1])
    expected = make(where)
    if len(sys.argv) > 2:
        for kind, more in ("lora", ["--adapter", where / "adapter"]), ("full", ["--lora", "0"]):
            got = run(sys.argv[2], where, more)
            assert len(got) == STEPS
            worst = max(abs(a - b) / abs(b) for a, b in zip(got, expected[kind]))
            print(f"{kind}: losses {expected[kind][0]:.4f} to {expected[kind][-1]:.4f}, largest relative difference {worst:.2e}")
