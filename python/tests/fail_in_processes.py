"""What test_processes.py starts: a layer fails on rank 1. Prints what each rank sees."""

import json
import os
import sys

import torch
from torch import nn

import gpipe


class Fails(nn.Module):
    def forward(self, x):
        if torch.is_grad_enabled() and os.environ["RANK"] == "1":
            raise LookupError("no such thing")
        return x * 2


model = nn.Sequential(nn.Linear(4, 4), Fails())
x = torch.ones(8, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
pipe = gpipe.Pipeline(model, x, stages=2, balance=[1, 1], micro_batches=4, loss=nn.MSELoss(),
                      optimizer=optimizer, timeout=30)
try:
    pipe.train_step(x, x)
    seen = "nothing"
except Exception as error:
    seen = [own.__name__ for own in type(error).__mro__] + [str(error)]
sys.stdout.write(json.dumps({"rank": pipe.rank, "seen": seen}) + "\n")
sys.stdout.flush()
