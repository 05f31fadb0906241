//! Which language a folder, a file or a header names.

/// Countries whose language is written in a way of its own; others are folded into the language.
const COUNTRIES: [&str; 4] = ["pt_BR", "zh_CN", "zh_HK", "zh_TW"];

/// Scripts and codes that are other names for one of gettext's.
const ALIASES: [(&str, &str); 13] = [
    ("zh", "zh_CN"),
    ("zh_SG", "zh_CN"),
    ("zh_Hans", "zh_CN"),
    ("zh_Hant", "zh_TW"),
    ("sr@Latn", "sr@latin"),
    ("sr_Latn", "sr@latin"),
    ("uz@Cyrl", "uz@cyrillic"),
    ("no", "nb"),
    ("iw", "he"),
    ("in", "id"),
    ("ji", "yi"),
    ("jw", "jv"),
    ("tl", "fil"),
];

/// The code of a language as gettext has it (`de`, `pt_BR`, `sr@latin`), from a name such as `de_DE.UTF-8` or `pt-br`. None
/// for English, for what is no language (`C`, `x-test`) and for what is no code.
pub(super) fn code(name: &str) -> Option<String> {
    let (name, modifier) = match name.split_once('@') {
        Some((name, modifier)) => (name, Some(modifier)),
        None => (name, None),
    };
    // Before a modifier there may be a charset.
    let name = name.split('.').next().unwrap_or_default();
    let mut parts = name.split(['_', '-']);
    let language = parts.next()?;
    let is_language = (2..=3).contains(&language.len())
        && language.bytes().all(|byte| byte.is_ascii_lowercase())
        && !["en", "und", "mul", "zxx"].contains(&language);
    let region = parts.next().map(region);
    let is_region = region.as_ref().is_none_or(|region| {
        (2..=4).contains(&region.len()) && region.bytes().all(|byte| byte.is_ascii_alphanumeric())
    });
    let is_modifier = modifier.is_none_or(|modifier| {
        (1..=20).contains(&modifier.len())
            && modifier.bytes().all(|byte| byte.is_ascii_alphanumeric())
    });
    if !is_language || !is_region || !is_modifier || parts.next().is_some() {
        return None;
    }
    let full = match &region {
        Some(region) => format!("{language}_{region}"),
        None => language.to_owned(),
    };
    let alias = |code: &str| {
        ALIASES.iter().find(|(name, _)| *name == code).map(|(_, code)| (*code).to_owned())
    };
    let folded = alias(&full)
        .or_else(|| COUNTRIES.contains(&full.as_str()).then(|| full.clone()))
        .or_else(|| alias(language))
        .unwrap_or_else(|| language.to_owned());
    match modifier {
        None | Some("euro") => Some(folded),
        Some(modifier) => {
            let modified = format!("{folded}@{modifier}");
            Some(alias(&modified).unwrap_or(modified))
        }
    }
}

/// A country in capitals, or a script with one.
fn region(text: &str) -> String {
    if text.len() != 4 {
        return text.to_ascii_uppercase();
    }
    let mut script = text.to_ascii_lowercase();
    if let Some(first) = script.get_mut(..1) {
        first.make_ascii_uppercase();
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_codes() {
        for (name, expected) in [
            ("de", "de"),
            ("de_DE", "de"),
            ("de_AT.UTF-8", "de"),
            ("de_DE@euro", "de"),
            ("pt_PT", "pt"),
            ("pt_BR", "pt_BR"),
            ("pt-br", "pt_BR"),
            ("zh_CN", "zh_CN"),
            ("zh_CN.GB2312", "zh_CN"),
            ("zh_TW", "zh_TW"),
            ("zh_HK", "zh_HK"),
            ("zh-Hant", "zh_TW"),
            ("zh", "zh_CN"),
            ("sr", "sr"),
            ("sr_RS", "sr"),
            ("sr@latin", "sr@latin"),
            ("sr@Latn", "sr@latin"),
            ("sr_RS@latin", "sr@latin"),
            ("ca@valencia", "ca@valencia"),
            ("es_419", "es"),
            ("no", "nb"),
            ("hsb", "hsb"),
        ] {
            assert_eq!(code(name).as_deref(), Some(expected), "{name}");
        }
    }

    #[test]
    fn oracle_what_is_no_foreign_language() {
        for name in [
            "en",
            "en_GB",
            "en@quot",
            "en_US.UTF-8",
            "C",
            "POSIX",
            "x-test",
            "l10n",
            "locale",
            "",
            "@",
            "de_",
            "d",
            "de_DE_x",
            "DE",
            "../de",
            "de@",
            "dé",
        ] {
            assert_eq!(code(name), None, "{name}");
        }
    }
}
