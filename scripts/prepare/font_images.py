"""Images of characters: outlines in, greyscale images out.

Every font is scaled and placed once for all its characters, so that the tallest of them just fits:
an `o` is smaller than an `O`, and a `p` hangs lower than a `b`. Sideways a character is centred.

FreeType, which Pillow brings, fills the outlines. It does not get the file of the font but a small
font made here of the outlines alone. So no hint and no bitmap of the font changes the images, the
same outlines give the same images whatever the format of their file, and FreeType reads nothing
that somebody else made.

packages.use() must have fetched fontTools and Pillow before this module is imported.
"""

import io

from fontTools.fontBuilder import FontBuilder
from fontTools.pens.boundsPen import BoundsPen
from fontTools.pens.t2CharStringPen import T2CharStringPen
from fontTools.pens.transformPen import TransformPen
from PIL import Image, ImageChops, ImageDraw, ImageFont

MARGIN = 1 / 16  # of the side of an image, free at each edge
UNITS = 1024  # per side of an image, in the font made here: whole pixels are whole units
FIRST = 0xE000  # code of its first character, of a range in which nothing has a meaning


def fitted(outlines):
    """A font, in bytes, that draws the outlines in the squares of an image of any size.

    `outlines` are recordings of pens, all of them with points, in the units of their font.
    """
    boxes = [bounds(outline) for outline in outlines]
    bottom, top = min(box[1] for box in boxes), max(box[3] for box in boxes)
    extent = max(top - bottom, *(box[2] - box[0] for box in boxes))
    scale = UNITS * (1 - 2 * MARGIN) / (extent or 1)
    drawings = []
    for outline, (left, _, right, _) in zip(outlines, boxes):
        pen = T2CharStringPen(UNITS, None, roundTolerance=0)
        x, y = UNITS / 2 - scale * (left + right) / 2, UNITS / 2 - scale * (bottom + top) / 2
        outline.replay(TransformPen(pen, (scale, 0, 0, scale, x, y)))
        drawings.append(pen.getCharString())
    return font_of(drawings)


def bounds(outline):
    """(left, bottom, right, top) of an outline."""
    pen = BoundsPen(None)
    outline.replay(pen)
    return pen.bounds


def font_of(drawings):
    """A font, in bytes, whose characters from FIRST on are drawn like this."""
    glyphs = {".notdef": T2CharStringPen(UNITS, None).getCharString()}
    glyphs.update((f"c{place}", drawing) for place, drawing in enumerate(drawings))
    builder = FontBuilder(UNITS, isTTF=False)
    builder.setupGlyphOrder(list(glyphs))
    builder.setupCharacterMap({FIRST + place: f"c{place}" for place in range(len(drawings))})
    builder.setupCFF("Characters", {}, glyphs, {})
    builder.setupHorizontalMetrics({name: (UNITS, 0) for name in glyphs})
    builder.setupHorizontalHeader(ascent=UNITS, descent=0)
    builder.setupPost()
    font = io.BytesIO()
    builder.save(font)
    return font.getvalue()


def drawn(font, count, size):
    """The first `count` characters of a font that fitted() made, white on black, `size` pixels."""
    font = ImageFont.truetype(io.BytesIO(font), size, layout_engine=ImageFont.Layout.BASIC)
    images = []
    for place in range(count):
        image = Image.new("L", (size, size), 0)
        # The square stands on the line that characters stand on, at the bottom of the image.
        ImageDraw.Draw(image).text((0, size), chr(FIRST + place), fill=255, font=font, anchor="ls")
        images.append(image)
    return images


def png(image):
    """A PNG file, black on white, of an image that is white on black."""
    file = io.BytesIO()
    ImageChops.invert(image).save(file, "PNG", optimize=True)
    return file.getvalue()
