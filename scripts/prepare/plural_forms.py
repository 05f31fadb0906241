"""Which of a message's plural forms goes with the English singular, and which with the plural.

A catalogue has a rule such as `nplurals=3; plural=n%10==1 && n%100!=11 ? 0 : n%10>=2 && n%10<=4 ? 1
: 2;`, an expression of C in n. It is evaluated for some numbers. A form that is used

- for 1, and not for 5, goes with the singular, though some languages use it for 21 or 0, too;
- for several numbers goes with the plural, and so does the only form of a language without number;
- for a single number but 1 goes with neither: Arabic's form for two says "two files" where English
  has "%d files".
"""

import gettext

FORMS_MAX = 16  # 6 is the most known
ENGLISH = "nplurals=2; plural=(n != 1);"
# They tell the forms of known languages apart, each form of any number of things several times.
SAMPLES = (*range(16), 19, 20, 21, 22, 25, 40, 60, 99, 100, 101, 102, 103, 105, 111, 122, 200, 201,
           202, 1000, 1_000_000)

SINGULAR, PLURAL = "singular", "plural"


def of(rule):
    """What each form goes with, SINGULAR, PLURAL or None, by a catalogue's `Plural-Forms`; nothing
    where the rule makes no sense. Without a rule it is as in English.
    """
    fields = dict(part.split("=", 1) for part in (rule or ENGLISH).split(";") if "=" in part)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    try:
        count = int(fields["nplurals"])
        if not 1 <= count <= FORMS_MAX:
            return []
        form_of = gettext.c2py(fields["plural"])  # It refuses what is too long or nested too deep.
        numbers = [[] for _ in range(count)]
        for n in SAMPLES:
            form = form_of(n)
            if not 0 <= form < count:
                return []
            numbers[form].append(n)
    except (KeyError, ValueError, ArithmeticError, RecursionError):
        return []
    return [goes_with(used) for used in numbers]


def goes_with(numbers):
    """What a form goes with that is used for these numbers."""
    if 1 in numbers and 5 not in numbers:
        return SINGULAR
    return PLURAL if len(numbers) > 1 else None
