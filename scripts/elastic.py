#!/usr/bin/env python3
"""A training under torchrun's elastic launcher loses a host, goes on without it, gains it back, and
ends with the weights of an undisturbed run, byte for byte.

    python3 scripts/elastic.py     (make elastic; needs PyTorch (PYTHONPATH) and the gpipe command)

Two network namespaces are the hosts. torchrun runs in both with `--nnodes 1:2`. When checkpoints
were saved with two hosts, everything on the second one is killed. When more were saved with one
host, torchrun starts there again. Where namespaces are not permitted, it says so and ends.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tiny

ROOT = Path(__file__).resolve().parent.parent
GPIPE = ROOT / "target" / "release" / "gpipe"
STEPS = 600
# Steps after which the host is lost and comes back. It takes a while until torchrun notices either.
LOST_AT, BACK_AT = 60, 200
DEADLINE_S = 300
NETWORK = "10.214.77"
PORT = 29400
CONFIG = f"""
[model]
vocabulary = 300
features = 192
heads = 4
hidden = 768
blocks = 4
dropout = 0.1
[data]
sequence = 64
[pipeline]
stages = 2
micro_batches = 4
timeout_s = 20
[train]
steps = {STEPS}
mini_batch = 16
validation_tokens = 1000
[checkpoint]
every = "20"
"""


class Skipped(Exception):
    """Why it cannot run here."""


def ip(*arguments):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        what = f"ip {' '.join(arguments)}: {done.stderr.strip()}"
        raise Skipped(f"no network namespaces here: {what}")


class Hosts:
    """Two namespaces with a cable between them."""

    def __init__(self):
        self.names = [f"gpipe-elastic-{os.getpid()}-{host}" for host in (0, 1)]
        self.ends = [f"gpe{os.getpid() % 100000}h{host}" for host in (0, 1)]
        self.addresses = [f"{NETWORK}.{host + 1}" for host in (0, 1)]

    def __enter__(self):
        if shutil.which("ip") is None:
            raise Skipped("there is no command ip: install iproute2")
        try:
            ip("link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1])
            for name, end, address in zip(self.names, self.ends, self.addresses):
                ip("netns", "add", name)
                ip("link", "set", end, "netns", name)
                ip("-n", name, "address", "add", f"{address}/24", "dev", end)
                ip("-n", name, "link", "set", end, "up")
                ip("-n", name, "link", "set", "lo", "up")
        except Skipped:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        subprocess.run(["ip", "link", "del", self.ends[0]], capture_output=True)

    def torchrun(self, host, folder, out):
        """Starts torchrun on a host, in a process group of its own."""
        address = self.addresses[host]
        command = ["ip", "netns", "exec", self.names[host], sys.executable, "-m",
                   "torch.distributed.run", "--no-python", "--nnodes", "1:2", "--nproc-per-node",
                   "1", "--max-restarts", "20", "--rdzv-backend", "c10d", "--rdzv-endpoint",
                   f"{self.addresses[0]}:{PORT}", "--rdzv-id", "elastic", "--rdzv-conf",
                   f"is_host={1 - host},last_call_timeout=5", "--local-addr", address,
                   str(GPIPE), "train", "tiny.toml", "--out", str(out),
                   "--resume", "auto"]
        log = open(folder / f"host{host}.log", "ab")
        # With a shared store, torchrun of PyTorch 2.11 sends the store's address once. A host that
        # comes back waits for it in vain.
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log,
                                start_new_session=True, env={**os.environ, **own})


def saved(out):
    """The step of the newest checkpoint."""
    names = [path.name for path in (out / "checkpoints").glob("*") if path.is_dir()]
    digits = ["".join(c for c in name if c.isdigit()) for name in names]
    return max((int(number) for number in digits if number), default=0)


def logs(folder):
    """The ends of what the hosts printed."""
    ends = [path.read_text(errors="replace")[-4000:] for path in sorted(folder.glob("*.log"))]
    return "\n---\n".join(ends)


def wait(what, is_so, processes, folder):
    """Waits until something is so, and fails if a process ends or it takes too long."""
    end = time.monotonic() + DEADLINE_S
    while not is_so():
        if any(process.poll() is not None for process in processes) or time.monotonic() > end:
            sys.exit(f"elastic: not so in {DEADLINE_S} s: {what}\n{logs(folder)}")
        time.sleep(0.2)


def lose(process):
    """Kills torchrun and all below it at once, as a loss of power does."""
    below, all_ = {process.pid}, []
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    while below:
        all_ += below
        below = {pid for pid, parent in pairs if parent in below}
    for pid in all_:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait()


def elastic(hosts, folder):
    """Trains with a loss and a return. Returns the steps at which they were seen."""
    out = folder / "elastic"
    first, second = (hosts.torchrun(host, folder, out) for host in (0, 1))
    try:
        wait("two hosts train", lambda: saved(out) >= LOST_AT, [first, second], folder)
        lose(second)
        lost = saved(out)
        wait("one host goes on", lambda: saved(out) >= BACK_AT, [first], folder)
        second = hosts.torchrun(1, folder, out)
        back = saved(out)
        weights = out / "weights.safetensors"
        deadline = time.monotonic() + DEADLINE_S
        while not (weights.exists() and first.poll() is not None):
            if time.monotonic() > deadline or (first.poll() or 0) != 0:
                sys.exit(f"elastic: the training did not end:\n{logs(folder)}")
            time.sleep(0.2)
    finally:
        for process in (first, second):
            if process.poll() is None:
                lose(process)
    return lost, back


def main():
    if not GPIPE.exists():
        sys.exit(f"{GPIPE} is not there: make build")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tiny.write(folder, CONFIG, lines=30000)
        try:
            with Hosts() as hosts:
                lost, back = elastic(hosts, folder)
        except Skipped as reason:
            print(f"elastic: skipped: {reason}")
            return
        subprocess.run([GPIPE, "train", "tiny.toml", "--out", "alone"],
                       cwd=folder, check=True, stdout=subprocess.DEVNULL)
        worlds = [line for line in (folder / "host0.log").read_text(errors="replace").splitlines()
                  if "resuming" in line]
        one, other = ((folder / run / "weights.safetensors").read_bytes()
                      for run in ("alone", "elastic"))
        if one != other:
            sys.exit("elastic: the weights are not those of an undisturbed run")
        if len(worlds) < 2:
            sys.exit(f"elastic: it resumed {len(worlds)} times, not twice")
    print(f"elastic: a host was lost after step {lost} and came back after step {back} of {STEPS};"
          f" {len(worlds)} resumes; the {len(one)} bytes of weights are those of an undisturbed"
          " run")


if __name__ == "__main__":
    main()
