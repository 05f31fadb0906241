//! Keys of a configuration: which there are, which is nearest to a misspelt one, and `--set`.

use super::{Config, ConfigError};

/// All keys with their defaults: what a file may name.
pub(super) fn defaults() -> Result<toml::Table, ConfigError> {
    toml::Table::try_from(Config::default())
        .map_err(|error| ConfigError::Parse { path: "defaults".into(), reason: error.to_string() })
}

pub(super) fn check_keys(
    given: &toml::Table,
    known: &toml::Table,
    prefix: &str,
    origin: &str,
) -> Result<(), ConfigError> {
    for (key, value) in given {
        let full = format!("{prefix}{key}");
        match known.get(key) {
            None => return Err(unknown(&full, origin)),
            Some(toml::Value::Table(known)) => {
                if let toml::Value::Table(given) = value {
                    check_keys(given, known, &format!("{full}."), origin)?;
                }
            }
            Some(_) => {}
        }
    }
    Ok(())
}

/// The error for a key that does not exist, with the nearest one that does.
fn unknown(key: &str, origin: &str) -> ConfigError {
    let mut all = Vec::new();
    if let Ok(defaults) = defaults() {
        collect_keys(&defaults, "", &mut all);
    }
    let nearest = all
        .into_iter()
        .map(|known| {
            (strsim::jaro_winkler(&known, key).max(last_part_likeness(&known, key)), known)
        })
        .filter(|(likeness, _)| *likeness > 0.7)
        .max_by(|(a, _), (b, _)| a.total_cmp(b))
        .map(|(_, known)| format!(": did you mean '{known}'?"));
    let nearest = nearest.unwrap_or_else(|| {
        ": the tables are model, data, pipeline, optimizer, train and checkpoint".to_owned()
    });
    ConfigError::UnknownKey { origin: origin.to_owned(), key: key.to_owned(), nearest }
}

/// A key in the wrong table is likely meant, too.
fn last_part_likeness(known: &str, key: &str) -> f64 {
    let last = |text: &str| text.rsplit('.').next().unwrap_or_default().to_owned();
    0.98 * strsim::jaro_winkler(&last(known), &last(key))
}

/// All keys of a table with their values, tables within it flattened: `model.blocks`.
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

/// Applies one `a.b=c`; `c` is TOML, or text where that does not parse.
pub(super) fn set(table: &mut toml::Table, text: &str) -> Result<(), ConfigError> {
    let error = |reason: &str| ConfigError::Set { text: text.to_owned(), reason: reason.into() };
    let (key, value) = text.split_once('=').ok_or_else(|| error("write it as KEY=VALUE"))?;
    let (key, value) = (key.trim(), value.trim());
    let mut known = defaults()?;
    let parts: Vec<&str> = key.split('.').collect();
    let (last, tables) = parts.split_last().ok_or_else(|| error("write it as KEY=VALUE"))?;
    let mut into = table;
    for part in tables {
        known = match known.remove(*part) {
            Some(toml::Value::Table(inner)) => inner,
            _ => return Err(unknown(key, "--set")),
        };
        let entry = into.entry((*part).to_owned());
        into = match entry.or_insert_with(|| toml::Value::Table(toml::Table::new())) {
            toml::Value::Table(inner) => inner,
            _ => return Err(error("the file has a value where a table should be")),
        };
    }
    match known.get(*last) {
        None => return Err(unknown(key, "--set")),
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
