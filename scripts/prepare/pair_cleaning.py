"""What makes a message and its translation a pair to learn from, and what keeps it out.

Directives are those of C (`%s`, `%1$d`, `%-5.2f`, `%%`), Python (`%(name)s`, `{0}`), Qt (`%1`),
times (`%H`) and shells (`$name`, `${name}`). Not `% d`: it is rare, and "50 % der Dateien" is not.
Tags are `<...>` that begin with a letter or a slash, which includes addresses.

Accelerators are marks of keys in menus: `_File` (GTK) and `&File` (Qt, Windows), or `(_F)` where
the script has no such letter. The same characters stand in names (`LC_ALL`, `AT&T`). A mark is one
that its text has once in the place of a mark, and that is not within a word that the translation
has, too.
"""

import re
import unicodedata

EMPTY = "empty"
CONTROLS = "control characters"
NO_WORDS = "without words"
IDENTICAL = "the same on both sides"
DIRECTIVES = "other directives"
TAGS = "other tags"
CREDITS = "translators' names"

# Texts and contexts (KDE's) of messages by which programs ask for the translators' names.
CREDITS_TEXTS = {"translator-credits", "translator_credits", "translators-credits",
                 "translator credits", "your names", "your emails", "credit_for_translators",
                 "roles_of_translators", "others_roles_of_translators"}
CREDITS_CONTEXTS = {"NAME OF TRANSLATORS", "EMAIL OF TRANSLATORS"}

# What stands between a remark for translators and the text itself in an English message (GLib,
# Wesnoth).
PREFIX_ENDS = "|^"

# Marks that are not seen. The joiners that Persian and the scripts of India are spelt with are not
# among them.
UNSEEN = re.compile("[\xad\u200e\u200f\u202a-\u202e\u2060\u2066-\u2069\ufeff]")

BRACES = r"\{[^{}\s]{0,64}\}"
DIRECTIVE = rf"""
    %%
  | %(?:\([^)\s]{{0,64}}\))? L[0-9]{{1,2}}     # Qt's number, in the user's way of writing
  | %(?:\([^)\s]{{0,64}}\))? (?:[0-9]{{1,4}}\$)?             # %(name)s, %1$s
     [-+\#0']{{0,5}} [0-9*]{{0,4}} (?:\.[0-9*]{{0,4}})?      # flags, width, precision
     [hlLqjzt]{{0,2}} [A-Za-z@]
  | %(?![0-9]{{1,4}}\$) [1-9][0-9*]{{0,3}}                   # Qt's %1
  | {BRACES}
  | \$(?![0-9]) (?:[A-Za-z0-9_]{{1,64}} | {BRACES})          # not $5, which is money
"""
TAG = "</?(?=[A-Za-z])[^<>]{0,300}>"
MARKUP = re.compile(f"(?P<directive>{DIRECTIVE})|(?P<tag>{TAG})", re.VERBOSE)

KEY_IN_PARENTHESES = {mark: re.compile(rf"(?<=\S)\s*[(（]{mark}[A-Za-z0-9][)）]")
                      for mark in "_&"}
ENTITY = re.compile(r"[A-Za-z0-9#]{0,8};")


class NoPair(Exception):
    """Why a message and its translation are no pair."""


def pair(source, target):
    """A translation and its English text without what only a program needs: (source, target).
    Raises NoPair.
    """
    source, target = plain(source), plain(target)
    if not source or not target:
        raise NoPair(EMPTY)
    if any(is_broken(text) for text in (source, target)):
        raise NoPair(CONTROLS)
    target = without_remark(source, target)
    source, target = without_accelerators(source, target)
    if not has_words(source) or not has_words(target):
        raise NoPair(NO_WORDS)
    if source == target:
        raise NoPair(IDENTICAL)
    for kind, reason in (("directive", DIRECTIVES), ("tag", TAGS)):
        if markup(source, kind) != markup(target, kind):
            raise NoPair(reason)
    return source, target


def asks_for_names(context, text, translation):
    """Whether a message is no sentence, but asks the translators for their names."""
    return (context in CREDITS_CONTEXTS or text.strip().lower() in CREDITS_TEXTS
            or "Launchpad Contributions:" in translation)


def plain(text):
    """The text with runs of white space as one space, none at the ends, and no marks that are not
    seen.
    """
    return " ".join(UNSEEN.sub("", text).split())


def is_broken(text):
    """Whether there are controls, or what stands for a character that was lost."""
    return "\ufffd" in text or any(unicodedata.category(character) == "Cc" for character in text)


def without_remark(source, target):
    """The English text behind its remark for translators, which the translation does not have:
    `menu|Open`.
    """
    for end in PREFIX_ENDS:
        if end in target and end not in source:
            return target.split(end, 1)[1].lstrip()
    return target


def has_words(text):
    """Whether there is a letter outside of directives and tags."""
    return any(character.isalpha() for character in MARKUP.sub("", text))


def markup(text, kind):
    """The directives or the tags of a text, sorted."""
    return sorted(found[0] for found in MARKUP.finditer(text) if found.lastgroup == kind)


def without_accelerators(source, target):
    """Both texts without the marks of keys."""
    if not any(mark in text for text in (source, target) for mark in KEY_IN_PARENTHESES):
        return source, target
    is_path = "/_" in source or "/_" in target  # of menus, each with a mark: /_File/_Open
    return unmarked(source, target, is_path), unmarked(target, source, is_path)


def unmarked(text, other, is_path):
    if is_path:
        return "/".join(unmarked(menu, other, False) for menu in text.split("/"))
    for mark, in_parentheses in KEY_IN_PARENTHESES.items():
        if found := in_parentheses.search(text):
            text = text[:found.start()] + text[found.end():]
            continue
        places = [found.start() for found in re.finditer(mark, text)
                  if is_mark(text, other, found.start())]
        if len(places) == 1:
            text = text[:places[0]] + text[places[0] + 1:]
    return text


def is_mark(text, other, at):
    """Whether the character there marks a key, in a text whose translation is the other."""
    mark, before, after = text[at], text[:at], text[at + 1:]
    if not after[:1].isalnum() or (mark == "&" and ENTITY.match(after)):
        return False
    start = re.search(r"\S*$", before)[0]
    end = re.match(r"\S*", after)[0]
    if mark in start or mark in end:
        return False  # More than one in a word: __init__, GTK_IM_MODULE.
    if not before[-1:].isalnum():
        return True
    # The translation of E_xit has a mark of its own; that of file_name has none. Few names have &
    # before a small letter.
    may_be = mark in other or (mark == "&" and after[:1].islower())
    return may_be and start + mark + end not in other.split()
