"""scripts/gpu_run.py with parts that go wrong: each costs its own limit at most, and what came before it,
and it itself, comes back. Needs no GPU and no build.

    python3 tests/gpu_kit/test_gpu_run.py
"""
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUNNER = ROOT / "scripts/gpu_run.py"
sys.path.insert(0, str(ROOT / "scripts/gpu"))
from plan import Plan, PlanError, faults  # noqa: E402

HANG = 60  # seconds in which whatever these tests start has ended, on a busy machine too
FILES = {"results.jsonl", "log.txt", "report.md", "env.json", "rates.json", "launches.json", "gemm.json",
         "logs.tar.gz"}


def is_alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class RunTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="gpu_run_")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.out, self.work = self.folder / "out", self.folder / "work"
        self.programs = {}

    def command(self, plan, *more, budget="100"):
        """The runner over a plan and a kit of self.programs: name -> text of a script."""
        (self.folder / "plan.txt").write_text(plan)
        tree = self.folder / "tree"
        (tree / "bin").mkdir(parents=True, exist_ok=True)
        (tree / "lib").mkdir(exist_ok=True)
        (tree / "commit").write_text("0123abcd\n")
        for name, text in self.programs.items():
            (tree / "bin" / name).write_text(text)
            (tree / "bin" / name).chmod(0o755)
        with tarfile.open(self.folder / "kit.tar.xz", "w:xz") as packed:
            for name in ("bin", "lib", "commit"):
                packed.add(tree / name, arcname=name)
        return [sys.executable, str(RUNNER), "--plan", str(self.folder / "plan.txt"), "--out", str(self.out),
                "--kit", str(self.folder / "kit.tar.xz"), "--work", str(self.work), "--budget", budget, *more]

    def run_plan(self, plan, *more, environment=None, **options):
        done = subprocess.run(self.command(plan, *more, **options), capture_output=True, text=True, timeout=HANG,
                              env={**os.environ, **(environment or {})})
        self.printed = done.stdout + done.stderr
        return done.returncode

    def rows(self):
        lines = (self.out / "results.jsonl").read_text().splitlines()
        return {row["part"]: row for row in map(json.loads, lines) if "part" in row}

    def states(self):
        return {name: row["state"] for name, row in self.rows().items()}

    def test_parts_run_in_their_order_and_see_the_variables(self):
        self.programs["hello"] = "#!/bin/sh\necho \"hello $1 $LD_LIBRARY_PATH\"\n"
        code = self.run_plan("set NAME big || small\n"
                             "first 20 $BIN/hello $NAME; echo '{\"tokens_per_s\": 5, \"program\": \"p\"}'\n"
                             "second 20 test -d $WORK && echo '[1]' > $WORK/launches-a.json && \\\n"
                             "    echo \"${LD_LIBRARY_PATH:-nothing}\"\n",
                             environment={"LD_LIBRARY_PATH": "/of/the/host"})
        self.assertEqual(code, 0, self.printed)
        log = (self.out / "log.txt").read_text()
        kit = str(self.work) + "-kit/lib"
        self.assertRegex(log, f"hello big {kit}:.*/of/the/host\n")  # behind NVIDIA's, where there are any
        self.assertIn("\n/of/the/host\n", log)  # what is no program of the kit keeps the host's
        self.assertEqual(self.rows()["first"]["figures"], [{"tokens_per_s": 5, "program": "p"}])
        self.assertEqual(json.loads((self.out / "launches.json").read_text()), {"a": [1]})
        self.assertEqual(json.loads((self.out / "env.json").read_text())["commit"], "0123abcd")
        self.assertLessEqual({path.name for path in self.out.iterdir()}, FILES)

    def test_a_part_that_hangs_costs_its_limit_alone(self):
        code = self.run_plan("hangs 2 echo before; sleep 1000\nafter 20 echo after\n")
        self.assertEqual(code, 1, self.printed)
        self.assertIn("ended at its limit of 2 s", self.rows()["hangs"]["reason"])
        self.assertEqual(self.rows()["hangs"]["last_lines"], ["before"])
        self.assertEqual(self.states()["after"], "passed")

    def test_a_part_that_ignores_signals_is_ended(self):
        code = self.run_plan("stays 2 trap '' TERM INT HUP; while :; do sleep 1 || :; done\nafter 20 true\n")
        self.assertEqual(code, 1)
        self.assertEqual(self.states(), {"stays": "FAILED", "after": "passed"})

    def test_a_crash_says_its_signal_and_the_test_that_ran(self):
        self.programs["tests"] = ("#!/bin/bash\necho '[ RUN      ] A.Passes'\necho '[       OK ] A.Passes (0 ms)'\n"
                                  "echo '[ RUN      ] A.Crashes'\nkill -SEGV $$\n")
        code = self.run_plan("crashes 20 $BIN/tests\nafter 20 true\n")
        self.assertEqual(code, 1)
        row = self.rows()["crashes"]
        self.assertEqual((row["state"], row["failed_tests"]), ("FAILED", ["A.Crashes"]))
        self.assertIn("SIGSEGV", row["reason"])
        self.assertEqual(self.states()["after"], "passed")
        self.assertIn("A.Crashes", (self.out / "report.md").read_text())

    def test_a_skip_that_the_plan_does_not_list_is_a_failure(self):
        skips = ("echo '[ RUN      ] A.B'; echo 'a.cpp:3: Skipped'; echo needs two devices; echo; "
                 "echo '[  SKIPPED ] A.B (0 ms)'; echo '[==========] 1 test from 1 test suite ran. (0 ms total)'")
        code = self.run_plan("allow-skip listed needs two devices :: there is one\n"
                             "allow-skip gives_up ^exit 77: no tool :: not every host has it\n"
                             f"listed 20 {skips}\nunlisted 20 {skips}\n"
                             "gives_up 20 echo no tool; exit 77\ngives_up_too 20 echo no tool; exit 77\n")
        self.assertEqual(code, 1)
        self.assertEqual(self.states(), {"listed": "passed", "unlisted": "FAILED", "gives_up": "skipped",
                                         "gives_up_too": "FAILED"})
        self.assertIn("A.B: needs two devices", self.rows()["unlisted"]["reason"])

    def test_tests_that_failed_and_none_that_ran_are_failures_whatever_the_code(self):
        self.run_plan("failed 20 echo '[  FAILED  ] A.B (0 ms)'\n"
                      "none 20 echo '[==========] 0 tests from 0 test suites ran. (0 ms total)'\n")
        self.assertEqual(self.states(), {"failed": "FAILED", "none": "FAILED"})

    def test_of_much_output_head_and_tail_are_kept(self):
        code = self.run_plan("loud 50 echo the first line; head -c 10000000 /dev/zero | tr '\\0' '\\n' | "
                             "sed 's/^/some words of a line/'; echo the last line\n"
                             "one_line 50 head -c 20000000 /dev/zero | tr '\\0' x; echo; echo done\n")
        self.assertEqual(code, 0, self.printed)
        log = (self.out / "log.txt").read_bytes()
        self.assertLess(len(log), 1 << 20)
        for text in (b"the first line", b"bytes left out", b"the last line", b"\ndone\n"):
            self.assertIn(text, log)

    def test_a_line_without_an_end_is_not_held_in_memory(self):
        command = self.command("endless 50 head -c 800000000 /dev/zero | tr '\\0' x; echo; echo done\n")
        bound = 600 << 20  # of addresses, for the runner and each of its processes

        def limit():
            resource.setrlimit(resource.RLIMIT_AS, (bound, bound))

        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG, preexec_fn=limit)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("\ndone\n", (self.out / "log.txt").read_text())

    def test_children_do_not_outlive_a_part(self):
        note = self.folder / "daemon.pid"
        leaves = f"setsid bash -c 'echo $$ > {note}; exec sleep 1000' > /dev/null 2>&1 & "
        wait = f"while ! test -s {note}; do sleep 0.05; done"
        for name, end, state in (("quick", "true", "passed"), ("slow", "sleep 1000", "FAILED")):
            with self.subTest(name):
                note.unlink(missing_ok=True)
                # Twice removed: its parent ends, so that it is nobody's child.
                self.run_plan(f"{name} 5 (({leaves}) &); {wait}; {end}\n"
                              f"next 20 echo the daemon has ended: $(kill -0 $(cat {note}) 2> /dev/null || echo yes)\n")
                self.assertEqual(self.states()[name], state, self.printed)
                self.assertIn("the daemon has ended: yes\n", (self.out / "log.txt").read_text())
                self.assertFalse(is_alive(int(note.read_text())))
                shutil.rmtree(self.out)

    def test_a_part_beside_others_is_waited_for_and_keeps_its_children(self):
        code = self.run_plan(
            "&beside 30 (setsid sleep 1000 & echo $! > $WORK/child); until test -e $WORK/go; do sleep 0.05; done; "
            "kill -0 $(cat $WORK/child); echo '{\"ms\": 1}'\n"
            "first 20 until test -s $WORK/child; do sleep 0.05; done\n"
            "go 20 touch $WORK/go\nwait_beside 20 -\n")
        self.assertEqual(code, 0, self.printed)
        self.assertEqual(list(self.states()), ["beside", "first", "go"])
        self.assertEqual(self.rows()["beside"]["figures"], [{"ms": 1}])

    def test_a_wait_ends_what_runs_beside(self):
        code = self.run_plan("&beside 50 sleep 1000\nfirst 20 true\nwait_beside 1 -\nlast 20 true\n")
        self.assertEqual(code, 1)
        self.assertEqual(self.states(), {"beside": "FAILED", "first": "passed", "last": "passed"})

    def test_what_no_longer_fits_says_so(self):
        code = self.run_plan("big 1000 true\nsmall 4 true\n", budget="20")
        self.assertEqual(code, 3)
        self.assertEqual(self.states(), {"big": "no time", "small": "passed"})

    def start(self, plan):
        process = subprocess.Popen(self.command(plan), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.addCleanup(process.stdout.close)
        note, until = self.folder / "child.pid", time.monotonic() + HANG
        while not (note.exists() and note.read_text().strip()):
            self.assertLess(time.monotonic(), until, "the part did not begin")
            time.sleep(0.05)
        return process, int(note.read_text())

    def cut_plan(self):
        return ("first 20 echo of the first\n"
                f"second 100 echo of the second; setsid bash -c 'echo $$ > {self.folder}/child.pid; "
                "exec sleep 1000'; sleep 1000\nthird 20 true\n")

    def test_a_run_that_is_asked_to_end_reports_all_before(self):
        process, child = self.start(self.cut_plan())
        process.send_signal(signal.SIGTERM)
        printed, _ = process.communicate(timeout=HANG)
        self.assertEqual(process.returncode, 3, printed)
        self.assertEqual(self.states(), {"first": "passed", "second": "cut"})
        self.assertFalse(is_alive(child))
        self.assertIn("of the second", (self.out / "report.md").read_text())
        self.assertTrue(tarfile.is_tarfile(self.out / "logs.tar.gz"))

    def test_a_run_that_is_killed_leaves_all_before_and_no_process(self):
        process, child = self.start(self.cut_plan())
        process.kill()
        process.communicate(timeout=HANG)
        self.assertEqual(self.states(), {"first": "passed", "second": "begins"})
        log = (self.out / "log.txt").read_text()
        self.assertIn("of the first\n", log)
        self.assertIn("of the second\n", log)
        self.assertIn("| first | passed |", (self.out / "report.md").read_text())
        until = time.monotonic() + HANG
        while is_alive(child):
            self.assertLess(time.monotonic(), until, "a process of the run goes on")
            time.sleep(0.05)

    def test_a_second_call_runs_what_failed_in_sync_and_under_memcheck(self):
        self.programs["tests"] = ("#!/bin/bash\necho \"only=$ONLY sync=${TESSERA_SYNC:-} tool=${TOOL:-}\"\n"
                                  "test -n \"$ONLY\" || { echo '[  FAILED  ] A.B (0 ms)'; exit 1; }\n")
        plan = "good 20 true\nbad 20 $BIN/tests\npeer 20 exit 4\nbeside 20 true\n"
        self.assertEqual(self.run_plan(plan), 1)
        tools = self.folder / "tools"
        tools.mkdir()
        tool = tools / "compute-sanitizer"
        tool.write_text("#!/bin/bash\nwhile [[ $1 == --* ]]; do case $1 in --tool) TOOL=$2; shift;; "
                        "--target-processes | --error-exitcode) shift;; esac; shift; done\nexport TOOL\nexec \"$@\"\n")
        tool.chmod(0o755)
        environment = {"PATH": f"{tools}:{os.environ['PATH']}"}
        earlier = self.out
        for given in ("last", str(earlier), str(earlier / "results.jsonl")):
            with self.subTest(given):
                self.out = self.folder / "again" / given.strip("/").replace("/", "_")
                self.run_plan(plan, "--rerun", given, environment=environment)
                self.assertEqual(self.states(), {"bad_sync": "passed", "bad_memcheck": "passed",
                                                 "peer_sync": "FAILED"})
                log = (self.out / "log.txt").read_text()
                self.assertIn("only=A.B sync=1 tool=\n", log)
                self.assertIn("only=A.B sync= tool=memcheck\n", log)

    def test_what_fails_is_run_once_more_at_once_where_the_plan_says_so(self):
        self.programs["fails"] = "#!/bin/bash\necho sync=${TESSERA_SYNC:-}\nexit 1\n"
        self.run_plan("once-more smoke\nsmoke 5 $BIN/fails\nnext 5 true\n")
        self.assertEqual(list(self.states()), ["smoke", "smoke_sync", "smoke_memcheck", "next"])
        self.assertIn("sync=1", (self.out / "log.txt").read_text())

    def test_what_needs_a_part_that_failed_is_left_out(self):
        self.assertEqual(self.run_plan("needs c a\nneeds d b e\nneeds f a\na 5 true\nb 5 exit 3\n&e 5 true\nwait_e 5 -\n"
                                       "c 5 true\nd 5 true\n&f 5 true\nwait_f 5 -\n"), 1)
        self.assertEqual(self.states(), {"a": "passed", "b": "FAILED", "e": "passed", "c": "passed",
                                         "d": "left out", "f": "passed"})
        self.assertEqual(self.rows()["d"]["reason"], "b: FAILED")
        self.run_plan("needs d b\nneeds f b\nb 0005 exit 3\n&d 5 true\nwait_d 5 -\nf 5 true\n", "d", "f")
        self.assertEqual((self.states()["d"], self.states()["f"]), ("passed", "passed"))  # by themselves

    def test_files_that_are_no_run_s_do_not_stay(self):
        self.run_plan("writes 20 echo 1 > $RESULTS/other.json; echo '{}' > $RESULTS/rates.json; "
                      "head -c 17000000 /dev/zero > $RESULTS/gemm.json\n")
        names = {path.name for path in self.out.iterdir()}
        self.assertLessEqual(names, FILES - {"gemm.json"})
        self.assertIn("rates.json", names)
        self.assertTrue((self.work / "moved-gemm.json").exists())

    def test_a_report_that_cannot_be_written_costs_no_part(self):
        code = self.run_plan("first 20 mkdir $RESULTS/launches.json; echo '[]' > $WORK/launches-a.json\n"
                             "second 20 echo of the second\n")
        self.assertIn("files were not written", self.printed)
        self.assertEqual(self.states(), {"first": "passed", "second": "passed"})
        self.assertIn("of the second\n", (self.out / "log.txt").read_text())
        self.assertEqual(code, 3, self.printed)

    def test_logs_stay_below_the_limit_of_a_file(self):
        self.run_plan("writes 50 head -c 30000000 /dev/urandom > $WORK/large.log; echo small > $WORK/small.log\n")
        packed = self.out / "logs.tar.gz"
        self.assertLess(packed.stat().st_size, 16 << 20)
        with tarfile.open(packed) as tar:
            self.assertIn("work/small.log", tar.getnames())

    def test_a_rehearsal_takes_emulated_programs_and_the_words_of_the_others(self):
        self.programs = {"has": "#!/bin/sh\necho real\nexit 1\n", "lacks": "#!/bin/sh\necho there is no GPU\nexit 1\n",
                         "wrong": "#!/bin/sh\necho no such option\nexit 1\n"}
        twin = self.folder / "emulated/bin/has"
        twin.parent.mkdir(parents=True)
        twin.write_text("#!/bin/sh\necho emulated $*\necho '[  SKIPPED ] A.B (0 ms)'\n")
        twin.chmod(0o755)
        code = self.run_plan("set SIZE large || tiny\nwithout-gpu lacks 1 there is no GPU\n"
                             "without-gpu wrong 1 there is no GPU\nwithout-gpu has 1 there is no GPU\n"
                             "a 20 $BIN/has $SIZE\nb 20 $BIN/lacks\nc 20 $BIN/wrong\n",
                             "--rehearse", str(self.folder / "emulated"))
        self.assertEqual(code, 1)
        self.assertEqual(self.states(), {"a": "passed", "b": "passed", "c": "FAILED"})
        self.assertIn("emulated tiny", (self.out / "log.txt").read_text())

    def test_mistakes_of_the_call_run_nothing(self):
        self.assertEqual(self.run_plan("a 20 true\n", "b"), 2)
        self.assertIn("has no part b; there are a", self.printed)
        self.assertFalse(self.out.exists())


class PlanTest(unittest.TestCase):
    def plan(self, text):
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write(text)
            file.flush()
            return Plan(file.name)

    def test_mistakes_are_named_with_their_line(self):
        for text, reason in (
                ("a\n", ":1: a part is NAME LIMIT COMMAND"), ("a b true\n", ":1: 'b' is no number of seconds"),
                ("# x\nA 5 true\n", ":2: 'A' is no name of a part"), ("a 5 true\na 5 true\n", ":2: there are two"),
                ("&a 5 true\n", "nothing waits for &a"), ("wait_a 5 -\n", ":1: wait_a waits for no &a"),
                ("a 5 -\n", "- stands for the command of a wait"), ("", "there is no part"),
                ("set KIT x\na 5 true\n", "set needs a new name"), ("once-more b\na 5 true\n", "names no part: 'b'"),
                ("allow-skip a x\na 5 true\n", "PART PATTERN :: REASON"),
                ("allow-skip a ( :: r\na 5 true\n", "allow-skip: "),
                ("without-gpu a b c\na 5 true\n", "PROGRAM CODE TEXT"),
                ("needs a\na 5 true\n", "needs is PART OTHER"), ("needs b a\na 5 true\n", "names no part: 'b'"),
                ("needs a b\na 5 true\nb 5 true\n", "a needs 'b', which does not end before it"),
                ("needs c b\n&b 5 true\nc 5 true\nwait_b 5 -\n", "c needs 'b', which does not end before it"),
                ("budget 20\na 50 true\n", "half of all limits is 25 s, the budget 20 s")):
            with self.subTest(text), self.assertRaises(PlanError) as raised:
                self.plan(text)
            self.assertIn(reason, str(raised.exception))

    def test_values_may_name_those_before(self):
        plan = self.plan("set A $KIT/x || small\nset B -f $A\na 5 $BIN/p $B\n")
        self.assertEqual(plan.environment({"KIT": "/k"}, False), {"A": "/k/x", "B": "-f /k/x"})
        self.assertEqual(plan.environment({"KIT": "/k"}, True)["B"], "-f small")

    def test_what_a_kit_lacks_is_named(self):
        plan = self.plan("set A $BIN/q $KIT/in.txt\nwithout-gpu r 1 none\na 5 $BIN/p $A\nb 5 if true\n")
        found = [text.partition(": ")[2] for text in faults(plan, {"p"}, ["peer/*"])]
        self.assertEqual(found[:2], ["a names $BIN/q, which is not in the kit",
                                     "a names $KIT/in.txt, which is not in the kit"])
        self.assertIn("b: ", found[2])
        self.assertEqual(found[3], "without-gpu names r, which is not in the kit")
        self.assertEqual(list(faults(self.plan("a 5 $BIN/p $KIT/peer/x.py\n"), {"p"}, ["peer/*"])), [])


if __name__ == "__main__":
    unittest.main()
