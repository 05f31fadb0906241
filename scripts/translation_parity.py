#!/usr/bin/env python3
"""Compares gpipe's translation model with PyTorch: loss, every gradient and every logit, in twelve
cases.

Usage: translation_parity.py [--folder DIR] [--only TEXT] [--prove]      (make parity)

The driver `translation_parity` runs gpipe (two stages, cut inside the decoder; three micro-batches
of sentences of different lengths, filled up; label smoothing; clipped logits) and writes what it
got. Here the same network, written from the papers' formulas, gets gpipe's parameters of each step.
It gets each pair of sentences for itself, as long as the pair is. So there is no padding and no
mask. The program prints a table. Where a tensor differs, it prints the name and ends with exit
code 1.

  gradient   loss and gradients of each step, in norm
  element    gradients of each step, each element
  logits     of the evaluation after the last step

--folder DIR  take or leave the driver's files there; without it they are made and removed
--only TEXT   cases whose name has TEXT in it
--prove       show that each of some deliberate faults is found
"""

import argparse
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from parity import ELEMENT, LOSS, NORM, ROOT, Findings, distances, read_safetensors

STEPS = 3
PAD, IGNORED = 0, -100
SMOOTHING, CLIP = 0.1, 2.0
CASES = [f"{kind}-{ties}-{layers}" for kind in ("float64", "float32")
         for ties in ("paper", "shared", "untied") for layers in ("split", "blocks")]
COLUMNS = ["gradient", "element", "logits"]
# Of logits, relative to the largest, which is the clip's.
LOGITS = {"float64": 1e-12, "float32": 1e-5}


def positions(length, features):
    """sin(p / 10000^(2i / features)), and the cosine next to it."""
    angle = torch.arange(length, dtype=torch.float64)[:, None] / 10000 ** (
        torch.arange(0, features, 2, dtype=torch.float64) / features)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def scale(features):
    """Of embeddings."""
    return math.sqrt(features)


def attend(q, k, v, size, causal):
    """softmax(q k^T / sqrt(size)) v for each head. q: [queries, width]; k, v: [keys, width]"""
    heads = []
    for first in range(0, q.shape[1], size):
        part = slice(first, first + size)
        scores = q[:, part] @ k[:, part].T / math.sqrt(size)
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1),
                                        -math.inf)
        heads.append(scores.softmax(-1) @ v[:, part])
    return torch.cat(heads, dim=1)


class SelfAttention(nn.Module):
    def __init__(self, features, width, size, causal):
        super().__init__()
        self.size, self.causal = size, causal
        self.norm = nn.LayerNorm(features)
        self.qkv, self.output = nn.Linear(features, 3 * width), nn.Linear(width, features)

    def forward(self, x):
        return x + self.output(attend(*self.qkv(self.norm(x)).chunk(3, dim=-1),
                                      self.size, self.causal))


class CrossAttention(nn.Module):
    def __init__(self, features, width, size):
        super().__init__()
        self.size = size
        self.norm = nn.LayerNorm(features)
        self.q, self.kv = nn.Linear(features, width), nn.Linear(features, 2 * width)
        self.output = nn.Linear(width, features)

    def forward(self, x, memory):
        return x + self.output(attend(self.q(self.norm(x)), *self.kv(memory).chunk(2, dim=-1),
                                      self.size, False))


class FeedForward(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.hidden, self.output = nn.Linear(features, hidden), nn.Linear(hidden, features)

    def forward(self, x):
        return x + self.output(F.gelu(self.hidden(self.norm(x))))


class Embedding(nn.Module):
    def __init__(self, vocabulary, features, norm=False):
        super().__init__()
        if norm:
            self.norm = nn.LayerNorm(features)
        self.tokens = nn.Parameter(torch.empty(vocabulary, features))

    def forward(self, tokens):
        features = self.tokens.shape[1]
        return (self.tokens[tokens] * scale(features)
                + positions(len(tokens), features).to(self.tokens.dtype))


class Softmax(nn.Module):
    def __init__(self, features, weight):
        super().__init__()
        self.norm, self.weight = nn.LayerNorm(features), weight

    def forward(self, x):
        return (self.norm(x) @ self.weight.T).clamp(-CLIP, CLIP)


class Translation(nn.Module):
    """One pair of sentences at a time: source [S], target [T] -> logits [T, vocabulary]."""

    def __init__(self, ties, features=48, heads=3, size=12, hidden=96, layers=2, target=131):
        super().__init__()
        width = heads * size
        source = target if ties == "shared" else 151
        self.source_embedding = Embedding(source, features)
        self.target_embedding = Embedding(target, features, norm=True)
        if ties == "shared":
            self.target_embedding.tokens = self.source_embedding.tokens
        untied = nn.Parameter(torch.empty(target, features))
        self.softmax = Softmax(features,
                               untied if ties == "untied" else self.target_embedding.tokens)
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        for _ in range(layers):
            own, mlp = SelfAttention(features, width, size, False), FeedForward(features, hidden)
            self.encoder.append(nn.ModuleDict({"attention": own, "mlp": mlp}))
            own, mlp = SelfAttention(features, width, size, True), FeedForward(features, hidden)
            cross = CrossAttention(features, width, size)
            self.decoder.append(nn.ModuleDict({"self_attention": own, "cross_attention": cross,
                                               "mlp": mlp}))

    def forward(self, source, target):
        x = self.source_embedding(source)
        for layer in self.encoder:
            x = layer["mlp"](layer["attention"](x))
        memory = self.target_embedding.norm(x)
        x = self.target_embedding(target)
        for layer in self.decoder:
            x = layer["mlp"](layer["cross_attention"](layer["self_attention"](x), memory))
        return self.softmax(x)


def loss_sum(logits, targets):
    """With a share of each target spread over all classes."""
    logs = logits.log_softmax(-1)
    own = logs.gather(1, targets[:, None]).sum()
    return -(1 - SMOOTHING) * own - SMOOTHING * logs.mean(-1).sum()


class Run:
    """PyTorch's network of a case."""

    def __init__(self, case, file, kind=None):
        precision, ties, layers = case.split("-")
        self.file, self.network = file, Translation(ties).to(getattr(torch, kind or precision))
        block = "block." if layers == "blocks" else ""
        self.named = {}
        for name, parameter in self.network.named_parameters():  # a tied one once
            parts = name.split(".")
            if parts[0] in ("encoder", "decoder"):
                name = ".".join(parts[:2]) + "." + block + ".".join(parts[2:])
            self.named[name] = parameter
        expected = {name.removeprefix("0/parameter/") for name in file
                    if name.startswith("0/parameter/")}
        if different := expected ^ self.named.keys():
            sys.exit(f"translation_parity: {case}: names on one side only: {sorted(different)}")

    @torch.no_grad()
    def set(self, step):
        """Takes gpipe's parameters after `step`."""
        for name, parameter in self.named.items():
            parameter.copy_(self.file[f"{step}/parameter/{name}"])

    def pairs(self):
        """Source, target and the loss's targets of each sample, without padding."""
        for source, target, wanted in zip(*(self.file[name]
                                            for name in ("source", "target", "targets"))):
            length = (wanted != IGNORED).sum()
            yield source[source != PAD], target[:length], wanted[:length]

    def backward(self):
        """The loss of the mini-batch; gradients are left in the parameters."""
        self.network.zero_grad()
        count = (self.file["targets"] != IGNORED).sum()
        loss = sum(loss_sum(self.network(source, target), wanted)
                   for source, target, wanted in self.pairs()) / count
        loss.backward()
        return loss.item()

    def gradients(self):
        return {name: parameter.grad.double() for name, parameter in self.named.items()}

    @torch.no_grad()
    def logits(self):
        return [self.network(source, target).double() for source, target, _ in self.pairs()]


def compare(case, file):
    """Findings of a case."""
    kind = case.split("-")[0]
    found, run, exact = Findings(case), Run(case, file), Run(case, file, "float64")
    for step in range(1, STEPS + 1):
        run.set(step - 1)
        exact.set(step - 1)
        loss, own = file[f"{step}/loss"].item(), run.backward()
        exact.backward()
        found.add("gradient", "loss", step, abs(own - loss) / abs(own), LOSS[kind])
        prefix = f"{step}/gradient/"
        ours = {name.removeprefix(prefix): tensor for name, tensor in file.items()
                if name.startswith(prefix)}
        for name, element, norm in distances(ours, run.gradients()):
            found.add("gradient", name, step, norm, NORM[kind])
            found.add("element", name, step, element, ELEMENT[kind])
        for name, element, _ in distances(run.gradients(), exact.gradients()):
            if not element <= found.worst.get("PyTorch", (-1.0,))[0]:
                found.worst["PyTorch"] = (element, name)
    run.set(STEPS)
    for sample, logits in enumerate(run.logits()):
        error = (file["logits"][sample, :len(logits)].double() - logits).abs().max().item() / CLIP
        found.add("logits", f"sample {sample}", STEPS, error, LOGITS[kind])
    return found


def table(findings):
    """One line per case."""
    print("ratio to the tolerance; 1 is the most that is allowed\n")
    print(f"| case | {' | '.join(COLUMNS)} | worst: step/tensor |"
          " PyTorch's float32 from float64, element |")
    print("|---|" + "---|" * (len(COLUMNS) + 2))
    for found in findings:
        worst = max((found.worst[column] for column in COLUMNS), key=lambda pair: pair[0])
        ratios = " | ".join(f"{found.worst[column][0]:.1e}" for column in COLUMNS)
        print(f"| {found.case} | {ratios} | {worst[1]} | {found.worst['PyTorch'][0]:.1e} |")


def prove(files):
    """Each fault must be found. True if all are."""
    plain, place = attend, positions
    gelu, forward = F.gelu, Translation.forward

    def seeing_padding(self):
        for source, target, wanted in zip(*(self.file[name]
                                            for name in ("source", "target", "targets"))):
            length = (wanted != IGNORED).sum()
            yield source, target[:length], wanted[:length]

    def without_norm(self, source, target):
        norm = self.target_embedding.norm
        with patch.object(norm, "forward", lambda x: x + 0 * nn.LayerNorm.forward(norm, x)):
            return forward(self, source, target)

    def as_one_block(length, features):
        waves = place(length, features)
        return torch.cat([waves[:, 0::2], waves[:, 1::2]], dim=1)

    def named(faulty):
        return patch.dict(globals(), **faulty)

    faults = [
        ("sources with their padding", patch.object(Run, "pairs", seeing_padding)),
        ("a decoder that sees what comes", named(
            {"attend": lambda *given: plain(*given[:-1], False)})),
        ("a causal encoder", named(
            {"attend": lambda q, k, v, size, causal: plain(q, k, v, size, len(q) == len(k))})),
        ("scores by the attention's width", named(
            {"attend": lambda q, *given: plain(q * math.sqrt(12 / 36), *given)})),
        ("a memory that is not normalised", patch.object(Translation, "forward", without_norm)),
        ("embeddings that are not scaled", named({"scale": lambda features: 1.0})),
        ("sines, then cosines", named({"positions": as_one_block})),
        ("positions from 1", named(
            {"positions": lambda length, features: place(length + 1, features)[1:]})),
        ("no label smoothing", named({"SMOOTHING": 0.0})),
        ("a clip of 2.01", named({"CLIP": 2.01})),
        ("GELU by tanh", patch.object(F, "gelu", lambda x: gelu(x, approximate="tanh"))),
        ("the softmax's use of a tied weight lost", patch.object(
            Softmax, "forward",
            lambda self, x: (self.norm(x) @ self.weight.detach().T).clamp(-CLIP, CLIP))),
    ]
    all_found = True
    for what, fault in faults:
        with fault:
            found = compare("float32-paper-split", files("float32-paper-split"))
        caught = {column: found.worst[column][0] for column in COLUMNS
                  if not found.worst[column][0] <= 1.0}
        all_found &= bool(caught)
        ratios = ", ".join(f"{column} {ratio:.1e}" for column, ratio in caught.items())
        print(f"{'found' if caught else 'NOT FOUND'}: {what}: {ratios}")
    return all_found


def run_driver(folder):
    subprocess.run(["cargo", "build", "--quiet", "--locked", "--package", "gpipe-drivers", "--bin",
                    "translation_parity"], cwd=ROOT, check=True)
    subprocess.run([ROOT / "target" / "debug" / "translation_parity", folder], check=True)


def main():
    parser = argparse.ArgumentParser(description="Compares gpipe's translation model with PyTorch.")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--prove", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as aside:
        folder = options.folder or Path(aside)
        folder.mkdir(parents=True, exist_ok=True)
        if not all((folder / f"{case}.safetensors").exists() for case in CASES):
            run_driver(folder)

        def files(case):
            return read_safetensors(folder / f"{case}.safetensors")

        if options.prove:
            sys.exit(0 if prove(files) else 1)
        cases = [case for case in CASES if options.only in case]
        findings = [compare(case, files(case)) for case in cases]
    table(findings)
    wrong = sorted((wrong for found in findings for wrong in found.wrong), reverse=True)
    if wrong:
        sys.exit(f"\ntranslation_parity: {len(wrong)} comparisons beyond their tolerance;"
                 f" the worst is {wrong[0][1]}")
    print(f"\nparity with PyTorch {torch.__version__}: {len(cases)} cases, {STEPS} steps each")


if __name__ == "__main__":
    main()
