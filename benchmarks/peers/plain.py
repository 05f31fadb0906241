#!/usr/bin/env python3
"""Plain PyTorch, unpipelined: the `gpt` step in a loop over the micro-batches, as one would write it for speed.

Usage: plain.py FOLDER [--micro-batches M] [--threads T] [--steps N] [--checkpoint] [--dtype float32|bfloat16]
                [--memory]

FOLDER holds the gpt.safetensors that the example `gpt_step` writes. Prints one line of JSON. The loss is the
sum over tokens divided by the tokens of the mini-batch, as in gpipe. `--checkpoint` recomputes each block;
`bfloat16` is autocast over float32 weights. `--memory` counts bytes of tensors, and then times mean nothing.

Tried and left out: torch.compile and one autocast around the whole step, since CPU time was the same within noise;
huge pages, which brought nothing clear in noisy step times.
"""

import argparse
import json
import time

import torch

from model import GPT, Decoder, PeakMemory, gpt_file, layers, loss_sum, set_up


def train(options, file):
    """(losses, step times in ms)"""
    model = Decoder(layers(**GPT), options.checkpoint)
    model.load(file)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    pairs = list(zip(file["inputs"].chunk(options.micro_batches), file["targets"].chunk(options.micro_batches)))
    tokens = file["targets"].numel()
    times, losses = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for x, y in pairs:
            with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
                loss = loss_sum(model(x), y) / tokens
            loss.backward()
            total += loss.item()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(total)
    return losses, times


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--memory", action="store_true")
    options = parser.parse_args()
    set_up(options.threads)
    file = gpt_file(options.folder)
    with PeakMemory(options.memory) as peak:
        losses, times = train(options, file)
    print(json.dumps({"loss": losses, "step_ms": times, "threads": options.threads, "dtype": options.dtype,
                      "peak_tensor_bytes": peak.bytes}))


if __name__ == "__main__":
    main()
