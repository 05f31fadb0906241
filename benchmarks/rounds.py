"""Interleaved rounds of programs that print one JSON line each.

Each round runs every job once, in a rotating order, each in a process of its own. Ratios are paired
within a round. A canary (a fixed float32 product on one thread, by plain PyTorch) shows how much
the machine drifted. The two-core ceiling is the same product on two processes at once, over one.

Needs a Python with PyTorch 2.11: name it with TORCH_PYTHON, or its folder with TORCH_PATH. Without
one scripts/pytorch.py fetches it (2.6 GB, once).
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Callable

from figures import ROOT, commit, median
from machine import here

sys.path.insert(0, str(ROOT / "scripts"))
import packages  # noqa: E402
import pytorch  # noqa: E402

PEERS = ROOT / "benchmarks" / "peers"
PROGRAMS = ROOT / "target" / "release"
GPIPE = ROOT / "target" / "release" / "gpipe"
TORCHGPIPE = "0.0.7"
TORCH = "2.11.0"
JOB_LIMIT_S = 900


@dataclasses.dataclass(frozen=True)
class Job:
    """A program with its settings."""

    program: str
    settings: dict
    # Also in the short version.
    short: bool = False
    # In the first round only: what is not compared.
    once: bool = False


@dataclasses.dataclass(frozen=True)
class Workload:
    """What is measured: a network with its mini-batch and update."""

    name: str
    jobs: dict
    # Steps of a peer; those of gpipe are in its settings.
    peer_steps: int
    # Milliseconds of a step, from what a program found.
    step_ms: Callable
    # The network, its mini-batch and its optimizer, in words.
    about: str = ""
    # The network in a few words, with an article.
    brief: str = ""


def gpipe(short=False, once=False, **settings):
    return Job("gpipe", {"steps": 3, **settings}, short, once)


def peer(program, short=False, once=False, **settings):
    flags = {name.replace("_", "-"): value for name, value in settings.items()}
    return Job(program, flags, short, once)


def peers(short, once=(), **settings):
    """name -> job of everything that gpipe is compared with.

    Jobs of `short` are also in the short version, those of `once` in the first round only. Each
    peer's bytes are of a run of their own, in that round: a profiler is on then, so its time does
    not count.
    """
    all_ = {}
    for m, threads in [(1, 1), (1, 2), (8, 1), (8, 2)]:
        plain = peer("plain", micro_batches=m, threads=threads, **settings)
        all_[f"torch M={m} threads={threads}"] = plain
    for threads in [1, 2]:
        checkpointed = peer("plain", checkpoint=True, threads=threads, **settings)
        all_[f"torch M=8 threads={threads} checkpoint"] = checkpointed
    selective = peer("plain", checkpoint="selective", threads=2, **settings)
    all_["torch M=8 threads=2 checkpoint selective"] = selective
    # Each half of a split backward recomputes a checkpoint, so no job has both.
    for schedule in ["interleaved-zb", "zbv"]:
        split = peer("pipelining", schedule=schedule, **settings)
        all_[f"pipelining K=2 M=8 {schedule}"] = split
    selective = peer("pipelining", checkpoint="selective", **settings)
    all_["pipelining K=2 M=8 1f1b checkpoint selective"] = selective
    bytes_ = {"memory": True, "once": True, **settings}
    for checkpoint in [False, True]:
        end = " checkpoint" if checkpoint else ""
        for schedule in ["gpipe", "1f1b"]:
            pipelined = peer("pipelining", schedule=schedule, checkpoint=checkpoint, **settings)
            all_[f"pipelining K=2 M=8 {schedule}{end}"] = pipelined
        kept = "except_last" if checkpoint else "never"
        all_[f"torchgpipe K=2 M=8{end}"] = peer("torchgpipe_peer", checkpoint=kept, **settings)
        pipelined = peer("pipelining", checkpoint=checkpoint, **bytes_)
        all_[f"memory of pipelining K=2 M=8 1f1b{end}"] = pipelined
        all_[f"memory of torch M=8 threads=1{end}"] = peer("plain", checkpoint=checkpoint, **bytes_)
    all_["memory of torch M=1 threads=1"] = peer("plain", micro_batches=1, **bytes_)
    all_["pipelining K=1 M=8"] = peer("pipelining", stages=1, once=True, **settings)
    all_["torchgpipe K=1 M=8"] = peer(
        "torchgpipe_peer", stages=1, checkpoint="never", once=True, **settings
    )
    return {
        name: dataclasses.replace(job, short=name in short, once=job.once or name in once)
        for name, job in all_.items()
    }


CANARY = """
import sys, time, torch
torch.set_num_threads(1)
x = torch.ones(512, 512)
time.sleep(max(0.0, float(sys.argv[1]) - time.time()))
start, count = time.perf_counter(), 0
while time.perf_counter() < start + 1.5:
    x @ x
    count += 1
print(count / (time.perf_counter() - start))
"""


class Python:
    """The one that the peers run in."""

    def __init__(self):
        self.program = os.environ.get("TORCH_PYTHON", sys.executable)
        path = os.environ.get("TORCH_PATH", os.environ.get("PYTHONPATH", ""))
        self.torch = self.version(path)
        if not self.torch.startswith(TORCH):
            name = f"pytorch-{pytorch.VERSION}"
            folder, _ = packages.once(name, "numpy", f"torch=={pytorch.VERSION}")
            path = str(folder)
            self.torch = self.version(path)
            if not self.torch.startswith(TORCH):
                sys.exit(
                    f"{path} has no PyTorch {TORCH} for {self.program}: name one with TORCH_PATH"
                )
        requirement = f"torchgpipe=={TORCHGPIPE}"
        folder, _ = packages.once(f"torchgpipe-{TORCHGPIPE}", "--no-deps", requirement)
        self.environment = dict(os.environ, PYTHONPATH=f"{path}:{folder}")

    def add(self, folder):
        """Lets the peers import what is in this folder, too."""
        self.environment["PYTHONPATH"] += f":{folder}"

    def version(self, path):
        probe = [self.program, "-c", "import torch; print(torch.__version__)"]
        environment = dict(os.environ, PYTHONPATH=path)
        done = subprocess.run(probe, capture_output=True, text=True, env=environment)
        return done.stdout.strip()

    def versions(self):
        """Those of the peers, for the run's environment."""
        return {"torch": self.torch, "torchgpipe": TORCHGPIPE}

    def products_per_s(self, processes):
        """How many products each of that many processes makes while all are busy."""
        together = str(time.time() + 6)  # after the imports
        command = [self.program, "-c", CANARY, together]
        start = [
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=self.environment)
            for _ in range(processes)
        ]
        return [float(process.communicate(timeout=120)[0]) for process in start]

    def canary(self):
        """Milliseconds of a product, and the products of two busy cores over those of one."""
        one, two = self.products_per_s(1), self.products_per_s(2)
        return 1e3 / one[0], sum(two) / one[0]


def build(*drivers):
    """Builds programs of benchmarks/drivers, in release."""
    flags = [flag for driver in drivers for flag in ["--bin", driver]]
    cargo_build("--package", "gpipe-drivers", *flags)


def build_gpipe():
    """Builds the command, in release."""
    cargo_build("--package", "gpipe-cli", "--bin", "gpipe")


def cargo_build(*flags):
    command = ["cargo", "build", "--quiet", "--release", "--locked", *flags]
    subprocess.run(command, cwd=ROOT, check=True)


def driver(name):
    return PROGRAMS / name


class Runner:
    """Runs a workload's jobs. `folder` has the weights that the peers start from, `programs` has
    gpipe's own programs."""

    def __init__(self, workload, folder, python, programs=PROGRAMS):
        self.workload, self.folder, self.python, self.programs = workload, folder, python, programs

    def command(self, job):
        if job.program == "gpipe":
            program = self.programs / f"{self.workload.name}_step"
            return [str(program), *(f"{key}={value}" for key, value in job.settings.items())]
        flags = ["--workload", self.workload.name, "--steps", str(self.workload.peer_steps)]
        for key, value in job.settings.items():
            if value is not False:
                flags += [f"--{key}"] if value is True else [f"--{key}", str(value)]
        return [self.python.program, str(PEERS / f"{job.program}.py"), str(self.folder), *flags]

    def run(self, job):
        command = self.command(job)
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=JOB_LIMIT_S,
            env=self.python.environment,
        )
        if result.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
        return json.loads(result.stdout.strip().splitlines()[-1])


def measure(workload, jobs, path, python, rounds=2, minutes=0):
    """What each job found in each round. After each round it is in `path`, too.

    Runs at least `rounds`, and more as long as another one, if it takes as long as the last, ends
    within `minutes`.
    """
    begun = time.monotonic()
    results, canaries, ceilings = {name: [] for name in jobs}, [], []
    with tempfile.TemporaryDirectory() as folder:
        runner = Runner(workload, folder, python)
        runner.run(gpipe(stages=1, steps=1, folder=folder))
        names = list(jobs)
        for number in itertools.count():
            round_begun = time.monotonic()
            canary, ceiling = python.canary()
            canaries.append(canary)
            ceilings.append(ceiling)
            shift = number * 7 % len(names)
            for name in names[shift:] + names[:shift]:
                if number == 0 or not jobs[name].once:
                    results[name].append(runner.run(jobs[name]))
            now = time.monotonic()
            took = f"round {number + 1} took {now - round_begun:.0f} s"
            print(f"{workload.name}: {took}", file=sys.stderr, flush=True)
            raw = {
                "machine": here().title(),
                "commit": commit(),
                "torch": python.torch,
                "canary_ms": canaries,
                "ceiling": ceilings,
                "results": results,
            }
            Path(path).write_text(json.dumps(raw) + "\n")
            if number + 1 >= rounds and 2 * now - round_begun - begun > 60 * minutes:
                return raw


def drift(raw):
    """A sentence on how steady the machine was: its canary and the two-core ceiling."""
    canary, ceiling = raw["canary_ms"], raw["ceiling"]
    return (
        f"Rounds: {len(canary)}. The canary, a fixed float32 product on one thread, took"
        f" {median(canary):.2f} ms ({min(canary):.2f} .. {max(canary):.2f}). Two busy cores made"
        f" {median(ceiling):.2f} times the products of one"
        f" ({min(ceiling):.2f} .. {max(ceiling):.2f})."
    )
