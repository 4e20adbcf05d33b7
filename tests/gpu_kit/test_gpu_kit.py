"""scripts/gpu_kit.sh over tiny programs: what it must refuse before a GPU is borrowed, a rehearsal, and what
becomes of results. Needs a compiler and binutils, no GPU and no build.

    python3 tests/gpu_kit/test_gpu_kit.py
"""
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
HANG = 120
PROGRAMS = ("bin/hello", "tests/gpu_counts")

HELLO = """
#include <dlfcn.h>
#include <stdio.h>
int extra(void);
int main(int count, char** words) {  // hello [LIBRARY]
  if (count > 1 && !dlopen(words[1], RTLD_NOW)) return printf("%s\\n", dlerror()), 1;
  return printf("hello %d\\n", extra()), 0;
}
"""
PLAN = "budget 100\nset TEXT $KIT/text.txt || $KIT/text_small.txt\nhello 20 $BIN/hello && test -s $TEXT\n"


def run(*command, **options):
    return subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True, timeout=HANG, **options)


def compile_c(text, target, *options):
    target.parent.mkdir(parents=True, exist_ok=True)
    done = run("gcc", "-o", target, "-x", "c", "-", "-x", "none", *options, input=text)
    assert done.returncode == 0, done.stdout


class KitTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="gpu_kit_")
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name) / "checkout"
        for path in ("scripts/gpu", "bench/compare", "examples/price/machines"):
            shutil.copytree(ROOT / path, self.root / path)
        for path in ("scripts/gpu_kit.sh", "scripts/gpu_run.py", "scripts/beside_price.py"):
            shutil.copy(ROOT / path, self.root / path)
        for path in ("core", "autograd", "nn", "optim", "data", "docs/measurements/gpu"):
            (self.root / path).mkdir(parents=True)
        (self.root / "docs/page.md").write_text("some words to train on\n")
        shutil.copy(ROOT / "docs/measurements/gpu/README.md", self.root / "docs/measurements/gpu")
        for name in ("first", "second", "third"):
            self.write_plan(name, PLAN)
        self.build = self.root / "build/release"
        self.libraries = self.root / "libraries"
        compile_c("int extra(void) { return 7; }", self.libraries / "libextra.so.1", "-shared",
                  "-Wl,-soname,libextra.so.1")
        compile_c(HELLO, self.build / "bin/hello", self.libraries / "libextra.so.1")
        compile_c("int main(void) { return 0; }", self.build / "tests/gpu_counts")
        (self.build / "gpu_programs.txt").write_text("".join(path + "\n" for path in PROGRAMS))

    def write_plan(self, name, text):
        (self.root / f"scripts/gpu/{name}.txt").write_text(text)

    def kit(self, *words):
        path = f"{self.libraries}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":")
        done = run(self.root / "scripts/gpu_kit.sh", *words, env={**os.environ, "LD_LIBRARY_PATH": path})
        self.printed = done.stdout
        return done.returncode

    def pack(self):
        self.assertEqual(self.kit("pack", self.build), 0, self.printed)

    def change_kit(self, change):
        """Packs it anew, after change(folder of its files)."""
        archive = self.root / ".carry/gpu/kit.tar.xz"
        with tempfile.TemporaryDirectory() as folder:
            tree = pathlib.Path(folder)
            with tarfile.open(archive) as tar:
                tar.extractall(tree)
            change(tree)
            sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(tree)}\n"
                    for path in sorted(tree.rglob("*")) if path.is_file() and path.name != "SHA256"]
            (tree / "SHA256").write_text("".join(sums))
            with tarfile.open(archive, "w:xz", preset=0) as tar:
                tar.add(tree, arcname=".")

    def assert_refused(self, reason):
        self.assertNotEqual(self.kit("check"), 0)
        self.assertIn(reason, self.printed)

    def test_a_kit_has_programs_their_libraries_and_what_parts_read(self):
        self.pack()
        with tarfile.open(self.root / ".carry/gpu/kit.tar.xz") as tar:
            names = {name.removeprefix("./") for name in tar.getnames()}
        for name in ("bin/hello", "bin/gpu_counts", "lib/libextra.so.1", "text.txt", "machines/h100.json",
                     "peer/pytorch_gpt.py", "commit", "SHA256"):
            self.assertIn(name, names)
        self.assertFalse([name for name in names if name.startswith("lib/libc.so")])
        for name in ("gpu_run.py", "plan.py", "first.txt", "third.txt"):
            self.assertTrue((self.root / ".carry/gpu" / name).exists())
        self.assertEqual(self.kit("check"), 0, self.printed)
        self.assertIn("first.txt: 1 parts, limits of 20 s in all", self.printed)

    def test_a_program_that_was_not_built_is_not_left_out(self):
        (self.build / "tests/gpu_counts").unlink()
        self.assertNotEqual(self.kit("pack", self.build), 0)
        self.assertIn("tests/gpu_counts; build the target gpu_programs", self.printed)
        self.assertFalse((self.root / ".carry/gpu/kit.tar.xz").exists())

    def test_a_library_that_this_machine_lacks_is_not_left_out(self):
        (self.libraries / "libextra.so.1").unlink()
        self.assertNotEqual(self.kit("pack", self.build), 0)
        self.assertIn("needs libextra.so.1, which is not on this machine", self.printed)

    def test_a_missing_library_is_refused(self):
        self.pack()
        self.change_kit(lambda tree: (tree / "lib/libextra.so.1").unlink())
        self.assert_refused("hello needs libextra.so.1, which neither the kit nor the host has")

    def test_a_missing_program_is_refused(self):
        self.pack()
        self.change_kit(lambda tree: (tree / "bin/gpu_counts").unlink())
        self.assert_refused("the program gpu_counts is not in the kit")

    def test_symbols_newer_than_the_host_s_are_refused(self):
        # A program that asks a library "NAME" for a symbol of the version, as one built on a newer system.
        for library, version, is_refused in (("libc.so.6", "GLIBC_2.40", True), ("libc.so.6", "GLIBC_2.39", False),
                                             ("libstdc++.so.6", "GLIBCXX_3.4.33", True),
                                             ("libstdc++.so.6", "GLIBCXX_3.4.9", False),
                                             ("libstdc++.so.6", "CXXABI_1.3.15", True),
                                             ("libgcc_s.so.1", "GCC_14.0.0", True)):
            with self.subTest(version):
                self.pack()
                folder = self.root / "newer"
                script, newer = folder / "versions", folder / library
                folder.mkdir(exist_ok=True)
                script.write_text(f"{version} {{ newer; }};\n")
                compile_c("int newer(void) { return 0; }", newer, "-shared", "-nostdlib", f"-Wl,-soname,{library}",
                          f"-Wl,--version-script,{script}")
                compile_c("int newer(void); void _start(void) { newer(); }", folder / "program", "-nostdlib", newer)
                self.change_kit(lambda tree: shutil.copy(folder / "program", tree / "bin/hello"))
                if is_refused:
                    self.assert_refused(f"hello needs symbols of {version}")
                else:
                    self.assertEqual(self.kit("check"), 0, self.printed)

    def test_what_was_changed_after_packing_is_refused(self):
        self.pack()
        archive = self.root / ".carry/gpu/kit.tar.xz"
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(archive) as tar:
                tar.extractall(folder)
            (pathlib.Path(folder) / "text.txt").write_text("other words\n")
            with tarfile.open(archive, "w:xz", preset=0) as tar:
                tar.add(folder, arcname=".")
        self.assert_refused("the archive is not what was packed")

    def test_a_kit_that_is_too_large_is_refused(self):
        self.pack()
        (self.root / ".carry/gpu/large").write_bytes(os.urandom(45 << 20))
        self.assert_refused("more than 44")

    def test_a_plan_of_programs_and_files_that_are_not_there_is_refused(self):
        self.write_plan("second", "a 5 $BIN/other\nb 5 cat $KIT/none.txt\n")
        self.write_plan("third", "a five true\n")
        self.pack()
        self.assert_refused("a names $BIN/other, which is not in the kit")
        self.assertIn("b names $KIT/none.txt, which is not in the kit", self.printed)
        self.assertIn("third.txt:1: 'five' is no number of seconds", self.printed)

    def rehearse(self, *plans):
        code = self.kit("rehearse", *plans)
        if code == 77:
            self.skipTest(self.printed.strip())
        return code

    def test_a_rehearsal_runs_plans_where_nothing_else_is(self):
        compile_c("#include <stdio.h>\nint main(void) { return puts(\"counts\"), 0; }",
                  self.build / "tests/cuda/test_cuda_counts")
        compile_c("#include <stdio.h>\nint main(void) { return puts(\"there is no GPU\"), 77; }",
                  self.build / "tests/gpu_counts")
        self.write_plan("second", PLAN + "counts 20 $BIN/gpu_counts | grep counts\n")
        python = (self.root / "scripts/gpu/first.txt")
        python.write_text(PLAN + "peer 20 python3 $KIT/peer/torch_step.py --dry-run -- --model gpt2 --compile\n")
        self.pack()
        self.assertEqual(self.rehearse("first", "second"), 0, self.printed)
        self.assertRegex(self.printed, "hello: passed(.|\n)*peer: passed(.|\n)*counts: passed")

    def test_a_rehearsal_fails_without_a_library_that_this_machine_has(self):
        other = next((name for name in ("libz.so.1", "libxxhash.so.0", "libicuuc.so.72")
                      if run(self.build / "bin/hello", name, env={"LD_LIBRARY_PATH": str(self.libraries)}).returncode
                      == 0), None)
        self.assertIsNotNone(other, "this machine has none of the libraries that the test knows")
        self.write_plan("first", f"loads 20 $BIN/hello {other}\n")
        self.pack()
        self.assertNotEqual(self.rehearse("first"), 0)
        self.assertIn(f"{other}: cannot open shared object file", self.printed)

    def test_a_rehearsal_fails_with_a_part(self):
        self.write_plan("first", "wrong 20 $BIN/hello && false\n")
        self.pack()
        self.assertNotEqual(self.rehearse("first"), 0)
        self.assertIn("wrong: FAILED", self.printed)

    # ---- Results

    products = {f"cublasLt 130100, {card}, driver 13000, 128 MiB: m1": {"algorithm": "00", "microseconds": 1}
                for card in ("NVIDIA H100 80GB HBM3", "NVIDIA H200")}

    def results(self, **environment):
        folder = self.root / "results"
        folder.mkdir(exist_ok=True)
        values = {"date": "2026-12-01T10:00:00Z", "commit": "0123456789abcdef", "plan": "first.txt",
                  "cards": [{"name": "NVIDIA H100 80GB HBM3", "driver_version": "580.1"}], **environment}
        (folder / "env.json").write_text(json.dumps(values))
        rows = [{"part": "step", "state": "begins"},
                {"part": "step", "state": "passed", "seconds": 3.0, "figures": [
                    {"program": "tessera", "dtype": "bf16", "ms_per_step": 100.0, "tokens_per_s": 655360.0,
                     "peak_tensor_bytes": 2**33}]},
                {"part": "suite", "state": "FAILED"}, {"part": "rates", "state": "no time"}, {"state": "end"}]
        (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"part": "cut o')
        (folder / "report.md").write_text("# GPU run\n")
        (folder / "rates.json").write_text(json.dumps(
            {"machine": {"bandwidth": 2.9e12, "gemm": {"bf16": 7.1e14}, "launch_gap": 1.1e-6}}))
        (folder / "gemm.json").write_text(json.dumps({"format": "tessera gemm table 1", "entries": self.products}))
        return folder

    def test_results_become_a_folder_rows_and_a_machine_file(self):
        shipped = (self.root / "examples/price/machines/h100.json").read_bytes()
        self.assertEqual(self.kit("take", self.results()), 0, self.printed)
        home = self.root / "docs/measurements/gpu"
        folder = home / "2026-12-01-h100-80gb-hbm3"
        machine = json.loads((folder / "machine.json").read_text())
        base = json.loads(shipped)
        self.assertEqual(set(machine), set(base))
        self.assertEqual((machine["bandwidth"], machine["gemm"]["bf16"], machine["gemm"]["f64"]),
                         (2.9e12, 7.1e14, base["gemm"]["f64"]))
        self.assertIn("driver 580.1, 2026-12-01, commit 0123456789ab", machine["sources"]["gemm.bf16"])
        self.assertIn("not measured; of h100.json: 0.75", machine["sources"]["gemm.f64"])
        page = (home / "README.md").read_text()
        self.assertIn("| 2026-12-01 | NVIDIA H100 80GB HBM3 | 580.1 | 0123456789ab | first.txt | 1 | 1 | 1 | "
                      "[report](2026-12-01-h100-80gb-hbm3/report.md) |", page)
        self.assertIn("| step | tessera | bf16 | 100.0 | 655360.0 | 8.0 |", page)
        # Another run of that day stands beside it, and the next kit has its algorithms.
        self.assertEqual(self.kit("take", self.results()), 0)
        self.assertTrue((home / "2026-12-01-h100-80gb-hbm3-2/results.jsonl").exists())
        self.pack()
        with tarfile.open(self.root / ".carry/gpu/kit.tar.xz") as tar:
            self.assertEqual(json.load(tar.extractfile("./gemm.json"))["entries"], self.products)
        self.assertEqual((self.root / "examples/price/machines/h100.json").read_bytes(), shipped)

    def test_algorithms_of_products_become_a_table_of_each_card(self):
        self.assertEqual(self.kit("take", self.results()), 0, self.printed)
        folder = self.root / "core/cuda/libraries/tables"
        for name, key in zip(("nvidia-h100-80gb-hbm3", "nvidia-h200"), self.products):
            table = json.loads((folder / f"{name}.json").read_text())
            self.assertEqual(table, {"format": "tessera gemm table 1", "entries": {key: self.products[key]}})
        # The newest folder's algorithm stays, and keys of others do.
        first, second = self.products
        newer = {"algorithm": "01", "microseconds": 2}
        results = self.results(date="2026-12-02T10:00:00Z")
        (results / "gemm.json").write_text(json.dumps({"format": "tessera gemm table 1", "entries": {first: newer}}))
        self.assertEqual(self.kit("take", results), 0, self.printed)
        h100 = json.loads((folder / "nvidia-h100-80gb-hbm3.json").read_text())["entries"]
        self.assertEqual(h100, {first: newer})
        self.assertEqual(json.loads((folder / "nvidia-h200.json").read_text())["entries"],
                         {second: self.products[second]})

    def test_what_is_no_result_is_refused(self):
        for change, reason in (({"rehearsal": True}, "is a rehearsal"), ({"cards": []}, "saw no card")):
            with self.subTest(reason):
                self.assertNotEqual(self.kit("take", self.results(**change)), 0)
                self.assertIn(reason, self.printed)
        folder = self.results()
        for machine, reason in (({"speed": 1}, "keys that a machine file does not: speed"),
                                ({"gemm": {"bf16": 0}}, "machine.gemm.bf16 is no positive number")):
            (folder / "rates.json").write_text(json.dumps({"machine": machine}))
            self.assertNotEqual(self.kit("take", folder), 0)
            self.assertIn(reason, self.printed)
        folder = self.results()
        (folder / "gemm.json").write_text('{"format": "tessera gemm table 1", "entries": {"a": 1}}')
        self.assertNotEqual(self.kit("take", folder), 0)
        self.assertIn("the key 'a' names no card", self.printed)
        self.assertEqual([path.name for path in (self.root / "docs/measurements/gpu").iterdir()], ["README.md"])


if __name__ == "__main__":
    unittest.main()
