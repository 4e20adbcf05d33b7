#!/usr/bin/env python3
"""program_sizes.py: characters of example programs and of the same programs in PyTorch.

Comments, indentation and empty lines are left out on both sides. A program in programs/ is one file, which runs with
PyTorch (own_data with Accelerate, llama with safetensors) and ends as ours does: by 0 where it has learned what it is to
learn. Ours is the file of the same name, or of a folder of that name all sources, and what they use of other examples."""

import ast
import pathlib
import re

HERE = pathlib.Path(__file__).resolve().parent
EXAMPLES = HERE.parent.parent / "examples"
# What a folder's programs use of other examples: files, or definitions by how they begin.
SHARED = {"llama": {"common/model_config.h": None, "common/model_config.cpp": None,
                    "gpt2/generation.h": ["struct GenerateOptions"],
                    "gpt2/generation.cpp": ["int64_t sample(", "void check_request("]}}

# Of a folder, what trains: these of our files, and of theirs all but these definitions.
TRAINING = {"llama": (["config.h", "model.h", "model.cpp", "train.cpp"],
                      ["LlamaConfig.__post_init__", "LlamaConfig.read", "LlamaConfig.write",
                       "Llama.load", "Llama.save", "sample", "generate", "write"])}


def without(path, names):
    """The Python text without definitions: functions, or methods as Class.name."""
    lines = path.read_text().split("\n")
    for parent in ast.walk(ast.parse("\n".join(lines))):
        if not isinstance(parent, (ast.Module, ast.ClassDef)):
            continue
        prefix = "" if isinstance(parent, ast.Module) else parent.name + "."
        for node in parent.body:
            if prefix + getattr(node, "name", "") in names:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                lines[first - 1:node.end_lineno] = [""] * (node.end_lineno - first + 1)
    return "\n".join(lines)


def characters(path, definitions=None, text=None):
    text = text if text is not None else path.read_text()
    if definitions:
        text = "\n".join(re.search(rf"(?ms)^{re.escape(begin)}.*?^\}};?$", text).group()
                         for begin in definitions)
    comment = r"(?m)^\s*#.*$" if path.suffix == ".py" else r"//[^\n]*"
    lines = re.sub(comment, "", text).split("\n")
    return sum(len(line.strip()) + 1 for line in lines if line.strip())


def characters_here(name):
    folder = EXAMPLES / name
    if not folder.is_dir():
        return characters(next(EXAMPLES.glob(f"*/{name}.cpp")))
    own = sum(characters(path) for path in [*folder.glob("*.h"), *folder.glob("*.cpp")])
    return own + sum(characters(EXAMPLES / path, definitions)
                     for path, definitions in SHARED.get(name, {}).items())


def main():
    print("| program | here | PyTorch | ratio |\n|---|---|---|---|")
    for python in sorted((HERE / "programs").glob("*.py")):
        ours, theirs = characters_here(python.stem), characters(python)
        print(f"| {python.stem} | {ours} | {theirs} | {ours / theirs:.2f} |")
        if python.stem in TRAINING:
            files, left_out = TRAINING[python.stem]
            ours = sum(characters(EXAMPLES / python.stem / name) for name in files)
            theirs = characters(python, text=without(python, left_out))
            print(f"| {python.stem}, what trains | {ours} | {theirs} | {ours / theirs:.2f} |")


if __name__ == "__main__":
    main()
