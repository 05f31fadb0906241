"""Tests of catalogues.py: the files that it makes of catalogues, which are made here.

The scripts of test_debian.py stand for apt and dpkg-deb.

Run: python3 -m unittest discover -s scripts/prepare
"""

import contextlib
import gzip
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS))
import made_catalogues  # noqa: E402  (first: it fetches the library)
import catalogues  # noqa: E402
import test_debian  # noqa: E402

GERMAN = [("_File", "_Datei"), ("%d file", "%d files", ["%d Datei", "%d Dateien"]),
          ("Linux", "Linux"), ("%s!", "%s!")]
FRENCH = [("_File", "_Fichier"), ("Open", "Ouvrir")]


def run_it(*arguments):
    """(what is said on stdout, on stderr)"""
    with contextlib.redirect_stdout(io.StringIO()) as said, \
            contextlib.redirect_stderr(io.StringIO()) as errors:
        catalogues.main([str(argument) for argument in arguments])
    return said.getvalue(), errors.getvalue()


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()
        self.folder, self.out = self.root / "locale", self.root / "data" / "set"
        self.add("de/LC_MESSAGES/a.mo", GERMAN)
        self.add("fr/LC_MESSAGES/a.mo", FRENCH, language="fr")

    def add(self, name, messages, **header):
        made_catalogues.write(self.folder / name, messages, **header)

    def make(self, *arguments):
        return run_it(self.folder, "--out", self.out, *arguments)[0]

    def pairs(self, language):
        return gzip.decompress((self.out / f"{language}.tsv.gz").read_bytes()).decode().splitlines()

    def files(self):
        return {str(path.relative_to(self.out)): path.read_bytes() for path in self.out.rglob("*")}

    def refused(self, message, *arguments):
        before = self.files()
        with self.assertRaisesRegex(catalogues.Failed, message):
            self.make(*arguments)
        self.assertEqual(self.files(), before)
        self.assertEqual([path.name for path in self.root.iterdir()
                          if path.name not in ("locale", "data")], [])


class Made(Case):
    def test_pairs_are_sorted_and_each_there_once(self):
        self.add("de_AT/LC_MESSAGES/b.mo", [("File", "Datei"), ("Bye", "Servus")])
        said = self.make()
        self.assertEqual(self.pairs("de"), ["%d Datei\t%d file", "%d Dateien\t%d files",
                                            "Datei\tFile", "Servus\tBye"])
        self.assertEqual(self.pairs("fr"), ["Fichier\tFile", "Ouvrir\tOpen"])
        self.assertEqual(sorted(self.files()), ["de.tsv.gz", "fr.tsv.gz", "made_by.json"])
        for line in ("6 pairs in 2 languages, of 3 catalogues\n", "  de 4, fr 2\n",
                     "  messages left out: 3\n", "    there already: 1\n",
                     "    the same on both sides: 1\n", "    without words: 1\n",
                     "  catalogues left out: 0\n"):
            self.assertIn(line, said)

    def test_the_bytes_are_the_same_each_time(self):
        self.make()
        first = self.files()
        shutil.rmtree(self.out)
        self.make()
        self.assertEqual(self.files(), first)

    def test_nothing_is_done_twice_unless_something_changed(self):
        self.make()
        with mock.patch.object(catalogues, "make", side_effect=AssertionError):
            self.assertIn("Nothing has changed", self.make())
        self.add("de/LC_MESSAGES/a.mo", FRENCH)
        self.assertNotIn("Nothing has changed", self.make())
        self.assertEqual(self.pairs("de"), ["Fichier\tFile", "Ouvrir\tOpen"])
        self.assertNotIn("Nothing has changed", self.make("--languages=fr"))
        self.assertFalse((self.out / "de.tsv.gz").exists())

    def test_languages_by_header_and_by_name(self):
        self.add("po/messages.po", [("Yes", "Sim")], language="pt_BR")
        self.add("po/nl.po", [("Yes", "Ja")], language="")
        self.add("po/unknown.po", [("Yes", "Da")], language="")
        self.add("en_GB/LC_MESSAGES/a.mo", [("Color", "Colour")], language="en_GB")
        said = self.make("--list")
        self.assertEqual((self.pairs("pt_BR"), self.pairs("nl")), (["Sim\tYes"], ["Ja\tYes"]))
        self.assertEqual(sorted(json.loads((self.out / "made_by.json").read_text())["languages"]),
                         ["de", "fr", "nl", "pt_BR"])
        self.assertIn("in English, or in a language that nothing says: 2", said)
        self.assertRegex(said, "en_GB/LC_MESSAGES/a.mo: /")
        self.assertIn("po/unknown.po", said)

    def test_plural_forms_go_with_the_english_ones(self):
        arabic = ("nplurals=6; plural=n==0 ? 0 : n==1 ? 1 : n==2 ? 2 : n%100>=3 && n%100<=10 ? 3"
                  " : n%100>=11 ? 4 : 5;")
        self.add("ar/LC_MESSAGES/a.mo",
                 [("file", "files", ["none", "one", "two", "few", "many", "rest"])],
                 plural_forms=arabic)
        self.add("xh/LC_MESSAGES/a.mo", [("file", "files", ["ifayile", "iifayile"])],
                 plural_forms="nplurals=1; plural=n")
        said = self.make()
        self.assertEqual(self.pairs("ar"),
                         ["few\tfiles", "many\tfiles", "one\tfile", "rest\tfiles"])
        self.assertFalse((self.out / "xh.tsv.gz").exists())
        self.assertIn("plural form without an English one: 2", said)

    def test_broken_catalogues_are_left_out_by_name(self):
        broken = self.folder / "de" / "LC_MESSAGES" / "broken.mo"
        broken.write_bytes(b"no catalogue")
        said = self.make()
        self.assertEqual(len(self.pairs("de")), 3)
        self.assertIn("de/LC_MESSAGES/broken.mo (", said)

    def test_it_runs_as_a_program(self):
        command = [sys.executable, SCRIPTS / "catalogues.py", self.folder, "--out", self.out]
        done = subprocess.run(command, text=True, capture_output=True, env=os.environ)
        self.assertEqual((done.returncode, done.stdout.splitlines()[0].split(": ")[1]),
                         (0, "5 pairs in 2 languages, of 2 catalogues"))
        done = subprocess.run([*command[:2], self.root / "none", "--out", self.out], text=True,
                              capture_output=True)
        self.assertEqual((done.returncode, done.stderr),
                         (1, f"catalogues: {self.root / 'none'} does not exist: name a folder of "
                             "catalogues, or none to fetch free ones\n"))


class Faults(Case):
    def test_what_cannot_be_made_leaves_nothing_behind(self):
        self.refused("no catalogues in it below .*there are such in de, fr", "--languages=it")
        shutil.rmtree(self.folder)
        self.add("de/LC_MESSAGES/a.mo", [("Linux", "Linux")])
        self.refused("nothing to learn from in the 1 catalogues")

    def test_a_folder_that_it_did_not_make_is_left_alone(self):
        self.out.mkdir(parents=True)
        (self.out / "mine.tsv").write_text("a\tb\n")
        self.refused("was not made by this script: move it away")

    def test_an_interrupted_run_leaves_the_old_files(self):
        self.make()
        before = self.files()
        self.add("de/LC_MESSAGES/a.mo", FRENCH)
        with mock.patch.object(catalogues, "write", side_effect=KeyboardInterrupt), \
                self.assertRaises(KeyboardInterrupt):
            self.make()
        self.assertEqual(self.files(), before)
        self.assertEqual([path.name for path in self.out.parent.iterdir()], ["set"])

    def test_arguments_that_make_no_sense(self):
        for argument, message in (("--languages=german", "no code"), ("--languages=en", "no code"),
                                  ("--languages=pt-br", "did you mean pt_BR"),
                                  ("--lang=de", "unrecognized")):
            with self.assertRaises(SystemExit) as raised, \
                    contextlib.redirect_stderr(io.StringIO()) as said:
                catalogues.main([str(self.folder), argument])
            self.assertEqual(raised.exception.code, 2)
            self.assertRegex(said.getvalue(),
                             f"^catalogues: .*{message}.*see catalogues.py --help\n$")

    def test_too_many_pairs(self):
        with mock.patch.object(catalogues, "PAIRS_MAX", 1):
            self.refused("more than 1 pairs of one language")


class Fetch(unittest.TestCase):
    package = test_debian.Fetch.package

    def setUp(self):
        # This makes a new $GPIPE_HOME. The library is imported already.
        test_debian.Fetch.setUp(self)
        patch = mock.patch.object(catalogues.packages, "use")
        patch.start()
        self.addCleanup(patch.stop)

    def test_packages_are_fetched_once_and_their_catalogues_kept(self):
        compiled = made_catalogues.catalogue(GERMAN).to_binary()
        for package in catalogues.listed():
            self.package(package, ("./usr/share/locale/de/LC_MESSAGES/a.mo", compiled),
                         ("./usr/bin/a", b"2"), ("./usr/share/a.mo", b"4"),
                         ("./usr/share/locale/fr/LC_MESSAGES/a.mo", "/x"))
        out, count = self.root / "set", len(catalogues.listed())
        printed, said = run_it("--out", out)
        folder = self.folder.with_name("catalogues")
        self.assertIn(f"{folder}: {count} catalogues of {count} packages\n", printed)
        self.assertIn(f"3 pairs in 1 languages, of {count} catalogues\n", printed)
        self.assertIn(f"fetching {count} packages", said)
        first = sorted(catalogues.listed())[0]
        kept = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        self.assertEqual(kept[:2], [f"{first}/usr/share/doc/{first}/copyright",
                                    f"{first}/usr/share/locale/de/LC_MESSAGES/a.mo"])
        self.assertEqual(len(kept), 2 * count + 1)
        self.assertIn("Nothing has changed", run_it("--out", out)[0])
        self.assertEqual(len((self.mirror / ".log").read_text().splitlines()), 1)

    def test_too_few_packages_are_refused(self):
        self.package(catalogues.listed()[0], ("./usr/share/locale/de/LC_MESSAGES/a.mo", b"1"))
        with self.assertRaisesRegex(catalogues.Failed,
                                    f"{catalogues.FEWEST} are needed.*apt-get update"):
            run_it("--out", self.root / "set")
        self.assertFalse(self.folder.with_name("catalogues").exists())


class List(unittest.TestCase):
    def test_the_list_has_packages_each_once(self):
        listed = catalogues.listed()
        self.assertEqual(len(listed), len(set(listed)))
        self.assertGreater(len(listed), catalogues.FEWEST)
        self.assertTrue(all(re.fullmatch(r"[a-z0-9][a-z0-9.+-]+", package) for package in listed))


if __name__ == "__main__":
    unittest.main()
