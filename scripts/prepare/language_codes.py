"""Which language the name of a folder, of a file or a header means."""

import re

# Countries whose language is written in a way of its own; others are folded into the language.
COUNTRIES = {"pt_BR", "zh_CN", "zh_HK", "zh_TW"}
# Scripts and codes that are other names for one of gettext's.
ALIASES = {
    "zh": "zh_CN", "zh_SG": "zh_CN", "zh_Hans": "zh_CN", "zh_Hant": "zh_TW",
    "sr@Latn": "sr@latin", "sr_Latn": "sr@latin", "uz@Cyrl": "uz@cyrillic",
    "no": "nb", "iw": "he", "in": "id", "ji": "yi", "jw": "jv", "tl": "fil",
}
# Not one, not known, several, none; and English, which is what all are translated into.
NO_LANGUAGE = {"en", "und", "mul", "zxx"}
NAME = re.compile(r"([a-z]{2,3})(?:[_-]([A-Za-z0-9]{2,4}))?(?:\.[^@]*)?(?:@([A-Za-z0-9]{1,20}))?")


def code(name):
    """The code of a language as gettext has it (`de`, `pt_BR`, `sr@latin`), from a name such as
    `de_DE.UTF-8` or `pt-br`. None for English, for what is no language (`C`, `x-test`) and for what
    is no code.
    """
    found = NAME.fullmatch(name)
    if not found or found[1] in NO_LANGUAGE:
        return None
    language, region, modifier = found.groups()
    if region:
        region = region.title() if len(region) == 4 else region.upper()
    full = f"{language}_{region}" if region else language
    if full in ALIASES:
        folded = ALIASES[full]
    else:
        folded = full if full in COUNTRIES else ALIASES.get(language, language)
    if modifier in (None, "euro"):
        return folded
    return ALIASES.get(f"{folded}@{modifier}", f"{folded}@{modifier}")
