"""Families of fonts: which fonts are one design, and which designs to validate on.

The images are split by family, so that a network is judged by designs of which it has seen no
weight and no slope. A split by name alone would not do that. Free fonts are copied and renamed:
TeX Gyre Termes, Nimbus Roman and STIX are one Times, and DejaVu Sans is also Verana Sans. Families
that have two fonts alike are therefore joined. Only the standard library is needed here.
"""

import hashlib
import re

# Two fonts are one design where their thumbnails differ by less than this many thousandths of
# their ink. Copies differ by 30 and less in some style. Different designs differ by 53 and more
# (Inter and TeX Gyre Heros, both bold).
DIFFERENCE_MAX = 45

# Words that tell a style of a design from the design. Many fonts have their weight in the name of
# their family.
STYLE_WORDS = frozenset("""
    black bold book caps caption code compressed cond condensed demi demibold display expanded
    extended extra extrabold extracondensed extralight fat hairline headline heavy italic light
    medium mono monospace monospaced narrow no2 no3 normal oblique otf poster regular roman sans sc
    semi semibold semicondensed serif slab slanted smallcaps std subhead text thin title titling ttf
    typewriter ultra ultrabold ultralight unhinted variable vf wide
""".split())


def family(name):
    """The name of a family in small letters, without words for styles and without optical sizes.

    "DejaVu Sans Mono" and "DejaVu Serif Condensed" are both "dejavu": their letters are too alike
    to be on two sides.
    """
    name = name.lower()
    design = [word for word in re.split(r"[\s_-]+", name)
              if word not in STYLE_WORDS and not re.fullmatch(r"[0-9.]*", word)]
    return " ".join(design) or name


def without_twins(faces):
    """(faces that look like no earlier one to the last pixel, pairs of the others and theirs).

    Twins are the same outlines in another file, or under another name.
    """
    first, twins = {}, []
    for face in faces:
        twin = first.setdefault(face.looks, face)
        if twin is not face:
            twins.append((face, twin))
    return list(first.values()), twins


def join(faces):
    """Gives families that have two fonts alike one name, the first of theirs by the alphabet."""
    joined = {}  # a family, and an earlier one that it is joined to

    def root(name):
        while name in joined:
            name = joined[name]
        return name

    by_ink = sorted(faces, key=lambda face: face.ink)
    for place, a in enumerate(by_ink):
        # The difference of the inks is the least that the thumbnails can differ by.
        ink_max = a.ink * (1000 + DIFFERENCE_MAX) // (1000 - DIFFERENCE_MAX)
        for b in by_ink[place + 1:]:
            if b.ink > ink_max:
                break
            if a.family != b.family and alike(a, b):
                first, last = sorted((root(a.family), root(b.family)))
                if first != last:
                    joined[last] = first
    for face in faces:
        face.family = root(face.family)


def alike(a, b):
    """Whether the thumbnails of two fonts, one of each character, differ little for their ink."""
    limit, difference = DIFFERENCE_MAX * (a.ink + b.ink), 0
    for pixels, others in zip(a.thumbnails, b.thumbnails):
        difference += 1000 * sum(abs(one - other) for one, other in zip(pixels, others))
        if difference >= limit:  # Nearly all pairs end at their first character.
            return False
    return True


def to_validate_on(families, share, seed):
    """The families to validate on: about that share of them, at least one, and not all.

    Which side a family is on depends on its name and the seed alone. So a family that is added
    moves no other, but for one: where a side would be empty, a family of the other side fills it.
    """
    def number(name):
        digest = hashlib.sha256(f"{seed} {name}".encode("utf-8", "backslashreplace")).digest()
        return int.from_bytes(digest[:6], "big") / (1 << 48)

    families = sorted(set(families), key=number)
    chosen = [name for name in families if number(name) < share]
    if not chosen:
        return set(families[:1])
    return set(chosen[:-1] if len(chosen) == len(families) else chosen)
