//! Tests of folders with one subfolder per class.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use gpipe_data::Error;
use gpipe_data::images::{ImageFolder, ImageSet};
use tempfile::{TempDir, tempdir};

use super::{drawn, write_jpeg, write_png};

fn with_files(names: &[&str]) -> TempDir {
    let folder = tempdir().unwrap();
    for name in names {
        let path = folder.path().join(name);
        let image = drawn(2, 3, |_, _, _| name.len() as u8);
        match name.to_lowercase().ends_with("png") {
            true => write_png(&path, &image),
            false => write_jpeg(&path, &image, 95),
        }
    }
    folder
}

fn names(set: &ImageFolder, root: &Path) -> Vec<(String, String)> {
    let short = |name: String| Path::new(&name).strip_prefix(root).unwrap().display().to_string();
    let of = |index| (short(set.name(index)), set.classes()[set.class(index)].clone());
    (0..set.len()).map(of).collect()
}

#[test]
fn oracle_classes_and_files_are_sorted_and_the_rest_is_passed_over() {
    let folder = with_files(&[
        "dog/b.jpg",
        "dog/a.JPEG",
        "cat/deep/er/x.png",
        "cat/y.PNG",
        "cat/.hidden.png",
        ".cache/z.png",
        "dog/.git/z.png",
    ]);
    fs::write(folder.path().join("README.md"), "text").unwrap();
    fs::write(folder.path().join("dog/labels.csv"), "text").unwrap();
    let set = ImageFolder::open(folder.path()).unwrap();
    assert_eq!(set.classes(), ["cat", "dog"]);
    assert_eq!(set.left_out().count(), 5);
    let left_out = set.left_out().to_string();
    for part in ["3 hidden entries (", "1 file beside the classes (", "1 file that is no JPEG or"] {
        assert!(left_out.contains(part), "'{part}' is not in {left_out}");
    }
    let expected = [
        ("cat/deep/er/x.png", "cat"),
        ("cat/y.PNG", "cat"),
        ("dog/a.JPEG", "dog"),
        ("dog/b.jpg", "dog"),
    ];
    assert_eq!(names(&set, folder.path()), expected.map(|(a, b)| (a.to_owned(), b.to_owned())));
    let image = set.image(0).unwrap();
    assert_eq!((image.height, image.width, image.pixels[0]), (2, 3, 17));
    assert!(matches!(set.image(4), Err(Error::NoSuchImage { index: 4, images: 4 })));
    assert_eq!(set.class(4), 0);
}

#[cfg(unix)]
#[test]
fn property_links_are_followed_and_loops_end() {
    use std::os::unix::fs::symlink;
    let folder = with_files(&["cat/a.png", "elsewhere/b.png"]);
    let root = folder.path().join("set");
    fs::create_dir(&root).unwrap();
    symlink(folder.path().join("cat"), root.join("cat")).unwrap();
    symlink(&root, folder.path().join("cat/loop")).unwrap();
    symlink(folder.path().join("cat"), folder.path().join("cat/self")).unwrap();
    symlink(folder.path().join("elsewhere/b.png"), folder.path().join("cat/b.png")).unwrap();
    let set = ImageFolder::open(&root).unwrap();
    let found = names(&set, &root);
    assert_eq!(
        found.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(),
        ["cat/a.png", "cat/b.png"]
    );
}

#[test]
fn oracle_validation_counts_classes_as_training_does() {
    let train = with_files(&["ant/a.png", "bee/a.png", "cow/a.png"]);
    let classes = ImageFolder::open(train.path()).unwrap().classes().to_vec();
    let validation = with_files(&["cow/v.png"]);
    let set = ImageFolder::with_classes(validation.path(), &classes).unwrap();
    assert_eq!((set.len(), set.class(0), set.classes().len()), (1, 2, 3));

    let wrong = with_files(&["cows/v.png"]);
    let message = ImageFolder::with_classes(wrong.path(), &classes).unwrap_err().to_string();
    assert!(message.contains("`cows`") && message.contains("nearest are `cow`"), "{message}");
}

#[test]
fn property_a_split_parts_the_files_and_keeps_its_word() {
    let files: Vec<String> = (0..200).map(|file| format!("class{}/{file}.png", file % 4)).collect();
    let folder = with_files(&files.iter().map(String::as_str).collect::<Vec<_>>());
    let open = || ImageFolder::open(folder.path()).unwrap();
    let whole: BTreeSet<_> = names(&open(), folder.path()).into_iter().collect();
    let (train, validation) = open().split(0.2, 7).unwrap();
    let (a, b) = (names(&train, folder.path()), names(&validation, folder.path()));
    assert_eq!(a.len() + b.len(), 200);
    assert_eq!(a.iter().chain(&b).cloned().collect::<BTreeSet<_>>(), whole);
    assert!((20..=60).contains(&b.len()), "{}", b.len());
    assert_eq!(train.classes(), validation.classes());
    assert!(b.iter().all(|(name, class)| name.starts_with(class.as_str())));
    // The same seed gives the same split, and another seed gives another split.
    assert_eq!(names(&open().split(0.2, 7).unwrap().1, folder.path()), b);
    assert_ne!(names(&open().split(0.2, 8).unwrap().1, folder.path()), b);
    // Removing a file does not move others.
    fs::remove_file(folder.path().join(&a[0].0)).unwrap();
    assert_eq!(names(&open().split(0.2, 7).unwrap().1, folder.path()), b);
    for share in [0.0, 1.0, -1.0, f64::NAN] {
        let message = open().split(share, 7).unwrap_err().to_string();
        assert!(message.contains("between 0 and 1"), "{message}");
    }
}

#[test]
fn property_the_fingerprint_tells_names_and_sizes_and_not_places() {
    let of = |files: &[&str]| ImageFolder::open(with_files(files).path()).unwrap().fingerprint();
    let print = of(&["a/x.png", "b/y.png"]);
    assert_eq!(print, of(&["a/x.png", "b/y.png"]));
    assert_ne!(print, of(&["a/x.png", "b/z.png"]));
    assert_ne!(print, of(&["a/x.png", "c/y.png"]));
    let folder = with_files(&["a/x.png", "b/y.png"]);
    write_png(&folder.path().join("a/x.png"), &super::varied(30, 30));
    assert_ne!(print, ImageFolder::open(folder.path()).unwrap().fingerprint());
}

#[test]
fn fault_folders_that_are_no_sets() {
    let folder = with_files(&["loose.png"]);
    let message = |path: &Path| ImageFolder::open(path).unwrap_err().to_string();
    let none = message(folder.path());
    assert!(none.contains("no folders") && none.contains("1 images"), "{none}");
    assert!(message(&folder.path().join("loose.png")).contains("not a folder"));
    assert!(message(&folder.path().join("absent")).contains("does not exist"));

    let folder = with_files(&["full/a.png"]);
    fs::create_dir(folder.path().join("hollow")).unwrap();
    fs::write(folder.path().join("hollow/notes.txt"), "text").unwrap();
    let hollow = message(folder.path());
    assert!(hollow.contains("`hollow`") && !hollow.contains("`full`"), "{hollow}");
    let classes = ["full", "hollow"].map(str::to_owned);
    assert_eq!(ImageFolder::with_classes(folder.path(), &classes).unwrap().len(), 1);
    fs::remove_file(folder.path().join("full/a.png")).unwrap();
    let empty = ImageFolder::with_classes(folder.path(), &classes).unwrap_err().to_string();
    assert!(empty.contains("no JPEG or PNG"), "{empty}");

    let deep = format!("class/{}a.png", "d/".repeat(17));
    assert!(message(with_files(&[&deep]).path()).contains("folders deep"));
}

#[test]
fn fault_parts_of_a_data_set_are_no_classes() {
    let folder = tempdir().unwrap();
    for part in ["train", "val"] {
        let class = folder.path().join(part).join("cat");
        fs::create_dir_all(&class).unwrap();
        image::RgbImage::new(4, 4).save(class.join("1.png")).unwrap();
    }
    let error = ImageFolder::open(folder.path()).unwrap_err().to_string();
    assert!(error.contains("train") && error.contains("parts of a data set"), "{error}");
    assert!(ImageFolder::open(&folder.path().join("train")).is_ok());
}
