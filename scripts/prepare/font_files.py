"""Files of fonts: which there are below some folders, and their bytes. Only the standard library.

Files and folders are limited in number, and files in size.
"""

import hashlib
import os
from pathlib import Path
from typing import NamedTuple

from debian import Failed

SUFFIXES = {".ttf", ".otf", ".ttc", ".otc"}
FILE_BYTES_MAX = 64 << 20  # fonts of all Chinese characters have 20 MB
FILES_MAX = 20_000
ENTRIES_MAX = 1_000_000  # files and folders that are looked at


class Unusable(Exception):
    """Why a font is left out: (reason, detail). Fonts are counted by reason."""


class LeftOut(NamedTuple):
    """A font, or a file that is called one, that is not drawn from."""

    file: str
    label: str  # the name of the file, or of the font where that says more
    reason: str  # "no glyph for a character"
    detail: str  # "'q'", or nothing


def find(folders):
    """(paths, left out): every file below the folders that is called a font, sorted.

    Links to files are followed. Links to folders are not, so the walk ends. Raises Failed.
    """
    files, left_out, entries = set(), [], 0
    waiting = [Path(folder) for folder in folders]
    for folder in waiting:
        if not folder.is_dir():
            what = "is a file: name the folder that it is in" if folder.exists() else \
                   "does not exist: name a folder of fonts, or none to fetch free ones"
            raise Failed(f"{folder} {what}")
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
            elif is_font(entry.path):
                files.add(Path(entry.path))
        for count, limit, what in ((entries, ENTRIES_MAX, "files and folders"),
                                   (len(files), FILES_MAX, "font files")):
            if count > limit:
                raise Failed(f"there are more than {limit:,} {what} below "
                             f"{' and '.join(map(str, folders))}: name a smaller folder")
    return sorted(files), left_out


def is_font(path):
    """Whether a path is called a font and is a file or a link to one."""
    return Path(path).suffix.lower() in SUFFIXES and os.path.isfile(path)


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
