"""The GPU kit's report, in Markdown, from its results. It says what there is, however little."""

import re

from figures import median, of_table, spread
from gpu_parts import PARTS, WARM_UP

GB = 1e9
# Huang et al. 2019, table 1: (L, D) = (18, 208) and (18, 416) on one accelerator of 8 GB.
PAPER = {"plain": "D = 208, 82 million", "pipeline": "D = 416, 318 million"}
SETTINGS_SAY = """\
- *all settings*: deterministic algorithms (gpipe asks for them on a GPU), TF32 off, and
  `CUBLAS_WORKSPACE_CONFIG=:4096:8`.
- *gpipe's own*: deterministic algorithms only; TF32 is as libtorch has it.
- *none*: no deterministic algorithms either."""
FAIR = """\
Both sides have the same weights, mini-batch (which starts on the CPU), fused optimizer and
{warm_up} warm-up steps. A step ends when its kernels have. gpipe uses deterministic kernels, and
PyTorch its defaults, which may be faster. TF32 is off on both sides (`NVIDIA_TF32_OVERRIDE=0`). In
bfloat16 gpipe computes with bfloat16 copies of float32 weights, PyTorch under autocast, which keeps
norms and losses in float32. Peak bytes are the most that libtorch's allocator had given out, on
both sides. Figures are medians of each process's median step, with the least and the most of all
rounds."""


def report(data):
    """The whole report."""
    parts = data.get("parts", {})
    text = [
        "# Rehearsal without a GPU" if data.get("tiny", True) else "# First run on a GPU",
        "",
        *machine(data),
        "",
    ]
    if data.get("tiny"):
        text += ["**All sizes are tiny: the figures say only that the parts run.**", ""]
    rows = [
        [
            part.name,
            part.title,
            parts[part.name]["status"],
            f"{parts[part.name]['seconds']:.0f}",
            parts[part.name].get("why", ""),
        ]
        for part in PARTS
        if part.name in parts
    ]
    text += [*of_table(["part", "what", "status", "s", "why"], rows), ""]
    for part in PARTS:
        found = parts.get(part.name)
        if found and (found["steps"] or found.get("would_run")):
            text += [
                f"## {part.title[0].upper()}{part.title[1:]}",
                "",
                *section(part, found["steps"]),
                *rest(found),
                "",
            ]
    return "\n".join(text).rstrip() + "\n"


def section(part, steps):
    """A part's tables. What cannot be read must not end the run that it is written during."""
    try:
        return SECTIONS[part.name](steps)
    except (KeyError, IndexError, TypeError, ValueError, ZeroDivisionError) as error:
        return [
            f"Its results are in `results.json`, and cannot be shown: {type(error).__name__}:"
            f" {error}."
        ]


def machine(data):
    kit = data.get("kit", {})
    gib = (
        f", {data['gpu_bytes'] / 2**30:.0f} GiB, driver {data['driver']}" if data.get("gpu") else ""
    )
    lines = [
        f"GPU: {data.get('gpu') or 'none'}{gib}. Processor: {data.get('machine')}.",
        (
            f"gpipe {kit.get('commit')}, {kit.get('rustc')}; torch {data.get('torch')}, CUDA"
            f" {data.get('cuda')}, cuDNN {data.get('cudnn')}, Python {data.get('python')}."
        ),
    ]
    return lines + [f"`{one['command']}`, {one['date']}." for one in data.get("runs", [])]


def rest(found):
    """What would have run, and what failed."""
    lines = []
    if found.get("would_run") and not found["steps"]:
        lines += ["Would run:", "", "```sh", *found["would_run"], "```"]
    for step in found["steps"]:
        if step["code"] != 0:
            why = (step["error"] or step["output"]).strip()[-1500:] or f"exit code {step['code']}"
            lines += ["", f"**Failed: {step['name']}**", "", "```text", *why.splitlines(), "```"]
    return lines


def tests(steps):
    """A row for each test. One that skips itself says so, and passes all the same."""
    outcomes = {}
    for step in steps:
        skipped = set(re.findall(r"^(\S+): there is no GPU", step["error"], re.M))
        for name, outcome in re.findall(r"^test (\S+) \.\.\. (\S+)", step["output"], re.M):
            outcomes[name] = "skipped: no GPU" if name in skipped else outcome
    return of_table(["test", "outcome"], outcomes.items()) if outcomes else []


def bits(steps):
    """A row for each network, dtype and settings."""
    rows = {}
    for step in steps:
        lines = step["lines"]
        if not lines:
            continue
        again = [line for line in lines if line["what"] == "again"]
        ways = [line for line in lines if line["what"] == "way"]
        equal = sum(line.get("equal", False) for line in ways)
        other = next((line for line in ways if not line.get("equal")), None)
        of = step["of"]
        rows[step["name"]] = [
            of["settings"],
            of["network"],
            of["dtype"],
            verdict(again[0]) if again else "",
            f"{equal} of {len(ways)}",
            differs(other) if other else "",
        ]
    header = [
        "settings",
        "network",
        "dtype",
        "K = 1 run again",
        "equal to K = 1",
        "first that differs",
    ]
    compared = "Compared are the loss of each step, every gradient and every parameter."
    return [*of_table(header, rows.values()), "", compared, "", SETTINGS_SAY] if rows else []


def verdict(line):
    return "equal" if line.get("equal") else differs(line)


def differs(line):
    if "error" in line:
        return f"K = {line['stages']} {line['schedule']}: {line['error']}"
    first = line["first"]
    return (
        f"K = {line['stages']} {line['schedule']} {line['remat']}: {line['different']} of"
        f" {line['tensors']} tensors; {first['tensor']} by {first['difference']:.1e} (its largest"
        f" value is {first['largest_value']:.1e})"
    )


def step_ms(line):
    """A process's figure: the median of its steps after the warm-up."""
    return median(line["step_ms"][WARM_UP:])


def peak(line):
    """The most bytes on the device; stages that share a GPU all report that GPU's."""
    found = line.get("peak_bytes") or line.get("peak_tensor_bytes")
    return max(found) if isinstance(found, list) else found


def beside_pytorch(steps):
    """A table for each size and dtype."""
    groups = {}
    for step in steps:
        if step["lines"] and "job" in step["of"]:
            of = step["of"]
            group = groups.setdefault((of["size"], of["dtype"]), {"title": of["title"], "jobs": {}})
            group["jobs"].setdefault(of["job"], []).append(step["lines"][-1])
    text = []
    for (_, dtype), group in groups.items():
        text += [f"### {group['title']}, {dtype}", "", *one_table(group["jobs"]), ""]
    return [*text, FAIR.format(warm_up=WARM_UP)] if text else []


def one_table(jobs):
    eager = [step_ms(line) for line in jobs.get("PyTorch eager M=1", [])]
    rows = []
    for job, lines in jobs.items():
        times = [step_ms(line) for line in lines]
        bytes_ = [peak(line) for line in lines if peak(line)]
        ratio = f"{median(eager) / median(times):.2f}" if eager else ""
        rows.append(
            [
                job,
                len(lines),
                spread(times, 2),
                ratio,
                f"{max(bytes_) / 2**20:.0f}" if bytes_ else "",
                f"{lines[0]['loss'][0]:.6f}",
            ]
        )
    return of_table(
        ["configuration", "rounds", "step, ms", "speed over eager M=1", "peak, MiB", "first loss"],
        rows,
    )


def largest(steps):
    """What fits under the cap, and the least that was refused."""
    groups = {}
    for step in steps:
        if step["lines"]:
            of = step["of"]
            fits = "refused" not in step["lines"][-1]
            groups.setdefault((of["dtype"], of["variant"]), []).append(
                (of["filters"], fits, step["lines"][-1], of)
            )
    rows = []
    for (dtype, variant), tries in groups.items():
        fits = max((one for one in tries if one[1]), key=lambda one: one[0], default=None)
        refused = min((one[0] for one in tries if not one[1]), default=None)
        closed = fits and refused and refused - fits[0] <= fits[3]["least"]
        line = fits[2] if fits else {}
        millions = f"{line['parameters'] / 1e6:.1f}" if fits else ""
        rows.append(
            [
                dtype,
                variant,
                fits[0] if fits else "none yet",
                millions,
                f"{line['parameter_bytes'] / GB:.2f}" if fits else "",
                f"{line['activation_bytes'] / GB:.2f}" if fits else "",
                refused or "none yet",
                "yes" if closed else "no",
                PAPER[variant],
            ]
        )
    if not rows:
        return []
    cap = next(iter(groups.values()))[0][3]["cap"]
    header = [
        "dtype",
        "variant",
        "largest D that fits",
        "parameters, millions",
        "parameters, GB",
        "activations, GB",
        "least D refused",
        "search ended",
        "the paper",
    ]
    return [
        *of_table(header, rows),
        "",
        (
            f"Two steps by RMSProp with momentum under a cap of {cap} bytes on one device. *plain*:"
            " one micro-batch, nothing recomputed; *pipeline*: 32 micro-batches, everything"
            " recomputed. On a GPU a step fails after it went over the cap. Parameters are"
            " weights, running statistics, two moments and gradients."
        ),
    ]


def cpu(steps):
    """Predicted beside measured."""
    rows = []
    for step in steps:
        lines = step["lines"]
        for remat in dict.fromkeys(line["remat"] for line in lines):
            own = [line for line in lines if line["remat"] == remat]
            ratios = [line["predicted_ms"] / line["step_ms"] for line in own]
            bytes_ = [max(line["predicted_peaks"]) / max(line["peaks"]) for line in own]
            rows.append(
                [
                    step["of"]["workload"],
                    step["of"]["stages"],
                    remat,
                    len(own),
                    spread([one["predicted_ms"] for one in own]),
                    spread([one["step_ms"] for one in own]),
                    spread(ratios, 3),
                    f"{median(bytes_):.3f}",
                ]
            )
    header = [
        "workload",
        "K",
        "recomputed",
        "pairs",
        "predicted, ms",
        "measured, ms",
        "predicted / measured",
        "peak bytes, predicted / measured",
    ]
    return (
        [
            *of_table(header, rows),
            "",
            (
                "1F1B, 8 micro-batches, a thread for each stage. Each prediction is made before its"
                " step."
            ),
        ]
        if rows
        else []
    )


SECTIONS = {
    "tests": tests,
    "bits": bits,
    "gpt": beside_pytorch,
    "amoeba": beside_pytorch,
    "largest": largest,
    "cpu": cpu,
}
