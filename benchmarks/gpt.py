"""The workload `gpt`: a step of a decoder-only transformer.

Two steps warm up. Two are measured. The simulator predicts the second of them from the first.
"""

from figures import median
from rounds import Workload, gpipe, peers
from targets import WARM_UP, Ablation, Comparison, Efficiency

STEPS = 4
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
        "gpipe K=1 M=8 gpipe always": one(remat="always", short=True),
        "gpipe K=1 M=8 gpipe selective": one(remat="selective", short=True),
        "gpipe K=1 M=2 gpipe selective": one(micro_batches=2, remat="selective"),
        ACCUMULATED: one(remat="never"),
        "gpipe K=1 M=8 gpipe keep:4": one(remat="keep:4"),
    }
    for remat in ["never", "always", "unless-adjacent", "selective"]:
        all_[f"{OURS} {remat}"] = ours(remat=remat, short=remat != "unless-adjacent")
    for remat in ["never", "selective"]:
        all_[f"{SPLIT} {remat}"] = ours(remat=remat, schedule="zb-h1", short=True)
    all_[f"{SPLIT} never aten"] = ours(remat="never", schedule="zb-h1", kernels="aten", short=True)
    for remat in ["never", "selective"]:
        all_[f"{OURS} {remat} aten"] = ours(remat=remat, kernels="aten", short=remat == "never")
    for remat in ["never", "always"]:
        all_[f"gpipe K=2 M=8 gpipe {remat}"] = ours(remat=remat, schedule="gpipe")
    late = {"remat": "always", "early": "false"}
    all_[f"{OURS} never again"] = ours(remat="never")
    all_[f"{OURS} never uniform"] = ours(remat="never", balance="uniform", once=True)
    all_[f"{OURS} always, late"] = ours(**late)
    all_["gpipe K=2 M=8 gpipe always, late"] = ours(schedule="gpipe", **late)
    all_[f"{OURS} never, two threads"] = ours(remat="never", threads=2)
    given_back = ours(remat="never", keep_freed="false", once=True)
    all_[f"{OURS} never, freed memory given back"] = given_back
    all_["gpipe K=2 M=1 1f1b never"] = ours(remat="never", micro_batches=1, once=True)
    short = [
        "torch M=1 threads=1",
        "torch M=1 threads=2",
        "pipelining K=2 M=8 1f1b",
        "pipelining K=2 M=8 1f1b checkpoint",
        "pipelining K=2 M=8 1f1b checkpoint selective",
        "pipelining K=2 M=8 interleaved-zb",
        "pipelining K=2 M=8 zbv",
    ]
    # Its backwards share one thread on CPUs, so each of its steps takes long.
    once = ["torchgpipe K=2 M=8", "torchgpipe K=2 M=8 checkpoint"]
    return all_ | peers(short, once=once)


PIPELINED = [
    "pipelining K=2 M=8 gpipe",
    "pipelining K=2 M=8 1f1b",
    "pipelining K=2 M=8 interleaved-zb",
    "pipelining K=2 M=8 zbv",
    "torchgpipe K=2 M=8",
]
PLAIN = [f"torch M={m} threads={threads}" for m in [1, 8] for threads in [1, 2]] + PIPELINED
CHECKPOINTED = [
    "torch M=8 threads=1 checkpoint",
    "torch M=8 threads=2 checkpoint",
    "pipelining K=2 M=8 gpipe checkpoint",
    "pipelining K=2 M=8 1f1b checkpoint",
    "torchgpipe K=2 M=8 checkpoint",
]
SELECTIVE = [
    "torch M=8 threads=2 checkpoint selective",
    "pipelining K=2 M=8 1f1b checkpoint selective",
]
RECOMPUTING = CHECKPOINTED + SELECTIVE

# Against the peers, by what is recomputed.
PEERS = [
    Comparison(f"{SPLIT} never", "every peer that recomputes nothing", PLAIN, 1.1),
    Comparison(f"{OURS} never", "every peer that recomputes nothing", PLAIN, 1.1),
    Comparison(f"{SPLIT} never", "pipelined peers that recompute nothing", PIPELINED, 1.1),
    Comparison(f"{SPLIT} never aten", "every peer that recomputes nothing", PLAIN, 1.1),
    Comparison(f"{OURS} never aten", "every peer that recomputes nothing", PLAIN, 1.1),
    Comparison(f"{SPLIT} selective", "every peer that recomputes", RECOMPUTING, 1.15),
    Comparison(f"{OURS} selective", "every peer that recomputes", RECOMPUTING, 1.15),
    Comparison(
        f"{OURS} selective", "peers that recompute selectively", SELECTIVE, 1.15, is_brief=False
    ),
    Comparison(
        f"{OURS} selective aten", "every peer that recomputes", RECOMPUTING, 1.15, is_brief=False
    ),
    Comparison(f"{OURS} unless-adjacent", "peers that recompute everything", CHECKPOINTED, 1.15),
    Comparison(f"{OURS} always", "peers that recompute everything", CHECKPOINTED, 1.15),
]

# What recomputing costs on one device.
ALONE = [
    Comparison(ours, "", [base], at_least, base, is_brief=ours.startswith("gpipe"))
    for ours, base, at_least in [
        ("gpipe K=1 M=8 gpipe selective", ONE, 0.85),
        ("gpipe K=1 M=2 gpipe selective", ONE, 0.95),
        ("gpipe K=1 M=8 gpipe always", ONE, 0.85),
        ("gpipe K=1 M=8 gpipe always", ACCUMULATED, 0.85),
        ("gpipe K=1 M=8 gpipe keep:4", ACCUMULATED, 0.95),
        ("gpipe K=1 M=8 gpipe selective", ACCUMULATED, 0.95),
        ("torch M=8 threads=1 checkpoint", "torch M=8 threads=1", None),
    ]
]

EFFICIENCY = Efficiency("gpipe K=2", 0.97)

NOTES = [
    "PyTorch on two threads shares every matrix product between both cores, so it has no bubble."
    " It needs the whole network on one device.",
    "`always` repeats every forward. `selective` keeps the outputs of matrix products and"
    " recomputes the rest, which is little of a transformer's work.",
    "`aten` computes with libtorch's own kernels, as the peers do. On AMD's processors with"
    " AVX-512, these use AVX2 alone, and gpipe takes oneDNN's. PyTorch has no switch for that.",
    "The pipelined peers keep the input of every block when they recompute. A stage of gpipe keeps"
    " only its own input.",
]

ABLATIONS = [
    Ablation(
        "the processor's fastest matrix products, not libtorch's choice",
        f"{OURS} never",
        f"{OURS} never aten",
    ),
    Ablation(
        "stages cut by cost, not by number of layers", f"{OURS} never", f"{OURS} never uniform"
    ),
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
    Ablation("nothing: the same run again", f"{OURS} never", f"{OURS} never again"),
    Ablation("one thread for each stage, not two", f"{OURS} never", f"{OURS} never, two threads"),
    Ablation("freed memory is kept", f"{OURS} never", f"{OURS} never, freed memory given back"),
]

WORKLOAD = Workload(
    name="gpt",
    jobs=jobs(),
    peer_steps=STEPS,
    step_ms=lambda found: median(found["step_ms"][WARM_UP:]),
    about="a decoder-only transformer of 30 million parameters (vocabulary 8192, d_model 512,"
    " 8 heads, feed-forward 2048, 8 blocks, untied), 32 x 128 tokens, Adam, float32",
    brief="a transformer of 30 million parameters",
)
