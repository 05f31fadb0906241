//! `cargo xtask licences`: checks the licence of every crate in this workspace, including crates
//! for tests and other systems, and how many of them occur in several versions.

use std::{collections::BTreeMap, path::Path, process::Command};

use serde_json::Value;

/// Licences that require only attribution.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "CC0-1.0",
    "MIT",
    "NCSA",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Maximum number of crates that may occur in several versions. The dependencies of others are not
/// ours to choose, but more of them need a look.
const SEVERAL_MAX: usize = 16;

/// The problems found.
pub fn check(root: &Path, cargo: &str) -> Result<Vec<String>, String> {
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--all-features", "--locked"])
        .current_dir(root)
        .output()
        .map_err(|error| format!("cannot run {cargo}: {error}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let metadata: Value =
        serde_json::from_slice(&output.stdout).map_err(|error| error.to_string())?;
    let packages = metadata["packages"].as_array().ok_or("cargo metadata has no packages")?;
    let mut problems = Vec::new();
    let mut versions: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for package in packages {
        let text = |key: &str| package[key].as_str().unwrap_or_default();
        versions.entry(text("name")).or_default().push(text("version"));
        if !is_allowed(text("license")) {
            let (name, version, licence) = (text("name"), text("version"), text("license"));
            problems.push(format!("{name} {version} is under '{licence}'"));
        }
    }
    versions.retain(|_, versions| versions.len() > 1);
    if versions.len() > SEVERAL_MAX {
        problems.push(format!("in several versions, at most {SEVERAL_MAX} are: {versions:?}"));
    }
    println!("== licences: {} crates, {} in several versions", packages.len(), versions.len());
    Ok(problems)
}

/// Whether an SPDX expression offers an allowed choice. Supports only the grammar that crates use:
/// parts joined by AND, each a choice.
fn is_allowed(expression: &str) -> bool {
    let expression = expression.replace(['(', ')'], "").replace('/', " OR ");
    !expression.is_empty()
        && expression.split(" AND ").all(|part| {
            part.split(" OR ").any(|licence| {
                let licence = licence.split(" WITH ").next().unwrap_or_default().trim();
                ALLOWED.contains(&licence)
            })
        })
}

#[cfg(test)]
mod tests {
    use super::is_allowed;

    #[test]
    fn oracle_expressions_of_licences() {
        for good in [
            "MIT",
            "MIT/Apache-2.0",
            "(MIT OR Apache-2.0) AND NCSA",
            "Apache-2.0 WITH LLVM-exception OR GPL-3.0",
        ] {
            assert!(is_allowed(good), "{good}");
        }
        for bad in ["", "GPL-3.0", "MIT AND GPL-3.0", "LGPL-2.1-or-later"] {
            assert!(!is_allowed(bad), "{bad}");
        }
    }
}
