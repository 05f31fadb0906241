"""The reports of a workload's steps, `gpt` and `amoeba`, from their raw data."""

import json

import plots
from figures import bounds, bullet, median, of_table, paragraph, with_interval, with_range
from folders import heading
from rounds import drift
from targets import BELOW, MET, WARM_UP, is_simulated, simulated

# Of a device's step, in the order in which they are shown (docs/concepts/bubble.md).
PARTS = [
    "forward",
    "recompute",
    "backward",
    "optimizer",
    "communication",
    "fill_drain",
    "imbalance",
    "stalls",
]
# Names of jobs that are run for their bytes begin so. Their times do not count.
MEMORY = "memory of "
SPEED_UP = (
    "Speed-up is the peer's step over gpipe's, the median of rounds. Above 1 gpipe is faster."
)
ON_ONE_DEVICE = (
    "Speed is the other step over this one, the median of rounds. Activations are at their peak,"
    " over those of the other."
)


def read(folder):
    return json.loads((folder / "raw.json").read_text())


def timed(results):
    """Without those that were run for their bytes."""
    return {name: rounds for name, rounds in results.items() if not name.startswith(MEMORY)}


def looked(comparisons, workload, results, brief=False):
    """What is found of each comparison that is in the run. `brief` is for RESULTS.md."""
    found = [
        comparison.look(results, workload.step_ms)
        for comparison in comparisons
        if comparison.is_brief or not brief
    ]
    return [one for one in found if one]


def against_peers(module, results, brief=False):
    rows = [
        [
            f"`{one.ours}`",
            f"{one.ours_ms:.0f}",
            one.against,
            f"`{one.other}`",
            f"{one.other_ms:.0f}",
        ]
        + one.cells()
        for one in looked(module.PEERS, module.WORKLOAD, results, brief)
    ]
    header = ["gpipe", "its step, ms", "against", "the fastest of them", "its step, ms"]
    return of_table([*header, "speed-up", "interval", "target", "verdict"], rows) if rows else []


def on_one_device(module, results, brief=False):
    rows = []
    for one in looked(module.ALONE, module.WORKLOAD, results, brief):
        kept = "" if one.kept is None else f"{100 * one.kept:.0f}"
        *cells, _ = one.cells()
        verdict = "" if one.target is None else MET if one.speed >= one.target else BELOW
        names = [f"`{one.ours}`", f"{one.ours_ms:.0f}", f"`{one.other}`", f"{one.other_ms:.0f}"]
        rows.append([*names, kept, *cells, verdict])
    header = ["recomputing", "its step, ms", "compared with", "its step, ms", "activations, %"]
    return of_table([*header, "speed", "interval", "target", "verdict"], rows) if rows else []


def lowest_efficiency(module, results):
    """Sentences on the configuration that the simulator predicts least well."""
    found = module.EFFICIENCY.look(results)
    if not found:
        return []
    name, ratios, count = found
    low, high = bounds(ratios)
    return paragraph(
        "The simulator has the costs of one step and predicts the next. The simulated step over the"
        f" measured one is lowest, of {count} configurations, for `{name}`: {median(ratios):.3f}"
        f" ({low:.3f} .. {high:.3f}). The target is {module.EFFICIENCY.at_least}."
    )


def times(workload, results):
    rows = []
    for name, rounds in timed(results).items():
        found = rounds[0]
        threads = found.get("threads") or len(found.get("balance", [])) or ""
        cut = found.get("balance") or found.get("cut") or ""
        ms = with_range([workload.step_ms(one) for one in rounds])
        rows.append([f"`{name}`", *ms, len(rounds), threads, cut, f"{found['loss'][0]:.6f}"])
    header = [
        "configuration",
        "step, ms",
        "least .. most",
        "rounds",
        "threads",
        "cut",
        "first loss",
    ]
    return of_table(header, rows)


def ablations(workload, results, all_):
    rows = []
    for ablation in all_:
        without = ablation.look(results, workload.step_ms)
        if without:
            names = [f"`{ablation.on}`", f"`{ablation.off}`"]
            rows.append([ablation.measure, *with_interval(without, 2), len(without), *names])
    header = ["measure", "without / with", "interval", "rounds", "with", "without"]
    return of_table(header, rows) if rows else []


def imbalance(found):
    """The busiest stage's work over the mean, in the last step."""
    parts = (found["parts_ms"][-1][key] for key in PARTS[:4])
    work = [sum(stage) for stage in zip(*parts)]
    return max(work) / (sum(work) / len(work))


def efficiency(results):
    rows = []
    for name, rounds in results.items():
        if is_simulated(rounds) and len(rounds[0]["balance"]) > 1:
            ratio = with_range([simulated(found) for found in rounds], 3)
            bubble = median([100 * found["bubble"] for found in rounds])
            uneven = median([imbalance(found) for found in rounds])
            rows.append(
                [f"`{name}`", *ratio, f"{uneven:.3f}", f"{bubble:.1f}", rounds[0]["balance"]]
            )
    header = ["configuration", "simulated / measured", "least .. most", "imbalance", "bubble, %"]
    return of_table([*header, "cut"], rows) if rows else []


def shares(rounds):
    """Part of the last step -> its share of devices x step in percent, median of the rounds."""
    found = {}
    for key in PARTS:
        by_round = [
            sum(one["parts_ms"][-1][key]) / (len(one["balance"]) * one["step_ms"][-1])
            for one in rounds
        ]
        found[key] = 100 * median(by_round)
    return found


def breakdown(results):
    rows = []
    for name, rounds in results.items():
        if "parts_ms" in rounds[0]:
            own = shares(rounds)
            rows.append([f"`{name}`", *(f"{own[key]:.1f}" for key in PARTS)])
    return of_table(["configuration", *(key.replace("_", "/") for key in PARTS)], rows)


def memory(results):
    rows = []
    for name, rounds in results.items():
        counted = rounds[0].get("peak_bytes") or rounds[0].get("peak_tensor_bytes")
        counted = counted if isinstance(counted, list) else [counted]
        # Peers are counted in runs of their own alone.
        if all(counted):
            megabytes = [f"{one / 1e6:.0f}" for one in counted]
            name = f"`{name.removeprefix(MEMORY)}`"
            rows.append([name, f"{max(counted) / 1e6:.0f}", " + ".join(megabytes)])
    return of_table(["configuration", "fullest stage, MB", "each stage, MB"], rows)


def draw(module, folder):
    """Draws the report's pictures."""
    results, workload, pyplot = read(folder)["results"], module.WORKLOAD, plots.library()
    plots.step_times(pyplot, workload, timed(results), folder / "steps.svg")
    parts = [(name, shares(all_)) for name, all_ in results.items() if "parts_ms" in all_[0]]
    plots.breakdown(pyplot, workload, parts, folder / "parts.svg")
    found = [(one.measure, one.look(results, workload.step_ms)) for one in module.ABLATIONS]
    if found := [(measure, ratios) for measure, ratios in found if ratios]:
        plots.ablations(pyplot, workload, found, folder / "ablations.svg")


def section(title, text, table, picture=None):
    """A section, if its table has rows."""
    if not table:
        return []
    shown = [f"![{title}]({picture})", ""] if picture else []
    return [f"## {title}", "", *paragraph(text), "", *shown, *table, ""]


def step_is(results):
    """Which steps the time of a step is of."""
    last = max(len(one["step_ms"]) for rounds in results.values() for one in rounds)
    return f"median of steps {WARM_UP + 1} to {last}"


def report(module, folder):
    """The text of the report."""
    raw, workload = read(folder), module.WORKLOAD
    results = raw["results"]
    lines = [
        *heading(f"A step of `{workload.name}` beside PyTorch", folder),
        *paragraph(
            f"The workload `{workload.name}`: {workload.about}. Every program runs in a process of"
            f" its own, in interleaved rounds. A step's time is the {step_is(results)}; a table"
            " shows the median of the rounds. Ratios are paired within a round. An interval has"
            " their median in at least 95% of all cases; of fewer than six rounds it is the least"
            " and the most. benchmarks/README.md explains the names."
        ),
        "",
        *paragraph(drift(raw)),
        "",
        *section("Against the peers", SPEED_UP, against_peers(module, results)),
        *section("What recomputing costs", ON_ONE_DEVICE, on_one_device(module, results)),
        "## Notes",
        "",
        *(line for note in module.NOTES for line in bullet(note)),
        "",
        *section(
            "Step times",
            "Time of a step, the fastest first in the picture.",
            times(workload, results),
            "steps.svg",
        ),
        *section(
            "What each measure brings",
            "A step without the measure over one with it, paired within a round. Above 1 it"
            " helps.",
            ablations(workload, results, module.ABLATIONS),
            "ablations.svg",
        ),
        *section(
            "Where the time goes",
            "Shares of devices x step in percent, of the last step. docs/concepts/bubble.md"
            " explains the parts.",
            breakdown(results),
            "parts.svg",
        ),
        *section(
            "Two stages against the simulator",
            "The simulator is given the median time of each kind of action of one step, and"
            " predicts the next step. Imbalance is the busiest stage's work over the mean.",
            efficiency(results),
        ),
        *section(
            "Memory",
            "Most bytes of tensors, with weights, gradients and optimizer state, by the"
            " allocator's count (gpipe) or a profiler's (PyTorch).",
            memory(results),
        ),
    ]
    return "\n".join(lines).rstrip("\n") + "\n"


def summary(module, folder):
    """The section of RESULTS.md."""
    raw = read(folder)
    results = raw["results"]
    rounds = len(raw["canary_ms"])
    text = f"{len(timed(results))} configurations in {rounds} interleaved rounds."
    lines = [*paragraph(text), "", *against_peers(module, results, brief=True), ""]
    if one_device := on_one_device(module, results, brief=True):
        text = paragraph(f"What recomputing costs on one device. {ON_ONE_DEVICE}")
        lines += [*text, "", *one_device, ""]
    if efficiency_ := lowest_efficiency(module, results):
        lines += [*efficiency_, ""]
    return lines
