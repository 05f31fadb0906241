//! A text that is pinned by its content: the manifest beside a lock file may say which text the
//! lock file's crates make.
//!
//! A lock file has the checksums of its crates, but it does not say that all of them are on disk,
//! nor which of their files are text. The manifest's fingerprint is of all documents, before any
//! limit, so that `data.train_bytes` may be set.

use std::path::Path;

use gpipe_data::TextReport;

use crate::{CliError, files::read_bounded};

/// Largest manifest.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;

/// Refuses a text that is not the one which the `Cargo.toml` beside `lock` says, if it says any:
/// `fingerprint` in `[package.metadata.gpipe]`.
pub(super) fn check(lock: &Path, report: &TextReport) -> Result<(), CliError> {
    let manifest = lock.with_file_name("Cargo.toml");
    let Some(pinned) = fingerprint(&manifest)? else { return Ok(()) };
    let found = report.fingerprint.clone().unwrap_or_default();
    if found == pinned {
        return Ok(());
    }
    let manifest = manifest.display();
    Err(CliError::Usage(format!(
        "the crates in {} do not make the text that {manifest} pins: its fingerprint is {pinned}, \
        this one's {found} ({report}). Fetch them with `cargo fetch --locked --manifest-path \
        {manifest}`; if they are all there, one was changed on disk: remove its folder and fetch \
        again, or name your own text with --text PATH",
        lock.display()
    )))
}

/// What a manifest pins; nothing where there is no manifest, or it pins nothing.
fn fingerprint(manifest: &Path) -> Result<Option<String>, CliError> {
    if !manifest.is_file() {
        return Ok(None);
    }
    let text = read_bounded(manifest, MANIFEST_BYTES_MAX)?;
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| {
        CliError::Usage(format!("{}: {}", manifest.display(), error.message()))
    })?;
    let keys = ["package", "metadata", "gpipe", "fingerprint"];
    let (first, rest) = (table.get(keys[0]), &keys[1..]);
    let found = rest.iter().fold(first, |value, key| value?.get(key));
    Ok(found.and_then(toml::Value::as_str).map(str::to_owned))
}
