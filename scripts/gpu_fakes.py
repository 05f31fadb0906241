"""What the tests of the GPU kit share: a kit and a Python that are small shell scripts."""

import contextlib
import hashlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]

# What a program of the kit prints: enough of each line for the report.
STEP_LINE = {"loss": [2.5], "step_ms": [9.0] * 5 + [3.0] * 10, "peak_bytes": [3 << 20]}
PEER_LINE = {"loss": [2.5], "step_ms": [9.0] * 5 + [6.0] * 10, "peak_tensor_bytes": 4 << 20}
WAY = {"what": "way", "stages": 2, "schedule": "1f1b", "remat": "never", "tensors": 5}
FIRST = {"tensor": "step 1 gradient head.weight", "difference": 1e-7, "largest_value": 0.5}
LINES = {
    "bits": [
        {**WAY, "what": "again", "equal": True},
        {**WAY, "equal": True},
        {**WAY, "equal": False, "different": 2, "first": FIRST},
    ],
    "gpt_step": [STEP_LINE],
    "amoeba_step": [STEP_LINE],
    "prediction": [
        {
            "remat": "never",
            "predicted_ms": 90.0,
            "step_ms": 100.0,
            "predicted_peaks": [10, 20],
            "peaks": [10, 40],
        }
    ],
}
FITS = {
    "parameters": 82_000_000,
    "parameter_bytes": 1_300_000_000,
    "activation_bytes": 6_000_000_000,
}
MEMORY = f"""case "$*" in
*filters=2[0-2]*) echo '{json.dumps(FITS)}' ;;
*) echo '{{"refused": "out of memory"}}' ;;
esac"""
PROBE = {
    "torch": "2.11.0+cu130",
    "cuda": "13.0",
    "cudnn": 91900,
    "lib": "/nowhere",
    "gpus": 1,
    "gpu": "NVIDIA H200",
    "gpu_bytes": 1 << 37,
}


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def says(lines):
    return "\n".join(f"echo '{json.dumps(line)}'" for line in lines)


def refusal_of(call, *given):
    """What a call says when it refuses."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            call(*given)
    except SystemExit as end:
        return str(end)
    raise AssertionError("it did not refuse")


class InFolder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def kit(self, **other):
        """A kit of scripts. A program of another text than usual is given by its name."""
        kit = self.folder / "kit"
        kit.mkdir(exist_ok=True)
        texts = {name: says(lines) for name, lines in LINES.items()}
        texts |= {"gpu": "echo 'test gpu_one ... ok'", "memory": MEMORY} | other
        entries = {}
        for name, text in texts.items():
            data = script(kit / name, text).read_bytes()
            entries[name] = {
                "bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
                "glibc": "2.34",
            }
        manifest = {
            "commit": "abc",
            "rustc": "rustc 1.95.0",
            "libtorch": "2.11.0",
            "programs": entries,
        }
        (kit / "manifest.json").write_text(json.dumps(manifest))
        return kit

    def python(self, **probe):
        """A Python whose PyTorch says this of itself, and whose programs print a step's line."""
        answer = says([{**PROBE, **probe}])
        return script(
            self.folder / "python",
            f'if [ "$1" = -W ]; then\n{answer}\nelse\n{says([PEER_LINE])}\nfi',
        )

    def run_kit(self, *arguments, kit=None, python=None):
        """(results, report, what was printed) of the script."""
        out = self.folder / "out"
        kit, python = kit or self.kit(), python or self.python()
        environment = dict(os.environ, OUT=str(out), TORCH_PYTHON=str(python))
        command = [ROOT / "scripts" / "gpu_first_hour.sh", "run", "--kit", kit, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return (
            json.loads((out / "results.json").read_text()),
            (out / "report.md").read_text(),
            done.stdout,
        )
