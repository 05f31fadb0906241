"""Gettext catalogues for the tests of catalogues.py, made by polib.

Importing this fetches polib once. Where that fails, it skips the tests.
"""

import struct
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import catalogues  # noqa: E402
import packages  # noqa: E402

try:
    for library, version in catalogues.LIBRARIES.items():
        packages.use(library, version)
except SystemExit as error:
    print(f"skipped: the tests of catalogues.py, without {library} {version} ({error})",
          file=sys.stderr)
    raise unittest.SkipTest(f"{library} {version} cannot be fetched: {error}") from None

import polib  # noqa: E402

GERMAN = "nplurals=2; plural=(n != 1);"


def catalogue(messages, language="de", charset="UTF-8", plural_forms=GERMAN):
    """A polib.POFile. A message is (English, translation), or (English, plural, [translations])."""
    made = polib.POFile()
    made.encoding = charset
    made.metadata = {"Content-Type": f"text/plain; charset={charset}", "Language": language,
                     "Plural-Forms": plural_forms}
    for message in messages:
        if len(message) == 2:
            made.append(polib.POEntry(msgid=message[0], msgstr=message[1]))
        else:
            made.append(polib.POEntry(msgid=message[0], msgid_plural=message[1],
                                      msgstr_plural=dict(enumerate(message[2]))))
    return made


def write(path, messages, **header):
    """Writes a catalogue, compiled or as text by its suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made = catalogue(messages, **header)
    made.save_as_mofile(str(path)) if path.suffix == ".mo" else made.save(str(path))


def big_endian(content):
    """A compiled catalogue's bytes in the other byte order."""
    words = struct.unpack_from("<7I", content)
    count, ends = words[2], words[3:5]
    swapped = bytearray(content)
    struct.pack_into(">7I", swapped, 0, *words)
    for table in ends:
        struct.pack_into(f">{2 * count}I", swapped, table,
                         *struct.unpack_from(f"<{2 * count}I", content, table))
    return bytes(swapped)
