#!/usr/bin/env python3
"""Compares gpipe's BLEU and chrF with sacreBLEU's, on made-up sentences.

Usage: score_parity.py [--write] [--prove] [--install]      (make parity)

pip installs sacreBLEU 2.6.0 once into $GPIPE_HOME/sacrebleu-2.6.0 (90 MB with what it needs; see
packages.py). This script generates the sentences from a seed, one kind after the other: plain
words, numbers, punctuation, entities of XML, letters from everywhere, odd white space, empty lines,
repetition, single words, soups of characters. A sentence has one to three references. The corpora
are all sentences, each kind, those with as many references, and a few of one to three sentences.

The driver `score` and sacreBLEU score each corpus, with many settings, and every sentence for
itself. No two numbers may differ by more than 1e-9 (of 100), and words and signatures not at all.
Where they differ, the script prints the places and ends with exit code 1.

Without an option it also checks that crates/score/tests/sacrebleu.json is what sacreBLEU says
today.

--write    write that file, which the tests compare with where there is no sacreBLEU
--prove    show that each of some deliberate faults is found
--install  only put sacreBLEU in place
"""

import argparse
import json
import random
import string
import subprocess
import sys
from pathlib import Path

import packages

VERSION = "2.6.0"
ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "crates" / "score" / "tests" / "sacrebleu.json"
TOLERANCE = 1e-9
SEED = 20240611
MORE_SEEDS = 4  # beyond the golden file's
OF_A_KIND = 30

BLEU = [
    {},
    {"lowercase": True},
    {"tokenizer": "none"},
    {"tokenizer": "char"},
    {"tokenizer": "char", "lowercase": True, "smooth": "none"},
    {"smooth": "none"},
    {"smooth": "floor=0.1"},
    {"smooth": "floor=0.75"},
    {"smooth": "add-k=1"},
    {"smooth": "add-k=0.25", "lowercase": True},
    {"smooth": "add-k=0"},
    {"effective_order": True},
    {"effective_order": True, "smooth": "floor=0"},
    {"effective_order": True, "smooth": "add-k=1"},
]
CHRF = [
    {},
    {"lowercase": True},
    {"word_order": 2},
    {"word_order": 2, "lowercase": True},
    {"char_order": 3, "word_order": 1, "beta": 1},
    {"char_order": 0, "word_order": 4, "beta": 3},
]

# -- Sentences

SYLLABLES = "ba ce di fo gu har kel min nor pas quo ril sta tun ves wy xi zo".split()
NUMBERS = ["7", "3.14", "1,234.5", "1,2,3", ".5", "5.", "1-2", "-3", "2024-05-06", "10%", "$4.50",
           "1/2", "12:30", "v1.2.3-4", "1.,2", "9..9", "1,-2", "7-", "--8", "0x1F", "3.x", "x.3",
           "1.000,50", "٣٫١٤", "²", "５.５"]
MARKS = ["...", "..", ".,", ",.", "?!", "--", "-", "'", "''", "``", '"', "(", ")", "[a]", "{b}",
         "a.b,c", "don't", "'tis", "(so)", "\"so\"", "e.g.,", "and/or", "x_y", "re-do", "a-1",
         "1-a", "@me", "#1", "~/", "\\n", "a|b", "^", "<b>", "C++", "…", "«so»", "„so“",
         "–", "—", "¿so?", "。", "、", *string.punctuation]
ENTITIES = ["&quot;", "&amp;", "&lt;", "&gt;", "&amp;lt;", "&amp;quot;", "&amp;amp;", "&lt",
            "&nbsp;", "&#39;", "<skipped>", "<skip<skipped>ped>", "-\n", "a-\nb", "a\nb",
            "--\n-\n", "&quot;so&quot;", "x&gt;=y", "&&amp;;"]
LETTERS = ["café", "cafe\u0301", "naïve", "Zürich", "straße", "ẞ", "İstanbul", "ΟΔΟΣ",
           "Σ", "ΑΣ.Β", "σς", "ČEŠTINA", "日本語", "漢字かな", "한국어",
           "中文。", "שלום", "مرحبا", "السلام عليكم،", "हिन्दी",
           "ไทย", "\u2126", "\u212a", "\u212b", "ﬁ", "Ǆ", "🙂", "👩‍👩‍👧",
           "👍🏽", "🇪🇺", "e\u0301\u0323", "\u200d", "\u200b", "\ufeff", "\u00ad",
           "𝔘𝔫𝔦", "𐐀", "Ⅷ", "\u0130i", "\u202eabc\u202c", "\u0000", "\u007f",
           "\ufffd"]
SPACES = [" ", "  ", "\t", "\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\x1f",
          "\x85", "\xa0", "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004", "\u2005",
          "\u2006", "\u2007", "\u2008", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f",
          "\u3000", "\u180e", "\u200b", "-\n", " .", ", "]


class Sentences:
    """Made from a seed: {"kind", "hypothesis", "references"}."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def make(self):
        kinds = [name.removeprefix("of_") for name in dir(self) if name.startswith("of_")]
        return [self.case(kind) for kind in kinds for _ in range(OF_A_KIND)]

    def case(self, kind):
        made = getattr(self, f"of_{kind}")()
        if isinstance(made, list):  # pieces with what is between them
            count = self.random.choices([1, 2, 3], [4, 2, 1])[0]
            return {"kind": kind, "hypothesis": "".join(self.noisy(made)),
                    "references": ["".join(self.noisy(made) if self.random.random() < 0.5 else made)
                                   for _ in range(count)]}
        return {"kind": kind, **made}

    def word(self):
        word = "".join(self.random.choices(SYLLABLES, k=self.random.randint(1, 3)))
        return self.random.choice([word, word, word, word.capitalize(), word.upper()])

    def words(self, most=20):
        return [self.word() for _ in range(self.random.randint(1, most))]

    def noisy(self, pieces):
        """Some left out, doubled, exchanged, replaced or in another case."""
        pieces = list(pieces)
        for _ in range(self.random.randint(0, 1 + len(pieces) // 4)):
            if not pieces:
                break
            at, to = self.random.randrange(len(pieces)), self.random.randrange(len(pieces))
            change = self.random.randrange(5)
            if change == 0:
                del pieces[at]
            elif change == 1:
                pieces.insert(to, pieces[at])
            elif change == 2:
                pieces[at], pieces[to] = pieces[to], pieces[at]
            elif change == 3:
                pieces[at] = self.word() + " "
            else:
                pieces[at] = pieces[at].swapcase()
        return pieces

    def mixed(self, odd, spaces=(" ", " ", " ", "")):
        """Words and odd pieces, with a space between most."""
        pieces = [self.random.choice(odd) if self.random.random() < 0.5 else self.word()
                  for _ in range(self.random.randint(1, 16))]
        return [piece + self.random.choice(spaces) for piece in pieces]

    def of_words(self):
        return [word + " " for word in self.words()]

    def of_numbers(self):
        return self.mixed(NUMBERS)

    def of_punctuation(self):
        return self.mixed(MARKS)

    def of_entities(self):
        return self.mixed(ENTITIES)

    def of_letters(self):
        return self.mixed(LETTERS)

    def of_spaces(self):
        return self.mixed(SPACES, spaces=SPACES)

    def of_repetition(self):
        return self.random.choices(
            [self.word() + " ", self.word() + self.random.choice([" ", ". ", "-"])],
            k=self.random.randint(2, 14))

    def of_single(self):
        """One word of one to many characters, the right one or not."""
        words = [self.word(), self.random.choice(MARKS + NUMBERS + LETTERS),
                 self.random.choice(string.ascii_letters)]
        return {"hypothesis": self.random.choice(words),
                "references": self.random.choices(words, k=self.random.randint(1, 3))}

    def of_empty(self):
        """Empty or blank, on one side or on both."""
        lines = ["", "", " ", "\n", "\u3000", "<skipped>", "a", "".join(self.of_words())]
        return {"hypothesis": self.random.choice(lines),
                "references": self.random.choices(lines, k=self.random.randint(1, 3))}

    def of_soup(self):
        return self.random.choices(string.printable + "0123456789.,-&;",
                                   k=self.random.randint(1, 40))


def corpora(cases):
    """(name, places of its sentences) of each."""
    def those(condition):
        return [at for at, case in enumerate(cases) if condition(case)]

    found = [("all", those(lambda case: True))]
    found += [(f"{count} references", those(lambda case: len(case["references"]) == count))
              for count in (1, 2, 3)]
    found += [(kind, those(lambda case: case["kind"] == kind))
              for kind in sorted({case["kind"] for case in cases})]
    for kind in ("single", "words", "empty"):
        places = dict(found)[kind]
        found += [(f"{size} of {kind}", places[size:2 * size]) for size in (1, 2, 3)]
    return [{"name": name, "cases": places} for name, places in found]


def document(cases, words, bleu, chrf):
    """What is compared and recorded. `bleu` and `chrf` score, given settings, a list of corpora and
    the sentences."""
    parts = corpora(cases)
    lists = [[cases[at] for at in part["cases"]] for part in parts]
    return {
        "sacrebleu": VERSION,
        "cases": [case | {"words": text} for case, text in zip(cases, words(cases), strict=True)],
        "corpora": parts,
        "bleu": [{"options": options} | bleu(options, lists, cases) for options in BLEU],
        "chrf": [{"options": options} | chrf(options, lists, cases) for options in CHRF],
    }


# -- sacreBLEU's scores

def install():
    folder, remedy = packages.once(f"sacrebleu-{VERSION}", f"sacrebleu=={VERSION}")
    if packages.version_in(str(folder), "sacrebleu") != VERSION:
        packages.fail(f"{folder} has no sacrebleu {VERSION} for this Python: {remedy}")
    return folder


def theirs(cases):
    from sacrebleu.metrics import BLEU as TheirBleu, CHRF as TheirChrf
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

    def of_corpus(metric, cases):
        references = [case["references"] for case in cases]
        streams = [[each[at] if at < len(each) else None for each in references]
                   for at in range(max(map(len, references)))]
        return metric.corpus_score([case["hypothesis"] for case in cases], streams)

    def signature(metric):
        return str(metric.get_signature()).removesuffix(f"|version:{VERSION}")

    def bleu(options, lists, cases):
        smooth, _, value = options.get("smooth", "exp").partition("=")
        settings = {"tokenize": options.get("tokenizer", "13a"), "smooth_method": smooth,
                    "force": True, "smooth_value": float(value) if value else None,
                    "lowercase": options.get("lowercase", False)}
        scores = []
        for part in lists:
            metric = TheirBleu(**settings, effective_order=options.get("effective_order", False))
            score = of_corpus(metric, part)
            scores.append({"score": score.score, "precisions": score.precisions, "bp": score.bp,
                           "sys_len": score.sys_len, "ref_len": score.ref_len,
                           "signature": signature(metric)})
        metric = TheirBleu(**settings, effective_order=True)
        sentences = [metric.sentence_score(case["hypothesis"], case["references"]).score
                     for case in cases]
        return {"corpora": scores, "sentences": sentences}

    def chrf(options, lists, cases):
        scores = []
        for part in lists:
            metric = TheirChrf(**options)
            score = of_corpus(metric, part)
            scores.append({"score": score.score, "name": score.name,
                           "signature": signature(metric)})
        sentences = [metric.sentence_score(case["hypothesis"], case["references"]).score
                     for case in cases]
        return {"corpora": scores, "sentences": sentences}

    def words(cases):
        return [Tokenizer13a()(case["hypothesis"].rstrip()) for case in cases]

    return document(cases, words, bleu, chrf)


# -- gpipe's scores

def build():
    subprocess.run(["cargo", "build", "--quiet", "--locked", "--package", "gpipe-drivers",
                    "--bin", "score"], cwd=ROOT, check=True)
    return ROOT / "target" / "debug" / "score"


def ours(driver, cases, fault=()):
    """By the driver, with more arguments to prove that a fault is found."""
    def score(options, cases, *more):
        arguments = []
        for name, value in options.items():
            arguments += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        lines = "".join(json.dumps({key: case[key] for key in ("hypothesis", "references")}) + "\n"
                        for case in cases)
        done = subprocess.run([driver, *arguments, *more, *fault], input=lines, text=True,
                              stdout=subprocess.PIPE, check=True)
        return json.loads(done.stdout)

    def bleu(options, lists, cases):
        scores = []
        for part in lists:
            found = score(options, part)
            keys = "score", "precisions", "bp", "sys_len", "ref_len"
            scores.append({key: found["bleu"][key] for key in keys}
                          | {"signature": found["bleu_signature"]})
        found = score(options, cases, "--sentences")
        return {"corpora": scores,
                "sentences": [sentence["bleu"] for sentence in found["sentences"]]}

    def chrf(options, lists, cases):
        found = [score(options, part) for part in lists]
        scores = [{"score": one["chrf"], "name": one["chrf_name"],
                   "signature": one["chrf_signature"]} for one in found]
        found = score(options, cases, "--sentences")
        return {"corpora": scores,
                "sentences": [sentence["chrf"] for sentence in found["sentences"]]}

    def words(cases):
        return [sentence["words"] for sentence in score({}, cases, "--sentences")["sentences"]]

    return document(cases, words, bleu, chrf)


# -- Comparison

def differences(ours, theirs, place=""):
    """(where, ours, theirs) of all that is not the same."""
    if isinstance(theirs, dict) and isinstance(ours, dict) and ours.keys() == theirs.keys():
        for key in theirs:
            yield from differences(ours[key], theirs[key], f"{place}/{key}")
    elif isinstance(theirs, list) and isinstance(ours, list) and len(ours) == len(theirs):
        for at, pair in enumerate(zip(ours, theirs)):
            yield from differences(*pair, f"{place}/{at}")
    elif isinstance(theirs, float) and isinstance(ours, (int, float)):
        if not abs(ours - theirs) <= TOLERANCE:
            yield place, ours, theirs
    elif ours != theirs:
        yield place, ours, theirs


def count(value):
    """How many values there are in a document."""
    inner = (value.values() if isinstance(value, dict)
             else value if isinstance(value, list) else None)
    return 1 if inner is None else sum(map(count, inner))


def text(document):
    """As JSON, with a line for each case, corpus and setting."""
    parts = []
    for key, value in document.items():
        if isinstance(value, list):
            rows = ",\n".join(json.dumps(row) for row in value)
            parts.append(f"{json.dumps(key)}: [\n{rows}\n]")
        else:
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{" + ",\n".join(parts) + "}\n"


def prove(driver):
    """Each fault must be found. True if all are."""
    cases = Sentences(SEED).make()
    right = theirs(cases)
    faults = ["--lowercase", "--effective-order", "--tokenizer none", "--tokenizer char",
              "--smooth floor=0.5", "--smooth none", "--smooth add-k=1", "--char-order 5",
              "--word-order 1", "--beta 1"]
    all_found = True
    for fault in faults:
        found = len(list(differences(ours(driver, cases, fault.split()), right)))
        all_found &= found > 0
        print(f"{'found' if found else 'NOT FOUND'}: {fault}: {found} differences", flush=True)
    return all_found


def main():
    parser = argparse.ArgumentParser(description="Compares gpipe's BLEU and chrF with sacreBLEU's.")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--prove", action="store_true")
    parser.add_argument("--install", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(install()))
    if options.install:
        return
    if options.write:
        GOLDEN.write_text(text(theirs(Sentences(SEED).make())))
        return
    driver = build()
    if options.prove:
        sys.exit(0 if prove(driver) else 1)
    compared, wrong = 0, []
    for seed in range(SEED, SEED + 1 + MORE_SEEDS):
        cases = Sentences(seed).make()
        right = theirs(cases)
        if seed == SEED:
            wrong += [(f"{GOLDEN.name}{place}", *pair) for place, *pair
                      in differences(json.loads(GOLDEN.read_text()), right)]
        wrong += [(f"seed {seed}{place}", *pair) for place, *pair
                  in differences(ours(driver, cases), right)]
        compared += count(right)
    for place, own, right in wrong[:20]:
        print(f"{place}: {own!r}, sacreBLEU has {right!r}", file=sys.stderr)
    if wrong:
        sys.exit(f"score_parity: {len(wrong)} of {compared} values differ")
    print(f"parity with sacreBLEU {VERSION}:"
          f" {compared} values of {1 + MORE_SEEDS} x {len(cases)} sentences")


if __name__ == "__main__":
    main()
