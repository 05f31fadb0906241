"""Reports of parts that have no runner here: their raw data are what other programs printed.

- `translation`: `gpipe train` and `gpipe eval` of configs/translation.toml
  (docs/guides/translation.md)
- `planner`: how long `gpipe plan` and the driver `planning` take
- `simulator`: how long simulating takes, by the driver `paper_tables scale`
"""

import csv
import json
import statistics

import folders
from figures import of_table, paragraph


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def languages(folder):
    return rows_of(folder / "languages.tsv")


def language_table(rows):
    """Cells of each language, and of their averages."""
    keys = ["perplexity", "unigram", "shuffled_sources", "bleu", "chrf"]
    mean = {"language": "average"}
    for key in keys:
        values = [float(row[key]) for row in rows]
        of_scores = key in ("bleu", "chrf")
        mean[key] = statistics.mean(values) if of_scores else statistics.geometric_mean(values)
    shown = [
        [row["language"], *(f"{float(row[key]):.1f}" for key in keys)] for row in [mean, *rows]
    ]
    header = ["language", "perplexity", "of a unigram model", "with exchanged sources"]
    return [*header, "BLEU", "chrF"], shown


def translation_report(folder):
    rows, run = languages(folder), json.loads((folder / "run.json").read_text())
    lines = [
        *folders.heading(f"Translation: {len(rows)} languages into English", folder),
        *paragraph(
            f"{run['steps']} steps, {run['target_tokens']} target tokens in {run['seconds']} s,"
            f" {run['step_ms']} ms a step, {run['tokens_per_s']} tokens/s, bubble"
            f" {run['bubble_percent']}%. K = {run['stages']}, M = {run['micro_batches']},"
            f" {run['schedule']}, nothing recomputed, float32. Validation loss:"
            f" {run['validation_nats_per_token']} nats per token over {run['validation_tokens']}"
            " tokens."
        ),
        "",
        *paragraph(
            f"Perplexities are per target token. Exchanged sources are other sentences of the"
            f" language. BLEU ({run['bleu_signature']}) and chrF2 ({run['chrf_signature']}) are of"
            f" {rows[0]['sentences']} held-out sentences of each language, beam {run['beam']},"
            f" length penalty {run['length_penalty']}. Averages of the languages are geometric of"
            " perplexities, arithmetic of scores."
        ),
        "",
        "![perplexity, BLEU and chrF by language](languages.svg)",
        "",
        *of_table(*language_table(rows)),
    ]
    return "\n".join(lines) + "\n"


def plans_table(folder):
    rows = [
        [row["layers"], row["devices"], row["cap"], row["seconds"], row["plans_simulated"]]
        for row in rows_of(folder / "commands.tsv")
    ]
    return of_table(["layers", "devices", "cap of each", "seconds", "plans simulated"], rows)


def planner_report(folder):
    lines = [
        *folders.heading("How long planning takes", folder),
        *paragraph(
            "Wall time of the whole command. [commands.tsv](commands.tsv) has each command and what"
            " it found. [planning.txt](planning.txt) is what the example printed, of made-up"
            " layers."
        ),
        "",
        *plans_table(folder),
    ]
    return "\n".join(lines) + "\n"


def simulator_report(folder):
    lines = [
        *folders.heading("How long simulating takes", folder),
        *paragraph(
            "Schedules of K stages and M micro-batches, one stage on each device, every micro-batch"
            " recomputed."
        ),
        "",
        (folder / "scale.md").read_text().rstrip("\n"),
    ]
    return "\n".join(lines) + "\n"
