"""The reports' pictures, as SVG, by matplotlib. The same data gives the same files."""

import sys

from figures import ROOT, median

sys.path.insert(0, str(ROOT / "scripts"))
import packages  # noqa: E402

MATPLOTLIB = "3.10.8"
OURS, THEIRS = "#20639b", "#b0b0b0"
COLOURS = [
    "#20639b",
    "#8fb8de",
    "#173f5f",
    "#3caea3",
    "#9b5de5",
    "#f6d55c",
    "#ed8b3b",
    "#d0453e",
]
STYLE = {
    "svg.hashsalt": "gpipe",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "white",
}
ERROR_BARS = {"elinewidth": 0.8, "ecolor": "#303030"}


def library():
    """matplotlib's pyplot, which is installed once."""
    name = f"matplotlib-{MATPLOTLIB}-{packages.PYTHON}"
    folder, _ = packages.once(name, f"matplotlib=={MATPLOTLIB}")
    sys.path.insert(0, str(folder))
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(STYLE)
    from matplotlib import pyplot

    return pyplot


def save(pyplot, figure, path):
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)


def of_bars(pyplot, names, values, path, label, colours=OURS, least_height=0.23, line=None):
    """Bars with the median, the least and the most of each name's values."""
    figure, axes = pyplot.subplots(figsize=(8, least_height * len(names) + 0.8))
    middle = [median(one) for one in values]
    below = [at - min(one) for at, one in zip(middle, values)]
    above = [max(one) - at for at, one in zip(middle, values)]
    axes.barh(names, middle, xerr=[below, above], color=colours, error_kw=ERROR_BARS)
    if line is not None:
        axes.axvline(line, color="#303030", linewidth=0.8)
    axes.set_xlabel(label)
    axes.margins(y=0.01)
    save(pyplot, figure, path)


def step_times(pyplot, workload, results, path):
    """Step times of all configurations, the fastest first."""
    times = {name: [workload.step_ms(found) for found in all_] for name, all_ in results.items()}
    names = sorted(times, key=lambda name: -median(times[name]))
    colours = [OURS if name.startswith("gpipe") else THEIRS for name in names]
    label = f"ms of a step of `{workload.name}`: median, least and most of the rounds (blue: gpipe)"
    of_bars(pyplot, names, [times[name] for name in names], path, label, colours)


def breakdown(pyplot, workload, rows, path):
    """Where the time goes, as shares of devices x step. `rows`: (name, part -> percent)."""
    figure, axes = pyplot.subplots(figsize=(8, 0.23 * len(rows) + 1.2))
    left = [0.0] * len(rows)
    names = [name for name, _ in rows][::-1]
    for key, colour in zip(rows[0][1], COLOURS):
        widths = [own[key] for _, own in rows][::-1]
        axes.barh(names, widths, left=left, color=colour, label=key.replace("_", "/"))
        left = [one + width for one, width in zip(left, widths)]
    axes.set_xlabel(f"% of devices x step of `{workload.name}`")
    axes.set_xlim(0, 100)
    axes.margins(y=0.01)
    axes.legend(
        ncols=8,
        loc="lower center",
        bbox_to_anchor=(0.35, 1.0),
        frameon=False,
        fontsize=7,
        columnspacing=0.9,
        handlelength=1.2,
    )
    save(pyplot, figure, path)


def ablations(pyplot, workload, rows, path):
    """What each measure brings. `rows`: (measure, ratios by round)."""
    rows = rows[::-1]
    label = f"a step of `{workload.name}` without it over one with it (above 1: it helps)"
    names, values = [measure for measure, _ in rows], [ratios for _, ratios in rows]
    of_bars(pyplot, names, values, path, label, least_height=0.34, line=1)


def scaling(pyplot, tables, papers, path):
    """Throughput over that of K = 2, M = 1: measured, simulated, and the paper's.

    `tables`: workload -> M -> K -> (value, whether it was measured).
    """
    figure, all_axes = pyplot.subplots(
        1, len(tables), figsize=(4.4 * len(tables), 3.2), squeeze=False
    )
    for axes, (workload, table) in zip(all_axes[0], tables.items()):
        stages = sorted({k for cells in table.values() for k in cells})
        for (m, cells), colour in zip(table.items(), ["#20639b", "#3caea3", "#d0453e", "#ed8b3b"]):
            own = [cells[k][0] for k in stages]
            axes.plot(stages, own, color=colour, linewidth=1.2, label=f"M = {m}")
            for k in stages:
                face = colour if cells[k][1] else "white"
                axes.plot([k], [cells[k][0]], "o", color=colour, markerfacecolor=face)
            theirs = papers[workload].get(m, {})
            values = list(theirs.values())
            axes.plot(list(theirs), values, color=colour, linewidth=0.9, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks(stages, [f"K = {k}" for k in stages])
        axes.set_title(workload)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    label = "throughput over that of K = 2, M = 1\n(filled: measured; dotted: the paper's)"
    all_axes[0][0].set_ylabel(label)
    save(pyplot, figure, path)


def memory(pyplot, found, path):
    """The largest network under a cap: parameters over the plain step's."""
    variants = list(found.largest)[::-1]
    names = [f"M = {m}, {schedule}, {remat}" for m, schedule, remat in variants]
    figure, axes = pyplot.subplots(figsize=(6, 0.28 * len(names) + 1))
    colours = [THEIRS if variant == found.plainly else OURS for variant in variants]
    axes.barh(names, [found.ratio(variant) for variant in variants], color=colours)
    axes.axvline(found.network.target, color="#d0453e", linewidth=1)
    axes.set_title(found.network.title, fontsize=9)
    axes.set_xlabel(f"parameters over the plain step's (line: {found.network.target}, the paper's)")
    save(pyplot, figure, path)
