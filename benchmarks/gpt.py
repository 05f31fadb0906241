"""The workload `gpt`: 30 million parameters (vocabulary 8192, d_model 512, 8 heads, feed-forward 2048, 8 blocks, untied), 32 x 128
tokens, Adam, float32.

The second step is measured, of all programs: the third of those that the simulator predicts is for that alone.
"""

from rounds import Workload, gpipe, peers
from targets import Ablation, Efficiency, Ratio

OURS = "gpipe K=2 M=8 1f1b"


def jobs():
    """name -> job"""
    all_ = {
        "gpipe K=1 M=1 never": gpipe(stages=1, micro_batches=1, remat="never", steps=2, short=True),
        "gpipe K=1 M=8 never": gpipe(stages=1, remat="never", steps=2, short=True),
        "gpipe K=1 M=8 gpipe always": gpipe(stages=1, remat="always", schedule="gpipe", steps=2, short=True),
        "gpipe K=1 M=8 gpipe selective": gpipe(stages=1, remat="selective", schedule="gpipe", steps=2, short=True),
        "gpipe K=1 M=2 gpipe selective": gpipe(stages=1, micro_batches=2, remat="selective", schedule="gpipe", steps=2, short=True),
        "gpipe K=1 M=8 gpipe never": gpipe(stages=1, remat="never", schedule="gpipe", steps=2),
        "gpipe K=1 M=8 gpipe keep:4": gpipe(stages=1, remat="keep:4", schedule="gpipe", steps=2),
        "gpipe K=1 M=8 never aten": gpipe(stages=1, remat="never", steps=2, kernels="aten"),
    }
    for remat in ["never", "always", "unless-adjacent", "selective"]:
        all_[f"{OURS} {remat}"] = gpipe(remat=remat, short=remat != "unless-adjacent")
    for remat in ["never", "selective"]:
        all_[f"{OURS} {remat} aten"] = gpipe(remat=remat, kernels="aten", steps=2, short=True)
    for remat in ["never", "always"]:
        all_[f"gpipe K=2 M=8 gpipe {remat}"] = gpipe(remat=remat, schedule="gpipe")
    all_[f"{OURS} never uniform"] = gpipe(remat="never", balance="uniform", steps=2)
    all_[f"{OURS} never, freed memory given back"] = gpipe(remat="never", keep_freed="false", steps=2)
    all_["gpipe K=2 M=1 1f1b never"] = gpipe(remat="never", micro_batches=1, steps=2)
    short = ["torch M=1 threads=1", "torch M=1 threads=2", "torch M=8 threads=2 checkpoint", "pipelining K=2 M=8 1f1b",
             "pipelining K=2 M=8 1f1b checkpoint"]
    return all_ | peers(short)


PLAIN = ["torch M=1 threads=1", "torch M=1 threads=2", "torch M=8 threads=1", "torch M=8 threads=2", "pipelining K=2 M=8 gpipe",
         "pipelining K=2 M=8 1f1b", "torchgpipe K=2 M=8"]
CHECKPOINTED = ["torch M=8 threads=1 checkpoint", "torch M=8 threads=2 checkpoint", "pipelining K=2 M=8 gpipe checkpoint",
                "pipelining K=2 M=8 1f1b checkpoint", "torchgpipe K=2 M=8 checkpoint"]

TARGETS = [
    Ratio("with re-materialization, at least 1.15x every peer that recomputes", f"{OURS} selective", CHECKPOINTED, 1.15),
    Ratio("... recomputing products, too, where a backward does not follow its forward", f"{OURS} unless-adjacent", CHECKPOINTED, 1.15),
    Ratio("... recomputing always", f"{OURS} always", CHECKPOINTED, 1.15),
    Ratio("... selective, with the peers' kernels: the schedule alone", f"{OURS} selective aten", CHECKPOINTED, 1.15),
    Ratio("without, at least 1.1x every peer", f"{OURS} never", PLAIN, 1.1),
    Ratio("... with the peers' kernels: the schedule alone", f"{OURS} never aten", PLAIN, 1.1),
    Efficiency("efficiency at least 0.97 of the simulated one", "gpipe K=2 M=8", 0.97),
    Ratio("one device, re-materialized (GPipe's schedule, M = 8), at least 0.85x plain", "gpipe K=1 M=8 gpipe always",
          ["gpipe K=1 M=1 never"], 0.85),
    Ratio("... of plain with as many micro-batches, which it recomputes", "gpipe K=1 M=8 gpipe always", ["gpipe K=1 M=8 never"], 0.85),
    Ratio("... under a budget of half the activations (`selective`; GPipe's schedule), at least 0.95x plain", "gpipe K=1 M=8 gpipe selective",
          ["gpipe K=1 M=1 never"], 0.95),
    Ratio("... in two micro-batches", "gpipe K=1 M=2 gpipe selective", ["gpipe K=1 M=1 never"], 0.95),
    Ratio("... of plain with as many micro-batches (8), whose activations it halves", "gpipe K=1 M=8 gpipe selective",
          ["gpipe K=1 M=8 gpipe never"], 0.95),
    Ratio("... half of the micro-batches kept whole (`keep:4`), of plain with as many", "gpipe K=1 M=8 gpipe keep:4",
          ["gpipe K=1 M=8 gpipe never"], 0.95),
    Ratio("(PyTorch's checkpointing against PyTorch's accumulation)", "torch M=8 threads=1 checkpoint", ["torch M=8 threads=1"], None),
]

ABLATIONS = [
    Ablation("the processor's fastest products, not libtorch's choice", f"{OURS} never", f"{OURS} never aten"),
    Ablation("cut by costs, not by the number of layers", f"{OURS} never", f"{OURS} never uniform"),
    Ablation("micro-batches: 8, not 1", f"{OURS} never", "gpipe K=2 M=1 1f1b never"),
    Ablation("1F1B, not GPipe's schedule", f"{OURS} never", "gpipe K=2 M=8 gpipe never"),
    Ablation("recomputing only where a backward does not follow its forward (and a cut that knows it)", f"{OURS} unless-adjacent",
             f"{OURS} always"),
    Ablation("finding products instead of computing them again (one device, GPipe's schedule)", "gpipe K=1 M=8 gpipe selective",
             "gpipe K=1 M=8 gpipe always"),
    Ablation("keeping freed memory", f"{OURS} never", f"{OURS} never, freed memory given back"),
]

WORKLOAD = Workload(name="gpt", jobs=jobs(), peer_steps=2, step_ms=lambda found: found["step_ms"][1], step_is="second step")
