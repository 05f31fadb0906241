//! Values that cannot be read: their keys, and what to write instead, in the words of a
//! configuration instead of serde's.

use std::path::Path;

use super::ConfigError;

/// Maximum length of a value that a message repeats.
const SHOWN_MAX: usize = 60;

/// The error for a value of `table` that cannot be read. It names the key and the value, or the
/// argument of `--set` that the value comes from.
pub(super) fn refused(
    error: &toml::de::Error,
    table: &toml::Table,
    origin: &Path,
    set: &[String],
) -> ConfigError {
    let text = error.to_string();
    let place = |line: &str| Some(line.strip_prefix("in `")?.strip_suffix('`')?.to_owned());
    // The innermost table is named first.
    let places: Vec<String> = text.lines().rev().filter_map(place).collect();
    let key = places.join(".");
    let said: Vec<&str> =
        text.lines().filter(|line| !line.is_empty() && place(line).is_none()).collect();
    let reason = plain(&said.join("\n"));
    let is_it = |text: &&String| {
        let rest = text.split_once('=').and_then(|(own, _)| key.strip_prefix(own.trim()));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    if let Some(text) = set.iter().rev().find(is_it) {
        return ConfigError::Typed { typed: format!("--set {text}"), reason };
    }
    let mut parts = key.split('.');
    let value = parts.next().and_then(|part| table.get(part));
    let value = value.and_then(|value| parts.try_fold(value, |value, part| value.get(part)));
    let shown = value.map(ToString::to_string).filter(|shown| shown.len() <= SHOWN_MAX);
    let shown = shown.map_or(String::new(), |shown| format!(" = {shown}"));
    ConfigError::Parse { path: origin.to_owned(), reason: format!("{key}{shown}: {reason}") }
}

/// Why a text is no TOML, in one line.
pub(super) fn unparsable(text: &str, error: &toml::de::Error) -> String {
    let before = error.span().and_then(|span| text.get(..span.start)).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().map_or(0, |last| last.chars().count()) + 1;
    let reason = error.message().replace('\n', ", ");
    format!(
        "line {line}, column {column}: {reason}: correct it, or give a configuration such as \
        configs/small.toml"
    )
}

/// A message of serde as a remedy. A message of our own stays as it is.
fn plain(said: &str) -> String {
    let quoted = |before: &str| said.strip_prefix(before)?.split('`').next();
    let expected = said.rsplit_once(", expected ").map(|(_, expected)| expected);
    if let Some(key) = quoted("missing field `") {
        return format!("{key} is missing: add it");
    }
    if let (Some(key), Some(known)) = (quoted("unknown field `"), expected) {
        let known = known.strip_prefix("one of ").unwrap_or(known).replace('`', "");
        return format!("there is no key '{key}': use {known}");
    }
    let needed = match expected.filter(|_| said.starts_with("invalid ")) {
        None if said.contains("untagged enum") => "text",
        None => return said.to_owned(),
        Some("usize" | "u64" | "u32" | "i64") => "a whole number, 0 or more",
        Some("f64" | "f32") => "a number",
        Some("a boolean") => "true or false",
        Some("a string" | "path string") => "text",
        Some("a sequence") => match said.strip_prefix("invalid type: string ") {
            Some(rest) => {
                let value = rest.rsplit_once(", expected ").map_or(rest, |(value, _)| value);
                return format!("give a list: [{value}]");
            }
            None => "a list",
        },
        Some("fewer elements in array") => "fewer values",
        Some(expected) => match expected.strip_prefix("an array of length ") {
            Some(count) => return format!("give a list of {count} values"),
            None => "a table of keys",
        },
    };
    format!("give {needed}")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::{args::ConfigArguments, config::Config};

    #[test]
    fn fault_values_that_cannot_be_read_name_their_key_and_what_to_write() {
        let refused = |text: &str, set: &[&str]| {
            let set = set.iter().map(ToString::to_string).collect();
            let arguments = ConfigArguments { set, ..ConfigArguments::default() };
            Config::from_text(text, Path::new("c.toml"), &arguments).unwrap_err().to_string()
        };
        for (text, expected) in [
            ("[model]\nblocks = \"x\"", "model.blocks = \"x\": give a whole number, 0 or more"),
            ("[data]\nsequence = -1", "data.sequence = -1: give a whole number, 0 or more"),
            ("[optimizer]\nlr = \"x\"", "optimizer.lr = \"x\": give a number"),
            ("[model]\ntied = 1", "model.tied = 1: give true or false"),
            ("[data]\ntext = \"x\"", "data.text = \"x\": give a list: [\"x\"]"),
            ("[images]\nscale = 1", "images.scale = 1: give a list of 2 values"),
            ("[pipeline]\nschedule = true", "pipeline.schedule = true: give text"),
            ("images = 1", "images = 1: give a table of keys"),
        ] {
            assert_eq!(refused(text, &[]), format!("c.toml: {expected}"));
        }
        let groups = refused("[[optimizer.groups]]\nlr_scale = 1", &[]);
        assert!(groups.starts_with("c.toml: optimizer.groups"), "{groups}");
        assert!(groups.ends_with(": names is missing: add it"), "{groups}");
        let groups = refused("[[optimizer.groups]]\nnames = []\nlr_scael = 1", &[]);
        assert!(groups.contains("there is no key 'lr_scael': use names, lr_scale"), "{groups}");
        assert_eq!(
            refused("[model]\nblocks = \"x\"", &["seed=1", "model.blocks=many"]),
            "--set model.blocks=many: give a whole number, 0 or more"
        );
        let name = refused("", &["optimizer.name=adagrad"]);
        assert!(name.starts_with("--set optimizer.name=adagrad: 'adagrad' "), "{name}");
        assert!(!name.contains("in `"), "{name}");
        assert_eq!(
            refused("[trian]\nsteps = 1", &[]),
            "c.toml: there is no table [trian]: did you mean [train]?"
        );
    }
}
