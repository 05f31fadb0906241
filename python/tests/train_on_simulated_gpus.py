"""What test_simulated_gpus.py starts: trains networks of the zoo on one GPU, on two, and beside a
CPU, and prints for each name what differs. Needs GPIPE_SIMULATED_GPUS=2."""

import json
import sys

import gpipe  # before PyTorch looks for GPUs

import torch  # noqa: E402
from test_zoo import made, square  # noqa: E402
from zoo import SAMPLES, ZOO  # noqa: E402

# A wait that is missing ends the process with a report.
RUNS = {
    "two GPUs, 1f1b": dict(devices=["cuda:0", "cuda:1"], schedule="1f1b", remat="always"),
    "two GPUs, zb-h1": dict(devices=["cuda:1", "cuda:0"], schedule="zb-h1", remat="never"),
    "one GPU twice": dict(devices=["cuda:1", "cuda:1"], schedule="gpipe", remat="selective"),
}


def trained(name, **settings):
    """Gradients and weights after three steps."""
    model, example = made(name)
    parameters = [own for own in model.parameters() if own.requires_grad]
    found = {}
    with gpipe.Pipeline(model, example, micro_batches=2, keep_gradients=True, seed=3,
                        loss=gpipe.Loss(square, lambda _: float(SAMPLES)),
                        optimizer=torch.optim.AdamW(parameters, lr=1e-3), **settings) as pipe:
        for step in range(3):
            report = pipe.train_step(example, torch.zeros(SAMPLES))
            found[f"loss {step}"] = torch.tensor(report.loss)
            found |= {f"{step} {name}": own for name, own in pipe.gradients().items()}
        pipe.sync()
    return found | {name: own.clone() for name, own in model.state_dict().items()}


def differences(name):
    expected = trained(name, devices=["cuda:0"])
    for run, settings in RUNS.items():
        found = trained(name, **settings)
        for key, value in expected.items():
            if not torch.equal(value.cpu(), found[key].cpu()):
                return f"{run}: {key} differs from that on one GPU"
    return ""


for name in sys.argv[1:] or ZOO:
    try:
        seen = differences(name)
    except Exception as error:
        seen = f"{type(error).__name__}: {error}"
    sys.stdout.write(json.dumps({"name": name, "seen": seen}) + "\n")
    sys.stdout.flush()
