//! Reads the crates that a Cargo.lock names.

use std::collections::BTreeSet;
use std::path::Path;

use toml::{Table, Value};

use super::read;
use crate::{Error, Result};

/// Maximum size of a lock file. Those of the largest workspaces take about a megabyte.
const LOCK_BYTES_MAX: u64 = 64 << 20;

/// A crate at a version, as pinned by a lock file. Ordered by name, then version.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Package {
    pub(super) name: String,
    pub(super) version: String,
}

impl Package {
    /// The folder name that Cargo unpacks the crate into.
    pub(super) fn folder(&self) -> String {
        format!("{}-{}", self.name, self.version)
    }
}

/// The packages of the lock file at `path` that come from a registry.
pub(super) fn registry_packages(path: &Path) -> Result<BTreeSet<Package>> {
    let text = read::text_of_at_most(path, LOCK_BYTES_MAX)?;
    parse(&text).map_err(|reason| Error::LockFile { path: path.to_path_buf(), reason })
}

fn parse(text: &str) -> Result<BTreeSet<Package>, String> {
    let lock: Table = text.parse().map_err(|error: toml::de::Error| error.message().to_owned())?;
    let Some(packages) = lock.get("package").and_then(Value::as_array) else {
        return Err("it has no [[package]]".to_owned());
    };
    let mut found = BTreeSet::new();
    for package in packages {
        // Workspace members have no source. Crates from git or a path are not in the registry's
        // folder.
        let source = package.get("source").and_then(Value::as_str);
        if source.is_some_and(|source| source.starts_with("registry+")) {
            found.insert(Package {
                name: folder_part(package, "name")?,
                version: folder_part(package, "version")?,
            });
        }
    }
    Ok(found)
}

/// A package field that becomes part of a path. It must not be able to lead out of the registry's
/// folder.
fn folder_part(package: &Value, field: &str) -> Result<String, String> {
    let Some(value) = package.get(field).and_then(Value::as_str) else {
        return Err(format!("a [[package]] has no {field}"));
    };
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '+');
    if value.is_empty() || value.starts_with('.') || !value.chars().all(plain) {
        return Err(format!("{value:?} cannot be the {field} of a package"));
    }
    Ok(value.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_only_registry_packages_sorted() {
        let text = r#"
            version = 4
            [[package]]
            name = "b"
            version = "0.2.0"
            source = "registry+https://index.example"
            [[package]]
            name = "member"
            version = "0.1.0"
            [[package]]
            name = "forked"
            version = "0.1.0"
            source = "git+https://git.example/forked"
            [[package]]
            name = "a"
            version = "1.0.0+build"
            source = "registry+https://index.example"
        "#;
        let folders: Vec<_> = parse(text).unwrap().iter().map(Package::folder).collect();
        assert_eq!(folders, ["a-1.0.0+build", "b-0.2.0"]);
    }

    #[test]
    fn fault_malformed_locks_say_what_is_wrong() {
        let package =
            |name| format!("[[package]]\n{name}\nversion = \"1\"\nsource = \"registry+x\"");
        assert!(parse("version = ").is_err());
        assert_eq!(parse("version = 4").unwrap_err(), "it has no [[package]]");
        assert_eq!(parse(&package("")).unwrap_err(), "a [[package]] has no name");
        let escaping = parse(&package("name = \"../../etc\"")).unwrap_err();
        assert!(escaping.contains("../../etc"), "{escaping}");
    }
}
