#!/usr/bin/env python3
"""torchgpipe 0.0.7 (2020): the `gpt` step on K CPU "devices", each with its worker thread in one process.

Usage: torchgpipe_peer.py FOLDER [--stages K] [--micro-batches M] [--checkpoint always|except_last|never]
                          [--steps N] [--cut I[,J..]]

Needs `pip install --no-deps torchgpipe==0.0.7`. FOLDER holds the gpt.safetensors that the example `gpt_step`
writes. Prints one line of JSON. `--cut` as in pipelining.py. The loss is that of the mini-batch: torchgpipe
gathers the micro-batches' outputs and has one backward. On CPUs only its forwards overlap: it leaves the order of
backwards to autograd, which has one thread for all CPU "devices" (on GPUs it has one for each). Named so because a
script torchgpipe.py would be imported in the library's place.
"""

import argparse
import json
import time

import torch
from torch import nn
from torchgpipe import GPipe

from model import GPT, gpt_file, layers, loss_sum, set_up
from pipelining import MEASURED_CUT, balanced


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--checkpoint", choices=["always", "except_last", "never"], default="except_last")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cut", type=lambda text: [int(part) for part in text.split(",")])
    options = parser.parse_args()
    set_up(1)
    file = gpt_file(options.folder)
    named = layers(**GPT)
    cut = options.cut or MEASURED_CUT.get(options.stages) or balanced(options.stages)
    ends = [0, *cut, len(named)]
    with torch.no_grad():
        for name, layer in named:
            for own, parameter in layer.named_parameters():
                parameter.copy_(file[f"{name}.{own}"])
    model = GPipe(nn.Sequential(*[layer for _, layer in named]), [b - a for a, b in zip(ends, ends[1:])],
                  devices=["cpu"] * options.stages, chunks=options.micro_batches, checkpoint=options.checkpoint)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = file["inputs"], file["targets"]
    times, losses = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = loss_sum(model(inputs), targets) / targets.numel()
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
    print(json.dumps({"loss": losses, "step_ms": times, "threads": options.stages, "dtype": "float32", "cut": cut}))


if __name__ == "__main__":
    main()
