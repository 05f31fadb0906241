//! The reference pages that come from the code: configuration keys from their doc comments and
//! defaults, and the command line from its own help. So do the comments in the configuration of a
//! run. The tests compare the pages with the code;
//! `cargo xtask golden --bless` writes them.

use std::{collections::HashMap, fmt::Write, fs, path::Path};

use syn::{Attribute, Expr, ExprLit, Fields, Item, Lit, Meta, Type};

use crate::{
    args::{Arguments, GROUPS},
    config,
};

/// The sources in which keys are declared.
const SOURCES: [&str; 3] = [
    include_str!("config/tables.rs"),
    include_str!("config/model.rs"),
    include_str!("config/data.rs"),
];

/// A structure of the configuration: its doc comment, and its fields.
struct Table {
    doc: String,
    fields: Vec<Key>,
}

/// A field: its name, its doc comment and its type.
struct Key {
    name: String,
    doc: String,
    of: String,
}

/// Variants of a table whose keys depend on its `kind`: doc comment and structure, in order.
type Kinds = Vec<(String, String)>;

/// A doc comment as one paragraph.
fn doc(attributes: &[Attribute]) -> String {
    let line = |attribute: &Attribute| match &attribute.meta {
        Meta::NameValue(pair) if pair.path.is_ident("doc") => match &pair.value {
            Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) => Some(text.value().trim().to_owned()),
            _ => None,
        },
        _ => None,
    };
    attributes.iter().filter_map(line).collect::<Vec<_>>().join(" ").trim().to_owned()
}

/// The last part of a type's path, or that of its argument where it is a list.
fn type_name(of: &Type) -> String {
    let Type::Path(path) = of else { return String::new() };
    let Some(last) = path.path.segments.last() else { return String::new() };
    match &last.arguments {
        syn::PathArguments::AngleBracketed(inner) if last.ident == "Vec" => {
            let inner = inner.args.first();
            inner.map_or_else(String::new, |inner| match inner {
                syn::GenericArgument::Type(inner) => type_name(inner),
                _ => String::new(),
            })
        }
        _ => last.ident.to_string(),
    }
}

fn declared() -> (HashMap<String, Table>, HashMap<String, Kinds>) {
    let (mut tables, mut kinds) = (HashMap::new(), HashMap::new());
    for source in SOURCES {
        for item in syn::parse_file(source).unwrap().items {
            match item {
                Item::Struct(own) => {
                    let Fields::Named(fields) = own.fields else { continue };
                    let key = |field: syn::Field| Key {
                        name: field.ident.map_or_else(String::new, |name| name.to_string()),
                        doc: doc(&field.attrs),
                        of: type_name(&field.ty),
                    };
                    // What serde skips cannot be configured.
                    let is_skipped = |own: &Attribute| match &own.meta {
                        Meta::List(list) => {
                            list.path.is_ident("serde") && list.tokens.to_string() == "skip"
                        }
                        _ => false,
                    };
                    let is_key = |field: &syn::Field| !field.attrs.iter().any(is_skipped);
                    let fields = fields.named.into_iter().filter(is_key).map(key).collect();
                    tables.insert(own.ident.to_string(), Table { doc: doc(&own.attrs), fields });
                }
                Item::Enum(own) => {
                    let variant = |variant: syn::Variant| {
                        let of = variant.fields.iter().next().map(|field| type_name(&field.ty));
                        Some((doc(&variant.attrs), of?))
                    };
                    let all = own.variants.into_iter().filter_map(variant).collect();
                    kinds.insert(own.ident.to_string(), all);
                }
                _ => {}
            }
        }
    }
    (tables, kinds)
}

/// The default of a key, as a user would write it.
fn default_of(table: &toml::Table, path: &[&str]) -> String {
    let (last, parents) = path.split_last().unwrap();
    let found = parents
        .iter()
        .try_fold(table, |table, part| table.get(*part).and_then(toml::Value::as_table))
        .and_then(|table| table.get(*last));
    match found {
        None => String::new(),
        Some(toml::Value::String(text)) if text.is_empty() => "none".into(),
        Some(toml::Value::Array(list)) if list.is_empty() => "none".into(),
        Some(value) => format!("`{value}`"),
    }
}

struct Page {
    text: String,
    tables: HashMap<String, Table>,
    kinds: HashMap<String, Kinds>,
}

impl Page {
    /// A section for the structure `of`, whose keys begin with `prefix`. Sections of its tables
    /// follow. `heading` names the section.
    fn section(&mut self, heading: &str, of: &str, prefix: &[&str], defaults: &toml::Table) {
        let table = self.tables.remove(of).unwrap_or_else(|| panic!("{of} is not declared"));
        writeln!(self.text, "\n## {heading}\n\n{}\n", table.doc).unwrap();
        self.rows(&table, prefix, defaults);
        for key in &table.fields {
            let path = [prefix, &[key.name.as_str()]].concat();
            if self.tables.contains_key(&key.of) {
                let name = path.join(".");
                let is_list = default_of(defaults, &path) == "none";
                let heading = if is_list { format!("`[[{name}]]`") } else { format!("`[{name}]`") };
                self.section(&heading, &key.of, &path, defaults);
            } else if let Some(kinds) = self.kinds.remove(&key.of) {
                let names: &[&str] = match key.name.as_str() {
                    "model" => &config::MODELS,
                    _ => &config::DATA,
                };
                assert_eq!(names.len(), kinds.len(), "every kind has a name");
                self.by_kind(&key.name, names, &kinds);
            }
        }
        self.tables.insert(of.to_owned(), table);
    }

    fn by_kind(&mut self, table: &str, names: &[&str], kinds: &Kinds) {
        for (name, (doc, of)) in names.iter().zip(kinds) {
            let text = format!("[{table}]\nkind = \"{name}\"\n");
            let defaults = config::defaults_of(&text);
            let own = self.tables.remove(of).unwrap();
            writeln!(self.text, "\n## `[{table}]` with `kind = \"{name}\"`\n\n{doc}\n").unwrap();
            self.rows(&own, &[table], &defaults);
            self.tables.insert(of.clone(), own);
        }
    }

    fn rows(&mut self, table: &Table, prefix: &[&str], defaults: &toml::Table) {
        writeln!(self.text, "| key | default | meaning |\n|---|---|---|").unwrap();
        for key in &table.fields {
            let path = [prefix, &[key.name.as_str()]].concat();
            assert!(!key.doc.is_empty(), "{} has no doc comment", path.join("."));
            let is_table = self.tables.contains_key(&key.of) || self.kinds.contains_key(&key.of);
            let default = if is_table { String::new() } else { default_of(defaults, &path) };
            let meaning = key.doc.replace('|', "\\|");
            writeln!(self.text, "| `{}` | {default} | {meaning} |", path.join(".")).unwrap();
        }
    }
}

fn configuration() -> String {
    let (tables, kinds) = declared();
    let text = "\
# Configuration

<!-- Generated from the doc comments of crates/cli/src/config: `cargo xtask golden --bless`. -->

One TOML file describes a run, such as [`configs/small.toml`](../../configs/small.toml). Every key
has a default, so a file names only what differs. `--set KEY=VALUE` changes any key, and some keys
have a flag of their own ([command line](command-line.md)). The run's folder keeps the complete
configuration as `config.toml`. A key that does not exist is an error that names the nearest one.
";
    let mut page = Page { text: text.to_owned(), tables, kinds };
    page.section("All tables", "Config", &[], &config::defaults_of(""));
    page.text
}

fn command_line() -> String {
    let mut text = "\
# Command line

<!-- Generated from crates/cli/src/args: `cargo xtask golden --bless`. -->

What `gpipe --help` and `gpipe COMMAND --help` print.
"
    .to_owned();
    let mut command = Arguments::grouped().term_width(90);
    command.build();
    let names: Vec<String> =
        command.get_subcommands().map(|own| own.get_name().to_owned()).collect();
    writeln!(text, "\n```text\n{}\n```", command.render_long_help().to_string().trim()).unwrap();
    for name in names.iter().filter(|name| *name != "help") {
        let own = command.find_subcommand_mut(name).unwrap();
        let help = own.render_long_help().to_string();
        let lines: Vec<&str> = help.trim().lines().map(str::trim_end).collect();
        writeln!(text, "\n## gpipe {name}\n\n```text\n{}\n```", lines.join("\n")).unwrap();
    }
    text
}

/// Each key with the first sentence of its documentation, for the comments of a run's
/// configuration. A key of `[model]` or `[data]` follows its kind: `model.llama.blocks`.
fn meanings() -> String {
    let (tables, kinds) = declared();
    let mut text = String::new();
    meanings_of("Config", "", (&tables, &kinds), &mut text);
    text
}

fn meanings_of(
    of: &str,
    prefix: &str,
    (tables, kinds): (&HashMap<String, Table>, &HashMap<String, Kinds>),
    text: &mut String,
) {
    for key in &tables[of].fields {
        let path = format!("{prefix}{}", key.name);
        if let Some(kinds_of) = kinds.get(&key.of) {
            let names: &[&str] = if key.name == "model" { &config::MODELS } else { &config::DATA };
            for (name, (_, own)) in names.iter().zip(kinds_of) {
                meanings_of(own, &format!("{path}.{name}."), (tables, kinds), text);
            }
        } else if tables.contains_key(&key.of) {
            meanings_of(&key.of, &format!("{path}."), (tables, kinds), text);
        } else {
            let first = key.doc.split_once(". ").map_or(&*key.doc, |(first, _)| first);
            writeln!(text, "{path}\t{}.", first.trim_end_matches('.')).unwrap();
        }
    }
}

/// Compares a file with the code, or writes it where `GPIPE_BLESS` is set. `path` begins at the
/// crate.
fn is_current(path: &str, text: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if std::env::var_os("GPIPE_BLESS").is_some() {
        fs::write(&file, text).unwrap();
    }
    let found = fs::read_to_string(&file).unwrap_or_default();
    assert!(found == text, "{path} is not current: cargo xtask golden --bless");
}

#[test]
fn golden_the_comments_of_configurations_are_what_the_code_says() {
    is_current("src/config/meanings.tsv", &meanings());
}

#[test]
fn oracle_every_command_is_in_one_group_and_has_an_example() {
    let mut grouped: Vec<&str> =
        GROUPS.iter().flat_map(|(_, names)| names.iter().copied()).collect();
    grouped.sort_unstable();
    let command = Arguments::grouped();
    let mut all: Vec<&str> = command.get_subcommands().map(clap::Command::get_name).collect();
    all.sort_unstable();
    assert_eq!(grouped, all);
    for own in command.get_subcommands() {
        let example = own.get_after_help().map(ToString::to_string).unwrap_or_default();
        let line = example
            .strip_prefix("Example: ")
            .unwrap_or_else(|| panic!("{}: no example", own.get_name()));
        // It is read, too, up to what a shell does.
        let words = line.split(" < ").next().unwrap().split(" > ").next().unwrap();
        let words: Vec<String> = shell_words(words);
        let read = Arguments::grouped().try_get_matches_from(&words);
        assert!(read.is_ok(), "{line}: {:?}", read.err().map(|error| error.to_string()));
        assert!(line.starts_with(&format!("gpipe {}", own.get_name())), "{line}");
    }
}

/// The words of a line, some of them in single quotes.
fn shell_words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (place, part) in line.split('\'').enumerate() {
        match place % 2 {
            0 => words.extend(part.split_whitespace().map(str::to_owned)),
            _ => words.push(part.to_owned()),
        }
    }
    words
}

#[test]
fn golden_the_reference_of_the_configuration_is_what_the_code_says() {
    is_current("../../docs/reference/configuration.md", &configuration());
}

#[test]
fn golden_the_reference_of_the_command_line_is_what_the_code_says() {
    is_current("../../docs/reference/command-line.md", &command_line());
}
