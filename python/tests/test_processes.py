"""torchrun: the same script in several processes gives the same bits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gpipe

HERE = Path(__file__).parent


def run(processes, *arguments, script="train_in_processes.py"):
    """What the script printed, by rank."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(processes),
                    "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                    "127.0.0.1:0"]
    # c10d asks the name server for every address; see the guide on processes.
    own = dict(os.environ, RES_OPTIONS="timeout:1 attempts:2", OMP_NUM_THREADS="1")
    found = subprocess.run([*command, str(HERE / script), *map(str, arguments)],
                           text=True, capture_output=True, timeout=300, env=own, cwd=HERE)
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["rank"])


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_processes_have_the_bits_of_threads(schedule, tmp_path):
    one, = run(1, schedule, tmp_path / "one")
    several = run(2, schedule, tmp_path / "two")
    assert [own["rank"] for own in several] == [0, 1]
    for own in several:
        for key in ("losses", "weights", "evaluation", "restored"):
            assert own[key] == one[key], key


def test_the_error_of_another_process_is_its_own_kind():
    first, second = run(2, script="fail_in_processes.py")
    assert "LookupError" in second["seen"] and "no such thing" in second["seen"]
    assert first["seen"][:2] == ["PeerError", "StepError"]
    assert "rank 1" in first["seen"][-1] and "no such thing" in first["seen"][-1]


def test_a_process_that_does_not_know_its_rank_is_refused(monkeypatch):
    # Each would train alone, and nobody would notice.
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.zeros(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="WORLD_SIZE=2, but not RANK"):
        gpipe.Pipeline(model, x, loss=nn.MSELoss(), optimizer=optimizer)
    with gpipe.Pipeline(model, x, loss=nn.MSELoss(), optimizer=optimizer, processes=False) as pipe:
        pipe.train_step(x, torch.zeros(4, 2))
