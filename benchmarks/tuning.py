#!/usr/bin/env python3
"""Fine-tuning Qwen3-0.6B's shape: `gpipe train` beside transformers, with PEFT for adapters.
                                                                        (make bench-tuning)

Usage: tuning.py [--rounds 3] [--steps 4] [--only adapters|whole] [--out FOLDER]
       tuning.py --report FOLDER      (the report again, from its raw data)

transformers writes a model of the shape of Qwen3-0.6B with random weights once. Both programs train
the model in bfloat16 on 2 rows of 512 tokens per step: adapters of rank 16 on all linear layers,
and all weights with AdamW. gpipe runs K = 2 stages of one thread each, M = 2 and its defaults.
transformers runs in one process with two threads and gradient checkpointing. For all weights, both
store float32 and compute in bfloat16 (autocast in transformers).

In each round both programs run in turn, and the order alternates. The time of a step is the median
of the steps after the first. Memory is the peak of the process from its first step to its last
(VmHWM), minus the weights in the dtype in which they are stored. For gpipe, the report also has the
bytes that its allocator counted, beside the prediction. A ratio is the peer's time divided by
gpipe's time in the same round.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import folders
from checkpoint import canary
from figures import ROOT, between, commit, median, of_table, paragraph
from machine import here
from rounds import GPIPE

sys.path.insert(0, str(ROOT / "scripts"))
import packages  # noqa: E402

ROUNDS, STEPS, ROWS, LENGTH, RANK = 3, 4, 2, 512, 16
KINDS = ("adapters", "whole")
WHAT = (
    f"Steps of {ROWS} rows of {LENGTH} tokens in bfloat16, on a model of the shape of Qwen3-0.6B"
    f" with random weights. Adapters: rank {RANK} on all linear layers of all blocks, beside PEFT."
    " Whole: all weights with AdamW, float32 weights. The peer: transformers on two threads, with"
    " gradient checkpointing. gpipe: two stages of a thread each."
)

MAKE = """
import sys, torch, transformers
from tokenizers import Tokenizer, models, pre_tokenizers, decoders
folder = sys.argv[1]
words = {"<|endoftext|>": 0} | {f"w{number}": number for number in range(1, 32000)}
own = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
own.pre_tokenizer, own.decoder = pre_tokenizers.WhitespaceSplit(), decoders.Fuse()
transformers.PreTrainedTokenizerFast(tokenizer_object=own,
                                     eos_token="<|endoftext|>").save_pretrained(folder)
torch.manual_seed(1)
config = transformers.Qwen3Config(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
    num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960,
    tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    dtype="bfloat16", eos_token_id=0, bos_token_id=None)
model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
model.save_pretrained(folder)
"""

PEER = """
import json, sys, time, torch, transformers
transformers.logging.set_verbosity_error()
folder, kind, steps, rows, length, rank = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
from common import set_up
set_up(2)
dtype = torch.bfloat16 if kind == "adapters" else torch.float32
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
if kind == "adapters":
    import peft
    model = peft.get_peft_model(model, peft.LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=[
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]))
model.config.use_cache = False
model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
if kind == "adapters":
    model.enable_input_require_grads()
model.train()
trained = [own for own in model.parameters() if own.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=2e-4, betas=(0.9, 0.95), fused=True)
seconds, losses = [], []
for step in range(steps + 1):
    tokens = torch.tensor([[1 + (17 * (step * rows + row) + 7 * at * at) % 31998
                            for at in range(length)] for row in range(rows)])
    if step == 1:
        open("/proc/self/clear_refs", "w").write("5")
    start = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "whole"):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    seconds.append(time.perf_counter() - start)
    losses.append(loss.item())
status = open("/proc/self/status").read()
peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
weights = sum(own.numel() * own.element_size() for own in model.parameters())
print(json.dumps({"seconds": seconds[1:], "peak": peak, "weights": weights,
                  "losses": losses}))
"""


def run(command):
    done = subprocess.run(list(map(str, command)), cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"tuning: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def lines_of(steps):
    """Writes a JSONL file with as many samples of one row of tokens as a run needs."""
    text = []
    for sample in range(ROWS * (steps + 1) + 1):
        tokens = [1 + (17 * sample + 7 * at * at) % 31998 for at in range(LENGTH)]
        text.append(json.dumps({"text": " ".join(f"w{token}" for token in tokens)}))
    return "\n".join(text) + "\n"


def of_gpipe(model, kind, options, aside):
    """Times, peaks and printed predictions of a run of `gpipe train`."""
    data, out = aside / "rows.jsonl", aside / f"run-{time.monotonic_ns()}"
    data.write_text(lines_of(options.steps))
    command = [GPIPE, "train", "--from", model, "--data", data, "--stages", "2", "--dtype",
               "bfloat16", "--steps", options.steps + 1, "--out", out, "--micro-batches", ROWS,
               "--set", f"data.sequence={LENGTH}", "--set", f"train.mini_batch={ROWS}", "--set",
               "data.cache=off", "--set", "train.validation_tokens=1", "--set",
               "checkpoint.every=none", *options.gpipe]
    if kind == "adapters":
        command += ["--lora", RANK]
    child = subprocess.Popen(list(map(str, command)), cwd=ROOT, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    peak, cleared, metrics = 0, False, out / "metrics.jsonl"
    while child.poll() is None:
        try:
            done = metrics.read_text().count('"kind":"step"') if metrics.exists() else 0
            if not cleared and done > 0:
                Path(f"/proc/{child.pid}/clear_refs").write_text("5")
                cleared, peak = True, 0
            status = Path(f"/proc/{child.pid}/status").read_text()
            # After the last step the run saves a checkpoint.
            if cleared and done <= options.steps and "VmHWM:" in status:
                peak = max(peak, int(status.split("VmHWM:")[1].split()[0]) * 1024)
        except (OSError, IndexError):
            pass
        time.sleep(0.05)
    printed, errors = child.communicate()
    if child.returncode:
        sys.exit(f"tuning: {' '.join(map(str, command))}\n{printed}{errors}")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    return printed.replace(f"{aside}/", ""), steps, peak


def of_peer(python, model, kind, options):
    printed = run([*python, "-c", PEER, model, kind, options.steps, ROWS, LENGTH, RANK])
    return json.loads(printed.splitlines()[-1])


def measure(options, folder):
    torch = run([sys.executable, "scripts/pytorch.py"]).strip()
    path = f"PYTHONPATH={packages.peft()}:{packages.transformers()}:{torch}:{ROOT}/benchmarks/peers"
    python = ["env", path, sys.executable]
    with tempfile.TemporaryDirectory(dir=options.scratch) as aside:
        aside = Path(aside)
        model = aside / "model"
        run([*python, "-c", MAKE, model])
        rounds = []
        for number in range(options.rounds):
            found = {"canary_s": canary(), "arms": {}}
            for kind in options.kinds:
                jobs = [("gpipe", lambda: figures_of(*of_gpipe(model, kind, options, aside))),
                        ("peer", lambda: of_peer(python, model, kind, options))]
                found["arms"][kind] = {who: job()
                                       for who, job in (jobs if number % 2 else jobs[::-1])}
            rounds.append(found)
            print(f"round {number + 1}: {found['arms']}", file=sys.stderr, flush=True)
            raw = {"machine": here().title(), "commit": commit(), "rounds": rounds,
                   "transformers": packages.TRANSFORMERS, "peft": packages.PEFT,
                   "gpipe": options.gpipe}
            (folder / "raw.json").write_text(json.dumps(raw, indent=1))


def figures_of(printed, steps, peak):
    """The measurements of a run that the report needs."""
    own = [step for step in steps if step["kind"] == "step"]
    return {
        "seconds": [step["step_ms"] / 1e3 for step in own[1:]],
        "losses": [step["loss"] for step in own],
        "peak": peak,
        "counted": [max(step["stages"][stage]["peak_bytes"] for step in own)
                    for stage in range(len(own[0]["stages"]))],
        "printed": printed,
    }


def gib(count):
    return f"{count / 2**30:.2f}"


# Size of the stored weights in bytes: 596,049,920 in bfloat16 with adapters, otherwise in float32.
WEIGHTS = {"adapters": 2 * 596049920, "whole": 4 * 596049920}


def read(folder):
    return json.loads((folder / "raw.json").read_text())


def table(raw):
    rows = []
    for kind in KINDS:
        pairs = [one["arms"][kind] for one in raw["rounds"] if kind in one["arms"]]
        if not pairs:
            continue
        seconds = {who: [statistics.median(pair[who]["seconds"]) for pair in pairs]
                   for who in ("gpipe", "peer")}
        ratios = [peer / own for own, peer in zip(seconds["gpipe"], seconds["peer"])]
        above = {who: max(pair[who]["peak"] for pair in pairs) - WEIGHTS[kind]
                 for who in ("gpipe", "peer")}
        counted = max(sum(pair["gpipe"]["counted"]) for pair in pairs) - WEIGHTS[kind]
        rows.append([kind, f"{median(seconds['gpipe']):.1f}", f"{median(seconds['peer']):.1f}",
                     f"{median(ratios):.2f}", between(min(ratios), max(ratios), 2),
                     gib(counted), gib(above["gpipe"]), gib(above["peer"])])
    header = ["trained", "gpipe, s a step", "peer, s a step", "ratio", "least .. greatest",
              "gpipe's tensors, GiB above the weights", "its process, GiB above",
              "peer, GiB above"]
    return of_table(header, rows)


def report(folder):
    """The text of the report."""
    raw = read(folder)
    canaries = [one["canary_s"] for one in raw["rounds"]]
    took = f"The canary took {min(canaries):.3f} to {max(canaries):.3f} s."
    lines = [
        *folders.heading("Fine-tuning beside transformers and PEFT", folder),
        *paragraph(f"{WHAT} {len(raw['rounds'])} rounds, transformers {raw['transformers']}, PEFT"
                   f" {raw['peft']}. {took}"),
        "",
        *table(raw),
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--only", choices=KINDS)
    parser.add_argument("--scratch", help="folder for the model, of 20 GB")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path, metavar="FOLDER")
    parser.add_argument("gpipe", nargs="*", help="more arguments of gpipe train, after --")
    options = parser.parse_args()
    if options.report:
        return folders.rewrite(options.report, report)
    options.kinds = [options.only] if options.only else list(KINDS)
    partial = folders.reasons((options.rounds < ROUNDS, f"{options.rounds} rounds, not {ROUNDS}"),
                              (options.steps < STEPS, f"{options.steps} steps, not {STEPS}"),
                              (options.only is not None, f"only {options.only}"),
                              (options.gpipe, f"gpipe train with {' '.join(options.gpipe)}"))
    with folders.run("tuning", report, partial, options.out) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
