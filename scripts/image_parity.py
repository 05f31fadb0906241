#!/usr/bin/env python3
"""Compares gpipe's image networks with PyTorch: torchvision's ResNet-50, the peers' AmoebaNet-D and
U-Net.

Usage: image_parity.py [--folder DIR] [--only TEXT] [--short] [--prove]
       (make parity; needs torchvision, see pytorch.py)

The driver `image_parity` trains on two stages for three steps, with one micro-batch and with four
of 10 samples. Here PyTorch does the same from gpipe's initial weights. Each micro-batch is computed
for itself, with batch statistics of its own; losses are summed and divided by the mini-batch's
count. Dropout is left out, except U-Net's, whose masks gpipe wrote. The program prints a table.
Where a tensor differs, it prints the name and ends with exit code 1. What is compared:

  loss        of each step
  gradient    of the first step
  running     mean and variance after the first step, with those that numpy computes in float64 from
              what all micro-batches of the mini-batch had given to each batch norm
  parameters  after three steps of PyTorch's own
  output      in evaluation mode, from gpipe's parameters and running statistics

--folder DIR  leave the driver's files there, and take them if they are there (3 GB)
--only TEXT   cases whose name has TEXT in it
--short       of each network the strictest case, and float32 in one micro-batch (CI)
--prove       show that each of some deliberate faults is found
"""

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from unittest.mock import patch

import numpy
import torch
import torch.nn.functional as F
import torchvision
from torch import nn

from parity import ROOT, Findings, distances

sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))
import images  # noqa: E402
from common import Network, read_safetensors  # noqa: E402
from model import loss_sum  # noqa: E402

STEPS = 3
LEARNING_RATE = 1e-3
CASES = [f"{network}-{kind}-{m}" for network in ("resnet", "amoebanet", "unet")
         for kind in ("float64", "float32") for m in (1, 4)]
SHORT = [case for case in CASES if case.endswith(("float64-4", "float32-1"))]
COLUMNS = ["loss", "gradient", "running", "parameters", "output"]

# Norms of differences relative to max(norm, 1e-3 global norm): a gradient that is a small
# difference of large sums, as those of weights before a batch norm are, has the rounding of the
# sums. Losses are relative to themselves.
TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
# After three steps a value as near to 0 as its rounding may have passed a ReLU on one side and not
# on the other: seen to move PyTorch's own float32 by 2.7e-4 from its float64 (AmoebaNet, four
# micro-batches).
FREE_RUN = {"float64": 1e-10, "float32": 1e-3}
# Running statistics are relative to the variance's root, and to the variance.
RUNNING = {"float64": 1e-10, "float32": 1e-6}
# Batch norms over a few values divide by small deviations, and rounding grows from layer to layer
# and step to step. For running statistics, parameters after three steps and losses after the first,
# this many times the distance of PyTorch's float32 from its float64 is allowed (two float32
# computations are at most the sum of their distances apart: 2; twice that for chance).
FREE = 4


class NameMap:
    """Rules of configs/names: `*` stands for any text, as little as it can."""

    def __init__(self, path):
        self.rules = []
        for rule in tomllib.loads(path.read_text())["names"]:
            pattern = "".join("(.*?)" if part == "*" else re.escape(part)
                              for part in re.split(r"(\*)", rule["from"]))
            self.rules.append((re.compile(pattern), rule.get("to")))

    def map(self, name):
        """The parameter's name; None if it is ignored."""
        for pattern, to in self.rules:
            if match := pattern.fullmatch(name):
                texts = iter(match.groups())
                return to and re.sub(r"\*", lambda _: next(texts), to)
        sys.exit(f"image_parity: no rule for {name}")


class Run:
    """PyTorch's network and optimizer of a case, at gpipe's initial weights."""

    def __init__(self, case, file, kind=None):
        self.network_name, precision, micro_batches = case.split("-")
        self.file, self.kind, self.micro_batches = (
            file, getattr(torch, kind or precision), int(micro_batches))
        if self.network_name == "resnet":
            self.network = torchvision.models.resnet50(num_classes=10)
            names = NameMap(ROOT / "configs" / "names" / "torchvision-resnet.toml")
            self.named = {names.map(name): name for name in self.network.state_dict()}
            self.named.pop(None)
            norms = nn.BatchNorm2d
        else:
            layers = (images.unet(3, 2, 8) if self.network_name == "unet"
                      else images.amoebanet(3, 16, 3, 10))
            self.network = Network(layers)
            own = {id(tensor): name
                   for name, tensor in self.network.state_dict(keep_vars=True).items()}
            self.named = {name: own[id(tensor)]
                          for name, tensor in self.network.named(buffers=True).items()}
            norms = images.Norm
        expected = {name.removeprefix("0/parameter/") for name in file
                    if name.startswith("0/parameter/")}
        different = {name for name in expected ^ self.named.keys()
                     if not name.endswith(".running_batches")}
        if different:
            sys.exit(f"image_parity: {case}: names on one side only: {sorted(different)}")
        self.network.to(self.kind)
        self.set(0)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=LEARNING_RATE, momentum=0.9)
        self.seen = {}  # batch norm -> what it got, of each micro-batch
        modules = dict(self.network.named_modules())
        for name, own in self.named.items():
            if name.endswith(".running_mean"):
                module = modules[own.rpartition(".")[0]]
                assert isinstance(module, norms)
                module.register_forward_pre_hook(self.keep(name.removesuffix("running_mean")))

    def keep(self, name):
        def hook(module, values):
            if module.training:
                self.seen.setdefault(name, []).append(values[0].detach().double().numpy().copy())
        return hook

    @torch.no_grad()
    def set(self, step):
        """Takes gpipe's parameters and running statistics after `step`."""
        tensors = self.network.state_dict()
        for name, own in self.named.items():
            tensors[own].copy_(self.file[f"{step}/parameter/{name}"])

    def backward(self, step):
        """The loss of the mini-batch; gradients are left in the parameters."""
        self.optimizer.zero_grad()
        self.seen.clear()
        self.network.train()
        inputs, targets = self.file["inputs"].to(self.kind), self.file["targets"]
        targets = targets.to(self.kind) if targets.is_floating_point() else targets
        slices = torch.arange(len(inputs)).tensor_split(self.micro_batches)
        total = 0.0
        for rows in slices:
            with patch.object(images.F, "dropout2d", self.masked(step, rows)):
                output = self.network(inputs[rows])
            if self.network_name == "unet":
                loss = F.mse_loss(output, targets[rows], reduction="sum") / targets.numel()
            else:
                loss = loss_sum(output, targets[rows]) / len(targets)
            loss.backward()
            total += loss.item()
        return total

    def masked(self, step, rows):
        """Dropout by gpipe's masks, in the order of the layers."""
        masks = iter([self.file[f"{step}/mask/{name}"]
                      for name in getattr(self.network, "names", [])
                      if f"{step}/mask/{name}" in self.file])
        return lambda x, p, training: x * next(masks)[rows, :, None, None].to(x.dtype)

    def gradients(self):
        own = dict(self.network.named_parameters())
        return {name: own[at].grad.double() for name, at in self.named.items() if at in own}

    def parameters(self):
        own = dict(self.network.named_parameters())
        return {name: own[at].detach().double() for name, at in self.named.items() if at in own}

    def running(self):
        """From 0 and 1, a tenth of the whole mini-batch's mean and unbiased variance."""
        found = {}
        for name, values in self.seen.items():
            whole = numpy.concatenate([v.swapaxes(0, 1).reshape(v.shape[1], -1) for v in values],
                                      axis=1)
            found[name] = 0.1 * whole.mean(1), 0.9 + 0.1 * whole.var(1, ddof=1)
        return found

    def output(self):
        self.network.eval()
        with torch.no_grad(), patch.object(images.F, "dropout2d", lambda x, p, training: x):
            return {"output": self.network(self.file["inputs"].to(self.kind)).double()}


def running_errors(ours, theirs):
    """Of each batch norm: (name, largest error of mean and variance)."""
    for name, (mean, variance) in theirs.items():
        own_mean, own_variance = ours[name]
        batch = (variance - 0.9) / 0.1
        errors = (abs(own_mean - mean) / (0.1 * numpy.sqrt(batch + 1e-5)),
                  abs(own_variance - variance) / variance)
        yield name, max(float(error.max()) for error in errors)


def compare(case, file):
    """Findings of a case."""
    kind = case.split("-")[1]
    found = Findings(case)
    run, exact = Run(case, file), Run(case, file, "float64")

    def add(column, ours, theirs, exactly):
        own = {name: norm for name, _, norm in distances(theirs, exactly)}
        if column == "gradient":
            found.worst["PyTorch"] = (max(own.values()),)
        allowed = (max(FREE_RUN[kind], FREE * max(own.values())) if column == "parameters"
                   else TOLERANCE[kind])
        for name, _, norm in distances(ours, theirs):
            found.add(column, name, STEPS if column == "parameters" else 1, norm, allowed)

    for step in range(1, STEPS + 1):
        own, exactly, ours = run.backward(step), exact.backward(step), file[f"{step}/loss"].item()
        allowed = TOLERANCE[kind]
        if step > 1:
            allowed = max(FREE_RUN[kind], FREE * abs(own - exactly) / exactly)
        found.add("loss", "loss", step, abs(ours - own) / own, allowed)
        if step == 1:
            gradients = {name: file[f"1/gradient/{name}"] for name in run.gradients()}
            extra = {key.removeprefix("1/gradient/") for key in file
                     if key.startswith("1/gradient/")} - gradients.keys()
            if extra:
                sys.exit(f"image_parity: {case}: PyTorch has no {sorted(extra)}")
            add("gradient", gradients, run.gradients(), exact.gradients())
            theirs = run.running()
            ours = {name: tuple(file[f"1/running/{name}running_{of}"].double().numpy()
                                for of in ("mean", "variance"))
                    for name in theirs}
            drift = max((error for _, error in running_errors(theirs, exact.running())),
                        default=0.0)
            for name, error in running_errors(ours, theirs):
                found.add("running", name, step, error, max(RUNNING[kind], FREE * drift))
        run.optimizer.step()
        exact.optimizer.step()
    after = {name: file[f"{STEPS}/parameter/{name}"] for name in run.parameters()}
    add("parameters", after, run.parameters(), exact.parameters())
    run.set(STEPS)
    exact.set(STEPS)
    add("output", {"output": file["output"]}, run.output(), exact.output())
    return found


def table(findings):
    print("ratio to the tolerance; 1 is the most that is allowed\n")
    print(f"| case | {' | '.join(COLUMNS)} | worst: step/tensor |"
          " PyTorch's float32 gradients from float64, norm |")
    print("|---|" + "---|" * (len(COLUMNS) + 2))
    for found in findings:
        there = [column for column in COLUMNS if column in found.worst]
        worst = max((found.worst[column] for column in there), key=lambda pair: pair[0])
        ratios = " | ".join(f"{found.worst[column][0]:.1e}" if column in there else "-"
                            for column in COLUMNS)
        print(f"| {found.case} | {ratios} | {worst[1]} | {found.worst['PyTorch'][0]:.1e} |")


def prove(files):
    """Each fault must be found. True if all are."""
    norm, pool, pad = F.batch_norm, F.avg_pool2d, F.pad

    def biased(self):
        return {name: (mean, 0.9 + (variance - 0.9) * 0.99)
                for name, (mean, variance) in running(self).items()}

    def last_only(self):
        self.seen = {name: values[-1:] for name, values in self.seen.items()}
        return running(self)

    running = Run.running
    faults = [
        ("epsilon 1.1e-5", "amoebanet-float32-4", patch.object(images, "EPSILON", 1.1e-5)),
        ("the padding averaged", "amoebanet-float32-4", patch.object(
            images.F, "avg_pool2d",
            lambda x, size, stride, padding, count_include_pad: pool(x, size, stride, padding))),
        ("running statistics of the last micro-batch", "amoebanet-float32-4",
         patch.object(Run, "running", last_only)),
        ("a variance 1% too small", "amoebanet-float32-4", patch.object(Run, "running", biased)),
        ("evaluation by the batch's statistics", "amoebanet-float32-1", patch.object(
            images.F, "batch_norm",
            lambda x, m, v, w, b, training, *rest: norm(x, m, v, w, b, True, *rest))),
        ("pixels of a reduction not shifted", "amoebanet-float32-1", patch.object(
            images.F, "pad", lambda x, sizes: pad(x, (1, 0, 1, 0)))),
        ("one statistic for all micro-batches", "resnet-float32-4",
         patch.object(torch.Tensor, "tensor_split", lambda self, count: (self,))),
        ("the stride on the first convolution", "resnet-float32-1", patch.object(
            torchvision.models.resnet.Bottleneck, "__init__", strided_first)),
        ("leaky ReLU of 0.011", "unet-float32-4",
         patch.object(images.F, "leaky_relu_", lambda x: F.leaky_relu(x, 0.011))),
        ("masks of the step after", "unet-float32-4", patch.object(
            Run, "masked",
            lambda self, step, rows, masked=Run.masked: masked(self, step % STEPS + 1, rows))),
    ]
    all_found = True
    for what, case, fault in faults:
        file = files(case)
        with fault:
            found = compare(case, file)
        caught = {column: found.worst[column][0] for column in COLUMNS
                  if column in found.worst and not found.worst[column][0] <= 1.0}
        all_found &= bool(caught)
        ratios = ", ".join(f"{column} {ratio:.1e}" for column, ratio in caught.items())
        print(f"{'found' if caught else 'NOT FOUND'}: {what} ({case}): {ratios}", flush=True)
    return all_found


BOTTLENECK = torchvision.models.resnet.Bottleneck.__init__


def strided_first(self, *given, **named):
    BOTTLENECK(self, *given, **named)
    self.conv1.stride, self.conv2.stride = self.conv2.stride, self.conv1.stride


def build():
    subprocess.run(["cargo", "build", "--quiet", "--locked", "--package", "gpipe-drivers",
                    "--bin", "image_parity"], cwd=ROOT, check=True)
    return ROOT / "target" / "debug" / "image_parity"


def main():
    parser = argparse.ArgumentParser(description="Compares gpipe's image networks with PyTorch.")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--prove", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    driver = build()
    with tempfile.TemporaryDirectory() as aside:
        folder = options.folder or Path(aside)
        folder.mkdir(parents=True, exist_ok=True)

        def files(case):
            path = folder / f"{case}.safetensors"
            if not path.exists():
                subprocess.run([driver, folder, *case.split("-")], check=True)
            tensors = read_safetensors(path)
            if not options.folder:
                path.unlink()
            return tensors

        if options.prove:
            sys.exit(0 if prove(files) else 1)
        cases = [case for case in (SHORT if options.short else CASES) if options.only in case]
        findings = [compare(case, files(case)) for case in cases]
    table(findings)
    wrong = sorted((wrong for found in findings for wrong in found.wrong), reverse=True)
    if wrong:
        sys.exit(f"\nimage_parity: {len(wrong)} comparisons beyond their tolerance;"
                 f" the worst is {wrong[0][1]}")
    print(f"\nparity with PyTorch {torch.__version__}, torchvision {torchvision.__version__}:"
          f" {len(cases)} cases")


if __name__ == "__main__":
    main()
