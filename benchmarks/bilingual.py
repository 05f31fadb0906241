#!/usr/bin/env python3
"""One model of many languages beside models of one language each, by the same recipe.      (make bench-bilingual)

Usage: bilingual.py [--steps 1500] [--alone 1500] [--translate 200] [--out FOLDER]
       bilingual.py --report FOLDER      (the report again, from its raw data)

The paper's figure in small (Huang et al. 2019, section 5): for large, middle and small languages BLEU and chrF of a model that learned
all of them, beside those of a model that learned that one alone. All have the recipe of configs/translation.toml with smaller layers, the same
validation sentences and the same sizes; of each its best checkpoint by validation loss counts. With the defaults all make equally many steps,
so the model of many languages has seen an eighteenth as much of each: --steps gives it more.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GPIPE = ROOT / "target" / "release" / "gpipe"
CONFIG = "configs/translation.toml"
# By size of their data.
LARGE, MIDDLE, SMALL = ["fr", "de", "ru"], ["ro", "lt", "hr"], ["cy", "is", "ga"]
OTHERS = ["cs", "es", "fi", "it", "nl", "pl", "pt_BR", "sv", "tr"]
# The recipe's model at a quarter of its size, so that ten of them are trained within an hour.
SMALLER = ["--set=model.features=128", "--set=model.heads=2", "--set=model.hidden=512"]


def gpipe(*arguments):
    result = subprocess.run([str(GPIPE), *map(str, arguments)], capture_output=True, text=True, cwd=ROOT, timeout=3 * 3600)
    if result.returncode:
        sys.exit(f"gpipe {' '.join(map(str, arguments))} failed:\n{result.stderr[-2000:]}")
    return result.stdout


def trained(languages, steps, folder, validate_every):
    """Trains the recipe on `languages`, if that was not done already."""
    if not (folder / "weights.safetensors").exists():
        named = json.dumps(languages)
        gpipe("train", CONFIG, *SMALLER, "--steps", steps, "--out", folder, "--keep-best", f"--set=data.languages={named}",
              "--set=data.fewest_pairs=1", f"--set=train.validate_every={validate_every}")
    return folder


def measured(run, languages, translate):
    """By language what `gpipe eval` finds, with the best checkpoint."""
    best = run / "checkpoints" / "best"
    named = json.dumps(languages)
    line = gpipe("eval", best if best.exists() else run, "--json", "--translate", translate, f"--set=data.languages={named}")
    return {row["language"]: row for row in json.loads(line)["languages"]}


def report(folder, raw):
    lines = ["# One model of many languages beside models of one", "",
             f"{raw['machine']}; commit {raw['commit']}; {raw['steps']} steps of all languages ({len(raw['languages'])}), {raw['alone']} of one; "
             f"{raw['translate']} held-out sentences of each.", "",
             "```sh", f"python3 benchmarks/bilingual.py --steps {raw['steps']} --alone {raw['alone']} --translate {raw['translate']}", "```", "",
             "| | language | training pairs | BLEU: all | alone | chrF: all | alone | perplexity: all | alone |", "|---|---|---|---|---|---|---|---|---|"]
    for size, languages in [("large", LARGE), ("middle", MIDDLE), ("small", SMALL)]:
        for code in languages:
            one, own = raw["all"].get(code), raw["own"].get(code)
            if not one or not own:
                continue
            cells = [f"{found['scores'][key]:.1f}" for key in ["bleu", "chrf"] for found in [one, own]]
            cells += [f"{found['perplexity']:.2f}" for found in [one, own]]
            lines.append(f"| {size} | {code} | {one['pairs']} | {' | '.join(cells)} |")
    lines += ["", "Perplexities are per token of each model's own vocabulary, so that those of one line say how sure each model is of its own "
              "tokens, and not which is better; BLEU and chrF are of text."]
    (folder / "report.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--alone", type=int, default=1500)
    parser.add_argument("--translate", type=int, default=200)
    parser.add_argument("--out")
    parser.add_argument("--binary", help="this gpipe, and nothing is built")
    parser.add_argument("--report", metavar="FOLDER")
    options = parser.parse_args()
    if options.report:
        folder = Path(options.report)
        return report(folder, json.loads((folder / "raw.json").read_text()))
    if options.binary:
        global GPIPE
        GPIPE = Path(options.binary)
    else:
        subprocess.run(["cargo", "build", "--quiet", "--release", "--locked", "--bin", "gpipe"], cwd=ROOT, check=True)
    out = Path(options.out or ROOT / "benchmarks" / f"{datetime.date.today()}-bilingual")
    runs = ROOT / "out" / "bilingual"
    out.mkdir(parents=True, exist_ok=True)
    runs.mkdir(parents=True, exist_ok=True)
    # One of each size first: the report is written after every model.
    compared = [code for three in zip(SMALL, LARGE, MIDDLE) for code in three]
    languages = sorted(compared + OTHERS)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    raw = {"machine": f"{os.cpu_count()} cores", "commit": commit, "steps": options.steps, "alone": options.alone,
           "translate": options.translate, "languages": languages, "all": {}, "own": {}}
    run = trained(languages, options.steps, runs / f"all-{options.steps}", max(1, options.steps // 6))
    raw["all"] = measured(run, languages, options.translate)
    for code in compared:
        run = trained([code], options.alone, runs / f"{code}-{options.alone}", max(1, options.alone // 12))
        raw["own"].update(measured(run, [code], options.translate))
        (out / "raw.json").write_text(json.dumps(raw) + "\n")
        report(out, raw)


if __name__ == "__main__":
    main()
