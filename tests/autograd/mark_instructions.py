#!/usr/bin/env python3
"""Says how many instructions ops without a sharded model spend on the check of their operands' marks, and
fails above a limit.

    mark_instructions.py PROGRAM [--limit 10]

PROGRAM is mark_instructions. valgrind's callgrind counts how often each instruction of it runs; debug
information says which of them belong to the check: those of lines of autograd/differentiable.cpp that name marks, and what is
inlined there or called from there. The numbers do not depend on the machine's speed. Exit code 77: there is no
valgrind or addr2line."""
import argparse
import collections
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

FUNCTION = "tessera::DifferentiableCall::run("
SOURCE = pathlib.Path(__file__).resolve().parents[2] / "autograd" / "differentiable.cpp"


def lines_of_check():
    """The numbers of the source's lines that name marks."""
    return {number for number, text in enumerate(SOURCE.read_text().splitlines(), 1)
            if "mark" in text.split("//")[0]}


def instructions(profile, program):
    """Of PROGRAM: address -> instructions, with those of what is called from there; and how often FUNCTION is
    called."""
    costs, calls = collections.Counter(), 0
    names, current = {"ob": {}, "fn": {}}, {"ob": "", "fn": "", "cob": "", "cfn": ""}
    for line in profile.splitlines():
        match = re.match(r"(c?)(ob|fn)=(\(\d+\))(?: (.*))?$", line)  # "(3) name" names it, "(3)" refers to it
        if match:
            caller, kind, number, name = match.groups()
            if name:
                names[kind][number] = name
            current[caller + kind] = names[kind][number]
        elif line.startswith("calls="):
            own = (current["cob"] or current["ob"]) == program and current["cfn"].startswith(FUNCTION)
            calls += int(line[6:].split()[0]) if own else 0
            current["cob"] = ""
        elif line.startswith("0x") and current["ob"] == program:
            address, _, cost = line.split()[:3]
            costs[int(address, 16)] += int(cost)
    return costs, calls


def belong(program, addresses):
    """Those of the addresses that debug information says are the check's."""
    lines = lines_of_check()
    found = subprocess.run(["addr2line", "-i", "-a", "-e", program], text=True, check=True, capture_output=True,
                           input="".join(f"{address:#x}\n" for address in addresses)).stdout
    own, address = set(), 0
    for line in found.splitlines():
        if line.startswith("0x"):
            address = int(line, 16)
            continue
        file, _, number = line.split(" ")[0].rpartition(":")
        if file.endswith("autograd/differentiable.cpp") and number.isdigit() and int(number) in lines:
            own.add(address)
    return own


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--limit", type=float, default=10, help="instructions for each operand")
    options = parser.parse_args()
    program = str(pathlib.Path(options.program).resolve())
    for tool in ("valgrind", "addr2line"):
        if shutil.which(tool) is None:
            print(f"skipped: there is no {tool} here")
            return 77
    with tempfile.TemporaryDirectory() as folder:
        profile = pathlib.Path(folder) / "profile"
        ran = subprocess.run(["valgrind", "--tool=callgrind", "--dump-instr=yes", "--compress-pos=no",
                              f"--callgrind-out-file={profile}", program], text=True, capture_output=True)
        if ran.returncode != 0:
            sys.exit(f"{program} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
        costs, called = instructions(profile.read_text(), program)
    calls, operands = (int(number) for number in re.fullmatch(r"(\d+) calls (\d+) operands\n", ran.stdout).groups())
    own = sum(costs[address] for address in belong(program, sorted(costs)))
    each = own / operands
    print(f"the check of marks: {own} instructions for {operands} operands of {calls} calls, {each:.2f} an operand "
          f"(at most {options.limit:g})")
    if called < calls:
        sys.exit(f"only {called} calls were counted: the others ran a copy of the code that has no debug information")
    if own < operands:
        sys.exit("less than one instruction an operand is no check: the code that was looked for has changed")
    if each > options.limit:
        sys.exit(f"an operand pays {each:.2f} instructions, and at most {options.limit:g} were promised "
                 "(docs/tensor-parallel.md)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
