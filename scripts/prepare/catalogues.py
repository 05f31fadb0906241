#!/usr/bin/env python3
"""Makes files of sentences and their English translations.      (make catalogues)

They come out of the translated messages of programs.

    catalogues.py [FOLDER ...] [--languages de,fr] [--out DIR] [--list]

Without a FOLDER it fetches the Debian packages listed in catalogue_packages.txt (about 98 MB) and
keeps their gettext catalogues and copyright files in

    $GPIPE_HOME/catalogues        (GPIPE_HOME defaults to ~/.cache/gpipe)

No root is needed and nothing is installed; that a system leaves translations out when it installs
packages (slim images do) makes no difference. Elsewhere than on Debian, Ubuntu and the like, name
folders that have .mo or .po files. No catalogues are read but those in the named folders.

It makes data/translations, or DIR. Each line of

    DIR/LANGUAGE.tsv.gz

is a sentence, a tab, and its English translation. A language's pairs are sorted, and each is there
once. Messages are left out that are doubtful, empty, the same on both sides, without words or with
other directives (`%s`) than their translation, and are counted by reason. DIR/made_by.json says how
the files were made, and what was left out.

DIR is written aside and renamed, so that a half-made one is never taken for a whole one. Run again,
the script does nothing unless the catalogues, the arguments or the script have changed.
"""

import argparse
import collections
import gzip
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS.parent)]
import debian  # noqa: E402
import found_files  # noqa: E402
import language_codes  # noqa: E402
import made_folder  # noqa: E402
import packages  # noqa: E402
import pair_cleaning  # noqa: E402
import plural_forms  # noqa: E402
from debian import Failed  # noqa: E402
from found_files import LeftOut, Unusable, printable  # noqa: E402
from made_folder import shown  # noqa: E402

OUT = SCRIPTS.parent.parent / "data" / "translations"
LIBRARIES = {"polib": "1.2.0"}
VERSION = 1  # of the files: another one has them made anew
MADE_BY = "gpipe/scripts/prepare/catalogues.py"
FEWEST = 20  # packages; with fewer there is too little to learn from
SUFFIXES = {".mo", ".po"}
UNKNOWN_LANGUAGE = "in English, or in a language that nothing says"
PAIRS_MAX = 20_000_000  # of a language, so that it fits in memory


class Arguments(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"catalogues: {message}; see catalogues.py --help\n")


def parsed(arguments):
    parser = Arguments(description="Makes files of sentences and their English translations.",
                       prog="catalogues.py", allow_abbrev=False)
    parser.add_argument("folders", nargs="*", metavar="FOLDER", type=Path,
                        help="catalogues to read (none: those of free Debian packages)")
    parser.add_argument("--languages", type=codes_of, metavar="CODES", default=[],
                        help="such as de,pt_BR (none: all that there are)")
    parser.add_argument("--out", type=Path, metavar="DIR", default=OUT,
                        help="the folder to make (none: data/translations)")
    parser.add_argument("--list", action="store_true", help="name all catalogues that are left out")
    return parser.parse_intermixed_args(arguments)


def codes_of(text):
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if language_codes.code(name) != name:
            meant = language_codes.code(name)
            raise argparse.ArgumentTypeError(f"{name!r} is no code of a language other than English"
                                             + (f": did you mean {meant}?" if meant else ""))
    return sorted(set(names))


def listed():
    """The packages of catalogue_packages.txt."""
    lines = (SCRIPTS / "catalogue_packages.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def fetched():
    """The folder of the free catalogues, fetched if need be."""
    folder = packages.home() / "catalogues"
    debian.fetch(listed(), folder, keep=is_catalogue, fewest=FEWEST)
    count = sum(path.is_dir() for path in folder.iterdir())
    catalogues = sum(is_catalogue(path) for path in folder.rglob("*.mo"))
    print(f"{folder}: {catalogues} catalogues of {count} packages")
    return folder


def is_catalogue(path):
    """Whether a path is that of a compiled catalogue, .../de/LC_MESSAGES/program.mo."""
    return path.suffix == ".mo" and path.parent.name == "LC_MESSAGES"


def main(arguments=None):
    given = parsed(arguments)
    out = given.out.resolve()
    made_folder.check(out, MADE_BY)
    folders = [folder.resolve() for folder in given.folders] or [fetched()]
    files, unlisted = found_files.find(folders, SUFFIXES, "catalogues")
    recipe = {
        "made_by": MADE_BY,
        "version": VERSION,
        "arguments": {"folders": [str(folder) for folder in folders], "languages": given.languages},
        "libraries": LIBRARIES,
        "files": found_files.digest(files),
    }
    record = made_folder.record_of(out, MADE_BY)
    if made_folder.is_made_by(record, recipe):
        say(out, record, given.list)
        print(made_folder.UNCHANGED)
    else:
        print(f"catalogues: reading {len(files)} files for {shown(out)}", file=sys.stderr,
              flush=True)
        say(out, make(out, recipe, files, unlisted), given.list)


def make(out, recipe, files, unlisted):
    """Makes the folder, and returns its record."""
    for name, version in LIBRARIES.items():
        packages.use(name, version)
    import catalogue_files  # Not above: it needs the library.

    asked, folders = recipe["arguments"]["languages"], " and ".join(recipe["arguments"]["folders"])
    by_language, left_out = sorted_by_language(catalogue_files, files)
    if missing := [code for code in asked if code not in by_language]:
        raise Failed(f"there are no catalogues in {', '.join(missing)} below {folders}: there are "
                     f"such in {', '.join(sorted(by_language)) or 'no language'}")
    left_out = unlisted + left_out
    record = dict(recipe, languages={}, left_out=left_out)
    with made_folder.replaced(out, record) as new:
        for language in asked or sorted(by_language):
            pairs, counts, broken = pairs_of(catalogue_files, by_language[language])
            left_out += broken
            if pairs:
                write(new / f"{language}.tsv.gz", pairs)
                record["languages"][language] = counts
        if not record["languages"]:
            raise Failed(f"there is nothing to learn from in the {len(files)} catalogues below "
                         f"{folders}: add others ({found_files.reasons(left_out)})")
    return record


def sorted_by_language(catalogue_files, files):
    """(language to paths, left out). A file is opened only where its place does not tell its
    language.
    """
    by_language, left_out = collections.defaultdict(list), []
    for path in files:
        try:
            language = catalogue_files.language_by_place(path)
            if language == "" or path.parent.name != catalogue_files.MESSAGES:
                language = language_codes.code(catalogue_files.read(path).language) or language
        except Unusable as error:
            left_out.append(left_out_file(path, *error.args))
            continue
        if language:
            by_language[language].append(path)
        else:
            left_out.append(left_out_file(path, UNKNOWN_LANGUAGE, ""))
    return by_language, left_out


def pairs_of(catalogue_files, paths):
    """(sorted pairs, counts, left out) of a language's catalogues."""
    pairs, why_not, left_out, found = set(), collections.Counter(), [], 0
    for path in paths:
        try:
            catalogue = catalogue_files.read(path)
        except Unusable as error:
            left_out.append(left_out_file(path, *error.args))
            continue
        why_not["marked as doubtful"] += catalogue.fuzzy
        forms = plural_forms.of(catalogue.plural_forms)
        for message in catalogue.messages:
            for place, translation in enumerate(message.translations):
                try:
                    english = english_of(message, place, forms)
                    if pair_cleaning.asks_for_names(message.context, message.text, translation):
                        raise pair_cleaning.NoPair(pair_cleaning.CREDITS)
                    pairs.add(pair_cleaning.pair(translation, english))
                    found += 1
                except pair_cleaning.NoPair as error:
                    why_not[error.args[0]] += 1
        if len(pairs) > PAIRS_MAX:
            raise Failed(f"there are more than {PAIRS_MAX:,} pairs of one language: name fewer "
                         "folders")
    why_not["there already"] = found - len(pairs)
    counts = {"catalogues": len(paths) - len(left_out), "pairs": len(pairs), "left_out": +why_not}
    return sorted(pairs), counts, left_out


def left_out_file(path, reason, detail):
    """A catalogue that is not used. Many have the name of their program, so the folders are in its
    label.
    """
    return LeftOut(str(path), "/".join(path.parts[-3:]), reason, detail)


def english_of(message, place, forms):
    """The English text of a message's translation of that place. Raises NoPair."""
    if message.plural is None:
        return message.text
    goes_with = forms[place] if len(forms) == len(message.translations) else None
    if goes_with is None:
        raise pair_cleaning.NoPair("plural form without an English one")
    return message.text if goes_with == plural_forms.SINGULAR else message.plural


def write(path, pairs):
    """Writes pairs, the same bytes each time: gzip would otherwise have the time and the name in
    its header.
    """
    with open(path, "wb") as file, gzip.GzipFile("", "wb", 6, file, mtime=0) as out:
        for source, target in pairs:
            out.write(f"{source}\t{target}\n".encode())


def say(out, record, everything):
    """Prints what is in a folder, and what was left out."""
    languages = record["languages"]
    total = sum(counts["pairs"] for counts in languages.values())
    catalogues = sum(counts["catalogues"] for counts in languages.values())
    print(f"{shown(out)}: {total:,} pairs in {len(languages)} languages, "
          f"of {catalogues} catalogues")
    most = sorted(languages.items(), key=lambda item: (-item[1]["pairs"], item[0]))
    shown_ones = most if everything else most[:8]
    more = f", and {len(most) - len(shown_ones)} more" if len(most) > len(shown_ones) else ""
    print("  " + ", ".join(f"{code} {counts['pairs']:,}" for code, counts in shown_ones) + more)
    why_not = collections.Counter()
    for counts in languages.values():
        why_not.update(counts["left_out"])
    print(f"  messages left out: {sum(why_not.values()):,}")
    for reason, count in sorted(why_not.items(), key=lambda item: (-item[1], item[0])):
        print(f"    {reason}: {count:,}")
    left_out = [LeftOut(*entry) for entry in record["left_out"]]
    found_files.say(left_out, everything, "catalogues")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # Files have names in every alphabet.
    try:
        main()
    except Failed as error:
        sys.exit(printable(f"catalogues: {error}"))
    except OSError as error:
        sys.exit(f"catalogues: {error}: check the permissions and the space there, or use --out")
    except KeyboardInterrupt:
        sys.exit("catalogues: interrupted; no half-made folder was left behind")
