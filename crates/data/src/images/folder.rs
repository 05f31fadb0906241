//! Folders of images, one per class: `ROOT/CLASS/**/IMAGE`, as ImageNet is laid out.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{Image, ImageSet, decode};
use crate::hash::{self, StableHasher, mix};
use crate::{Error, Omissions, Result};

/// Maximum number of classes.
const CLASSES_MAX: usize = 1 << 16;

/// Maximum number of files and folders in one set, images or not. ImageNet-21k has 14 million.
const ENTRIES_MAX: usize = 1 << 24;

/// Maximum depth of a folder below its class.
const DEPTH_MAX: usize = 16;

/// Number of names that a message lists.
const NAMES_MAX: usize = 5;

/// Extensions of image files, in any case.
const EXTENSIONS: [&str; 3] = ["jpg", "jpeg", "png"];

/// Stream number that separates the split from other uses of the seed.
const SPLIT_STREAM: u64 = 0x7370_6c69_7400;

/// The JPEG and PNG files of a folder with one folder per class.
///
/// - Classes are the names of the folders in `root`, sorted. Images lie in them at any depth,
///   sorted by path.
/// - Hidden entries, files that do not end in `jpg`, `jpeg` or `png` (in any case) and files beside
///   the classes are left out. [`ImageFolder::left_out`] counts them.
/// - Symbolic links are followed. Within a class, a folder that is reached twice counts once, so
///   loops end.
#[derive(Debug, Clone)]
pub struct ImageFolder {
    root: PathBuf,
    classes: Vec<String>,
    files: Vec<ImageFile>,
    left_out: Omissions,
}

#[derive(Debug, Clone)]
struct ImageFile {
    /// Path from the root.
    relative: PathBuf,
    class: usize,
    bytes: u64,
}

/// Reasons for leaving out entries.
const HIDDEN: (&str, &str) = ("hidden entry", "hidden entries");
const BESIDE: (&str, &str) = ("file beside the classes", "files beside the classes");
const OTHER: (&str, &str) = ("file that is no JPEG or PNG", "files that are no JPEG or PNG");
const AGAIN: (&str, &str) = ("folder that was read before", "folders that were read before");

/// Names of folders that hold parts of a data set, not classes.
const PARTS: [&str; 6] = ["train", "training", "val", "valid", "validation", "test"];

impl ImageFolder {
    /// Opens all images under `root`.
    ///
    /// # Errors
    /// Fails if `root` is missing, is not a folder or has no folders, or if a class has no image.
    /// Fails if there are more than 65,536 classes or 16,777,216 entries, or if a folder cannot be
    /// listed.
    pub fn open(root: &Path) -> Result<Self> {
        let mut left_out = Omissions::default();
        let folders = class_folders(root, &mut left_out)?;
        let classes: Vec<String> = folders.keys().cloned().collect();
        if classes.iter().all(|class| PARTS.contains(&class.to_lowercase().as_str())) {
            return Err(malformed(
                root,
                format!(
                    "{} are no classes but parts of a data set; name one of them, and another to \
                    validate on",
                    list(&classes.iter().map(String::as_str).collect::<Vec<_>>())
                ),
            ));
        }
        let set = Self::read(root, classes, &folders, left_out)?;
        let mut counts = vec![0; set.classes.len()];
        for file in &set.files {
            if let Some(count) = counts.get_mut(file.class) {
                *count += 1;
            }
        }
        let empty: Vec<&str> = (set.classes.iter().zip(&counts))
            .filter(|(_, count)| **count == 0)
            .map(|(name, _)| name.as_str())
            .collect();
        if empty.is_empty() {
            return Ok(set);
        }
        Err(malformed(
            root,
            format!("no JPEG or PNG files in {}; add some or remove the folder", list(&empty)),
        ))
    }

    /// Opens the images under `root` with the classes of another set, in its order. Used for a
    /// validation folder. A class may be missing or have no images.
    ///
    /// # Errors
    /// Fails as [`ImageFolder::open`] does, except that a class may have no images. Also fails if a
    /// folder is not one of the classes, or if there is no image at all.
    pub fn with_classes(root: &Path, classes: &[String]) -> Result<Self> {
        let mut left_out = Omissions::default();
        let folders = class_folders(root, &mut left_out)?;
        if let Some(unknown) = folders.keys().find(|name| !classes.contains(name)) {
            return Err(malformed(
                root,
                format!(
                    "the folder `{unknown}` is none of the {} classes to train on; the nearest \
                    are {}; rename or \
                     remove it",
                    classes.len(),
                    list(&nearest(unknown, classes))
                ),
            ));
        }
        let set = Self::read(root, classes.to_vec(), &folders, left_out)?;
        if set.is_empty() {
            return Err(malformed(
                root,
                "there is no JPEG or PNG file in any class; add some".into(),
            ));
        }
        Ok(set)
    }

    fn read(
        root: &Path,
        classes: Vec<String>,
        folders: &BTreeMap<String, PathBuf>,
        left_out: Omissions,
    ) -> Result<Self> {
        let mut walk = Walk { root, files: Vec::new(), entries: 0, left_out };
        for (class, name) in classes.iter().enumerate() {
            if let Some(folder) = folders.get(name) {
                walk.class(class, folder)?;
            }
        }
        let Walk { files, left_out, .. } = walk;
        Ok(Self { root: root.to_path_buf(), files, classes, left_out })
    }

    /// Entries of the folder that are not images of the set. Both sides of a split report those of
    /// the whole folder.
    pub fn left_out(&self) -> &Omissions {
        &self.left_out
    }

    /// Total size of the image files, in bytes.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// Splits the set into (training, validation). A hash of `seed` and the path from the root
    /// chooses each image's side, so added images do not move others. Both sides keep all classes.
    ///
    /// # Errors
    /// Fails if `validation_share` is not between 0 and 1, or if one side has no image.
    pub fn split(self, validation_share: f64, seed: u64) -> Result<(Self, Self)> {
        let Self { root, classes, files, left_out } = self;
        let to_validation = |file: &ImageFile| {
            let bits = mix(hash::stable(&slashed(&file.relative)) ^ mix(seed ^ SPLIT_STREAM));
            super::unit(bits) < validation_share
        };
        let (validation, train): (Vec<_>, Vec<_>) = files.into_iter().partition(to_validation);
        if validation.is_empty() || train.is_empty() {
            let (train, validation) = (train.len(), validation.len());
            return Err(Error::ImageShare { share: validation_share, train, validation });
        }
        let side = |files| Self {
            root: root.clone(),
            classes: classes.clone(),
            files,
            left_out: left_out.clone(),
        };
        Ok((side(train), side(validation)))
    }

    fn file(&self, index: usize) -> Result<&ImageFile> {
        self.files.get(index).ok_or(Error::NoSuchImage { index, images: self.files.len() })
    }
}

impl ImageSet for ImageFolder {
    fn classes(&self) -> &[String] {
        &self.classes
    }

    fn len(&self) -> usize {
        self.files.len()
    }

    fn class(&self, index: usize) -> usize {
        self.file(index).map_or(0, |file| file.class)
    }

    fn name(&self, index: usize) -> String {
        match self.file(index) {
            Ok(file) => self.root.join(&file.relative).display().to_string(),
            Err(_) => format!("{} image {index}", self.root.display()),
        }
    }

    fn image(&self, index: usize) -> Result<Image> {
        decode(&self.root.join(&self.file(index)?.relative))
    }

    /// A hash of classes, paths from the root, and sizes. Contents are not read.
    fn fingerprint(&self) -> u64 {
        let mut hasher = StableHasher::new();
        hasher.field(&(self.classes.len() as u64).to_le_bytes());
        self.classes.iter().for_each(|class| hasher.field(class.as_bytes()));
        for file in &self.files {
            hasher.field(slashed(&file.relative).as_bytes());
            hasher.field(&file.bytes.to_le_bytes());
        }
        hasher.finish()
    }
}

/// The folders in `root`, by name.
fn class_folders(root: &Path, left_out: &mut Omissions) -> Result<BTreeMap<String, PathBuf>> {
    let metadata = fs::metadata(root).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => Error::MissingPath { path: root.to_path_buf() },
        _ => Error::io("read", root)(error),
    })?;
    if !metadata.is_dir() {
        return Err(malformed(root, "it is not a folder; name the folder that holds them".into()));
    }
    let mut folders = BTreeMap::new();
    let mut loose_images = 0;
    for entry in fs::read_dir(root).map_err(Error::io("list", root))? {
        let path = entry.map_err(Error::io("list", root))?.path();
        if is_hidden(&path) {
            left_out.add(HIDDEN, path.display().to_string());
            continue;
        }
        // Follows links, because collections are often put together from links to folders.
        if !fs::metadata(&path).map_err(Error::io("read", &path))?.is_dir() {
            loose_images += usize::from(is_named_as_image(&path));
            left_out.add(BESIDE, path.display().to_string());
            continue;
        }
        let Some(name) = path.file_name().and_then(|name| name.to_str()).map(str::to_owned) else {
            let reason = format!("the name of `{}` is not UTF-8; rename it", path.display());
            return Err(malformed(root, reason));
        };
        folders.insert(name, path);
        if folders.len() > CLASSES_MAX {
            let reason = format!("there are more than {CLASSES_MAX} folders; name another one");
            return Err(malformed(root, reason));
        }
    }
    match folders.is_empty() {
        false => Ok(folders),
        true => Err(malformed(
            root,
            format!(
                "it has no folders in it, and {loose_images} images beside; make a folder for \
                each class and put its \
                 images there"
            ),
        )),
    }
}

/// Collects the images of one class at a time.
struct Walk<'a> {
    root: &'a Path,
    files: Vec<ImageFile>,
    entries: usize,
    left_out: Omissions,
}

impl Walk<'_> {
    fn class(&mut self, class: usize, folder: &Path) -> Result<()> {
        let before = self.files.len();
        let mut seen = BTreeSet::new();
        let mut folders = vec![(folder.to_path_buf(), 0)];
        while let Some((folder, depth)) = folders.pop() {
            // A folder with two names would count its images twice, and a loop of links never ends.
            let real = fs::canonicalize(&folder).map_err(Error::io("read", &folder))?;
            if !seen.insert(real) {
                self.left_out.add(AGAIN, folder.display().to_string());
                continue;
            }
            for path in self.list(&folder)? {
                let metadata = fs::metadata(&path).map_err(Error::io("read", &path))?;
                if metadata.is_dir() && depth == DEPTH_MAX {
                    let reason = format!(
                        "`{}` is more than {DEPTH_MAX} folders deep; flatten it",
                        path.display()
                    );
                    return Err(malformed(self.root, reason));
                } else if metadata.is_dir() {
                    folders.push((path, depth + 1));
                } else if metadata.is_file() && is_named_as_image(&path) {
                    let relative = path.strip_prefix(self.root).unwrap_or(&path).to_path_buf();
                    self.files.push(ImageFile { relative, class, bytes: metadata.len() });
                } else {
                    self.left_out.add(OTHER, path.display().to_string());
                }
            }
        }
        if let Some(added) = self.files.get_mut(before..) {
            added.sort_by(|a, b| a.relative.cmp(&b.relative));
        }
        Ok(())
    }

    /// The relevant entries of a folder, in descending order of name. The caller pops the first
    /// name first, so a folder with two names is always known by the same one.
    fn list(&mut self, folder: &Path) -> Result<Vec<PathBuf>> {
        let mut paths = Vec::new();
        for entry in fs::read_dir(folder).map_err(Error::io("list", folder))? {
            let entry = entry.map_err(Error::io("list", folder))?;
            self.entries += 1;
            if self.entries > ENTRIES_MAX {
                let reason =
                    format!("it holds more than {ENTRIES_MAX} files and folders; split it");
                return Err(malformed(self.root, reason));
            }
            let path = entry.path();
            // Does not query the size of other files, because there may be as many annotations as
            // images.
            let is_plain = entry.file_type().is_ok_and(|kind| kind.is_file());
            if is_hidden(&path) {
                self.left_out.add(HIDDEN, path.display().to_string());
            } else if is_plain && !is_named_as_image(&path) {
                self.left_out.add(OTHER, path.display().to_string());
            } else {
                paths.push(path);
            }
        }
        paths.sort_by(|a, b| b.cmp(a));
        Ok(paths)
    }
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_none_or(|name| name.as_encoded_bytes().starts_with(b"."))
}

fn is_named_as_image(path: &Path) -> bool {
    path.extension()
        .is_some_and(|end| EXTENSIONS.iter().any(|known| end.eq_ignore_ascii_case(known)))
}

/// A path with `/` on every system.
fn slashed(path: &Path) -> String {
    let parts: Vec<_> = path.iter().map(|part| part.to_string_lossy()).collect();
    parts.join("/")
}

/// The classes most similar to a name.
fn nearest<'a>(name: &str, classes: &'a [String]) -> Vec<&'a str> {
    let mut scored: Vec<(f64, &str)> =
        classes.iter().map(|class| (strsim::jaro_winkler(class, name), class.as_str())).collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0));
    scored.into_iter().take(3).map(|(_, class)| class).collect()
}

fn list(names: &[&str]) -> String {
    let shown: Vec<String> = names.iter().take(NAMES_MAX).map(|name| format!("`{name}`")).collect();
    match names.len().saturating_sub(NAMES_MAX) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

fn malformed(path: &Path, reason: String) -> Error {
    Error::ImageFolder { path: path.to_path_buf(), reason }
}
