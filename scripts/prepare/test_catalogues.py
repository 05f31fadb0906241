"""Tests of catalogues.py without a network: the scripts of test_debian.py stand for apt and dpkg-deb.

Run: python3 -m unittest discover -s scripts/prepare
"""

import contextlib
import importlib.util
import io
import re
import sys
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS))
import test_debian  # noqa: E402

SPEC = importlib.util.spec_from_file_location("fetch_catalogues", SCRIPTS / "catalogues.py")
catalogues = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(catalogues)


class Fetch(unittest.TestCase):
    setUp, package = test_debian.Fetch.setUp, test_debian.Fetch.package

    def run_it(self):
        with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()) as printed:
            catalogues.main()
        return printed.getvalue(), said.getvalue()

    def test_catalogues_alone_are_kept_and_counted(self):
        for package in catalogues.listed():
            self.package(package, ("./usr/share/locale/de/LC_MESSAGES/a.mo", b"1"), ("./usr/bin/a", b"2"),
                         ("./usr/share/locale/pt_BR/LC_MESSAGES/a.mo", b"3"), ("./usr/share/a.mo", b"4"),
                         ("./usr/share/locale/de/LC_MESSAGES/a.qm", b"5"), ("./usr/share/locale/fr/LC_MESSAGES/a.mo", "/x"))
        printed, said = self.run_it()
        folder, count = self.folder.with_name("catalogues"), len(catalogues.listed())
        self.assertEqual(printed, f"{folder}: {2 * count} catalogues in 2 languages of {count} packages\n")
        self.assertIn(f"fetching {count} packages", said)
        kept = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        first = sorted(catalogues.listed())[0]
        self.assertEqual(kept[:3], [f"{first}/usr/share/doc/{first}/copyright",
                                    f"{first}/usr/share/locale/de/LC_MESSAGES/a.mo",
                                    f"{first}/usr/share/locale/pt_BR/LC_MESSAGES/a.mo"])
        self.assertEqual(len(kept), 3 * count + 1)
        self.assertEqual(self.run_it(), (printed, ""))  # Nothing is fetched a second time.
        self.assertEqual(len((self.mirror / ".log").read_text().splitlines()), 1)

    def test_too_few_packages_are_refused(self):
        self.package(catalogues.listed()[0], ("./usr/share/locale/de/LC_MESSAGES/a.mo", b"1"))
        with self.assertRaisesRegex(SystemExit, f"^catalogues: .*{catalogues.FEWEST} are needed.*apt-get update"):
            self.run_it()
        self.assertFalse(self.folder.with_name("catalogues").exists())


class List(unittest.TestCase):
    def test_the_list_has_packages_each_once(self):
        listed = catalogues.listed()
        self.assertEqual(len(listed), len(set(listed)))
        self.assertGreater(len(listed), catalogues.FEWEST)
        self.assertTrue(all(re.fullmatch(r"[a-z0-9][a-z0-9.+-]+", package) for package in listed))


if __name__ == "__main__":
    unittest.main()
