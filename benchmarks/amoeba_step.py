#!/usr/bin/env python3
"""The `amoeba` step: AmoebaNet-D(6, 128), 64 x 64 pixels, 32 images, SGD with momentum, beside PyTorch, plain and
pipelined, in interleaved rounds.      (make bench-amoeba)

Usage: amoeba_step.py [--rounds 5] [--out FOLDER] [--only TEXT[,TEXT..]]

The peers keep away from ATen's slow kernel for 1x1 convolutions of few samples, use channels-last layout where it is
faster, rectify what several operations take once, and are cut where their two stages are most alike.
"""

from rounds import MEDIAN, Workload, gpipe, main

STEPS = 6


def configurations():
    """name -> (program, settings)"""
    jobs = {}
    for remat in ["never", "always"]:
        for m in [1, 8]:
            jobs[f"gpipe K=1 M={m} {remat}"] = gpipe(stages=1, micro_batches=m, remat=remat, steps=STEPS)
        for m in [2, 4, 8, 16]:
            for schedule in ["gpipe", "1f1b"]:
                if m == 8 or schedule == "1f1b":
                    jobs[f"gpipe K=2 M={m} {schedule} {remat}"] = gpipe(
                        micro_batches=m, schedule=schedule, remat=remat, steps=STEPS)
    jobs["gpipe K=2 M=8 1f1b unless-adjacent"] = gpipe(remat="unless-adjacent", steps=STEPS)
    jobs["gpipe K=1 M=8 never aten"] = gpipe(stages=1, remat="never", kernels="aten", steps=STEPS)
    jobs["gpipe K=2 M=8 1f1b never aten"] = gpipe(remat="never", kernels="aten", steps=STEPS)
    for m in [1, 8]:
        for threads in [1, 2]:
            jobs[f"torch M={m} threads={threads}"] = ("plain", {
                "micro-batches": m, "threads": threads, "channels-last": True})
    jobs["torch M=8 threads=1 checkpoint"] = ("plain", {"checkpoint": True, "channels-last": True})
    for schedule in ["gpipe", "1f1b"]:
        for checkpoint in [False, True]:
            name = f"pipelining K=2 M=8 {schedule}{' checkpoint' if checkpoint else ''}"
            jobs[name] = ("pipelining", {"schedule": schedule, "checkpoint": checkpoint, "channels-last": True})
    jobs["pipelining K=2 M=8 1f1b contiguous"] = ("pipelining", {"schedule": "1f1b"})
    return jobs


PAIRS = [
    ("two stages against torch.distributed.pipelining, at one M and one memory mode", [
        ("gpipe K=2 M=8 1f1b never", "pipelining K=2 M=8 1f1b"),
        ("gpipe K=2 M=8 gpipe never", "pipelining K=2 M=8 gpipe"),
        ("gpipe K=2 M=8 1f1b never", "pipelining K=2 M=8 1f1b contiguous"),
        ("gpipe K=2 M=8 1f1b always", "pipelining K=2 M=8 1f1b checkpoint"),
        ("gpipe K=2 M=8 gpipe always", "pipelining K=2 M=8 gpipe checkpoint"),
    ]),
    ("one stage against plain PyTorch on one thread", [
        ("gpipe K=1 M=1 never", "torch M=1 threads=1"),
        ("gpipe K=1 M=8 never", "torch M=8 threads=1"),
        ("gpipe K=1 M=8 always", "torch M=8 threads=1 checkpoint"),
    ]),
    ("two stages against plain PyTorch on two threads", [
        (f"gpipe K=2 M={m} 1f1b never", "torch M=1 threads=2") for m in [2, 4, 8, 16]
    ] + [("gpipe K=2 M=8 1f1b never", "torch M=8 threads=2")]),
    ("channels-last layout and 1x1 convolutions as matrix products, against ATen's own", [
        ("gpipe K=1 M=8 never", "gpipe K=1 M=8 never aten"),
        ("gpipe K=2 M=8 1f1b never", "gpipe K=2 M=8 1f1b never aten"),
    ]),
    ("two stages against one; micro-batches against none; re-materialization against none", [
        ("gpipe K=2 M=8 1f1b never", "gpipe K=1 M=8 never"),
        ("gpipe K=1 M=8 never", "gpipe K=1 M=1 never"),
        ("gpipe K=1 M=8 always", "gpipe K=1 M=8 never"),
        ("gpipe K=2 M=8 1f1b always", "gpipe K=2 M=8 1f1b never"),
    ]),
]

AMOEBA = Workload(name="amoeba", command="make bench-amoeba", jobs=configurations(), pairs=PAIRS, peer_steps=STEPS,
                  step_ms=lambda found: MEDIAN(found["step_ms"][1:]), step_is=f"median of steps 2 to {STEPS}",
                  sections=[])

if __name__ == "__main__":
    main(AMOEBA, __doc__)
