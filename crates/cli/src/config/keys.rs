//! Keys of a configuration: the known keys, the nearest key to a misspelt one, and `--set`.

use serde::Deserialize;

use super::{
    Config, ConfigError, Data, Model,
    kind::{DATA, KIND, MODELS},
};

/// The similarity above which a name is suggested for a misspelt one.
const LIKENESS: f64 = 0.8;
const TABLES: &str =
    "the tables are model, data, images, pipeline, optimizer, train and checkpoint";

/// All keys that a file may contain, with their defaults, for the kinds of model and data in
/// `given`. Errors name `origin`.
pub(super) fn defaults(given: &toml::Table, origin: &str) -> Result<toml::Table, ConfigError> {
    let error = |reason: String| ConfigError::Parse { path: origin.into(), reason };
    let mut config = Config::default();
    let kind = |table: &str| {
        let table = given.get(table).and_then(toml::Value::as_table);
        let kind = table.and_then(|table| table.get(KIND))?;
        let only = [(KIND.to_owned(), kind.clone())];
        Some(toml::Table::from_iter(only))
    };
    if let Some(only) = kind("model") {
        config.model = Model::deserialize(only).map_err(|reason| error(shown("model", reason)))?;
    }
    if let Some(only) = kind("data") {
        config.data = Data::deserialize(only).map_err(|reason| error(shown("data", reason)))?;
    }
    toml::Table::try_from(config).map_err(|reason| error(reason.to_string()))
}

fn shown(table: &str, reason: toml::de::Error) -> String {
    format!("{table}.{KIND}: {}", reason.to_string().trim_end())
}

pub(super) fn check_keys(
    given: &toml::Table,
    known: &toml::Table,
    all: &toml::Table,
    prefix: &str,
    origin: &str,
) -> Result<(), ConfigError> {
    for (key, value) in given {
        let full = format!("{prefix}{key}");
        match known.get(key) {
            None if is_optional(&full, all) => {}
            None if value.is_table() => return Err(unknown_table(&full, all, origin)),
            None => return Err(unknown(&full, all, origin)),
            Some(toml::Value::Table(known)) => {
                if let toml::Value::Table(given) = value {
                    check_keys(given, known, all, &format!("{full}."), origin)?;
                }
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// Whether a key may be absent and has no default, so that it is not among `known`.
fn is_optional(key: &str, known: &toml::Table) -> bool {
    let kind = known.get("data").and_then(|data| data.get(KIND)).and_then(toml::Value::as_str);
    key == "data.validation" && kind == Some("image-folder")
}

/// The error for a key that does not exist. It names the nearest key that does.
fn unknown(key: &str, known: &toml::Table, origin: &str) -> ConfigError {
    let mut all = Vec::new();
    collect_keys(known, "", &mut all);
    if let Some(other) = of_another_kind(key, known) {
        return ConfigError::UnknownKey { origin: origin.into(), key: key.into(), nearest: other };
    }
    let nearest = all
        .into_iter()
        .map(|known| {
            (strsim::jaro_winkler(&known, key).max(last_part_likeness(&known, key)), known)
        })
        .filter(|(likeness, _)| *likeness > LIKENESS)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, known)| format!(": did you mean '{known}'?"));
    let nearest = nearest.unwrap_or_else(|| format!(": {TABLES}"));
    ConfigError::UnknownKey { origin: origin.to_owned(), key: key.to_owned(), nearest }
}

/// The error for a table that does not exist. It names the nearest table that does.
fn unknown_table(table: &str, known: &toml::Table, origin: &str) -> ConfigError {
    let mut all = Vec::new();
    collect_keys(known, "", &mut all);
    let nearest = all
        .iter()
        .filter_map(|key| key.rsplit_once('.'))
        .map(|(known, _)| (strsim::jaro_winkler(known, table), known))
        .filter(|(likeness, _)| *likeness > LIKENESS)
        .max_by(|(a, _), (b, _)| a.total_cmp(b));
    let remedy = match nearest {
        Some((_, nearest)) => format!("did you mean [{nearest}]?"),
        None => TABLES.to_owned(),
    };
    let reason = format!("there is no table [{table}]: {remedy}");
    ConfigError::Parse { path: origin.into(), reason }
}

/// The message for a key that exists only for other kinds.
fn of_another_kind(key: &str, known: &toml::Table) -> Option<String> {
    let (table, rest) = key.split_once('.')?;
    let own = known.get(table)?.get(KIND)?.as_str()?;
    let kinds: &[&str] = match table {
        "model" => &MODELS,
        "data" => &DATA,
        _ => return None,
    };
    let has = |kind: &&&str| {
        let only = toml::Table::from_iter([(KIND.to_owned(), toml::Value::from(**kind))]);
        let given = toml::Table::from_iter([(table.to_owned(), toml::Value::Table(only))]);
        let all = defaults(&given, table).ok();
        all.is_some_and(|all| all.get(table).is_some_and(|table| table.get(rest).is_some()))
    };
    let others: Vec<&str> = kinds.iter().filter(has).copied().collect();
    (!others.is_empty()).then(|| {
        let others = others.join(" and ");
        format!(
            " where {table}.{KIND} is {own}, but where it is {others}: leave it out, or \
            correct the kind"
        )
    })
}

/// Similarity of the last parts of two keys, because a known key may be given in the wrong table.
fn last_part_likeness(known: &str, key: &str) -> f64 {
    let last = |text: &str| text.rsplit('.').next().unwrap_or_default().to_owned();
    0.98 * strsim::jaro_winkler(&last(known), &last(key))
}

/// All keys of a table with their values. Nested tables are flattened: `model.blocks`.
pub(super) fn flatten(table: &toml::Table) -> Vec<(String, toml::Value)> {
    let mut names = Vec::new();
    collect_keys(table, "", &mut names);
    let value = |name: &String| {
        let mut parts = name.split('.');
        let first = table.get(parts.next()?)?;
        parts.try_fold(first, |value, part| value.get(part)).cloned()
    };
    names.into_iter().filter_map(|name| Some((name.clone(), value(&name)?))).collect()
}

fn collect_keys(table: &toml::Table, prefix: &str, all: &mut Vec<String>) {
    for (key, value) in table {
        match value {
            toml::Value::Table(inner) => collect_keys(inner, &format!("{prefix}{key}."), all),
            _ => all.push(format!("{prefix}{key}")),
        }
    }
}

/// Applies one `a.b=c`. `c` is TOML, or plain text if it does not parse as TOML.
pub(super) fn set(table: &mut toml::Table, text: &str) -> Result<(), ConfigError> {
    let error =
        |reason: &str| ConfigError::Typed { typed: format!("--set {text}"), reason: reason.into() };
    let (key, value) = text.split_once('=').ok_or_else(|| error("write it as KEY=VALUE"))?;
    let (key, value) = (key.trim(), value.trim());
    let all = defaults(table, "--set")?;
    let mut known = all.clone();
    let parts: Vec<&str> = key.split('.').collect();
    let (last, tables) = parts.split_last().ok_or_else(|| error("write it as KEY=VALUE"))?;
    let mut into = table;
    for part in tables {
        known = match known.remove(*part) {
            Some(toml::Value::Table(inner)) => inner,
            _ => return Err(unknown(key, &all, "--set")),
        };
        let entry = into.entry((*part).to_owned());
        into = match entry.or_insert_with(|| toml::Value::Table(toml::Table::new())) {
            toml::Value::Table(inner) => inner,
            _ => return Err(error("the file has a value where a table should be")),
        };
    }
    match known.get(*last) {
        None if is_optional(key, &all) => {}
        None => return Err(unknown(key, &all, "--set")),
        Some(toml::Value::Table(_)) => return Err(error("that is a table: set one of its keys")),
        Some(_) => {}
    }
    let parsed = format!("value = {value}").parse::<toml::Table>().ok();
    let value = parsed.and_then(|mut table| table.remove("value"));
    let value = value.unwrap_or_else(|| {
        toml::Value::String(text.split_once('=').map_or("", |x| x.1).trim().into())
    });
    into.insert((*last).to_owned(), value);
    Ok(())
}
