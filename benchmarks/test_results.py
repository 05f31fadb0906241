"""Tests of where results go and of what is generated from them.

- `Slugs`: a machine's folder is of one processor, whatever its marketing name
- `Folders`: a run replaces a part as a whole or not at all, and a partial one replaces nothing
- `Partial`: which runs of the runners are partial
- `Generated`: RESULTS.md, the README's table and the reports are as the raw data have them
- `Reports`: a report has no figure that is not of its own run
- `Verdicts`: what is slower is shown, and called so
"""

import argparse
import ast
import contextlib
import copy
import io
import json
import random
import re
import shutil
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import bench  # noqa: E402
import folders  # noqa: E402
import gpt  # noqa: E402
import gpu  # noqa: E402
import gpu_parts  # noqa: E402
import results  # noqa: E402
import schedules  # noqa: E402
import steps  # noqa: E402
from figures import ROOT  # noqa: E402
from machine import Machine, here, of_cpuinfo  # noqa: E402
from targets import Comparison, side  # noqa: E402

AMD = (
    "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: {}\nmodel\t\t: {}\n"
    "model name\t: AMD EPYC\n"
)
INTEL = (
    "processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\nmodel\t\t: 167\n"
    "model name\t: Intel(R) Xeon(R) Processor\n"
)
GRAVITON = "processor\t: 0\nBogoMIPS\t: 243.75\nCPU implementer\t: 0x41\nCPU part\t: 0xd0c\n"
BARE_ARM = "processor\t: 0\nBogoMIPS\t: 108.00\nFeatures\t: fp asimd\n"


class InFolder(unittest.TestCase):
    """A temporary folder, which has the results and the partial runs, too."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.folder = Path(scratch.name)
        self.whole, self.partial = self.folder / "results", self.folder / "out"
        for name, path in [("RESULTS", self.whole), ("PARTIAL", self.partial)]:
            patch = mock.patch.object(folders, name, path)
            patch.start()
            self.addCleanup(patch.stop)

    def quietly(self, call, *given, **named):
        """What a call prints."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            call(*given, **named)
        return said.getvalue()


class Slugs(unittest.TestCase):
    def slug(self, text, cores=2, architecture="x86_64"):
        return of_cpuinfo(text, cores, architecture).slug()

    def test_one_marketing_name_is_two_processors(self):
        zen_4, zen_5 = self.slug(AMD.format(25, 17)), self.slug(AMD.format(26, 2))
        self.assertEqual(zen_4, "amd-family-25-model-17-2-cores")
        self.assertEqual(zen_5, "amd-family-26-model-2-2-cores")

    def test_intel(self):
        self.assertEqual(self.slug(INTEL, 64), "intel-family-6-model-167-64-cores")

    def test_only_the_first_processor_is_read(self):
        self.assertEqual(
            self.slug(AMD.format(25, 17) + "\n" + INTEL), self.slug(AMD.format(25, 17))
        )

    def test_arm_has_an_implementer_and_a_part(self):
        self.assertEqual(self.slug(GRAVITON, 4, "aarch64"), "arm-model-0xd0c-4-cores")
        other = self.slug(GRAVITON.replace("0x41", "0x99"), 4, "aarch64")
        self.assertEqual(other, "implementer-0x99-model-0xd0c-4-cores")

    def test_arm_without_a_model_is_called_unknown(self):
        found = of_cpuinfo(BARE_ARM, 8, "aarch64")
        self.assertEqual(found.slug(), "aarch64-unknown-model-8-cores")
        self.assertIn("not recorded", found.title())

    def test_nothing_known(self):
        self.assertEqual(Machine(cores=2).slug(), "unknown-processor-2-cores")
        self.assertEqual(self.slug("", 2, ""), "unknown-processor-2-cores")

    def test_a_name_without_numbers_is_not_a_known_machine(self):
        self.assertEqual(Machine("AMD EPYC", cores=2).slug(), "amd-epyc-unknown-model-2-cores")

    def test_a_gpu_is_part_of_the_machine(self):
        found = Machine("AMD EPYC", "amd", "25", "17", 16, "NVIDIA H100 80GB HBM3").slug()
        self.assertEqual(found, "amd-family-25-model-17-16-cores-nvidia-h100-80gb-hbm3")


class Folders(InFolder):
    def run_part(self, text, partial=None, out=None, fails=False):
        def one_run():
            report = lambda folder: (folder / "raw.json").read_text()
            with folders.run("gpt", report, partial, out) as folder:
                (folder / "raw.json").write_text(text)
                if fails:
                    raise ValueError("cut off")

        return self.quietly(one_run)

    def texts(self, root):
        return sorted((path.name, path.read_text()) for path in root.rglob("r*") if path.is_file())

    def test_a_whole_run_replaces_the_part(self):
        part = self.whole / here().slug() / "gpt"
        self.run_part("first")
        (part / "of the first run alone").write_text("")
        said = self.run_part("second")
        self.assertEqual((part / "report.md").read_text(), "second")
        self.assertFalse((part / "of the first run alone").exists())
        self.assertIn("is written", said)
        self.assertEqual([path.name for path in part.parent.iterdir()], ["gpt"])

    def test_its_environment_has_what_is_needed(self):
        self.run_part("one")
        told = folders.environment(self.whole / here().slug() / "gpt")
        self.assertEqual((told.part, told.partial, told.machine), ("gpt", None, here()))
        self.assertTrue(told.date and told.command and told.versions["python"])

    def test_a_partial_run_replaces_nothing(self):
        self.run_part("whole")
        said = self.run_part("part", partial="--jobs 'gpipe'")
        self.assertIn("--jobs 'gpipe'", said)
        self.assertIn("are as they were", said)
        self.assertIn(("report.md", "whole"), self.texts(self.whole))
        self.assertIn(("report.md", "part"), self.texts(self.partial))

    def test_a_named_folder_is_taken(self):
        self.run_part("part", partial="1 round, not 2", out=self.folder / "mine")
        self.assertEqual((self.folder / "mine" / "report.md").read_text(), "part")
        self.assertFalse(self.whole.exists() or self.partial.exists())

    def test_a_run_that_fails_leaves_the_part_as_it_was(self):
        self.run_part("whole")
        before = self.texts(self.whole / here().slug() / "gpt")
        with self.assertRaises(ValueError):
            self.run_part("cut off", fails=True)
        self.assertEqual(self.texts(self.whole / here().slug() / "gpt"), before)
        aside = self.whole / here().slug() / ".gpt.unfinished"
        self.assertEqual((aside / "raw.json").read_text(), "cut off")
        self.assertEqual(list(results.machines(self.whole).values())[0].keys(), {"gpt"})

    def test_a_run_after_a_failed_one_has_nothing_of_it(self):
        with self.assertRaises(ValueError):
            self.run_part("cut off", fails=True)
        self.run_part("whole")
        self.assertEqual(len(self.texts(self.whole)), 2)

    def test_a_folder_with_other_files_is_not_replaced(self):
        (self.folder / "mine").mkdir()
        (self.folder / "mine" / "thesis.md").write_text("years of work")
        with self.assertRaises(SystemExit) as end:
            self.run_part("whole", out=self.folder / "mine")
        self.assertIn("has other files", str(end.exception))
        self.assertEqual((self.folder / "mine" / "thesis.md").read_text(), "years of work")


class Partial(InFolder):
    def parts(self, *arguments):
        """part -> (folder, what is left out) of a run of bench.py."""
        found = {}
        run_part = lambda name, options, partial, out: found.setdefault(name, (out, partial))
        with (
            mock.patch.object(bench, "run_part", run_part),
            mock.patch.object(bench.rounds, "build"),
            mock.patch.object(sys, "argv", ["bench.py", *arguments]),
        ):
            bench.main()
        return found

    def test_only_a_full_run_of_all_parts_is_whole(self):
        found = self.parts("--full")
        self.assertEqual(list(found), bench.PARTS)
        self.assertEqual(set(found.values()), {(None, None)})

    def test_the_short_version_is_partial(self):
        self.assertTrue(all("--full" in partial for _, partial in self.parts().values()))

    def test_some_parts_go_aside(self):
        out, partial = self.parts("--full", "--only", "gpt")["gpt"]
        self.assertEqual((out, partial), (self.partial / here().slug() / "gpt", None))

    def test_some_parts_go_where_they_are_sent(self):
        found = self.parts("--full", "--only", "gpt,scaling", "--out", str(self.folder))
        self.assertEqual(found["gpt"], (self.folder / "gpt", None))
        self.assertEqual(list(found), ["gpt", "scaling"])

    def test_some_jobs_and_fewer_minutes_are_partial(self):
        self.assertIn("torch", self.parts("--full", "--jobs", "torch")["gpt"][1])
        self.assertIn("--minutes 1", self.parts("--full", "--minutes", "1")["gpt"][1])
        self.assertIsNone(self.parts("--full", "--minutes", "100")["gpt"][1])

    def test_fewer_rounds_are_partial(self):
        given = argparse.Namespace(rounds=9, passes=8, micro_batches="4,8")
        self.assertIsNone(schedules.partial_of(given))
        given.rounds, given.micro_batches = 3, "4"
        self.assertIn("3 rounds, not 5; --micro-batches 4", schedules.partial_of(given))

    def gpu_report(self, statuses, tiny=False):
        data = {
            "kit": {"commit": "abc", "rustc": "rustc 1", "libtorch": "2.11.0"},
            "machine": "a machine",
            "processor": {
                "name": "AMD EPYC",
                "vendor": "amd",
                "family": "25",
                "model": "17",
                "cores": 4,
            },
            "gpu": "NVIDIA H200",
            "gpu_bytes": 1 << 37,
            "driver": "580",
            "tiny": tiny,
            "runs": [{"command": "run", "date": "2026-11-24 10:00", "gpu": "NVIDIA H200"}],
            "parts": {
                part.name: {"title": part.title, "status": status, "seconds": 1.0, "steps": []}
                for part, status in zip(gpu_parts.PARTS, statuses)
            },
        }
        source = self.folder / "source"
        source.mkdir(exist_ok=True)
        (source / "results.json").write_text(json.dumps(data))
        self.quietly(gpu.report, argparse.Namespace(folders=[source], out=None))

    def test_gpu_results_are_published_when_every_part_has_run(self):
        place = Path("amd-family-25-model-17-4-cores-nvidia-h200") / "gpu"
        self.gpu_report(["done"] * 5 + ["partial"])
        self.assertFalse((self.whole / place).exists())
        self.assertTrue((self.partial / place / "report.md").exists())
        self.gpu_report(["done"] * 5 + ["failed"])
        self.assertEqual(folders.environment(self.whole / place).part, "gpu")
        found = results.machines(self.whole)
        self.assertIn("first runs on a GPU", results.results_text(found))
        text = results.PARTS["gpu"].report(self.whole / place)
        self.assertEqual(text, (self.whole / place / "report.md").read_text())


class Generated(unittest.TestCase):
    def test_everything_is_up_to_date(self):
        late = [str(path.relative_to(ROOT)) for path in results.outdated(results.generated())]
        self.assertEqual(late, [], "run python3 benchmarks/results.py")

    def test_a_changed_figure_is_noticed(self):
        with tempfile.TemporaryDirectory() as scratch:
            root = Path(scratch)
            shutil.copytree(folders.RESULTS, root / "benchmarks" / "results")
            for name in ["README.md", "benchmarks/RESULTS.md"]:
                shutil.copy(ROOT / name, root / name)
            self.assertEqual(results.outdated(results.generated(root)), [])
            part = root / "benchmarks" / "results" / results.README_MACHINE / "gpt"
            raw = json.loads((part / "raw.json").read_text())
            for found in raw["results"]["gpipe K=2 M=8 1f1b always"]:
                found["step_ms"] = [2 * ms for ms in found["step_ms"]]
            (part / "raw.json").write_text(json.dumps(raw))
            late = {path.name for path in results.outdated(results.generated(root))}
            self.assertEqual(late, {"RESULTS.md", "README.md", "report.md"})

    def test_a_part_in_another_machines_folder_is_refused(self):
        with tempfile.TemporaryDirectory() as scratch:
            source = folders.RESULTS / results.README_MACHINE / "gpt"
            shutil.copytree(source, Path(scratch) / "amd-family-26-model-2-2-cores" / "gpt")
            with self.assertRaises(SystemExit) as end:
                results.machines(Path(scratch))
            self.assertIn(results.README_MACHINE, str(end.exception))

    def test_every_link_is_there(self):
        pages = [folders.BENCHMARKS / name for name in ["RESULTS.md", "README.md"]]
        pages += folders.RESULTS.rglob("*.md")
        links = 0
        for page in pages:
            for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
                links += 1
                self.assertTrue((page.parent / target).exists(), f"{page}: {target}")
        self.assertGreater(links, 40)

    def test_documents_link_to_what_is_there(self):
        for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
            for target in re.findall(r"\]\(([^)#]*benchmarks/[^)#]*)", page.read_text()):
                self.assertTrue((page.parent / target).exists(), f"{page}: {target}")

    def test_it_is_short_enough_to_be_read(self):
        lines = (folders.BENCHMARKS / "RESULTS.md").read_text().splitlines()
        self.assertLess(len(lines), 300)
        self.assertLessEqual(len((folders.BENCHMARKS / "README.md").read_text().splitlines()), 60)


# A figure: a decimal, a percentage, a ratio, or a day.
FIGURE = re.compile(r"(?<![\d.])\d+\.\d+(?![\d.])|\d+%|\b\d+x\b|20\d\d-\d\d")
# What figures in the generators' own words are of: the method, and how near is near.
METHOD = {"95%", "5%"}
GENERATORS = [
    "amoeba",
    "bilingual",
    "checkpoint",
    "folders",
    "gpt",
    "gpu_report",
    "memory",
    "prediction",
    "processes",
    "records",
    "results",
    "scaling",
    "schedules",
    "simulated",
    "steps",
    "targets",
]


def step(random, stages, remat_ms):
    """What a program of gpipe might find."""
    ms = lambda: random.uniform(1000, 9000)
    keys = [*steps.PARTS, "wait"]
    parts = {key: [ms() / 10 for _ in range(stages)] for key in keys}
    return {
        "balance": [9] * stages,
        "bubble": random.uniform(0.1, 0.9),
        "gradient_bytes": random.randrange(10**7, 10**8),
        "live_bytes": [random.randrange(10**8, 10**9) for _ in range(stages)],
        "peak_bytes": [random.randrange(10**10, 10**11) for _ in range(stages)],
        "loss": [random.uniform(1, 9)],
        "parts_ms": [parts] * 4,
        "simulated_last_ms": ms(),
        "step_ms": [ms() + remat_ms for _ in range(4)],
    }


def made_up(seed):
    """Raw data of `gpt` in which every figure is made up."""
    own = random.Random(seed)
    names = [job for job in gpt.WORKLOAD.jobs if job.startswith("gpipe")]
    found = {name: [step(own, int(name[8]), 10.0) for _ in range(3)] for name in names}
    peers = [job for job in gpt.WORKLOAD.jobs if not job.startswith("gpipe")]
    for name in peers:
        ms = [own.uniform(1000, 9000) for _ in range(4)]
        one = {"step_ms": ms, "loss": [own.uniform(1, 9)], "threads": 2}
        one["peak_tensor_bytes"] = own.randrange(10**9, 10**10)
        found[name] = [copy.deepcopy(one) for _ in range(3)]
    canary = [own.uniform(1, 9) for _ in range(3)]
    return {"canary_ms": canary, "ceiling": [own.uniform(1, 2) for _ in range(3)], "results": found}


class Reports(unittest.TestCase):
    def report(self, seed):
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            told = {"part": "gpt", "partial": None, "date": None, "command": None, "commit": None}
            told |= {"machine": {"name": "made up"}, "versions": {}, "memory_gib": None}
            told |= {"load_before": None, "seconds": None}
            (folder / "environment.json").write_text(json.dumps(told))
            (folder / "raw.json").write_text(json.dumps(made_up(seed)))
            return steps.report(gpt, folder), steps.summary(gpt, folder)

    def test_two_runs_share_no_figure(self):
        """All decimals at the same place are a target, or are of nothing but themselves."""
        texts = [self.report(seed) for seed in (1, 2, 3)]
        targets = {str(one.at_least) for one in [*gpt.PEERS, *gpt.ALONE, gpt.EFFICIENCY]}
        for reports in zip(*texts):
            reports = ["\n".join(one) if isinstance(one, list) else one for one in reports]
            lines = [[FIGURE.findall(line) for line in one.splitlines()] for one in reports]
            self.assertEqual(len({len(one) for one in lines}), 1)
            shared = {
                figures[0]
                for same_line in zip(*lines)
                for figures in zip(*same_line)
                if len(set(figures)) == 1
            }
            self.assertEqual(shared - targets - METHOD, set())

    def test_no_generator_has_figures_in_its_words(self):
        for name in GENERATORS:
            tree = ast.parse((folders.BENCHMARKS / f"{name}.py").read_text())
            documents = {
                id(node.body[0].value)
                for node in ast.walk(tree)
                if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef))
                and isinstance(node.body[0], ast.Expr)
            }
            formats = {
                id(one)
                for node in ast.walk(tree)
                if isinstance(node, ast.FormattedValue) and node.format_spec
                for one in ast.walk(node.format_spec)
            }
            for node in ast.walk(tree):
                words = isinstance(node, ast.Constant) and isinstance(node.value, str)
                if words and id(node) not in documents | formats:
                    found = set(FIGURE.findall(node.value)) - METHOD
                    self.assertEqual(found, set(), f"{name}.py:{node.lineno}: {node.value}")


class Verdicts(unittest.TestCase):
    def found(self, ours, theirs, target, whole=True):
        results_ = {"ours": [{"step_ms": ms} for ms in ours], "a": [{"step_ms": theirs}] * 3}
        others = ["a"] if whole else ["a", "not in the run"]
        return Comparison("ours", "all", others, target).look(results_, lambda one: one["step_ms"])

    def test_what_is_slower_is_behind_whatever_the_target(self):
        for target in [None, 1.1, 1.0]:
            self.assertEqual(self.found([12, 11, 13], 10, target).verdict(), "**behind**")

    def test_what_is_faster_is_held_to_the_target(self):
        self.assertEqual(self.found([9, 9, 9], 10, 1.1).verdict(), "ahead, target met")
        self.assertEqual(self.found([9, 9, 9], 10, 1.2).verdict(), "ahead, **below target**")
        self.assertEqual(self.found([9, 9, 9], 10, None).verdict(), "ahead")

    def test_no_target_is_met_where_a_peer_was_not_in_the_run(self):
        self.assertEqual(self.found([9, 9, 9], 10, 1.1, whole=False).verdict(), "ahead")

    def test_ratios_are_paired_within_rounds(self):
        a = [{"step_ms": ms} for ms in (10, 20, 40)]
        b = [{"step_ms": ms} for ms in (5, 10, 20)]
        found = Comparison("b", "a", ["a"]).look({"a": a, "b": b}, lambda one: one["step_ms"])
        self.assertEqual(found.speeds, [2, 2, 2])

    def test_the_readme_is_even_where_the_interval_contains_one(self):
        self.assertEqual(side([0.99, 1.2]), "even")
        self.assertEqual(side([0.8, 1.0]), "even")
        self.assertEqual(side([1.01, 1.2]), "ahead")
        self.assertEqual(side([0.8, 0.99]), "**behind**")

    def test_another_machine_has_a_sentence_of_its_own_figure(self):
        found = results.machines(folders.RESULTS)
        told = results.elsewhere(found)
        own = results.README_MACHINE
        others = [parts for machine, parts in found.items() if machine.name != own]
        self.assertEqual(len(told), sum("gpt" in parts for parts in others))
        self.assertEqual(results.elsewhere({}), [])
        row = results.README_ROWS[0]
        figures = [f"{row.best(parts['gpt']).speed:.2f}." for parts in others if "gpt" in parts]
        for sentence, figure in zip(told, figures, strict=True):
            self.assertTrue(sentence.endswith(figure), sentence)

    def test_a_steps_time_names_the_steps_that_count(self):
        of = lambda *counts: {"a": [{"step_ms": [1.0] * count} for count in counts]}
        self.assertEqual(steps.step_is(of(4, 4)), "median of steps 3 to 4")
        self.assertEqual(steps.step_is(of(4, 16)), "median of steps 3 to 16")

    def test_losses_are_in_the_results(self):
        text = (folders.BENCHMARKS / "RESULTS.md").read_text()
        self.assertIn("**behind**", text)
        parts = {machine.name: own for machine, own in results.machines(folders.RESULTS).items()}
        own = parts[results.README_MACHINE]
        sides = [row.cells(own[row.module.WORKLOAD.name])[-1] for row in results.README_ROWS]
        readme = (ROOT / "README.md").read_text()
        self.assertEqual(readme.count("**behind**"), sides.count("**behind**"))


if __name__ == "__main__":
    unittest.main()
