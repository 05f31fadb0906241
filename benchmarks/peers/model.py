"""What the peers share: the decoder of the `gpt` workload in plain PyTorch, weights and tokens from a file.

The layers have gpipe's names (`embedding`, `0.attention`, `0.mlp`, .., `head`), so that a safetensors file
which gpipe wrote loads by name. Written for speed on a CPU: fused QKV, fused causal attention, few kernels.
The decoder is that of Radford et al. 2019: pre-LN, learned positions, GELU; `head` has no bias.
"""

import ctypes
import json
import os
import struct

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

GPT = {"vocabulary": 8192, "positions": 128, "features": 512, "heads": 8, "hidden": 2048, "blocks": 8}
IGNORED = -100  # a target that is neither summed nor counted


class Embedding(nn.Module):
    def __init__(self, vocabulary, positions, features):
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(vocabulary, features))
        self.positions = nn.Parameter(torch.empty(positions, features))

    def forward(self, tokens):
        return F.embedding(tokens, self.tokens) + self.positions[: tokens.shape[1]]


class Attention(nn.Module):
    def __init__(self, features, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(features)
        self.qkv, self.output = nn.Linear(features, 3 * features), nn.Linear(features, features)

    def forward(self, x):
        n, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.output(y.transpose(1, 2).reshape(n, t, d))


class Mlp(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.hidden, self.output = nn.Linear(features, hidden), nn.Linear(hidden, features)

    def forward(self, x):
        return x + self.output(F.gelu(self.hidden(self.norm(x))))


class Head(nn.Module):
    def __init__(self, features, vocabulary):
        super().__init__()
        self.norm = nn.LayerNorm(features)
        self.weight = nn.Parameter(torch.empty(vocabulary, features))

    def forward(self, x):
        return F.linear(self.norm(x), self.weight)


class Decoder(nn.Module):
    """Some consecutive layers of the decoder: [samples, positions] tokens, or what the layer before gave."""

    def __init__(self, layers, remat=False):
        super().__init__()
        self.names = [name for name, _ in layers]
        self.layers = nn.ModuleList(layer for _, layer in layers)
        self.remat = remat  # recompute each block in the backward

    def forward(self, x):
        for name, part in self.parts():
            if self.remat and name.isdigit():
                x = checkpoint(part, x, use_reentrant=False, preserve_rng_state=False)  # there is no dropout
            else:
                x = part(x)
        return x

    def parts(self):
        """The layers as they are re-materialized: the halves of a block together, by the block's number."""
        parts = []
        for name, layer in zip(self.names, self.layers):
            name = name.split(".")[0]
            if parts and parts[-1][0] == name:
                parts[-1] = (name, nn.Sequential(parts[-1][1], layer))
            else:
                parts.append((name, layer))
        return parts

    def named(self):
        """Parameters by gpipe's names; a tied one once."""
        found = {}
        for name, layer in zip(self.names, self.layers):
            for own, parameter in layer.named_parameters():
                if all(parameter is not other for other in found.values()):
                    found[f"{name}.{own}"] = parameter
        return found

    @torch.no_grad()
    def load(self, values):
        for name, parameter in self.named().items():
            parameter.copy_(values[name])


def layers(vocabulary, positions, features, heads, hidden, blocks, tied=False):
    """(name, layer) in order."""
    named = [("embedding", Embedding(vocabulary, positions, features))]
    for block in range(blocks):
        named += [(f"{block}.attention", Attention(features, heads)), (f"{block}.mlp", Mlp(features, hidden))]
    named.append(("head", Head(features, vocabulary)))
    if tied:
        named[-1][1].weight = named[0][1].tokens
    return named


def loss_sum(logits, targets):
    """Summed over the targets that count. logits: [.., vocabulary], targets: [..]"""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum", ignore_index=IGNORED)


def read_safetensors(path):
    kinds = {"F32": torch.float32, "F64": torch.float64, "I64": torch.int64}
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        data = bytearray(file.read())
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        flat = torch.frombuffer(data[start:end], dtype=kinds[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"]).clone()
    return tensors


def gpt_file(folder):
    """Weights and tokens as `gpt_step` wrote them."""
    return read_safetensors(os.path.join(folder, "gpt.safetensors"))


def set_up(threads):
    """Threads, and an allocator that keeps freed memory instead of asking for the same pages in each step."""
    torch.set_num_threads(threads)
    torch.set_num_interop_threads(1)
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap, too
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: and stay there
    except OSError:
        pass  # not glibc


class PeakMemory:
    """Within `with`, if asked: the most bytes of tensors that this thread had allocated there at once.

    A profiler sees every allocation, so the steps' times are then not to be used.
    """

    def __init__(self, asked):
        self.profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True) if asked else None
        self.bytes = None

    def __enter__(self):
        if self.profile:
            self.profile.__enter__()
        return self

    def __exit__(self, *failure):
        if not self.profile:
            return
        self.profile.__exit__(*failure)
        events = [event for event in self.profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        live = self.bytes = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            live += event.nbytes()  # below 0 where memory is given back
            self.bytes = max(self.bytes, live)
