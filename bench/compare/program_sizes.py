#!/usr/bin/env python3
"""program_sizes.py: characters of example programs and of the same programs in PyTorch.

Comments, indentation and empty lines are left out on both sides. A program in programs/ is one file, which runs with
PyTorch (own_data with Accelerate, llama with safetensors, fine_tune_llama with transformers and peft) and ends as ours does: by 0 where it has learned what it is to
learn. Ours is the file of the same name, or programs of a folder of that name."""

import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "examples"
# Of a folder, what does as their program does: its other programs are counted nowhere.
FILES = {"llama": ["train.cpp", "generate.cpp"]}


def characters(path):
    comment = r"(?m)^\s*#.*$" if path.suffix == ".py" else r"//[^\n]*"
    lines = re.sub(comment, "", path.read_text()).split("\n")
    return sum(len(line.strip()) + 1 for line in lines if line.strip())


def characters_here(name):
    if name in FILES:
        return sum(characters(EXAMPLES / name / file) for file in FILES[name])
    return characters(next(EXAMPLES.glob(f"*/{name}.cpp")))


def main():
    print("| program | here | PyTorch | ratio |\n|---|---|---|---|")
    for python in sorted((HERE / "programs").glob("*.py")):
        ours, theirs = characters_here(python.stem), characters(python)
        print(f"| {python.stem} | {ours} | {theirs} | {ours / theirs:.2f} |")


if __name__ == "__main__":
    main()
