"""Tests of catalogue_files.py, with catalogues that are made here.

Run: python3 -m unittest discover -s scripts/prepare
"""

import random
import struct
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import made_catalogues  # noqa: E402  (first: it fetches the library)
import catalogue_files  # noqa: E402
import found_files  # noqa: E402
from catalogue_files import Message  # noqa: E402
from found_files import Unusable  # noqa: E402

MESSAGES = [
    ("File", "Datei"),
    ('a "quoted"\tword\\\nand a line', 'ein "Wort"\tin\\\nAnführung'),
    ("%d file", "%d files", ["%d Datei", "%d Dateien"]),
    ("size", "Größe"),
]
READ = [
    Message(None, "File", None, ["Datei"]),
    Message(None, 'a "quoted"\tword\\\nand a line', None, ['ein "Wort"\tin\\\nAnführung']),
    Message(None, "%d file", "%d files", ["%d Datei", "%d Dateien"]),
    Message(None, "size", None, ["Größe"]),
]


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def read(self, content, name="x.po"):
        (self.folder / name).write_bytes(
            content if isinstance(content, bytes) else content.encode())
        return catalogue_files.read(self.folder / name)

    def refused(self, content, name="x.po"):
        with self.assertRaises(Unusable) as raised:
            self.read(content, name)
        return raised.exception.args


class Reading(Case):
    def test_both_formats_and_byte_orders_read_the_same(self):
        for name in ("x.mo", "x.po"):
            made_catalogues.write(self.folder / name, MESSAGES)
        compiled = (self.folder / "x.mo").read_bytes()
        (self.folder / "big.mo").write_bytes(made_catalogues.big_endian(compiled))
        for name in ("x.mo", "x.po", "big.mo"):
            found = catalogue_files.read(self.folder / name)
            self.assertEqual(sorted(found.messages, key=str), sorted(READ, key=str), name)
            self.assertEqual((found.language, found.plural_forms, found.fuzzy),
                             ("de", made_catalogues.GERMAN, 0))

    def test_charsets_are_read(self):
        for charset, word in (("ISO-8859-1", "Größe"), ("KOI8-R", "размер"),
                              ("ISO-8859-9", "boyutları ğ")):
            for name in ("x.mo", "x.po"):
                made_catalogues.write(self.folder / name, [("size", word)], charset=charset)
                self.assertEqual(catalogue_files.read(self.folder / name).messages,
                                 [Message(None, "size", None, [word])])

    def test_what_declares_ascii_or_nothing_is_utf8(self):
        message = [Message(None, "size", None, ["Größe"])]
        self.assertEqual(self.read('msgid "size"\nmsgstr "Größe"\n').messages, message)
        for charset in ("ASCII", "CHARSET"):
            text = (f'msgid ""\nmsgstr "Content-Type: text/plain; charset={charset}\\n"\n\n'
                    'msgid "size"\nmsgstr "Größe"\n')
            self.assertEqual(self.read(text).messages, message, charset)

    def test_fuzzy_and_obsolete_messages_are_left_out(self):
        found = self.read("""
msgid ""
msgstr "Language: de\\n"

#, fuzzy, c-format
#| msgid "was"
msgid "fuzzy"
msgstr "falsch"

# directly behind
msgctxt "menu"
msgid "kept"
msgstr "behalten"

#, c-format, fuzzy
#~ msgid "obsolete"
#~ msgstr "überholt"
""")
        self.assertEqual(found.messages, [Message("menu", "kept", None, ["behalten"])])
        self.assertEqual((found.fuzzy, found.language), (1, "de"))

    def test_a_language_is_told_by_the_place_or_by_the_name(self):
        place = catalogue_files.language_by_place
        self.assertEqual(place(Path("/usr/share/locale/pt_BR/LC_MESSAGES/a.mo")), "pt_BR")
        self.assertIsNone(place(Path("/usr/share/locale/en_GB/LC_MESSAGES/a.mo")))
        self.assertEqual(place(Path("/a/po/de.po")), "de")
        self.assertEqual(place(Path("/a/po/messages.po")), "")


class Faults(Case):
    def test_a_broken_text_catalogue_is_told_with_its_line(self):
        for text, detail in (('msgid "a"\nmsgstr "b" c\n', "line 2"),
                             ("\n<<<<<<< HEAD\n", "line 2")):
            reason, said = self.refused(text)
            self.assertEqual(reason, "not a catalogue")
            self.assertIn(detail, said)

    def test_bytes_of_another_charset_are_told(self):
        text = ('msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\n'
                'msgid "size"\nmsgstr "Größe"\n')
        self.assertEqual(self.refused(text.encode("latin-1"))[0], "not in its charset")
        made_catalogues.write(self.folder / "x.mo", [("size", "Größe")])
        content = (self.folder / "x.mo").read_bytes()
        self.assertEqual(
            self.refused(content.replace("öß".encode(), b"\xf6\xdf\xdf\xdf"), "x.mo")[0],
            "not in its charset")

    def test_a_broken_compiled_catalogue_is_told(self):
        made_catalogues.write(self.folder / "x.mo", MESSAGES)
        content = (self.folder / "x.mo").read_bytes()
        for at, word in ((0, 0x1234), (4, 2 << 16), (8, 2**32 - 1), (8, len(content)),
                         (12, 2**32 - 1), (28, 2**32 - 1)):
            damaged = bytearray(content)
            struct.pack_into("<I", damaged, at, word)
            self.assertEqual(self.refused(bytes(damaged), "x.mo")[0], "not a catalogue", at)
        for content in (b"", content[:10], b"PK\x03\x04"):
            self.assertEqual(self.refused(content, "x.mo")[0], "not a catalogue")

    def test_strings_that_lie_over_each_other_are_refused(self):
        # A thousand messages whose strings are all the same 8,000 bytes: 16 MB of text from a file
        # of 24 kB.
        count = 1000
        head = struct.pack("<5I", 0x950412DE, 0, count, 20, 20 + 8 * count)
        content = head + struct.pack("<2I", 8000, 20 + 16 * count) * (2 * count) + b"a" * 8001
        self.assertIn("more bytes than the file", self.refused(content, "x.mo")[1])

    def test_too_large_a_file_is_refused(self):
        with mock.patch.object(found_files, "FILE_BYTES_MAX", 10):
            self.assertIn("larger than", self.refused('msgid "a"\nmsgstr "b"\n')[0])

    def test_damaged_files_are_read_or_refused(self):
        chance = random.Random(11)
        for name in ("x.mo", "x.po"):
            made_catalogues.write(self.folder / name, MESSAGES)
            content = (self.folder / name).read_bytes()
            read = 0
            for _ in range(1000):
                damaged = bytearray(content)
                for _ in range(chance.randrange(1, 4)):
                    damaged[chance.randrange(len(damaged))] = chance.randrange(256)
                if chance.random() < 0.2:
                    del damaged[chance.randrange(len(damaged)):]
                try:
                    found = self.read(bytes(damaged), name)
                    read += sum(len(text) for message in found.messages
                                for text in message.translations) <= 2 * len(content)
                except Unusable:
                    pass
            self.assertGreater(read, 50, name)


if __name__ == "__main__":
    unittest.main()
