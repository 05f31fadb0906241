"""What the peers train: layers, update rule and a good cut for each workload. Also the arguments
that they share."""

import argparse
import os
from dataclasses import dataclass
from typing import Callable

import torch

import images
import model
from common import CHECKPOINTS, ChannelsLast, Network, read_safetensors


@dataclass(frozen=True)
class Workload:
    layers: Callable  # from a file's tensors: (name, layer) in order
    optimizer: Callable  # of parameters
    # The key is a number of stages, or a schedule that has a cut of its own. The value is the
    # fastest cut of those that were measured, or the likely one.
    cuts: dict


WORKLOADS = {
    "gpt": Workload(
        layers=lambda file: model.layers(**model.sizes_of(file)),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-4, fused=True),
        # CPU ms per step of two stages: 9: 3870 5040, 10: 4120 4557, 11: 5125 4376. Of more: by
        # operations. `zbv` has the first stage and the last in one process: 5, 9, 14: 5310 4850; 6,
        # 10, 15: 5000 5250.
        cuts={1: [], 2: [10], 3: [7, 13], 4: [5, 10, 15], "zbv": [6, 10, 15]},
    ),
    "amoeba": Workload(
        layers=images.amoebanet_of,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
        # As above: 4: 240 630, 5: 310 530, 6: 400 480, 7: 480 375, with --channels-last and M = 8.
        # Of four stages, two in each process, ms of steps; interleaved-zb, six cuts: 3, 6, 9: 620
        # to 670, others 590 to 1070; zbv, four: 4, 6, 8: 650 to 710, others 680 to 890.
        cuts={1: [], 2: [6], 4: [3, 6, 9], "zbv": [4, 6, 8]},
    ),
}


def arguments(description):
    """The parser of what every peer takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder")
    parser.add_argument("--workload", choices=WORKLOADS, default="gpt")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    return parser


def add_network_arguments(parser):
    parser.add_argument("--checkpoint", nargs="?", choices=CHECKPOINTS, const="parts")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--memory", action="store_true")


def add_stage_arguments(parser):
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--cut", type=lambda text: [int(part) for part in text.split(",")])


def file_of(options):
    """Weights, inputs and targets as the example wrote them."""
    return read_safetensors(os.path.join(options.folder, f"{options.workload}.safetensors"))


def build(options, layers, file, first=True, last=True):
    """These layers with the file's weights."""
    network = Network(layers, options.checkpoint)
    network.load(file)
    return ChannelsLast(network, first, last) if options.channels_last else network


def cut_or_best(options, stages):
    cuts = WORKLOADS[options.workload].cuts
    cut = options.cut or cuts.get(getattr(options, "schedule", None), cuts.get(stages))
    if cut is None:
        raise SystemExit(f"no cut is known for {options.workload} on {stages} stages: give --cut")
    return cut


def ends_of(options, stages, layers):
    """Where the stages of so many layers begin and end."""
    ends = [0, *cut_or_best(options, stages), layers]
    if len(ends) != stages + 1 or sorted(set(ends)) != ends:
        raise SystemExit(f"--cut needs {stages - 1} ascending numbers from 1 to {layers - 1}")
    return ends
