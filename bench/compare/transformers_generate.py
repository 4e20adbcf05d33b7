"""transformers' generation with a cache as bench_generate has it: the same folder, prompts and options, and the same
lines (--serve). generate.py runs both in turn."""
import argparse
import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def prompts_of(count, length, vocab_size):
    """bench_generate's."""
    state, prompts = 1, []
    for _ in range(count):
        prompt = []
        for _ in range(length):
            state = (state * 1103515245 + 12345) % (1 << 31)
            prompt.append((state >> 8) % vocab_size)
        prompts.append(prompt)
    return prompts


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=["f32", "bf16", "f16"], default="f32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--serve", action="store_true", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[arguments.dtype]
    model = AutoModelForCausalLM.from_pretrained(arguments.folder, dtype=dtype).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor(prompts_of(arguments.batch_size, arguments.prompt_tokens,
                                  model.config.vocab_size))

    clock = time.process_time if arguments.threads == 1 else time.perf_counter

    def turn():
        start = clock()
        with torch.no_grad():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                   max_new_tokens=arguments.tokens, pad_token_id=0)
        return 1e3 * (clock() - start), found[:, ids.shape[1]:].tolist()

    for _ in range(arguments.warmup):
        _, tokens = turn()
    print(json.dumps({"ready": True, "instruction_set": torch.backends.cpu.get_cpu_capability()}),
          flush=True)
    for line in sys.stdin:
        times = []
        for _ in range(int(line)):
            ms, tokens = turn()
            times.append(ms)
        print(json.dumps({"ms": times}), flush=True)
    print(json.dumps({"tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
