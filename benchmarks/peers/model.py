"""The decoder of the `gpt` workload in plain PyTorch.

Its layers are `embedding`, `0.attention`, `0.mlp`, .., `head`. It is written for speed on a CPU:
fused QKV, fused causal attention, few kernels. The decoder is that of Radford et al. 2019: pre-LN,
learned positions, GELU; `head` has no bias.
"""

import torch
import torch.nn.functional as F
from torch import nn

GPT = {"vocabulary": 8192, "positions": 128, "features": 512, "heads": 8, "hidden": 2048,
       "blocks": 8}
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
        q, k, v = self.qkv(self.norm(x)).view(
            n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
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


def sizes_of(tensors):
    """The sizes of the decoder whose parameters these are. A head has as many features as one of
    `GPT`."""
    vocabulary, features = tensors["embedding.tokens"].shape
    blocks = {name.split(".")[0] for name in tensors if name.endswith(".mlp.hidden.weight")}
    return {"vocabulary": vocabulary, "positions": tensors["embedding.positions"].shape[0],
            "features": features, "heads": features * GPT["heads"] // GPT["features"],
            "hidden": tensors["0.mlp.hidden.weight"].shape[0], "blocks": len(blocks)}


def layers(vocabulary, positions, features, heads, hidden, blocks, tied=False):
    """(name, layer) in order."""
    named = [("embedding", Embedding(vocabulary, positions, features))]
    for block in range(blocks):
        named += [(f"{block}.attention", Attention(features, heads)),
                  (f"{block}.mlp", Mlp(features, hidden))]
    named.append(("head", Head(features, vocabulary)))
    if tied:
        named[-1][1].weight = named[0][1].tokens
    return named


def loss_sum(logits, targets):
    """Summed over the targets that count. logits: [.., vocabulary], targets: [..]"""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum",
                           ignore_index=IGNORED)
