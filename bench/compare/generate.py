#!/usr/bin/env python3
"""Tokens a second of generation in tessera and in transformers, in turn.

    python bench/compare/generate.py --bench build/release/bench/bench_generate --json out/generate.json
    python bench/compare/generate.py --models llama-125m --dtype bf16 --batch-size 1

Makes the models with random weights, as transformers saves them, in --folder, starts both programs of a cell (model,
dtype, batch) and lets them generate after each other, round after round. The least time of a generation is reported,
its prompt included; with one thread it is the processor's time, so that a machine may be shared. "floor" is the share
that only reading the weights, at GB/s, has in tessera's time; a batch reads them once for all its texts. Texts are
greedy; "equal" says how many tokens agree with transformers' from the beginning (random weights have near ties, which
bf16 decides otherwise).

Needs the packages of bench/requirements.txt in the Python that runs this.
"""
import argparse
import json
import pathlib
import sys
import tempfile

from run import HERE, Program, cpu_settings

MODELS = {
    "gpt2-6x384": dict(vocab_size=256, n_positions=1024, n_embd=384, n_layer=6, n_head=6),
    "gpt2-6x384-50257": dict(vocab_size=50257, n_positions=1024, n_embd=384, n_layer=6, n_head=6),
    "llama-125m": dict(vocab_size=50257, hidden_size=768, intermediate_size=2048,
                       num_hidden_layers=12, num_attention_heads=12, num_key_value_heads=12,
                       max_position_embeddings=2048, tie_word_embeddings=True),
    "tiny": dict(vocab_size=256, n_positions=256, n_embd=64, n_layer=2, n_head=2),
    "tiny-llama": dict(vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
                       num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256),
}


def make(name, folder):
    """The model's folder, made if it is not there."""
    if (folder / "config.json").exists():
        return
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    sizes = MODELS[name]
    # Wider than at the beginning of a training, so that texts are not one token again and again.
    if "n_embd" in sizes:
        model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.08, bos_token_id=None,
                                           eos_token_id=None))
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.08, bos_token_id=None,
                                             eos_token_id=None))
    model.save_pretrained(folder)


def agreeing(ours, theirs):
    return sum(next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), len(x))
               for x, y in zip(ours, theirs))


def compare(arguments, folder, dtype, batch_size):
    common = [str(folder), "--batch-size", str(batch_size), "--dtype", dtype, "--tokens",
              str(arguments.tokens), "--prompt-tokens", str(arguments.prompt_tokens), "--threads",
              str(arguments.threads), "--warmup", str(arguments.warmup), "--serve"]
    programs = [Program("tessera", [arguments.bench, *common], arguments.threads),
                Program("transformers", [sys.executable, str(HERE / "transformers_generate.py"),
                                         *common], arguments.threads)]
    for _ in range(arguments.rounds):
        for program in programs:
            program.steps(arguments.times)
    ours, theirs = [program.finish() for program in programs]
    count = batch_size * arguments.tokens
    return {"batch_size": batch_size, "dtype": dtype,
            "tokens_per_s": 1e3 * count / ours["ms_fastest"],
            "transformers_tokens_per_s": 1e3 * count / theirs["ms_fastest"],
            "ratio": theirs["ms_fastest"] / ours["ms_fastest"],
            "weight_bytes": ours["weight_bytes"], "read_ms": ours["read_ms"],
            "floor": ours["read_ms"] * arguments.tokens / ours["ms_fastest"],
            "equal": agreeing(ours["tokens"], theirs["tokens"]), "tokens": count,
            "instruction_sets": [ours["instruction_set"], theirs["instruction_set"]]}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bench", default="build/bench/bench_generate",
                        help="the program bench_generate")
    parser.add_argument("--models", nargs="+", choices=list(MODELS),
                        default=[name for name in MODELS if not name.startswith("tiny")])
    parser.add_argument("--dtype", nargs="+", choices=["f32", "bf16"], default=["f32", "bf16"])
    parser.add_argument("--batch-size", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--times", type=int, default=1, help="generations a turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="for the models; default: one that is removed")
    parser.add_argument("--json", help="write the results to this file")
    arguments = parser.parse_args()
    for name, value in cpu_settings().items():
        print(f"{name}: {value}")
    print(f"{'model':<18} {'dtype':<5} {'batch':>5} {'tokens/s':>9} {'transformers':>12} {'ratio':>7} "
          f"{'GB/s':>6} {'floor':>6} {'equal':>9}")
    cells = []
    with tempfile.TemporaryDirectory() as temporary:
        for name in arguments.models:
            folder = pathlib.Path(arguments.folder or temporary) / name
            make(name, folder)
            for dtype in arguments.dtype:
                for batch_size in arguments.batch_size:
                    cell = compare(arguments, folder, dtype, batch_size)
                    cells.append({"model": name, **cell})
                    rate = cell["weight_bytes"] / cell["read_ms"] / 1e6
                    equal = f"{cell['equal']}/{cell['tokens']}"
                    print(f"{name:<18} {dtype:<5} {batch_size:>5} {cell['tokens_per_s']:>9.1f} "
                          f"{cell['transformers_tokens_per_s']:>12.1f} {cell['ratio']:>6.2f}x "
                          f"{rate:>6.1f} {cell['floor']:>6.2f} {equal:>9}", flush=True)
    print("instruction sets: tessera {}, transformers {}".format(*cells[0]["instruction_sets"]))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(cells, indent=2) + "\n")


if __name__ == "__main__":
    main()
