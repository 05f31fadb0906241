#!/usr/bin/env python3
"""Generation with a model's folder: `gpipe generate` beside transformers' `generate`.
                                                                        (make bench-generation)

Usage: generation.py [--rounds 7] [--out FOLDER]
       generation.py --report FOLDER      (the report again, from its raw data)

A Qwen 3 of 8 blocks with random weights and a vocabulary of 32,000 is written once by transformers.
In each round both programs continue the same prompts greedily, in float32 and in bfloat16, with one
text and with eight. gpipe has one stage. Both have the same number of threads, one and then two.

Time to start a program and to load weights does not count: each run is made with 8 new tokens and
with 72, and the difference is that of 64 tokens. The order alternates. Ratios are paired within a
round: the time of transformers over that of gpipe, so above 1 gpipe is faster. A canary beside each
round shows how much the machine drifted. The tokens of both must be equal in float32.
"""

import argparse
import json
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

ROUNDS, FEW, MANY = 7, 8, 72
ARMS = [(dtype, threads, texts) for dtype in ("float32", "bfloat16") for threads in (1, 2)
        for texts in (1, 8)]
WHAT = (
    f"{MANY - FEW} greedy tokens of a Qwen 3 with 8 blocks of width 512 and 32,000 tokens, random"
    " weights, after prompts of 24 tokens: `gpipe generate` with one stage beside transformers'"
    " `generate`, on the same number of threads. The ratio is the time of transformers over that of"
    " gpipe, paired within a round: the median, least and greatest."
)

PEER = """
import json, sys, time, torch, transformers
transformers.logging.set_verbosity_error()
folder, dtype, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
from common import set_up
set_up(threads)
model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=getattr(torch, dtype)).eval()
prompts = torch.tensor(json.loads(sys.stdin.read()))
def tokens(new):
    start = time.perf_counter()
    made = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
                          max_new_tokens=new, min_new_tokens=new, pad_token_id=0)
    return time.perf_counter() - start, made[:, prompts.shape[1]:].tolist()
tokens(2)
few, many = tokens(%d), tokens(%d)
print(json.dumps([many[0] - few[0], many[1]]))
""" % (FEW, MANY)

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
    vocab_size=32000, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
    num_attention_heads=8, num_key_value_heads=4, head_dim=64, max_position_embeddings=1024,
    tie_word_embeddings=False, initializer_range=0.1, eos_token_id=None, bos_token_id=None)
transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
"""


def prompts(texts):
    """Token numbers: the same length for all."""
    return [[1 + (17 * text + 7 * at * at) % 31998 for at in range(24)] for text in range(texts)]


def run(command, given=""):
    done = subprocess.run(list(map(str, command)), cwd=ROOT, text=True, input=given,
                          capture_output=True)
    if done.returncode:
        sys.exit(f"generation: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout


def of_gpipe(folder, dtype, threads, texts):
    command = [GPIPE, "generate", folder, "--temperature", "0", "--json", "--stages", "1",
               "--dtype", dtype, "--set", f"pipeline.threads_per_stage={threads}"]
    for tokens in prompts(texts):
        command += ["--prompt", " ".join(f"w{token}" for token in tokens)]
    seconds = []
    for count in (FEW, MANY):
        start = time.perf_counter()
        printed = run([*command, "--tokens", count])
        seconds.append(time.perf_counter() - start)
    made = [json.loads(line)["tokens"] for line in printed.splitlines()]
    if any(len(tokens) != MANY for tokens in made):
        sys.exit("generation: gpipe ended a text early")
    return seconds[1] - seconds[0], made


def of_peer(python, folder, dtype, threads, texts):
    printed = run([*python, "-c", PEER, folder, dtype, threads], json.dumps(prompts(texts)))
    return json.loads(printed.splitlines()[-1])


def name(arm):
    dtype, threads, texts = arm
    return f"{dtype}, {threads} thread{'s' * (threads > 1)}, {texts} text{'s' * (texts > 1)}"


def measure(options, folder):
    torch = run([sys.executable, "scripts/pytorch.py"]).strip()
    path = f"PYTHONPATH={packages.transformers()}:{torch}:{ROOT}/benchmarks/peers"
    python = ["env", path, sys.executable]
    with tempfile.TemporaryDirectory() as aside:
        model = Path(aside) / "model"
        run([*python, "-c", MAKE, model])
        rounds = []
        for number in range(options.rounds):
            found = {"canary_s": canary(), "arms": {}}
            for arm in ARMS:
                order = [("gpipe", lambda: of_gpipe(model, *arm)),
                         ("transformers", lambda: of_peer(python, model, *arm))]
                results = {who: job() for who, job in (order if number % 2 else order[::-1])}
                same = results["gpipe"][1] == results["transformers"][1]
                if arm[0] == "float32" and not same:
                    sys.exit(f"generation: {name(arm)}: the tokens differ")
                found["arms"][name(arm)] = {who: one[0] for who, one in results.items()}
            rounds.append(found)
            print(f"round {number + 1}: {found['arms']}", file=sys.stderr, flush=True)
            raw = {"machine": here().title(), "commit": commit(), "rounds": rounds,
                   "transformers": packages.TRANSFORMERS}
            (folder / "raw.json").write_text(json.dumps(raw, indent=1))


def read(folder):
    return json.loads((folder / "raw.json").read_text())


def table(raw, arms):
    rows = []
    for arm in map(name, arms):
        pairs = [one["arms"][arm] for one in raw["rounds"]]
        ratios = [pair["transformers"] / pair["gpipe"] for pair in pairs]
        each = [median([1e3 * pair[who] / (MANY - FEW) for pair in pairs])
                for who in ("gpipe", "transformers")]
        rows.append([arm, *(f"{ms:.1f}" for ms in each), f"{median(ratios):.2f}",
                     between(min(ratios), max(ratios), 2)])
    header = ["arithmetic, threads, texts", "gpipe, ms a step", "transformers, ms a step", "ratio"]
    return of_table([*header, "least .. greatest"], rows)


def report(folder):
    """The text of the report."""
    raw = read(folder)
    canaries = [one["canary_s"] for one in raw["rounds"]]
    lines = [
        *folders.heading("Generation beside transformers", folder),
        *paragraph(f"{WHAT} {len(raw['rounds'])} rounds, transformers {raw['transformers']}. The"
                   f" canary took {min(canaries):.3f} to {max(canaries):.3f} s."),
        "",
        *table(raw, ARMS),
    ]
    return "\n".join(lines) + "\n"


def summary(parts):
    """The section of RESULTS.md."""
    lines = []
    for folder in parts.values():
        text = "Greedy tokens of a small Qwen 3 with one stage, on as many threads as the peer."
        lines += [*paragraph(text), "", *table(read(folder), ARMS), ""]
    return lines


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.report:
        return folders.rewrite(options.report, report)
    partial = folders.reasons((options.rounds < ROUNDS, f"{options.rounds} rounds, not {ROUNDS}"))
    with folders.run("generation", report, partial, options.out) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
