#!/usr/bin/env python3
"""The script of docs/guides/processes.md runs under Slurm, and ends with the weights of one
process, byte for byte.

    python3 scripts/slurm.py        (make slurm; needs the gpipe command, and Debian's slurm-wlm)

Slurm's controller and one of its daemons run here, with a configuration, ports and a munged of
their own, in a temporary folder. Two tasks train. Where Slurm is missing or cannot run, it says
why, and ends.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tiny

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guides" / "processes.md"
GPIPE = ROOT / "target" / "release" / "gpipe"
PROGRAMS = ["munged", "slurmctld", "slurmd", "sbatch", "scontrol", "sinfo"]
READY_S = 60
JOB_S = 300
SLURM = """
ClusterName=gpipe
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={ctld}
SlurmdPort={slurmd}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SchedulerType=sched/builtin
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Skipped(Exception):
    """Why it cannot run here."""


def free_port():
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


def script():
    """The commands that the page has for Slurm."""
    found = re.search(r"^```sh\n(#!/bin/bash\n# Slurm.*?)^```$", PAGE.read_text(encoding="utf-8"),
                      re.MULTILINE | re.DOTALL)
    if found is None:
        sys.exit(f"slurm: {PAGE.name} has no script for Slurm")
    return found.group(1)


class Slurm:
    """Munge, a controller and a daemon, which end with this."""

    def __init__(self, folder):
        self.folder = folder
        self.processes = []
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self, *command):
        log = open(self.folder / f"{Path(command[0]).name}.out", "wb")
        self.processes.append(subprocess.Popen(command, stdout=log, stderr=log,
                                               env=self.environment, cwd=self.folder))

    def __enter__(self):
        folder, host = self.folder, socket.gethostname().split(".")[0]
        for name in ("state", "spool"):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        (folder / "slurm.conf").write_text(SLURM.format(
            host=host, user=os.environ.get("USER", "root"), ctld=free_port(), slurmd=free_port(),
            folder=folder, cores=os.cpu_count() or 1))
        self.start("munged", "--foreground", "--force", f"--key-file={key}",
                   f"--socket={folder}/munge.socket", f"--pid-file={folder}/munge.pid",
                   f"--log-file={folder}/munge.log", f"--seed-file={folder}/munge.seed")
        self.until(lambda: (folder / "munge.socket").exists(), "munged serves its socket")
        self.start("slurmctld", "-D", "-f", self.environment["SLURM_CONF"])
        self.start("slurmd", "-D", "-f", self.environment["SLURM_CONF"], "-N", host)
        self.until(self.is_idle, "the node is ready")
        return self

    def is_idle(self):
        said = subprocess.run(["sinfo", "--noheader", "--format=%T"], env=self.environment,
                              capture_output=True, text=True, timeout=READY_S)
        return said.stdout.strip() == "idle"

    def until(self, is_so, what):
        end = time.monotonic() + READY_S
        while not is_so():
            ended = [one.args[0] for one in self.processes if one.poll() is not None]
            if ended or time.monotonic() > end:
                raise Skipped(f"Slurm does not run here: not so in {READY_S} s: {what};"
                              f" ended: {', '.join(ended) or 'none'}: {self.last_lines()}")
            time.sleep(0.2)

    def last_lines(self):
        logs = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        lines = [path.read_text(errors="replace").strip().splitlines()[-1:] for path in logs]
        return "; ".join(line[0] for line in lines if line)

    def __exit__(self, *_):
        for process in reversed(self.processes):
            process.terminate()
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def job(slurm, folder):
    """Runs the page's script in two tasks."""
    text = script().replace("configs/gpt.toml", "tiny.toml").replace("/shared/run", "two")
    (folder / "job.sh").write_text(text)
    done = subprocess.run(["sbatch", "--wait", "--ntasks=2", "--output=job.txt", "job.sh"],
                          cwd=folder, timeout=JOB_S, capture_output=True, text=True,
                          env={**slurm.environment,
                               "PATH": f"{GPIPE.parent}:{os.environ['PATH']}"})
    printed = (folder / "job.txt").read_text() if (folder / "job.txt").exists() else ""
    if done.returncode:
        sys.exit(f"slurm: the job failed:\n{done.stderr}\n{printed[-4000:]}\n{slurm.last_lines()}")
    return printed


def main():
    if not GPIPE.exists():
        sys.exit(f"{GPIPE} is not there: make build")
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    try:
        if missing:
            raise Skipped(f"there is no {', '.join(missing)}: apt install slurm-wlm")
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            tiny.write(folder)
            with Slurm(folder) as slurm:
                printed = job(slurm, folder)
            subprocess.run([GPIPE, "train", "tiny.toml", "--out", "one"], cwd=folder, check=True,
                           stdout=subprocess.DEVNULL)
            one, two = ((folder / run / "weights.safetensors").read_bytes()
                        for run in ("one", "two"))
    except Skipped as reason:
        print(f"slurm: skipped: {reason}")
        return
    if one != two:
        sys.exit(f"slurm: the weights of two tasks are not those of one process\n{printed}")
    print(f"slurm: two tasks end with the {len(one)} bytes of weights of one process")


if __name__ == "__main__":
    main()
