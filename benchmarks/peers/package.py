#!/usr/bin/env python3
"""gpipe's Python package: the network of torchgpipe_peer.py through gpipe.Pipeline.

Usage: package.py FOLDER [--workload gpt|amoeba] [--stages K] [--micro-batches M] [--steps N]
                  [--cut I[,J..]] [--schedule NAME] [--remat POLICY] [--micro-batches M]

It needs an environment with the package (make python). FOLDER holds the safetensors file that the
workload's example writes. The program prints one line of JSON. Without --cut it cuts by the times
that it measures.
"""

import json
import time

import gpipe
from torch import nn

from common import Network, set_up
from model import loss_sum
from joined import Joined
from workloads import WORKLOADS, add_stage_arguments, arguments, file_of


def main():
    parser = arguments("gpipe's Python package.")
    add_stage_arguments(parser)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--remat", default="never")
    options = parser.parse_args()
    set_up(1)
    file, workload = file_of(options), WORKLOADS[options.workload]
    named = workload.layers(file)
    Network(named).load(file)
    model = nn.Sequential(*[Joined(layer) for _, layer in named])
    ends = options.cut and [0, *options.cut, len(named)]
    inputs, targets = file["inputs"], file["targets"]
    with gpipe.Pipeline(model, inputs, stages=options.stages, micro_batches=options.micro_batches,
                        schedule=options.schedule, remat=options.remat,
                        balance=ends and [b - a for a, b in zip(ends, ends[1:])],
                        loss=gpipe.Loss(loss_sum, lambda target: target.numel()),
                        optimizer=workload.optimizer(model.parameters())) as pipe:
        times, losses, bubbles = [], [], []
        for _ in range(options.steps):
            start = time.perf_counter()
            report = pipe.train_step(inputs, targets)
            times.append(1e3 * (time.perf_counter() - start))
            losses.append(report.loss)
            bubbles.append(report.bubble)
        print(json.dumps({"loss": losses, "step_ms": times, "threads": options.stages,
                          "dtype": "float32", "balance": pipe.balance, "bubble": bubbles}))


if __name__ == "__main__":
    main()
