#!/usr/bin/env python3
"""sources_alone.py FOLDER [FILE...]: what scripts/sources_alone.sh does, of a configured build folder.

Most of the time goes into headers that many files share. Some of them are compiled once (as precompiled
headers), and a file gets one of these only where it includes it, on whatever way: so a file
is given nothing that it does not ask for.
"""
import collections
import concurrent.futures
import glob
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time

FLOORS = ["core", "autograd", "nn", "optim", "precision", "distributed", "data", "accelerate"]
# What needs headers of CUDA or of a transport's library.
NOT_ALONE = re.compile(r"core/cuda/(emulation/|[^dt]|device|dry/(?!record))|distributed/transport/(mpi|nccl)/")
MOST_PRECOMPILED = 8  # of 20 to 80 MB each, while this runs
# What reading a header of others costs, as bytes of ours.
OTHERS = {
    "nlohmann/json.hpp": 400_000,
    "CLI/CLI.hpp": 400_000,
    "yaml-cpp/yaml.h": 200_000,
    "mpi.h": 100_000,
}
KEPT = re.compile(r"-(D|I|isystem|std=|march=|f(?!PIC|openmp)|pthread|W)")


def arguments(command):
    """What of a command decides whether a file compiles."""
    words = shlex.split(command)
    kept = []
    for i, word in enumerate(words):
        if word == "-isystem":
            kept += [word, words[i + 1]]
        elif word.startswith("-isystem") or KEPT.match(word):
            kept.append(word)
    return kept


def main():
    folder = os.path.abspath(sys.argv[1])
    root = os.getcwd()
    with open(os.path.join(folder, "compile_commands.json")) as file:
        commands = json.load(file)
    sources = {}
    for entry in commands:
        name = os.path.relpath(entry["file"], root)
        elsewhere = ("build/", "core/cuda/emulation/", "core/cuda/dry/", "cmake/")
        if not name.startswith(elsewhere) and not name.endswith("_simd.cpp"):
            sources.setdefault(name, entry)

    given = [os.path.relpath(os.path.abspath(name), root) for name in sys.argv[2:]]
    for name in given:
        if name not in sources:
            sys.exit(f"{name} is no source that is compiled here")
    sources = {name: entry for name, entry in sources.items() if not given or name in given}
    alone = [] if given else sorted(
        name
        for floor in FLOORS
        for path in glob.glob(f"{floor}/**/*.h", recursive=True)
        if not NOT_ALONE.match(name := path)
    )

    included = {}

    def direct(name):
        if name not in included:
            with open(os.path.join(root, name)) as file:
                found = re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', file.read(), re.M)
            included[name] = [x.removeprefix("tessera/") for x in found]
        return included[name]

    reached = {}

    def closure(name):
        if name not in reached:
            found, waiting = set(), [name]
            while waiting:
                for header in direct(waiting.pop()):
                    if header in found:
                        continue
                    found.add(header)
                    if os.path.isfile(os.path.join(root, header)):
                        waiting.append(header)
            reached[name] = found
        return reached[name]

    def weight(header):
        path = os.path.join(root, header)
        if os.path.isfile(path):
            return os.path.getsize(path)
        return OTHERS.get(header, 15_000)

    weights = collections.defaultdict(int)
    headers = set(alone)
    for name in sources:
        headers |= {x for x in closure(name) if os.path.isfile(os.path.join(root, x))}
    for header in headers:
        weights[header] = sum(weight(x) for x in closure(header) | {header})

    # One after the other, the header that spares most beside those chosen.
    chosen = []
    best = dict.fromkeys(sources, 0)
    while len(chosen) < MOST_PRECOMPILED:

        def spared(header):
            return sum(max(0, weights[header] - best[x]) for x in sources if header in closure(x))

        header = max(headers, key=lambda x: (spared(x), x))
        if spared(header) < 6 * weights[header]:  # at 2, with eight headers: 461 s for 426 s
            break
        chosen.append(header)
        for x in sources:
            if header in closure(x):
                best[x] = max(best[x], weights[header])

    with open(os.path.join(folder, "CMakeCache.txt")) as file:
        compiler = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.*)", file.read(), re.M)[1]
    precompiled = {}
    paths = []  # of all, for the headers
    for entry in sources.values():
        words = arguments(entry["command"])
        for i, word in enumerate(words):
            path = words[i : i + (2 if word == "-isystem" else 1)]
            if word.startswith(("-I", "-isystem")) and path not in paths:
                paths.append(path)
    first = arguments(next(iter(sources.values()))["command"])
    flags = [x for x in first if x.startswith(("-std", "-march", "-f"))]

    def run(words):
        return subprocess.run(words, cwd=folder, capture_output=True, text=True)

    def precompile(header):
        path = os.path.join(folder, "alone", header.replace("/", "+"))
        with open(path, "w") as file:
            file.write(f"#include <{header if header == 'tessera.h' else 'tessera/' + header}>\n")
        words = [compiler, *flags, "-O0", "-w", *sum(paths, []), "-x", "c++-header", path]
        return header, path, run([*words, "-o", path + ".gch"])

    def fitting(name):
        found = [x for x in chosen if x in precompiled and x in closure(name)]
        return max(found, key=lambda x: weights[x], default=None)

    def check(name):
        words = [compiler, *arguments(sources[name]["command"]), "-O0", "-w", "-fsyntax-only"]
        if fitting(name):
            words += ["-include", precompiled[fitting(name)]]
        return name, run([*words, os.path.join(root, name)])

    def check_header(name):
        words = [compiler, *flags, "-O0", "-w", "-fsyntax-only", *sum(paths, [])]
        if fitting(name):
            words += ["-include", precompiled[fitting(name)]]
        return name, run([*words, "-x", "c++", "-include", os.path.join(root, name), os.devnull])

    os.makedirs(os.path.join(folder, "alone"), exist_ok=True)
    start = time.time()
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for header, path, done in pool.map(precompile, chosen):
            if done.returncode == 0:
                precompiled[header] = path
            else:
                print(f"{header} does not compile alone:\n{done.stderr}")
                failed += 1
        # A source that begins with its header shows that this compiles alone, where it is given nothing
        # that the header does not ask for.
        shown = set(precompiled)
        for name in sources:
            header = next(iter(direct(name)), "")
            if header in headers and fitting(name) in {None, header} | closure(header):
                shown.add(header)
        alone = [name for name in alone if name not in shown]
        for name, done in [*pool.map(check, sorted(sources)), *pool.map(check_header, alone)]:
            if done.returncode != 0:
                failed += 1
                print(f"---- {name} does not compile alone:\n{done.stderr}", flush=True)
    shutil.rmtree(os.path.join(folder, "alone"))  # some hundred MB
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"{len(sources)} sources and {len(alone)} headers alone, {failed} do not compile; {time.time() - start:.0f} s, of the "
        f"processors {used.ru_utime + used.ru_stime:.0f} s; once: {' '.join(precompiled)}"
    )
    return 1 if failed or not sources else 0


sys.exit(main())
