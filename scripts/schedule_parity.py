#!/usr/bin/env python3
"""Schedule files to and from torch.distributed.pipelining, by PyTorch's own code.

Usage: schedule_parity.py [--short]      (part of make parity and .ci/run; needs PyTorch, see
                                         pytorch.py)

  from PyTorch   its generators write every schedule that they have as lists (all but GPipe
                 and 1F1B) for K <= 8 devices and several M, in both dialects: compute
                 only, and with communication. `gpipe schedule` reads and validates each.
                 LoopedBFS descends in its backwards, so each of its files has to be refused with
                 the remedy.
  trained        one small file of each schedule trains, and the weights have the bits of a run with
                 one stage
  to PyTorch     `gpipe schedule --csv` writes our schedules; PyTorch reads and lowers them

With --short, K is 2 and 4 only. The exit code is 1 where anything differs.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from torch.distributed.pipelining import schedules as peers
from torch.distributed.pipelining.stage import _PipelineStageBase

ROOT = Path(__file__).resolve().parent.parent
GPIPE = ROOT / "target" / "debug" / "gpipe"
LOOPS = {
    "GPipe": (peers.ScheduleGPipe, 1),
    "1F1B": (peers.Schedule1F1B, 1),
    "Interleaved1F1B": (peers.ScheduleInterleaved1F1B, 2),
    "InterleavedZeroBubble": (peers.ScheduleInterleavedZeroBubble, 2),
    "LoopedBFS": (peers.ScheduleLoopedBFS, 2),
    "ZBVZeroBubble": (peers.ScheduleZBVZeroBubble, 2),
    "DualPipeV": (peers.ScheduleDualPipeV, 2),
}
OURS = ["gpipe", "1f1b", "zb-h1", "zb-v", "v-half", "v-min", "interleaved:2", "interleaved-zb:2",
        "breadth-first:2"]
SHARDED = {peers.UNSHARD, peers.RESHARD, peers.REDUCE_GRAD}
CONFIG = """
[model]
vocabulary = 257
features = 16
heads = 2
hidden = 16
blocks = 4
[data]
sequence = 8
[train]
steps = 3
mini_batch = 8
"""


class Stage(_PipelineStageBase):
    """A stage of which the generators ask only how many there are, and where."""

    def __init__(self, index, stages, rank, devices):
        self.stage_index, self.num_stages = index, stages
        self.group_rank, self.group_size = rank, devices
        self.has_backward = True
        self.submod, self.device = None, "cpu"
        self.stage_index_to_group_rank = {}

    def _create_grad_recv_info(self, act_send_info):
        raise NotImplementedError

    def _prepare_forward_infra(self, *arguments):
        raise NotImplementedError


def fail(message):
    sys.exit(f"schedule_parity: {message}")


def gpipe(*arguments, folder=None, fails=False):
    done = subprocess.run([GPIPE, *map(str, arguments)], cwd=folder, text=True,
                          capture_output=True)
    if (done.returncode != 0) != fails:
        fail(f"gpipe {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def generated(name, devices, micro_batches):
    """PyTorch's schedule object, or None where it refuses this size."""
    kind, chunks = LOOPS[name]
    if name in ("GPipe", "1F1B"):
        return None  # these two have no list of actions in PyTorch
    stages = [Stage(rank, devices * chunks, 0, devices) for rank in range(chunks)]
    try:
        return kind(stages, micro_batches, loss_fn=lambda *_: None)
    except (ValueError, AssertionError) as error:
        print(f"  {name}, K = {devices}, M = {micro_batches}: PyTorch refuses: {error}")
        return None


def dump(schedule, path, with_messages):
    schedule._dump_csv(path, format="compute_comms" if with_messages else "compute_only")


def read_all(folder, short):
    """Reads what PyTorch generates. Returns one small file of each schedule."""
    small, read, refused = {}, 0, 0
    for devices in (2, 4) if short else range(1, 9):
        for micro_batches in sorted({devices, 2 * devices, 3 * devices, 16}):
            for name in LOOPS:
                schedule = generated(name, devices, micro_batches)
                if schedule is None:
                    continue
                for dialect in ("only", "comms"):
                    path = folder / f"{name}-{devices}-{micro_batches}-{dialect}.csv"
                    dump(schedule, path, dialect == "comms")
                    if name == "LoopedBFS" and micro_batches > 1:
                        text = gpipe("schedule", f"file:{path}", fails=True)
                        if "use breadth-first:V instead" not in text:
                            fail(f"{path.name}: {text}")
                        refused += 1
                        continue
                    text = gpipe("schedule", f"file:{path}")
                    said = "sends and receives of the file are left out" in text
                    if said != (dialect == "comms" and devices > 1):
                        fail(f"{path.name}: {text[:600]}")
                    read += 1
                    if (devices, micro_batches) == (2, 4):
                        small[path] = name
    print(f"from PyTorch: {read} files are valid, {refused} of LoopedBFS are refused")
    if read < 20 or refused < 4:
        fail("that is too few")
    return small


def train_all(folder, small):
    (folder / "tiny.toml").write_text(CONFIG)
    (folder / "text.txt").write_text("".join(f"stage {i % 7} waits for {i * i % 97}; "
                                             for i in range(300)))
    base = ["train", "tiny.toml", "--text", "text.txt", "--micro-batches", 4]
    gpipe(*base, "--stages", 1, "--out", "one", folder=folder)
    expected = weights(folder / "one")
    for number, path in enumerate(small):
        out = f"own-{number}"
        gpipe(*base, "--stages", 2, "--schedule", f"file:{path}", "--out", out, folder=folder)
        if weights(folder / out) != expected:
            fail(f"{path.name}: other bits than one stage")
    print(f"trained: {len(small)} files have the bits of one stage")
    if len(small) < 6:
        fail("that is too few")


def weights(run):
    return (run / "weights.safetensors").read_bytes()


def write_all(folder):
    count = 0
    for name in OURS:
        for devices, micro_batches in ((2, 4), (4, 8)):
            path = folder / f"ours-{count}.csv"
            gpipe("schedule", name, "--stages", devices, "--micro-batches", micro_batches,
                  "--csv", path)
            in_v = name in ("zb-v", "v-half", "v-min")
            chunks = 2 if in_v or ":" in name else 1
            stages = [Stage(rank, devices * chunks, 0, devices) for rank in range(chunks)]
            theirs = peers._PipelineScheduleRuntime(stages, micro_batches,
                                                    loss_fn=lambda *_: None)
            theirs.pipeline_order = {}
            ranks = peers.generate_stage_to_rank_mapping(devices, devices * chunks,
                                                         "v" if in_v else "loop")
            theirs.stage_index_to_group_rank = ranks
            theirs._load_csv(path, format="compute_only")
            if sorted(theirs.pipeline_order) != list(range(devices)):
                fail(f"{name}: PyTorch read {len(theirs.pipeline_order)} ranks")
            # Their simulation finds what waits for itself. It knows nothing of sharded parameters.
            lowered = {rank: [action for action in actions
                              if action is not None and action.computation_type not in SHARDED]
                       for rank, actions in theirs.pipeline_order_with_comms.items()}
            peers._simulate_comms_compute(lowered, lambda stage: ranks[stage], devices * chunks)
            count += 1
    print(f"to PyTorch: it read and lowered {count} files of ours")


def main():
    short = "--short" in sys.argv[1:]
    if set(sys.argv[1:]) - {"--short"}:
        fail("it takes --short or nothing")
    build = ["cargo", "build", "--quiet", "--locked", "--package", "gpipe-cli"]
    if subprocess.run(build, cwd=ROOT).returncode:
        fail("gpipe could not be built")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = read_all(folder, short)
        train_all(folder, small)
        write_all(folder)


if __name__ == "__main__":
    main()
