import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer


class Examples(Dataset):
    def __init__(self, file, tokenizer):
        self.tokenizer = tokenizer
        with open(file) as lines:
            self.examples = [self.encode(json.loads(line)) for line in lines]

    def encode(self, line):
        if "messages" in line:
            out = self.tokenizer.apply_chat_template(
                line["messages"], return_dict=True, return_assistant_tokens_mask=True)
            return out["input_ids"], out["assistant_masks"]
        out = self.tokenizer(line["prompt"] + line["completion"] + self.tokenizer.eos_token,
                             return_offsets_mapping=True)
        border = len(line["prompt"])
        return out["input_ids"], [int(end > border) for _, end in out["offset_mapping"]]

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, index):
        return self.examples[index]

    def collate(self, examples):
        width = max(len(ids) for ids, _ in examples)
        batch = {"input_ids": [], "labels": [], "attention_mask": []}
        for ids, learned in examples:
            rest = width - len(ids)
            labels = [i if on else -100 for i, on in zip(ids, learned)]
            batch["input_ids"].append(ids + [self.tokenizer.eos_token_id] * rest)
            batch["labels"].append(labels + [-100] * rest)
            batch["attention_mask"].append([1] * len(ids) + [0] * rest)
        return {name: torch.tensor(rows) for name, rows in batch.items()}


def fine_tune(folder, file, output, question):
    set_seed(1)
    accelerator = Accelerator()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder),
        LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    examples = Examples(file, tokenizer)
    loader = DataLoader(examples, batch_size=2, shuffle=True, collate_fn=examples.collate)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = mean = 0
    for epoch in range(5):
        mean = 0
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            mean += loss.item() / len(loader)
        if epoch == 0:
            first = mean
        accelerator.print(f"epoch {epoch}: loss {mean}")
    model = accelerator.unwrap_model(model)
    model.save_pretrained(output)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True, return_tensors="pt")
    model.eval()
    answer = model.generate(**prompt.to(model.device), max_new_tokens=20, do_sample=False)
    accelerator.print(tokenizer.decode(answer[0, prompt["input_ids"].shape[1]:]))
    assert mean < 0.9 * first, f"learned nothing: {first} became {mean}"


if __name__ == "__main__":
    fine_tune(*sys.argv[1:])
