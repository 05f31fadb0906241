#!/usr/bin/env python3
"""The largest network that trains under a cap in bytes: plain, and with micro-batches and re-materialization. (make bench-memory)

Usage: memory.py [--network amoeba|transformer] [--size 100] [--samples 128] [--few] [--rounds 2] [--out FOLDER]
       memory.py --report FILE.jsonl      (the report again, from its raw data)

After GPipe's table 1 (Huang et al. 2019): one 8 GB accelerator trains AmoebaNet-D(18, 208), 82 million parameters, plainly, and
(18, 416), 318 million, with re-materialization: 3.9 times; one of 16 GB a transformer of 3 and of 13 blocks, 282 and 786
million: 2.7 times. The same here on a smaller scale: --size (filters, or blocks) and --samples say at which network and
mini-batch the plain step is measured first; the cap is what that step needs, rounded up to a MiB, and is said before any
search. The transformer has the paper's shape with each length an eighth: 256 features, 4 heads, feed-forward 1024, vocabulary
4000, 128 tokens, 32 texts; 3 blocks are the paper's plain model. In the paper's plain AmoebaNet the activations take 6.0 times
the bytes of the parameters.

Both sides train the same mini-batch by RMSProp with momentum, in float32, on one thread. Plain is one stage, one micro-batch,
nothing discarded. A network fits if two steps in a process of its own stay under the cap, which the allocator enforces: an
allocation over it is refused, and the step fails. The largest is found by bisection (filters: over multiples of 4); it fits, and
the next was refused. Parameter bytes are weights, batch norm's running statistics, RMSProp's two moments and the gradients'
accumulators: 16 bytes a parameter; the paper counts 12, which is without accumulators, and the report has both. All
else at the peak counts as activations.

At the first network every variant also runs without a cap, in --rounds interleaved rounds, for the time of a step and to
check that losses and norms of two steps are equal to the bit wherever M is equal: batch norm looks at one micro-batch, so
that M itself changes the numbers. With --few only the variants that matter are run, for larger scales.
"""

import argparse
import dataclasses
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

from figures import ROOT, commit, cpu, median, of_table
from rounds import build, example

MIB = 1 << 20
# (M, schedule, re-materialization, whether it is among the few). The first is the plain one.
AMOEBA = [
    (1, "gpipe", "never", True),
    (8, "gpipe", "never", False),
    (8, "1f1b", "never", True),
    (16, "1f1b", "never", False),
    (32, "1f1b", "never", False),
    (8, "gpipe", "selective", True),
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
TRANSFORMER = [
    (1, "gpipe", "never", True),
    (8, "1f1b", "never", True),
    (32, "1f1b", "never", False),
    (1, "gpipe", "always", False),
    (8, "gpipe", "selective", True),
    (8, "gpipe", "always", True),
    (32, "gpipe", "always", True),
    (8, "gpipe", "segments:4", False),
    (8, "1f1b", "segments:4", True),
    (32, "1f1b", "segments:4", False),
]


@dataclasses.dataclass(frozen=True)
class Network:
    """What is made larger."""
    name: str
    title: str
    # The setting that is varied, how it is written, and by how much two tries differ at least.
    key: str
    letter: str
    step: int
    fixed: dict
    sample: str
    # Of Pipeline-1's parameters over Naive-1's: the paper's figure.
    asked: float
    variants: list


NETWORKS = {
    "amoeba": Network("amoeba", "AmoebaNet-D(18, D)", "filters", "D", 4, {"cells": 18, "size": 64}, "images of 3 x 64 x 64", 3.9, AMOEBA),
    "transformer": Network("transformer", "transformer of L blocks", "blocks", "L", 1, {}, "texts of 128 tokens", 2.7, TRANSFORMER),
}


class Run:
    """One file of raw results: each line a try."""

    def __init__(self, path, network, samples):
        self.path, self.network, self.samples = path, network, samples
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("")

    def note(self, line):
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
        return line

    def attempt(self, kind, variant, size, cap=None):
        micro_batches, schedule, remat = variant
        network = self.network
        fixed = [f"{key}={value}" for key, value in network.fixed.items()]
        command = [example("memory"), f"network={network.name}", *fixed, f"{network.key}={size}", f"samples={self.samples}", "stages=1"]
        command += [f"micro_batches={micro_batches}", f"schedule={schedule}", f"remat={remat}"]
        command += [f"cap={cap}"] if cap else []
        done = subprocess.run(command, text=True, capture_output=True)
        if done.returncode:
            sys.exit(f"memory: {' '.join(map(str, command[1:]))}: {done.stdout}{done.stderr}")
        result = json.loads(done.stdout)
        if cap and "refused" not in result and max(result["peak_bytes"]) > cap:
            sys.exit(f"memory: {network.letter} = {size} held {max(result['peak_bytes'])} bytes under a cap of {cap}")
        return self.note({"kind": kind, "variant": variant, "cap": cap, **result})

    def largest(self, variant, cap, guess):
        tries = search(guess, self.network.step)
        at = next(tries)
        try:
            while True:
                at = tries.send("refused" not in self.attempt("try", variant, at, cap))
        except StopIteration as end:
            if end.value is None:
                sys.exit(f"memory: not even {self.network.letter} = {at} fits {cap} bytes")
            return end.value


def search(guess, least):
    """Yields sizes to try, and is sent whether each fits. Returns the largest that does, or None.
    Steps away from the guess double until both are known; then bisection ends at `least`."""
    fits, refused, at, step = None, None, guess, least
    while not (fits and refused) or refused - fits > least:
        if (yield at):
            fits = at
        else:
            refused = at
        if not fits:
            if at == least:
                return None
            at, step = max(least, refused - step), 2 * step
        elif not refused:
            at, step = fits + step, 2 * step
        else:
            at = (fits + refused) // (2 * least) * least
    return fits


def guess(network, result, cap):
    """The size that fits, if parameters grow with the filters' square and activations with the filters, or both with the blocks."""
    size = result["size"]
    if network.key == "blocks":
        return max(1, size * cap // max(result["peak_bytes"]))
    a, b = result["parameter_bytes"] / size**2, result["activation_bytes"] / size
    return max(4, int((-b + (b * b + 4 * a * cap) ** 0.5) / (2 * a)) // 4 * 4)


def name(variant):
    micro_batches, schedule, remat = variant
    return f"M = {micro_batches}, {schedule}, {remat}" if micro_batches > 1 else f"M = 1, {remat}"


def budget(network, plain, cap, samples):
    parameters, activations = plain["parameter_bytes"], plain["activation_bytes"]
    twelve = parameters - plain["gradient_bytes"]
    return (
        f"Budget, before the search: {samples} {network.sample}; the {network.title} with {network.letter} = {plain['size']} has "
        f"{plain['parameters'] / 1e6:.2f} million parameters, and its plain step holds {parameters / 1e6:.1f} MB of parameters and "
        f"{activations / 1e6:.1f} MB of activations: {activations / parameters:.2f} times as many (without the "
        f"gradients' accumulators, as the paper counts, {(parameters + activations - twelve) / twelve:.2f}). Cap: {cap} bytes ({cap // MIB} MiB)."
    )


def measure(network, size, samples, rounds, few, path):
    """Searches, and leaves the raw results in `path`."""
    variants = [variant[:3] for variant in network.variants if variant[3] or not few]
    run = Run(path, network, samples)
    run.note({"kind": "of", "network": network.name, "samples": samples, "size": size, "rounds": rounds, "few": few,
              "date": str(datetime.date.today()), "cores": os.cpu_count(), "cpu": cpu(), "commit": commit()})
    plain = run.attempt("first", variants[0], size)
    cap = -(-max(plain["peak_bytes"]) // MIB) * MIB
    run.note({"kind": "cap", "cap": cap})
    print(budget(network, plain, cap, samples), file=sys.stderr, flush=True)
    first = {}
    for _ in range(rounds):
        for variant in variants:
            first[variant] = run.attempt("equal", variant, size)
    for variant in variants:
        largest = run.largest(variant, cap, guess(network, first[variant], cap))
        print(f"{name(variant)}: {network.letter} = {largest}", file=sys.stderr, flush=True)
    return path


@dataclasses.dataclass(frozen=True)
class Found:
    """What a file of raw results says."""
    network: Network
    of: dict
    plain: dict
    cap: int
    # Variant -> runs without the cap; and the largest that fits.
    equal: dict
    largest: dict
    # Whether losses and norms are the same to the bit wherever M is.
    same: bool

    def ratio(self, variant):
        return self.largest[variant]["parameters"] / self.largest[tuple(self.plain["variant"])]["parameters"]

    def recomputing(self):
        """The best of `always`, and of all that recompute: (ratio, variant)."""
        of = [(self.ratio(variant), variant) for variant in self.largest if variant[2] != "never"]
        return max(pair for pair in of if pair[1][2] == "always"), max(of)


def read(path):
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    of = next(line for line in lines if line["kind"] == "of")
    plain = next(line for line in lines if line["kind"] == "first")
    cap = next(line["cap"] for line in lines if line["kind"] == "cap")
    network, equal, tries = NETWORKS[of["network"]], {}, {}
    for line in lines:
        if line["kind"] in ("equal", "try"):
            by_variant = equal if line["kind"] == "equal" else tries
            by_variant.setdefault(tuple(line["variant"]), []).append(line)
    largest = {}
    for variant, all_ in tries.items():
        fits = max((line for line in all_ if "refused" not in line), key=lambda line: line["size"])
        refused = min(line["size"] for line in all_ if "refused" in line)
        if refused != fits["size"] + network.step:
            sys.exit(f"memory: {name(variant)}: {fits['size']} fits, but {fits['size'] + network.step} was not refused")
        largest[variant] = fits
    by_m = {}
    for variant, runs in equal.items():
        by_m.setdefault(variant[0], []).extend((line["loss"], line["grad_norm"]) for line in runs)
    same = all(one == found[0] for found in by_m.values() for one in found)
    return Found(network, of, plain, cap, equal, largest, same)


def section(found):
    """Lines for a report."""
    network, of = found.network, found.of
    header = ["variant", network.letter, "parameters", "ratio to plain", "parameters, MB", "activations, MB", "resident, MB",
              f"at {network.letter} = {of['size']}: activations, MB", "step there, s", f"step at {network.letter}, s"]
    rows = []
    for variant, line in found.largest.items():
        there = found.equal[variant]
        resident = line["resident_peak_bytes"] - line["resident_before_bytes"]
        plain = " (plain)" if variant == tuple(found.plain["variant"]) else ""
        rows.append([
            name(variant) + plain, line["size"], f"{line['parameters'] / 1e6:.2f}M", f"**{found.ratio(variant):.2f}**",
            f"{line['parameter_bytes'] / 1e6:.1f}", f"{line['activation_bytes'] / 1e6:.1f}", f"{resident / 1e6:.0f}",
            f"{there[0]['activation_bytes'] / 1e6:.1f}", f"{median([one['step_ms'][-1] for one in there]) / 1e3:.2f}",
            f"{line['step_ms'][-1] / 1e3:.2f}"])
    at_once, best = found.recomputing()
    kept = "yes" if at_once[0] >= network.asked else "only in segments" if best[0] >= network.asked else "NO"
    most = found.cap / found.largest[tuple(found.plain["variant"])]["parameter_bytes"]
    return [
        budget(network, found.plain, found.cap, of["samples"]), "",
        f"Each {network.letter} fits, and {network.letter} + {network.step} was refused. MB are 10^6 bytes. Resident is the process's peak, "
        "less what was resident before the pipeline was built; what it has above parameters and activations is not seen by the allocator's "
        f"cap. Steps are at {network.letter} = {of['size']}, without the cap (median of {of['rounds']}), and at the {network.letter} found "
        "(one, under it).", "",
        *of_table(header, rows), "",
        f"With re-materialization of all at once (`always`): {at_once[0]:.2f} times the parameters ({name(at_once[1])}); in segments too: "
        f"**{best[0]:.2f}** ({name(best[1])}). Asked: at least {network.asked}: {kept}.",
        f"No more than {most:.2f} is possible: that much is parameters alone.",
        f"Losses and gradient norms of two steps are the same to the last bit wherever M is the same: {'yes' if found.same else 'NO'}.",
    ]


def report(path):
    found = read(path)
    of = found.of
    text = [
        f"# The largest {found.network.title} under a cap", "",
        f"`python3 benchmarks/memory.py --network {of['network']} --size {of['size']} --samples {of['samples']} --rounds {of['rounds']}"
        f"{' --few' if of['few'] else ''}`, {of['date']}, {of['cores']} cores ({of['cpu']}), commit {of['commit']}.", "",
        *section(found), ""]
    text = "\n".join(text)
    path.with_suffix(".md").write_text(text)
    print(text)
    if not found.same:
        sys.exit("memory: re-materialization changed a loss or a norm")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", choices=NETWORKS, default="amoeba")
    parser.add_argument("--size", type=int, help="filters (100), or blocks (3)")
    parser.add_argument("--samples", type=int, help="128 images, or 32 texts")
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    if options.report:
        return report(options.report)
    build("memory")
    network = NETWORKS[options.network]
    size, samples = (100, 128) if options.network == "amoeba" else (3, 32)
    size, samples = options.size or size, options.samples or samples
    out = options.out or ROOT / "benchmarks" / f"{datetime.date.today()}-{options.network}-memory"
    path = out / f"{network.letter.lower()}{size}-n{samples}.jsonl"
    report(measure(network, size, samples, options.rounds, options.few, path))


if __name__ == "__main__":
    main()
