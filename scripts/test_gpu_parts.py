"""Tests of how the GPU kit runs its parts, without a GPU, PyTorch or cargo.

Run: python3 -m unittest discover -s scripts
"""

import contextlib
import io
import json
import unittest
from pathlib import Path
from unittest import mock

from gpu_fakes import InFolder, refusal_of, script

import gpu
import gpu_parts
import gpu_report
from gpu_parts import Context, Part, Step
from memory import search


class Choosing(unittest.TestCase):
    def test_parts_run_in_order_of_value_however_they_are_named(self):
        names = lambda given: [part.name for part in gpu.choose(given)]
        self.assertEqual(names([]), ["tests", "bits", "gpt", "amoeba", "largest", "cpu"])
        self.assertEqual(names(["cpu", "bits"]), ["bits", "cpu"])

    def test_an_unknown_part_is_refused_with_those_there_are(self):
        self.assertIn(
            "no part 'gtp': name some of tests, bits, gpt", refusal_of(gpu.choose, ["bits", "gtp"])
        )

    def test_limits_are_those_of_the_parts_unless_others_are_given(self):
        found = gpu.limits(["gpt=500"])
        self.assertEqual(found["gpt"], 500)
        self.assertEqual(found["bits"], 160)
        for wrong in ["gpt", "gpt=", "gpt=0", "gpt=1.5", "none=3"]:
            self.assertIn(
                f"--limit {wrong}: write a part and whole seconds", refusal_of(gpu.limits, [wrong])
            )

    def test_the_parts_fit_two_commands_of_ten_minutes(self):
        limits = [part.limit_s for part in gpu_parts.PARTS]
        self.assertLessEqual(max(limits), 9 * 60)
        for half in [limits[:3], limits[3:]]:
            self.assertLessEqual(sum(half), 10 * 60 - 2 * gpu.LEAST_S)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Budget(InFolder):
    """A part's limit, by a clock that only the steps move."""

    def setUp(self):
        super().setUp()
        self.clock, self.ran, self.seconds, self.codes = Clock(), [], 40, {}
        self.results = gpu.Results(self.folder, {})

    def part(self, steps):
        return Part("tests", "a part", 100, True, steps)

    def run_part(self, steps, limit_s=100):
        def run(step, seconds, _note):
            self.ran.append((step.name, seconds))
            self.clock.now += min(seconds, self.seconds)
            code = self.codes.get(step.name, 0)
            return {
                "name": step.name,
                "of": {},
                "code": code,
                "lines": [{"said": step.name}],
                "output": "",
                "error": "why",
            }

        with contextlib.redirect_stdout(io.StringIO()):
            gpu.run_part(self.part(steps), None, self.results, limit_s, {}, self.clock, run)
        return self.results.part(self.part(steps))

    @staticmethod
    def steps(*names):
        return lambda _: (Step(name, [name], {}, {"settings": ""}) for name in names)

    def test_a_part_ends_at_its_limit_and_says_before_what(self):
        found = self.run_part(self.steps("a", "b", "c", "d"))
        self.assertEqual(
            self.ran, [("a", 100), ("b", 60), ("c", 20)]
        )  # of `c` there is as much as was left
        self.assertEqual((found["status"], found["why"]), ("partial", "its 100 s ended before: d"))
        self.assertEqual(found["seconds"], 100)

    def test_no_process_gets_more_than_its_own_limit(self):
        self.run_part(lambda _: (Step(name, ["a"], {}, limit_s=15) for name in "a"))
        self.assertEqual(self.ran, [("a", 15)])

    def test_what_was_found_is_written_after_each_process(self):
        written = []

        def steps(_):
            for name in ["a", "b"]:
                yield Step(name, [name], {}, {})
                written.append([one["name"] for one in self.written()])

        self.run_part(steps)
        self.assertEqual(written, [["a"], ["a", "b"]])

    def written(self):
        return json.loads((self.folder / "results.json").read_text())["parts"]["tests"]["steps"]

    def test_a_process_that_fails_stops_neither_its_part_nor_a_search(self):
        sent = []

        def steps(_):
            for name in ["a", "b"]:
                sent.append((yield Step(name, [name], {}, {})))

        self.codes["a"] = 1
        found = self.run_part(steps)
        self.assertEqual(sent, [None, [{"said": "b"}]])
        self.assertEqual((found["status"], found["why"]), ("failed", "1 of its processes failed"))

    def test_a_part_with_a_fault_is_reported_as_failed(self):
        def steps(_):
            yield Step("a", ["a"], {}, {})
            raise KeyError("fault")

        found = self.run_part(steps)
        self.assertEqual((found["status"], found["why"]), ("failed", "KeyError: 'fault'"))
        self.assertEqual(len(found["steps"]), 1)

    def test_a_later_run_goes_on_where_an_earlier_one_ended(self):
        self.codes["b"] = 1

        def steps(_):
            yield Step("weights", ["w"], {}, {}, always=True)
            yield from self.steps("a", "b", "c")(None)

        self.run_part(steps, limit_s=125)
        self.assertEqual([name for name, _ in self.ran], ["weights", "a", "b"])
        self.ran.clear()
        self.codes.clear()
        found = self.run_part(steps, limit_s=1000)
        self.assertEqual([name for name, _ in self.ran], ["weights", "b", "c"])
        self.assertEqual(found["status"], "done")
        self.assertEqual(sorted(one["name"] for one in found["steps"]), ["a", "b", "c", "weights"])


class Processes(InFolder):
    def process(self, text):
        return gpu.Process(Step("one", [str(script(self.folder / "program", text))], {}, {}))

    def test_json_lines_are_kept_apart_from_other_output(self):
        found = self.process("echo '{\"a\": 1}'; echo running; echo 7; echo wrong >&2; exit 3").run(
            60, {}
        )
        self.assertEqual((found["lines"], found["output"]), ([{"a": 1}], "running\n7\n"))
        self.assertEqual((found["code"], found["error"], found["timed_out"]), (3, "wrong\n", False))

    def test_a_process_is_ended_at_its_limit(self):
        found = self.process("read forever < /dev/tty || while :; do :; done").run(0, {})
        self.assertEqual((found["code"], found["timed_out"]), (-9, True))
        self.assertIn("it was ended at its limit", found["error"])

    def test_what_a_process_said_before_the_kit_is_ended_is_there(self):
        process, notes = self.process("echo '{\"a\": 1}'; while :; do :; done"), []

        def note(found):
            notes.append(found)
            raise SystemExit(143)

        with mock.patch.object(gpu, "NOTE_S", 0.01), self.assertRaises(SystemExit):
            process.run(600, {}, note)
        self.assertEqual((notes[0]["lines"], notes[0]["code"]), ([{"a": 1}], None))
        self.assertEqual(process.running.returncode, -9)

    def test_a_program_that_is_not_there_is_a_result(self):
        found = gpu.Process(Step("one", [str(self.folder / "none")], {}, {})).run(60, {})
        self.assertIsNone(found["code"])
        self.assertIn("none", found["error"])


class Search(unittest.TestCase):
    def test_the_largest_that_fits_is_found_from_any_guess(self):
        for most in [0, 16, 48, 208, 400]:
            for guess in [16, 208, 416]:
                tries, tried = search(guess, 16), []
                with self.assertRaises(StopIteration) as end:
                    at = next(tries)
                    while True:
                        tried.append(at)
                        at = tries.send(at <= most)
                self.assertEqual(end.exception.value, most or None, (most, guess))
                self.assertLessEqual(len(tried), 12)

    def test_a_part_begins_with_the_papers_networks_and_follows_what_fits(self):
        context = Context(Path("kit"), "cuda:0", "python3", Path("scratch"), tiny=False)
        steps = gpu_parts.largest(context)
        self.assertEqual(next(steps).of["filters"], 208)
        self.assertEqual(steps.send([{"parameters": 1}]).of["filters"], 224)
        # A process that was cut off says nothing of what fits: the search of the variant ends.
        after = steps.send(None)
        self.assertEqual((after.of["variant"], after.of["filters"]), ("pipeline", 416))
        self.assertEqual(steps.send([{"refused": "..."}]).of["filters"], 384)


class Report(unittest.TestCase):
    def test_it_says_what_there_is_however_little(self):
        self.assertIn("Rehearsal", gpu_report.report({}))
        step = {
            "name": "gpt float32, none",
            "of": {"settings": "none", "network": "gpt", "dtype": "float32"},
            "code": -9,
            "lines": [],
            "output": "",
            "error": "it was ended at its limit; ",
        }
        part = {
            "title": "t",
            "status": "partial",
            "why": "its 9 s ended",
            "seconds": 9.0,
            "steps": [step],
        }
        text = gpu_report.report(
            {
                "tiny": False,
                "gpu_bytes": 1 << 37,
                "gpu": "NVIDIA H200",
                "driver": "580",
                "parts": {"bits": part},
            }
        )
        self.assertIn("| bits | the same bits at K = 1 to 4 | partial | 9 | its 9 s ended |", text)
        self.assertIn("**Failed: gpt float32, none**", text)
        self.assertIn("# First run on a GPU", text)

    def test_results_that_cannot_be_read_leave_the_rest_of_the_report(self):
        bad = {
            "title": "t",
            "status": "done",
            "why": "",
            "seconds": 1.0,
            "steps": [{"lines": [{}], "code": 0, "of": {}}],
        }
        text = gpu_report.report({"parts": {"bits": bad, "tests": bad}})
        self.assertIn("cannot be shown: KeyError: 'what'", text)
        self.assertIn("## The tests that need a GPU", text)

    def test_a_test_that_skipped_itself_is_not_reported_as_passed(self):
        step = {
            "output": "test gpu_a ... ok\ntest gpu_b ... ok\n",
            "error": "gpu_a: there is no GPU\n",
        }
        text = "\n".join(gpu_report.tests([step]))
        self.assertIn("| gpu_a | skipped: no GPU |", text)
        self.assertIn("| gpu_b | ok |", text)


if __name__ == "__main__":
    unittest.main()
