"""The report's pictures, as SVG, by matplotlib. The same data gives the same files."""

import sys

from figures import ROOT, median
from steps import MEMORY, PARTS, shares

sys.path.insert(0, str(ROOT / "scripts"))
import packages  # noqa: E402

MATPLOTLIB = "3.10.8"
OURS, THEIRS, SIMULATED = "#20639b", "#b0b0b0", "#a8c8e4"
COLOURS = ["#20639b", "#8fb8de", "#173f5f", "#3caea3", "#9b5de5", "#f6d55c", "#ed8b3b", "#d0453e"]


def library():
    """matplotlib's pyplot, which is installed once."""
    folder, _ = packages.once(f"matplotlib-{MATPLOTLIB}", f"matplotlib=={MATPLOTLIB}")
    sys.path.insert(0, str(folder))
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({
        "svg.hashsalt": "gpipe", "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "axes.spines.top": False,
        "axes.spines.right": False, "figure.facecolor": "white"})
    from matplotlib import pyplot

    return pyplot


def save(pyplot, figure, path):
    figure.savefig(path, metadata={"Date": None}, bbox_inches="tight")
    pyplot.close(figure)
    return path.name


def step_times(pyplot, workload, results, path):
    """Step times of everything that was in all rounds, the fastest first."""
    names = [name for name, rounds in results.items() if not name.startswith(MEMORY)]
    times = {name: [workload.step_ms(found) for found in results[name]] for name in names}
    names.sort(key=lambda name: -median(times[name]))
    figure, axes = pyplot.subplots(figsize=(8, 0.23 * len(names) + 0.8))
    middle = [median(times[name]) for name in names]
    beside = [[at - min(times[name]) for at, name in zip(middle, names)], [max(times[name]) - at for at, name in zip(middle, names)]]
    colours = [OURS if name.startswith("gpipe") else THEIRS for name in names]
    axes.barh(names, middle, xerr=beside, color=colours, error_kw={"elinewidth": 0.8, "ecolor": "#303030"})
    axes.set_xlabel(f"ms of a step of `{workload.name}`: median, least and most of the rounds (blue: gpipe)")
    axes.margins(y=0.01)
    return save(pyplot, figure, path)


def breakdown(pyplot, workload, results, path):
    """Where the time goes, as shares of devices x step."""
    rows = [(name, shares(rounds)) for name, rounds in results.items() if "parts_ms" in rounds[0]]
    figure, axes = pyplot.subplots(figsize=(8, 0.23 * len(rows) + 1.2))
    left = [0.0] * len(rows)
    names = [name for name, _ in rows][::-1]
    for key, colour in zip(PARTS, COLOURS):
        widths = [own[key] for _, own in rows][::-1]
        axes.barh(names, widths, left=left, color=colour, label=key.replace("_", "/"))
        left = [one + width for one, width in zip(left, widths)]
    axes.set_xlabel(f"% of devices x step of `{workload.name}`")
    axes.set_xlim(0, 100)
    axes.margins(y=0.01)
    axes.legend(ncols=8, loc="lower center", bbox_to_anchor=(0.35, 1.0), frameon=False, fontsize=7, columnspacing=0.9, handlelength=1.2)
    return save(pyplot, figure, path)


def ablations(pyplot, workload, results, all_, path):
    """What each measure brings."""
    rows = [(ablation.measure, ablation.look(results, workload.step_ms)) for ablation in all_]
    rows = [(measure, without) for measure, without in rows if without][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 0.34 * len(rows) + 0.8))
    middle = [median(without) for _, without in rows]
    beside = [[at - min(without) for at, (_, without) in zip(middle, rows)], [max(without) - at for at, (_, without) in zip(middle, rows)]]
    axes.barh([measure for measure, _ in rows], middle, xerr=beside, color=OURS, error_kw={"elinewidth": 0.8, "ecolor": "#303030"})
    axes.axvline(1, color="#303030", linewidth=0.8)
    axes.set_xlabel(f"a step of `{workload.name}` without it over one with it (above 1: it helps)")
    return save(pyplot, figure, path)


def scaling(pyplot, tables, papers, path):
    """Throughput over that of K = 2, M = 1: measured, simulated, and the paper's. `tables`: workload -> M -> K -> (value, measured)."""
    figure, all_axes = pyplot.subplots(1, len(tables), figsize=(4.4 * len(tables), 3.2), squeeze=False)
    for axes, (workload, table) in zip(all_axes[0], tables.items()):
        for (m, cells), colour in zip(table.items(), ["#20639b", "#3caea3", "#d0453e", "#ed8b3b"]):
            stages = sorted(cells)
            axes.plot(stages, [cells[k][0] for k in stages], color=colour, linewidth=1.2, label=f"M = {m}")
            for k in stages:
                axes.plot([k], [cells[k][0]], "o", color=colour, markerfacecolor=colour if cells[k][1] else "white")
            theirs = papers[workload].get(m, {})
            axes.plot(list(theirs), list(theirs.values()), color=colour, linewidth=0.9, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks(stages, [f"K = {k}" for k in stages])
        axes.set_title(workload)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
    all_axes[0][0].set_ylabel("throughput over that of K = 2, M = 1\n(filled: measured; dotted: the paper's)")
    return save(pyplot, figure, path)


def memory(pyplot, founds, path):
    """The largest network under a cap: parameters over the plain step's."""
    figure, all_axes = pyplot.subplots(1, len(founds), figsize=(4.4 * len(founds), 2.8), squeeze=False)
    for axes, found in zip(all_axes[0], founds):
        variants = list(found.largest)[::-1]
        names = [f"M = {m}, {schedule}, {remat}" for m, schedule, remat in variants]
        axes.barh(names, [found.ratio(variant) for variant in variants],
                  color=[THEIRS if variant == tuple(found.plain["variant"]) else OURS for variant in variants])
        axes.axvline(found.network.asked, color="#d0453e", linewidth=1)
        axes.set_title(found.network.title, fontsize=9)
        axes.set_xlabel(f"parameters over the plain step's\n(line: the paper's {found.network.asked})")
    figure.tight_layout()
    return save(pyplot, figure, path)
