"""The report's sections of a workload's steps."""

from figures import interval, median, of_table, spread
from targets import is_simulated, simulated

# Of a device's step, in the order in which they are shown.
PARTS = ["forward", "recompute", "backward", "optimizer", "communication", "fill_drain", "imbalance", "stalls"]
MEMORY = "memory of "


def timed(results):
    """Without those that were run for their bytes."""
    return {name: rounds for name, rounds in results.items() if not name.startswith(MEMORY)}


def by_round(rounds):
    return "" if len(rounds) > 1 else " (one round)"


def times(workload, results):
    rows = []
    for name, rounds in timed(results).items():
        found = rounds[0]
        threads = found.get("threads") or len(found.get("balance", [])) or ""
        cut = found.get("balance") or found.get("cut") or ""
        rows.append([name + by_round(rounds), spread([workload.step_ms(found) for found in rounds]), threads,
                     found.get("dtype", "float32"), cut, f"{found['loss'][0]:.6f}"])
    return of_table(["configuration", f"{workload.step_is}, ms: median [least .. most] of the rounds", "threads", "dtype",
                     "layers of stages; peers: first of the second", "first loss"], rows)


def targets(workload, results, all_):
    return of_table(["asked", "found: median [interval]", "kept"], [target.look(results, workload.step_ms).row() for target in all_])


def ablations(workload, results, all_):
    rows = []
    for ablation in all_:
        without = ablation.look(results, workload.step_ms)
        if without:
            once = " (one round)" if len(without) == 1 else ""
            rows.append([ablation.measure, interval(without, 2) + once, ablation.on, ablation.off])
    return of_table(["measure", "a step without it over one with it", "with", "without"], rows) if rows else ["Not in this run."]


def efficiency(results):
    """Measured against simulated: the costs of one step predict the next; and how uneven the cut is."""
    rows = []
    for name, rounds in results.items():
        if is_simulated(rounds) and len(rounds[0]["balance"]) > 1:
            work = [[sum(parts) for parts in zip(*(found["parts_ms"][-1][key] for key in PARTS[:4]))] for found in rounds]
            uneven = [max(stages) / (sum(stages) / len(stages)) for stages in work]
            rows.append([name, spread([simulated(found) for found in rounds], 3), spread(uneven, 3), rounds[0]["balance"],
                         spread([100 * found["bubble"] for found in rounds], 1)])
    return of_table(["configuration", "simulated / measured", "imbalance", "cut", "bubble %"], rows)


def shares(rounds):
    """Part of the last step -> share of devices x step, by the median of the rounds."""
    found = {}
    for key in PARTS:
        by = [sum(one["parts_ms"][-1][key]) / (len(one["balance"]) * one["step_ms"][-1]) for one in rounds]
        found[key] = 100 * median(by)
    return found


def breakdown(results):
    rows = []
    for name, rounds in results.items():
        if "parts_ms" in rounds[0]:
            own = shares(rounds)
            rows.append([name, *(f"{own[key]:.1f}" for key in PARTS)])
    return of_table(["configuration", *(key.replace("_", "/") for key in PARTS)], rows)


def memory(results):
    rows = []
    for name, rounds in results.items():
        found = rounds[0]
        counted = found.get("peak_bytes") or found.get("peak_tensor_bytes")
        counted = counted if isinstance(counted, list) else [counted]
        # Peers are only counted in runs of their own.
        if all(counted):
            rows.append([name.removeprefix(MEMORY), " + ".join(f"{one / 1e6:.0f}" for one in counted), f"{max(counted) / 1e6:.0f}"])
    return of_table(["configuration", "MB of tensors by stage", "fullest stage"], rows)
