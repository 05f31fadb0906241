#!/usr/bin/env python3
"""Plain PyTorch, unpipelined: a step in a loop over the micro-batches, as one would write it for
speed.

Usage: plain.py FOLDER [--workload gpt|amoeba] [--micro-batches M] [--threads T] [--steps N]
                [--checkpoint [parts|stage|selective]] [--channels-last]
                [--dtype float32|bfloat16] [--memory] [--device cpu|cuda:0] [--compile]
                [--warm-up N]

FOLDER holds the safetensors file that the workload's example (`gpt_step`, `amoeba_step`) writes.
The program prints one line of JSON. The loss is the sum over targets divided by the targets of the
mini-batch, as in gpipe.

`--checkpoint` recomputes each block or cell, (`stage`) all layers at once, or (`selective`) all but
what products, convolutions and attention gave. `bfloat16` is autocast over float32 weights.
`--memory` counts bytes of tensors, and then times mean nothing.

On a GPU the mini-batch starts on the CPU, as gpipe's does, and a step's time ends when its kernels
have. The peak bytes are those of PyTorch's allocator from the step after `--warm-up` steps on. TF32
is off. `--compile` compiles forward and backward.

Tried for `gpt` on a CPU and left out: torch.compile and one autocast around the whole step, since
CPU time was the same within noise; huge pages, which brought nothing clear in noisy step times.
"""

import json
import time

import torch

from common import PeakMemory, set_up, synchronize
from model import loss_sum
from workloads import WORKLOADS, add_network_arguments, arguments, build, file_of


def train(options, file):
    """(losses, step times in ms)"""
    workload, device = WORKLOADS[options.workload], torch.device(options.device)
    network = build(options, workload.layers(file), file).to(device)
    optimizer = workload.optimizer(network.parameters())
    forward = torch.compile(network) if options.compile else network
    inputs, targets = file["inputs"], file["targets"]
    count = targets.numel()
    times, losses = [], []
    for step in range(options.steps):
        if step == options.warm_up and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        synchronize(device)
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        summed = []
        split = lambda whole: whole.to(device).tensor_split(options.micro_batches)
        parts = [split(inputs), split(targets)]
        for x, y in zip(*parts):
            with torch.autocast(device.type, torch.bfloat16, enabled=options.dtype == "bfloat16"):
                loss = loss_sum(forward(x), y) / count
            loss.backward()
            # Read after the update: that makes the CPU wait for the GPU.
            summed.append(loss.detach())
        optimizer.step()
        losses.append(sum(part.item() for part in summed))
        synchronize(device)
        times.append(1e3 * (time.perf_counter() - start))
    return losses, times


def main():
    parser = arguments("Plain PyTorch.")
    add_network_arguments(parser)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--warm-up", type=int, default=0)
    options = parser.parse_args()
    set_up(options.threads)
    file = file_of(options)
    with PeakMemory(options.memory) as peak:
        losses, times = train(options, file)
    on_gpu = options.device.startswith("cuda")
    held = torch.cuda.max_memory_allocated(options.device) if on_gpu else peak.bytes
    print(json.dumps({"loss": losses, "step_ms": times, "threads": options.threads,
                      "dtype": options.dtype, "peak_tensor_bytes": held}))


if __name__ == "__main__":
    main()
