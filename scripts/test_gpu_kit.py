"""Tests of the GPU kit as a whole, and of how it is made, without a GPU, PyTorch or cargo.

Run: python3 -m unittest discover -s scripts
"""

import json
import os
import unittest
from pathlib import Path
from unittest import mock

from gpu_fakes import PROBE, InFolder, refusal_of, script

import gpu
import gpu_machine
import gpu_prepare
import gpu_report


class Machine(InFolder):
    def test_a_missing_kit_names_the_command_that_makes_one(self):
        refusal = refusal_of(gpu_machine.check_kit, self.folder)
        self.assertIn(f"no kit in {self.folder}", refusal)
        self.assertIn("gpu_first_hour.sh prepare", refusal)

    def test_a_kit_is_refused_where_a_program_is_missing_or_another(self):
        kit = self.kit()
        (kit / "memory").write_text("cut off")
        self.assertIn(
            "memory is not what the manifest says", refusal_of(gpu_machine.check_kit, kit)
        )
        (kit / "memory").unlink()
        self.assertIn("has no memory", refusal_of(gpu_machine.check_kit, kit))

    def test_programs_may_have_lost_their_mode_on_the_way(self):
        kit = self.kit()
        (kit / "bits").chmod(0o644)
        gpu_machine.check_kit(kit)
        self.assertTrue(os.access(kit / "bits", os.X_OK))

    def test_a_python_without_the_right_pytorch_is_refused_by_name(self):
        none = script(
            self.folder / "none",
            "echo \"ModuleNotFoundError: No module named 'torch'\" >&2; exit 1",
        )
        for python, why in [
            (none, "cannot import PyTorch (ModuleNotFoundError: No module named 'torch')"),
            (self.python(torch="2.13.0"), "has torch 2.13.0, the kit was built against 2.11.0"),
        ]:
            refusal = refusal_of(gpu_machine.torch_of, str(python))
            self.assertIn(why, refusal)
            self.assertIn("TORCH_PYTHON", refusal)
        refusal = refusal_of(gpu_machine.torch_of, str(self.python(cuda=None)))
        self.assertIn("without CUDA", refusal)

    def test_a_program_that_the_loader_refuses_is_named_with_what_it_needs(self):
        kit = self.kit(memory="echo 'libc10.so: cannot open shared object file' >&2; exit 127")
        manifest = gpu_machine.check_kit(kit)
        refusal = refusal_of(
            gpu_machine.check_programs, kit, manifest, {"LD_LIBRARY_PATH": "/nowhere"}
        )
        for part in ["memory does not start", "libc10.so: cannot open", "glibc 2.34", "/nowhere"]:
            self.assertIn(part, refusal)

    def test_settings_of_the_shell_do_not_reach_the_parts(self):
        with mock.patch.dict(
            os.environ, {"NVIDIA_TF32_OVERRIDE": "1", "LD_LIBRARY_PATH": "/other"}
        ):
            found = gpu_machine.environment(PROBE)
        self.assertNotIn("NVIDIA_TF32_OVERRIDE", found)
        self.assertEqual(found["LD_LIBRARY_PATH"], "/nowhere:/other")


class Preparing(InFolder):
    def test_executables_are_read_from_cargos_messages(self):
        text = "\n".join(
            [
                "warning: x",
                json.dumps({"reason": "build-finished"}),
                json.dumps({"executable": None, "target": {"name": "a"}}),
                json.dumps({"executable": "/b", "target": {"name": "bits"}}),
            ]
        )
        self.assertEqual(gpu_prepare.executables(text), {"bits": Path("/b")})

    def test_a_kit_that_is_too_large_is_refused_with_its_list(self):
        entries = {"bits": {"bytes": 3 << 20}, "memory": {"bytes": 4 << 20}}
        self.assertEqual(gpu_prepare.check_size(entries), 7 << 20)
        refusal = refusal_of(gpu_prepare.check_size, entries, 6 << 20)
        self.assertIn("7.0 MiB together, more than 6: bits 3.0 MiB, memory 4.0 MiB", refusal)

    def test_the_build_takes_its_own_libtorch_whatever_the_shell_says(self):
        with mock.patch.dict(os.environ, {"LIBTORCH": "/cpu", "LIBTORCH_USE_PYTORCH": "1"}):
            found = gpu_prepare.environment(Path("/cuda"))
        self.assertEqual(found["LIBTORCH"], "/cuda")
        self.assertNotIn("LIBTORCH_USE_PYTORCH", found)

    def test_a_libtorch_without_cuda_or_of_another_version_is_refused(self):
        (self.folder / "build-version").write_text("2.11.0\n")
        self.assertIn("no lib/libtorch_cuda.so", refusal_of(gpu_prepare.libtorch, self.folder))
        (self.folder / "build-version").write_text("2.13.0\n")
        self.assertIn(
            "is libtorch 2.13.0, gpipe is built on 2.11.0",
            refusal_of(gpu_prepare.libtorch, self.folder),
        )

    def test_what_the_loader_needs_is_read_from_readelf(self):
        dynamic = (
            " 0x1 (NEEDED) Shared library: [libc10.so]\n 0x1d (RUNPATH) Library runpath:"
            " [/build/lib]\n"
        )
        versions = "Name: GLIBC_2.9 Flags: none\n Name: GLIBC_2.34 Flags: none\n"
        with mock.patch.object(gpu_prepare, "said_by", side_effect=[dynamic, versions]):
            found = gpu_prepare.needs(Path("bits"))
        self.assertEqual(
            found,
            {"libraries": ["libc10.so"], "glibc": "2.34", "rpath": [], "runpath": ["/build/lib"]},
        )


class Runs(InFolder):
    """The whole command, with programs that are scripts."""

    def test_without_a_gpu_each_part_says_what_it_would_run_and_the_cpu_part_runs(self):
        results, report, printed = self.run_kit(python=self.python(gpus=0, gpu=None))
        for part in ["tests", "bits", "gpt", "amoeba", "largest"]:
            self.assertIn(f"{part}: would run: ", printed)
            self.assertEqual(
                (results["parts"][part]["status"], results["parts"][part]["steps"]),
                ("rehearsed", []),
            )
        self.assertIn("CUBLAS_WORKSPACE_CONFIG=:4096:8", printed)
        self.assertIn("filters=208 cap=8000000000", printed)
        self.assertEqual(results["parts"]["cpu"]["status"], "done")
        self.assertIn("workload=gpt-tiny", str(results["parts"]["cpu"]["steps"]))
        self.assertIn("# Rehearsal without a GPU", report)
        self.assertIn("0.900 [0.900 .. 0.900] | 0.500", report)

    def test_with_a_gpu_every_part_runs_and_one_that_fails_stops_no_other(self):
        kit = self.kit(
            gpu="[ \"$1\" = --list ] && exit 0; echo 'test gpu_one ... FAILED'; exit 101"
        )
        results, report, _ = self.run_kit(kit=kit)
        status = {name: part["status"] for name, part in results["parts"].items()}
        self.assertEqual(
            status,
            {
                "tests": "failed",
                "bits": "done",
                "gpt": "done",
                "amoeba": "done",
                "largest": "done",
                "cpu": "done",
            },
        )
        self.assertIn("| gpu_one | FAILED |", report)
        self.assertIn(
            "| all settings | gpt | float32 | equal | 1 of 2 | K = 2 1f1b never: 2 of 5 tensors;"
            " step 1 gradient head.weight by 1.0e-07 (its largest value is 5.0e-01) |",
            report,
        )
        self.assertIn(
            "| PyTorch compiled M=1 | 3 | 6.00 [6.00 .. 6.00] | 1.00 | 4 | 2.500000 |", report
        )
        self.assertIn("| gpipe K=1 M=1 | 3 | 3.00 [3.00 .. 3.00] | 2.00 | 3 | 2.500000 |", report)
        self.assertIn(
            "| float32 | plain | 224 | 82.0 | 1.30 | 6.00 | 240 | yes | D = 208, 82 million |",
            report,
        )
        self.assertNotIn(str(self.folder / "python"), report + json.dumps(results))

    def test_parts_for_which_no_time_is_left_are_named(self):
        results, _, printed = self.run_kit("--seconds", "15", "cpu")
        self.assertIn("cpu: not run", printed)
        self.assertEqual(results["parts"]["cpu"]["status"], "not run")

    def test_results_of_another_kit_are_kept_aside(self):
        self.run_kit("tests")
        other = self.kit()
        manifest = json.loads((other / "manifest.json").read_text())
        (other / "manifest.json").write_text(json.dumps({**manifest, "commit": "other"}))
        results, _, _ = self.run_kit("cpu", kit=other)
        self.assertEqual(list(results["parts"]), ["cpu"])
        self.assertIn(
            "tests", json.loads((self.folder / "out" / "results-earlier.json").read_text())["parts"]
        )

    def test_several_runs_make_one_report(self):
        first, _, _ = self.run_kit("tests", "--out", self.folder / "out")
        (self.folder / "first").mkdir()
        (self.folder / "out" / "results.json").rename(self.folder / "first" / "results.json")
        self.run_kit("cpu")
        whole = gpu.merge([self.folder / "first", self.folder / "out"])
        self.assertEqual(list(whole["parts"]), ["tests", "cpu"])
        self.assertEqual(len(whole["runs"]), 2)
        self.assertIn("Gpu_one".lower(), gpu_report.report(whole))
        self.assertIn("there is no", refusal_of(gpu.merge, [self.folder / "nothing"]))


if __name__ == "__main__":
    unittest.main()
