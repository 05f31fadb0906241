"""The examples run at small size, and learn."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *arguments):
    own = dict(os.environ, HF_HUB_OFFLINE="1")
    found = subprocess.run([sys.executable, str(EXAMPLES / name), *arguments], text=True,
                           capture_output=True, timeout=300, env=own)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout


def losses(text):
    return [float(own) for own in re.findall(r"step +\d+ +loss ([\d.]+)", text)]


def test_train_gpt(tmp_path):
    small = ["--steps", "31", "--width", "32", "--blocks", "2", "--length", "32"]
    one = run("train_gpt.py", *small, "--stages", "1")
    two = run("train_gpt.py", *small, "--stages", "2", "--out", str(tmp_path / "w.pt"))
    assert losses(one) == losses(two)
    assert losses(one)[-1] < losses(one)[0] - 1
    assert (tmp_path / "w.pt").exists()


def test_train_resnet():
    found = losses(run("train_resnet.py", "--size", "32", "--samples", "8", "--steps", "3"))
    assert len(found) == 3


def test_huggingface(tmp_path):
    out = run("huggingface.py", "--steps", "4", "--out", str(tmp_path))
    own = float(re.search(r"own loss ([\d.]+)", out)[1])
    assert losses(out)[0] == pytest.approx(own, abs=2e-4)
    assert losses(out)[-1] < own and (tmp_path / "model.safetensors").exists()
    assert float(re.search(r"now ([\d.]+)", out)[1]) < losses(out)[-1]
