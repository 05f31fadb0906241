"""Tests of font_faces.py, found_files.py and font_images.py, with fonts that are made here.

Families: `oracle_` (pixels and reasons that can be told), `property_` (what holds for any fonts),
`fault_` (damaged fonts and limits).

Run: python3 -m unittest discover -s scripts/prepare
"""

import copy
import io
import os
import random
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))
import made_fonts  # noqa: E402
import font_faces  # noqa: E402
import fonts  # noqa: E402
import found_files  # noqa: E402
import font_images  # noqa: E402
from made_fonts import bars, box, collection, font  # noqa: E402
from PIL import Image  # noqa: E402

LETTERS = "abcdefgh"
FAMILIES = {"Ash": 100, "Beech": 160, "Cedar": 240, "Elm": 360, "Fir": 540, "Oak": 800}


class Case(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def write_families(self):
        for family, width in FAMILIES.items():
            self.write(f"{family}.ttf", bars(family, LETTERS, width))

    def read(self, characters=LETTERS, size=32):
        files, left_out = found_files.find([self.folder], fonts.SUFFIXES, "fonts")
        faces, unusable = font_faces.read(files, characters, size)
        return faces, left_out + unusable

    def one(self, content, characters=LETTERS, size=32):
        """The only font of a file, read."""
        self.write("one.ttf", content)
        (face,), left_out = self.read(characters, size)
        self.assertEqual(left_out, [])
        return face

    def reason(self, content, characters=LETTERS):
        """Why a file is left out: (reason, detail)."""
        self.write("one.ttf", content)
        faces, left_out = self.read(characters)
        self.assertEqual((len(faces), len(left_out)), (0, 1), "it is used")
        return left_out[0].reason, left_out[0].detail


def pixels(png):
    return Image.open(io.BytesIO(png)).load()


class Pictures(Case):
    def test_oracle_pixels_of_a_square(self):
        for size in (32, 64):
            drawings = {"a": [box(0, 0, 1000, 1000)], "b": [box(0, 0, 500, 500)]}
            face = self.one(font("Whole", drawings), "ab", size)
            scale = size // 32
            # The larger fills all but a margin of a 16th. The smaller stands on the same line, in
            # the middle.
            for png, columns, rows in zip(face.images, (range(2, 30), range(9, 23)),
                                          (range(2, 30), range(16, 30))):
                image = Image.open(io.BytesIO(png))
                self.assertEqual((image.format, image.mode, image.size), ("PNG", "L", (size, size)))
                for place, grey in enumerate(image.tobytes()):
                    y, x = (at // scale for at in divmod(place, size))
                    self.assertEqual(grey, 0 if x in columns and y in rows else 255, (x, y))

    def test_oracle_a_part_of_a_pixel_is_grey(self):
        # Of 256 pixels the em has 224. Half of the width of `b` is 56 of them and a part of the
        # next one to the left.
        for width in (500, 501, 503, 505, 507):
            drawings = {"a": [box(0, 0, 1000, 1000)], "b": [box(0, 0, width, 1000)]}
            grey = pixels(self.one(font("Grey", drawings), "ab", 256).images[1])[128 - 57, 128]
            known = 255 * (57 - 224 * width / 2000)
            self.assertLess(abs(grey - known), 9, width)  # FreeType has 64 places in a pixel.

    def test_oracle_curves_and_holes(self):
        k = 276  # of a radius of 500: the handles of a cubic that is nearly a circle

        def disc(pen):
            pen.moveTo((1000, 500))
            pen.curveTo((1000, 500 + k), (500 + k, 1000), (500, 1000))
            pen.curveTo((500 - k, 1000), (0, 500 + k), (0, 500))
            pen.curveTo((0, 500 - k), (500 - k, 0), (500, 0))
            pen.curveTo((500 + k, 0), (1000, 500 - k), (1000, 500))
            pen.closePath()

        ring = [box(0, 0, 1000, 1000), box(250, 250, 750, 750)[::-1]]
        cross = [box(0, 400, 1000, 600), box(400, 0, 600, 1000)]
        face = self.one(font("Round", {"a": disc, "b": ring, "c": cross}, cff=True), "abc", 64)
        ink = [sum(255 - grey for grey in Image.open(io.BytesIO(png)).tobytes()) / 255 / 56 ** 2
               for png in face.images]
        # A disc, a square less its middle, and two bars that are inked where they cross, too.
        for found, known in zip(ink, (3.1416 / 4, 0.75, 0.36)):
            self.assertLess(abs(found - known), 0.01)
        self.assertEqual(pixels(face.images[1])[32, 32], 255)
        self.assertEqual(pixels(face.images[2])[32, 32], 0)

    def test_oracle_a_component_is_drawn_in_its_place(self):
        def half_and_moved(pen):
            pen.addComponent("u0061", (0.5, 0, 0, 0.5, 0, 500))

        def change(builder):
            pen = made_fonts.TTGlyphPen({"u0061": None})
            half_and_moved(pen)
            builder.font["glyf"]["u0062"] = pen.glyph()

        square = [box(0, 0, 1000, 1000)]
        made = font("Component", {"a": square, "b": square}, change=change)
        plain = font("Component", {"a": square, "b": [box(0, 500, 500, 1000)]})
        self.assertEqual(self.one(made, "ab").images, self.one(plain, "ab").images)

    def test_property_ink_stays_inside_and_can_be_seen(self):
        self.write_families()
        for size in (8, 33, 64):
            faces, _ = self.read(size=size)
            for face in faces:
                self.assertEqual(len(face.images), len(LETTERS))
                for png in face.images:
                    at = pixels(png)
                    edge = {at[x, y] for i in range(size)
                            for x, y in ((i, 0), (i, size - 1), (0, i), (size - 1, i))}
                    darkest = min(at[x, y] for x in range(size) for y in range(size))
                    self.assertLess(darkest, 255)
                    if size > 8:  # There the margin is half of a pixel, and bars are thinner.
                        self.assertEqual(edge, {255})
                        self.assertEqual(darkest, 0)

    def test_property_the_choice_does_not_hang_on_the_size(self):
        self.write_families()
        by_size = [[(f.family, f.name, f.looks, f.digest) for f in self.read(size=size)[0]]
                   for size in (8, 32, 64)]
        self.assertEqual(by_size[0], by_size[1])
        self.assertEqual(by_size[1], by_size[2])
        self.assertEqual(len(by_size[0]), len(FAMILIES))


class Choice(Case):
    def test_oracle_names_and_families(self):
        face = self.one(bars("Ash Sans Bold", LETTERS, 100))
        self.assertEqual((face.name, face.family), ("Ash Sans Bold", "ash"))

        def typographic(builder):
            builder.setupNameTable({"familyName": "Elm Light", "fullName": "Elm Light 9",
                                    "typographicFamily": "Elm\nTree"}, mac=False)

        face = self.one(bars("x", LETTERS, 100, change=typographic))
        self.assertEqual((face.name, face.family), ("Elm Light 9", "elmtree"))

        def nameless(builder):
            del builder.font["name"]

        face = self.one(bars("x", LETTERS, 100, change=nameless))
        self.assertEqual((face.name, face.family), ("one", "one"))

    def test_oracle_a_collection_is_several_fonts(self):
        self.write_families()
        apart, _ = self.read()
        for path in self.folder.iterdir():
            path.unlink()
        self.write("all.ttc", collection([bars(*item) for item in (
            (family, LETTERS, width) for family, width in FAMILIES.items())]))
        together, left_out = self.read()
        self.assertEqual(left_out, [])
        self.assertEqual([(f.family, f.name, f.images) for f in together],
                         [(f.family, f.name, f.images) for f in apart])
        self.assertEqual(len({f.digest for f in together}), len(FAMILIES))

    def test_a_font_of_a_collection_is_left_out_by_its_place(self):
        self.write("two.ttc", collection([bars("Ash", LETTERS, 100), bars("Elm", "abc", 200)]))
        faces, (left_out,) = self.read()
        self.assertEqual([face.name for face in faces], ["Ash"])
        self.assertEqual(left_out[1:], ("two.ttc, font 2", "no glyph for a character", "'d'"))

    def test_twins_and_copies_are_left_out(self):
        self.write_families()
        self.write("again/x.OTF", (self.folder / "Elm.ttf").read_bytes())
        self.write("twin.ttf", bars("Yew", LETTERS, 360))
        self.write("twin.otf", bars("Zelkova", LETTERS, 360, cff=True))  # in another format
        faces, left_out = self.read()
        self.assertEqual([face.name for face in faces], list(FAMILIES))
        self.assertEqual([entry[1:] for entry in left_out], [
            ("x.OTF", "copy of another file", str(self.folder / "Elm.ttf")),
            ("Yew", "looks like another font to the last pixel", "Elm"),
            ("Zelkova", "looks like another font to the last pixel", "Elm")])

    def test_a_copy_under_another_name_is_of_the_same_family(self):
        self.write_families()
        self.write("copy.ttf", bars("Zelkova", LETTERS, 246))
        faces, _ = self.read()
        self.assertEqual({face.name: face.family for face in faces}["Zelkova"], "cedar")
        self.assertEqual({face.family for face in faces}, set(map(str.lower, FAMILIES)))

    def test_property_where_files_lie_changes_nothing(self):
        self.write_families()
        before, _ = self.read()
        for place, path in enumerate(sorted(self.folder.iterdir(), reverse=True)):
            self.write(f"{place}/x{9 - place}.OTF", path.read_bytes())
            path.unlink()
        after, _ = self.read()
        self.assertEqual([(f.name, f.family, f.digest, f.images) for f in before],
                         [(f.name, f.family, f.digest, f.images) for f in after])

    def test_pictures_are_left_out_however_a_font_says_so(self):
        def panose(builder):
            # A copy: FontBuilder's fonts all have the same.
            builder.font["OS/2"].panose = copy.copy(builder.font["OS/2"].panose)
            builder.font["OS/2"].panose.bFamilyType = 5

        def family_class(builder):
            builder.font["OS/2"].sFamilyClass = 12 << 8 | 3

        def symbols(builder):
            for table in builder.font["cmap"].tables:
                if table.platformID == 3:
                    table.platEncID = 0

        for made in (bars("Tree Symbols", LETTERS, 400), bars("Tree-Icons", LETTERS, 400),
                     *(bars("Tree", LETTERS, 400, change=change)
                       for change in (panose, family_class, symbols))):
            self.assertEqual(self.reason(made), ("pictures for letters", ""))
        self.one(bars("Iconic", LETTERS, 400))  # Not a word of its own.

    def test_reasons_of_fonts_that_cannot_teach(self):
        def of(drawing):
            return dict.fromkeys(LETTERS, [drawing])

        def lineless(builder):
            del builder.font["glyf"], builder.font["loca"]

        def mapless(builder):
            del builder.font["cmap"]

        square = box(0, 0, 500, 500)
        for made, known in (
            (bars("Few", "abcdefg", 400), ("no glyph for a character", "'h'")),
            (bars("Mapless", LETTERS, 400, change=mapless), ("no glyph for a character", "'a'")),
            (bars("Bitmaps", LETTERS, 400, change=lineless), ("no outlines", "")),
            (font("Blank", dict(of(square), a=[])), ("nothing drawn for a character", "'a'")),
            (font("Alike", of(square)), ("two characters alike", "'a' and 'b'")),
            (font("Line", of([(0, 0), (500, 0)])),
             ("next to nothing drawn for a character", "'a'")),
            (font("Thin", of([(0, 0), (500, 0), (250, 1)])),
             ("next to nothing drawn for a character", "'a'")),
            (font("Point", of([(5, 5), (5, 5), (5, 5)])),
             ("next to nothing drawn for a character", "'a'")),
            (font("Far", of([(0, 0), (9000, 0), (250, 1000)])),
             ("a character further than 8 ems from its origin", "'a'")),
        ):
            self.assertEqual(self.reason(made), known)

    def test_the_glyph_of_missing_characters_counts_as_missing(self):
        def change(builder):
            builder.font["cmap"] = made_fonts.raw_map((97, 97, 1), (98, 98, 0))
            builder.font["glyf"][".notdef"] = builder.font["glyf"]["u0062"]

        square = [box(0, 0, 500, 500)]
        made = font("Notdef", {"a": square, "b": [box(0, 0, 300, 300)]}, change=change)
        self.assertEqual(self.reason(made, "ab"), ("no glyph for a character", "'b'"))


class Faults(Case):
    def test_files_that_are_no_fonts(self):
        for content in (b"", b"This is no font.\n" * 100, b"wOFF" + bytes(60), b"wOF2" + bytes(60),
                        b"ttcf\0\1\0\0\0\0\0\0"):
            self.assertEqual(self.reason(content), ("not a font", ""))
        broken = b"ttcf\0\1\0\0\xff\xff\xff\xff\0\0\0\x0c"
        self.assertEqual(self.reason(broken)[0], "damaged")

    def test_truncations_end_in_a_reason(self):
        for made in (bars("Willow", LETTERS, 400), bars("Willow", LETTERS, 400, cff=True)):
            names = set()
            # Last are padding and a table that a font can do without.
            for length in range(0, len(made) - 200, 11):
                names.add(self.write(f"{length}.ttf", made[:length]).name)
            faces, left_out = self.read()
            for name in names:
                (self.folder / name).unlink()
            self.assertEqual(faces, [])
            self.assertEqual({entry.label for entry in left_out}, names)
            self.assertTrue(all(len(entry.reason) > 5 for entry in left_out))

    def test_damaged_bytes_end_in_a_font_or_a_reason(self):
        for cff in (False, True):
            good, stream = bars("Willow", LETTERS, 400, cff=cff), random.Random(7)
            for file in range(200):
                damaged = bytearray(good)
                for _ in range(stream.randrange(1, 5)):
                    damaged[stream.randrange(len(damaged))] = stream.randrange(256)
                self.write(f"{file}.ttf", bytes(damaged))
            faces, left_out = self.read()
            self.assertEqual(len(faces) + len(left_out), 200)
            damaged = sum(entry.reason == "damaged" for entry in left_out)
            self.assertTrue(20 < damaged < 180, damaged)
            for face in faces:
                self.assertEqual({Image.open(io.BytesIO(png)).size for png in face.images},
                                 {(32, 32)})

    def test_a_map_of_more_codes_than_there_are_is_not_listed(self):
        def change(builder, last):
            builder.font["cmap"] = made_fonts.raw_map((97, last, 1))

        for last, known in ((104, None), (97 + 0x110000, "a character map of 1114113 codes"),
                            (0xFFFFFFFF, "a character map of 4294967199 codes")):
            made = bars("Map", LETTERS, 400, change=lambda builder: change(builder, last))
            if known:
                self.assertEqual(self.reason(made), ("damaged", known))
            else:
                self.one(made)

    def test_a_component_of_itself_is_damaged(self):
        def change(builder):
            pen = made_fonts.TTGlyphPen({"u0061": None})
            pen.addComponent("u0061", (1, 0, 0, 1, 10, 0))
            snake = builder.font["glyf"]["u0061"] = pen.glyph()
            # Nothing is computed of what has no end.
            snake.xMin = snake.yMin = snake.xMax = snake.yMax = 0
            snake.recalcBounds = builder.font["maxp"].recalc = lambda *_, **__: None

        square = [box(0, 0, 500, 500)]
        reason, detail = self.reason(font("Snake", {"a": square, "b": square}, change=change), "ab")
        self.assertEqual((reason, detail.split()[0]), ("damaged", "RecursionError"))

    def test_an_intricate_character_is_left_out(self):
        with mock.patch.object(font_faces, "SEGMENTS_MAX", 12):  # `c` has three bars of 5 segments
            self.assertEqual(self.reason(bars("Willow", LETTERS, 400)),
                             ("too intricate a character", "more than 12 segments"))
        with mock.patch.object(font_faces, "SEGMENTS_MAX", 15):
            self.one(bars("Willow", "abc", 400), "abc")

    def test_limits_of_files_and_sets(self):
        self.write_families()
        size = (self.folder / "Oak.ttf").stat().st_size
        with mock.patch.object(found_files, "FILE_BYTES_MAX", size - 1):
            self.assertIn("larger than 0 MiB", {entry.reason for entry in self.read()[1]})
        with mock.patch.object(found_files, "FILE_BYTES_MAX", size):
            self.assertNotIn("Oak.ttf", {entry.label for entry in self.read()[1]})
        for name, limit, message in (("FILES_MAX", 5, "more than 5 fonts"),
                                     ("ENTRIES_MAX", 5, "more than 5 files and folders")):
            with mock.patch.object(found_files, name, limit):
                with self.assertRaisesRegex(found_files.Failed, message + ".*a smaller folder"):
                    self.read()
            with mock.patch.object(found_files, name, limit + 1):
                self.read()
        with mock.patch.object(font_faces, "IMAGE_BYTES_MAX", 1000):
            with self.assertRaisesRegex(found_files.Failed, "images take more.*smaller --size"):
                self.read()

    def test_fonts_beyond_the_most_of_a_file_are_named(self):
        self.write("all.ttc", collection([bars(family, LETTERS, width)
                                          for family, width in FAMILIES.items()]))
        with mock.patch.object(font_faces, "FACES_MAX", 4):
            faces, (left_out,) = self.read()
        self.assertEqual(len(faces), 4)
        self.assertEqual(left_out[1:], ("all.ttc", "fonts of a file beyond its first 4", "2 fonts"))


class Files(Case):
    def test_which_files_are_found(self):
        for name in ("a.ttf", "b/c.OTF", "b/d/e.ttc", "f.otc", "g.txt", "h.woff", "ttf"):
            self.write(name, b"x")
        (self.folder / "folder.ttf").mkdir()
        outside = tempfile.TemporaryDirectory()
        self.addCleanup(outside.cleanup)
        (Path(outside.name) / "far.ttf").write_bytes(b"x")
        os.symlink(Path(outside.name) / "far.ttf", self.folder / "link.ttf")
        os.symlink(outside.name, self.folder / "linked")
        os.symlink(self.folder, self.folder / "b" / "loop")
        os.symlink("nowhere", self.folder / "broken.ttf")
        os.symlink("endless.ttf", self.folder / "endless.ttf")
        os.mkfifo(self.folder / "pipe.ttf")
        files, left_out = found_files.find([self.folder], fonts.SUFFIXES, "fonts")
        self.assertEqual([str(path.relative_to(self.folder)) for path in files],
                         ["a.ttf", "b/c.OTF", "b/d/e.ttc", "f.otc", "link.ttf"])
        self.assertEqual(left_out, [])

    def test_folders_that_cannot_be_read(self):
        for name, message in (("none", "none does not exist: name a folder of fonts"),
                              ("a.ttf", "a.ttf is a file: name the folder that it is in")):
            self.write("a.ttf", b"x")
            with self.assertRaisesRegex(found_files.Failed, message):
                found_files.find([self.folder / name], fonts.SUFFIXES, "fonts")
        (self.folder / "locked").mkdir()
        scan = os.scandir

        def refuse(folder):
            if Path(folder).name == "locked":
                raise PermissionError(13, "Permission denied")
            return scan(folder)

        with mock.patch.object(os, "scandir", refuse):
            files, (left_out,) = found_files.find([self.folder], fonts.SUFFIXES, "fonts")
        self.assertEqual([path.name for path in files], ["a.ttf"])
        self.assertEqual(left_out[1:], ("locked", "folder that cannot be listed",
                                        "Permission denied"))

    def test_a_file_that_is_gone_is_left_out(self):
        gone = self.folder / "gone.ttf"
        faces, (left_out,) = font_faces.read([gone], LETTERS, 32)
        self.assertEqual(left_out[1:], ("gone.ttf", "not readable", "No such file or directory"))

    def test_the_digest_changes_with_any_file(self):
        paths = [self.write("a.ttf", b"1"), self.write("b.ttf", b"2")]
        digests = {found_files.digest(paths), found_files.digest(paths[:1])}
        self.write("b.ttf", b"3")
        digests.add(found_files.digest(paths))
        paths[1].unlink()
        digests.add(found_files.digest(paths))
        self.assertEqual(len(digests), 4)


if __name__ == "__main__":
    unittest.main()
