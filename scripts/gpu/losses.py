#!/usr/bin/env python3
"""The losses of a GPT beside PyTorch's, from the same weights and batches, within a plan of gpu_run.py.

    losses.py --train TRAIN --tessera BENCH_STEP --text FILE --work FOLDER --layers 6 --width 384 --heads 6 \\
        --context 256 --batch-size 32 --steps 300 --dtype autocast-bf16 fp8-delayed

TRAIN makes the weights (a step on the CPU, saved as transformers has them), batches are bytes of the text, BENCH_STEP trains
once for each --dtype, and PyTorch once in bf16 autocast (pytorch_models.py). Prints a table and a line of JSON, and
fails where the mean of the last tenth of the losses is further than --apart from PyTorch's: 0.05 is no rounding.

--dry-run needs no torch: all but PyTorch's training is done.
"""
import argparse
import array
import json
import math
import pathlib
import random
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
PEER = HERE if (HERE / "pytorch_models.py").exists() else HERE.parents[1] / "bench/compare"
VOCAB = 256  # bytes


def write_batches(path, text, steps, rows, context):
    """"tokens" i64 [steps, rows, context + 1] as safetensors."""
    draw = random.Random(1)
    tokens = array.array("q")
    for _ in range(steps * rows):
        start = draw.randrange(len(text) - context - 1)
        tokens.extend(text[start:start + context + 1])
    header = {"tokens": {"dtype": "I64", "shape": [steps, rows, context + 1],
                         "data_offsets": [0, 8 * len(tokens)]}}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + tokens.tobytes())


def train_torch(options, folder, batches):
    import torch
    from safetensors.torch import load_file
    sys.path.insert(0, str(PEER))
    from pytorch_models import Gpt

    torch.backends.cuda.matmul.allow_tf32 = False
    model = Gpt(options.layers, options.width, options.heads, options.context, VOCAB)
    names = {"attn.c_attn": "c_attn", "attn.c_proj": "c_proj", "mlp.c_fc": "c_fc", "mlp.c_proj": "mlp_proj",
             "ln_1": "ln_1", "ln_2": "ln_2"}
    state = {}
    for name, value in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("transformer.")
        if name.startswith("h."):
            _, layer, *inner, last = name.split(".")
            inner = ".".join(inner)
            if inner not in names:
                continue  # masks that some files have
            if last == "weight" and not inner.startswith("ln_"):  # Conv1D: [in, out]
                value = value.t()
            state[f"blocks.{layer}.{names[inner]}.{last}"] = value
        elif name != "lm_head.weight":  # the table of tokens
            state[name] = value
    model.load_state_dict(state)
    model.to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    losses = []
    for batch in load_file(batches)["tokens"].to(options.device):
        with torch.autocast(options.device, dtype=torch.bfloat16):
            loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    return torch.stack(losses).float().tolist()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("train", "tessera", "text", "work"):
        parser.add_argument("--" + name, required=True)
    for name in ("layers", "width", "heads", "context", "batch-size", "steps"):
        parser.add_argument("--" + name, type=int, required=True)
    parser.add_argument("--dtype", nargs="+", default=["autocast-bf16"], help="of bench_step")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--apart", type=float, default=0.05)
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    folder = pathlib.Path(options.work)
    folder.mkdir(parents=True, exist_ok=True)
    text = pathlib.Path(options.text).read_bytes()
    short = folder / "short.txt"  # one step, whose last tenth is validated on
    short.write_bytes(text[:20 * (options.context + 1)])
    subprocess.run([options.train, "--data", str(short), "--tokenizer", "bytes", "--layers", str(options.layers),
                    "--width", str(options.width), "--heads", str(options.heads), "--context", str(options.context),
                    "--batch-size", "2", "--steps", "1", "--save", str(folder)], check=True,
                   stdout=subprocess.DEVNULL)
    batches = folder / "batches.safetensors"
    write_batches(batches, text, options.steps, options.batch_size, options.context)
    losses = {}
    for dtype in options.dtype:
        done = subprocess.run([options.tessera, "--device", options.device, "--dtype", dtype, "--weights",
                               str(folder), "--batches", str(batches)], check=True, stdout=subprocess.PIPE)
        losses[dtype] = json.loads(done.stdout.splitlines()[-1])["losses"]
        if len(losses[dtype]) != options.steps or not all(map(math.isfinite, losses[dtype])):
            print(f"{dtype}: {len(losses[dtype])} losses, or some that are no numbers: {losses[dtype][-5:]}")
            return 1
    if options.dry_run:
        compile(pathlib.Path(PEER / "pytorch_models.py").read_text(), "pytorch_models.py", "exec")
        print("dry run: the first losses are", {dtype: values[0] for dtype, values in losses.items()})
        return 0
    peer = train_torch(options, folder, batches)
    print("| step | PyTorch | " + " | ".join(losses) + " |\n|---|---|" + "---|" * len(losses))
    shown = range(0, options.steps, max(1, options.steps // 12))
    for step in [*shown, options.steps - 1]:
        print(f"| {step + 1} | {peer[step]:.5f} | "
              + " | ".join(f"{values[step]:.5f}" for values in losses.values()) + " |")
    last = max(1, options.steps // 10)
    end = statistics.fmean(peer[-last:])
    apart = {dtype: statistics.fmean(values[-last:]) / end - 1 for dtype, values in losses.items()}
    print(json.dumps({"losses": "mean of the last tenth", "steps": options.steps, "pytorch": round(end, 5),
                      "apart": {dtype: round(value, 5) for dtype, value in apart.items()}}))
    return int(not all(abs(value) <= options.apart for value in apart.values()))


if __name__ == "__main__":
    sys.exit(main())
