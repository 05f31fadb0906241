"""The wheel works in another environment, without its dependencies installed again."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

WHEELS = Path(__file__).parent.parent / "wheels"


def test_the_wheel_works_elsewhere(tmp_path):
    wheels = list(WHEELS.glob("*.whl"))
    if not wheels:
        pytest.skip("no wheel: make python builds it")
    venv.create(tmp_path / "env", with_pip=False)
    interpreter = tmp_path / "env/bin/python"
    site = next((tmp_path / "env/lib").glob("python*/site-packages"))
    (site / "pytorch.pth").write_text(str(Path(torch.__file__).parent.parent) + "\n")
    subprocess.run([sys.executable, "-m", "pip", "--python", str(interpreter), "install", "--quiet",
                    "--no-deps", "--no-index", str(wheels[0])], check=True)
    program = ("import gpipe, torch; from torch import nn\n"
               "m = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))\n"
               "o = torch.optim.Adam(m.parameters())\n"
               "x = torch.randn(8, 4)\n"
               "with gpipe.Pipeline(m, x, stages=2, loss=nn.MSELoss(), optimizer=o) as p:\n"
               "    print(p.train_step(x, torch.zeros(8, 2)).step, gpipe.__file__)\n")
    own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    out = subprocess.run([str(interpreter), "-c", program], text=True, capture_output=True,
                         cwd=tmp_path, env=own)
    assert out.returncode == 0, out.stderr
    assert out.stdout.startswith(f"1 {site}")
