"""Accelerate's disk offload of the folder that bench_big_model --make wrote: load, seconds a token, peak memory.

    .venv/bin/python bench/compare/big_model.py FOLDER [--tokens N] [--threads N]   # torch, transformers, accelerate
"""

import argparse
import resource
import tempfile
import time

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from transformers import AutoConfig, AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--tokens", type=int, default=8)
parser.add_argument("--threads", type=int, default=1)
arguments = parser.parse_args()
torch.set_num_threads(arguments.threads)

start = time.perf_counter()
with init_empty_weights():
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.folder))
model.tie_weights()
with tempfile.TemporaryDirectory(dir=arguments.folder) as offload:
    model = load_checkpoint_and_dispatch(model, arguments.folder, device_map={"": "disk"}, offload_folder=offload)
    load = time.perf_counter() - start
    at = []
    ids, cache = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]]), None
    begin = time.perf_counter()
    with torch.no_grad():
        for _ in range(arguments.tokens):
            out = model(ids, past_key_values=cache, use_cache=True)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            at.append(time.perf_counter() - begin)
    token = (at[-1] - at[0]) / max(len(at) - 1, 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(f"load {load:.3f} s, first token {at[0]:.3f} s, then {token:.3f} s a token\nresident {peak:.0f} MB")
