#!/usr/bin/env python3
"""torchgpipe 0.0.7 (2020): a step on K CPU "devices", each with its worker thread in one process.

Usage: torchgpipe_peer.py FOLDER [--workload gpt|amoeba] [--stages K] [--micro-batches M]
                          [--steps N] [--cut I[,J..]] [--checkpoint always|except_last|never]
                          [--channels-last]

It needs `pip install --no-deps torchgpipe==0.0.7`. FOLDER holds the safetensors file that the
workload's example writes. The program prints one line of JSON. `--cut` is as in pipelining.py.

The loss is that of the mini-batch: torchgpipe gathers the micro-batches' outputs and has one
backward. On CPUs only its forwards overlap. It leaves the order of backwards to autograd, which has
one thread for all CPU "devices" (on GPUs it has one for each).

The script has this name because a script torchgpipe.py would be imported in the library's place.
"""

import json
import time

import torch
from torch import nn
from torchgpipe import GPipe

from common import Network, set_up
from model import loss_sum
from joined import Joined
from workloads import WORKLOADS, add_stage_arguments, arguments, ends_of, file_of


def main():
    parser = arguments("torchgpipe 0.0.7.")
    add_stage_arguments(parser)
    parser.add_argument("--checkpoint", choices=["always", "except_last", "never"],
                        default="except_last")
    parser.add_argument("--channels-last", action="store_true")
    options = parser.parse_args()
    set_up(1)
    file, workload = file_of(options), WORKLOADS[options.workload]
    named = workload.layers(file)
    Network(named).load(file)
    ends = ends_of(options, options.stages, len(named))
    model = GPipe(nn.Sequential(*[Joined(layer) for _, layer in named]),
                  [b - a for a, b in zip(ends, ends[1:])], devices=["cpu"] * options.stages,
                  chunks=options.micro_batches, checkpoint=options.checkpoint)
    optimizer = workload.optimizer(model.parameters())
    inputs, targets = file["inputs"], file["targets"]
    if options.channels_last:
        # The stages are in one process, and what they hand on keeps its layout.
        model, inputs = (model.to(memory_format=torch.channels_last),
                         inputs.contiguous(memory_format=torch.channels_last))
    times, losses = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_sum(model(inputs), targets) / targets.numel()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
    print(json.dumps({"loss": losses, "step_ms": times, "threads": options.stages,
                      "dtype": "float32", "cut": ends[1:-1]}))


if __name__ == "__main__":
    main()
