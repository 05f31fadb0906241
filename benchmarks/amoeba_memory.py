#!/usr/bin/env python3
"""The largest AmoebaNet-D(18, D) that trains under a cap in bytes: plain, and with re-materialization.  (make bench-amoeba-memory)

Usage: amoeba_memory.py [--filters 100] [--samples 128] [--few] [--rounds 2] [--out FOLDER]
       amoeba_memory.py --report FILE.jsonl      (the report again, from its raw data)

After GPipe's table 1 (Huang et al. 2019): one 8 GB accelerator trains AmoebaNet-D(18, 208), 82 million parameters, plainly, and
(18, 416), 318 million, with re-materialization: 3.9 times. There the plain network's activations take 6.0 times the bytes of
its parameters. The same here on a smaller scale: --filters and --samples say at which network and mini-batch of 64 x 64
images the plain step is measured first; the cap is what that step needs, rounded up to a MiB, and is said before any search.

Both sides train the same images by RMSProp with momentum, in float32, on one thread. Plain is one stage, one micro-batch,
nothing discarded. A network fits if two steps in a process of its own stay under the cap, which the allocator enforces: an
allocation over it is refused, and the step fails. The largest D is found by bisection over multiples of 4; it fits, and D + 4 was
refused. Parameter bytes are weights, batch norm's running statistics, RMSProp's two moments and the gradients'
accumulators: 16 bytes a parameter; the paper counts 12.8, which is without accumulators, and the report has both. All
else at the peak counts as activations.

At the first network every variant also runs without a cap, in --rounds interleaved rounds, for the time of a step and to
check that losses and norms of two steps are equal to the bit wherever M is equal: batch norm looks at one micro-batch, so
that M itself changes the numbers. With --few only the variants that matter are run, for larger scales.
"""

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "target" / "release" / "examples" / "amoeba_memory"
CELLS, SIZE = 18, 64
MIB = 1 << 20
ASKED = 3.9
# (M, schedule, re-materialization, whether it is among the few). The first is the plain one.
VARIANTS = [
    (1, "gpipe", "never", True),
    (8, "gpipe", "never", False),
    (8, "1f1b", "never", True),
    (16, "1f1b", "never", False),
    (32, "1f1b", "never", False),
    (8, "gpipe", "always", True),
    (16, "gpipe", "always", False),
    (32, "gpipe", "always", False),
    (8, "1f1b", "always", False),
    (1, "gpipe", "segments:6", False),
    (1, "gpipe", "segments:24", False),
    (8, "gpipe", "segments:6", True),
    (8, "gpipe", "segments:24", False),
    (32, "gpipe", "segments:6", False),
    (8, "1f1b", "segments:6", False),
    (8, "1f1b", "segments:24", True),
    (16, "1f1b", "segments:24", False),
    (32, "1f1b", "segments:24", False),
]


class Run:
    """One file of raw results: each line a try."""

    def __init__(self, path, samples):
        self.path, self.samples = path, samples
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    def note(self, line):
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
        return line

    def attempt(self, kind, variant, filters, cap=None):
        micro_batches, schedule, remat = variant
        command = [EXAMPLE, f"cells={CELLS}", f"filters={filters}", f"size={SIZE}", f"samples={self.samples}", "stages=1"]
        command += [f"micro_batches={micro_batches}", f"schedule={schedule}", f"remat={remat}"]
        command += [f"cap={cap}"] if cap else []
        done = subprocess.run(command, text=True, capture_output=True)
        if done.returncode:
            sys.exit(f"amoeba_memory: {' '.join(map(str, command[1:]))}: {done.stdout}{done.stderr}")
        result = json.loads(done.stdout)
        if cap and "refused" not in result and max(result["peak_bytes"]) > cap:
            sys.exit(f"amoeba_memory: D = {filters} held {max(result['peak_bytes'])} bytes under a cap of {cap}")
        return self.note({"kind": kind, "variant": variant, "cap": cap, **result})

    def largest(self, variant, cap, guess):
        """The largest D that fits: steps away from the guess that double, then bisection."""
        fits, refused, at, step = None, None, guess, 4
        while not (fits and refused) or refused - fits > 4:
            if "refused" in self.attempt("try", variant, at, cap):
                refused = at
            else:
                fits = at
            if not fits:
                if at == 4:
                    sys.exit(f"amoeba_memory: not even D = 4 fits {cap} bytes")
                at, step = max(4, refused - step), 2 * step
            elif not refused:
                at, step = fits + step, 2 * step
            else:
                at = (fits + refused) // 8 * 4
        return fits


def guess(result, cap):
    """D under `cap`, if parameters grow with D squared and activations with D."""
    filters = result["filters"]
    a, b = result["parameter_bytes"] / filters**2, result["activation_bytes"] / filters
    return max(4, int((-b + (b * b + 4 * a * cap) ** 0.5) / (2 * a)) // 4 * 4)


def name(variant):
    micro_batches, schedule, remat = variant
    return f"M = {micro_batches}, {schedule}, {remat}" if micro_batches > 1 else f"M = 1, {remat}"


def budget(plain, cap, samples):
    parameters, activations = plain["parameter_bytes"], plain["activation_bytes"]
    twelve = parameters - plain["gradient_bytes"]
    return (
        f"Budget, before the search: {samples} images of 3 x {SIZE} x {SIZE}; AmoebaNet-D({CELLS}, {plain['filters']}) has "
        f"{plain['parameters'] / 1e6:.2f} million parameters, and its plain step holds {parameters / 1e6:.1f} MB of parameters and "
        f"{activations / 1e6:.1f} MB of activations: {activations / parameters:.2f} times as many (the paper: 5.96; without the "
        f"gradients' accumulators, as the paper counts, {(parameters + activations - twelve) / twelve:.2f}). Cap: {cap} bytes ({cap // MIB} MiB)."
    )


def measure(of, arguments):
    variants = [variant[:3] for variant in VARIANTS if variant[3] or not arguments.few]
    run = Run(arguments.out / f"d{arguments.filters}-n{arguments.samples}.jsonl", arguments.samples)
    run.note({"kind": "of", "samples": arguments.samples, "filters": arguments.filters, **of})
    plain = run.attempt("first", variants[0], arguments.filters)
    cap = -(-max(plain["peak_bytes"]) // MIB) * MIB
    run.note({"kind": "cap", "cap": cap})
    print(budget(plain, cap, arguments.samples), flush=True)
    first = {}
    for _ in range(arguments.rounds):
        for variant in variants:
            first[variant] = run.attempt("equal", variant, arguments.filters)
    for variant in variants:
        filters = run.largest(variant, cap, guess(first[variant], cap))
        print(f"{name(variant)}: D = {filters}", flush=True)
    return run.path


def report(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    of = next(line for line in lines if line["kind"] == "of")
    plain = next(line for line in lines if line["kind"] == "first")
    cap = next(line["cap"] for line in lines if line["kind"] == "cap")
    equal, tries = {}, {}
    for line in lines:
        if line["kind"] in ("equal", "try"):
            by_variant = equal if line["kind"] == "equal" else tries
            by_variant.setdefault(tuple(line["variant"]), []).append(line)
    found = {}
    for variant, all_ in tries.items():
        fits = max((line for line in all_ if "refused" not in line), key=lambda line: line["filters"])
        refused = [line["filters"] for line in all_ if "refused" in line]
        if min(refused) != fits["filters"] + 4:
            sys.exit(f"amoeba_memory: {name(variant)}: {fits['filters']} fits, but {fits['filters'] + 4} was not refused")
        found[variant] = fits
    same = all(
        (line["loss"], line["grad_norm"]) == (other["loss"], other["grad_norm"])
        for variant, of_variant in equal.items()
        for line in of_variant
        for other_variant, of_other in equal.items()
        for other in of_other
        if variant[0] == other_variant[0]
    )
    base = found[tuple(plain["variant"])]
    text = [
        "# The largest AmoebaNet-D(18, D) under a cap",
        "",
        f"`python3 benchmarks/amoeba_memory.py --filters {of['filters']} --samples {of['samples']} --rounds {of['rounds']}"
        f"{' --few' if of['few'] else ''}`, {of['date']}, {of['cores']} cores ({of['cpu']}), commit {of['commit']}.",
        "",
        budget(plain, cap, of["samples"]),
        "",
        "Each D fits, and D + 4 was refused. MB are 10^6 bytes. Resident is the process's peak, less what was resident before the "
        "pipeline was built; what it has above parameters and activations is not seen by the allocator's cap. Steps are at "
        f"D = {of['filters']}, without the cap (median of {of['rounds']}), and at the D found (one, under it).",
        "",
        "| variant | D | parameters | ratio to plain | parameters, MB | activations, MB | resident, MB "
        f"| at D = {of['filters']}: activations, MB | step there, s | step at D, s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for variant, line in found.items():
        there = equal[variant]
        resident = line["resident_peak_bytes"] - line["resident_before_bytes"]
        seconds = statistics.median(other["step_ms"][-1] for other in there) / 1e3
        text.append(
            f"| {name(variant)}{' (plain)' if line is base else ''} | {line['filters']} | {line['parameters'] / 1e6:.2f}M "
            f"| **{line['parameters'] / base['parameters']:.2f}** | {line['parameter_bytes'] / 1e6:.1f} | {line['activation_bytes'] / 1e6:.1f} "
            f"| {resident / 1e6:.0f} | {there[0]['activation_bytes'] / 1e6:.1f} | {seconds:.2f} | {line['step_ms'][-1] / 1e3:.2f} |"
        )
    recomputing = [(line["parameters"] / base["parameters"], name(v)) for v, line in found.items() if v[2] != "never"]
    always = [(ratio, variant) for ratio, variant in recomputing if variant.endswith("always")]
    at_once, best = (max(of_all, key=lambda pair: pair[0]) for of_all in (always, recomputing))
    text += [
        "",
        f"With re-materialization of all at once (`always`): {at_once[0]:.2f} times the parameters ({at_once[1]}); in segments too: "
        f"**{best[0]:.2f}** ({best[1]}). Asked: at least {ASKED}: "
        f"{'yes' if at_once[0] >= ASKED else 'only in segments' if best[0] >= ASKED else 'NO'}.",
        f"No more than {cap / base['parameter_bytes']:.2f} is possible: that much is parameters alone.",
        f"Losses and gradient norms of two steps are the same to the last bit wherever M is the same: {'yes' if same else 'NO'}.",
        "",
    ]
    text = "\n".join(text)
    path.with_suffix(".md").write_text(text)
    print(text)
    if not same:
        sys.exit("amoeba_memory: re-materialization changed a loss or a norm")


def cpu():
    try:
        found = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
        return found[1] if found else platform.machine()
    except OSError:
        return platform.machine()


def commit():
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True, capture_output=True).stdout.strip()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--filters", type=int, default=100)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / f"{datetime.date.today()}-amoeba-memory")
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    if arguments.report:
        return report(arguments.report)
    build = ["cargo", "build", "--release", "--locked", "--package", "gpipe-models", "--example", "amoeba_memory"]
    subprocess.run(build, cwd=ROOT, check=True)
    of = {"date": str(datetime.date.today()), "cores": os.cpu_count(), "cpu": cpu(), "commit": commit()}
    of |= {"rounds": arguments.rounds, "few": arguments.few}
    report(measure(of, arguments))


if __name__ == "__main__":
    main()
