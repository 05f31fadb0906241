"""Files to make data of: which there are below some folders, and their bytes. Only the standard
library.

Files and folders are limited in number, and files in size.
"""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from debian import Failed

FILE_BYTES_MAX = 64 << 20  # fonts of all Chinese characters have 20 MB
FILES_MAX = 100_000
ENTRIES_MAX = 1_000_000  # files and folders that are looked at
NAMED = 5  # of those that are left out for a reason, without --list


class Unusable(Exception):
    """Why something is left out: (reason, detail). What is left out is counted by reason."""


class LeftOut(NamedTuple):
    """A file that is not used, or a part of it."""

    file: str
    label: str  # the name of the file, or of a font in it where that says more
    reason: str  # "no glyph for a character"
    detail: str  # "'q'", or nothing


def find(folders, suffixes, what):
    """(paths, left out): every file below the folders with one of the suffixes, sorted.

    `what` names such files in the plural: "fonts".
    Links to files are followed. Links to folders are not, so the walk ends. Raises Failed.
    """
    files, left_out, entries = set(), [], 0
    waiting = [Path(folder) for folder in folders]
    for folder in waiting:
        if not folder.is_dir():
            wrong = "is a file: name the folder that it is in" if folder.exists() else \
                    f"does not exist: name a folder of {what}, or none to fetch free ones"
            raise Failed(f"{folder} {wrong}")
    while waiting:
        folder = waiting.pop()
        try:
            listed = list(os.scandir(folder))
        except OSError as error:
            left_out.append(LeftOut(str(folder), folder.name, "folder that cannot be listed",
                                    error.strerror))
            continue
        entries += len(listed)
        for entry in listed:
            if entry.is_dir(follow_symlinks=False):
                waiting.append(Path(entry.path))
            elif Path(entry.path).suffix.lower() in suffixes and os.path.isfile(entry.path):
                files.add(Path(entry.path))
        for count, limit, counted in ((entries, ENTRIES_MAX, "files and folders"),
                                      (len(files), FILES_MAX, what)):
            if count > limit:
                raise Failed(f"there are more than {limit:,} {counted} below "
                             f"{' and '.join(map(str, folders))}: name a smaller folder")
    return sorted(files), left_out


def content(path):
    """The bytes of a file. Raises Unusable."""
    try:
        with open(path, "rb") as file:
            found = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise Unusable("not readable", error.strerror) from error
    if len(found) > FILE_BYTES_MAX:
        raise Unusable(f"larger than {FILE_BYTES_MAX >> 20} MiB", "")
    return found


def digest(files):
    """A hash of the paths and of what is in the files: it changes when any of them does."""
    hasher = hashlib.sha256()
    for path in files:
        try:
            found = hashlib.sha256(content(path)).hexdigest()
        except Unusable as error:
            found = str(error)
        hasher.update(f"{path}\0{found}\0".encode("utf-8", "backslashreplace"))
    return hasher.hexdigest()


def by_reason(left_out):
    """(reason, entries), the most frequent first."""
    grouped = {}
    for entry in left_out:
        grouped.setdefault(entry.reason, []).append(entry)
    return sorted(grouped.items(), key=lambda item: (-len(item[1]), item[0]))


def reasons(left_out):
    """All reasons with how often each is met, in a line."""
    parts = [f"{reason}: {len(entries)}" for reason, entries in by_reason(left_out)]
    return "left out: " + (", ".join(parts) or "none")


def say(left_out, everything, what="files"):
    """Prints which files, or `what`, were left out: all of them, or some of each reason."""
    hint = "" if everything or len(left_out) <= NAMED else " (--list names all of them)"
    print(f"  {what} left out: {len(left_out)}{hint}")
    for reason, entries in by_reason(left_out):
        print(f"    {reason}: {len(entries)}")
        for entry in entries if everything else entries[:NAMED]:
            detail = f" ({entry.detail})" if entry.detail else ""
            print(printable(f"      {entry.label}{detail}" + f": {entry.file}" * everything))
        if len(entries) > NAMED and not everything:
            print(f"      ... and {len(entries) - NAMED} more")


def printable(text):
    """The text without what a file may say to a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text)
