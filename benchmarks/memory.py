#!/usr/bin/env python3
"""The largest network that trains under a cap in bytes, with each way to save memory.
                                                                           (make bench-memory)

Usage: memory.py [--network amoeba|transformer] [--all-variants] [--rounds 1] [--out FOLDER]
       memory.py --network NETWORK --size SIZE --samples SAMPLES     (another scale: a partial run)
       memory.py --report FOLDER      (the report again, from its raw data)

After GPipe's table 1 (Huang et al. 2019): one 8 GB accelerator trains AmoebaNet-D(18, 208),
82 million parameters, plainly, and (18, 416), 318 million, with re-materialization: 3.9 times. One
of 16 GB trains a transformer of 3 and of 13 blocks, 282 and 786 million: 2.7 times. The same here
on a smaller scale. The plain step is measured first, of a network of `size` (filters, or blocks)
with a mini-batch of `samples`. The cap is what that step needs, rounded up to a MiB. The
transformer has the paper's shape with each length an eighth: 256 features, 4 heads, feed-forward
1024, vocabulary 4000, 128 tokens, 32 texts. 3 blocks are the paper's plain model.

Both sides train the same mini-batch by RMSProp with momentum, in float32, on one thread. Plain is
one stage, one micro-batch, nothing recomputed. A network fits if two steps in a process of its own
stay under the cap, which the allocator enforces. The largest is found by bisection (filters: over
multiples of 4); it fits, and the next was refused. Parameter bytes are weights, running statistics
of batch norms, RMSProp's two moments and the gradients' accumulators: 16 bytes a parameter. All
else at the peak counts as activations.

At the first size every variant also runs without a cap, in --rounds interleaved rounds, for the
time of a step and to check that losses and norms of two steps are equal to the bit wherever M is:
batch norm sees one micro-batch, so M itself changes the numbers. --all-variants also runs those
that are mostly of interest beside others.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import folders
import plots
from figures import commit, median, of_table, paragraph
from machine import here
from rounds import build, driver

MIB = 1 << 20
# (M, schedule, re-materialization, whether it always runs). The first is the plain one.
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
    # Of the first network and its mini-batch.
    size: int
    samples: int
    # Of Pipeline-1's parameters over Naive-1's: the paper's figure.
    target: float
    variants: list


NETWORKS = {
    "amoeba": Network(
        name="amoeba",
        title="AmoebaNet-D(18, D)",
        key="filters",
        letter="D",
        step=4,
        fixed={"cells": 18, "size": 64},
        sample="images of 3 x 64 x 64",
        size=68,
        samples=64,
        target=3.9,
        variants=AMOEBA,
    ),
    "transformer": Network(
        name="transformer",
        title="transformer of L blocks",
        key="blocks",
        letter="L",
        step=1,
        fixed={},
        sample="texts of 128 tokens",
        size=3,
        samples=32,
        target=2.7,
        variants=TRANSFORMER,
    ),
}


class Run:
    """One file of raw results: each line a try."""

    def __init__(self, path, network, samples):
        self.path, self.network, self.samples = path, network, samples
        self.path.write_text("")

    def note(self, line):
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
        return line

    def attempt(self, kind, variant, size, cap=None):
        micro_batches, schedule, remat = variant
        network = self.network
        fixed = [f"{key}={value}" for key, value in network.fixed.items()]
        command = [driver("memory"), f"network={network.name}", *fixed, f"{network.key}={size}"]
        command += [f"samples={self.samples}", "stages=1", f"micro_batches={micro_batches}"]
        command += [f"schedule={schedule}", f"remat={remat}"]
        command += [f"cap={cap}"] if cap else []
        done = subprocess.run(command, text=True, capture_output=True)
        if done.returncode:
            sys.exit(f"memory: {' '.join(map(str, command[1:]))}: {done.stdout}{done.stderr}")
        result = json.loads(done.stdout)
        if cap and "refused" not in result and max(result["peak_bytes"]) > cap:
            held = f"{network.letter} = {size} held {max(result['peak_bytes'])} bytes"
            sys.exit(f"memory: {held} under a cap of {cap}")
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
    """The size that fits, if parameters grow with the square of the filters and activations with
    the filters, or both with the blocks."""
    size = result["size"]
    if network.key == "blocks":
        return max(1, size * cap // max(result["peak_bytes"]))
    a, b = result["parameter_bytes"] / size**2, result["activation_bytes"] / size
    return max(4, int((-b + (b * b + 4 * a * cap) ** 0.5) / (2 * a)) // 4 * 4)


def name(variant):
    micro_batches, schedule, remat = variant
    return f"M = {micro_batches}, {schedule}, {remat}"


def measure(network, size, samples, rounds, all_variants, path):
    """Searches, and leaves the raw results in `path`."""
    variants = [variant[:3] for variant in network.variants if variant[3] or all_variants]
    run = Run(path, network, samples)
    of = {"kind": "of", "network": network.name, "samples": samples, "size": size, "rounds": rounds}
    run.note({**of, "few": not all_variants, "machine": here().title(), "commit": commit()})
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

    @property
    def plainly(self):
        return tuple(self.plain["variant"])

    def ratio(self, variant):
        """The parameters of the largest network over those of the largest plain one."""
        return self.largest[variant]["parameters"] / self.largest[self.plainly]["parameters"]

    def best_always(self):
        """The variant of the largest network of those that recompute everything at once."""
        return max((one for one in self.largest if one[2] == "always"), key=self.ratio)


def read(folder):
    lines = [json.loads(line) for line in (folder / "raw.jsonl").read_text().splitlines()]
    of = next(line for line in lines if line["kind"] == "of")
    plain = next(line for line in lines if line["kind"] == "first")
    cap = next(line["cap"] for line in lines if line["kind"] == "cap")
    network, equal, tries = NETWORKS[of["network"]], {}, {}
    for line in lines:
        if line["kind"] in ("equal", "try"):
            by_variant = equal if line["kind"] == "equal" else tries
            by_variant.setdefault(tuple(line["variant"]), []).append(line)
    largest = {variant: closed(network, variant, all_) for variant, all_ in tries.items()}
    by_m = {}
    for variant, runs in equal.items():
        found = [(line["loss"], line["grad_norm"]) for line in runs]
        by_m.setdefault(variant[0], []).extend(found)
    same = all(one == found[0] for found in by_m.values() for one in found)
    return Found(network, of, plain, cap, equal, largest, same)


def closed(network, variant, tries):
    """The try of the largest size that fits. The next one must have been refused."""
    fits = max((line for line in tries if "refused" not in line), key=lambda line: line["size"])
    refused = min(line["size"] for line in tries if "refused" in line)
    if refused != fits["size"] + network.step:
        sys.exit(f"memory: {name(variant)}: {fits['size']} fits, and {refused} was refused: why?")
    return fits


def budget(network, plain, cap, samples):
    parameters, activations = plain["parameter_bytes"], plain["activation_bytes"]
    return (
        f"Before the search, {samples} {network.sample}: the {network.title} with {network.letter}"
        f" = {plain['size']} has {plain['parameters'] / 1e6:.2f} million parameters. Its plain step"
        f" holds {parameters / 1e6:.1f} MB of parameters and {activations / 1e6:.1f} MB of"
        f" activations. The cap is {cap // MIB} MiB."
    )


def rows(found):
    """variant -> cells that the report and RESULTS.md share."""
    by_variant = {}
    for variant, line in found.largest.items():
        target = found.network.target if variant == found.best_always() else ""
        verdict = ""
        if target:
            verdict = "target met" if found.ratio(variant) >= target else "**below target**"
        plain = " (plain)" if variant == found.plainly else ""
        size = f"{found.network.letter} = {line['size']}"
        millions = f"{line['parameters'] / 1e6:.2f}"
        ratio = f"{found.ratio(variant):.2f}"
        by_variant[variant] = [f"`{name(variant)}`{plain}", size, millions, ratio, target, verdict]
    return by_variant


HEADER = ["variant", "largest", "parameters, millions", "over plain", "target", "verdict"]


def table(found):
    of, shown = found.of, []
    for variant, cells in rows(found).items():
        line, first = found.largest[variant], found.equal[variant]
        resident = line["resident_peak_bytes"] - line["resident_before_bytes"]
        there = median([one["step_ms"][-1] for one in first])
        shown.append(
            [
                *cells,
                f"{line['parameter_bytes'] / 1e6:.1f}",
                f"{line['activation_bytes'] / 1e6:.1f}",
                f"{resident / 1e6:.0f}",
                f"{line['step_ms'][-1] / 1e3:.2f}",
                f"{first[0]['activation_bytes'] / 1e6:.1f}",
                f"{there / 1e3:.2f}",
            ]
        )
    first = f"at {found.network.letter} = {of['size']}:"
    bytes_ = ["parameters, MB", "activations, MB", "resident, MB", "step, s"]
    return of_table([*HEADER, *bytes_, f"{first} activations, MB", f"{first} step, s"], shown)


def draw(folder):
    """Draws the report's picture."""
    plots.memory(plots.library(), read(folder), folder / "largest.svg")


def report(folder):
    """The text of the report."""
    found = read(folder)
    network, of = found.network, found.of
    most = found.cap / found.largest[found.plainly]["parameter_bytes"]
    lines = [
        *folders.heading(f"The largest {network.title} under a cap", folder),
        *paragraph(budget(network, found.plain, found.cap, of["samples"])),
        "",
        *paragraph(
            f"Each size fits, and the next ({network.letter} + {network.step}) was refused. MB are"
            " 10^6 bytes. Resident is the process's peak, less what was resident before the"
            " pipeline was built. What it has above parameters and activations is not seen by the"
            f" allocator's cap. Steps at {network.letter} = {of['size']} are without the cap, the"
            f" median of {of['rounds']}. The step at the largest size is one, under the cap."
            " `segments:N` recomputes a stage in N parts. The target is the paper's ratio, of"
            " the best variant that recomputes everything at once (`always`)."
        ),
        "",
        "![the largest network](largest.svg)",
        "",
        *table(found),
        "",
        *paragraph(
            "The cap is what the plain step needs, so the ratio falls as kernels let that step keep"
            f" less. More than {most:.2f} times the parameters is not possible: that is the whole"
            " cap. Losses and gradient norms of two steps are the same to the last bit wherever M"
            f" is the same: {'yes' if found.same else 'NO'}."
        ),
    ]
    return "\n".join(lines) + "\n"


def summary(parts):
    """The section of RESULTS.md. Rows of all networks are in one table."""
    shown = []
    for folder in parts.values():
        found = read(folder)
        cap = f"{found.cap // MIB}"
        shown += [[found.network.title, cap, *cells] for cells in rows(found).values()]
    text = (
        "The largest network whose training step stays under a cap in bytes, on one device. The cap"
        " is what a plain step (one micro-batch, nothing recomputed) of a small network needs. A"
        " variant is the number of micro-batches, the schedule and what is recomputed. The"
        " target is the ratio of the GPipe paper, of the best variant that recomputes everything."
        " AmoebaNet's plain step saves few activations, so re-materialization has less to gain."
    )
    return [*paragraph(text), "", *of_table(["network", "cap, MiB", *HEADER], shown), ""]


def run_part(
    network, size=None, samples=None, rounds=1, all_variants=False, out=None, partial=None
):
    """Measures a network, and publishes its part."""
    size, samples = size or network.size, samples or network.samples
    partial = folders.reasons(
        (partial, partial),
        (size != network.size, f"--size {size}, not {network.size}"),
        (samples != network.samples, f"--samples {samples}, not {network.samples}"),
        (not all_variants, "without --all-variants: fewer variants"),
    )
    with folders.run(f"memory-{network.name}", report, partial, out) as folder:
        measure(network, size, samples, rounds, all_variants, folder / "raw.jsonl")
        if not read(folder).same:
            sys.exit("memory: re-materialization changed a loss or a norm")
        draw(folder)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--network", choices=NETWORKS, default="amoeba")
    parser.add_argument("--size", type=int, help="filters, or blocks")
    parser.add_argument("--samples", type=int, help="images, or texts")
    parser.add_argument("--all-variants", action="store_true")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.report:
        draw(options.report)
        return folders.rewrite(options.report, report)
    build("memory")
    run_part(
        NETWORKS[options.network],
        options.size,
        options.samples,
        options.rounds,
        options.all_variants,
        options.out,
    )


if __name__ == "__main__":
    main()
