"""Fonts: finding their files, and leaving out those that cannot teach the characters asked for.

A font is used if it draws every character, no two of them alike, and does not call itself a font of
pictures. Files and fonts are limited in size and number. Whatever is wrong with a file, the font is
left out with a reason.

packages.use() must have fetched fontTools and Pillow before this module is imported.
"""

import dataclasses
import hashlib
import io
import logging
import re
import struct
from pathlib import Path

import font_families
import found_files
import font_images
from found_files import LeftOut, Unusable
from fontTools.pens.recordingPen import DecomposingRecordingPen
from fontTools.ttLib import TTFont
from fontTools.ttLib.sfnt import readTTCHeader

FACES_MAX = 256  # of one file
IMAGE_BYTES_MAX = 1 << 30  # of all images of a set
NAME_CHARS_MAX = 120
SEGMENTS_MAX = 20_000  # of an outline: letters have some hundred, traced drawings have more
REACH_MAX = 8  # ems from the origin: no letter reaches further
PROBE_SIZE = 32  # pixels of the images by which a font is judged, whatever size it is asked for
THUMBNAIL_SIZE = 8  # pixels of the images by which designs are compared
INK_MIN = 255  # of a character of the probe, in 255ths of a pixel: less is not seen
CODES_MAX = 0x110000  # of one character map: as many as there are characters

# Words in the names of fonts whose letters are pictures. Their files often do not say so otherwise.
PICTURE_WORDS = frozenset("""
    awesome barcode braille dingbat dingbats emoji icon icons music opensymbol ornaments redacted
    symbol symbols webdings
""".split())
# First digit of PANOSE, and high byte of the family class, of fonts that have symbols for letters.
PANOSE_SYMBOL = 5
CLASS_SYMBOL = 12

# What fontTools warns of does not matter here: the font is drawn, or is left out with a reason.
logging.getLogger("fontTools").setLevel(logging.CRITICAL + 1)


@dataclasses.dataclass
class Face:
    """A font that has every character."""

    family: str  # what all styles of a design are called; see font_families.family
    name: str  # what the font calls itself: "DejaVu Serif Bold"
    file: Path
    digest: str  # SHA-256 of the file, and which of its fonts it is
    images: list  # a PNG file, in bytes, of each character
    looks: str  # SHA-256 of the probes of all characters
    thumbnails: list  # of each character, the pixels of its thumbnail
    ink: int  # sum of all pixels of the thumbnails


def read(files, characters, size):
    """(faces, left out): the fonts in the files that can be used, sorted by family, name and hash.

    Families that have two fonts alike are joined. Raises Failed where the images are too large.
    """
    faces, left_out, seen, bytes_all = [], [], {}, 0
    for path in files:
        try:
            content = found_files.content(path)
            digest = hashlib.sha256(content).hexdigest()
            if digest in seen:
                raise Unusable("copy of another file", str(seen[digest]))
            seen[digest] = path
            count = guarded(faces_in, content)
        except Unusable as error:
            left_out.append(LeftOut(str(path), path.name, *error.args))
            continue
        if count > FACES_MAX:
            left_out.append(LeftOut(str(path), path.name, "fonts of a file beyond its first "
                                    f"{FACES_MAX}", f"{count - FACES_MAX} fonts"))
        for index in range(min(count, FACES_MAX)):
            try:
                face = guarded(read_face, content, index, path, characters, size)
            except Unusable as error:
                label = path.name + (f", font {index + 1}" if count > 1 else "")
                left_out.append(LeftOut(str(path), label, *error.args))
                continue
            face.digest = hashlib.sha256(f"{digest} {index}".encode()).hexdigest()
            faces.append(face)
            bytes_all += sum(map(len, face.images))
            if bytes_all > IMAGE_BYTES_MAX:
                raise found_files.Failed(f"the images take more than {IMAGE_BYTES_MAX >> 20} MiB: "
                                        "ask for a smaller --size or fewer fonts")
    faces.sort(key=lambda face: (face.family, face.name, face.digest))
    faces, twins = font_families.without_twins(faces)
    left_out.extend(LeftOut(str(face.file), face.name, "looks like another font to the last pixel",
                            twin.name) for face, twin in twins)
    font_families.join(faces)
    return faces, left_out


def guarded(function, *arguments):
    """What the function returns. Any error, of which fontTools has many kinds, is Unusable."""
    try:
        return function(*arguments)
    except Unusable:
        raise
    except Exception as error:
        text = " ".join(f"{type(error).__name__} {error}".split())
        raise Unusable("damaged", text[:NAME_CHARS_MAX]) from error


def faces_in(content):
    """How many fonts a file has."""
    count = int(content[:4] in (b"\0\1\0\0", b"true", b"OTTO"))
    if content[:4] == b"ttcf":
        count = readTTCHeader(io.BytesIO(content)).numFonts
    if not count:
        raise Unusable("not a font", "")
    return count


def read_face(content, index, path, characters, size):
    """A font with images of all characters."""
    font = TTFont(io.BytesIO(content), fontNumber=index, lazy=True)
    family = name_of(font, 16) or name_of(font, 1) or path.stem
    if is_of_pictures(font, family):
        raise Unusable("pictures for letters", "")
    outlines = outlines_of(font, characters)
    fitted = font_images.fitted(outlines)
    probes = font_images.drawn(fitted, len(characters), PROBE_SIZE)
    looks = looks_of(probes, characters)
    images = font_images.drawn(fitted, len(characters), size) if size != PROBE_SIZE else probes
    thumbnails = [probe.reduce(PROBE_SIZE // THUMBNAIL_SIZE).tobytes() for probe in probes]
    return Face(family=font_families.family(family), name=name_of(font, 4) or family, file=path,
                digest="", images=[font_images.png(image) for image in images], looks=looks,
                thumbnails=thumbnails, ink=sum(map(sum, thumbnails)))


def name_of(font, number):
    """An entry of the font's table of names, in English if there is one; None if it has none."""
    text = (font["name"].getDebugName(number) if "name" in font else None) or ""
    return "".join(filter(str.isprintable, text))[:NAME_CHARS_MAX].strip() or None


def is_of_pictures(font, family):
    """Whether a font says that it has no letters, as far as can be told."""
    if PICTURE_WORDS & set(re.split(r"[\W_]+", family.lower())):
        return True
    if "OS/2" in font and font["OS/2"].panose.bFamilyType == PANOSE_SYMBOL:
        return True
    if "OS/2" in font and font["OS/2"].sFamilyClass >> 8 & 0xFF == CLASS_SYMBOL:
        return True
    return "cmap" in font and font["cmap"].getcmap(3, 0) is not None


class Segments(list):
    """A list for a pen to record in, that ends a drawing without end."""

    def append(self, segment):
        if len(self) == SEGMENTS_MAX:
            raise Unusable("too intricate a character", f"more than {SEGMENTS_MAX} segments")
        super().append(segment)


def outlines_of(font, characters):
    """Recordings of how the font draws the characters, without components."""
    if "cmap" not in font:
        raise Unusable("no glyph for a character", repr(characters[0]))
    if not {"glyf", "CFF ", "CFF2"} & set(font.keys()):
        raise Unusable("no outlines", "")
    check_maps(font.reader["cmap"])
    names, glyphs = font.getBestCmap() or {}, font.getGlyphSet()
    reach, outlines = REACH_MAX * font["head"].unitsPerEm, []
    for character in characters:
        name = names.get(ord(character))
        if name is None:  # Or the glyph of missing characters, which fontTools does not count.
            raise Unusable("no glyph for a character", repr(character))
        outline = DecomposingRecordingPen(glyphs)
        outline.value = Segments()
        glyphs[name].draw(outline)
        box = font_images.bounds(outline)
        if box is None:
            raise Unusable("nothing drawn for a character", repr(character))
        if not all(abs(edge) <= reach for edge in box):
            raise Unusable(f"a character further than {REACH_MAX} ems from its origin",
                           repr(character))
        outlines.append(outline)
    return outlines


def check_maps(table):
    """Raises Unusable where a character map has more codes than there are: fontTools lists all."""
    for place in range(struct.unpack_from(">H", table, 2)[0]):
        at = struct.unpack_from(">L", table, 8 + 8 * place)[0]
        form = struct.unpack_from(">H", table, at)[0]
        ranges = []
        if form == 4:
            count = struct.unpack_from(">H", table, at + 6)[0] // 2
            ends = struct.unpack_from(f">{count}H", table, at + 14)
            ranges = zip(struct.unpack_from(f">{count}H", table, at + 16 + 2 * count), ends)
        elif form in (12, 13):
            count = struct.unpack_from(">L", table, at + 12)[0]
            groups = table[at + 16:at + 16 + 12 * count]
            ranges = struct.iter_unpack(">LL4x", groups[:len(groups) // 12 * 12])
        codes = sum(max(0, end - start + 1) for start, end in ranges)
        if codes > CODES_MAX:
            raise Unusable("damaged", f"a character map of {codes} codes")


def looks_of(probes, characters):
    """How the characters look, as a hash, where all can be seen and no two look the same."""
    seen = {}
    for probe, character in zip(probes, characters):
        pixels = probe.tobytes()
        if sum(pixels) < INK_MIN:
            raise Unusable("next to nothing drawn for a character", repr(character))
        same = seen.setdefault(pixels, character)
        if same != character:
            raise Unusable("two characters alike", f"{same!r} and {character!r}")
    return hashlib.sha256(b"".join(seen)).hexdigest()
