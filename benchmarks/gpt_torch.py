"""The peer of `gpt_step`: the same transformer in plain PyTorch, from the same weights and tokens.

Usage: gpt_torch.py FOLDER MICRO_BATCHES THREADS STEPS      (prints one line of JSON)

Written as a practitioner would for speed on a CPU: fused QKV, fused causal attention, one loop over the
micro-batches, `Adam(fused=True)`, gradients set to None. The loss is the sum over tokens divided by the
tokens of the mini-batch, as in gpipe.
"""

import json
import struct
import sys
import time

import torch
import torch.nn.functional as F


def read_safetensors(path):
    kinds = {"F32": torch.float32, "I64": torch.int64}
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


class Block(torch.nn.Module):
    def __init__(self, d, heads, hidden):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(d), torch.nn.LayerNorm(d)
        self.qkv, self.output = torch.nn.Linear(d, 3 * d), torch.nn.Linear(d, d)
        self.hidden, self.down = torch.nn.Linear(d, hidden), torch.nn.Linear(hidden, d)

    def forward(self, x):
        n, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(n, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(y.transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.hidden(self.norm2(x))))


class Gpt(torch.nn.Module):
    def __init__(self, vocabulary=8192, length=128, d=512, heads=8, hidden=2048, blocks=8):
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(vocabulary, d), torch.nn.Embedding(length, d)
        self.blocks = torch.nn.ModuleList(Block(d, heads, hidden) for _ in range(blocks))
        self.norm, self.head = torch.nn.LayerNorm(d), torch.nn.Linear(d, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def load(self, weights):
        with torch.no_grad():
            self.tokens.weight.copy_(weights["embedding.tokens"])
            self.positions.weight.copy_(weights["embedding.positions"])
            self.head.weight.copy_(weights["head.weight"])
            self.norm.weight.copy_(weights["head.norm.weight"])
            self.norm.bias.copy_(weights["head.norm.bias"])
            for index, block in enumerate(self.blocks):
                pairs = [(block.norm1, f"{index}.attention.norm"), (block.qkv, f"{index}.attention.qkv"),
                         (block.output, f"{index}.attention.output"), (block.norm2, f"{index}.mlp.norm"),
                         (block.hidden, f"{index}.mlp.hidden"), (block.down, f"{index}.mlp.output")]
                for module, name in pairs:
                    module.weight.copy_(weights[name + ".weight"])
                    module.bias.copy_(weights[name + ".bias"])


def main():
    folder, micro_batches, threads, steps = sys.argv[1], *map(int, sys.argv[2:5])
    torch.set_num_threads(threads)
    weights = read_safetensors(folder + "/gpt.safetensors")
    model = Gpt()
    model.load(weights)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    inputs, targets = weights["inputs"], weights["targets"]
    times, losses = [], []
    for _ in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches)):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / targets.numel()
            loss.backward()
            total += loss.item()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
        losses.append(total)
    print(json.dumps({"loss": losses, "step_ms": times}))


if __name__ == "__main__":
    main()
