#!/usr/bin/env python3
"""One model of many languages beside models of one language each, by the same recipe.
                                                                        (make bench-bilingual)

Usage: bilingual.py [--steps 1500] [--alone 1500] [--translate 200] [--out FOLDER]
       bilingual.py --report FOLDER      (the report again, from its raw data)

The paper's figure in small (Huang et al. 2019, section 5): for large, middle and small languages
BLEU and chrF of a model that learned all of them, beside those of a model that learned that one
alone. All have the recipe of configs/translation.toml with smaller layers, the same validation
sentences and the same sizes. Of each its best checkpoint by validation loss counts. With the
defaults all make equally many steps, so the model of many languages has seen an eighteenth as much
of each: --steps gives it more.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import folders
import rounds
from figures import ROOT, commit, of_table, paragraph
from machine import here

CONFIG = "configs/translation.toml"
# By size of their data.
SIZES = {"large": ["fr", "de", "ru"], "middle": ["ro", "lt", "hr"], "small": ["cy", "is", "ga"]}
OTHERS = ["cs", "es", "fi", "it", "nl", "pl", "pt_BR", "sv", "tr"]
# The recipe's model at a quarter of its size, so that ten of them are trained within an hour.
SMALLER = ["--set=model.features=128", "--set=model.heads=2", "--set=model.hidden=512"]
STEPS, ALONE, TRANSLATE = 1500, 1500, 200
LIMIT_S = 3 * 3600


def gpipe(program, *arguments):
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT_S)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def trained(program, languages, steps, folder, validate_every):
    """Trains the recipe on `languages`, if that was not done already."""
    if not (folder / "weights.safetensors").exists():
        settings = [f"--set=data.languages={json.dumps(languages)}", "--set=data.min_pairs=1"]
        settings.append(f"--set=train.validate_every={validate_every}")
        flags = ["--steps", steps, "--out", folder, "--keep-best"]
        gpipe(program, "train", CONFIG, *SMALLER, *flags, *settings)
    return folder


def measured(program, run, languages, translate):
    """By language what `gpipe eval` finds, with the best checkpoint."""
    best = run / "checkpoints" / "best"
    named = f"--set=data.languages={json.dumps(languages)}"
    model = best if best.exists() else run
    line = gpipe(program, "eval", model, "--json", "--translate", translate, named)
    return {row["language"]: row for row in json.loads(line)["languages"]}


def read(folder):
    return json.loads((folder / "raw.json").read_text())


KEYS = [
    ("BLEU", lambda found: found["scores"]["bleu"]),
    ("chrF", lambda found: found["scores"]["chrf"]),
    ("perplexity", lambda found: found["perplexity"]),
]


def table(raw):
    """A row for each language: of each key the model of all, and the language's own."""
    rows = []
    for size, languages in SIZES.items():
        for code in languages:
            one, own = raw["all"].get(code), raw["own"].get(code)
            if one and own:
                cells = [f"{look(model):.1f}" for _, look in KEYS for model in [one, own]]
                rows.append([size, code, one["pairs"], *cells])
    header = [f"{key}: {which}" for key, _ in KEYS for which in ["all", "alone"]]
    return of_table(["data", "language", "training pairs", *header], rows)


def what(raw):
    return (
        f"*All* is one model that learned {len(raw['languages'])} languages in {raw['steps']}"
        f" steps, *alone* a model of one language in {raw['alone']} steps, by the same recipe. BLEU"
        f" and chrF are of {raw['translate']} held-out sentences of each language. More is better."
    )


def report(folder):
    """The text of the report."""
    raw = read(folder)
    lines = [
        *folders.heading("One model of many languages beside models of one", folder),
        *paragraph(
            f"{what(raw)} Perplexities are per token of each model's own vocabulary: they say how"
            " sure a model is of its own tokens, not which model is better."
        ),
        "",
        *table(raw),
    ]
    return "\n".join(lines) + "\n"


def measure(options, folder):
    program = options.binary or rounds.GPIPE
    runs = ROOT / "out" / "bilingual"
    runs.mkdir(parents=True, exist_ok=True)
    # One of each size first: the raw data are written after every model.
    compared = [code for three in zip(*reversed(SIZES.values()), strict=True) for code in three]
    languages = sorted(compared + OTHERS)
    raw = {
        "machine": here().title(),
        "commit": commit(),
        "steps": options.steps,
        "alone": options.alone,
        "translate": options.translate,
        "languages": languages,
        "all": {},
        "own": {},
    }
    every = max(1, options.steps // 6)
    run = trained(program, languages, options.steps, runs / f"all-{options.steps}", every)
    raw["all"] = measured(program, run, languages, options.translate)
    for code in compared:
        every = max(1, options.alone // 12)
        run = trained(program, [code], options.alone, runs / f"{code}-{options.alone}", every)
        raw["own"].update(measured(program, run, [code], options.translate))
        (folder / "raw.json").write_text(json.dumps(raw) + "\n")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--alone", type=int, default=ALONE)
    parser.add_argument("--translate", type=int, default=TRANSLATE)
    parser.add_argument("--binary", type=Path, help="this gpipe, and nothing is built")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--report", type=Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.report:
        return folders.rewrite(options.report, report)
    if not options.binary:
        rounds.build_gpipe()
    partial = folders.reasons(
        (options.steps < STEPS, f"--steps {options.steps}, not {STEPS}"),
        (options.alone < ALONE, f"--alone {options.alone}, not {ALONE}"),
        (options.translate < TRANSLATE, f"--translate {options.translate}, not {TRANSLATE}"),
    )
    with folders.run("bilingual", report, partial, options.out) as folder:
        measure(options, folder)


if __name__ == "__main__":
    main()
