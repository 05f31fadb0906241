#!/usr/bin/env python3
"""What to run first when there is a GPU. (scripts/gpu_first_hour.sh; docs/guides/gpus.md)

Usage: gpu.py run [PART..] [--seconds 570] [--limit PART=SECONDS] [--kit FOLDER] [--out FOLDER]
           [--after FOLDER] [--rehearse]
       gpu.py report FOLDER.. [--out FOLDER]      (one report of the results of several runs)

Parts, most valuable first: tests, bits, gpt, amoeba, largest, cpu. Each has a limit of its own; all
together end before --seconds. `results.json` and `report.md` are written after every process, so
that a run which is cut off loses one process. A run goes on where an earlier one with the same kit
ended, whose results are in --out, or in --after. Without a GPU each part says what it would have
run, and the part on CPUs runs at a tiny size; --rehearse runs every part at a tiny size on CPUs.

`run` writes to $OUT or out/gpu. `report` writes to benchmarks/results/MACHINE/gpu, as a whole, if
every part was run to its end; otherwise to out/benchmarks/MACHINE/gpu. --out and $OUT name another
folder.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import folders
import gpu_machine
import gpu_report
from figures import ROOT
from gpu_parts import PARTS, Context
from machine import Machine

LEAST_S = 10  # less is not worth a process
NOTE_S = 2  # between two looks at what a process has said
MOST_LINES = 2000  # of JSON that are kept of a process
MOST_TEXT = 6000  # characters of other output, and of what went to stderr
RESULTS = "results.json"
SAME = ("kit", "gpu", "tiny")  # of runs that are one report


def fail(message):
    sys.exit(f"gpu_first_hour.sh: {message}")


class Results:
    """What has been found, in a file that is always whole. `names` are written instead of this
    machine's folders."""

    def __init__(self, out, data, names=()):
        self.out, self.data, self.names = out, data, dict(names)
        self.data.setdefault("parts", {})

    def part(self, part):
        return self.data["parts"].setdefault(
            part.name, {"title": part.title, "status": "not run", "seconds": 0.0, "steps": []}
        )

    def write(self):
        self.out.mkdir(parents=True, exist_ok=True)
        replace(self.out / RESULTS, self.named(json.dumps(self.data, indent=1)) + "\n")
        replace(self.out / "report.md", self.named(gpu_report.report(self.data)))

    def named(self, text):
        for path, name in self.names.items():
            text = text.replace(path, name)
        return text


def replace(path, text):
    aside = path.with_name(path.name + ".part")
    aside.write_text(text)
    aside.rename(path)


class Process:
    """One step's process. Its lines are taken as they come, so those before a kill are kept."""

    def __init__(self, step):
        self.step, self.lines, self.text, self.running = step, [], "", None

    def read(self, stream):
        for line in stream:
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if isinstance(found, dict) and len(self.lines) < MOST_LINES:
                self.lines.append(found)
            else:
                self.text = (self.text + line)[-MOST_TEXT:]

    def run(self, limit_s, environment, note=lambda found: None):
        """What it found, within so many seconds. `note` is given what there is so far, now and
        then."""
        begun, timed_out, noted = time.monotonic(), False, 0
        with tempfile.TemporaryFile("w+", errors="replace") as stderr:
            try:
                self.running = subprocess.Popen(
                    self.step.command,
                    cwd=ROOT,
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                    errors="replace",
                    process_group=0,  # not a session: what ends this program's ends it, too
                )
            except OSError as error:
                return self.found(begun, code=None, error=f"{self.step.command[0]}: {error}")
            reader = threading.Thread(target=self.read, args=[self.running.stdout], daemon=True)
            reader.start()
            try:
                while self.running.poll() is None and not timed_out:
                    left = limit_s - (time.monotonic() - begun)
                    timed_out = left <= 0
                    self.wait(min(NOTE_S, max(left, 0)))
                    if len(self.lines) > noted:
                        noted = len(self.lines)
                        note(self.found(begun, code=None, error="it was cut off"))
            finally:
                self.kill()
                reader.join(5)
                self.running.stdout.close()
            size = stderr.seek(0, os.SEEK_END)
            stderr.seek(max(0, size - MOST_TEXT))
            return self.found(begun, self.running.returncode, stderr.read(), timed_out)

    def wait(self, seconds):
        try:
            self.running.wait(seconds)
        except subprocess.TimeoutExpired:
            pass

    def kill(self):
        """Ends it, and what it started, as far as that still runs."""
        try:
            os.killpg(self.running.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.running.wait()

    def found(self, begun, code, error="", timed_out=False):
        error = f"it was ended at its limit; {error}" if timed_out else error
        return {
            "name": self.step.name,
            "command": self.step.command,
            "environment": self.step.environment,
            "of": self.step.of,
            "seconds": round(time.monotonic() - begun, 2),
            "code": code,
            "timed_out": timed_out,
            "lines": list(self.lines),
            "output": self.text,
            "error": error,
        }


def run_part(part, context, results, limit_s, environment, clock=time.monotonic, run=None):
    """Runs a part's steps one after another until its limit, and writes what each found. A step
    that an earlier run has done is not run again."""
    run = run or (
        lambda step, seconds, note: Process(step).run(seconds, environment | step.environment, note)
    )
    own, begun = results.part(part), clock()
    before = own["seconds"]
    own.update(status="partial", why="it was cut off")
    done = {found["name"]: found for found in own["steps"] if found["code"] == 0}
    own["steps"] = list(done.values())
    own.pop("would_run", None)

    def put(found):
        own["steps"] = [*(one for one in own["steps"] if one["name"] != found["name"]), found]
        own["seconds"] = round(before + clock() - begun, 1)
        results.write()

    steps, failed = part.steps(context), 0
    try:
        step = next(steps)
        while True:
            left = limit_s - (clock() - begun)
            found = None if step.always else done.get(step.name)
            if not found and left < min(LEAST_S, limit_s):
                own["why"] = f"its {limit_s:.0f} s ended before: {step.name}"
                return
            if not found:
                print(f"{part.name}: {step.name} ({left:.0f} s left)", flush=True)
                found = run(step, min(step.limit_s, left), put)
                failed += found["code"] != 0
                put(found)
            step = steps.send(found["lines"] if found["code"] == 0 else None)
    except StopIteration:
        own.update(status="done", why="")
        if failed:
            own.update(status="failed", why=f"{failed} of its processes failed")
    except Exception as error:  # a part's failure never stops the others
        own.update(status="failed", why=f"{type(error).__name__}: {error}")
    finally:
        results.write()


def would_run(part, context, results):
    """Says what a part would have run, as far as that does not depend on what is found. Later
    rounds run the same again."""
    own = results.part(part)
    own.update(status="rehearsed", why="there is no GPU", would_run=[])
    for step in part.steps(context):
        if step.of.get("round"):
            continue
        line = " ".join(
            [*(f"{key}={value}" for key, value in step.environment.items()), *step.command]
        )
        line = results.named(line)
        own["would_run"].append(line)
        print(f"{part.name}: would run: {line}", flush=True)
    results.write()


def choose(names):
    """The parts of these names, in order of value; all if there are none."""
    known = [part.name for part in PARTS]
    for name in names:
        if name not in known:
            fail(
                f"there is no part '{name}': name some of {', '.join(known)}, or none for all of"
                " them"
            )
    return [part for part in PARTS if part.name in names or not names]


def limits(given):
    """Part -> seconds, from PART=SECONDS."""
    found = {part.name: part.limit_s for part in PARTS}
    for text in given:
        name, _, seconds = text.partition("=")
        if name not in found or not seconds.isdigit() or int(seconds) == 0:
            fail(f"--limit {text}: write a part and whole seconds, such as --limit gpt=500")
        found[name] = int(seconds)
    return found


def earlier(path, out, machine, tiny):
    """What an earlier run of the same kit, on the same GPU and at the same sizes, left in `path`,
    to be added to. What else would be overwritten in `out` is kept aside."""
    now = {**machine, "tiny": tiny, "runs": []}
    if path.exists():
        try:
            data = json.loads(path.read_text())
        except ValueError:
            data = {}
        if all(data.get(key) == now.get(key) for key in SAME):
            return data
        print(f"{path} is of another kit, GPU or size: it is not added to")
    if (out / RESULTS).exists():
        (out / RESULTS).rename(out / "results-earlier.json")
    return now


def run(options):
    begun = time.monotonic()
    chosen, limit = choose(options.parts), limits(options.limit)
    kit = options.kit.resolve()
    manifest = gpu_machine.check_kit(kit)
    python = os.environ.get("TORCH_PYTHON", sys.executable)
    torch = gpu_machine.torch_of(python)
    environment = gpu_machine.environment(torch)
    gpu_machine.check_programs(kit, manifest, environment)
    machine = gpu_machine.describe(manifest, torch)
    tiny = options.rehearse or not torch["gpus"]
    before = options.after or options.out
    results = Results(
        options.out,
        earlier(before / RESULTS, options.out, machine, tiny),
        {f"{ROOT}/": "", python: "python3", str(Path(torch["lib"]).parent): "torch"},
    )
    command = " ".join(["scripts/gpu_first_hour.sh", *sys.argv[1:]])
    results.data["runs"].append(
        {
            "command": command,
            "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
            "gpu": torch["gpu"],
        }
    )
    # So that what runs is ended, and what was found is written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="gpu-kit.") as scratch:
        results.names[scratch] = "WEIGHTS"
        device = "cpu" if options.rehearse else "cuda:0"
        context = Context(kit, device, python, Path(scratch), tiny)
        for part in chosen:
            left = options.seconds - (time.monotonic() - begun)
            if not torch["gpus"] and part.needs_gpu and not options.rehearse:
                would_run(part, Context(kit, device, python, Path("WEIGHTS"), tiny=False), results)
            elif left < 2 * LEAST_S:
                skip(part, results, left, options.seconds)
            else:
                run_part(part, context, results, min(limit[part.name], left - LEAST_S), environment)
    results.write()
    print(f"{options.out / 'report.md'} and {options.out / RESULTS} are written")


def skip(part, results, left, seconds):
    own = results.part(part)
    if not own["steps"]:
        own["why"] = f"{max(0, left):.0f} of {seconds} s were left"
    print(
        f"{part.name}: not run, {max(0, left):.0f} of {seconds} s are left:"
        f" scripts/gpu_first_hour.sh run {part.name}"
    )


def merge(paths):
    """The results of several runs as one; their processes one after another."""
    whole = None
    for folder in paths:
        path = folder / RESULTS if folder.is_dir() else folder
        if not path.is_file():
            fail(f"there is no {path}: name folders that a run has written to")
        data = json.loads(path.read_text())
        if whole is None:
            whole = data
            continue
        whole["runs"] += data["runs"]
        for key in SAME:
            if whole.get(key) != data.get(key):
                fail(f"{path} is of another {key} than {paths[0]}: report them apart")
        for name, part in data["parts"].items():
            own = whole["parts"].setdefault(name, part)
            if own is not part:
                own["steps"] += part["steps"]
                own["seconds"] = round(own["seconds"] + part["seconds"], 1)
                if part["steps"]:
                    own.update({key: part[key] for key in ("status", "why") if key in part})
    return whole


def missing(data):
    """What the results leave out, in words, or None."""
    ended = ("done", "failed")
    left = [one.name for one in PARTS if data["parts"].get(one.name, {}).get("status") not in ended]
    return folders.reasons(
        (data.get("tiny"), "at tiny sizes"), (left, f"not run to the end: {', '.join(left)}")
    )


def environment_of(data, partial, machine):
    """What `environment.json` of the published part says."""
    versions = ("torch", "cuda", "cudnn", "driver", "python")
    runs = data["runs"]
    return {
        "part": "gpu",
        "partial": partial,
        "date": runs[-1]["date"].split()[0],
        "command": "\n".join(one["command"] for one in runs),
        "commit": data["kit"]["commit"],
        "machine": dataclasses.asdict(machine),
        "versions": {
            "libtorch of gpipe": data["kit"]["libtorch"],
            **{name: str(data[name]) for name in versions if data.get(name)},
            "rustc": data["kit"]["rustc"],
        },
        "memory_gib": None,
        "load_before": None,
        "seconds": round(sum(part["seconds"] for part in data["parts"].values())),
    }


def report(options):
    """Writes one report of several runs."""
    data = merge(options.folders)
    partial = missing(data)
    machine = dataclasses.replace(Machine(**data.get("processor", {})), gpu=data.get("gpu"))
    out = options.out or folders.place("gpu", partial, machine)
    with contextlib.nullcontext(out) if options.out else folders.whole(out) as folder:
        Results(folder, data).write()
        text = json.dumps(environment_of(data, partial, machine), indent=1)
        replace(folder / folders.ENVIRONMENT, text + "\n")
    folders.tell(out, partial)


def main():
    parser = argparse.ArgumentParser(
        prog="gpu_first_hour.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    named = Path(os.environ["OUT"]) if os.environ.get("OUT") else None
    defaults = {"run": named or ROOT / "out" / "gpu", "report": named}
    for name, out in defaults.items():
        one = commands.add_parser(name)
        one.add_argument("--out", type=Path, default=out)
        if name == "report":
            one.add_argument("folders", nargs="+", type=Path)
            continue
        one.add_argument("parts", nargs="*")
        one.add_argument("--seconds", type=int, default=570)
        one.add_argument("--limit", action="append", default=[])
        one.add_argument("--kit", type=Path, default=ROOT / "out" / "gpu-kit")
        one.add_argument("--after", type=Path)
        one.add_argument("--rehearse", action="store_true")
    options = parser.parse_args()
    return run(options) if options.command == "run" else report(options)


if __name__ == "__main__":
    main()
