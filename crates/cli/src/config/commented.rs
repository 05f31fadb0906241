//! The configuration as a file for people: with comments, and without tables that play no part.

use std::{collections::HashMap, fmt::Write};

use toml::{Table, Value};

use super::{Config, ConfigError, Data, OptimizerName, kind::KIND};

/// The first sentence of each key's documentation, generated from it: `cargo xtask golden --bless`.
const MEANINGS: &str = include_str!("meanings.tsv");

/// The first line of the file, by which a run's is told from a user's.
pub(crate) const COMPLETE: &str = "# The complete configuration of this run, which repeats it.";

/// Maximum length of a line of comments.
const COLUMNS: usize = 80;

impl Config {
    /// The configuration as TOML, with every key that plays a part and its meaning. Tables of other
    /// optimizers, of adapters and of images are left out where they are not used, unless they were
    /// changed.
    pub(crate) fn to_commented(&self) -> Result<String, ConfigError> {
        let table = |config: &Config| {
            Table::try_from(config).map_err(|error| ConfigError::Parse {
                path: "config.toml".into(),
                reason: error.to_string(),
            })
        };
        let (mut own, defaults) = (table(self)?, table(&Config::default())?);
        for path in self.unused() {
            remove_default(&mut own, &defaults, path);
        }
        let meanings = MEANINGS.lines().filter_map(|line| line.split_once('\t')).collect();
        let mut text = format!("{COMPLETE}\n");
        write_table(&mut text, &own, "", &meanings);
        Ok(text)
    }

    /// The tables that play no part.
    fn unused(&self) -> Vec<&'static [&'static str]> {
        let name = self.optimizer.name;
        let is_adam = matches!(name, OptimizerName::Adam | OptimizerName::AdamW);
        let is_text = matches!(self.data, Data::Text(_) | Data::Jsonl(_) | Data::Parallel(_));
        let all: [(bool, &[&str]); 6] = [
            (is_text, &["images"]),
            (self.lora.rank == 0, &["lora"]),
            (!is_adam, &["optimizer", "adam"]),
            (name != OptimizerName::Sgd, &["optimizer", "sgd"]),
            (name != OptimizerName::RmsProp, &["optimizer", "rmsprop"]),
            (name != OptimizerName::Adafactor, &["optimizer", "adafactor"]),
        ];
        all.into_iter().filter(|(is_unused, _)| *is_unused).map(|(_, path)| path).collect()
    }
}

/// Removes the table at `path` if it has its defaults.
fn remove_default(own: &mut Table, defaults: &Table, path: &[&str]) {
    match path {
        [] => {}
        [last] if own.get(*last) == defaults.get(*last) => drop(own.remove(*last)),
        [_] => {}
        [first, rest @ ..] => {
            let both = (own.get_mut(*first), defaults.get(*first));
            if let (Some(Value::Table(own)), Some(Value::Table(defaults))) = both {
                remove_default(own, defaults, rest);
            }
        }
    }
}

/// Whether a value is a list of tables, which has a heading for each.
fn tables(value: &Value) -> Option<Vec<&Table>> {
    let list = value.as_array().filter(|list| !list.is_empty())?;
    list.iter().map(Value::as_table).collect()
}

/// Writes the keys of `table`, whose path is `path`, and then its tables.
fn write_table(text: &mut String, table: &Table, path: &str, meanings: &HashMap<&str, &str>) {
    let documented = documented(table, path);
    let is_plain = |value: &Value| !value.is_table() && tables(value).is_none();
    for (key, value) in table.iter().filter(|(_, value)| is_plain(value)) {
        if let Some(meaning) = meanings.get(&*format!("{documented}{key}")) {
            comment(text, meaning);
        }
        // Writing to a String does not fail.
        let _ = writeln!(text, "{key} = {value}");
    }
    for (key, value) in table {
        let full = format!("{path}{key}");
        if let Value::Table(own) = value {
            let _ = writeln!(text, "\n[{full}]");
            write_table(text, own, &format!("{full}."), meanings);
        }
        for own in tables(value).into_iter().flatten() {
            let _ = writeln!(text, "\n[[{full}]]");
            write_table(text, own, &format!("{full}."), meanings);
        }
    }
}

/// The prefix under which the keys of a table are documented. Those of `[model]` and `[data]`
/// depend on the kind.
fn documented(table: &Table, path: &str) -> String {
    match table.get(KIND).and_then(Value::as_str) {
        Some(kind) => format!("{path}{kind}."),
        None => path.to_owned(),
    }
}

/// Writes a comment in lines of at most [`COLUMNS`] columns.
fn comment(text: &mut String, meaning: &str) {
    let mut line = "#".to_owned();
    for word in meaning.split(' ') {
        if line.len() > 1 && line.len() + 1 + word.len() > COLUMNS {
            *text += &line;
            *text += "\n";
            line = "#".to_owned();
        }
        line += " ";
        line += word;
    }
    *text += &line;
    *text += "\n";
}
