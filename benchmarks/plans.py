#!/usr/bin/env python3
"""What `gpipe plan` chooses, beside every other way to run the same network.  (make bench-plans)

Usage: plans.py [--workload gpt|amoeba|llama|words] [--rounds 3] [--profiled] [--out FOLDER]
       plans.py --report FOLDER      (the report again, from its raw data)

Two profiles are measured first: of two stages with a thread each, and of one stage with two. From
them `gpipe plan --schedule auto` chooses among all numbers of stages, replicas, threads, and
micro-batches, all schedules, orders made for the costs, and re-materialization. It also predicts
each of the other ways: every named schedule on two stages with its best cut, an order made for
them, one stage with two threads, and two replicas with a thread each. M of a pipeline is 8, and of
AmoebaNet's also 4, because few micro-batches make it faster.

Then each of them is trained for a few steps, a process each. What a user would take instead runs
beside them: PyTorch on two threads with the whole mini-batch, eager and compiled, and the schedules
that torch.distributed.pipelining has, too, in two processes of a thread each. After this round of
all, the chosen way, the fastest others and the fastest peers run in more rounds, whose order
rotates. They alone are compared with the chosen way, without the round by which they were found.
The first two steps of a run do not count. Ratios are paired within a round.

The workloads: `gpt` (configs/gpt.toml), AmoebaNet-D(6, 128) on images of 64 x 64, `llama`
(configs/llama-small.toml), and `words`, a transformer with 16,000 words, width 384, 256 positions,
6 blocks, and mini-batches of 16 samples. The peer of `llama` is the model of transformers, which
has no stages.
"""

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from pathlib import Path

import amoeba
import folders
import gpt
import rounds
from figures import ROOT, between, commit, median, of_table, paragraph, with_interval, with_range
from machine import here
from prediction import LETTERS, canary, gpipe

sys.path.insert(0, str(ROOT / "scripts"))
import packages  # noqa: E402

# Rounds after the first, and how many other ways run in them.
ROUNDS, LEADERS = 3, 3
WARM_UP = 2
NAMED = [
    "gpipe",
    "1f1b",
    "zb-h1",
    "zb-v",
    "v-half",
    "v-min",
    "interleaved:2",
    "interleaved-zb:2",
    "breadth-first:2",
]
# Ours -> the peer's name of the same schedule.
PEERS = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved:2": "interleaved",
    "interleaved-zb:2": "interleaved-zb",
    "breadth-first:2": "breadth-first",
    "zb-v": "zbv",
}
# Where the images to validate on are, after the last step.
VALIDATION = ROOT / "data" / "letters" / "validation"
AUTO = "auto"
EAGER, COMPILED = "PyTorch, 2 threads", "PyTorch compiled, 2 threads"
# How much faster than the chosen one another way may be.
NEAR = 0.97
WORDS = {"vocabulary": 16000, "features": 384, "heads": 6, "hidden": 1536, "blocks": 6}
POSITIONS, SAMPLES = 256, 16
OF_WORDS = [f"model.{key}={value}" for key, value in WORDS.items()]
WHAT = (
    "`auto` is what `gpipe plan --schedule auto` chose for two cores. The others are every named"
    " schedule and a made order on two stages, one stage on two threads, and two replicas. Ratios"
    " are the other's step over the step of `auto`, paired within a round: below 1 the other was"
    " faster. The target is 0.97 or more for the fastest of them."
)


@dataclasses.dataclass(frozen=True)
class Own:
    """A workload: its configuration with changes, the steps of a run, and those of a profile."""

    config: str
    changes: list
    steps: int
    profiled: int
    micro_batches: list
    # M of the two profiles: with one stage, few micro-batches are enough.
    profiled_sizes: tuple
    # What the peers run, and what writes their starting point.
    peer: rounds.Workload = None
    sizes: dict = dataclasses.field(default_factory=dict)


FEW = ("4,8", "1,2")
LLAMA = rounds.Workload("llama", {}, 0, lambda found: found["step_ms"])
WORKLOADS = {
    "gpt": Own("configs/gpt.toml", [], 4, 1, [8], FEW, gpt.WORKLOAD),
    "amoeba": Own(
        "configs/amoebanet-letters.toml", LETTERS, 9, 3, [4, 8], ("1,2,4,8", "1,2"), amoeba.WORKLOAD
    ),
    "llama": Own("configs/llama-small.toml", [], 5, 1, [8], FEW, LLAMA),
    "words": Own(
        "configs/gpt.toml",
        [*OF_WORDS, f"data.sequence={POSITIONS}", f"train.mini_batch={SAMPLES}"],
        5,
        1,
        [8],
        FEW,
        gpt.WORKLOAD,
        {**WORDS, "length": POSITIONS, "samples": SAMPLES},
    ),
}


def common(own):
    return [own.config, *(f"--set={change}" for change in own.changes)]


def profile(own):
    """Measures both profiles, into the files that `gpipe plan` looks for."""
    ways = [["--stages", 2], ["--stages", 1, "--threads-per-stage", 2]]
    for way, sizes in zip(ways, own.profiled_sizes, strict=True):
        flags = ["--micro-batches", sizes, "--steps", own.profiled]
        gpipe(rounds.GPIPE, "profile", *common(own), *way, *flags)


def planned(own, folder):
    """name -> a plan's file, of `auto` and of all other ways; and what was printed of `auto`."""
    plans = {}

    def plan(name, *choices):
        plans[name] = folder / f"{len(plans)}.plan.json"
        return gpipe(
            rounds.GPIPE, "plan", *common(own), "--devices", 2, *choices, "--out", plans[name]
        )

    said = plan(AUTO, "--schedule", "auto")
    for m in own.micro_batches:
        for schedule in [*NAMED, "auto"]:
            name = "made" if schedule == "auto" else schedule
            flags = ["--stages", 2, "--micro-batches", m, "--remat", "never"]
            plan(f"{name} M={m}", *flags, "--schedule", schedule)
    return plans, said


def few_images(folder):
    """An image of each class to validate on: all of them take longer than the steps."""
    few = folder / "few"
    for of_class in sorted(VALIDATION.iterdir()) if not few.exists() else []:
        (few / of_class.name).mkdir(parents=True)
        shutil.copy(min(of_class.iterdir()), few / of_class.name)
    return few


def trained(own, flags, folder):
    """The steps of a run after the first, its peaks, and what was predicted of it."""
    out = folder / "run"
    before = canary()
    quiet = ["--checkpoint-every", "none", "--set=train.validation_tokens=128"]
    if own.peer is amoeba.WORKLOAD:
        quiet += [f"--set=data.validation={few_images(folder)}"]
    steps = ["--steps", own.steps]
    gpipe(rounds.GPIPE, "train", *common(own), *quiet, *steps, *flags, "--out", out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["kind"] == "step"][WARM_UP:]
    shutil.rmtree(out)
    peaks = [[device["peak_bytes"] for device in line["stages"]] for line in lines]
    return {
        "step_ms": [line["step_ms"] for line in lines],
        "peaks": [max(own) for own in zip(*peaks, strict=True)],
        "canary_s": [before, canary()],
    }


def by_hand():
    """name -> flags, of what `gpipe plan` does not write a plan of."""
    one = ["--stages", 1, "--remat", "never", "--schedule", "gpipe"]
    ways = {"1 stage, 2 threads": ["--threads-per-stage", 2], "2 replicas": ["--replicas", 2]}
    return {
        f"{name} M={m}": [*one, *flags, "--micro-batches", m]
        for name, flags in ways.items()
        for m in [1, 4]
    }


def plain_jobs(own):
    """name -> job, of PyTorch without stages."""
    program, settings = "plain", {"micro_batches": 1, "threads": 2}
    if own.peer is LLAMA:
        program = "llama"
    if own.peer is amoeba.WORKLOAD:
        settings["channels_last"] = True
    return {
        EAGER: rounds.peer(program, **settings),
        COMPILED: rounds.peer(program, compile=True, **settings),
    }


def pipelined_jobs(own, plans):
    """name -> job, with M = 8. Where no good cut is known of a peer, it has ours."""
    jobs = {}
    for schedule, theirs in PEERS.items() if own.peer is not LLAMA else []:
        settings = {"schedule": theirs}
        balance = json.loads(plans[f"{schedule} M=8"].read_text())["plan"]["balance"]
        if own.sizes:
            ends = [sum(balance[:stage]) for stage in range(1, len(balance))]
            settings["cut"] = ",".join(map(str, ends))
        if own.peer is amoeba.WORKLOAD:
            settings["channels_last"] = True
        jobs[f"peer {schedule}"] = rounds.peer("pipelining", **settings)
    return jobs


def measure(own, options, folder, scratch, python):
    if not options.profiled:
        profile(own)
    plans, said = planned(own, scratch)
    files = {name: json.loads(path.read_text()) for name, path in plans.items()}
    raw = {
        "workload": options.workload,
        "machine": here().title(),
        "commit": commit(),
        "said": said,
        "plans": {
            name: {key: of[key] for key in ["plan", "predicted", "deployment"] if key in of}
            for name, of in files.items()
        },
        "rounds": [],
    }
    jobs = {name: ["--plan", path] for name, path in plans.items()} | by_hand()
    peers = plain_jobs(own) | pipelined_jobs(own, plans)
    workload = dataclasses.replace(own.peer, peer_steps=own.steps)
    runner = rounds.Runner(workload, scratch, python)
    if own.peer is not LLAMA:
        runner.run(rounds.gpipe(stages=1, steps=1, folder=scratch, **own.sizes))
    names = [*jobs, *peers]
    for number in range(1 + options.rounds):
        found, shift = {}, number % len(names)
        for name in names[shift:] + names[:shift]:
            if name in peers:
                steps = runner.run(peers[name])["step_ms"]
                found[name] = {"step_ms": steps[WARM_UP:]}
            else:
                found[name] = trained(own, jobs[name], scratch)
        raw["rounds"].append(found)
        (folder / "raw.json").write_text(json.dumps(raw) + "\n")
        print(f"round {number + 1} done", file=sys.stderr, flush=True)
        if number == 0:
            names = [AUTO, *fastest(raw), *fastest_peers(raw)]


def read(folder):
    return json.loads((folder / "raw.json").read_text())


def steps_of(raw, name):
    """The median step of each round that it was in, in ms."""
    return [median(found[name]["step_ms"]) for found in raw["rounds"] if name in found]


def over(raw, name, base):
    """A way's step over that of `base`, in each round that both were in."""
    pairs = [(own[name], own[base]) for own in raw["rounds"] if name in own and base in own]
    return [median(one["step_ms"]) / median(other["step_ms"]) for one, other in pairs]


def fastest(raw):
    """The other ways that were the fastest in the first round."""
    first = raw["rounds"][0]
    names = [name for name in first if name != AUTO and not is_peer(name)]
    return sorted(names, key=lambda name: median(first[name]["step_ms"]))[:LEADERS]


def is_peer(name):
    return name in (EAGER, COMPILED) or name.startswith("peer ")


def fastest_peers(raw):
    """PyTorch without stages, and the schedule of PyTorch that was the fastest in the first
    round."""
    first = raw["rounds"][0]
    pipelined = [name for name in first if name.startswith("peer ")]
    pipelined.sort(key=lambda name: median(first[name]["step_ms"]))
    return [*(name for name in [EAGER, COMPILED] if name in first), *pipelined[:1]]


def leaders(raw):
    """The ways that ran after the first round, and their steps over the chosen one's, the lowest
    first."""
    later = {"rounds": raw["rounds"][1:]}
    ratios = {name: over(later, name, AUTO) for name in fastest(raw)}
    return dict(sorted(ratios.items(), key=lambda one: median(one[1])))


def chosen(raw):
    """What `auto` is, in words."""
    own = raw["plans"][AUTO]
    plan, deployment = own["plan"], own.get("deployment", {"replicas": 1, "threads": 1})
    schedule = plan["schedule"].split(":")[0] if " | " in plan["schedule"] else plan["schedule"]
    parts = [f"stages {len(plan['balance'])}", f"M {plan['micro_batches']}", schedule]
    for key, value in deployment.items():
        if value > 1:
            parts.insert(1, f"{key} {value}")
    return ", ".join(parts)


def leaders_table(raw):
    rows = []
    for name, ratios in {AUTO: [1.0], **leaders(raw)}.items():
        rows.append([name, *with_range(steps_of(raw, name)), *with_interval(ratios)])
    header = ["way", "step, ms", "least .. most", "step over that of `auto`", "interval"]
    return of_table(header, rows)


def instead(raw):
    """The peers that a user would take instead, and their steps over the chosen one's."""
    later = {"rounds": raw["rounds"][1:]}
    return {name: over(later, name, AUTO) for name in fastest_peers(raw) if over(later, name, AUTO)}


def named(peer):
    """A peer's name for readers."""
    pipelined = peer.removeprefix("peer ")
    return peer if pipelined == peer else f"PyTorch's pipeline, `{pipelined}`"


def instead_table(raw):
    rows = [
        [named(name), *with_range(steps_of(raw, name)), *with_interval(ratios, 2)]
        for name, ratios in instead(raw).items()
    ]
    header = ["peer", "step, ms", "least .. most", "step over that of `auto`", "interval"]
    return of_table(header, rows)


def ways_table(raw):
    """The first round: of all ways."""
    first, rows = raw["rounds"][0], []
    for name in sorted(first, key=lambda name: median(first[name]["step_ms"])):
        if is_peer(name):
            continue
        step, told = median(first[name]["step_ms"]), raw["plans"].get(name)
        cells = ["", "", ""]
        if told:
            predicted = told["predicted"]["step"] / 1e6
            held = max(first[name]["peaks"]) / max(told["predicted"]["peaks"])
            cells = [f"{predicted:.0f}", f"{predicted / step:.3f}", f"{held:.3f}"]
        rows.append([name, f"{step:.0f}", *cells])
    header = ["way", "step, ms", "predicted, ms", "predicted / measured"]
    return of_table([*header, "held / predicted bytes"], rows)


def peers_of(raw):
    """Our names of the schedules that a peer ran, too."""
    return [name for name in PEERS if f"peer {name}" in raw["rounds"][0]]


def peers_rows(raw):
    rows = []
    for ours in peers_of(raw):
        name = f"peer {ours}"
        ratios = over(raw, name, f"{ours} M=8")
        steps = [raw["rounds"][0][one]["step_ms"] for one in [f"{ours} M=8", name]]
        cells = [f"{median(own):.0f}" for own in steps]
        rows.append([f"`{ours}`", *cells, f"{ratios[0]:.2f}"])
    return rows


PEERS_HEADER = ["schedule", "gpipe, ms", "PyTorch, ms", "PyTorch / gpipe"]


def report(folder):
    """The text of the report."""
    raw = read(folder)
    canaries = [
        second
        for found in raw["rounds"]
        for one in found.values()
        for second in one.get("canary_s", [])
    ]
    lines = [
        *folders.heading(f"Plans beside every other way: `{raw['workload']}`", folder),
        *paragraph(
            f"{WHAT} Rounds: one of all, then {len(raw['rounds']) - 1} of `auto` and the fastest"
            f" others. The canary took {median(canaries):.3f} s ({min(canaries):.3f} .."
            f" {max(canaries):.3f})."
        ),
        "",
        *leaders_table(raw),
        "",
        *(["## Beside PyTorch", "", *instead_table(raw), ""] if instead(raw) else []),
        "## All, in the first round",
        "",
        *ways_table(raw),
        "",
        "## What the planner said",
        "",
        "```text",
        *[line.rstrip()[:140] for line in raw["said"].splitlines()],
        "```",
    ]
    if rows := peers_rows(raw):
        lines += [
            "",
            "## Beside torch.distributed.pipelining",
            "",
            *paragraph("The same schedule, K = 2 and M = 8, nothing recomputed."),
            "",
            *of_table(PEERS_HEADER, rows),
        ]
    return "\n".join(lines) + "\n"


def summary(parts):
    """The section of RESULTS.md: a row for each workload."""
    rows = []
    for folder in parts.values():
        raw = read(folder)
        best, ratios = next(iter(leaders(raw).items()))
        verdict = "target met" if median(ratios) >= NEAR else "**below target**"
        peers = [f"{median(ratios):.2f}" for ratios in instead(raw).values()]
        theirs = " / ".join(peers)
        pairs = [median(over(raw, f"peer {name}", f"{name} M=8")) for name in peers_of(raw)]
        alike = between(min(pairs), max(pairs), 2) if pairs else ""
        cells = [*with_range(steps_of(raw, AUTO)), best, *with_interval(ratios), verdict]
        cells += [theirs, alike]
        rows.append([f"`{raw['workload']}`", chosen(raw), *cells])
    what = (
        "`auto` is what `gpipe plan --schedule auto` chose for two cores. It is beside all other"
        " schedules, threads and replicas. The target is that none takes less than 0.97 of its"
        " step. PyTorch over `auto`: on two threads, compiled, and its fastest schedule with"
        " M = 8, where the run had them. The last column: PyTorch over gpipe, of the schedules"
        " that both have."
    )
    header = ["workload", "`auto`", "step, ms", "least .. most", "fastest other"]
    header += ["its step over `auto`'s", "interval", "verdict", "PyTorch / `auto`", "same schedule"]
    return [*paragraph(what), "", *of_table(header, rows), ""]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, default="gpt")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--profiled", action="store_true", help="use the profiles in out/")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.report:
        return folders.rewrite(options.report, report)
    rounds.build_gpipe()
    rounds.build("gpt_step", "amoeba_step")
    own, python = WORKLOADS[options.workload], rounds.Python()
    if own.peer is LLAMA:
        python.add(packages.transformers())
    partial = folders.reasons((options.rounds < ROUNDS, f"{options.rounds} rounds, not {ROUNDS}"))
    versions = python.versions()
    if own.peer is LLAMA:
        versions["transformers"] = packages.TRANSFORMERS
    name = f"plans-{options.workload}"
    with folders.run(name, report, partial, options.out, versions) as folder:
        with tempfile.TemporaryDirectory() as scratch:
            measure(own, options, folder, Path(scratch), python)


if __name__ == "__main__":
    main()
