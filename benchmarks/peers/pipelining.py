#!/usr/bin/env python3
"""torch.distributed.pipelining: the `gpt` step on K processes of one thread each, Gloo over loopback.

Usage: pipelining.py FOLDER [--stages K] [--micro-batches M] [--schedule gpipe|1f1b] [--checkpoint] [--steps N]
                     [--cut I[,J..]] [--memory]

FOLDER holds the gpt.safetensors that the example `gpt_step` writes. Prints one line of JSON. `--cut` gives the
first layer of each later stage in [embedding, 0.attention, 0.mlp, .., head], counted from 0. `--checkpoint`
recomputes each block. A step lasts from a barrier to the end of the last stage's optimizer. The processes are
started here, and ended by their own id when one fails or the time is over. `--memory` counts each stage's bytes of
tensors, and then times mean nothing.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from model import GPT, Decoder, PeakMemory, gpt_file, layers, loss_sum, set_up

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MEASURED_CUT = {2: [10]}  # CPU ms per step of the stages: 9: 3870 5040, 10: 4120 4557, 11: 5125 4376
WAIT = timedelta(seconds=300)  # longest silence of a peer
TOTAL_S = 1800  # longest run


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--cut", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def balanced(stages):
    """The cut whose most expensive stage has the fewest operations."""
    d, h, length = GPT["features"], GPT["hidden"], GPT["positions"]
    costs = [0, *[8 * d * d + 4 * length * d, 4 * d * h] * GPT["blocks"], 2 * d * GPT["vocabulary"]]

    def worst(cut):
        ends = [0, *cut, len(costs)]
        return max(sum(costs[a:b]) for a, b in zip(ends, ends[1:]))

    return list(min(itertools.combinations(range(1, len(costs)), stages - 1), key=worst))


def train(options, file):
    """All steps of this process's stage: losses (of the last stage), and when each step began and ended."""
    rank, stages, micro_batches = options.rank, options.stages, options.micro_batches
    first, last = rank == 0, rank == stages - 1
    inputs, targets = file["inputs"], file["targets"]
    ends = [0, *options.cut, 2 + 2 * GPT["blocks"]]
    model = Decoder(layers(**GPT)[ends[rank]:ends[rank + 1]], options.checkpoint)
    model.load(file)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    samples, left = divmod(inputs.shape[0], micro_batches)
    if left:
        raise SystemExit(f"pipelining: {micro_batches} micro-batches do not divide {inputs.shape[0]} samples")
    length = inputs.shape[1]
    boundary = torch.empty(samples, length, GPT["features"], device="meta")
    tokens = torch.empty(samples, length, dtype=torch.int64, device="meta")
    logits = torch.empty(samples, length, GPT["vocabulary"], device="meta")
    placed = PipelineStage(model, rank, stages, torch.device("cpu"), input_args=(tokens if first else boundary,),
                           output_args=(logits if last else boundary,))
    # The loss has the count of the whole mini-batch in it, so micro-batches' gradients are summed as they are.
    schedule = SCHEDULES[options.schedule](placed, micro_batches, scale_grads=False,
                                           loss_fn=lambda output, target: loss_sum(output, target) / targets.numel())
    spans, totals = [], []
    for _ in range(options.steps):
        dist.barrier()
        start = time.perf_counter()  # one clock for all processes of a machine
        optimizer.zero_grad(set_to_none=True)
        losses = []
        schedule.step(*[inputs] * first, **({"target": targets, "losses": losses} if last else {}),
                      return_outputs=False)
        optimizer.step()
        spans.append([start, time.perf_counter()])
        totals.append(sum(loss.item() for loss in losses))
    return totals, spans


def stage(options):
    """One process."""
    set_up(1)
    store = dist.TCPStore("127.0.0.1", options.port, options.stages, is_master=False, timeout=WAIT)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.stages, timeout=WAIT)
    file = gpt_file(options.folder)
    with PeakMemory(options.memory) as peak:
        totals, spans = train(options, file)
    gathered = [None] * options.stages
    dist.all_gather_object(gathered, (totals, spans, peak.bytes))
    if options.rank == 0:
        times = [1e3 * (max(end for _, end in step) - min(start for start, _ in step))
                 for step in zip(*[spans for _, spans, _ in gathered])]
        print(json.dumps({"loss": gathered[-1][0], "step_ms": times, "threads": options.stages, "dtype": "float32",
                          "cut": options.cut, "peak_tensor_bytes": [peak for *_, peak in gathered]}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def start(options):
    """Starts the processes and waits for all, or for the first that fails."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # takes a free port
    cut = ",".join(map(str, options.cut))
    command = [sys.executable, *sys.argv, "--cut", cut, "--port", str(store.port), "--rank"]
    environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    children = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(options.stages)]
    deadline = time.monotonic() + TOTAL_S
    try:
        while any(child.poll() is None for child in children):
            failed = [rank for rank, child in enumerate(children) if child.poll()]
            if failed:
                sys.exit(f"pipelining: the process of stage {failed[0]} failed: see its message above")
            if time.monotonic() > deadline:
                sys.exit(f"pipelining: not done after {TOTAL_S} s: use fewer --steps")
            time.sleep(0.1)
        if any(child.returncode for child in children):
            sys.exit("pipelining: a stage's process failed: see its message above")
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()


def main():
    options = parse()
    options.cut = options.cut or MEASURED_CUT.get(options.stages) or balanced(options.stages)
    ends = [0, *options.cut, 2 + 2 * GPT["blocks"]]
    if len(options.cut) != options.stages - 1 or sorted(set(ends)) != ends:
        sys.exit(f"pipelining: --cut needs {options.stages - 1} ascending numbers from 1 to {ends[-1] - 1}")
    if options.rank is None:
        start(options)
    else:
        stage(options)


if __name__ == "__main__":
    main()
