//! Marks of keys in menus: `_File` (GTK) and `&File` (Qt, Windows), or `ファイル(_F)` where the script has no such letter.
//!
//! The same characters stand in names (`LC_ALL`, `AT&T`). A mark is one that its text has once in the place of a mark, and
//! that is not within a word that the translation has, too.

const MARKS: [char; 2] = ['_', '&'];

/// Both texts without such marks.
pub(super) fn removed(source: &str, target: &str) -> (String, String) {
    if !source.contains(MARKS) && !target.contains(MARKS) {
        return (source.to_owned(), target.to_owned());
    }
    // A path of menus, each with a mark: /_File/_Open.
    let is_path = source.contains("/_") || target.contains("/_");
    let without = |text: &str, other: &str| match is_path {
        true => text.split('/').map(|menu| unmarked(menu, other)).collect::<Vec<_>>().join("/"),
        false => unmarked(text, other),
    };
    (without(source, target), without(target, source))
}

fn unmarked(text: &str, other: &str) -> String {
    let mut text = text.to_owned();
    for mark in MARKS {
        if let Some((from, to)) = suffix(&text, mark) {
            text.replace_range(from..to, "");
        } else if let Some(at) = position(&text, other, mark) {
            text.remove(at);
        }
    }
    text
}

/// Where `(_F)` is, with the space before it.
fn suffix(text: &str, mark: char) -> Option<(usize, usize)> {
    text.match_indices(mark).find_map(|(at, _)| {
        let (before, after) = (text.get(..at)?, text.get(at + 1..)?);
        let opening = before.strip_suffix(['(', '（'])?.trim_end();
        let mut rest = after.chars();
        rest.next().filter(char::is_ascii_alphanumeric)?;
        let closing = rest.next().filter(|closing| [')', '）'].contains(closing))?;
        // Behind the mark, a letter and the closing parenthesis.
        (!opening.is_empty()).then(|| (opening.len(), at + 2 + closing.len_utf8()))
    })
}

/// Where the only mark is.
fn position(text: &str, other: &str, mark: char) -> Option<usize> {
    let mut marks =
        text.match_indices(mark).map(|(at, _)| at).filter(|at| is_mark(text, other, mark, *at));
    let first = marks.next();
    first.filter(|_| marks.next().is_none())
}

fn is_mark(text: &str, other: &str, mark: char, at: usize) -> bool {
    let (before, after) =
        (text.get(..at).unwrap_or_default(), text.get(at + 1..).unwrap_or_default());
    if !after.starts_with(char::is_alphanumeric) || (mark == '&' && is_entity(after)) {
        return false;
    }
    let start = before
        .rfind(char::is_whitespace)
        .map_or(before, |space| before.get(space..).unwrap_or_default())
        .trim_start();
    let end = after.split(char::is_whitespace).next().unwrap_or_default();
    if start.contains(mark) || end.contains(mark) {
        return false; // More than one in a word: __init__, GTK_IM_MODULE.
    }
    let is_within_word = before.ends_with(char::is_alphanumeric);
    let word_is_shared = || {
        other.split_whitespace().any(|word| {
            word.strip_prefix(start).is_some_and(|rest| rest.strip_prefix(mark) == Some(end))
        })
    };
    // The translation of E_xit has a mark of its own; that of file_name has none. Few names have & before a small letter.
    let may_be_within =
        other.contains(mark) || (mark == '&' && after.starts_with(char::is_lowercase));
    !is_within_word || (may_be_within && !word_is_shared())
}

/// Whether `amp;` or `#39;` follows.
fn is_entity(after: &str) -> bool {
    let name = after.split(';').next().unwrap_or_default();
    name.len() < after.len()
        && name.len() <= 8
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'#')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_marks_of_menus_are_removed() {
        for (source, target, expected) in [
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
            ("/文件(_F)/导入(_I)...", "/_File/_Import...", ("/文件/导入...", "/File/Import...")),
        ] {
            let (source, target) = removed(source, target);
            assert_eq!((source.as_str(), target.as_str()), expected);
        }
    }

    #[test]
    fn oracle_names_are_left_alone() {
        for (source, target) in [
            ("LC_ALL ist nicht gesetzt", "LC_ALL is not set"),
            ("AT&T und mehr", "AT&T and more"),
            ("Fragen und Antworten", "Q&A"),
            ("GTK_IM_MODULE fehlt", "GTK_IM_MODULE is missing"),
            ("der Dateiname", "the file_name"),
            ("Suchen &amp; Ersetzen", "Search &amp; replace"),
            ("rot & grün", "red & green"),
            ("kein __init__", "no __init__"),
            ("?a=1&b=2", "?a=1&b=2"),
        ] {
            assert_eq!(removed(source, target), (source.into(), target.into()));
        }
    }
}
