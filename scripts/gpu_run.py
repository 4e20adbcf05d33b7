#!/usr/bin/env python3
"""Spends the minutes of a borrowed GPU in the parts of a plan, in their order (gpu/plan.py: its syntax).

    python3 .carry/gpu/gpu_run.py --plan .carry/gpu/first.txt --out DIR --budget 540 [PART...]
    python3 .carry/gpu/gpu_run.py --plan .carry/gpu/first.txt --out DIR --budget 150 --rerun RESULTS

A part ends at its limit, with every process that came of it, those in sessions of their own too. One of
which not even half of its limit is left says "no time". What is known is on the disk at any moment: a line
of DIR/results.jsonl when a part begins and one when it ends, so that whoever cuts the run (SIGTERM, SIGKILL,
a machine that goes away) leaves all before it. DIR gets at most eight files of at most 16 MiB:

    results.jsonl  parts as they begin and end: state, seconds, JSON that they printed, tests that failed
    log.txt        what they printed, of each the first 256 KiB and the last 64
    report.md      the same to be read: states, speeds, last lines of what failed, tables that parts wrote
    env.json       card, driver, clocks, libraries, commit
    rates.json, launches.json, gemm.json   what programs wrote; launches.json from $WORK/launches-NAME.json
    logs.tar.gz    texts of $WORK

Skipping is a failure: a test of GoogleTest that was skipped, or the exit code 77, unless the plan allows it;
so is a GoogleTest that ran no test. --rerun runs again what failed in RESULTS (a results.jsonl, its folder,
or "last": the run before on this host): under TESSERA_SYNC=1, and what runs programs of the kit once more
under compute-sanitizer's memcheck; of tests those alone that failed. --rehearse FOLDER takes programs with
an emulated GPU from FOLDER and a plan's values for that.

Exit code: 0 where every part passed, 1 where one failed, 2 for mistakes of the call, 3 where there was no
time for one, the run was cut or its files could not be written. Python's own library only.
"""
import argparse
import collections
import ctypes
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
import stat
import subprocess
import sys
import tarfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "gpu")]  # in a kit, in a checkout
from plan import Plan, PlanError  # noqa: E402

FILES = ("results.jsonl", "log.txt", "report.md", "env.json", "rates.json", "launches.json", "gemm.json",
         "logs.tar.gz")
FILE_LIMIT = 16 << 20
HEAD, TAIL, LINE = 256 << 10, 64 << 10, 16 << 10  # bytes of a part's output, and of a line
LOG_LIMIT = 14 << 20
SHOWN_LINES = 30    # of a part that failed
RESERVE = 4         # seconds of the budget for writing what is known
KILLED_WITHIN = 5   # seconds in which processes end that were killed
TEXTS = (".log", ".txt", ".md", ".json", ".jsonl", ".csv")  # of $WORK, for logs.tar.gz
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


# ---- Processes ------------------------------------------------------------------------------------

def prctl(option, value):
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def descendants(root):
    """All processes below one, those too that began a session of their own."""
    children = collections.defaultdict(list)
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except (OSError, IndexError):
                continue  # it has ended
            children[parent].append(int(entry))
    found, front = [], [root]
    while front:
        below = children[front.pop()]
        found += below
        front += below
    return found


def end_descendants():
    """Kills all processes below this one; those that are left, waiting within the kernel, say."""
    until = time.monotonic() + KILLED_WITHIN
    while True:
        for process in descendants(os.getpid()):
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                pass
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            pass
        left = descendants(os.getpid())
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.01)


class Ended(Exception):
    pass


def supervise(parent, command):
    """Runs a part's command as the parent of all that comes of it: processes that lose theirs are handed
    to the nearest subreaper above. SIGTERM, or the end of the runner, ends them all."""
    def end(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Ended

    code = 128 + signal.SIGTERM
    try:
        signal.signal(signal.SIGTERM, end)
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            raise Ended
        child = subprocess.Popen(["bash", "-c", "set -euo pipefail\n" + command], start_new_session=True)
        code = child.wait()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    except Ended:
        pass
    left = end_descendants()
    if left:
        print(f"gpu_run.py: processes that cannot be ended: {left}", flush=True)
    return code if code >= 0 else 128 - code


# ---- What a part prints ---------------------------------------------------------------------------

class Output:
    """Follows a part's output: its head goes on to the log at once, its tail is kept, and every line is
    looked at for GoogleTest's words and for JSON. Holds a bounded share of it."""

    TEST = re.compile(r"\[ *(RUN|OK|FAILED|SKIPPED) *\] ([^\s,]+\.[^\s,]+)")
    RAN = re.compile(r"\[=+\] (\d+) tests? from .* ran\.")

    def __init__(self, write):
        self.write = write
        self.bytes, self.tail, self.tail_bytes = 0, collections.deque(), 0
        self.recent = collections.deque(maxlen=SHOWN_LINES)
        self.figures = collections.deque(maxlen=16)
        self.tests, self.running = None, None  # tests that ran; the one that has not ended yet
        self.failed, self.skipped = {}, {}     # names -> True, message
        self.message = None                    # lines of a skip's message
        self.lock = threading.Lock()

    def follow(self, pipe):
        rest = b""
        while chunk := os.read(pipe.fileno(), 1 << 16):
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            if len(rest) > LINE:
                lines.append(rest)
                rest = b""
            with self.lock:
                for line in lines:
                    self._line(line)
        with self.lock:
            if rest:
                self._line(rest)
            if self.running:
                self.failed[self.running] = True  # it began and never ended

    def _line(self, line):
        if len(line) > LINE:
            line = line[:LINE] + b" ..."
        self.bytes += len(line) + 1
        if self.bytes <= HEAD:
            self.write(line + b"\n")
        else:
            self.tail.append(line)
            self.tail_bytes += len(line) + 1
            while self.tail_bytes > TAIL:
                self.tail_bytes -= len(self.tail.popleft()) + 1
        text = line.decode("utf-8", "replace").rstrip()
        self.recent.append(text[:300].replace("```", "` ` `"))  # no end of a block of the report
        if text.startswith("{") and text.endswith("}"):
            self._figures(text)
        elif text.startswith("["):
            self._test(text)
        elif self.running and text.endswith(": Skipped"):
            self.message = []
        elif self.message is not None and len(self.message) < 20:
            self.message.append(text)

    def _figures(self, text):
        try:
            value = json.loads(text)
        except ValueError:
            return
        if isinstance(value, dict):
            self.figures.append(value)

    def _test(self, text):
        if ran := self.RAN.match(text):
            self.tests = (self.tests or 0) + int(ran[1])
        if not (found := self.TEST.match(text)):
            return
        state, name = found[1], found[2]
        if state == "RUN":
            if self.running:
                self.failed[self.running] = True
            self.running = name
        elif state == "FAILED":
            self.failed[name] = True
        elif state == "SKIPPED":
            if name not in self.skipped:  # else the list at the end
                self.skipped[name] = " ".join(self.message or []).strip()
        if state != "RUN" and name == self.running:
            self.running = None
        self.message = None

    def end(self):
        """Writes what was kept of the tail."""
        if self.tail:
            left_out = self.bytes - HEAD - self.tail_bytes
            if left_out > 0:
                self.write(f"... about {left_out} bytes left out ...\n".encode())
            for line in self.tail:
                self.write(line + b"\n")


class Task:
    """A command in progress."""

    def __init__(self, name, limit, command, environment, write):
        self.name, self.limit, self.began = name, limit, time.monotonic()
        self.output = Output(write)
        self.process = subprocess.Popen(
            [sys.executable, str(pathlib.Path(__file__).resolve()), "--supervise", str(os.getpid()), command],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        self.reader = threading.Thread(target=self.output.follow, args=(self.process.stdout,), daemon=True)
        self.reader.start()
        self.code, self.ended_at_limit, self.seconds = None, False, None

    def has_ended(self):
        """Also ends it where its time is over."""
        if self.seconds is None and self.process.poll() is None and self.age() >= self.limit:
            self.ended_at_limit = True
            self.end()
        if self.seconds is None and self.process.poll() is not None:
            self.reader.join(KILLED_WITHIN)
            self.code, self.seconds = self.process.returncode, self.age()
            self.output.end()
        return self.seconds is not None

    def age(self):
        return time.monotonic() - self.began

    def end(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(2 * KILLED_WITHIN)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


# ---- The host -------------------------------------------------------------------------------------

ASK_PYTHON = """
import importlib.metadata, importlib.util, json, sys
def version(name):
    try: return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: return None
spec = importlib.util.find_spec("nvidia")
print(json.dumps({"python": sys.version.split()[0], "torch": version("torch"),
                  "nvidia": list(spec.submodule_search_locations or []) if spec else []}))
"""


def answer(command, seconds=15):
    """The standard output of a command; nothing where it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else ""


def host_facts():
    """What is written into env.json, and the folders of NVIDIA's libraries: those of the Python that has
    torch first, so that both sides of a comparison load the same ones."""
    query = ("name", "driver_version", "memory.total", "clocks.sm", "clocks.mem", "clocks.max.sm",
             "clocks.max.mem", "power.limit", "power.draw", "temperature.gpu")
    cards = [dict(zip(query, (field.strip() for field in line.split(","))))
             for line in answer(["nvidia-smi", "--query-gpu=" + ",".join(query),
                                 "--format=csv,noheader"]).splitlines()]
    python = os.environ.get("TESSERA_PYTHON", "python3")
    try:
        peer = json.loads(answer([python, "-c", ASK_PYTHON]))
    except ValueError:
        peer = {"python": None, "torch": None, "nvidia": []}
    folders = [str(folder) for base in peer.pop("nvidia")
               for folder in sorted(pathlib.Path(base).glob("*/lib"))]
    folders = [folder for folder in [*folders, "/usr/local/cuda/lib64"] if os.path.isdir(folder)]
    return folders, {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "cards": cards,
        "kernel": os.uname().release, "processors": os.cpu_count(),
        "libc": answer(["ldd", "--version"]).partition("\n")[0], "peer": {"program": python, **peer},
        "libraries": folders, "LD_LIBRARY_PATH": os.environ.get("LD_LIBRARY_PATH", "")}


# ---- A run ----------------------------------------------------------------------------------------

class Cut(BaseException):
    pass


class Run:
    def __init__(self, options, plan):
        self.options, self.plan, self.start = options, plan, time.monotonic()
        self.out, self.work = pathlib.Path(options.out).resolve(), pathlib.Path(options.work).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        if not options.rerun:
            shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True, exist_ok=True)
        self.kit = self.work.parent / (self.work.name + "-kit")
        self.rows, self.tasks = [], {}
        self.facts, self.packed_logs_at = {}, 0.0
        self.log_lock, self.logged = threading.Lock(), 0
        self.log = open(self.out / "log.txt", "ab", buffering=0)
        self.results = open(self.out / "results.jsonl", "ab", buffering=0)

    # -- What is on the disk

    def elapsed(self):
        return time.monotonic() - self.start

    def left(self):
        return self.options.budget - RESERVE - self.elapsed()

    def write_log(self, text):
        with self.log_lock:
            if self.logged + len(text) <= LOG_LIMIT:
                self.log.write(text)
                self.logged += len(text)

    def note(self, **row):
        row = {**row, "at": round(self.elapsed(), 1)}
        for file in (self.results, *([self.last] if hasattr(self, "last") else [])):
            file.write((json.dumps(row) + "\n").encode())
            os.fsync(file.fileno())

    @staticmethod
    def put(path, data):
        """Writes without an empty file in between: whoever reads may come at any moment."""
        file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
        try:
            os.ftruncate(file, os.pwrite(file, data, 0))
        finally:
            os.close(file)

    def finish_part(self, name, state, seconds=0.0, **more):
        more = {key: value for key, value in more.items() if value not in (None, [], {}, "")}
        row = {"part": name, "state": state, "seconds": round(seconds, 1), **more}
        self.rows.append(row)
        self.note(**row)
        self.write_log(f"==== {name}: {state}, {seconds:.1f} s\n".encode())
        print(f"{self.elapsed():5.0f} s  {name}: {state}" + (f" ({row['reason']})" if "reason" in row else ""),
              flush=True)
        self.collect()

    def collect(self, last=False):
        """What is made of the rows. It may fail (a full disk, a file that vanishes), and the parts go on."""
        try:
            self.write_files(last)
            self.is_written = True
        except Exception as error:
            self.is_written = False
            text = f"gpu_run.py: files were not written: {error!r}"
            print(text, file=sys.stderr, flush=True)
            self.write_log((text + "\n").encode())

    def write_files(self, last):
        launches = {file.stem.removeprefix("launches-"): load(file)
                    for file in sorted(self.work.glob("launches-*.json"))}
        launches = {name: value for name, value in launches.items() if value is not None}
        if launches:
            self.put(self.out / "launches.json", (json.dumps(launches) + "\n").encode())
        self.put(self.out / "report.md", self.report().encode())
        if last or self.elapsed() - self.packed_logs_at > 20:
            self.pack_logs()
            self.packed_logs_at = self.elapsed()
        if last:
            self.leave_eight_files()

    def pack_logs(self):
        files = [(file.stat().st_size, file) for file in self.work.rglob("*")
                 if file.suffix in TEXTS and stat.S_ISREG(file.lstat().st_mode)]
        target, most = self.work.parent / (self.work.name + "-logs.tar.gz"), 48 << 20
        while True:
            room = most
            with tarfile.open(target, "w:gz", compresslevel=6) as packed:
                for size, file in sorted(files):  # the small ones first
                    room -= size
                    if room < 0:
                        break
                    packed.add(file, arcname=str(pathlib.Path("work") / file.relative_to(self.work)))
            if target.stat().st_size <= FILE_LIMIT:
                break
            most //= 2
        self.put(self.out / "logs.tar.gz", target.read_bytes())

    def leave_eight_files(self):
        for path in sorted(self.out.iterdir()):
            if path.name not in FILES:
                reason = "no file of a run"
            elif path.stat().st_size > FILE_LIMIT:
                reason = f"larger than {FILE_LIMIT >> 20} MiB"
            else:
                continue
            shutil.move(str(path), self.work / ("moved-" + path.name))
            self.note(left_out=path.name, reason=reason)
            self.write_log(f"{path.name} was moved to {self.work}: {reason}\n".encode())

    def report(self):
        card = ", ".join(f"{card['name']}, driver {card['driver_version']}"
                         for card in self.facts.get("cards", [])) or "no GPU"
        lines = ["# GPU run", "", f"- date: {self.facts.get('date', 'unknown')}", f"- card: {card}",
                 f"- plan: {pathlib.Path(self.plan.path).name}"
                 + (", what failed before" if self.options.rerun else ""),
                 f"- commit: {self.facts.get('commit', 'unknown')}"]
        if self.options.rehearse:
            lines.append("- **a rehearsal without a GPU: no figure below means anything**")
        lines += ["", "| part | result | s | |", "|---|---|---|---|"]
        for row in self.rows:
            said = [row.get("reason", "")]
            if "tests" in row:
                said.append(f"{row['tests']} tests")
            if "skips" in row:
                said.append(f"{len(row['skips'])} skipped as the plan allows")
            lines.append(f"| {row['part']} | {row['state']} | {row['seconds']:.1f} | "
                         + "; ".join(text.replace("|", "/") for text in said if text) + " |")
        for task in self.tasks.values():
            lines.append(f"| {task.name} | running | {task.age():.1f} | |")
        speeds = [(row["part"], figure) for row in self.rows for figure in row.get("figures", [])
                  if "tokens_per_s" in figure]
        if speeds:
            lines += ["", "| part | program | dtype | ms a step | tokens/s | GiB of tensors | own kernels |",
                      "|---|---|---|---|---|---|---|"]
            for part, figure in speeds:
                peak = figure.get("peak_tensor_bytes")
                lines.append(f"| {part} | {figure.get('program', '')} | {figure.get('dtype', '')} | "
                             f"{figure.get('ms_per_step', '')} | {figure['tokens_per_s']} | "
                             f"{'' if peak is None else f'{peak / 2**30:.2f}'} | "
                             f"{figure.get('own_kernels', '')} |")
        for row in self.rows:
            if "last_lines" in row:
                lines += ["", f"{row['part']}: {row['state']}; its last lines:", "", "```text",
                          *row["last_lines"], "```"]
        for task in list(self.tasks.values()):
            with task.output.lock:
                recent = list(task.output.recent)
            lines += ["", f"{task.name}, still running:", "", "```text", *recent, "```"]
        room = 256 << 10
        for table in sorted(path for path in self.work.glob("*.md") if path.is_file()):
            text = table.read_text(errors="replace")
            room -= len(text)
            if room > 0:
                lines += ["", text.strip()]
        return "\n".join(lines) + "\n"

    # -- The kit

    def unpack(self):
        archive = pathlib.Path(self.options.kit)
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        mark = self.kit / ".unpacked"
        if not (mark.exists() and mark.read_text() == digest):
            shutil.rmtree(self.kit, ignore_errors=True)
            self.kit.mkdir(parents=True)
            with tarfile.open(archive) as packed:
                safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
                packed.extractall(self.kit, **safe)
            mark.write_text(digest)

    def prepare(self):
        """Unpacks the kit, asks the host, and makes the environment of the commands."""
        self.unpack()
        folders, self.facts = host_facts()
        commit = self.kit / "commit"
        self.facts["commit"] = commit.read_text().splitlines()[0] if commit.exists() else "unknown"
        self.facts["changed"] = commit.exists() and len(commit.read_text().splitlines()) > 1
        self.facts["plan"] = pathlib.Path(self.plan.path).name
        self.facts["rehearsal"] = bool(self.options.rehearse)
        self.put(self.out / "env.json", (json.dumps(self.facts, indent=1) + "\n").encode())
        if not self.options.rerun:
            self.last = open(self.work.parent / (self.work.name + "-last.jsonl"), "wb", buffering=0)
        table = self.kit / "gemm.json"  # algorithms of earlier runs
        if table.exists() and not (self.out / "gemm.json").exists():
            shutil.copy(table, self.out / "gemm.json")
        # Programs start with libraries of the kit, and of NVIDIA behind them; nothing else does: the
        # host's own programs, Python first of all, keep what they have.
        programs = self.work / "bin"
        shutil.rmtree(programs, ignore_errors=True)
        programs.mkdir()
        self.emulated = set()
        for program in sorted((self.kit / "bin").iterdir()):
            libraries = [self.kit / "lib"]
            twin = pathlib.Path(self.options.rehearse or "/nowhere") / "bin" / program.name
            if self.options.rehearse and twin.exists():
                self.emulated.add(program.name)
                program, libraries = twin, [*libraries, twin.parent.parent / "lib"]
            path = ":".join([*map(str, libraries), *folders, self.facts["LD_LIBRARY_PATH"]]).rstrip(":")
            start = programs / program.name
            start.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{path}" exec "{program}" "$@"\n')
            start.chmod(0o755)
        given = {"KIT": str(self.kit), "BIN": str(programs), "WORK": str(self.work),
                 "RESULTS": str(self.out), "ONLY": ""}
        environment = dict(os.environ)
        environment.setdefault("TESSERA_GEMM_TABLE", str(self.out / "gemm.json"))
        environment["PATH"] = environment.get("PATH", "/usr/bin:/bin") + ":/usr/local/cuda/bin"
        environment.update(given)
        environment.update(self.plan.environment(given, bool(self.options.rehearse)))
        self.environment = environment

    # -- Parts

    def begin(self, name, limit, command, more=None, beside=False):
        """Starts it, or says that there is no time, or that what it needs did not pass."""
        left = self.left()
        states = {row["part"]: row["state"] for row in self.rows}
        lacking = [other for other in self.plan.needs.get(name, ())
                   if states.get(other, "passed") not in ("passed", "skipped")]
        if lacking:
            self.finish_part(name, "left out", reason=f"{lacking[0]}: {states[lacking[0]]}")
            return None
        if self.options.rehearse:  # an emulation has no speed
            limit *= 5
        if left < limit / 2:
            self.finish_part(name, "no time", reason=f"{max(left, 0):.0f} s of its {limit} were left")
            return None
        limit = min(limit, left)
        self.note(part=name, state="begins", limit=round(limit, 1))
        self.write_log(f"\n==== {name} at {self.elapsed():.1f} s: {command}\n".encode())
        # What runs beside others says whose lines are between theirs.
        mark = f"{name}| ".encode() if beside else b""
        self.tasks[name] = Task(name, limit, command, {**self.environment, **(more or {})},
                                lambda text: self.write_log(mark + text))
        return self.tasks[name]

    def wait(self, task, until=None):
        """Until it has ended; all others that run beside it have their limits as well."""
        shown = time.monotonic()
        while not task.has_ended():
            if until is not None and time.monotonic() >= until:
                task.limit = 0
            for other in list(self.tasks.values()):
                other.has_ended()
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                self.put(self.out / "report.md", self.report().encode())
            time.sleep(0.02)

    def judge(self, task, programs=(), part=None):
        """The row of a task that has ended; whether it passed."""
        self.tasks.pop(task.name, None)
        part, output, reason = part or task.name, task.output, ""
        state, code = ("passed" if task.code == 0 else "FAILED"), task.code
        skips = [f"{name}: {message}" for name, message in output.skipped.items()]
        without = None
        if self.options.rehearse:
            without = next((self.plan.without_gpu[name] for name in programs
                            if name in self.plan.without_gpu and name not in self.emulated), None)
        if task.ended_at_limit:
            state, reason = "FAILED", f"ended at its limit of {task.limit:.0f} s"
            if task.limit == 0:
                reason = "ended, as nobody waits for it any longer"
        elif without is not None:
            wanted, text = without
            said = text in "\n".join(output.recent)
            state = "passed" if code == wanted and said else "FAILED"
            reason = (f"rehearsed to '{text}'" if state == "passed" else
                      f"code {code}, where a rehearsal ends with {wanted} and '{text}'")
        elif code == 77:
            last = next((line for line in reversed(output.recent) if line.strip()), "")
            skips = [f"exit 77: {last}"]
            allowed = self.plan.allows(part, skips[0])
            state, reason = ("skipped" if allowed else "FAILED"), f"skipped: {last}"
        elif code > 128:
            number = code - 128
            known = number in set(map(int, signal.Signals))
            reason = f"ended by {signal.Signals(number).name if known else f'code {code}'}"
        elif code != 0:
            reason = f"code {code}"
        if state == "passed" and without is None:
            # A plan's list is of the card; emulated programs have no libraries.
            others = [] if self.options.rehearse else [skip for skip in skips if not self.plan.allows(part, skip)]
            if output.failed:
                state, reason = "FAILED", f"{len(output.failed)} tests failed, and its code is 0"
            elif others:
                state, reason = "FAILED", f"{len(others)} skips that the plan does not list: {others[0][:200]}"
            elif output.tests == 0:
                state, reason = "FAILED", "no test ran"
        self.finish_part(task.name, state, task.seconds, code=code, reason=reason, tests=output.tests,
                         figures=list(output.figures), failed_tests=sorted(output.failed), skips=skips,
                         last_lines=list(output.recent) if state == "FAILED" else None)
        return state in ("passed", "skipped")

    def again(self, part, failed_tests, share=1.0):
        """What failed, under TESSERA_SYNC=1 and, where it runs programs of the kit, under memcheck."""
        ways = [("sync", part.command, part.limit, {"TESSERA_SYNC": "1"})]
        if self.plan.programs(part):
            checked = ("compute-sanitizer --tool memcheck --target-processes all --error-exitcode 9 "
                       "bash -c \"$AGAIN\"")
            ways.append(("memcheck", checked, 4 * part.limit,
                         {"AGAIN": "set -euo pipefail\n" + part.command}))
        for number, (way, command, limit, more) in enumerate(ways):
            room = max(self.left(), 0) * share / (len(ways) - number)
            more["ONLY"] = ":".join(failed_tests)
            task = self.begin(f"{part.name}_{way}", max(1, min(limit, int(room))), command, more)
            if task is not None:
                self.wait(task)
                self.judge(task, self.plan.programs(part), part.name)

    def run(self, wanted):
        passed = True
        for part in self.plan.parts:
            if wanted and part.name not in wanted:
                continue
            if part.kind == "beside":
                self.begin(part.name, part.limit, part.command, beside=True)
                continue
            if part.kind == "wait":
                task = self.tasks.get(part.name)
                if task is not None:
                    patience = part.limit * (5 if self.options.rehearse else 1)
                    self.wait(task, time.monotonic() + max(0.1, min(patience, self.left())))
                    passed &= self.judge(task, self.plan.programs(self.begun(part.name)))
                continue
            task = self.begin(part.name, part.limit, part.command)
            if task is None:
                continue
            self.wait(task)
            if not self.judge(task, self.plan.programs(part)):
                passed = False
                if part.name in self.plan.once_more and not self.options.rehearse:
                    self.again(part, self.rows[-1].get("failed_tests", []), share=0.3)
        return passed

    def begun(self, name):
        return next(part for part in self.plan.parts if part.name == name and part.kind != "wait")

    def rerun(self, wanted):
        failed = {}
        for row in self.earlier:
            if row.get("state") == "begins":
                failed[row["part"]] = []  # until it ends
            elif str(row.get("state", "")).startswith("FAILED"):
                failed[row["part"]] = row.get("failed_tests", [])
            elif "part" in row:
                failed.pop(row["part"], None)
        parts = [part for part in self.plan.parts if part.kind != "wait" and part.name in failed
                 and (not wanted or part.name in wanted)]
        for number, part in enumerate(parts):
            self.again(part, failed[part.name], share=1 / (len(parts) - number))
        if not parts:
            print("nothing failed in", self.options.rerun)
        return all(row["state"] == "passed" for row in self.rows)

    def end_all(self, state, reason):
        """What still runs."""
        for task in list(self.tasks.values()):
            task.end()
            task.has_ended()
            self.tasks.pop(task.name)
            self.finish_part(task.name, state, task.seconds or task.age(), reason=reason,
                             last_lines=list(task.output.recent))
        if left := end_descendants():  # strays of a supervisor that somebody killed
            self.note(cannot_be_ended=left)


def load(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def read_rows(path):
    """Of a results.jsonl; a line that was cut off at the end of it counts for nothing."""
    rows = []
    for line in pathlib.Path(path).read_text(errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", required=True, help="a text; gpu/plan.py says its syntax")
    parser.add_argument("--out", required=True, help="folder for the eight files")
    parser.add_argument("--budget", type=float, help="seconds in all; default: the plan's")
    parser.add_argument("--kit", default=str(HERE / "kit.tar.xz"))
    parser.add_argument("--work", default="/tmp/tessera-gpu", help="folder for everything else")
    parser.add_argument("--rerun", metavar="RESULTS", help="what failed there: results.jsonl, its folder, or last")
    parser.add_argument("--rehearse", metavar="FOLDER", help="with the emulated programs of FOLDER/bin")
    parser.add_argument("parts", nargs="*", help="these parts alone")
    options = parser.parse_args()
    try:
        plan = Plan(options.plan)
        options.budget = options.budget or plan.budget
        names = {part.name for part in plan.parts}
        if unknown := [name for name in options.parts if name not in names]:
            raise PlanError(f"{options.plan} has no part {', '.join(unknown)}; there are "
                            + ", ".join(sorted(names)))
        if not options.budget:
            raise PlanError("give --budget; the plan says none")
        earlier = None
        if options.rerun:
            path = pathlib.Path(options.work + "-last.jsonl" if options.rerun == "last" else options.rerun)
            earlier = read_rows(path / "results.jsonl" if path.is_dir() else path)
    except (PlanError, OSError) as error:
        print(f"gpu_run.py: {error}", file=sys.stderr)
        return 2
    prctl(PR_SET_CHILD_SUBREAPER, 1)

    def cut(*_):
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        raise Cut

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, cut)
    run = Run(options, plan)
    run.earlier = earlier
    passed = False
    try:
        run.note(plan=pathlib.Path(plan.path).name, state="start", budget=options.budget,
                 rerun=options.rerun, rehearsal=bool(options.rehearse))
        run.prepare()
        passed = run.rerun(set(options.parts)) if options.rerun else run.run(set(options.parts))
    except Cut:
        run.end_all("cut", "the run was cut from outside")
    finally:
        run.end_all("cut", "the run has ended")
        run.note(state="end")
        run.collect(last=True)
    print(run.report()[-8000:])
    states = [row["state"] for row in run.rows]
    if "FAILED" in states:
        return 1
    return 0 if passed and run.is_written and "no time" not in states and "cut" not in states else 3


if __name__ == "__main__":
    if sys.argv[1:2] == ["--supervise"]:
        sys.exit(supervise(int(sys.argv[2]), sys.argv[3]))
    sys.exit(main())
