"""The workload `amoeba`: a step of an AmoebaNet-D.

The peers have the remedies that gpipe has: they keep away from ATen's slow kernel for 1x1
convolutions of few samples, use channels-last layout where it is faster, rectify once what several
operations take, and are cut where their two stages are most alike.
"""

from figures import median
from rounds import Workload, gpipe, peer, peers
from targets import WARM_UP, Ablation, Comparison, Efficiency

# Single steps vary by a fifth.
STEPS = 16
OURS = "gpipe K=2 M=8 1f1b"
SPLIT = "gpipe K=2 M=8 zb-h1"
ONE = "gpipe K=1 M=1 never"
ACCUMULATED = "gpipe K=1 M=8 gpipe never"


def jobs():
    """name -> job"""
    ours = lambda **settings: gpipe(**{"steps": STEPS, **settings})
    one = lambda **settings: ours(stages=1, schedule="gpipe", **settings)
    all_ = {
        ONE: ours(stages=1, micro_batches=1, remat="never", short=True),
        "gpipe K=1 M=1 always": ours(stages=1, micro_batches=1, remat="always"),
        "gpipe K=1 M=2 gpipe keep:1": one(micro_batches=2, remat="keep:1"),
        "gpipe K=1 M=2 gpipe selective": one(micro_batches=2, remat="selective", short=True),
        "gpipe K=1 M=2 never": ours(stages=1, micro_batches=2, remat="never"),
        "gpipe K=1 M=8 never": ours(stages=1, remat="never", short=True),
        "gpipe K=1 M=8 gpipe always": one(remat="always", short=True),
        "gpipe K=1 M=8 gpipe selective": one(remat="selective", short=True),
        ACCUMULATED: one(remat="never", short=True),
        "gpipe K=1 M=8 gpipe keep:4": one(remat="keep:4"),
        "gpipe K=1 M=8 never aten": ours(stages=1, remat="never", kernels="aten"),
    }
    for remat in ["never", "always", "unless-adjacent", "selective"]:
        all_[f"{OURS} {remat}"] = ours(remat=remat, short=remat != "unless-adjacent")
    for remat in ["never", "selective"]:
        all_[f"{SPLIT} {remat}"] = ours(remat=remat, schedule="zb-h1", short=True)
    for remat in ["never", "always"]:
        all_[f"gpipe K=2 M=8 gpipe {remat}"] = ours(remat=remat, schedule="gpipe")
    for m in [1, 2, 4]:
        all_[f"gpipe K=2 M={m} 1f1b never"] = ours(micro_batches=m, remat="never")
    all_["gpipe K=2 M=4 1f1b always"] = ours(micro_batches=4, remat="always")
    for remat in ["never", "selective"]:
        split = ours(micro_batches=4, remat=remat, schedule="zb-h1")
        all_[f"gpipe K=2 M=4 zb-h1 {remat}"] = split
    late = {"remat": "always", "early": "false"}
    all_[f"{OURS} never aten"] = ours(remat="never", kernels="aten")
    all_[f"{OURS} never again"] = ours(remat="never")
    all_[f"{OURS} never uniform"] = ours(remat="never", balance="uniform")
    all_[f"{OURS} always, late"] = ours(**late)
    all_["gpipe K=2 M=8 gpipe always, late"] = ours(schedule="gpipe", **late)
    all_[f"{OURS} never, two threads"] = ours(remat="never", threads=2)
    all_[f"{OURS} never, freed memory given back"] = ours(remat="never", keep_freed="false")
    short = [
        "torch M=1 threads=1",
        "torch M=1 threads=2",
        "pipelining K=2 M=8 gpipe",
        "pipelining K=2 M=8 1f1b",
        "pipelining K=2 M=8 gpipe checkpoint",
        "pipelining K=2 M=8 1f1b checkpoint",
        "pipelining K=2 M=8 interleaved-zb",
        "pipelining K=2 M=8 zbv",
    ]
    return all_ | peers(short, channels_last=True) | few_micro_batches()


def few_micro_batches():
    """name -> job of pipelined peers with fewer micro-batches, which may be faster."""
    all_ = {}
    for m in FEW:
        settings = {"micro_batches": m, "channels_last": True}
        for schedule in ["1f1b", "interleaved-zb", "zbv"] if m > 2 else ["1f1b"]:
            own = peer("pipelining", schedule=schedule, **settings)
            all_[f"pipelining K=2 M={m} {schedule}"] = own
        own = peer("pipelining", schedule="1f1b", checkpoint=True, **settings)
        all_[f"pipelining K=2 M={m} 1f1b checkpoint"] = own
        own = peer("pipelining", checkpoint="selective", **settings)
        all_[f"pipelining K=2 M={m} 1f1b checkpoint selective"] = own
    for end, checkpoint, kept in [("", False, "never"), (" checkpoint", True, "except_last")]:
        settings = {"micro_batches": 4, "channels_last": True}
        own = peer("pipelining", schedule="gpipe", checkpoint=checkpoint, **settings)
        all_[f"pipelining K=2 M=4 gpipe{end}"] = own
        all_[f"torchgpipe K=2 M=4{end}"] = peer("torchgpipe_peer", checkpoint=kept, **settings)
    return all_


FEW = [2, 4]
WHOLE = [f"{name} M={m}" for m in [4, 8] for name in ["pipelining K=2", "torchgpipe K=2"]]
WHOLE = [name if name.startswith("t") else f"{name} gpipe" for name in WHOLE]
WHOLE += [f"pipelining K=2 M={m} 1f1b" for m in [*FEW, 8]]
SPLIT_PEERS = [f"pipelining K=2 M={m} {name}" for m in [4, 8] for name in ["interleaved-zb", "zbv"]]
PIPELINED = [*WHOLE, *SPLIT_PEERS]
CHECKPOINTED = [f"{name} checkpoint" for name in WHOLE]
SELECTIVE = [f"pipelining K=2 M={m} 1f1b checkpoint selective" for m in [*FEW, 8]]
RECOMPUTING = CHECKPOINTED + SELECTIVE
TWO_THREADS = ["torch M=1 threads=2"]

# Against the peers, by what is recomputed.
PEERS = [
    Comparison(f"{SPLIT} never", "pipelined peers that recompute nothing", PIPELINED, 1.15),
    Comparison(f"{OURS} never", "pipelined peers that recompute nothing", PIPELINED, 1.15),
    Comparison(
        "gpipe K=2 M=4 zb-h1 never", "pipelined peers that recompute nothing", PIPELINED, 1.15
    ),
    Comparison("gpipe K=2 M=2 1f1b never", "PyTorch on two threads", TWO_THREADS),
    Comparison("gpipe K=2 M=4 1f1b never", "PyTorch on two threads", TWO_THREADS),
    Comparison(f"{SPLIT} selective", "pipelined peers that recompute", RECOMPUTING, 1.15),
    Comparison(
        "gpipe K=2 M=4 zb-h1 selective", "pipelined peers that recompute", RECOMPUTING, 1.15
    ),
    Comparison(f"{OURS} selective", "pipelined peers that recompute", RECOMPUTING, 1.15),
    Comparison(
        f"{OURS} selective", "the peer that recomputes selectively", SELECTIVE, 1.15, is_brief=False
    ),
    Comparison(
        "gpipe K=2 M=4 1f1b always", "pipelined peers that recompute everything", CHECKPOINTED, 1.15
    ),
    Comparison(f"{OURS} always", "pipelined peers that recompute everything", CHECKPOINTED, 1.15),
]

# What recomputing costs on one device.
ALONE = [
    Comparison(ours, "", [base], at_least, base, is_brief=ours.startswith("gpipe"))
    for ours, base, at_least in [
        ("gpipe K=1 M=2 gpipe selective", ONE, 0.95),
        ("gpipe K=1 M=2 gpipe keep:1", ONE, 0.95),
        ("gpipe K=1 M=1 always", ONE, 0.85),
        ("gpipe K=1 M=8 gpipe always", ACCUMULATED, 0.85),
        ("gpipe K=1 M=8 gpipe keep:4", ACCUMULATED, 0.95),
        ("gpipe K=1 M=8 gpipe selective", ACCUMULATED, 0.95),
        ("torch M=8 threads=1 checkpoint", "torch M=8 threads=1", None),
    ]
]

EFFICIENCY = Efficiency("gpipe K=2", 0.95)

NOTES = [
    "Micro-batches of few images make small kernels, so more of them cost time. PyTorch on two"
    " threads takes all images at once and has no bubble.",
    "`always` repeats every forward. `selective` keeps the outputs of convolutions and recomputes"
    " batch norms and pooling.",
]

ABLATIONS = [
    Ablation(
        "channels-last layout and 1x1 convolutions as matrix products, not ATen's convolutions",
        f"{OURS} never",
        f"{OURS} never aten",
    ),
    Ablation(
        "stages cut by cost, not by number of layers", f"{OURS} never", f"{OURS} never uniform"
    ),
    Ablation("2 micro-batches, not 1", "gpipe K=2 M=2 1f1b never", "gpipe K=2 M=1 1f1b never"),
    Ablation("8 micro-batches, not 1", f"{OURS} never", "gpipe K=2 M=1 1f1b never"),
    Ablation("1F1B, not GPipe's schedule", f"{OURS} never", "gpipe K=2 M=8 gpipe never"),
    Ablation("ZB-H1, not 1F1B", f"{SPLIT} never", f"{OURS} never"),
    Ablation("ZB-H1, not 1F1B, both selective", f"{SPLIT} selective", f"{OURS} selective"),
    Ablation("`unless-adjacent`, not `always`", f"{OURS} unless-adjacent", f"{OURS} always"),
    Ablation(
        "`selective`, not `always`, on one device",
        "gpipe K=1 M=8 gpipe selective",
        "gpipe K=1 M=8 gpipe always",
    ),
    Ablation(
        "recomputation before the gradients arrive, 1F1B", f"{OURS} always", f"{OURS} always, late"
    ),
    Ablation(
        "recomputation before the gradients arrive, GPipe's schedule",
        "gpipe K=2 M=8 gpipe always",
        "gpipe K=2 M=8 gpipe always, late",
    ),
    Ablation("none: the same run again", f"{OURS} never", f"{OURS} never again"),
    Ablation("one thread for each stage, not two", f"{OURS} never", f"{OURS} never, two threads"),
    Ablation("freed memory is kept", f"{OURS} never", f"{OURS} never, freed memory given back"),
]

WORKLOAD = Workload(
    name="amoeba",
    jobs=jobs(),
    peer_steps=STEPS,
    step_ms=lambda found: median(found["step_ms"][WARM_UP:]),
    about="an AmoebaNet-D(6, 128), 32 images of 64 x 64 pixels, 10 classes, SGD with momentum,"
    " float32",
    brief="an AmoebaNet on images of 64 x 64",
)
