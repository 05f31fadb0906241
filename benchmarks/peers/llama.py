#!/usr/bin/env python3
"""A Llama of transformers, unpipelined: a step of the whole mini-batch, as its users write it.

Usage: llama.py FOLDER [--threads T] [--steps N] [--compile] [--dtype float32|bfloat16]

The sizes are those of configs/llama-small.toml, the weights and tokens are random. FOLDER is not
read: the time of a step does not depend on the weights. There is one workload, `llama`, and one
micro-batch. `bfloat16` is autocast over float32
weights. The program prints one line of JSON. It has the number of parameters, so that equal work is
seen.
"""

import argparse
import json
import sys
import time
import tomllib
from pathlib import Path

import torch
import transformers

from common import set_up

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "llama-small.toml"


def model_of(sizes):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["features"],
        intermediate_size=sizes["hidden"],
        num_hidden_layers=sizes["blocks"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["groups"],
        head_dim=sizes["head_size"],
        tie_word_embeddings=sizes["tied"],
        use_cache=False,
    ))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--workload", choices=["llama"], default="llama")
    parser.add_argument("--micro-batches", type=int, choices=[1], default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    set_up(options.threads)
    torch.manual_seed(1)
    config = tomllib.loads(CONFIG.read_text())
    model = model_of(config["model"]).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    forward = torch.compile(model) if options.compile else model
    shape = [config["train"]["mini_batch"], config["data"]["sequence"]]
    tokens = torch.randint(config["model"]["vocabulary"], shape)
    times, losses = [], []
    for _ in range(options.steps):
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
            loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        times.append(1e3 * (time.perf_counter() - start))
    count = sum(own.numel() for own in model.parameters())
    print(json.dumps({"loss": losses, "step_ms": times, "threads": options.threads,
                      "dtype": options.dtype, "parameters": count}))


if __name__ == "__main__":
    sys.exit(main())
