//! Finds import cycles: top-level modules of a crate that import each other, perhaps through
//! others.
//!
//! Without cycles, a crate can be read from the bottom up. Imports are taken from a file's text:
//! `crate::NAME`, where NAME is a module or an item that `lib.rs` re-exports from one. Tests are
//! excluded.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

/// The modules that each module imports.
type Imports = BTreeMap<String, BTreeSet<String>>;

/// Describes the import cycle in the crate at `folder`, if there is one. `files` are its sources.
pub fn check(name: &str, folder: &Path, files: &[(std::path::PathBuf, String)]) -> Option<String> {
    let library = fs::read_to_string(folder.join("lib.rs")).unwrap_or_default();
    let mut modules = BTreeSet::new();
    for (path, _) in files {
        modules.extend(module_of(folder, path));
    }
    let given_on = given_on(&library);
    let mut imports = Imports::new();
    for (path, text) in files {
        let Some(module) = module_of(folder, path) else { continue };
        let names = names(&code(text));
        let of = |name: String| {
            let found =
                if modules.contains(&name) { Some(name) } else { given_on.get(&name).cloned() };
            found.filter(|found| *found != module)
        };
        imports.entry(module.clone()).or_default().extend(names.into_iter().filter_map(of));
    }
    let circle = circle(&imports)?;
    Some(format!(
        "crates/{name}: modules import each other in a circle: {}; move what both need below both",
        circle.join(" -> ")
    ))
}

/// The top-level module that a file belongs to. `lib.rs` and `main.rs` belong to none.
fn module_of(folder: &Path, path: &Path) -> Option<String> {
    let first = path.strip_prefix(folder).ok()?.iter().next()?.to_str()?;
    let name = first.strip_suffix(".rs").unwrap_or(first);
    (!["lib", "main"].contains(&name)).then(|| name.to_owned())
}

/// The text of a file without comments and tests.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let lines = text.lines().map(|line| line.split_once("//").map_or(line, |(code, _)| code));
    lines.collect::<Vec<_>>().join("\n")
}

/// The names after each `crate::`, of which a list in braces has several.
fn names(code: &str) -> Vec<String> {
    let mut all = Vec::new();
    for (at, mark) in code.match_indices("crate::") {
        // Excludes `gpipe_crate::` and the macros of other crates.
        if code[..at].ends_with(|before: char| before.is_alphanumeric() || before == '_') {
            continue;
        }
        let rest = &code[at + mark.len()..];
        match rest.strip_prefix('{') {
            Some(list) => all.extend(parts(list).iter().map(|part| word(part.trim_start()))),
            None => all.push(word(rest)),
        }
    }
    all.retain(|name| !name.is_empty());
    all
}

/// The parts of a list up to its closing brace, split at the commas outside inner braces.
fn parts(list: &str) -> Vec<&str> {
    let (mut all, mut depth, mut start) = (Vec::new(), 0, 0);
    for (at, character) in list.char_indices() {
        match character {
            '{' => depth += 1,
            '}' if depth == 0 => {
                all.push(&list[start..at]);
                return all;
            }
            '}' => depth -= 1,
            ',' if depth == 0 => {
                all.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    all
}

fn word(text: &str) -> String {
    text.chars().take_while(|own| own.is_alphanumeric() || *own == '_').collect()
}

/// The module that `lib.rs` re-exports each name from. For `pub use layer::{Forward, Infer}`, both
/// names map to `layer`.
fn given_on(library: &str) -> BTreeMap<String, String> {
    let mut all = BTreeMap::new();
    for item in code(library).split(';') {
        let Some((_, path)) = item.split_once("pub use ") else { continue };
        let path = path.trim_start_matches("self::").trim_start_matches("crate::");
        let Some((module, rest)) = path.split_once("::") else { continue };
        let list = rest.strip_prefix('{').map_or(vec![rest], |list| parts(list));
        let last = |part: &str| word(part.trim().rsplit("::").next().unwrap_or_default());
        all.extend(list.into_iter().map(|part| (last(part), module.trim().to_owned())));
    }
    all
}

/// A shortest cycle, with its first module repeated at the end.
fn circle(imports: &Imports) -> Option<Vec<String>> {
    imports.keys().filter_map(|start| back_to(start, imports)).min_by_key(Vec::len)
}

/// The shortest path from a module back to itself.
fn back_to(start: &String, imports: &Imports) -> Option<Vec<String>> {
    let (mut ways, mut seen) = (vec![vec![start.clone()]], BTreeSet::new());
    while !ways.is_empty() {
        let mut longer = Vec::new();
        for way in ways {
            let here = way.last().and_then(|last| imports.get(last));
            for next in here.into_iter().flatten() {
                let mut way = way.clone();
                way.push(next.clone());
                if next == start {
                    return Some(way);
                }
                if seen.insert(next.clone()) {
                    longer.push(way);
                }
            }
        }
        ways = longer;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_imports_are_found() {
        let text = "use crate::{\n    error::{Error, Result},\n    layer::Layer, // \
            crate::not\n    value,\n};\nfn f() { crate::rng::seed(other_crate::x) \
            }\n#[cfg(test)]\nmod tests { use crate::testing; }";
        assert_eq!(names(&code(text)), ["error", "layer", "value", "rng"]);
    }

    #[test]
    fn oracle_what_a_library_gives_on_is_its_modules() {
        let found = given_on(
            "mod layer;\npub use layer::{Forward, parts::Infer};\npub use self::error::Error;",
        );
        let of = |name: &str| found.get(name).map(String::as_str);
        assert_eq!(of("Forward"), Some("layer"));
        assert_eq!(of("Infer"), Some("layer"));
        assert_eq!(of("Error"), Some("error"));
    }

    #[test]
    fn oracle_circles() {
        let imports = |pairs: &[(&str, &[&str])]| -> Imports {
            let own = |of: &[&str]| of.iter().map(|name| (*name).to_owned()).collect();
            pairs.iter().map(|(name, of)| ((*name).to_owned(), own(of))).collect()
        };
        assert_eq!(circle(&imports(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &[])])), None);
        let found =
            circle(&imports(&[("a", &["b"]), ("b", &["c"]), ("c", &["d", "b"]), ("d", &["a"])]));
        assert_eq!(found.unwrap(), ["b", "c", "b"]);
    }
}
