#!/usr/bin/env python3
"""The Python package beside the native engine and beside other pipelines of PyTorch's.

Usage: python_package.py [--rounds N]        (make bench-python)

It measures, in rounds:

- what a layer in Python costs over a native one: a sequence of Linear(4, 4);
- a step of `gpt` on one stage and on two, native and through the package, and so the efficiency of
  two stages of each;
- the same step by torch.distributed.pipelining, torchgpipe and plain PyTorch on two threads, with
  and without recomputation.

The figures go to benchmarks/results/MACHINE/python.
"""

import argparse
import json
import os
import subprocess
import sys

import folders
import rounds
from figures import ROOT, median
from gpt import WORKLOAD as GPT
from rounds import Python, build, driver, drift, gpipe, peer

ENVIRONMENT = ROOT / "python" / "env" / "bin" / "python"
LAYERS, STEPS, ROUNDS = 100, 300, 2

# The same sequence as the driver layer_calls, through the package.
PACKAGE_CALLS = f"""
import json, time, torch, gpipe
from torch import nn
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Linear(4, 4) for _ in range({LAYERS})])
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, spent = torch.ones(1, 4), []
with gpipe.Pipeline(model, x, remat="never", loss=nn.MSELoss(), optimizer=optimizer) as pipe:
    for _ in range({STEPS}):
        report = pipe.train_step(x, x)
        spent.append(1e6 * report.time)
print(json.dumps({{"layers": {LAYERS}, "step_us": spent}}))
"""


# Plain PyTorch, as a measure of how fast the machine calls operators.
PLAIN_CALLS = f"""
import json, time, torch
from torch import nn
torch.set_num_threads(1)
model, spent = nn.Sequential(*[nn.Linear(4, 4) for _ in range({LAYERS})]), []
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
x = torch.ones(1, 4)
for _ in range({STEPS}):
    start = time.perf_counter()
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()
    spent.append(1e6 * (time.perf_counter() - start))
print(json.dumps({{"layers": {LAYERS}, "step_us": spent}}))
"""


def jobs():
    """name -> job"""
    native = lambda **settings: gpipe(steps=GPT.peer_steps, **settings)
    package = lambda **settings: peer("package", **settings)
    return {
        "native, one stage": native(stages=1, remat="never", schedule="1f1b", kernels="aten"),
        "native, two stages": native(remat="never", schedule="1f1b", kernels="aten"),
        "native, two stages, ZB-H1": native(remat="never", schedule="zb-h1", kernels="aten"),
        "native, two stages, recomputing": native(remat="always", schedule="1f1b", kernels="aten"),
        "package, one stage": package(stages=1),
        "package, two stages": package(),
        "package, two stages, ZB-H1": package(schedule="zb-h1"),
        "package, two stages, recomputing": package(remat="always"),
        "torch.distributed.pipelining, 1F1B": peer("pipelining", schedule="1f1b"),
        "torch.distributed.pipelining, 1F1B, recomputing": peer(
            "pipelining", schedule="1f1b", checkpoint=True
        ),
        "torchgpipe": peer("torchgpipe_peer", checkpoint="never"),
        "torchgpipe, recomputing": peer("torchgpipe_peer", checkpoint="always"),
        "PyTorch, two threads": peer("plain", micro_batches=1, threads=2),
        "PyTorch, two threads, recomputing": peer("plain", checkpoint=True, threads=2),
    }


def last(text):
    return json.loads(text.strip().splitlines()[-1])


def layer_calls(count):
    """Microseconds of a layer, native and in Python, by round: one forward and one backward."""
    commands = {
        "native": [str(driver("layer_calls")), f"layers={LAYERS}", f"steps={STEPS}"],
        "package": [str(ENVIRONMENT), "-c", PACKAGE_CALLS],
        "plain": [str(ENVIRONMENT), "-c", PLAIN_CALLS],
    }
    found = {name: [] for name in commands}
    for number in range(count):
        order = list(commands.items())
        for name, command in order if number % 2 else order[::-1]:
            done = subprocess.run(command, capture_output=True, text=True, check=True,
                                  env=dict(os.environ, OMP_NUM_THREADS="1"))
            found[name].append(median(last(done.stdout)["step_us"][STEPS // 3:]) / LAYERS)
    return found


def report(folder):
    """The text of a run's report."""
    raw = json.loads((folder / "raw.json").read_text())
    calls = raw["layer_calls"]
    over = [own - native for own, native in zip(calls["package"], calls["native"])]
    shares = [own / plain for own, plain in zip(over, calls["plain"])]
    lines = [
        *folders.heading("The Python package", folder),
        f"A layer of nearly no work (forward, backward, update): {median(calls['native']):.1f} us"
        f" natively, {median(calls['package']):.1f} us in Python: {median(over):.1f} us more"
        f" ({min(over):.1f} .. {max(over):.1f}). Plain PyTorch takes"
        f" {median(calls['plain']):.1f} us for the layer, with its update; the package's surplus is"
        f" {median(shares):.2f} of that.",
        "",
        "A step of `gpt` with M = 8, float32, libtorch's own products everywhere:",
        "",
        "| what | ms per step | rounds |",
        "|---|---|---|",
    ]
    steps = {name: [GPT.step_ms(own) for own in all_] for name, all_ in raw["results"].items()}
    for name, own in steps.items():
        lines.append(f"| {name} | {median(own):.0f} | {', '.join(f'{one:.0f}' for one in own)} |")
    paired = lambda a, b: [x / y for x, y in zip(steps[a], steps[b])]
    efficiency = {
        kind: median([0.5 * own for own in paired(f"{kind}, one stage", f"{kind}, two stages")])
        for kind in ["native", "package"]
    }
    lines += [
        "",
        f"Efficiency of two stages (the step of one, over twice that of two): native"
        f" {efficiency['native']:.3f}, package {efficiency['package']:.3f}, ratio"
        f" {efficiency['package'] / efficiency['native']:.3f}.",
        "",
        "| package | beside | speed-up | rounds |",
        "|---|---|---|---|",
    ]
    for own, other in [
        ("package, one stage", "native, one stage"),
        ("package, two stages", "native, two stages"),
        ("package, two stages, ZB-H1", "native, two stages, ZB-H1"),
        ("package, two stages, recomputing", "native, two stages, recomputing"),
        ("package, two stages", "torch.distributed.pipelining, 1F1B"),
        ("package, two stages, ZB-H1", "torch.distributed.pipelining, 1F1B"),
        ("package, two stages", "torchgpipe"),
        ("package, two stages, recomputing", "torch.distributed.pipelining, 1F1B, recomputing"),
        ("package, two stages, recomputing", "torchgpipe, recomputing"),
        ("package, two stages", "PyTorch, two threads"),
        ("package, two stages, ZB-H1", "PyTorch, two threads"),
        ("package, two stages, recomputing", "PyTorch, two threads, recomputing"),
    ]:
        if other not in steps:  # an older run
            continue
        ratios = paired(other, own)
        listed = ", ".join(f"{one:.2f}" for one in ratios)
        lines.append(f"| {own} | {other} | {median(ratios):.2f} | {listed} |")
    return "\n".join([*lines, "", drift(raw), ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    # What is there may be a build for tests.
    subprocess.run([sys.executable, ROOT / "scripts" / "python.py"], check=True)
    os.environ.setdefault("TORCH_PYTHON", str(ENVIRONMENT))
    build("gpt_step", "layer_calls")
    python = Python()
    partial = folders.reasons((options.rounds < ROUNDS, f"{options.rounds} rounds, not {ROUNDS}"))
    with folders.run("python", report, partial, versions=python.versions()) as folder:
        calls = layer_calls(max(7, options.rounds))
        raw = rounds.measure(GPT, jobs(), folder / "raw.json", python, options.rounds)
        (folder / "raw.json").write_text(json.dumps({**raw, "layer_calls": calls}) + "\n")


if __name__ == "__main__":
    main()
