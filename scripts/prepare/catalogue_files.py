"""Gettext catalogues: English messages with their translations into one language, read by polib.

A catalogue comes from anywhere, so nothing in it is trusted: what cannot be read is left out by
name.
"""

import struct
from pathlib import Path
from typing import NamedTuple, Optional

import polib

import language_codes
import found_files
from found_files import Unusable

SUFFIXES = {".mo", ".po"}
MESSAGES = "LC_MESSAGES"  # the folder in which a language's catalogues lie
MO_HEADER, MO_BYTES = 20, 8  # of the file, and of a string's length and offset


class Catalogue(NamedTuple):
    """What is in a file."""

    language: str  # as its header has it, or nothing
    plural_forms: Optional[str]  # `Plural-Forms` of its header
    messages: list  # of Message
    fuzzy: int  # messages that the translators marked as doubtful


class Message(NamedTuple):
    """A message of a program and its translation."""

    context: Optional[str]
    text: str  # in English; of one thing where there is a plural
    plural: Optional[str]  # in English
    translations: list  # one, or with a plural one for each of the language's forms


def language_by_place(path):
    """The language of a catalogue by its folder, CODE/LC_MESSAGES, or by its name, such as `de.po`.

    It is None where that is English or no language, and an empty text where nothing says it.
    """
    if path.parent.name == MESSAGES:
        return language_codes.code(path.parent.parent.name)
    return language_codes.code(path.stem) or ""


def read(path):
    """The Catalogue in a file. Raises Unusable."""
    content = found_files.content(path)
    is_text = Path(path).suffix.lower() == ".po"
    try:
        if is_text:
            found = polib.pofile(content.decode(charset(content)))
        else:
            check_lengths(content)
            found = polib.mofile(content, encoding=charset(content))
    except UnicodeDecodeError as error:
        detail = f"it says {error.encoding}; `msgconv` converts"
        raise Unusable("not in its charset", detail) from error
    except (OSError, ValueError, struct.error, IndexError) as error:
        detail = str(error).replace("Syntax error in po file ", "")
        raise Unusable("not a catalogue", detail) from error
    kept = [entry for entry in found if not entry.obsolete]
    # An entry of a compiled catalogue has no such mark.
    sure = [entry for entry in kept if not (is_text and entry.fuzzy)]
    return Catalogue(found.metadata.get("Language", ""), found.metadata.get("Plural-Forms"),
                     [message(entry) for entry in sure], len(kept) - len(sure))


def charset(content):
    """The charset that a catalogue names. What declares ASCII and has other bytes is UTF-8 in
    practice.
    """
    named = polib.detect_encoding(content, binary_mode=True)
    return "utf-8" if named.lower() in ("ascii", "us-ascii", "ansi_x3.4-1968") else named


def check_lengths(content):
    """Raises Unusable where the strings of a compiled catalogue have more bytes than the file: they
    would lie over each other, and a small file could fill the memory.
    """
    order = "<" if content[:4] == b"\xde\x12\x04\x95" else ">"
    count, *tables = struct.unpack_from(order + "III", content, 8)
    if MO_HEADER + 2 * MO_BYTES * count > len(content):
        raise Unusable("not a catalogue", f"no room for {count} messages")
    rows = [struct.unpack_from(f"{order}{2 * count}I", content, table) for table in tables]
    if sum(sum(row[::2]) for row in rows) > len(content):
        raise Unusable("not a catalogue", "its strings have more bytes than the file")


def message(entry):
    plurals = [text for _, text in sorted(entry.msgstr_plural.items())]
    translations = plurals or [entry.msgstr]
    return Message(entry.msgctxt, entry.msgid, entry.msgid_plural or None, translations)
