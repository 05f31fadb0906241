"""The zoo on simulated GPUs, in a process of its own: PyTorch looks for GPUs once.

A wait that is missing between streams, devices and the host ends the process with a report.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import test_processes
from zoo import ZOO

from gpipe import _simulated

HERE = Path(__file__).parent
# Their cells are kernels that exist for CUDA alone.
RECURRENT = {"lstm", "lstm_with_dropout", "gru_and_its_state"}

pytestmark = pytest.mark.skipif(not _simulated.LIBRARY.exists(),
                                reason="make python ARGS=--simulated-gpus builds them")


def run(*arguments):
    path = os.pathsep.join([str(HERE), str(HERE.parent / "examples"), *filter(None, sys.path)])
    # In this folder, so that Python finds the installed package and not its sources.
    return subprocess.run([sys.executable, *arguments], text=True, capture_output=True, timeout=300,
                          cwd=HERE,
                          env=dict(os.environ, GPIPE_SIMULATED_GPUS="2", PYTHONPATH=path))


def test_the_zoo_gives_the_same_bits_on_one_gpu_and_on_two():
    names = [name for name in ZOO if name not in RECURRENT]
    ran = run(HERE / "train_on_simulated_gpus.py", *names)
    seen = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [own["name"] for own in seen] == names, ran.stderr
    assert [own for own in seen if own["seen"]] == []
    assert "GPUs are simulated" in ran.stderr


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_processes_that_nccl_connects_have_the_bits_of_one(schedule, tmp_path, monkeypatch):
    monkeypatch.setenv("GPIPE_SIMULATED_GPUS", "2")
    one, = test_processes.run(1, schedule, tmp_path / "one", "cuda:0")
    for own in test_processes.run(2, schedule, tmp_path / "two", "cuda:0", "cuda:1"):
        for key in ("losses", "weights", "evaluation", "restored"):
            assert own[key] == one[key], key


def test_gpus_that_come_too_late_are_refused():
    ran = run("-c", "import torch, gpipe")
    assert ran.returncode and "import gpipe before torch" in ran.stderr


def test_a_gpu_that_is_not_there_is_named():
    script = ("import gpipe\nfrom torch import nn, ones\n"
              "gpipe.Pipeline(nn.Sequential(nn.Linear(2, 2)), ones(4, 2), devices=['cuda:2'])")
    ran = run("-c", script)
    assert ran.returncode and "PyTorch sees 2 GPUs here" in ran.stderr
