"""Folders of data that a script makes whole or not at all, and that say how they were made.

RECORD in such a folder holds the script's name, its arguments and a hash of what it read.
"""

import contextlib
import json
import shutil
import tempfile
from pathlib import Path

from debian import Failed

RECORD = "made_by.json"
UNCHANGED = "  Nothing has changed, so it was left as it is. Remove it to have it made anew."


def check(out, made_by):
    """Raises Failed where a folder cannot be made, or replaced."""
    if out.exists() and not out.is_dir():
        raise Failed(f"{shown(out)} is a file: name another folder with --out")
    if out.is_dir() and any(out.iterdir()) and not record_of(out, made_by):
        raise Failed(f"{shown(out)} was not made by this script: move it away, or name another "
                     "folder with --out")


def record_of(out, made_by):
    """How a folder was made, if the script of that name made it."""
    try:
        record = json.loads((out / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return record if isinstance(record, dict) and record.get("made_by") == made_by else None


def is_made_by(record, recipe):
    """Whether a folder was made by the same script, of the same files, with the same arguments."""
    return record is not None and all(record.get(key) == value for key, value in recipe.items())


@contextlib.contextmanager
def replaced(out, record):
    """A new folder to write in, that gets the record and takes the place of `out` if nothing goes
    wrong.
    """
    missing = [folder for folder in out.parents if not folder.exists()]
    aside = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=out.name + ".", dir=out.parent))
        new, old = aside / "new", aside / "old"
        new.mkdir()
        yield new
        (new / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        check(out, record["made_by"])
        if out.exists():
            out.rename(old)
        try:
            new.rename(out)
        except BaseException:
            if old.exists() and not out.exists():
                old.rename(out)
            raise
    finally:
        if aside:
            shutil.rmtree(aside, ignore_errors=True)
        for folder in missing:
            with contextlib.suppress(OSError):  # It is not empty where all went well.
                folder.rmdir()


def shown(path):
    """A path as a user would type it here."""
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
