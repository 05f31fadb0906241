//! Maps the names in a foreign state dict to `layer.parameter`.
//!
//! A map is a list of rules in TOML. The first rule whose `from` matches a tensor's whole name
//! applies to that tensor:
//!
//! ```
//! use gpipe_checkpoint::names::{Mapped, NameMap, Names};
//!
//! let map = NameMap::parse(r#"
//!     prefix = "transformer."     # taken off names that begin with it
//!     reinit = ["*.scale"]        # parameters not in the file, which keep the model's values
//!     [[names]]
//!     from = "h.*.attn.c_attn.weight"
//!     to = "*.attention.qkv.weight"
//!     transpose = true            # swap a matrix's two axes, as GPT-2's Conv1D needs
//!     [[names]]
//!     from = "*.attn.bias"
//!     ignore = true               # left out on purpose
//!     optional = true             # a file may have no such tensor
//!     [[names]]
//!     from = "lm_head.weight"
//!     to = "head.weight"          # where the model has this parameter
//!     copy_of = "wte.weight"      # elsewhere it is left out, if it equals this tensor to the bit
//! "#, "gpt2.toml")?;
//! let to = |name: &str, transpose| Mapped::To { name: name.to_owned(), transpose };
//! assert_eq!(map.map("transformer.h.0.attn.c_attn.weight"), to("0.attention.qkv.weight", true));
//! assert_eq!(map.map("h.1.attn.c_attn.weight"), to("1.attention.qkv.weight", true));
//! assert_eq!(map.map("transformer.h.0.attn.bias"), Mapped::Ignored);
//! assert_eq!(map.map("other.weight"), Mapped::Unmatched);
//! assert_eq!(map.reinit(), ["*.scale"]);
//! # Ok::<(), gpipe_checkpoint::names::NamesError>(())
//! ```
//!
//! `*` matches any text, including dots and the empty text. Each `*` matches as little as possible,
//! the first one taking precedence. The n-th `*` of `to` is replaced by the text that the n-th `*`
//! of `from` matched. A name that no rule matches is not guessed; a last rule from `*` to `*` keeps
//! all other names. A rule that is the first match of no tensor is an error ([`Names::unused`]),
//! unless it has `optional = true`.

use serde::Deserialize;

use crate::tensor_file::shown;

/// Maximum size of a map's text, in bytes.
const TEXT_MAX: usize = 1 << 20;

/// Why a text is not a valid map of names.
#[derive(Debug, thiserror::Error)]
#[error("{origin}: {reason}")]
pub struct NamesError {
    /// The text's source, such as its file name.
    pub origin: String,
    /// What is wrong, and in which rule.
    pub reason: String,
}

/// What happens to a tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mapped {
    /// It becomes the parameter `name`.
    To {
        /// The parameter's full name.
        name: String,
        /// Whether the tensor in the file is the transpose of the parameter.
        transpose: bool,
    },
    /// It is deliberately left out.
    Ignored,
    /// It is declared a copy of another tensor.
    Copy {
        /// The parameter that the tensor becomes, if the model has it.
        to: Option<String>,
        /// Otherwise, the tensor that this one must equal, named without the prefix.
        of: String,
    },
    /// No rule matches it.
    Unmatched,
}

/// How the names in a file become those of parameters.
pub trait Names {
    /// Decides what happens to the tensor `name`.
    fn map(&self, name: &str) -> Mapped;

    /// `name` as [`Mapped::Copy`] names originals.
    fn bare<'n>(&self, name: &'n str) -> &'n str {
        name
    }

    /// Describes a rule that should match one of `names`, and does not.
    fn unused(&self, _names: &mut dyn Iterator<Item = &str>) -> Option<String> {
        None
    }

    /// What to do about a tensor that cannot become a parameter.
    fn advice(&self) -> &'static str {
        "let a rule ignore it"
    }

    /// What to do if `name` is not the copy that it is said to be. `parameter` is what it would
    /// become in a model that has this parameter.
    fn remedy(&self, name: &str, parameter: Option<&str>) -> String {
        match parameter {
            Some(parameter) => format!(
                "the weights are not tied: use model.tied = false, where {} is {}",
                shown(&name),
                shown(&parameter)
            ),
            None => "correct the rule".to_owned(),
        }
    }
}

/// Rules that map a file's names to a model's.
#[derive(Debug, Clone)]
pub struct NameMap {
    /// The map's source, for errors. Empty for the identity.
    origin: String,
    /// Removed from the start of a name before the rules are applied.
    prefix: String,
    reinit: Vec<String>,
    rules: Vec<Rule>,
}

/// A rule. Patterns are split at each `*`, so every pattern has at least one piece.
#[derive(Debug, Clone)]
struct Rule {
    /// The rule's number and text, for errors.
    shown: String,
    from: Vec<String>,
    /// `None` if the tensor is ignored.
    to: Option<Vec<String>>,
    transpose: bool,
    copy_of: Option<Vec<String>>,
    optional: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(default)]
    prefix: String,
    #[serde(default)]
    reinit: Vec<String>,
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
    copy_of: Option<String>,
    #[serde(default)]
    optional: bool,
}

impl NameMap {
    /// Parses the map in `text`. `origin` names its source in errors.
    ///
    /// # Errors
    /// [`NamesError`]: the text is not TOML, is larger than 1 MiB or has an unknown key, or a rule
    /// has missing or conflicting keys.
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
            let text = format!("rule {} ({})", index + 1, shown(&text));
            let rule = Rule::new(table, &text);
            rules.push(rule.map_err(|reason| error(format!("{text}: {reason}")))?);
        }
        let (prefix, reinit) = (document.prefix, document.reinit);
        Ok(Self { origin: origin.to_owned(), prefix, reinit, rules })
    }

    /// The map that keeps every name.
    #[must_use]
    pub fn identity() -> Self {
        let any = pieces("*");
        let rule = Rule {
            shown: "every name is kept".into(),
            from: any.clone(),
            to: Some(any),
            transpose: false,
            copy_of: None,
            optional: true,
        };
        let (origin, prefix) = (String::new(), String::new());
        Self { origin, prefix, reinit: Vec::new(), rules: vec![rule] }
    }

    /// The map's source; empty for the identity.
    #[must_use]
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Patterns of parameters that keep the model's values; see
    /// [`Fit::without`](crate::fit::Fit::without).
    #[must_use]
    pub fn reinit(&self) -> &[String] {
        &self.reinit
    }

    fn first_match<'n>(&self, name: &'n str) -> Option<(usize, &Rule, Vec<&'n str>)> {
        let found = |(index, rule): (usize, &'_ Rule)| Some((index, captures(&rule.from, name)?));
        let (index, found) = self.rules.iter().enumerate().find_map(found)?;
        Some((index, &self.rules[index], found))
    }
}

impl Names for NameMap {
    fn map(&self, name: &str) -> Mapped {
        let name = self.bare(name);
        let Some((_, rule, found)) = self.first_match(name) else { return Mapped::Unmatched };
        let to = rule.to.as_ref().map(|to| fill(to, &found));
        match (&rule.copy_of, to) {
            (Some(of), to) => Mapped::Copy { to, of: fill(of, &found) },
            (None, Some(name)) => Mapped::To { name, transpose: rule.transpose },
            (None, None) => Mapped::Ignored,
        }
    }

    /// `name` without the prefix, as rules match it.
    fn bare<'n>(&self, name: &'n str) -> &'n str {
        name.strip_prefix(&self.prefix).unwrap_or(name)
    }

    /// Describes the first non-optional rule that is the first match of none of `names`. The
    /// pattern is misspelt, or the map is for another file. `None` if all rules are used.
    fn unused(&self, names: &mut dyn Iterator<Item = &str>) -> Option<String> {
        let mut used: Vec<bool> = self.rules.iter().map(|rule| rule.optional).collect();
        for name in names {
            if let Some((index, ..)) = self.first_match(self.bare(name)) {
                used[index] = true;
            }
        }
        let index = used.iter().position(|used| !used)?;
        Some(format!("{}: {}", self.origin, self.rules[index].shown))
    }
}

impl Rule {
    fn new(table: toml::Table, shown: &str) -> Result<Self, String> {
        check_keys(&table)?;
        let RawRule { from, to, transpose, ignore, copy_of, optional } =
            table.try_into().map_err(|error: toml::de::Error| error.message().to_owned())?;
        let from = pieces(&from);
        let (to, copy_of) = (to.as_deref().map(pieces), copy_of.as_deref().map(pieces));
        let refuse = |reason: &str| Err(reason.to_owned());
        if to.is_none() && !ignore && copy_of.is_none() {
            return refuse("give it `to = \"...\"`, `copy_of = \"...\"` or `ignore = true`");
        }
        if ignore && transpose {
            return refuse("what is ignored is not transposed");
        }
        if ignore && to.is_some() {
            return refuse("it has both `to` and `ignore`: keep one");
        }
        if ignore && copy_of.is_some() {
            return refuse("it has both `copy_of` and `ignore`: keep one");
        }
        if transpose && copy_of.is_some() {
            return refuse("a copy has the axes of what it is a copy of: leave `transpose` out");
        }
        for (key, pattern) in [("to", &to), ("copy_of", &copy_of)] {
            let count = pattern.as_ref().map_or(0, |pattern| pattern.len() - 1);
            if count > from.len() - 1 {
                let from = from.len() - 1;
                return Err(format!("`{key}` has {count} `*`, `from` only {from}"));
            }
        }
        let shown = shown.to_owned();
        Ok(Self { shown, from, to, transpose, copy_of, optional })
    }
}

/// Checks the keys of a rule, and the kinds of their values.
fn check_keys(table: &toml::Table) -> Result<(), String> {
    const TEXTS: [&str; 3] = ["from", "to", "copy_of"];
    const SWITCHES: [&str; 3] = ["transpose", "ignore", "optional"];
    for (key, value) in table {
        let needed = match (TEXTS.contains(&key.as_str()), SWITCHES.contains(&key.as_str())) {
            (true, _) if !value.is_str() => "text",
            (_, true) if !value.is_bool() => "true or false",
            (false, false) => {
                let known = [TEXTS, SWITCHES].concat().join(", ");
                return Err(format!("there is no key `{}`: use {known}", shown(key)));
            }
            _ => continue,
        };
        return Err(format!("{key} = {}: give {needed}", shown(value)));
    }
    match table.contains_key("from") {
        true => Ok(()),
        false => Err("give it `from = \"...\"`".into()),
    }
}

fn pieces(pattern: &str) -> Vec<String> {
    pattern.split('*').map(str::to_owned).collect()
}

/// The text that each `*` matches. This needs no backtracking: taking the first occurrence of a
/// piece leaves the most text for the pieces after it.
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
            ("from = \"x.*\"\nto = \"*\"\ncopy_of = \"*.*\"", "`copy_of` has 2 `*`, `from` only 1"),
            ("from = \"x.*\"\ncopy_of = \"y\"\nignore = true", "keep one"),
            ("from = \"x.*\"\ncopy_of = \"y\"\ntranspose = true", "leave `transpose` out"),
            (
                "from = \"x.*\"\nto = \"*\"\ntranpose = true",
                "there is no key `tranpose`: use from, ",
            ),
            ("from = \"x.*\"\nto = 3", "to = 3: give text"),
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
            ("[[names]]\nto = \"b\"", "give it `from = "),
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

    /// All possible matches of the `*` of `pattern`, by brute force.
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
            // `all_captures` orders by how little each `*` matches, the first `*` first.
            let expected = all_captures(&pattern, &name).into_iter().next();
            let pattern = pieces(&pattern);
            let found = captures(&pattern, &name);
            prop_assert_eq!(
                found,
                expected.as_ref().map(|all| all.iter().map(String::as_str).collect())
            );
        }
    }
}
