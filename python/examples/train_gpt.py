"""A small transformer on the text of this file, or of yours.

    python train_gpt.py --text notes.txt --stages 2 --steps 200
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import gpipe


class Tokens(nn.Module):
    """Token and position embeddings: [samples, length] to [samples, length, width]."""

    def __init__(self, vocabulary: int, length: int, width: int):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)

    def forward(self, tokens):
        places = torch.arange(tokens.size(1), device=tokens.device)
        return self.tokens(tokens) + self.positions(places)


class Block(nn.TransformerEncoderLayer):
    """A transformer layer whose positions see only earlier ones."""

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1), device=x.device,
                                                              dtype=x.dtype)
        return super().forward(x, src_mask=mask, is_causal=True)


def gpt(vocabulary: int, length: int, width: int, blocks: int) -> nn.Sequential:
    layers = [Block(width, max(1, width // 32), 4 * width, dropout=0.1, batch_first=True,
                    norm_first=True) for _ in range(blocks)]
    return nn.Sequential(Tokens(vocabulary, length, width), *layers, nn.LayerNorm(width),
                         nn.Linear(width, vocabulary))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, default=Path(__file__))
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--schedule", default="zb-h1")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--out", type=Path, help="file for the weights")
    options = parser.parse_args()

    text = torch.tensor(list(options.text.read_bytes()))
    torch.manual_seed(0)
    model = gpt(256, options.length, options.width, options.blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    example = torch.zeros(options.samples, options.length, dtype=torch.long)
    with gpipe.Pipeline(model, example, stages=options.stages, micro_batches=options.micro_batches,
                        schedule=options.schedule, loss=nn.CrossEntropyLoss(), optimizer=optimizer,
                        clip_norm=1.0) as pipe:
        print(f"{sum(own.numel() for own in model.parameters()):,} parameters, layers per stage "
              f"{pipe.balance}")
        for step in range(options.steps):
            starts = torch.randint(len(text) - options.length - 1, (options.samples, 1))
            rows = text[starts + torch.arange(options.length + 1)]
            report = pipe.train_step(rows[:, :-1], rows[:, 1:])
            scheduler.step()
            if step % 10 == 0 or step + 1 == options.steps:
                print(f"step {report.step:4}  loss {report.loss:.3f}  {1e3 * report.time:.0f} ms, "
                      f"of which waiting {100 * report.bubble:.0f}%")
    if options.out:
        torch.save(model.state_dict(), options.out)


if __name__ == "__main__":
    main()
