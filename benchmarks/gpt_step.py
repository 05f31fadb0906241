#!/usr/bin/env python3
"""The `gpt` step: gpipe beside PyTorch, plain and pipelined, in interleaved rounds.      (make bench)

Usage: gpt_step.py [--rounds 5] [--out FOLDER] [--only TEXT[,TEXT..]]

The second step is measured, of all of them: the third of those that the simulator predicts is for that alone.
"""

from rounds import Workload, gpipe, main


def configurations():
    """name -> (program, settings)"""
    jobs = {}
    for remat in ["never", "always"]:
        for m in [1, 8]:
            jobs[f"gpipe K=1 M={m} {remat}"] = gpipe(stages=1, micro_batches=m, remat=remat, steps=2)
        jobs[f"gpipe K=1 M=8 {remat} aten"] = gpipe(stages=1, remat=remat, steps=2, kernels="aten")
        for m in [4, 8, 16, 32]:
            for schedule in ["gpipe", "1f1b"]:
                name = f"gpipe K=2 M={m} {schedule} {remat}"
                jobs[name] = gpipe(micro_batches=m, schedule=schedule, remat=remat)
        jobs[f"gpipe K=2 M=8 1f1b {remat} aten"] = gpipe(remat=remat, kernels="aten", steps=2)
    jobs["gpipe K=2 M=8 1f1b unless-adjacent"] = gpipe(remat="unless-adjacent")
    jobs["gpipe K=2 M=8 1f1b unless-adjacent aten"] = gpipe(remat="unless-adjacent", kernels="aten", steps=2)
    jobs["gpipe K=1 M=8 never bfloat16"] = gpipe(stages=1, dtype="bfloat16")
    jobs["gpipe K=2 M=8 1f1b never bfloat16"] = gpipe(dtype="bfloat16")
    for m in [1, 8]:
        for threads in [1, 2]:
            jobs[f"torch M={m} threads={threads}"] = ("plain", {"micro-batches": m, "threads": threads})
    jobs["torch M=8 threads=1 checkpoint"] = ("plain", {"checkpoint": True})
    jobs["torch M=8 threads=1 bfloat16"] = ("plain", {"dtype": "bfloat16"})
    for schedule in ["gpipe", "1f1b"]:
        for checkpoint in [False, True]:
            name = f"pipelining K=2 M=8 {schedule}{' checkpoint' if checkpoint else ''}"
            jobs[name] = ("pipelining", {"schedule": schedule, "checkpoint": checkpoint})
    return jobs


# What the issue asks for, and what the kernels and the schedule each give.
PAIRS = [
    ("one stage against plain PyTorch", [
        ("gpipe K=1 M=1 never", "torch M=1 threads=1"),
        ("gpipe K=1 M=8 never", "torch M=8 threads=1"),
        ("gpipe K=1 M=8 never aten", "torch M=8 threads=1"),
        ("gpipe K=1 M=8 always", "torch M=8 threads=1 checkpoint"),
        ("gpipe K=1 M=8 never bfloat16", "torch M=8 threads=1 bfloat16"),
    ]),
    ("two stages against every peer, without re-materialization", [
        ("gpipe K=2 M=8 1f1b never", "torch M=8 threads=2"),
        ("gpipe K=2 M=8 1f1b never", "torch M=1 threads=2"),
        ("gpipe K=2 M=8 1f1b never", "pipelining K=2 M=8 1f1b"),
        ("gpipe K=2 M=8 1f1b never", "pipelining K=2 M=8 gpipe"),
        ("gpipe K=2 M=8 1f1b never aten", "torch M=8 threads=2"),
        ("gpipe K=2 M=8 1f1b never aten", "pipelining K=2 M=8 1f1b"),
    ]),
    ("two stages against the peer with checkpointing", [
        ("gpipe K=2 M=8 1f1b always", "pipelining K=2 M=8 1f1b checkpoint"),
        ("gpipe K=2 M=8 1f1b unless-adjacent", "pipelining K=2 M=8 1f1b checkpoint"),
        ("gpipe K=2 M=8 1f1b always aten", "pipelining K=2 M=8 1f1b checkpoint"),
        ("gpipe K=2 M=8 1f1b unless-adjacent aten", "pipelining K=2 M=8 1f1b checkpoint"),
    ]),
    ("kernels: oneDNN's products instead of MKL's, and bfloat16", [
        ("gpipe K=1 M=8 never", "gpipe K=1 M=8 never aten"),
        ("gpipe K=2 M=8 1f1b never", "gpipe K=2 M=8 1f1b never aten"),
        ("gpipe K=1 M=8 never bfloat16", "gpipe K=1 M=8 never"),
        ("gpipe K=1 M=8 never bfloat16", "gpipe K=1 M=8 never aten"),
        ("gpipe K=2 M=8 1f1b never bfloat16", "gpipe K=2 M=8 1f1b never"),
    ]),
    ("two stages against one", [
        ("gpipe K=2 M=8 1f1b never", "gpipe K=1 M=8 never"),
        ("gpipe K=2 M=8 gpipe never", "gpipe K=1 M=8 never"),
        ("gpipe K=2 M=8 1f1b never aten", "gpipe K=1 M=8 never aten"),
        ("gpipe K=2 M=8 1f1b always", "gpipe K=1 M=8 always"),
        ("gpipe K=2 M=32 1f1b never", "gpipe K=1 M=8 never"),
    ]),
]

def memory(results):
    """Peak bytes with re-materialization against what must be held: the issue's formula."""
    def at(name, key):
        return results[name][-1][key] if results.get(name) else None

    peaks = {name: at(f"gpipe K=2 M=8 {name}", "peak_bytes")
             for name in ["gpipe never", "1f1b never", "gpipe always", "1f1b always"]}
    live = at("gpipe K=2 M=8 1f1b always", "live_bytes")
    if not all(peaks.values()):
        return []
    lines = ["", "### Memory with re-materialization", "",
             "Bytes of tensors by stage, MB. Held by the parameters: weights, two moments, gradients. One micro-batch: the",
             "activations of one of the 8, from what GPipe's schedule holds more than 1F1B's without re-materialization.",
             "Boundary: 1 MB for each micro-batch whose input the next stage holds.", "",
             "| schedule | stage | parameters | one micro-batch | boundary | sum | measured peak | peak / sum | of activations alone |",
             "|---|---|---|---|---|---|---|---|---|"]
    micro_batches, boundary = 8, 4 * 128 * 512 * 4
    for schedule in ["gpipe", "1f1b"]:
        for stage in range(2):
            in_flight = min(2 - stage, micro_batches)
            one = (peaks["gpipe never"][stage] - peaks["1f1b never"][stage]) / (micro_batches - in_flight)
            held = boundary * (micro_batches if schedule == "gpipe" else 1) if stage == 0 else 0
            base, peak = live[stage] * 4 / 3, peaks[f"{schedule} always"][stage]
            row = [base, one, held, base + one + held, peak]
            cells = " | ".join(f"{value / 1e6:.1f}" for value in row)
            lines.append(f"| {schedule} | {stage} | {cells} | {peak / (base + one + held):.3f} | "
                         f"{(peak - base) / (one + held):.3f} |")
    return lines


GPT = Workload(name="gpt", command="make bench", jobs=configurations(), pairs=PAIRS, peer_steps=2,
               step_ms=lambda found: found["step_ms"][1], step_is="second step", sections=[memory])

if __name__ == "__main__":
    main(GPT, __doc__)
