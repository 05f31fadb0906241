"""What test_processes.py starts: trains, saves, restores, and prints what it found."""

import hashlib
import json
import sys

import gpipe  # before PyTorch looks for GPUs

import torch  # noqa: E402
from common import batch, model  # noqa: E402
from torch import nn  # noqa: E402


def digest(own):
    found = hashlib.sha256()
    for name, value in own.state_dict().items():
        found.update(name.encode() + value.numpy().tobytes())
    return found.hexdigest()


schedule, folder, *devices = sys.argv[1:]
links = "nccl" if len(devices) > 1 else "gloo"
own = model()
x, _ = batch()
optimizer = torch.optim.AdamW(own.parameters(), 0.01)
stages = len(devices) or (3 if schedule == "zb-h1" else 2)
with gpipe.Pipeline(own, x, stages=stages, devices=devices or None, balance=None, micro_batches=4,
                    schedule=schedule, loss=nn.MSELoss(), optimizer=optimizer, clip_norm=0.5,
                    links=links, timeout=60) as pipe:
    losses = [pipe.train_step(*batch(seed=step)).loss.hex() for step in range(3)]
    pipe.save(folder)
    evaluation = pipe.evaluate(*batch(seed=9)).loss.hex()
    rank = pipe.rank
    pipe.train_step(*batch(seed=10))
    pipe.load(folder)
    restored = pipe.train_step(*batch(seed=11)).loss.hex()
found = {"rank": rank, "losses": losses, "evaluation": evaluation, "restored": restored,
         "weights": digest(own)}
# In one write: torchrun's processes print without buffers, and to one pipe.
sys.stdout.write(json.dumps(found) + "\n")
sys.stdout.flush()
