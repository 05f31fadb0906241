#!/usr/bin/env python3
"""torch.distributed.pipelining: a step on K processes of one thread each, Gloo over loopback.

Usage: pipelining.py FOLDER [--workload gpt|amoeba] [--stages K] [--micro-batches M]
                     [--schedule NAME] [--steps N] [--cut I[,J..]]
                     [--checkpoint [parts|stage|selective]] [--channels-last] [--memory]

FOLDER holds the safetensors file that the workload's example (`gpt_step`, `amoeba_step`) writes.
The program prints one line of JSON.

`--cut` gives the first layer of each later stage, counted from 0 (gpt: [embedding, 0.attention,
0.mlp, .., head]; amoeba: [stem, stem.0, stem.1, 0, .., classifier]). `--schedule` is `gpipe`,
`1f1b`, or one of two stages in each process: `interleaved`, `breadth-first`, or, with split
backwards, `interleaved-zb` and `zbv`. `--checkpoint` recomputes each block or cell, (`stage`) a
whole stage, or (`selective`) all but what products, convolutions and attention gave. `--memory`
counts each stage's bytes of tensors, and then times mean nothing.

A step lasts from a barrier to the end of the last stage's optimizer. This program starts the
processes. It ends them by their own id when one fails or the time is over.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.pipelining import (PipelineStage, Schedule1F1B, ScheduleGPipe,
                                          ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble,
                                          ScheduleLoopedBFS, ScheduleZBVZeroBubble)

from common import PeakMemory, as_tuple, set_up
from model import loss_sum
from workloads import (WORKLOADS, add_network_arguments, add_stage_arguments, arguments, build,
                       cut_or_best, ends_of, file_of)

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B,
             "interleaved": ScheduleInterleaved1F1B, "breadth-first": ScheduleLoopedBFS,
             "interleaved-zb": ScheduleInterleavedZeroBubble, "zbv": ScheduleZBVZeroBubble}
WAIT = timedelta(seconds=300)  # longest silence of a peer
TOTAL_S = 1800  # longest run


def parse():
    parser = arguments("torch.distributed.pipelining.")
    add_network_arguments(parser)
    add_stage_arguments(parser)
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def stages_of(options, rank):
    """The stages of a process, and how many there are of all."""
    count = options.stages
    if options.schedule in ("interleaved", "interleaved-zb", "breadth-first"):
        return [rank, rank + count], 2 * count
    if options.schedule == "zbv":
        # Down and up again, so that the last process has the two in the middle.
        return [rank, 2 * count - 1 - rank], 2 * count
    return [rank], count


def boundaries(options, layers, file, samples):
    """What goes into each layer for one micro-batch, and what comes out of the last: shapes without
    values."""
    inputs = file["inputs"]
    values = (torch.empty(samples, *inputs.shape[1:], dtype=inputs.dtype, device="meta"),)
    found = [values]
    with torch.no_grad():
        for _, layer in layers:
            values = as_tuple(layer.to("meta")(*values))
            sent = [value.permute(0, 2, 3, 1) if options.channels_last and value.dim() == 4
                    else value for value in values]
            found.append(tuple(torch.empty(value.shape, dtype=value.dtype, device="meta")
                               for value in sent))
    return found


def train(options, file):
    """All steps of this process's stages: losses (of the last stage); when each began and ended,
    and its CPU seconds."""
    micro_batches = options.micro_batches
    own, count = stages_of(options, options.rank)
    first, last = 0 in own, count - 1 in own
    inputs, targets = file["inputs"], file["targets"]
    workload = WORKLOADS[options.workload]
    layers = workload.layers(file)
    ends = ends_of(options, count, len(layers))
    layers = [layers[ends[number]:ends[number + 1]] for number in own]  # no other weights are kept
    samples, left = divmod(inputs.shape[0], micro_batches)
    if left:
        raise SystemExit(f"pipelining: {micro_batches} micro-batches do not divide"
                         f" {inputs.shape[0]} samples")
    shapes = boundaries(options, workload.layers(file), file, samples)
    placed, parameters = [], []
    for number, part in zip(own, layers):
        start, end = ends[number], ends[number + 1]
        network = build(options, part, file, number == 0, number == count - 1)
        parameters += network.parameters()
        placed.append(PipelineStage(network, number, count, torch.device("cpu"),
                                    input_args=shapes[start], output_args=shapes[end]))
        if options.schedule == "zbv":
            # The hello to neighbours by which connections are made: ZBV's middle stages are
            # neighbours in one process, to which Gloo has none. They are made at the first message
            # all the same.
            placed[-1]._get_init_p2p_neighbors_ops = lambda: []
    optimizer = workload.optimizer(parameters)
    # The loss has the count of the whole mini-batch in it, so micro-batches' gradients are summed
    # as they are.
    schedule = SCHEDULES[options.schedule](
        placed if count > options.stages else placed[0], micro_batches, scale_grads=False,
        loss_fn=lambda output, target: loss_sum(output, target) / targets.numel())
    spans, totals = [], []
    for _ in range(options.steps):
        dist.barrier()
        # One clock for all processes of a machine.
        start, used = time.perf_counter(), time.process_time()
        optimizer.zero_grad(set_to_none=True)
        losses = []
        schedule.step(*[inputs] * first, **({"target": targets, "losses": losses} if last else {}),
                      return_outputs=False)
        optimizer.step()
        spans.append([start, time.perf_counter(), time.process_time() - used])
        totals.append(sum(loss.item() for loss in losses))
    return totals, spans


def stage(options):
    """One process."""
    set_up(1)
    store = dist.TCPStore("127.0.0.1", options.port, options.stages, is_master=False, timeout=WAIT)
    dist.init_process_group("gloo", store=store, rank=options.rank, world_size=options.stages,
                            timeout=WAIT)
    file = file_of(options)
    with PeakMemory(options.memory) as peak:
        totals, spans = train(options, file)
    gathered = [None] * options.stages
    dist.all_gather_object(gathered, (totals, spans, peak.bytes))
    if options.rank == 0:
        steps = list(zip(*[spans for _, spans, _ in gathered]))
        times = [1e3 * (max(end for _, end, _ in step) - min(start for start, *_ in step))
                 for step in steps]
        cpu = [[1e3 * used for *_, used in step] for step in steps]
        losses = next(totals for totals, *_ in gathered if any(totals))
        print(json.dumps({"loss": losses, "step_ms": times, "cpu_ms": cpu,
                          "threads": options.stages, "dtype": "float32", "cut": options.cut,
                          "channels_last": options.channels_last,
                          "peak_tensor_bytes": [peak for *_, peak in gathered]}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def start(options):
    """Starts the processes and waits for all, or for the first that fails."""
    # With port 0, the store takes a free one.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    cut = ",".join(map(str, options.cut))
    command = [sys.executable, *sys.argv, *(["--cut", cut] if cut else []),
               "--port", str(store.port), "--rank"]
    environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1",
                       GLOO_SOCKET_IFNAME="lo")
    children = [subprocess.Popen([*command, str(rank)], env=environment)
                for rank in range(options.stages)]
    deadline = time.monotonic() + TOTAL_S
    try:
        while any(child.poll() is None for child in children):
            failed = [rank for rank, child in enumerate(children) if child.poll()]
            if failed:
                sys.exit(f"pipelining: the process of stage {failed[0]} failed:"
                         " see its message above")
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
    options.cut = cut_or_best(options, stages_of(options, 0)[1])
    if options.rank is None:
        start(options)
    else:
        stage(options)


if __name__ == "__main__":
    main()
