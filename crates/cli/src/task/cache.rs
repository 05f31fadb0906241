//! Where prepared data are kept for later runs.

use std::{
    io,
    path::{Path, PathBuf},
};

use gpipe_data::kept::Key;

use crate::{output::complain, values::CacheChoice};

/// Smaller data are prepared again, which takes less than a second.
pub(super) const BYTES_MIN: u64 = 1 << 20;

/// The folder, unless nothing is kept.
pub(super) fn folder(choice: &CacheChoice) -> Option<PathBuf> {
    match choice {
        CacheChoice::Off => None,
        CacheChoice::Folder(folder) => Some(folder.clone()),
        CacheChoice::Auto => users_folder(),
    }
}

/// `gpipe/tokens` in the user's cache folder. `None` if the environment names no cache folder.
fn users_folder() -> Option<PathBuf> {
    let named = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let named = named.filter(|folder| folder.is_absolute());
    let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache"));
    Some(named.or_else(home)?.join("gpipe").join("tokens"))
}

/// The key of everything that this version of gpipe prepares.
pub(super) fn key() -> Key {
    Key::default().with(env!("CARGO_PKG_VERSION").as_bytes())
}

/// Warns if data could not be kept at `path`. The run goes on without.
pub(super) fn tell(path: &Path, kept: io::Result<()>) {
    if let Err(error) = kept {
        complain!("gpipe: warning: cannot cache the tokens: {}: {error}", path.display());
    }
}
