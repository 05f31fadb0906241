"""A causal language model of transformers, layer by layer.

    python huggingface.py --model Qwen/Qwen2.5-0.5B --stages 2     # a folder or a name
    python huggingface.py                                          # a small random Llama

The model's own modules are trained, so it can be saved with `save_pretrained` afterwards.
"""

import argparse

import torch
from torch import nn

import gpipe  # before transformers, for gradient checkpointing

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


class Embed(nn.Module):
    """Tokens to (hidden states, rotary positions)."""

    def __init__(self, model):
        super().__init__()
        self.tokens, self.rotary = model.embed_tokens, model.rotary_emb

    def forward(self, tokens):
        x = self.tokens(tokens)
        places = torch.arange(tokens.size(1), device=tokens.device).expand(tokens.size(0), -1)
        return x, self.rotary(x, places)


class Block(nn.Module):
    """One decoder layer, which hands the positions on. Attention without a mask is causal."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, state):
        x, positions = state
        y = self.layer(x, position_embeddings=positions)
        return (y[0] if isinstance(y, tuple) else y), positions


class Head(nn.Module):
    """(hidden states, positions) to logits."""

    def __init__(self, model):
        super().__init__()
        self.norm, self.head = model.model.norm, model.lm_head

    def forward(self, state):
        return self.head(self.norm(state[0]))


def layers(model) -> nn.Sequential:
    """The layers of Llama, Mistral, Qwen and others built like them."""
    blocks = [Block(layer) for layer in model.model.layers]
    return nn.Sequential(Embed(model.model), *blocks, Head(model))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--out", help="folder for the model")
    options = parser.parse_args()

    torch.manual_seed(0)
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    else:
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True))
    model.train()
    sequence = layers(model)
    tokens = torch.randint(model.config.vocab_size, (options.samples, options.length + 1))
    x, y = tokens[:, :-1], tokens[:, 1:]
    expected = nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten()).item()
    optimizer = torch.optim.AdamW(sequence.parameters(), lr=1e-3)
    with gpipe.Pipeline(sequence, x, stages=options.stages, micro_batches=options.micro_batches,
                        loss=gpipe.LastAxis(), optimizer=optimizer, clip_norm=1.0) as pipe:
        print(f"layers per stage {pipe.balance}; the model's own loss {expected:.4f}")
        for _ in range(options.steps):
            report = pipe.train_step(x, y)
            print(f"step {report.step}  loss {report.loss:.4f}  {1e3 * report.time:.0f} ms")
    trained = nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten()).item()
    print(f"the model's own loss now {trained:.4f}")
    if options.out:
        model.save_pretrained(options.out)


if __name__ == "__main__":
    main()
