//! From the names in a foreign state dict to `layer.parameter`.
//!
//! A map is a list of rules in TOML. A tensor is matched by the first rule whose `from` matches its whole name:
//!
//! ```
//! use gpipe_checkpoint::names::{Mapped, NameMap};
//!
//! let map = NameMap::parse(r#"
//!     prefix = "transformer."     # taken off names that begin with it
//!     fresh = ["*.scale"]         # parameters that the file does not have, and that keep their own values
//!     [[names]]
//!     from = "h.*.attn.c_attn.weight"
//!     to = "*.attention.qkv.weight"
//!     transpose = true            # swap a matrix's two axes, as GPT-2's Conv1D needs
//!     [[names]]
//!     from = "*.attn.bias"
//!     ignore = true               # left out on purpose
//! "#, "gpt2.toml")?;
//! let to = |name: &str, transpose| Mapped::To { name: name.to_owned(), transpose };
//! assert_eq!(map.map("transformer.h.0.attn.c_attn.weight"), to("0.attention.qkv.weight", true));
//! assert_eq!(map.map("h.1.attn.c_attn.weight"), to("1.attention.qkv.weight", true));
//! assert_eq!(map.map("transformer.h.0.attn.bias"), Mapped::Ignored);
//! assert_eq!(map.map("lm_head.weight"), Mapped::Unmatched);
//! assert_eq!(map.fresh(), ["*.scale"]);
//! # Ok::<(), gpipe_checkpoint::names::NamesError>(())
//! ```
//!
//! `*` stands for any text, with dots or empty; each takes as little as it can, the first one first. The n-th
//! `*` of `to` is what the n-th of `from` stood for. A name that no rule matches is not guessed at; a last rule from `*`
//! to `*` keeps all other names.

use serde::Deserialize;

use crate::tensor_file::shown;

/// Longest text of a map, in bytes.
const TEXT_MAX: usize = 1 << 20;

/// Why a text is no map of names.
#[derive(Debug, thiserror::Error)]
#[error("{origin}: {reason}")]
pub struct NamesError {
    /// Where the text comes from.
    pub origin: String,
    /// What is wrong; it names the rule.
    pub reason: String,
}

/// What becomes of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mapped {
    /// It is the parameter `name`.
    To {
        /// The parameter's full name.
        name: String,
        /// Whether the file has the matrix with its axes swapped.
        transpose: bool,
    },
    /// It is left out on purpose.
    Ignored,
    /// No rule speaks of it.
    Unmatched,
}

/// Rules from a file's names to a model's.
#[derive(Debug, Clone)]
pub struct NameMap {
    /// Taken off a name that begins with it, before the rules.
    prefix: String,
    fresh: Vec<String>,
    rules: Vec<Rule>,
}

/// A pattern is kept as the texts between its `*`; there is always at least one.
#[derive(Debug, Clone)]
struct Rule {
    from: Vec<String>,
    /// Nothing: the tensor is ignored.
    to: Option<Vec<String>>,
    transpose: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(default)]
    prefix: String,
    #[serde(default)]
    fresh: Vec<String>,
    names: Vec<toml::Table>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRule {
    from: String,
    to: Option<String>,
    #[serde(default)]
    transpose: bool,
    #[serde(default)]
    ignore: bool,
}

impl NameMap {
    /// The map in `text`, which errors say comes from `origin`.
    ///
    /// # Errors
    /// [`NamesError`]: not TOML, more than 1 MiB, an unknown key, or a rule that says nothing or too much.
    pub fn parse(text: &str, origin: &str) -> Result<Self, NamesError> {
        let error = |reason| NamesError { origin: origin.to_owned(), reason };
        if text.len() > TEXT_MAX {
            let length = text.len();
            return Err(error(format!("{length} bytes, at most {TEXT_MAX} are allowed")));
        }
        let document: Document =
            toml::from_str(text).map_err(|e| error(e.to_string().trim_end().to_owned()))?;
        let mut rules = Vec::with_capacity(document.names.len());
        for (index, table) in document.names.into_iter().enumerate() {
            let text = table.to_string().trim_end().replace('\n', ", ");
            let rule = Rule::new(table).map_err(|reason| {
                error(format!("rule {} ({}): {reason}", index + 1, shown(&text)))
            })?;
            rules.push(rule);
        }
        Ok(Self { prefix: document.prefix, fresh: document.fresh, rules })
    }

    /// Every tensor is the parameter of its own name.
    #[must_use]
    pub fn identity() -> Self {
        let any = pieces("*");
        let rules = vec![Rule { from: any.clone(), to: Some(any), transpose: false }];
        Self { prefix: String::new(), fresh: Vec::new(), rules }
    }

    /// Patterns of parameters that keep their own values: see [`Fit::without`](crate::fit::Fit::without).
    #[must_use]
    pub fn fresh(&self) -> &[String] {
        &self.fresh
    }

    /// What becomes of the tensor `name`.
    #[must_use]
    pub fn map(&self, name: &str) -> Mapped {
        let name = name.strip_prefix(&self.prefix).unwrap_or(name);
        for rule in &self.rules {
            if let Some(found) = captures(&rule.from, name) {
                return match &rule.to {
                    None => Mapped::Ignored,
                    Some(to) => Mapped::To { name: fill(to, &found), transpose: rule.transpose },
                };
            }
        }
        Mapped::Unmatched
    }
}

impl Rule {
    fn new(table: toml::Table) -> Result<Self, String> {
        let RawRule { from, to, transpose, ignore } =
            table.try_into().map_err(|error: toml::de::Error| error.message().to_owned())?;
        let from = pieces(&from);
        let to = to.as_deref().map(pieces);
        match &to {
            None if !ignore => return Err("give it `to = \"...\"` or `ignore = true`".to_owned()),
            None if transpose => return Err("what is ignored is not transposed".to_owned()),
            Some(_) if ignore => return Err("it has both `to` and `ignore`: keep one".to_owned()),
            Some(to) if to.len() > from.len() => {
                let (to, from) = (to.len() - 1, from.len() - 1);
                return Err(format!("`to` has {to} `*`, `from` only {from}"));
            }
            _ => {}
        }
        Ok(Self { from, to, transpose })
    }
}

fn pieces(pattern: &str) -> Vec<String> {
    pattern.split('*').map(str::to_owned).collect()
}

/// What each `*` stands for. Nothing is tried twice: taking the first occurrence of a piece leaves the most text for the
/// pieces after it.
fn captures<'n>(pattern: &[String], name: &'n str) -> Option<Vec<&'n str>> {
    let (first, rest) = pattern.split_first()?;
    let mut left = name.strip_prefix(first.as_str())?;
    let Some((last, middle)) = rest.split_last() else {
        return left.is_empty().then(Vec::new);
    };
    let mut found = Vec::with_capacity(rest.len());
    for piece in middle {
        let (before, after) = left.split_once(piece.as_str())?;
        found.push(before);
        left = after;
    }
    found.push(left.strip_suffix(last.as_str())?);
    Some(found)
}

fn fill(pattern: &[String], found: &[&str]) -> String {
    let mut name = String::new();
    for (index, piece) in pattern.iter().enumerate() {
        name.push_str(piece);
        if index + 1 < pattern.len() {
            name.push_str(found.get(index).copied().unwrap_or_default());
        }
    }
    name
}

#[cfg(test)]
mod tests {
    use proptest::{prelude::*, test_runner::RngSeed};

    use super::*;

    fn map(rules: &[(&str, &str)]) -> NameMap {
        let rule = |(from, rest): &(&str, &str)| format!("[[names]]\nfrom = {from:?}\n{rest}\n");
        NameMap::parse(&rules.iter().map(rule).collect::<String>(), "map.toml").unwrap()
    }

    fn to(name: &str) -> Mapped {
        Mapped::To { name: name.to_owned(), transpose: false }
    }

    fn refusal(text: &str) -> String {
        NameMap::parse(text, "map.toml").unwrap_err().to_string()
    }

    #[test]
    fn oracle_names_are_what_the_rules_say() {
        let map = map(&[
            ("h.*.ln_*.weight", "to = \"block*.norm*.gain\""),
            ("h.*.ln_*.*", "to = \"block*.norm*.offset\""), // fewer `*` in `to`
            ("h.*.w", "to = \"block*.weight\"\ntranspose = true"),
            ("exact", "to = \"other\""),
            ("*.bias", "ignore = true"),
            ("h.9.bias", "to = \"never\""), // the first match counts
        ]);
        assert_eq!(map.map("h.0.ln_1.weight"), to("block0.norm1.gain"));
        assert_eq!(map.map("h.12.ln_2.bias"), to("block12.norm2.offset"));
        let transposed = Mapped::To { name: "block3.weight".to_owned(), transpose: true };
        assert_eq!(map.map("h.3.w"), transposed);
        assert_eq!(map.map("exact"), to("other"));
        assert_eq!(map.map("h.9.bias"), Mapped::Ignored);
        for unmatched in ["exactly", "inexact", "h.3.w.x", "xh.3.w", "h.w", ""] {
            assert_eq!(map.map(unmatched), Mapped::Unmatched, "{unmatched}");
        }
    }

    #[test]
    fn oracle_a_star_takes_as_little_as_it_can_and_dots_too() {
        let map = map(&[("*.*", "to = \"*|*\""), ("a**b", "to = \"*|*\"")]);
        assert_eq!(map.map("a.b.c"), to("a|b.c"));
        assert_eq!(map.map("."), to("|"));
        assert_eq!(map.map("axb"), to("|x"));
    }

    #[test]
    fn oracle_the_identity_keeps_every_name() {
        for name in ["", "*", "a.b", "layer.weight"] {
            assert_eq!(NameMap::identity().map(name), to(name));
        }
    }

    #[test]
    fn fault_rules_that_say_nothing_or_too_much_are_named() {
        let good = "[[names]]\nfrom = \"a\"\nto = \"b\"\n";
        for (rule, reason) in [
            ("from = \"x.*\"", "give it `to"),
            ("from = \"x.*\"\nignore = false", "give it `to"),
            ("from = \"x.*\"\nto = \"*.*\"", "`to` has 2 `*`, `from` only 1"),
            ("from = \"x.*\"\nto = \"*\"\nignore = true", "keep one"),
            ("from = \"x.*\"\ntranspose = true\nignore = true", "not transposed"),
            ("from = \"x.*\"\nto = \"*\"\ntranpose = true", "tranpose"),
            ("from = \"x.*\"\nto = 3", "string"),
        ] {
            let message = refusal(&format!("{good}[[names]]\n{rule}\n"));
            assert!(message.starts_with("map.toml: rule 2 ("), "{message}");
            assert!(message.contains("from = \"x.*\""), "{message}");
            assert!(message.contains(reason), "{message}");
        }
        for (text, reason) in [
            ("", "names"),
            ("[[name]]\nfrom = \"a\"", "unknown field `name`"),
            ("names = 3", "sequence"),
            ("[[names]]\nto = \"b\"", "missing field `from`"),
            ("[[names", "TOML"),
        ] {
            let message = refusal(text);
            assert!(message.starts_with("map.toml: "), "{message}");
            assert!(message.contains(reason), "{message}");
        }
    }

    #[test]
    fn fault_a_long_map_is_refused_unread() {
        let text = "#".repeat(TEXT_MAX);
        assert!(refusal(&text).contains("names"), "as long as allowed: read");
        assert!(refusal(&(text + "#")).contains("at most 1048576"));
    }

    #[test]
    fn fault_many_stars_do_not_take_for_ever() {
        let from = "*a".repeat(2000) + "b";
        let map = map(&[(&from, "ignore = true")]);
        assert_eq!(map.map(&"a".repeat(4000)), Mapped::Unmatched);
        assert_eq!(map.map(&("a".repeat(4000) + "ab")), Mapped::Ignored);
    }

    /// All that the `*` of `pattern` can stand for, by trying everything.
    fn all_captures(pattern: &str, name: &str) -> Vec<Vec<String>> {
        let Some(first) = pattern.chars().next() else {
            return if name.is_empty() { vec![Vec::new()] } else { Vec::new() };
        };
        let rest = &pattern[1..];
        if first != '*' {
            return name.strip_prefix(first).map_or(Vec::new(), |name| all_captures(rest, name));
        }
        let split = |length| {
            let found = all_captures(rest, &name[length..]);
            found.into_iter().map(move |found| [vec![name[..length].to_owned()], found].concat())
        };
        (0..=name.len()).flat_map(split).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            rng_seed: RngSeed::Fixed(3),
            failure_persistence: None,
            ..ProptestConfig::with_cases(3000)
        })]

        #[test]
        fn property_the_first_of_all_possible_matches_is_found(
            pattern in "[ab*]{0,7}",
            name in "[ab]{0,9}",
        ) {
            // In order of how little each `*` takes, the first one first.
            let expected = all_captures(&pattern, &name).into_iter().next();
            let pattern = pieces(&pattern);
            let found = captures(&pattern, &name);
            prop_assert_eq!(found, expected.as_ref().map(|all| all.iter().map(String::as_str).collect()));
        }
    }
}
