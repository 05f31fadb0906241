"""Tests of fonts.py: the folders that it makes of fonts, which are made here.

Families: `oracle_` (files and messages that can be told), `property_` (what holds for any fonts),
`fault_` (what goes wrong leaves nothing behind, and says so in a line).

Run: python3 -m unittest discover -s scripts/prepare
"""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import made_fonts  # noqa: E402  (first: it fetches the libraries)
import debian  # noqa: E402
import font_faces  # noqa: E402
import fonts  # noqa: E402
import made_folder  # noqa: E402
from made_fonts import bars, box, font  # noqa: E402
from PIL import Image  # noqa: E402

FAMILIES = {"Ash": 100, "Beech": 160, "Cedar": 240, "Elm": 360, "Fir": 540, "Oak": 800}


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name).resolve()
        self.fonts, self.out = self.root / "fonts", self.root / "data" / "set"
        self.fonts.mkdir()
        for family, width in FAMILIES.items():
            self.add(family, width)

    def add(self, family, width, characters="abc0"):
        (self.fonts / f"{family}.ttf").write_bytes(bars(family, characters, width))

    def make(self, *arguments, out=None):
        """What is said on stdout; the set is of the characters abc."""
        return self.run_it(self.fonts, "--characters=abc", f"--out={out or self.out}", *arguments)

    def run_it(self, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as said, \
                contextlib.redirect_stderr(io.StringIO()) as self.stderr:
            fonts.main([str(argument) for argument in arguments])
        return said.getvalue()

    def files(self, folder=None):
        folder = folder or self.out
        return {str(path.relative_to(folder)): path.read_bytes()
                for path in folder.rglob("*") if path.is_file()}

    def families(self, side, out=None):
        record = json.loads(((out or self.out) / made_folder.RECORD).read_text())
        return {entry["family"] for entry in record["fonts"][side]}

    def refused(self, message, *arguments):
        with self.assertRaisesRegex(fonts.Failed, message):
            self.make(*arguments)


class Made(Case):
    def test_oracle_the_folders_the_files_and_what_is_said(self):
        said = self.make()
        counts = {side: len(self.families(side)) for side in ("train", "validation")}
        self.assertEqual(sum(counts.values()), 6)
        self.assertEqual(said.splitlines(), [
            f"{self.out}: 18 images of 6 fonts in 6 families",
            *(f"  {side}: {3 * count} images of {count} fonts in {count} families"
              for side, count in counts.items()),
            "  fonts left out: 0"])
        names = set()
        for path in self.files():
            if path == "made_by.json":
                continue
            side, folder, name = path.split("/")
            self.assertIn(side, counts)
            self.assertIn(folder, "abc")
            self.assertRegex(name, "^(Ash|Beech|Cedar|Elm|Fir|Oak)-[0-9a-f]{8}[.]png$")
            self.assertIn(name.split("-")[0].lower(), self.families(side))
            image = Image.open(self.out / path)
            self.assertEqual((image.format, image.mode, image.size), ("PNG", "L", (64, 64)))
            self.assertEqual((image.getextrema(), image.getpixel((0, 0))), ((0, 255), 255))
            names.add(name)
        self.assertEqual((len(self.files()), len(names)), (19, 6))

    def test_oracle_the_record(self):
        self.make("--size=16", "--seed=3", "--validation-share=0.4")
        record = json.loads((self.out / "made_by.json").read_text())
        self.assertEqual(record["arguments"], {
            "folders": [str(self.fonts)], "characters": "abc", "size": 16, "seed": 3,
            "validation_share": 0.4})
        self.assertEqual((record["version"], record["libraries"]),
                         (fonts.VERSION, fonts.LIBRARIES))
        entries = sum(record["fonts"].values(), [])
        self.assertEqual({entry["file"] for entry in entries},
                         {str(self.fonts / f"{family}.ttf") for family in FAMILIES})
        for side, of_side in record["fonts"].items():
            self.assertEqual({entry["images"] for entry in of_side},
                             set(os.listdir(self.out / side / "b")))

    def test_property_two_runs_make_the_same_bytes(self):
        self.make()
        first = self.files()
        shutil.rmtree(self.out)
        self.make()
        self.assertEqual(self.files(), first)
        self.make("--size=65")
        self.assertFalse(set(self.files().values()) & set(first.values()))

    def test_property_no_family_is_on_both_sides_and_the_seed_splits(self):
        for family, width in FAMILIES.items():
            self.add(f"{family} Bold", width + 20)
            self.add(f"{family} Light Italic", width - 20)
        splits = set()
        for seed in range(8):
            self.make(f"--seed={seed}", "--size=8")
            train, validation = self.families("train"), self.families("validation")
            self.assertEqual((train & validation, len(train | validation)), (set(), 6))
            self.assertEqual(len(os.listdir(self.out / "train" / "a")), 3 * len(train))
            splits.add(frozenset(validation))
        self.assertGreater(len(splits), 3)

    def test_property_growth_moves_no_image(self):
        self.make("--seed=3")
        before = set(self.files())
        self.assertGreater(len(self.families("validation")), 1)
        for family, width in (("Yew", 130), ("Larch", 450), ("Aspen", 670)):
            self.add(family, width)
        self.make("--seed=3")
        self.assertEqual(len(set(self.files()) - before), 9)
        self.assertLess(before, set(self.files()))

    def test_property_where_fonts_lie_changes_no_image(self):
        self.make()
        before = self.files()
        for place, path in enumerate(sorted(self.fonts.iterdir(), reverse=True)):
            (self.fonts / str(place)).mkdir()
            path.rename(self.fonts / str(place) / f"{9 - place}.OTF")
        self.make()
        after = self.files()
        self.assertNotEqual(before.pop("made_by.json"), after.pop("made_by.json"))
        self.assertEqual(before, after)

    def test_left_out_is_said_in_short_and_in_full(self):
        for place in range(7):
            self.add(f"Few{place}", 400, "ab")
        (self.fonts / "esc\x1b[31m.ttf").write_bytes(b"no font")
        said = self.make().splitlines()
        self.assertEqual(said[3:], [
            "  fonts left out: 8 (--list names all of them)",
            "    no glyph for a character: 7",
            *(f"      Few{place}.ttf ('c')" for place in range(5)),
            "      ... and 2 more",
            "    not a font: 1",
            "      esc?[31m.ttf"])
        said = self.make("--list").splitlines()
        self.assertIn(f"      Few6.ttf ('c'): {self.fonts}/Few6.ttf", said)
        self.assertEqual(sum("Few" in line for line in said), 7)

    def test_oracle_names_of_class_folders(self):
        for characters, known in (
            ("abZ9", ["a", "b", "Z", "9"]),
            ("abA", ["a", "b", "U+0041"]),
            ("aAB", ["a", "U+0041", "U+0042"]),
            ("é/.€😀", ["U+00E9", "U+002F", "U+002E", "U+20AC", "U+1F600"]),
            ("k\u212a", ["k", "U+212A"]),  # the sign of Kelvin, in small letters k
        ):
            folders = fonts.class_folders(characters)
            self.assertEqual(folders, known)
            self.assertEqual(len({folder.lower() for folder in folders}), len(folders))

    def test_characters_beyond_ascii_are_made(self):
        for family, width in FAMILIES.items():
            drawings = {"é": [box(0, 0, width, 900)], "A": [box(0, 0, width, 500)],
                        "😀": [box(0, 0, 100, width)], "a": [box(0, 0, 50, 50)]}
            (self.fonts / f"{family}.ttf").write_bytes(font(family, drawings))
        self.run_it(self.fonts, "--characters=aAé😀", f"--out={self.out}")
        for side in ("train", "validation"):
            self.assertEqual(sorted(os.listdir(self.out / side)),
                             ["U+0041", "U+00E9", "U+1F600", "a"])

    def test_oracle_names_of_images(self):
        faces = [SimpleNamespace(name=name, digest=digest) for name, digest in (
            ("DejaVu Sans/Bold (1)", "0123456789"), ("Œuvre Été", "0123456789"),
            ("字", "a" * 10), ("字体", "a" * 8 + "bc"), ("x" * 300, "0" * 10),
            ("../..", "f" * 10))]
        self.assertEqual(fonts.image_names(faces), [
            "DejaVu-Sans-Bold-1-01234567.png", "uvre-Ete-01234567.png", "font-aaaaaaaa.png",
            "font-aaaaaaaab.png", "x" * 80 + "-00000000.png", "font-ffffffff.png"])


class Again(Case):
    def test_a_second_run_does_nothing_and_says_so(self):
        said = self.make("--list").splitlines()
        before = self.out.stat().st_ino
        with mock.patch.object(font_faces, "read", side_effect=AssertionError):
            again = self.make("--list").splitlines()
        self.assertEqual(again, said + ["  Nothing has changed, so it was left as it is. Remove it "
                                        "to have it made anew."])
        self.assertEqual(self.out.stat().st_ino, before)

    def test_a_change_of_anything_has_it_made_anew(self):
        made = [self.make()]

        def changed(*arguments):
            before = self.out.stat().st_ino
            made.append(self.make(*arguments))
            self.assertNotIn("Nothing has changed", made[-1])
            self.assertNotEqual(self.out.stat().st_ino, before)
            self.assertEqual(os.listdir(self.out.parent), ["set"])

        changed("--seed=1")
        changed("--seed=1", "--size=32")
        changed("--seed=1", "--size=32", "--validation-share=0.5")
        self.add("Yew", 450)
        changed()
        (self.fonts / "Yew.ttf").write_bytes(bars("Yew", "abc", 451))
        changed()
        with mock.patch.object(fonts, "VERSION", 2):
            changed()
        self.assertIn("7 fonts", made[-1])
        # Another version of a library, which is not fetched for a test.
        with mock.patch.dict(fonts.LIBRARIES, pillow="0"), mock.patch.object(fonts.packages, "use"):
            changed()

    def test_a_folder_of_the_users_own_is_left_alone(self):
        for name, content in (("mine.png", "x"), (made_folder.RECORD, '{"made_by": "me"}'),
                              (made_folder.RECORD, "[]"), (made_folder.RECORD, "not JSON")):
            self.out.mkdir(parents=True)
            (self.out / name).write_text(content)
            self.refused("set was not made by this script: move it away, or name .* --out")
            self.assertEqual(self.files(), {name: content.encode()})
            shutil.rmtree(self.out)
        self.out.write_text("a file")
        self.refused("set is a file: name another folder with --out")
        self.assertEqual(self.out.read_text(), "a file")

    def test_an_empty_folder_is_taken_and_a_link_is_kept(self):
        self.out.mkdir(parents=True)
        (self.root / "link").symlink_to(self.out)
        self.make(out=self.root / "link")
        self.assertEqual(len(self.files()), 19)
        self.assertTrue((self.root / "link").is_symlink())
        self.assertIn("Nothing has changed", self.make())


class Asked(Case):
    def test_named_folders_are_read_and_nothing_else(self):
        other = self.root / "other"
        other.mkdir()
        (other / "Yew.ttf").write_bytes(bars("Yew", "abc", 450))
        with mock.patch.object(debian, "fetch", side_effect=AssertionError("it is fetched")):
            self.assertIn("6 fonts", self.make())
            self.assertIn("7 fonts", self.make(other))

    def test_without_arguments_letters_and_digits_are_made_of_what_is_fetched(self):
        letters, digits = "abcdefghijklmnopqrstuvwxyz", "0123456789"
        for family, width in FAMILIES.items():
            self.add(family, width, letters + digits)
        with mock.patch.object(fonts, "DATA", self.root / "data"), \
                mock.patch.object(fonts, "fetched", lambda: self.fonts):
            said = self.run_it()
        self.assertIn("letters: 156 images of 6 fonts", said)
        self.assertIn("digits: 60 images of 6 fonts", said)
        for name, characters in (("letters", letters), ("digits", digits)):
            for side in ("train", "validation"):
                self.assertEqual("".join(sorted(os.listdir(self.root / "data" / name / side))),
                                 characters)
        self.assertEqual(fonts.DATA, Path(__file__).resolve().parents[2] / "data")

    def test_out_alone_is_of_letters(self):
        given, sets = fonts.parsed(["--out=x"])
        self.assertEqual(sets, [(Path("x"), "abcdefghijklmnopqrstuvwxyz")])
        self.assertEqual((given.folders, given.size, given.validation_share, given.seed),
                         ([], 64, 0.2, 0))

    def test_fault_arguments_are_refused_in_a_line(self):
        for arguments, message in (
            (["--characters=abc"], "--characters needs --out DIR"),
            (["--characters=", "--out=x"], "name 2 to 4096, none twice"),
            (["--characters=a", "--out=x"], "1 characters, 1 of them different: name 2 to 4096"),
            (["--characters=aba", "--out=x"], "3 characters, 2 of them different"),
            (["--characters=a b", "--out=x"], "' ' leaves no ink"),
            (["--characters=a\x07", "--out=x"], "leaves no ink"),
            (["--characters=a\udc80", "--out=x"], "leaves no ink"),
            (["--size=7"], "'7' is not from 8 to 1024 pixels"),
            (["--size=1025"], "from 8 to 1024"),
            (["--size=x"], "from 8 to 1024"),
            (["--validation-share=0"], "between 0 and 1"),
            (["--validation-share=1"], "between 0 and 1"),
            (["--validation-share=nan"], "between 0 and 1"),
            (["--seed=x"], "invalid int value"),
            (["--siz=8"], "unrecognized arguments"),
        ):
            with contextlib.redirect_stderr(io.StringIO()) as said:
                with self.assertRaises(SystemExit) as exited:
                    fonts.parsed(arguments)
            self.assertEqual(exited.exception.code, 2)
            self.assertRegex(said.getvalue(), "^fonts: [^\n]*; see fonts.py --help\n$")
            self.assertIn(message, said.getvalue())


class Faults(Case):
    def test_fault_too_few_families(self):
        for path in self.fonts.iterdir():
            path.unlink()
        for style, width in (("", 100), (" Bold", 200), (" Mono", 300)):
            self.add(f"Ash{style}", width)
        self.add("Few", 400, "ab")
        self.refused(r"fonts in .*/fonts that can be used are 3, of 1 families, and 2 families are "
                     r"needed.*add fonts \(left out: no glyph for a character: 1\)")
        self.assertEqual(os.listdir(self.root), ["fonts"])

    def failing(self, error, after):
        """Has the writing of files raise an error after so many of them."""
        write, left = Path.write_bytes, [after]

        def fail(path, content):
            left[0] -= 1
            if left[0] < 0:
                raise error
            return write(path, content)

        return mock.patch.object(Path, "write_bytes", fail)

    def test_fault_half_a_folder_is_never_left(self):
        for error in (KeyboardInterrupt(), OSError(28, "No space left on device")):
            with self.failing(error, 7), self.assertRaises(type(error)):
                self.make(out=self.root / "new" / "deep" / "set")
            self.assertEqual(os.listdir(self.root), ["fonts"])

    def test_fault_the_old_folder_stays_where_a_new_one_fails(self):
        self.make()
        before = self.files()
        with self.failing(KeyboardInterrupt(), 7), self.assertRaises(KeyboardInterrupt):
            self.make("--seed=1")
        rename = Path.rename

        def refuse(path, target):
            if path.name == "new":
                raise KeyboardInterrupt
            return rename(path, target)

        with mock.patch.object(Path, "rename", refuse), self.assertRaises(KeyboardInterrupt):
            self.make("--seed=1")
        self.assertEqual(self.files(), before)
        self.assertEqual(os.listdir(self.out.parent), ["set"])

    def test_fault_a_folder_that_came_meanwhile_is_left_alone(self):
        read = font_faces.read

        def meanwhile(*arguments):
            self.out.mkdir(parents=True)
            (self.out / "mine.png").write_bytes(b"x")
            return read(*arguments)

        with mock.patch.object(font_faces, "read", meanwhile):
            self.refused("was not made by this script")
        self.assertEqual(self.files(self.out.parent), {"set/mine.png": b"x"})

    def test_fault_the_command_says_what_is_wrong_in_a_line(self):
        for arguments, message in (
            ([self.root / "none"], "none does not exist: name a folder of fonts"),
            ([self.fonts, "--characters=ac", "--out=/proc/set"], "/proc.*: check the permissions"),
            ([self.fonts, "--characters=xy", f"--out={self.out}"], "can be used are 0"),
        ):
            run = subprocess.run([sys.executable, fonts.__file__, *map(str, arguments)],
                                 capture_output=True, text=True)
            self.assertEqual(run.returncode, 1)
            said = [line for line in run.stderr.splitlines() if "reading" not in line]
            self.assertEqual(len(said), 1, run.stderr)
            self.assertRegex(said[0], "^fonts: .*" + message)

    def test_fault_names_are_said_in_any_alphabet(self):
        self.add("字体" * 3, 450, "ab")
        run = subprocess.run([sys.executable, fonts.__file__, str(self.fonts), "--characters=abc",
                              f"--out={self.out}"], capture_output=True,
                             env=dict(os.environ, PYTHONIOENCODING="latin-1"))
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn(rb"\u5b57\u4f53", run.stdout)


if __name__ == "__main__":
    unittest.main()
