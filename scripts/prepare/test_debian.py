"""Tests of debian.py and of fetching fonts, without a network.

Scripts on PATH stand for apt and dpkg-deb. test_fonts.py has the tests of what is made of fonts.

Run: python3 -m unittest discover -s scripts/prepare
"""

import contextlib
import io
import os
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path
from unittest import mock

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS))
import debian  # noqa: E402
import fonts  # noqa: E402

# A "package" is a plain tar; the mirror is a folder of them.
APT_CACHE = '#!/bin/sh\nshift\nfor p; do [ -e "$MIRROR/$p" ] ' \
            '&& printf "%s:\\n  Candidate: 1-1\\n" $p || ' \
            'printf "%s:\\n  Candidate: (none)\\n" $p; done\n'
APT_GET = '#!/bin/sh\necho "$@" >> "$MIRROR/.log"\n[ -e "$MIRROR/.broken" ] && exit 100\n' \
          'while [ "$1" != download ]; do shift; done; shift\n' \
          'for p; do cp "$MIRROR/$p" "${p}_1-1_all.deb"; done\n'
DPKG_DEB = '#!/bin/sh\nexec cat "$2"\n'


class Fetch(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)
        self.mirror, self.folder, bin = (self.root / "mirror", self.root / "home" / "fonts",
                                         self.root / "bin")
        self.mirror.mkdir()
        bin.mkdir()
        for name, text in (("apt-cache", APT_CACHE), ("apt-get", APT_GET), ("dpkg-deb", DPKG_DEB)):
            (bin / name).write_text(text)
            (bin / name).chmod(0o755)
        environment = {"PATH": f"{bin}:{os.environ['PATH']}", "MIRROR": str(self.mirror),
                       "GPIPE_HOME": str(self.folder.parent)}
        patch = mock.patch.dict(os.environ, environment)
        patch.start()
        self.addCleanup(patch.stop)
        self.bin = bin

    def package(self, name, *members):
        with tarfile.open(self.mirror / name, "w") as archive:
            for path, content in (*members, (f"./usr/share/doc/{name}/copyright", b"free")):
                entry = tarfile.TarInfo(path)
                if isinstance(content, str):
                    entry.type, entry.linkname = tarfile.SYMTYPE, content
                    archive.addfile(entry)
                else:
                    entry.size = len(content)
                    archive.addfile(entry, io.BytesIO(content))

    def fetch(self, *packages, **extra):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            debian.fetch(packages, self.folder, lambda path: path.suffix == ".ttf", **extra)
        return said.getvalue()

    def files(self):
        return sorted(str(p.relative_to(self.folder)) for p in self.folder.rglob("*")
                      if p.is_file() or p.is_symlink())

    def refused(self, pattern, *packages, **extra):
        with self.assertRaisesRegex(debian.Failed, pattern):
            self.fetch(*packages, **extra)
        self.assertFalse(self.folder.exists())
        self.assertEqual([p.name for p in self.folder.parent.iterdir()], ["fonts.lock"])

    def test_what_is_kept_and_the_copyright_are_there_and_no_more(self):
        self.package("a", ("./usr/share/fonts/a.ttf", b"A"), ("./usr/bin/a", b"x"),
                     ("./usr/b.ttf", "/etc/passwd"))
        self.fetch("a")
        self.assertEqual(self.files(), ["a/usr/share/doc/a/copyright", "a/usr/share/fonts/a.ttf",
                                        "packages.txt"])

    def test_a_second_run_does_nothing_and_another_list_makes_it_anew(self):
        for name in "ab":
            self.package(name, (f"./{name}.ttf", b"A"))
        self.fetch("a")
        self.fetch("a")
        self.assertEqual(len((self.mirror / ".log").read_text().splitlines()), 1)
        self.fetch("b")
        self.assertEqual(self.files(), ["b/b.ttf", "b/usr/share/doc/b/copyright", "packages.txt"])
        self.assertEqual(len(list(self.folder.parent.iterdir())), 2)

    def test_a_package_that_is_not_there_is_skipped_by_name(self):
        self.package("a", ("./a.ttf", b"A"))
        self.assertIn("skipped: gone", self.fetch("a", "gone"))
        self.assertIn("a/a.ttf", self.files())

    def test_too_few_packages_are_refused(self):
        self.package("a", ("./a.ttf", b"A"))
        self.refused("has 1 of 2 packages and 2 are needed.*apt-get update.*gone", "a", "gone",
                     fewest=2)

    def test_without_lists_the_remedy_is_to_fetch_them(self):
        self.refused("sudo apt-get update", "a")

    def test_without_apt_the_remedy_is_another_way(self):
        (self.bin / "apt-get").unlink()
        with mock.patch.dict(os.environ, {"PATH": str(self.bin)}):
            self.refused("no apt-get here: this needs Debian", "a")

    def test_a_failed_download_leaves_nothing(self):
        self.package("a", ("./a.ttf", b"A"))
        (self.mirror / ".broken").touch()
        self.refused(r"failed \(100\).*check the network", "a")

    def test_a_file_that_escapes_is_refused(self):
        for name in ("../../evil.ttf", "/evil.ttf"):
            self.package("a", (name, b"A"))
            self.refused("outside of its folder", "a")

    def test_a_link_is_not_followed(self):
        self.package("a", ("./usr/out", str(self.root)), ("./usr/out/evil.ttf", b"A"))
        self.fetch("a")
        self.assertFalse((self.root / "evil.ttf").exists())

    def test_a_damaged_package_is_refused(self):
        (self.mirror / "a").write_bytes(b"not a tar" * 100)
        self.refused("is damaged", "a")

    def test_a_folder_of_the_users_own_is_left_alone(self):
        self.package("a", ("./a.ttf", b"A"))
        self.folder.mkdir(parents=True)
        (self.folder / "mine.ttf").write_bytes(b"M")
        with self.assertRaisesRegex(debian.Failed, "move it away"):
            self.fetch("a")
        self.assertEqual(self.files(), ["mine.ttf"])

    def test_fonts_are_fetched_and_counted(self):
        for package in fonts.listed():
            self.package(package, ("./one.ttf", b"1"), ("./two.OTF", b"2"), ("./three.pfb", b"3"))
        with contextlib.redirect_stderr(io.StringIO()), \
                contextlib.redirect_stdout(io.StringIO()) as said:
            self.assertEqual(fonts.fetched(), self.folder)
        count = len(fonts.listed())
        self.assertEqual(said.getvalue(), f"{self.folder}: {2 * count} fonts of {count} packages\n")


class List(unittest.TestCase):
    def test_the_list_has_packages_of_fonts_each_once(self):
        listed = fonts.listed()
        self.assertEqual(len(listed), len(set(listed)))
        self.assertGreater(len(listed), fonts.FEWEST)
        self.assertTrue(all(package.startswith("fonts-") for package in listed))


if __name__ == "__main__":
    unittest.main()
