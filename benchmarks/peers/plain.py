#!/usr/bin/env python3
"""Plain PyTorch, unpipelined: a step in a loop over the micro-batches, as one would write it for speed.

Usage: plain.py FOLDER [--workload gpt|amoeba] [--micro-batches M] [--threads T] [--steps N]
                [--checkpoint [parts|stage|selective]] [--channels-last] [--dtype float32|bfloat16] [--memory]

FOLDER holds the safetensors file that the workload's example (`gpt_step`, `amoeba_step`) writes. Prints one line of JSON.
The loss is the sum over targets divided by the targets of the mini-batch, as in gpipe. `--checkpoint` recomputes each block
or cell, (`stage`) all layers at once, or (`selective`) all but what products, convolutions and attention gave; `bfloat16` is autocast over float32 weights. `--memory` counts bytes of tensors,
and then times mean nothing.

Tried for `gpt` and left out: torch.compile and one autocast around the whole step, since CPU time was the same within
noise; huge pages, which brought nothing clear in noisy step times.
"""

import json
import time

import torch

from common import PeakMemory, set_up
from model import loss_sum
from workloads import WORKLOADS, add_network_arguments, arguments, build, file_of


def train(options, file):
    """(losses, step times in ms)"""
    workload = WORKLOADS[options.workload]
    network = build(options, workload.layers(file), file)
    optimizer = workload.optimizer(network.parameters())
    inputs, targets = file["inputs"], file["targets"]
    pairs = list(zip(inputs.tensor_split(options.micro_batches), targets.tensor_split(options.micro_batches)))
    times, losses = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for x, y in pairs:
            with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
                loss = loss_sum(network(x), y) / targets.numel()
            loss.backward()
            total += loss.item()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(total)
    return losses, times


def main():
    parser = arguments("Plain PyTorch.")
    add_network_arguments(parser)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    set_up(options.threads)
    file = file_of(options)
    with PeakMemory(options.memory) as peak:
        losses, times = train(options, file)
    print(json.dumps({"loss": losses, "step_ms": times, "threads": options.threads, "dtype": options.dtype,
                      "peak_tensor_bytes": peak.bytes}))


if __name__ == "__main__":
    main()
