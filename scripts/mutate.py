#!/usr/bin/env python3
"""Puts small plausible mistakes into source files, one by one, and says which of them the tests notice.

    scripts/mutate.sh distributed/data_parallel/join.cpp core/io/atomic_file.cpp:60-140 --count 12 --seed 3

For each file, or folder, a sample of `--count` mistakes is drawn (the same for the same seed). Each is put into a copy of the
tree (a git worktree in build/mutate, with what is not committed yet), what it affects is built, and test programs that
execute the line are run until one fails: --coverage, once, finds out which those are. Killed: a test failed, crashed or hung. Survived: all passed;
its diff is printed, and a test is missing or the code says more than it means. Did not compile: not counted.

Results are kept in build/mutate: a run that was interrupted goes on where it was, a killed mistake is not tried again
until its file changes, a survivor is tried again when the sources of its tests have changed. A mistake that changes
nothing that anybody could see is listed with its reason in scripts/mutate_equivalent.txt.
"""

import argparse
import collections
import difflib
import fcntl
import gzip
import hashlib
import json
import os
import pathlib
import random
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOME = ROOT / "build" / "mutate"
TREE = HOME / "tree"
COVERAGE = HOME / "coverage"
EQUIVALENT = ROOT / "scripts" / "mutate_equivalent.txt"

# Without files: what a user loses most by, and where the library's own promises are.
DEFAULTS = [
    "core/io/atomic_file.cpp",
    "core/state/safetensors.cpp",
    "distributed/checkpoint/commit.cpp",
    "distributed/checkpoint/manifest.cpp",
    "distributed/checkpoint/reader.cpp",
    "distributed/backward/backward_pass.cpp",
    "distributed/backward/pass_agreement.cpp",
    "distributed/data_parallel/bucket_schedule.cpp",
    "distributed/backward/gradient_bucket.cpp",
    "distributed/data_parallel/join.cpp",
    "autograd/engine.cpp",
    "optim/optimizer.cpp",
    "optim/ema.cpp",
    "optim/schedule.cpp",
    "optim/rule_optimizer.cpp",
    "nn/fused.cpp",
    "autograd/node.cpp",
    "autograd/differentiable.cpp",
    "autograd/ops/index.cpp",
    "autograd/weight_cache.cpp",
    "core/kernels/optim/multi_tensor_cpu.cpp",
    "core/kernels/gemm/gemm_simd.cpp",
    "core/factory/host_values.cpp",
    "precision/grad_scaler.cpp",
    "nn/module.cpp",
    "data/dataloader.cpp",
    "data/sampler.cpp",
    "accelerate/accelerator.cpp",
    "accelerate/accelerator_prepare.cpp",
    "accelerate/loaders/loader_plan.cpp",
    "accelerate/launch/protocol.cpp",
    "accelerate/cli/launch.cpp",
    "distributed/transport/group.cpp",
    "distributed/transport/watchdog.cpp",
    "accelerate/accelerator_step.cpp",
    "accelerate/state/state_io.cpp",
    "accelerate/tracking/memory_tracker.cpp",
]

Mutant = collections.namedtuple("Mutant", "file begin end text operator line")


# ---- Reading C++ --------------------------------------------------------------------------------------------------


def blanked(text):
    """`text` with comments, strings and preprocessor lines as blanks: every position stays."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"(?P<mark>[^()\\ ]{0,16})\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|'
        r"(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|^[ \t]*#(?:[^\n\\]|\\\n|\\.)*",
        re.DOTALL | re.MULTILINE)

    def blank(match):
        found = match.group(0)
        keep = '"' if found[0] in '"R' else " "  # a string stays an argument
        return "".join("\n" if c == "\n" else keep for c in found)

    return pattern.sub(blank, text)


def closing(code, at):
    """The position of what closes the bracket at `at`."""
    depth = 0
    for position in range(at, len(code)):
        if code[position] in "([{":
            depth += 1
        elif code[position] in ")]}":
            depth -= 1
            if depth == 0:
                return position
    return -1


def split_arguments(code, begin, end):
    """Ranges of the arguments between two brackets."""
    parts, depth, first = [], 0, begin
    for position in range(begin, end):
        if code[position] in "([{":
            depth += 1
        elif code[position] in ")]}":
            depth -= 1
        elif code[position] == "," and depth == 0:
            parts.append((first, position))
            first = position + 1
    if code[begin:end].strip():
        parts.append((first, end))
    return parts


def without_messages(code):
    """Blanks the message of checks, and what is no code that runs."""
    chars = list(code)

    def blank(begin, end):
        for position in range(begin, end):
            if chars[position] != "\n":
                chars[position] = " "

    for match in re.finditer(r"\bTS_(CHECK|THROW|ASSERT)\w*(?=\()", code):
        end = closing(code, match.end())
        if end < 0:
            continue
        parts = split_arguments(code, match.end() + 1, end)
        condition = 1 if match.group(0) in ("TS_CHECK_AS",) else 0
        for i, (begin, stop) in enumerate(parts):
            if match.group(0).startswith("TS_THROW") or i != condition:
                blank(begin, stop)
    for match in re.finditer(r"^[ \t]*(static_assert|using|namespace|template|friend|extern)\b[^;{]*", code, re.MULTILINE):
        blank(match.start(), match.end())
    return "".join(chars)


# ---- Mistakes -----------------------------------------------------------------------------------------------------

SWAPS = [
    ("boundary", {" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > "}),
    ("equality", {" == ": " != ", " != ": " == "}),
    ("logic", {" && ": " || ", " || ": " && "}),
    ("arithmetic", {" + ": " - ", " - ": " + ", " += ": " -= ", " -= ": " += ", " / ": " * ", " % ": " / "}),
    ("constant", {"true": "false", "false": "true"}),
    ("extreme", {"std::min": "std::max", "std::max": "std::min", "kMin": "kMax", "kMax": "kMin", "min_element":
                 "max_element", "any_of": "all_of", "all_of": "any_of", "kSum": "kMax"}),
    ("jump", {"continue;": "break;", "break;": "continue;"}),
    ("step", {"++": "--"}),
]


def statement_start(code, at):
    """Whether a statement begins at `at`, and whether it is the only one of an if or a loop."""
    before = code[:at].rstrip()
    if not before:
        return False, False
    if before[-1] in ";{}":
        return True, False
    if before[-1] == ":" and re.search(r"(case [\w:]+|default|public|private):$", before):
        return True, False
    if before.endswith("else"):
        return True, True
    if before[-1] == ")":
        depth = 0
        for position in range(len(before) - 1, -1, -1):
            depth += (before[position] == ")") - (before[position] == "(")
            if depth == 0:
                return bool(re.search(r"\b(if|for|while)( constexpr)? $", before[:position])), True
    return False, False


def mutants_of(file, text):
    code = without_messages(blanked(text))
    found = []

    def add(operator, begin, end, replacement):
        line = text.count("\n", 0, begin) + 1
        found.append(Mutant(file, begin, end, replacement, operator, line))

    for operator, pairs in SWAPS:
        words = sorted(pairs, key=len, reverse=True)
        for match in re.finditer("|".join((r"\b%s\b" if word[0].isalnum() and word[-1].isalnum() else "%s") %
                                          re.escape(word) for word in words), code):
            word = match.group(0)
            following, before = code[match.end():match.end() + 30], code[max(0, match.start() - 60):match.start()]
            if operator == "step" and re.search(r"for \([^)]*$", before):
                continue  # such a loop never ends
            if operator == "arithmetic" and re.search(r"[=(,]$", before):
                continue  # a sign
            if operator == "arithmetic" and word == " + " and ('"' in following.split(")")[0][:12] or '"' in before[-3:]):
                continue  # text
            if operator == "boundary" and re.search(r"\btemplate\b|operator$", before):
                continue
            add(operator, match.start(), match.end(), pairs[word])
    for match in re.finditer(r" [+-] 1\b(?!\.|[a-z])", code):
        add("off by one", match.start(), match.end(), "")
    for match in re.finditer(r"(?<![\w.\"':])(\d{1,4})(?![\w.\"'])", code):
        line = code[code.rfind("\n", 0, match.start()) + 1:match.start()]
        if re.search(r"\b(case|enum|alignas)\b|\[$", line):
            continue
        value = int(match.group(1))
        add("constant", match.start(), match.end(), {0: "1", 1: "0"}.get(value, str(value + 1)))
    for match in re.finditer(r"\b(if|while) \(", code):
        begin, end = match.end(), closing(code, match.end() - 1)
        if end < 0:
            continue
        inside = code[begin:end]
        if ";" in inside:
            begin += inside.rfind(";") + 1
        elif re.search(r"(?<![=!<>])=(?!=)", inside):
            continue  # a declaration
        found.append(Mutant(file, begin, end, "!(" + text[begin:end].strip() + ")", "negated condition",
                            text.count("\n", 0, begin) + 1))
    for match in re.finditer(r"\b(TS_CHECK\w*)\(", code):
        end = closing(blanked(text), match.end() - 1)
        if end > 0:
            add("check removed", match.start(), end + 1, "static_cast<void>(0)")
    target = r"[A-Za-z_*(][\w:.>\-\[\]()*&, ]*?"
    for match in re.finditer(r"^[ \t]*(?P<body>(?!return\b|throw\b|delete\b|break|continue|else\b|case\b|using\b|goto\b|"
                             r"TS_|if\b|for\b|while\b|do\b|struct\b|class\b|enum\b)[A-Za-z_*:+(])", code, re.MULTILINE):
        begin = match.start("body")
        starts, alone = statement_start(code, begin)
        if not starts:
            continue
        end, depth = begin, 0
        while end < len(code) and (depth > 0 or code[end] not in ";{}"):
            depth += (code[end] in "([{") - (code[end] in ")]}")
            if depth < 0:
                break
            end += 1
        if end >= len(code) or code[end] != ";":
            continue
        statement = code[begin:end]
        head = statement.split("(")[0].split("=")[0].strip()
        call = re.fullmatch(r"(\+\+|--)?[\w:.>\-\[\]*]+(<[\w:, ]+>)?", head) and ("(" in statement)
        assigned = re.fullmatch(target, head.rstrip("+-*/|&").strip()) and " " not in head.rstrip(
            "+-*/|&").strip() and re.search(r"[^=!<>]=[^=]", statement)
        guard = re.search(r"(lock|Lock|Guard|Scope)\b[^=]*[({]", statement) and " " in head
        step = re.fullmatch(r"(\+\+|--)[\w.>\-\[\]]+|[\w.>\-\[\]]+(\+\+|--)", statement)
        if not (call or assigned or guard or step):
            continue
        add("statement removed", begin, end + 1, "{}" if alone else "")
    for match in re.finditer(r"\breturn (?P<value>[^;]+);", code):
        value = match.group("value")
        if re.search(r" (==|!=|<|>|<=|>=|&&|\|\|) |^!|\.(contains|empty|starts_with|ends_with|defined|has_value)\(",
                     value) and " ? " not in value and "[" not in value[:1]:
            for constant in ("true", "false"):
                add("return", match.start("value"), match.end("value"), constant)
    for match in re.finditer(r"^(?:static |inline )?void [\w:~]+\([^;{}]*\)(?: const)?(?: noexcept)? \{", code, re.MULTILINE):
        add("return", match.end(), match.end(), " return;")
    for match in re.finditer(r"[\w>]\(", code):
        end = closing(code, match.end() - 1)
        if end < 0:
            continue
        parts = split_arguments(code, match.end(), end)
        for (a, b), (c, d) in zip(parts, parts[1:]):
            first, second = code[a:b].strip(), code[c:d].strip()
            simple = r"[a-z_][\w.]*(\(\))?"
            if first != second and re.fullmatch(simple, first) and re.fullmatch(simple, second):
                add("swapped arguments", a + code[a:b].index(first), c + code[c:d].index(second) + len(second),
                    second + ", " + first)
    unique = {}
    for mutant in found:
        if text[mutant.begin:mutant.end] != mutant.text:
            unique.setdefault((mutant.begin, mutant.end, mutant.text), mutant)
    return sorted(unique.values(), key=lambda m: (m.begin, m.end, m.text))


def sample(mutants, count, seed):
    """Operators in turn, so that the frequent ones do not crowd the others out."""
    shuffled = random.Random(seed)
    by_operator = collections.defaultdict(list)
    for mutant in mutants:
        by_operator[mutant.operator].append(mutant)
    for group in by_operator.values():
        shuffled.shuffle(group)
    chosen = []
    while len(chosen) < count and by_operator:
        names = sorted(by_operator)
        shuffled.shuffle(names)
        for name in names:
            if len(chosen) < count:
                chosen.append(by_operator[name].pop())
            if not by_operator[name]:
                del by_operator[name]
    return sorted(chosen, key=lambda m: (m.file, m.begin))


def changed_text(text, mutant):
    return text[:mutant.begin] + mutant.text + text[mutant.end:]


def diff_of(text, mutant):
    lines = difflib.unified_diff(text.splitlines(), changed_text(text, mutant).splitlines(), mutant.file, mutant.file,
                                 lineterm="", n=2)
    return "\n".join("    " + line for line in list(lines)[2:])


def lines_of(text, mutant):
    """The first line that the mistake changes, before and after."""
    before, after = text.splitlines(), changed_text(text, mutant).splitlines()
    for a, b in zip(before, after):
        if a != b:
            return a.strip(), b.strip()
    return "", ""


# ---- Tests --------------------------------------------------------------------------------------------------------


# Which programs execute a line: functions that each program entered (mutate_coverage.cpp), and the functions whose code
# has the line (line numbers of its object).


def functions_of_lines(build, file):
    """{line: functions}, the mangled names of those that the compiler made of it; None where the build leaves it out."""
    found, compiled = collections.defaultdict(set), False
    source = str((TREE / file).with_suffix(".cpp") if file.endswith(".h") else TREE / file)
    for entry in json.loads((build.folder / "compile_commands.json").read_text()):
        command = shlex.split(entry["command"])
        built = command[command.index("-o") + 1] if "-o" in command else "tests/"
        if entry["file"] != source or built.startswith("tests/") or "tests/CMakeFiles" in built:
            continue
        compiled = True
        code, output = build.make([built])
        if code != 0:
            sys.exit("mutate: the tree does not build:\n" + output[-4000:])
        done = subprocess.run(["objdump", "--disassemble", "--line-numbers", "--no-show-raw-insn", built], cwd=build.folder,
                              capture_output=True, text=True, check=True)
        current = ""
        for line in done.stdout.splitlines():
            if match := re.match(r"[0-9a-f]+ <(\S+)>:$", line):
                current = match.group(1).split(".")[0]
            elif (match := re.match(r"(/?[^\s:]+):(\d+)(?: \(discriminator \d+\))?$", line)) and match.group(1).endswith(file):
                found[int(match.group(2))].add(current)
    return found if compiled else None


def symbols_of(path):
    """Names by the index in .symtab, and by their value."""
    done = subprocess.run(["readelf", "--symbols", "--wide", path], capture_output=True, text=True, check=True)
    names, at = {}, collections.defaultdict(list)
    for line in done.stdout.partition("'.symtab'")[2].splitlines():
        words = line.split()
        if len(words) > 7 and words[3] == "FUNC":
            names[int(words[0][:-1])] = words[1]
            at[words[1]].append(words[7].split(".")[0])
    return {index: at[value] for index, value in names.items()}


def gather_coverage(build, options):
    """Runs each program once and keeps which functions it entered; those again that were built since."""
    COVERAGE.mkdir(parents=True, exist_ok=True)
    programs = options.tests.split(",") if options.tests else build.programs()
    build.make(["-k", "0", *programs])
    shared = COVERAGE / "coverage.so"
    subprocess.run(["g++", "-std=c++20", "-O1", "-shared", "-fPIC", str(ROOT / "scripts" / "mutate_coverage.cpp"), "-o",
                    str(shared)], check=True)
    names, missing = {}, []
    objects = {path.name: path for path in build.folder.rglob("*") if path.is_file() and os.access(path, os.X_OK)
               and (path.suffix == ".so" or path.name in programs)}
    for program in programs:
        kept = COVERAGE / f"{program}.json.gz"
        if program not in objects:
            missing.append(program)
            continue
        if kept.exists() and kept.stat().st_mtime > objects[program].stat().st_mtime:
            continue
        out = COVERAGE / "entered"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        began = time.monotonic()
        code, _ = build.test(program, 300, LD_PRELOAD=str(shared), COVERAGE_ROOT=str(build.folder), COVERAGE_OUT=str(out))
        seconds = time.monotonic() - began
        entered = set()
        for flags in out.iterdir():
            if flags.name in objects:
                if flags.name not in names or flags.name == program:
                    names[flags.name] = symbols_of(objects[flags.name])
                entered.update(name for index, flag in enumerate(flags.read_bytes()) if flag
                               for name in names[flags.name].get(index, []) if "7tessera" in name)
        print(f"{program}: {len(entered)} functions in {seconds:.1f} s" + ("" if code == 0 else f", exit code {code}"),
              flush=True)
        with gzip.open(kept, "wt") as file:
            json.dump(sorted(entered), file)
    if missing:
        print(f"without a program: {', '.join(missing)}")


def read_coverage():
    """{program: functions that it entered}"""
    kept = {path.name.split(".")[0]: path for path in COVERAGE.glob("*.json.gz")}
    if not kept:
        sys.exit("mutate: no map of what the tests execute; make it: scripts/mutate.sh --coverage")
    return {program: set(json.loads(gzip.open(path, "rt").read())) for program, path in sorted(kept.items())}


def programs_of(coverage, functions, file_functions, most):
    """Those that enter one of `functions`, first those of which most is about the file."""
    ranked = [(-len(file_functions & entered) / len(entered), program) for program, entered in coverage.items()
              if functions & entered]
    return [program for _, program in sorted(ranked)[:most]]


# These map more than they touch: race tracking of the emulated GPU, a model of 80 billion parameters.
MAPS_MORE = ("test_cuda", "test_memory_commands")


def limits(program):
    if not program.startswith(MAPS_MORE):
        resource.setrlimit(resource.RLIMIT_DATA, (8 << 30, 8 << 30))  # a loop that never ends may also fill memory
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def run(command, seconds, **options):
    """The exit code and what was printed; None where it was stopped."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
                               **options)
    try:
        output = process.communicate(timeout=seconds)[0]
        return process.returncode, output.decode(errors="replace")
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        if process.poll() is None:
            process.terminate()  # ninja ends its compilers, which are groups of their own
            try:
                process.communicate(timeout=5)
            except subprocess.TimeoutExpired:
                pass
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.communicate()


# ---- The copy of the tree -----------------------------------------------------------------------------------------


def git(*arguments, where=ROOT):
    return subprocess.run(["git", *arguments], cwd=where, check=True, capture_output=True, text=True).stdout.strip()


def prepare_tree():
    revision = git("stash", "create") or git("rev-parse", "HEAD")
    if not (TREE / ".git").exists():
        git("worktree", "prune")
        git("worktree", "add", "--detach", "--force", str(TREE), "HEAD")
    git("checkout", "--force", "--detach", revision, where=TREE)
    git("clean", "-qfd", where=TREE)
    for name in git("ls-files", "--others", "--exclude-standard").splitlines():
        (TREE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, TREE / name)


def remove_tree():
    subprocess.run(["git", "worktree", "remove", "--force", str(TREE)], cwd=ROOT, check=False)
    shutil.rmtree(HOME, ignore_errors=True)


class Build:
    def __init__(self, options):
        self.folder = TREE / "build" / options.preset
        self.jobs = str(options.jobs)
        self.of_ctest = None
        command = ["cmake", "--preset", options.preset, "-DTESSERA_WITH_CUDA=OFF", "-DTESSERA_UNITY=OFF",
                   "-DBUILD_SHARED_LIBS=ON", "-DCMAKE_LINK_DEPENDS_NO_SHARED=ON"]
        command.append("-DCMAKE_CXX_FLAGS_DEBUG=-Og -g1" if options.preset == "dev" else
                       "-DCMAKE_CXX_FLAGS=-g1")  # with line numbers
        command += options.cmake
        self.launcher = os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER", shutil.which("ccache") or "").split(";")
        if self.launcher == [""]:
            self.launcher = []
        command.append("-DCMAKE_CXX_COMPILER_LAUNCHER=" + ";".join(self.launcher))
        done = subprocess.run(command, cwd=TREE, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit("mutate: cmake failed:\n" + done.stdout + done.stderr)

    def make(self, programs):
        return run(["ninja", "-C", str(self.folder), "-j", self.jobs, *programs], 3600)

    def programs(self):
        done = subprocess.run(["ninja", "-C", str(self.folder), "-t", "targets", "all"], capture_output=True, text=True,
                              check=True)
        return sorted(set(re.findall(r"^tests/(?:cuda/)?(test_\w+): CXX_EXECUTABLE", done.stdout, re.MULTILINE)))

    def calls(self, program):
        """Its command lines with their variables: itself, or as ctest runs a test of MPI, by mpiexec."""
        if self.of_ctest is None:
            done = subprocess.run(["ctest", "--show-only=json-v1"], cwd=self.folder, capture_output=True, text=True, check=True)
            self.of_ctest = collections.defaultdict(list)
            for test in json.loads(done.stdout)["tests"]:
                command = test.get("command", [""])
                properties = {one["name"]: one["value"] for one in test.get("properties", [])}
                at = next((i for i, word in enumerate(command) if word.startswith(str(self.folder / "tests"))), 0)
                variables = dict(one.split("=", 1) for one in properties.get("ENVIRONMENT", []))
                self.of_ctest[pathlib.Path(command[at]).name].append((command[:at], variables))
        path = next(folder / program for folder in (self.folder / "tests", self.folder / "tests" / "cuda")
                    if (folder / program).exists())
        ranks = [one for one in self.of_ctest[program] if one[0]] if program.startswith("test_mpi") else []
        return [([*before, str(path)], variables) for before, variables in ranks or [([], {})]]

    def test(self, program, seconds, **variables):
        for command, of_ctest in self.calls(program):
            environment = {"OMP_WAIT_POLICY": "passive", **os.environ, **of_ctest, **variables}
            command = [*command, "--gtest_brief=1", *([] if variables else ["--gtest_fail_fast"])]
            code, output = run(command, seconds, env=environment, preexec_fn=lambda: limits(program), cwd=self.folder)
            if code != 0:
                break
        return code, output


# ---- Results ------------------------------------------------------------------------------------------------------


def fingerprint(paths):
    digest = hashlib.sha1()
    for path in sorted(paths):
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()[:16]


class Results:
    """One JSON object a line; the last about a mistake counts."""

    def __init__(self):
        self.path = HOME / "results.jsonl"
        self.known = {}
        if self.path.exists():
            for line in self.path.read_text().splitlines():
                try:
                    one = json.loads(line)
                    self.known[one["key"]] = one
                except ValueError:
                    pass  # a run was interrupted while it wrote

    def find(self, key, tests):
        one = self.known.get(key)
        if one is None or (one["result"] == "survived" and one["tests"] != tests):
            return None
        return one

    def add(self, one):
        self.known[one["key"]] = one
        with self.path.open("a") as file:
            file.write(json.dumps(one) + "\n")


def equivalents():
    found = set()
    for line in EQUIVALENT.read_text().splitlines() if EQUIVALENT.exists() else []:
        if line.startswith("#") or not line.strip():
            continue
        parts = [part.strip() for part in line.split(" | ")]
        if len(parts) != 4:
            sys.exit(f"mutate: {EQUIVALENT.name}: a line is 'file | before | after | reason'; got: {line}")
        found.add(tuple(parts[:3]))
    return found


# ---- The run ------------------------------------------------------------------------------------------------------


def judge(build, mutant, programs, baseline):
    if not programs:
        return "survived", "no test executes it"
    source = TREE / mutant.file
    text = source.read_text()
    try:
        source.write_text(changed_text(text, mutant))
        code, _ = build.make(programs)
        if code != 0:
            return "did not compile", ""
        for program in programs:
            code, output = build.test(program, 30 + 10 * baseline[program])
            if code is None:
                return "killed", f"{program} did not end"
            if code != 0:
                failed = re.search(r"\[  FAILED  \] (\S+)", output)
                return "killed", f"{program}: {failed.group(1).rstrip(',') if failed else f'exit code {code}'}"
        return "survived", ""
    finally:
        source.write_text(text)


def score_of(results):
    counts = collections.Counter(results)
    tried = counts["killed"] + counts["survived"]
    text = f"{counts['killed']} of {tried} noticed" + (f" ({100 * counts['killed'] / tried:.0f}%)" if tried else "")
    for other in ("did not compile", "equivalent"):
        text += f", {counts[other]} {other}" if counts[other] else ""
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE[:FIRST-LAST]",
                        help="from the root, or a folder, which is sampled as one; none: " + ", ".join(DEFAULTS))
    parser.add_argument("--count", type=int, default=10, help="mistakes a file (10); 0: all")
    parser.add_argument("--seed", default="1", help="of the sample (1)")
    parser.add_argument("--tests", help="programs to run, with commas between, in place of those found")
    parser.add_argument("--programs", type=int, default=8, help="at most so many test programs a mistake (8)")
    parser.add_argument("--coverage", action="store_true",
                        help="build the test programs (or --tests), keep which functions each enters, and end")
    parser.add_argument("--preset", default="dev", help="of the build (dev); tsan sees removed locks")
    parser.add_argument("--cmake", action="append", default=[], metavar="SETTING",
                        help="of the build, such as -DTESSERA_EMULATE_GPU=OFF (no programs of the emulated GPU); repeatable")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="of the build")
    parser.add_argument("--minutes", type=float, default=0, help="stop after so long; the next run goes on")
    parser.add_argument("--require", type=float, default=0, help="fail below so many percent noticed")
    parser.add_argument("--operators", help="only these, with commas between")
    parser.add_argument("--list", action="store_true", help="print the mistakes, try none")
    parser.add_argument("--clean", action="store_true", help="remove build/mutate and what is known, and end")
    options = parser.parse_args()
    HOME.mkdir(parents=True, exist_ok=True)
    lock = (HOME / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        sys.exit("mutate: another run works in build/mutate; wait for it")
    if options.clean:
        remove_tree()
        return 0
    if options.coverage:
        prepare_tree()
        gather_coverage(Build(options), options)
        return 0

    ignored = equivalents()
    chosen = []
    for given in options.files or DEFAULTS:
        file, _, lines = given.partition(":")
        path = ROOT / file
        if path.is_dir():
            files = [str(source.relative_to(ROOT)) for source in sorted(path.rglob("*.cpp"))]
            mutants = [m for name in files for m in mutants_of(name, (ROOT / name).read_text())]
            drawn = sample(mutants, options.count, f"{options.seed} {file}") if options.count else mutants
            chosen += [(name, of) for name in files if (of := [m for m in drawn if m.file == name])]
            continue
        if not path.is_file():
            sys.exit(f"mutate: there is no file or folder '{file}'; give paths from {ROOT}")
        mutants = mutants_of(file, path.read_text())
        if lines:
            first, _, last = lines.partition("-")
            mutants = [m for m in mutants if int(first) <= m.line <= int(last or first)]
        if options.operators:
            mutants = [m for m in mutants if m.operator in options.operators.split(",")]
        if options.count:
            mutants = sample(mutants, options.count, f"{options.seed} {file}")
        chosen.append((file, mutants))
    if options.list:
        for file, mutants in chosen:
            for mutant in mutants:
                print(f"{file}:{mutant.line}: {mutant.operator}\n{diff_of((ROOT / file).read_text(), mutant)}")
        return 0

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("mutate: stopped; the next run goes on from here"))
    began = time.monotonic()
    prepare_tree()
    build = Build(options)
    known, all_results, survivors, baseline = Results(), [], [], {}
    coverage = {} if options.tests else read_coverage()
    stopped = False
    for file, mutants in chosen:
        text = (TREE / file).read_text()
        at = functions_of_lines(build, file)
        if at is None:
            print(f"{file}: this build does not compile it", flush=True)
            continue
        of_file = set().union(*at.values())
        version = fingerprint([TREE / file])
        results, asked = [], set()
        for mutant in mutants:
            last = text.count("\n", 0, mutant.end) + 1
            functions = set().union(*(at.get(line, set()) for line in range(mutant.line, last + 1)))
            programs = (options.tests.split(",") if options.tests
                        else programs_of(coverage, functions or of_file, of_file, options.programs))
            asked.update(programs)
            sources = [path for program in programs for path in (TREE / "tests").rglob(f"{program}.c*")]
            state = fingerprint([*sources, *(TREE / "tests").rglob("*.h")]) + " " + ",".join(programs)
            key = f"{options.preset} {file} {version} {mutant.begin} {mutant.end} {mutant.text}"
            one = known.find(key, state)
            if (file, *lines_of(text, mutant)) in ignored:
                results.append("equivalent")
                continue
            if one is None:
                if options.minutes and time.monotonic() - began > 60 * options.minutes:
                    stopped = True
                    break
                fresh = [program for program in programs if program not in baseline]
                if fresh:
                    code, output = build.make(fresh)
                    if code != 0:
                        sys.exit("mutate: the tree does not build:\n" + output[-4000:])
                for program in fresh:
                    start = time.monotonic()
                    code, output = build.test(program, 900)
                    baseline[program] = time.monotonic() - start if code == 0 else None
                    if code != 0:
                        print(f"{program} fails without any mistake, so nobody asks it:\n" + output[-2000:])
                programs = [program for program in programs if baseline[program] is not None]
                result, how = judge(build, mutant, programs, baseline)
                one = {"key": key, "result": result, "how": how, "tests": state, "file": file, "line": mutant.line}
                known.add(one)
            print(f"{one['result']:<16}{file}:{mutant.line}  {mutant.operator}  {one['how']}", flush=True)
            results.append(one["result"])
            if one["result"] == "survived":
                survivors.append((text, mutant))
        print(f"{file}: {score_of(results)}, by {', '.join(sorted(asked)) or 'no program'}", flush=True)
        all_results += results
        if stopped:
            break

    if survivors:
        print("\nNot noticed:")
    for text, mutant in survivors:
        print(f"{mutant.file}:{mutant.line}: {mutant.operator}\n{diff_of(text, mutant)}")
    print(f"\nAll: {score_of(all_results)}" + ("; stopped before the end" if stopped else ""))
    counts = collections.Counter(all_results)
    tried = counts["killed"] + counts["survived"]
    return 1 if tried and 100 * counts["killed"] / tried < options.require else 0


if __name__ == "__main__":
    sys.exit(main())
