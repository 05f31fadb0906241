#!/usr/bin/env python3
"""Weights to and from PyTorch: the same loss on both sides.

Usage: interchange.py      (part of .ci/run; needs PyTorch, see pytorch.py)

  import   a GPT-2-shaped nn.Module (its names, transposed Conv1D weights, mask buffers, a tied
           head) is saved as a safetensors state dict; `gpipe import --names
           configs/names/gpt2.toml` makes weights of it
  export   `gpipe export` of a trained run is loaded into the peers' decoder by its names

Each time `gpipe eval` and PyTorch measure the same text, in float64 on PyTorch's side. The exit
code is 1 where the mean losses differ by more than 2e-6: that of float32 sums over a few hundred
tokens.
"""

import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))
from common import Network, read_safetensors  # noqa: E402
from model import layers  # noqa: E402

SIZES = {"vocabulary": 257, "positions": 16, "features": 32, "heads": 4, "hidden": 64, "blocks": 3}
CONFIG = """
[model]
vocabulary = 257
features = 32
heads = 4
hidden = 64
blocks = 3
[data]
sequence = 16
[train]
steps = 20
mini_batch = 8
"""
TEXT = "".join(f"the {i * i % 97} micro-batches of stage {i % 7} wait for {i % 5} others; "
               for i in range(300))
LARGEST = 2e-6


def gpipe(*arguments):
    command = ["cargo", "run", "--quiet", "--locked", "--package", "gpipe-cli", "--",
               *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"interchange: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def write_safetensors(path, tensors):
    header, parts, offset = {}, [], 0
    for name, tensor in tensors.items():
        kind = {torch.float32: "F32", torch.bfloat16: "BF16", torch.bool: "BOOL"}[tensor.dtype]
        part = bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())
        header[name] = {"dtype": kind, "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + len(part)]}
        parts.append(part)
        offset += len(part)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


class Conv1D(nn.Module):
    """GPT-2's affine map: its weight is [inputs, outputs]."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * 0.1)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.1)

    def forward(self, x):
        return x @ self.weight + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        width, positions = SIZES["features"], SIZES["positions"]
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        for norm in (self.ln_1, self.ln_2):
            nn.init.normal_(norm.weight, 1.0, 0.2)
            nn.init.normal_(norm.bias, 0.0, 0.2)
        self.attn = nn.Module()
        self.attn.c_attn, self.attn.c_proj = Conv1D(width, 3 * width), Conv1D(width, width)
        mask = torch.ones(positions, positions, dtype=torch.bool).tril()
        self.attn.register_buffer("bias", mask.view(1, 1, positions, positions))
        self.mlp = nn.Module()
        self.mlp.c_fc, self.mlp.c_proj = (Conv1D(width, SIZES["hidden"]),
                                          Conv1D(SIZES["hidden"], width))

    def forward(self, x):
        n, t, d = x.shape
        q, k, v = self.attn.c_attn(self.ln_1(x)).split(d, dim=2)
        heads = lambda y: y.view(n, t, SIZES["heads"], -1).transpose(1, 2)  # noqa: E731
        scores = heads(q) @ heads(k).transpose(2, 3) / (d / SIZES["heads"]) ** 0.5
        scores = scores.masked_fill(~self.attn.bias[:, :, :t, :t], float("-inf"))
        x = x + self.attn.c_proj((scores.softmax(-1) @ heads(v)).transpose(1, 2).reshape(n, t, d))
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class Gpt2(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(SIZES["vocabulary"], SIZES["features"])
        self.wpe = nn.Embedding(SIZES["positions"], SIZES["features"])
        self.h = nn.ModuleList(Block() for _ in range(SIZES["blocks"]))
        self.ln_f = nn.LayerNorm(SIZES["features"])
        self.lm_head = nn.Linear(SIZES["features"], SIZES["vocabulary"], bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def tokens_of(tokenizer):
    """The text's tokens: with a vocabulary of 257 there are no merges, each byte is one."""
    ids = json.loads(tokenizer.read_text())["model"]["vocab"]
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that stand for themselves
    hidden = [byte for byte in range(256) if byte not in shown]
    letter = {**{byte: chr(byte) for byte in shown},
              **{byte: chr(256 + i) for i, byte in enumerate(hidden)}}
    end = next(iter(json.loads(tokenizer.read_text())["added_tokens"]))["id"]
    return [ids[letter[byte]] for byte in TEXT.encode()] + [end]


def loss(model, tokens):
    """The mean over all targets, in windows as `gpipe eval` cuts them."""
    length, total = SIZES["positions"], 0.0
    model = model.double()
    with torch.no_grad():
        for start in range(0, len(tokens) - 1, length):
            window = torch.tensor(tokens[start : start + length + 1])
            logits = model(window[:-1][None])[0]
            total += F.cross_entropy(logits, window[1:], reduction="sum").item()
    return total / (len(tokens) - 1)


def compare(what, own, torchs):
    difference = abs(own - torchs)
    print(f"{what}: gpipe {own:.8f}, PyTorch {torchs:.8f}, difference {difference:.1e}")
    return difference <= LARGEST


def main():
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        config, text, run = folder / "config.toml", folder / "text.txt", folder / "run"
        config.write_text(CONFIG)
        text.write_text(TEXT)
        gpipe("train", config, "--text", text, "--out", run)
        tokens = tokens_of(run / "tokenizer.json")
        evaluate = lambda *from_: json.loads(  # noqa: E731
            gpipe("eval", *from_, "--text", text, "--json"))["loss"]

        foreign = Gpt2()
        prefixed = lambda name: (  # noqa: E731
            name if name.startswith("lm_head") else f"transformer.{name}")
        state = {prefixed(name): tensor for name, tensor in foreign.state_dict().items()}
        write_safetensors(folder / "foreign.safetensors", state)
        weights = run / "imported.safetensors"
        names = ROOT / "configs" / "names" / "gpt2.toml"
        gpipe("import", folder / "foreign.safetensors", "--config", run / "config.toml",
              "--names", names, "--out", weights)
        own = evaluate("--config", run / "config.toml", "--weights", weights)
        good = compare("import", own, loss(foreign, tokens))

        gpipe("export", run, "--out", folder / "exported.safetensors")
        decoder = Network(layers(**SIZES, tied=True))
        with torch.no_grad():
            decoder.load(read_safetensors(folder / "exported.safetensors"))
        good &= compare("export", evaluate(run), loss(decoder, tokens))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
