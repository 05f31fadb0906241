#!/usr/bin/env python3
"""Makes folders of images of characters, drawn from fonts, to train on.      (make fonts)

    fonts.py [FOLDER ...] [--characters abc] [--out DIR] [--size 64] [--validation-share 0.2]
             [--seed 0] [--list]

Without a FOLDER it fetches the Debian packages listed in font_packages.txt (about 40 MB) and keeps
their fonts and copyright files in

    $GPIPE_HOME/fonts        (GPIPE_HOME defaults to ~/.cache/gpipe)

No root is needed and nothing is installed. Elsewhere than on Debian, Ubuntu and the like, name
folders that have .ttf, .otf, .ttc or .otc files. No fonts are read but those in the named folders.

It makes data/letters, of a to z, and data/digits, of 0 to 9. With --characters and --out it makes
that one set. An image is greyscale, black on white, of one character in one font:

    OUT/train/CLASS/FONT.png
    OUT/validation/CLASS/FONT.png

CLASS is the character if it is an ASCII letter or digit, otherwise its code, such as U+00E9. Where
a letter is asked for in both cases, upper-case letters go by their codes, too: some file systems
would put `a` and `A` in one folder. A font is used if it draws every character, no two of them
alike. A family of fonts is on one side only. OUT/made_by.json says how the images were made.

A folder is written aside and renamed, so that a half-made one is never taken for a whole one. Run
again, the script does nothing unless the fonts, the arguments or the script have changed.
"""

import argparse
import contextlib
import re
import string
import sys
import unicodedata
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS.parent)]
import debian  # noqa: E402
import font_families  # noqa: E402
import found_files  # noqa: E402
import made_folder  # noqa: E402
import packages  # noqa: E402
from debian import Failed  # noqa: E402
from found_files import LeftOut, printable, reasons  # noqa: E402
from made_folder import shown  # noqa: E402

DATA = SCRIPTS.parent.parent / "data"
SETS = {"letters": string.ascii_lowercase, "digits": string.digits}
LIBRARIES = {"fonttools": "4.60.1", "pillow": "11.3.0"}
VERSION = 1  # of the images: another one has them made anew
MADE_BY = "gpipe/scripts/prepare/fonts.py"
SUFFIXES = {".ttf", ".otf", ".ttc", ".otc"}
KEPT = {".ttf", ".otf"}  # of the files of a package
FEWEST = 20  # packages: with fewer there is too little to learn from
SIZES = range(8, 1025)
CHARACTERS_MAX = 4096


class Arguments(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"fonts: {message}; see fonts.py --help\n")


def parsed(arguments):
    """The arguments, and the sets to make: (folder, characters)."""
    parser = Arguments(description="Makes folders of images of characters, drawn from fonts.",
                       prog="fonts.py", allow_abbrev=False)
    parser.add_argument("folders", nargs="*", metavar="FOLDER", type=Path,
                        help="fonts to read (none: those of free Debian packages, fetched once)")
    parser.add_argument("--characters", type=characters_of,
                        help="the classes, such as abc (none: a to z; and 0 to 9 without --out)")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="the folder to make (none: data/letters and data/digits)")
    parser.add_argument("--size", type=size_of, default=64,
                        help="rows and columns of an image (%(default)s)")
    parser.add_argument("--validation-share", type=share_of, default=0.2, metavar="SHARE",
                        help="about this part of the families to validate on (%(default)s)")
    parser.add_argument("--seed", type=int, default=0,
                        help="another one validates on other families (%(default)s)")
    parser.add_argument("--list", action="store_true", help="name all fonts that are left out")
    given = parser.parse_intermixed_args(arguments)
    if given.characters and not given.out:
        parser.error("--characters needs --out DIR, the folder to make of them")
    if given.out:
        return given, [(given.out, given.characters or SETS["letters"])]
    return given, [(DATA / name, characters) for name, characters in SETS.items()]


def characters_of(text):
    if not 2 <= len(text) <= CHARACTERS_MAX or len(set(text)) < len(text):
        raise argparse.ArgumentTypeError(f"{len(text)} characters, {len(set(text))} of them "
                                         f"different: name 2 to {CHARACTERS_MAX}, none twice")
    for character in text:
        if character.isspace() or unicodedata.category(character) in ("Cc", "Cf", "Cs"):
            raise argparse.ArgumentTypeError(f"{character!r} leaves no ink: leave it out")
    return text


def size_of(text):
    if not text.isdecimal() or int(text) not in SIZES:
        raise argparse.ArgumentTypeError(f"{text!r} is not from {SIZES[0]} to {SIZES[-1]} pixels")
    return int(text)


def share_of(text):
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a part between 0 and 1, without these")


def listed():
    """The packages of font_packages.txt."""
    lines = (SCRIPTS / "font_packages.txt").read_text(encoding="utf-8").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def fetched():
    """The folder of the free fonts, fetched if need be."""
    folder = packages.home() / "fonts"
    debian.fetch(listed(), folder, keep=lambda path: path.suffix.lower() in KEPT, fewest=FEWEST)
    count = sum(path.is_dir() for path in folder.iterdir())
    fonts = sum(path.suffix.lower() in KEPT for path in folder.rglob("*"))
    print(f"{folder}: {fonts} fonts of {count} packages")
    return folder


def main(arguments=None):
    given, sets = parsed(arguments)
    sets = [(out.resolve(), characters) for out, characters in sets]
    for out, _ in sets:
        made_folder.check(out, MADE_BY)
    folders = [folder.resolve() for folder in given.folders] or [fetched()]
    files, unlisted = found_files.find(folders, SUFFIXES, "fonts")
    digest = found_files.digest(files)
    for out, characters in sets:
        recipe = {
            "made_by": MADE_BY,
            "version": VERSION,
            "arguments": {"folders": [str(folder) for folder in folders], "characters": characters,
                          "size": given.size, "validation_share": given.validation_share,
                          "seed": given.seed},
            "libraries": LIBRARIES,
            "files": digest,
        }
        record = made_folder.record_of(out, MADE_BY)
        if made_folder.is_made_by(record, recipe):
            say(out, record, given.list)
            print(made_folder.UNCHANGED)
        else:
            print(f"fonts: reading {len(files)} font files for {shown(out)}", file=sys.stderr,
                  flush=True)
            say(out, make(out, recipe, files, unlisted), given.list)


def make(out, recipe, files, left_out):
    """Makes a set, and returns its record."""
    for name, version in LIBRARIES.items():
        packages.use(name, version)
    import font_faces  # Not above: it needs the libraries.

    arguments = recipe["arguments"]
    faces, unusable = font_faces.read(files, arguments["characters"], arguments["size"])
    left_out = left_out + unusable
    families = {face.family for face in faces}
    if len(families) < 2:
        raise Failed(f"the fonts in {' and '.join(arguments['folders'])} that can be used are "
                     f"{len(faces)}, of {len(families)} families, and 2 families are needed, one "
                     f"of them to validate on: add fonts ({reasons(left_out)})")
    chosen = font_families.to_validate_on(families, arguments["validation_share"],
                                          arguments["seed"])
    names = image_names(faces)
    sides = {"train": [], "validation": []}
    for face, name in zip(faces, names):
        sides["validation" if face.family in chosen else "train"].append((face, name))
    record = dict(recipe, fonts={
        side: [{"images": name, "name": face.name, "family": face.family, "file": str(face.file)}
               for face, name in fonts] for side, fonts in sides.items()
    }, left_out=left_out)
    with made_folder.replaced(out, record) as new:
        for side, fonts in sides.items():
            for place, folder in enumerate(class_folders(arguments["characters"])):
                (new / side / folder).mkdir(parents=True)
                for face, name in fonts:
                    (new / side / folder / name).write_bytes(face.images[place])
    return record


def image_names(faces):
    """A file name for each font, of what it calls itself and the hash of its file."""
    names, used = [], set()
    for face in faces:
        ascii = unicodedata.normalize("NFKD", face.name).encode("ascii", "ignore").decode()
        ascii = re.sub(r"[^A-Za-z0-9]+", "-", ascii).strip("-")[:80] or "font"
        digits = 8
        while f"{ascii}-{face.digest[:digits]}".lower() in used:
            digits += 1
        used.add(f"{ascii}-{face.digest[:digits]}".lower())
        names.append(f"{ascii}-{face.digest[:digits]}.png")
    return names


def class_folders(characters):
    """The name of a folder for each character, none of them equal even without regard to case."""
    both = {c for c in characters if c.isascii() and c.isupper() and c.lower() in characters}
    return [c if c.isascii() and c.isalnum() and not (both and c.isupper()) else f"U+{ord(c):04X}"
            for c in characters]


def say(out, record, everything):
    """Prints what is in a folder, and what was left out."""
    classes, sides = len(record["arguments"]["characters"]), record["fonts"]
    print(f"{shown(out)}: {counts(sides['train'] + sides['validation'], classes)}")
    for side, fonts in sides.items():
        print(f"  {side}: {counts(fonts, classes)}")
    found_files.say([LeftOut(*entry) for entry in record["left_out"]], everything, "fonts")


def counts(fonts, classes):
    families = len({font["family"] for font in fonts})
    return f"{len(fonts) * classes} images of {len(fonts)} fonts in {families} families"


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # Fonts have names in every alphabet.
    try:
        main()
    except Failed as error:
        sys.exit(printable(f"fonts: {error}"))
    except OSError as error:
        sys.exit(f"fonts: {error}: check the permissions and the space there, or use --out")
    except KeyboardInterrupt:
        sys.exit("fonts: interrupted; no half-made folder was left behind")
