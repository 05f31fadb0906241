#!/usr/bin/env python3
"""The `gpt` step in two processes, beside two threads and beside PyTorch's pipeline over Gloo.      (make bench-processes)

Usage: processes.py [--rounds 5] [--out FOLDER] [--only TEXT[,TEXT..]]

Five steps each; the median of the last three counts: the first two still touch memory for the first time.
"""

import statistics

from rounds import Workload, gpipe, main

STEPS, WARM_UP = 5, 2


def configurations():
    """name -> (program, settings)"""
    jobs = {}
    for m in [4, 8, 32]:
        jobs[f"two threads M={m}"] = gpipe(micro_batches=m, steps=STEPS)
        jobs[f"two processes M={m}"] = gpipe(micro_batches=m, steps=STEPS, processes=2)
    jobs["two threads M=8 always"] = gpipe(remat="always", steps=STEPS)
    jobs["two processes M=8 always"] = gpipe(remat="always", steps=STEPS, processes=2)
    jobs["pipelining M=8"] = ("pipelining", {"schedule": "1f1b", "checkpoint": False})
    jobs["pipelining M=8 checkpoint"] = ("pipelining", {"schedule": "1f1b", "checkpoint": True})
    return jobs


PAIRS = [
    ("two processes against two threads", [
        (f"two processes {what}", f"two threads {what}") for what in ["M=4", "M=8", "M=32", "M=8 always"]
    ]),
    ("against torch.distributed.pipelining, whose stages are two processes over Gloo", [
        ("two processes M=8", "pipelining M=8"),
        ("two processes M=8 always", "pipelining M=8 checkpoint"),
    ]),
]

WORKLOAD = Workload(name="gpt", command="make bench-processes", jobs=configurations(), pairs=PAIRS, peer_steps=STEPS,
                    step_ms=lambda found: statistics.median(found["step_ms"][WARM_UP:]),
                    step_is=f"median of steps {WARM_UP + 1} to {STEPS}", sections=[], folder="processes")

if __name__ == "__main__":
    main(WORKLOAD, __doc__)
