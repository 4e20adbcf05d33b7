"""Plans of gpu_run.py: what is run on a borrowed GPU, in which order, and for how long at most.

A plan is a text. A line that begins with # says something to the reader, a backslash at the end of a
line continues it. What is not one of the words below is a part:

    NAME LIMIT COMMAND     a command of bash (errexit, nounset, pipefail) and its seconds at most
    &NAME LIMIT COMMAND    the same beside the parts that follow, until
    wait_NAME LIMIT -      which waits for it so long at most, and ends it

    budget SECONDS                     what half of all limits has to fit into
    set NAME VALUE || VALUE            a variable of the commands; the second value is a rehearsal's
    allow-skip PART PATTERN :: REASON  a regular expression, found in "TEST: MESSAGE" of a skipped test of
                                       GoogleTest or in "exit 77: LAST LINE"; any other skip is a failure
    without-gpu PROGRAM CODE TEXT      how a program that has no emulated form ends at a rehearsal
    once-more PART                     where it fails it is run again at once: under TESSERA_SYNC=1, and
                                       under compute-sanitizer's memcheck
    needs PART OTHER...                left out where one of the others, above it, did not pass

Commands see KIT (the folder of the kit), BIN (its programs: $BIN/NAME), WORK (a folder for whatever they
write), RESULTS (the folder of the eight files that come back), the variables that were set, and ONLY: the
tests that failed before, where a part is run again, else nothing. They are also what a value may name.
"""
import fnmatch
import pathlib
import re
import string
import subprocess
import sys

NAME = re.compile(r"[a-z][a-z0-9_]*$")
WORDS = ("budget", "set", "allow-skip", "without-gpu", "once-more", "needs")
GIVEN = ("KIT", "BIN", "WORK", "RESULTS", "ONLY")  # by the runner


class PlanError(ValueError):
    pass


class Part:
    """A line of a plan. kind: "part", "beside" (&NAME) or "wait"; name is without & and wait_."""

    def __init__(self, kind, name, limit, command):
        self.kind, self.name, self.limit, self.command = kind, name, limit, command


class Plan:
    def __init__(self, path):
        self.path, self.parts, self.budget = str(path), [], None
        self.settings = {}  # name -> (value, a rehearsal's)
        self.allowed_skips = []  # (part, compiled pattern, reason)
        self.without_gpu = {}  # program -> (code, text)
        self.once_more = []
        self.needs = {}  # part -> names
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
        number = 0
        while number < len(lines):
            begin, line = number, lines[number]
            while line.endswith("\\") and number + 1 < len(lines):
                number += 1
                line = line[:-1].rstrip() + " " + lines[number].strip()
            number += 1
            if line.strip() and not line.startswith("#"):
                try:
                    self._read(line.strip())
                except PlanError as error:
                    raise PlanError(f"{path}:{begin + 1}: {error}") from None
        try:
            self._look_at_the_whole()
        except PlanError as error:
            raise PlanError(f"{path}: {error}") from None

    def _read(self, line):
        word, _, rest = line.partition(" ")
        rest = rest.strip()
        if word == "budget":
            self.budget = self._seconds(rest)
        elif word == "set":
            name, _, values = rest.partition(" ")
            if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name) or name in GIVEN or name in self.settings:
                raise PlanError(f"set needs a new name of capitals, got '{name}'")
            real, bar, small = values.partition("||")
            self.settings[name] = (real.strip(), small.strip() if bar else real.strip())
        elif word == "allow-skip":
            what, colons, reason = rest.partition(" :: ")
            part, _, pattern = what.partition(" ")
            if not colons or not pattern.strip() or not reason.strip():
                raise PlanError("allow-skip is PART PATTERN :: REASON")
            try:
                self.allowed_skips.append((part, re.compile(pattern.strip()), reason.strip()))
            except re.error as error:
                raise PlanError(f"allow-skip: {error} in '{pattern.strip()}'") from None
        elif word == "without-gpu":
            words = rest.split(None, 2)
            if len(words) != 3 or not words[1].isdigit():
                raise PlanError("without-gpu is PROGRAM CODE TEXT")
            self.without_gpu[words[0]] = (int(words[1]), words[2])
        elif word == "once-more":
            self.once_more.append(rest)
        elif word == "needs":
            part, *others = rest.split() or [""]
            if not others:
                raise PlanError("needs is PART OTHER...")
            self.needs[part] = others
        else:
            self._read_part(line)

    def _read_part(self, line):
        words = line.split(None, 2)
        if len(words) < 3:
            raise PlanError("a part is NAME LIMIT COMMAND")
        name, limit, command = words
        kind = "part"
        if name.startswith("&"):
            kind, name = "beside", name[1:]
        elif name.startswith("wait_"):
            kind, name = "wait", name[5:]
        if not NAME.match(name):
            raise PlanError(f"'{words[0]}' is no name of a part: small letters, digits and _, and none of "
                            + ", ".join(WORDS))
        if (kind == "wait") != (command == "-"):
            raise PlanError(f"{words[0]}: - stands for the command of a wait, and of nothing else")
        same = [part for part in self.parts if part.name == name]
        if kind == "wait" and [part.kind for part in same] != ["beside"]:
            raise PlanError(f"wait_{name} waits for no &{name} above it")
        if kind != "wait" and same:
            raise PlanError(f"there are two parts {name}")
        self.parts.append(Part(kind, name, self._seconds(limit), command))

    @staticmethod
    def _seconds(text):
        if not text.isdigit() or int(text) == 0:
            raise PlanError(f"'{text}' is no number of seconds")
        return int(text)

    def _look_at_the_whole(self):
        names = {part.name for part in self.parts}
        waited = {part.name for part in self.parts if part.kind == "wait"}
        for part in self.parts:
            if part.kind == "beside" and part.name not in waited:
                raise PlanError(f"nothing waits for &{part.name}")
        for what, part in ([("allow-skip", skip[0]) for skip in self.allowed_skips]
                           + [("once-more", name) for name in self.once_more]
                           + [("needs", name) for name in self.needs]):
            if part not in names:
                raise PlanError(f"{what} names no part: '{part}'")
        order = [part.name for part in self.parts if part.kind != "beside"]
        for part, others in self.needs.items():
            for other in others:
                if other not in order or part in order and order.index(other) >= order.index(part):
                    raise PlanError(f"needs: {part} needs '{other}', which does not end before it")
        if not self.parts:
            raise PlanError("there is no part")
        if self.budget is not None and self.limits() / 2 > self.budget:
            raise PlanError(f"half of all limits is {self.limits() / 2:.0f} s, the budget {self.budget} s")

    def limits(self):
        """Seconds of all limits one after the other; parts beside others take the wait's."""
        return sum(part.limit for part in self.parts if part.kind != "beside")

    def environment(self, given, rehearsal):
        """What was set, with the given variables and those set above put into the values."""
        known = dict(given)
        for name, values in self.settings.items():
            known[name] = string.Template(values[1 if rehearsal else 0]).safe_substitute(known)
        return {name: known[name] for name in self.settings}

    def allows(self, part, skip):
        return any(name == part and pattern.search(skip) for name, pattern, _ in self.allowed_skips)

    def variables(self, part):
        """The variables of the plan and the runner that a command names, those within values too."""
        known, found = set(self.settings) | set(GIVEN), set()
        texts = [part.command]
        while texts:
            for name in re.findall(r"\$\{?([A-Z][A-Z0-9_]*)", texts.pop()):
                if name in known and name not in found:
                    found.add(name)
                    texts += self.settings.get(name, ())
        return found

    def programs(self, part):
        """The names behind $BIN/ of a command, and of the values that it takes."""
        texts = [part.command]
        for name in self.variables(part):
            texts += self.settings.get(name, ())
        return sorted({name for text in texts for name in re.findall(r"\$\{?BIN\}?/([\w.-]+)", text)})

    def files(self, part):
        """The paths behind $KIT/ of a command, and of the values that it takes."""
        texts = [part.command]
        for name in self.variables(part):
            texts += self.settings.get(name, ())
        return sorted({name for text in texts for name in re.findall(r"\$\{?KIT\}?/([\w./-]+)", text)})


def faults(plan, programs, files):
    """What a kit of these programs and files (patterns of fnmatch) lacks for a plan."""
    for part in plan.parts:
        if part.kind == "wait":
            continue
        shell = subprocess.run(["bash", "-n", "-c", part.command], capture_output=True, text=True)
        if shell.returncode != 0:
            yield f"{plan.path}: {part.name}: {shell.stderr.strip()}"
        for name in plan.programs(part):
            if name not in programs:
                yield f"{plan.path}: {part.name} names $BIN/{name}, which is not in the kit"
        for name in plan.files(part):
            if not any(fnmatch.fnmatch(name, file) for file in files):
                yield f"{plan.path}: {part.name} names $KIT/{name}, which is not in the kit"
    for name in plan.without_gpu:
        if name not in programs:
            yield f"{plan.path}: without-gpu names {name}, which is not in the kit"


def main(folder, paths):
    """plan.py KIT PLAN...: holds plans against an unpacked kit, and says what they take."""
    folder = pathlib.Path(folder)
    programs = {path.name for path in (folder / "bin").iterdir()}
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    failed = False
    for path in paths:
        try:
            plan = Plan(path)
        except (OSError, PlanError) as error:
            print(error, file=sys.stderr)
            failed = True
            continue
        for fault in faults(plan, programs, files):
            print(fault, file=sys.stderr)
            failed = True
        parts = sum(part.kind != "wait" for part in plan.parts)
        print(f"{pathlib.Path(path).name}: {parts} parts, limits of {plan.limits()} s in all"
              + (f", half of them within its budget of {plan.budget} s" if plan.budget else ""))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
