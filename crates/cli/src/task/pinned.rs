//! Checks that the sources of a lock file's crates make the text that the manifest beside it pins.
//!
//! A lock file has checksums of its crates. But it does not guarantee that all of them are on disk,
//! and it does not say which files are text. The manifest's fingerprint covers all documents before
//! any limit, so `data.train_bytes` may be set.

use std::path::Path;

use gpipe_data::TextReport;

use crate::{CliError, files::read_bounded};

/// Maximum size of a manifest.
const MANIFEST_BYTES_MAX: u64 = 1 << 20;

/// Refuses a text that differs from the one pinned by the `Cargo.toml` beside `lock`, if it pins
/// one with `fingerprint` in `[package.metadata.gpipe]`.
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

/// The fingerprint that a manifest pins. `None` if there is no manifest or it pins nothing.
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
