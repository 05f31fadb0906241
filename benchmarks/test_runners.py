"""Tests of the runners, with small scripts in place of gpipe's programs and of PyTorch.

The scripts print what the programs printed in the runs of results/. So each runner goes all its
way: commands, raw data, report, and the folder that is replaced.
"""

import contextlib
import io
import json
import sys
import tempfile
import types
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench  # noqa: E402
import checkpoint  # noqa: E402
import folders  # noqa: E402
import gpt  # noqa: E402
import hosts  # noqa: E402
import memory  # noqa: E402
import plots  # noqa: E402
import prediction  # noqa: E402
import processes  # noqa: E402
import results  # noqa: E402
import rounds  # noqa: E402
import scaling  # noqa: E402
import schedules  # noqa: E402
import simulated  # noqa: E402
from machine import here  # noqa: E402

RECORDED = folders.RESULTS
KNOWN = RECORDED / "amd-family-25-model-17-2-cores"
UNKNOWN = RECORDED / "amd-epyc-unknown-model-2-cores"
# A network fits up to a size of 80; its step and its bytes are made up.
MEMORY = """
import json, sys
given = dict(one.split("=") for one in sys.argv[1:])
size = int(given["filters"])
line = {"size": size, "parameters": size * size, "parameter_bytes": 16 * size * size}
line |= {"activation_bytes": 1000 * size, "gradient_bytes": 4 * size * size, "loss": [1.5]}
line |= {"grad_norm": [2.5], "peak_bytes": [16 * size * size + 1000 * size]}
line |= {"step_ms": [9.0, 7.0]}
line |= {"resident_before_bytes": 1, "resident_peak_bytes": 2}
if "cap" in given:
    line |= {"peak_bytes": [1]} if size <= 80 else {"refused": "out of memory"}
print(json.dumps(line))
"""
# A run of `gpipe train` that writes what checkpoint.py reads.
TRAIN = """
import json, sys
from pathlib import Path
flags = dict(zip(sys.argv[3::2], sys.argv[4::2]))
out, steps = Path(flags["--out"]), int(flags["--steps"])
out.mkdir(parents=True)
lines = [{"kind": "step", "step_ms": 1000.0 + n, "loss": 1.0} for n in range(steps)]
(out / "metrics.jsonl").write_text("".join(json.dumps(line) + chr(10) for line in lines))
print(f"trained {steps} steps, 4.1 M tokens in 52.5 s: 9.0 ms/step")
print("waiting for checkpoints 0.1%")
if flags["--checkpoint-every"] != "none":
    every = int(flags["--checkpoint-every"])
    for step in range(every, steps + 1, every):
        print(f"saved step {step}: x (1.0 MiB; copied in 20 ms, written in 1.5 s)")
"""
PLAN = 'print("step 12.5 s, bubble 40.5%, peak 5.3 GiB")'


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Runners(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)
        self.programs = self.folder / "programs"
        self.programs.mkdir()
        self.place = self.folder / "results" / here().slug()
        for owner, name, value in [
            (folders, "RESULTS", self.folder / "results"),
            (folders, "PARTIAL", self.folder / "out"),
            (rounds, "PROGRAMS", self.programs),
            (rounds, "GPIPE", self.programs / "gpipe"),
            (checkpoint, "GPIPE", self.programs / "gpipe"),
            (checkpoint, "canary", lambda: 0.125),
            (checkpoint, "disk", lambda folder: 500.0),
            (rounds, "cargo_build", lambda *flags: None),
            (plots, "library", lambda: None),
            *((plots, name, lambda *given: None) for name in ["memory", "scaling"]),
            *((plots, name, lambda *given: None) for name in ["step_times", "breakdown"]),
            (plots, "ablations", lambda *given: None),
        ]:
            patch = mock.patch.object(owner, name, value)
            patch.start()
            self.addCleanup(patch.stop)

    def program(self, name, text):
        path = self.programs / name
        path.write_text(f"#!{sys.executable}\n{text}\n")
        path.chmod(0o755)

    def prints(self, name, lines):
        """A program that prints these lines, as JSON or as they are."""
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        self.program(name, f"print({text!r})")

    def run_main(self, module, *arguments):
        said = io.StringIO()
        argv = [f"{module.__name__}.py", *arguments]
        with (
            mock.patch.object(sys, "argv", argv),
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            module.main()
        return said.getvalue()

    def check(self, *parts):
        """These parts are there, and RESULTS.md can be made of them."""
        found = results.machines(self.folder / "results")
        self.assertEqual([list(own) for own in found.values()], [list(parts)])
        self.assertIn(here().title(), results.results_text(found))
        for name in parts:
            report = (self.place / name / "report.md").read_text()
            self.assertEqual(report, results.PARTS[name].report(self.place / name))

    def test_schedules(self):
        self.prints(
            "schedules", json.loads((KNOWN / "schedules-gpt/raw.json").read_text())["lines"]
        )
        said = self.run_main(schedules, "--workload", "gpt")
        self.assertIn("1.248", said)
        self.check("schedules-gpt")

    def test_prediction_in_turn(self):
        raw = json.loads((UNKNOWN / "prediction-in-turn-gpt/raw.json").read_text())
        self.prints("prediction", raw["pairs"])
        self.run_main(prediction, "--in-turn", "--workload", "gpt")
        self.check("prediction-in-turn-gpt")

    def test_processes_in_turn(self):
        self.prints("processes", [{"threads_ms": 10.0, "processes_ms": 12.0}] * 3)
        self.assertIn("1.200", self.run_main(processes, "--in-turn", "--pairs", "20"))
        self.check("processes-in-turn")

    def test_hosts(self):
        self.program("gpipe", PLAN)
        self.assertIn("40.5", self.run_main(hosts))
        self.check("hosts")

    def test_checkpoint(self):
        self.program("gpipe", TRAIN)
        self.assertIn("the last bit: yes", self.run_main(checkpoint, "--rounds", "5"))
        self.check("checkpoint")

    def test_memory(self):
        self.program("memory", MEMORY)
        said = self.run_main(memory, "--network", "amoeba", "--all-variants")
        self.assertIn("D = 80", said)
        self.check("memory-amoeba")

    def test_memory_of_another_size_is_partial(self):
        self.program("memory", MEMORY)
        self.assertIn("--size 40, not 68", self.run_main(memory, "--size", "40"))
        self.assertIn("fewer variants", self.run_main(memory))
        self.assertFalse((self.folder / "results").exists())

    def test_scaling_and_simulated(self):
        lines = lines_of(KNOWN / "scaling" / "gpt.jsonl")
        self.prints("scaling", lines)
        self.prints("paper_tables", ["## Table", "| a |"])
        with contextlib.redirect_stdout(io.StringIO()):
            scaling.run_part(["gpt"], 5)
            simulated.run_part()
        self.check("scaling", "simulated")

    def test_steps(self):
        """Jobs that were not in the recorded run find what another one of that program found."""
        recorded = json.loads((KNOWN / "gpt" / "raw.json").read_text())["results"]
        names = {id(job): name for name, job in gpt.WORKLOAD.jobs.items()}
        python = types.SimpleNamespace(
            torch="2.11.0", canary=lambda: (2.5, 1.9), versions=lambda: {"torch": "2.11.0"}
        )

        def run(runner, job):
            name = names.get(id(job))
            alike = "gpipe K=2 M=8 1f1b never" if job.program == "gpipe" else "torch M=1 threads=2"
            return recorded.get(name, recorded[alike])[0]

        with (
            mock.patch.object(rounds, "Python", lambda: python),
            mock.patch.object(rounds.Runner, "run", run),
            mock.patch.object(bench, "MINUTES", {"gpt": (0, 0)}),
        ):
            said = self.run_main(bench, "--only", "gpt")
            self.assertIn("without --full", said)
            self.assertFalse((self.folder / "results").exists())
            self.run_main(bench, "--full", "--only", "gpt", "--out", str(self.place))
        self.check("gpt")
        self.assertIsNone(folders.environment(self.place / "gpt").partial)


if __name__ == "__main__":
    unittest.main()
