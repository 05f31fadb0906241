"""The smallest fonts that are fonts, made of bars, for the tests of fonts.py.

Importing this fetches fontTools and Pillow once. Where that fails, it skips the tests.
"""

import io
import struct
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import fonts  # noqa: E402
import packages  # noqa: E402

try:
    for library, version in fonts.LIBRARIES.items():
        packages.use(library, version)
except SystemExit as error:
    print(f"skipped: the tests of fonts.py, without {library} {version} ({error})",
          file=sys.stderr)
    raise unittest.SkipTest(f"{library} {version} cannot be fetched: {error}") from None

from fontTools.fontBuilder import FontBuilder  # noqa: E402
from fontTools.pens.t2CharStringPen import T2CharStringPen  # noqa: E402
from fontTools.pens.ttGlyphPen import TTGlyphPen  # noqa: E402
from fontTools.ttLib import TTCollection, TTFont  # noqa: E402
from fontTools.ttLib.tables.DefaultTable import DefaultTable  # noqa: E402

EM = 1000


def font(family, drawings, cff=False, change=None):
    """A font, in bytes, of a family. `drawings` has polygons, or a call with a pen, by character.

    `change` is called with the FontBuilder before the font is saved.
    """
    builder = FontBuilder(EM, isTTF=not cff)
    builder.font.recalcTimestamp = False
    builder.updateHead(created=0, modified=0)
    names = {character: f"u{ord(character):04X}" for character in drawings}
    glyphs = {".notdef": drawn([], cff)}
    glyphs.update((names[character], drawn(drawings[character], cff)) for character in drawings)
    builder.setupGlyphOrder(list(glyphs))
    builder.setupCharacterMap({ord(character): name for character, name in names.items()})
    if cff:
        builder.setupCFF(family.replace(" ", ""), {}, glyphs, {})
    else:
        builder.setupGlyf(glyphs)
    builder.setupHorizontalMetrics({name: (EM, 0) for name in glyphs})
    builder.setupHorizontalHeader(ascent=EM, descent=0)
    builder.setupNameTable({"familyName": family, "styleName": "Regular", "fullName": family})
    builder.setupOS2()
    builder.setupPost()
    if change:
        change(builder)
    return saved(builder)


def drawn(drawing, cff):
    pen = T2CharStringPen(EM, None) if cff else TTGlyphPen(None)
    if callable(drawing):
        drawing(pen)
    else:
        for first, *others in drawing:
            pen.moveTo(first)
            for point in others:
                pen.lineTo(point)
            pen.closePath()
    return pen.getCharString() if cff else pen.glyph()


def saved(made):
    file = io.BytesIO()
    made.save(file)
    return file.getvalue()


def raw_map(*groups):
    """A table that maps characters from the first to the last to glyphs from the third on."""
    table = DefaultTable("cmap")
    table.data = struct.pack(">HHHHLHHLLL", 0, 1, 3, 10, 12, 12, 0, 16 + 12 * len(groups), 0,
                             len(groups)) + b"".join(struct.pack(">LLL", *g) for g in groups)
    return table


def box(left, bottom, right, top):
    return [(left, bottom), (left, top), (right, top), (right, bottom)]


def bars(family, characters, width, **extra):
    """Letters of bars: which of six is the character's, how wide they are is the family's."""
    def letter(number):
        rows = [row for row in range(6) if number >> row & 1] + [6]
        return [box(0, 150 * row, width, 150 * row + 90) for row in rows]

    drawings = {character: letter(place + 1) for place, character in enumerate(characters)}
    return font(family, drawings, **extra)


def collection(contents):
    """Fonts in one file."""
    made = TTCollection()
    made.fonts = [TTFont(io.BytesIO(content), recalcTimestamp=False) for content in contents]
    return saved(made)
