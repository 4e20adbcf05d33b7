#!/usr/bin/env python3
"""program_sizes.py: characters of example programs and of the same programs in PyTorch.

Comments, indentation and empty lines are left out on both sides. The programs in programs/ run with PyTorch alone and end
as ours do: by 0 where they have learned what they are to learn."""

import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "examples"


def characters(path):
    comment = r"(?m)^\s*#.*$" if path.suffix == ".py" else r"//[^\n]*"
    lines = re.sub(comment, "", path.read_text()).split("\n")
    return sum(len(line.strip()) + 1 for line in lines if line.strip())


def main():
    print("| program | here | PyTorch | ratio |\n|---|---|---|---|")
    for python in sorted((HERE / "programs").glob("*.py")):
        program = next(EXAMPLES.glob(f"*/{python.stem}.cpp"))
        ours, theirs = characters(program), characters(python)
        print(f"| {python.stem} | {ours} | {theirs} | {ours / theirs:.2f} |")


if __name__ == "__main__":
    main()
