//! Tests of CIFAR's binary files.

use std::fs;
use std::path::Path;

use gpipe_data::images::{Cifar, CifarKind, CifarPart, ImageSet};
use tempfile::tempdir;

/// Writes a file of black images of class 0, with the given bytes at the given offsets.
fn write(path: &Path, size: usize, bytes: &[(usize, u8)]) {
    let mut content = vec![0; size];
    bytes.iter().for_each(|(at, byte)| content[*at] = *byte);
    fs::write(path, content).unwrap();
}

const FILE_10: usize = 10_000 * 3073;
const FILE_100: usize = 10_000 * 3074;

#[test]
fn oracle_cifar_10_by_hand() {
    let folder = tempdir().unwrap();
    // Record 1 has class 7. It sets red of the first pixel, green of the second and blue of the
    // last.
    let record = 3073;
    let bytes = [(record, 7), (record + 1, 11), (record + 1 + 1024 + 1, 22), (record + 3072, 33)];
    write(&folder.path().join("test_batch.bin"), FILE_10, &bytes);
    let open = || Cifar::open(folder.path(), CifarKind::Cifar10, CifarPart::Test);
    let set = open().unwrap();
    assert_eq!((set.len(), set.class(0), set.class(1)), (10_000, 0, 7));
    assert_eq!(set.classes()[7], "horse");
    let image = set.image(1).unwrap();
    assert_eq!((image.height, image.width, image.pixels.len()), (32, 32, 3072));
    let bright: Vec<(usize, u8)> =
        image.pixels.iter().copied().enumerate().filter(|(_, value)| *value > 0).collect();
    assert_eq!(bright, [(0, 11), (3 + 1, 22), (3071, 33)]);
    assert!(set.image(10_000).is_err());
    assert!(set.name(1).ends_with("test_batch.bin record 1"));
    let before = set.fingerprint();
    write(&folder.path().join("test_batch.bin"), FILE_10, &bytes[..3]);
    assert_ne!(open().unwrap().fingerprint(), before);

    let own: String = (0..10).map(|class| format!("own{class}\n")).collect();
    fs::write(folder.path().join("batches.meta.txt"), own + "\n").unwrap();
    assert_eq!(open().unwrap().classes()[9], "own9");
    fs::write(folder.path().join("batches.meta.txt"), "one\n").unwrap();
    assert!(open().unwrap_err().to_string().contains("1 names for 10 classes"));
}

#[test]
fn oracle_cifar_10_trains_on_five_files() {
    let folder = tempdir().unwrap();
    let unpacked = folder.path().join("cifar-10-batches-bin");
    fs::create_dir(&unpacked).unwrap();
    for file in 1..=5 {
        let last = FILE_10 - 3073;
        write(&unpacked.join(format!("data_batch_{file}.bin")), FILE_10, &[(last, file)]);
    }
    let set = Cifar::open(folder.path(), CifarKind::Cifar10, CifarPart::Train).unwrap();
    assert_eq!(set.len(), 50_000);
    let last_of_files: Vec<usize> = (1..=5).map(|file| set.class(file * 10_000 - 1)).collect();
    assert_eq!(last_of_files, [1, 2, 3, 4, 5]);
    assert!(format!("{set:?}").len() < 200);
}

#[test]
fn oracle_cifar_100_has_fine_labels() {
    let folder = tempdir().unwrap();
    let last = FILE_100 - 3074;
    write(&folder.path().join("test.bin"), FILE_100, &[(last, 19), (last + 1, 99), (last + 2, 5)]);
    let set = Cifar::open(folder.path(), CifarKind::Cifar100, CifarPart::Test).unwrap();
    assert_eq!((set.len(), set.class(9_999), set.classes().len()), (10_000, 99, 100));
    assert_eq!(set.image(9_999).unwrap().pixels[0], 5);
    assert_eq!(set.classes()[99], "99");
}

#[test]
fn fault_missing_short_and_wrong_files() {
    let folder = tempdir().unwrap();
    let open = |part| Cifar::open(folder.path(), CifarKind::Cifar10, part).unwrap_err().to_string();
    write(&folder.path().join("data_batch_2.bin"), 10, &[]);
    let missing = open(CifarPart::Train);
    assert!(missing.contains("data_batch_1.bin, data_batch_3.bin"), "{missing}");
    assert!(!missing.contains("data_batch_2.bin"), "{missing}");
    assert!(missing.contains(&folder.path().display().to_string()), "{missing}");
    assert!(missing.contains("https://"), "{missing}");
    for size in [0, FILE_10 - 1, FILE_10 + 1] {
        write(&folder.path().join("test_batch.bin"), size, &[]);
        let short = open(CifarPart::Test);
        assert!(short.contains(&format!("{size} bytes and not {FILE_10}")), "{short}");
    }
    write(&folder.path().join("test_batch.bin"), FILE_10, &[(3073, 10)]);
    assert!(open(CifarPart::Test).contains("record 1 has the label 10"));
}
