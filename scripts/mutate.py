#!/usr/bin/env python3
"""Puts small plausible mistakes into source files, one by one, and says which of them the tests notice.

    scripts/mutate.sh distributed/data_parallel/join.cpp core/io/atomic_file.cpp:60-140 --count 12 --seed 3

For each file a sample of `--count` mistakes is drawn (the same for the same seed). Each is put into a copy of the
tree (a git worktree in build/mutate, with what is not committed yet), what it affects is built, and the programs of
the tests that are concerned are run until one fails. Killed: a test failed, crashed or hung. Survived: all passed;
its diff is printed, and a test is missing or the code says more than it means. Did not compile: not counted.

Results are kept in build/mutate: a run that was interrupted goes on where it was, a killed mistake is not tried again
until its file changes, a survivor is tried again when the sources of its tests have changed. A mistake that changes
nothing that anybody could see is listed with its reason in scripts/mutate_equivalent.txt.
"""

import argparse
import collections
import difflib
import fcntl
import hashlib
import json
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
HOME = ROOT / "build" / "mutate"
TREE = HOME / "tree"
EQUIVALENT = ROOT / "scripts" / "mutate_equivalent.txt"

# Without files: what a user loses most by, and where the library's own promises are. The programs are those that
# speak of the file; a file that is not listed gets those nearest to it by includes.
DEFAULTS = {
    "core/io/atomic_file.cpp": ["test_durability", "test_files"],
    "core/state/safetensors.cpp": ["test_safetensors"],
    "distributed/checkpoint/commit.cpp": ["test_durability", "test_checkpoint"],
    "distributed/checkpoint/manifest.cpp": ["test_checkpoint"],
    "distributed/checkpoint/reader.cpp": ["test_checkpoint"],
    "distributed/backward/backward_pass.cpp": ["test_replicate", "test_replicate_extras", "test_replicate_order",
                                            "test_accelerator_accumulate",
                                            "test_accelerator_sync"],
    "distributed/backward/pass_agreement.cpp": ["test_replicate", "test_replicate_extras"],
    "distributed/data_parallel/bucket_schedule.cpp": ["test_replicate", "test_replicate_extras", "test_replicate_order"],
    "distributed/backward/gradient_bucket.cpp": ["test_replicate", "test_replicate_extras"],
    "distributed/data_parallel/join.cpp": ["test_replicate_extras", "test_accelerator_uneven"],
    "autograd/engine.cpp": ["test_autograd", "test_training", "test_replicate", "test_precision_autocast"],
    "optim/optimizer.cpp": ["test_optim", "test_round_trips", "test_precision_training", "test_cuda_graphed_step"],
    "optim/ema.cpp": ["test_optim", "test_round_trips"],
    "optim/schedule.cpp": ["test_schedule", "test_golden_optim", "test_accelerator_schedules"],
    "optim/rule_optimizer.cpp": ["test_optim", "test_golden_optim", "test_multi_tensor"],
    "nn/fused.cpp": ["test_layers", "test_bert"],
    "autograd/node.cpp": ["test_autograd", "test_stale_versions", "test_view_programs"],
    "autograd/differentiable.cpp": ["test_ops", "test_autograd", "test_views"],
    "autograd/ops/index.cpp": ["test_index", "test_ops", "test_cuda_ops"],
    "autograd/weight_cache.cpp": ["test_weight_cache", "test_optim", "test_cuda_graphed_step"],
    "core/kernels/optim/multi_tensor_cpu.cpp": ["test_multi_tensor", "test_optim", "test_golden_optim"],
    "core/kernels/gemm/gemm_simd.cpp": ["test_gemm_split", "test_gemm"],
    "core/factory/host_values.cpp": ["test_core", "test_conv", "test_attention"],
    "precision/grad_scaler.cpp": ["test_precision", "test_round_trips", "test_accelerator_precision",
                                 "test_cuda_graphed_step"],
    "nn/module.cpp": ["test_module", "test_state_dict"],
    "data/dataloader.cpp": ["test_dataloader", "test_streams", "test_distributed_data", "test_facade_loaders"],
    "data/sampler.cpp": ["test_samplers", "test_distributed_data", "test_facade_loaders"],
    "accelerate/accelerator.cpp": ["test_accelerator", "test_accelerator_settings", "test_accelerator_sync",
                                    "test_accelerator_accumulate", "test_accelerator_uneven",
                                    "test_accelerator_resume", "test_tracking"],
    "accelerate/accelerator_prepare.cpp": ["test_accelerator", "test_accelerator_precision", "test_accelerator_sync",
                                           "test_accelerator_accumulate", "test_accelerate_scripts"],
    "accelerate/loaders/loader_plan.cpp": ["test_facade_loaders", "test_accelerator_sync",
                                           "test_accelerate_scripts", "test_facade_metrics"],
    "accelerate/launch/protocol.cpp": ["test_launch", "test_launcher"],
    "accelerate/cli/launch.cpp": ["test_launch", "test_launcher"],
    "distributed/transport/group.cpp": ["test_collectives", "test_collective_mistakes", "test_store"],
    "distributed/transport/watchdog.cpp": ["test_store", "test_failures", "test_collective_failures"],
    "accelerate/accelerator_step.cpp": ["test_accelerator_sync", "test_accelerator_accumulate", "test_accelerator_uneven",
                                        "test_accelerator_precision", "test_accelerator_schedules",
                                        "test_accelerator"],
    "accelerate/state/state_io.cpp": ["test_checkpoint_state", "test_accelerator_resume", "test_accelerator"],
    "accelerate/tracking/memory_tracker.cpp": ["test_tracking"],
}

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
    return sorted(chosen, key=lambda m: m.begin)


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


def includes_of(path, cache):
    if path not in cache:
        found = re.findall(r'^#include (?:<tessera/([^>]+)>|"([^"]+)")', (ROOT / path).read_text(errors="replace"),
                           re.MULTILINE)
        cache[path] = [name for own, local in found
                       for name in ([own] if own else [str(pathlib.Path(path).parent / local), local])
                       if (ROOT / name).is_file()]
    return cache[path]


def tests_of(file, most):
    """Test programs by the length of the shortest way of includes to a header of `file`: its own, or, where no test
    comes to that, the first of its folder that it includes."""
    cache = {}
    folder = str(pathlib.Path(file).parent)
    headers = [str(pathlib.Path(file).with_suffix(".h"))]
    headers += [name for name in includes_of(file, cache) if name.startswith(folder)]
    for header in headers:
        ranked = []
        for test in sorted([*(ROOT / "tests").glob("test_*.cpp"), *(ROOT / "tests").glob("*/test_*.cpp")]):
            start = str(test.relative_to(ROOT))
            # What tests share is part of each of them.
            layer, seen = collections.deque([(0, start)]), {start: 0}
            while layer and header not in seen:
                distance, path = layer.popleft()
                for name in includes_of(path, cache):
                    if name not in seen:
                        own = name.startswith("tests/")
                        seen[name] = distance + (0 if own else 1)
                        (layer.appendleft if own else layer.append)((seen[name], name))
            if header in seen:
                near = sum(distance == 1 and str(pathlib.Path(name).parent) == folder
                           for name, distance in seen.items())
                ranked.append((seen[header], -near, test.stem))
        if ranked:
            return [name for _, _, name in sorted(ranked)[:most]]
    return []


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
        command = ["cmake", "--preset", options.preset, "-DTESSERA_WITH_CUDA=OFF", "-DTESSERA_UNITY=OFF",
                   "-DBUILD_SHARED_LIBS=ON", "-DCMAKE_LINK_DEPENDS_NO_SHARED=ON"]
        if options.preset == "dev":
            command.append("-DCMAKE_CXX_FLAGS_DEBUG=-Og")
        if shutil.which("ccache"):
            command.append("-DCMAKE_CXX_COMPILER_LAUNCHER=ccache")
        done = subprocess.run(command, cwd=TREE, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit("mutate: cmake failed:\n" + done.stdout + done.stderr)

    def make(self, programs):
        return run(["ninja", "-C", str(self.folder), "-j", self.jobs, *programs], 3600)

    def test(self, program, seconds):
        environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
        path = next(folder / program for folder in (self.folder / "tests", self.folder / "tests" / "cuda")
                    if (folder / program).exists())
        command = [str(path), "--gtest_fail_fast", "--gtest_brief=1"]
        return run(command, seconds, env=environment, preexec_fn=lambda: limits(program),
                   cwd=self.folder)


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
                        help="from the root; none: " + ", ".join(DEFAULTS))
    parser.add_argument("--count", type=int, default=10, help="mistakes a file (10); 0: all")
    parser.add_argument("--seed", default="1", help="of the sample (1)")
    parser.add_argument("--tests", help="programs to run, with commas between, in place of those found")
    parser.add_argument("--programs", type=int, default=3, help="at most so many test programs a file (3)")
    parser.add_argument("--preset", default="dev", help="of the build (dev); tsan sees removed locks")
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

    ignored = equivalents()
    chosen = []
    for given in options.files or DEFAULTS:
        file, _, lines = given.partition(":")
        path = ROOT / file
        if not path.is_file():
            sys.exit(f"mutate: there is no file '{file}'; give paths from {ROOT}")
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
    stopped = False
    for file, mutants in chosen:
        text = (TREE / file).read_text()
        programs = (options.tests.split(",") if options.tests else DEFAULTS.get(file)) or tests_of(file, options.programs)
        if not programs:
            print(f"{file}: no test includes it; name some with --tests")
            continue
        sources = [path for program in programs for path in (TREE / "tests").rglob(f"{program}.c*")]
        state = fingerprint([*sources, *(TREE / "tests").rglob("*.h")]) + " " + ",".join(programs)
        version = fingerprint([TREE / file])
        results = []
        for mutant in mutants:
            key = f"{options.preset} {file} {version} {mutant.begin} {mutant.end} {mutant.text}"
            one = known.find(key, state)
            if (file, *lines_of(text, mutant)) in ignored:
                results.append("equivalent")
                continue
            if one is None:
                if options.minutes and time.monotonic() - began > 60 * options.minutes:
                    stopped = True
                    break
                if any(program not in baseline for program in programs):
                    code, output = build.make(programs)
                    if code != 0:
                        sys.exit("mutate: the tree does not build:\n" + output[-4000:])
                    for program in programs:
                        start = time.monotonic()
                        code, output = build.test(program, 900)
                        if code != 0:
                            sys.exit(f"mutate: {program} fails without any mistake:\n" + output[-4000:])
                        baseline[program] = time.monotonic() - start
                result, how = judge(build, mutant, programs, baseline)
                one = {"key": key, "result": result, "how": how, "tests": state, "file": file, "line": mutant.line}
                known.add(one)
            print(f"{one['result']:<16}{file}:{mutant.line}  {mutant.operator}  {one['how']}", flush=True)
            results.append(one["result"])
            if one["result"] == "survived":
                survivors.append((text, mutant))
        print(f"{file}: {score_of(results)}, by {', '.join(programs)}", flush=True)
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
