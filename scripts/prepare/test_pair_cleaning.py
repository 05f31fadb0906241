"""Tests of pair_cleaning.py, plural_forms.py and language_codes.py.

Run: python3 -m unittest discover -s scripts/prepare
"""

import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import language_codes  # noqa: E402
import pair_cleaning  # noqa: E402
import plural_forms  # noqa: E402
from pair_cleaning import NoPair, pair  # noqa: E402
from plural_forms import PLURAL, SINGULAR  # noqa: E402


def directives(text):
    return [found[0] for found in pair_cleaning.MARKUP.finditer(text)
            if found.lastgroup == "directive"]


class Pairs(unittest.TestCase):
    def test_pairs_are_cleaned(self):
        for source, target, kept in (
            ("_Datei öffnen…", "_Open File…", ("Datei öffnen…", "Open File…")),
            ("  Zwei\n\tZeilen\xa0! ", "Two\nlines!", ("Zwei Zeilen !", "Two lines!")),
            ("Öffnen", "menu|Open", ("Öffnen", "Open")),
            ("Kämpferin", "female^Fighter", ("Kämpferin", "Fighter")),
            ("a|ä", "a|b", ("a|ä", "a|b")),
            ("می\u200cخواهم", "I want", ("می\u200cخواهم", "I want")),
            ("\u200fקובץ", "File", ("קובץ", "File")),
        ):
            self.assertEqual(pair(source, target), kept)

    def test_each_reason(self):
        for source, target, reason in (
            ("", "File", pair_cleaning.EMPTY),
            ("Datei", " \n", pair_cleaning.EMPTY),
            ("Datei\x1b", "File", pair_cleaning.CONTROLS),
            ("Dat\ufffdi", "File", pair_cleaning.CONTROLS),
            ("%s: %d", "%s - %d", pair_cleaning.NO_WORDS),
            ("Linux", "Linux", pair_cleaning.IDENTICAL),
            ("_Linux", "Linux", pair_cleaning.IDENTICAL),
            ("%s Datei", "%d file", pair_cleaning.DIRECTIVES),
            ("%s %s Datei", "%s file", pair_cleaning.DIRECTIVES),
            ("<b>Datei</b>", "<i>file</i>", pair_cleaning.TAGS),
            ("Datei %s", "File %1$s", pair_cleaning.DIRECTIVES),
        ):
            with self.assertRaises(NoPair, msg=source) as raised:
                pair(source, target)
            self.assertEqual(raised.exception.args, (reason,), source)

    def test_sides_may_have_their_directives_and_tags_in_any_order(self):
        for source, target in (("%2$s von %1$s", "%1$s of %2$s"), ("<i>a</i><b>", "<b>b<i></i>")):
            self.assertEqual(pair(source, target), (source, target))

    def test_translators_are_no_sentence(self):
        asks = pair_cleaning.asks_for_names
        self.assertTrue(asks(None, "translator-credits", "Hans"))
        self.assertTrue(asks("NAME OF TRANSLATORS", "Your names", "Hans"))
        self.assertTrue(asks(None, "About", "Launchpad Contributions:\n  Hans https://launchpad.net/~hans"))
        self.assertFalse(asks("menu", "Translate", "Übersetzen"))


class Markup(unittest.TestCase):
    def test_directives(self):
        for text, expected in (
            ("%s of %d", ["%s", "%d"]),
            ("%1$s and %2$-5.2f", ["%1$s", "%2$-5.2f"]),
            ("%-5.2f|%05d|%.*s|%*d|%+d|%#x|%'d",
             ["%-5.2f", "%05d", "%.*s", "%*d", "%+d", "%#x", "%'d"]),
            ("%ld %llu %zu %hhd %Lf", ["%ld", "%llu", "%zu", "%hhd", "%Lf"]),
            ("%(name)s %(n)3d", ["%(name)s", "%(n)3d"]),
            ("{0} {} {name} {0:.2f}", ["{0}", "{}", "{name}", "{0:.2f}"]),
            ("%1 of %2, %L1 %10", ["%1", "%2", "%L1", "%10"]),
            ("%H:%M", ["%H", "%M"]),
            ("%l o'clock", ["%l"]),
            ("100%% sure", ["%%"]),
            ("$HOME and ${name} cost $5", ["$HOME", "${name}"]),
            ("%@", ["%@"]),
            ("50% of, 100%, 5 % der", []),
            ("{ not one } {", []),
            ("%(no name)s %(open", []),
            ("%1$ and %", []),
            ("日本%s語", ["%s"]),
        ):
            self.assertEqual(directives(text), expected, text)

    def test_tags(self):
        tags = pair_cleaning.markup
        self.assertEqual(tags('<b>x</b> <a href="%s">', "tag"), ["</b>", '<a href="%s">', "<b>"])
        self.assertEqual(tags("<me@example.org> a < b > c <3", "tag"), ["<me@example.org>"])


class Accelerators(unittest.TestCase):
    def test_marks_of_menus_are_removed(self):
        for source, target, expected in (
            ("_Datei", "_File", ("Datei", "File")),
            ("&Datei", "&File", ("Datei", "File")),
            ("B_eenden", "E_xit", ("Beenden", "Exit")),
            ("Speichern _unter…", "Save _As…", ("Speichern unter…", "Save As…")),
            ("ファイル(_F)", "_File", ("ファイル", "File")),
            ("文件 (&F)...", "&File...", ("文件...", "File...")),
            ("另存为（_A）：", "Save _As:", ("另存为：", "Save As:")),
            ("退出(_X)", "E_xit", ("退出", "Exit")),
            ("Beenden", "E_xit", ("Beenden", "E_xit")),
            ("Öffnen", "_Open", ("Öffnen", "Open")),
            ("_Stop", "_Stop", ("Stop", "Stop")),
            ("Audio stumm", "Silence Audi&o", ("Audio stumm", "Silence Audio")),
            ("/_Datei/_Neu", "/_File/_New", ("/Datei/Neu", "/File/New")),
            ("/文件(_F)/导入(_I)...", "/_File/_Import...",
             ("/文件/导入...", "/File/Import...")),
        ):
            self.assertEqual(pair_cleaning.without_accelerators(source, target), expected)

    def test_names_are_left_alone(self):
        for source, target in (
            ("LC_ALL ist nicht gesetzt", "LC_ALL is not set"),
            ("AT&T und mehr", "AT&T and more"),
            ("Fragen und Antworten", "Q&A"),
            ("GTK_IM_MODULE fehlt", "GTK_IM_MODULE is missing"),
            ("der Dateiname", "the file_name"),
            ("Suchen &amp; Ersetzen", "Search &amp; replace"),
            ("rot & grün", "red & green"),
            ("kein __init__", "no __init__"),
            ("?a=1&b=2", "?a=1&b=2"),
        ):
            self.assertEqual(pair_cleaning.without_accelerators(source, target), (source, target))


class PluralForms(unittest.TestCase):
    def test_forms_of_languages(self):
        for rule, expected in (
            ("nplurals=2; plural=(n != 1);", [SINGULAR, PLURAL]),
            ("nplurals=2; plural=(n > 1)", [SINGULAR, PLURAL]),
            (None, [SINGULAR, PLURAL]),
            ("nplurals=1; plural=0;", [PLURAL]),
            ("nplurals=3; plural=(n%10==1 && n%100!=11 ? 0"
             " : n%10>=2 && n%10<=4 && (n%100<10 || n%100>=20) ? 1 : 2);",
             [SINGULAR, PLURAL, PLURAL]),
            ("nplurals=3; plural=(n==1) ? 0 : (n>=2 && n<=4) ? 1 : 2;", [SINGULAR, PLURAL, PLURAL]),
            # Slovenian, where older catalogues begin with the form of five.
            ("nplurals=4; plural=(n%100==1 ? 1 : n%100==2 ? 2 : n%100==3 || n%100==4 ? 3 : 0);",
             [PLURAL, SINGULAR, PLURAL, PLURAL]),
            # Arabic: nothing, one, two, few, many, and the rest.
            ("nplurals=6; plural=n==0 ? 0 : n==1 ? 1 : n==2 ? 2 : n%100>=3 && n%100<=10 ? 3"
             " : n%100>=11 ? 4 : 5;",
             [None, SINGULAR, None, PLURAL, PLURAL, PLURAL]),
            ("nplurals=2; plural=0;", [PLURAL, None]),  # It says 2 and means 1.
        ):
            self.assertEqual(plural_forms.of(rule), expected, rule)

    def test_rules_that_make_no_sense(self):
        for rule in ("nplurals=2", "plural=0", "nplurals=0; plural=0",
                     "nplurals=99999999999; plural=0", "nplurals=2; plural=2",
                     "nplurals=2; plural=n/0", "nplurals=2; plural=(n", "nplurals=2; plural=n n",
                     "nplurals=2; plural=m", "nplurals=2; plural=n ? 1",
                     "nplurals=2; plural=99999999999999999999", "nplurals=2; plural=n**n**n",
                     "nplurals=2; plural=__import__('os')", "nplurals=2; plural=0-1",
                     "nplurals=INTEGER; plural=EXPRESSION;", f"nplurals=2; plural={'(' * 1000}n",
                     f"nplurals=2; plural={'!' * 1_000_000}n"):
            self.assertEqual(plural_forms.of(rule), [], rule[:60])


class LanguageCodes(unittest.TestCase):
    def test_codes(self):
        for name, expected in (
            ("de", "de"), ("de_DE", "de"), ("de_AT.UTF-8", "de"), ("de_DE@euro", "de"),
            ("pt_PT", "pt"), ("pt_BR", "pt_BR"), ("pt-br", "pt_BR"),
            ("zh_CN", "zh_CN"), ("zh_CN.GB2312", "zh_CN"), ("zh_TW", "zh_TW"), ("zh_HK", "zh_HK"),
            ("zh-Hant", "zh_TW"), ("zh", "zh_CN"),
            ("sr", "sr"), ("sr_RS", "sr"), ("sr@latin", "sr@latin"), ("sr@Latn", "sr@latin"),
            ("sr_RS@latin", "sr@latin"), ("ca@valencia", "ca@valencia"), ("es_419", "es"),
            ("no", "nb"), ("hsb", "hsb"),
        ):
            self.assertEqual(language_codes.code(name), expected, name)

    def test_what_is_no_language_but_english(self):
        for name in ("en", "en_GB", "en@quot", "en_US.UTF-8", "C", "POSIX", "x-test", "l10n",
                     "locale", "", "@", "de_", "d", "de_DE_x", "DE", "../de", "de@", "dé"):
            self.assertIsNone(language_codes.code(name), name)


if __name__ == "__main__":
    unittest.main()
