//! Tests of order, threads, restarts and unreadable images.

use std::sync::Arc;

use gpipe_data::Error;
use gpipe_data::images::{
    Crop, EvaluationImages, ImageBatch, ImageFolder, ImageSet, OnUnreadable, TrainImages, Transform,
};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use tempfile::tempdir;

use super::{Numbered, varied, write_jpeg, write_png};

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        rng_seed: RngSeed::Fixed(5),
        failure_persistence: None,
        ..ProptestConfig::with_cases(cases)
    }
}

/// A transform whose output values are the pixel values.
fn plain() -> Transform {
    Transform::plain(2, [0.0; 3], [1.0 / 255.0; 3])
}

fn train(set: Numbered, mini_batch: usize, seed: u64, threads: usize) -> TrainImages {
    TrainImages::new(Arc::new(set), plain(), mini_batch, seed, threads, OnUnreadable::Skip).unwrap()
}

/// The indices of a batch's images, read from their pixels. Checks that classes and pixels agree.
fn numbers(batch: &ImageBatch) -> Vec<usize> {
    assert_eq!(batch.classes.len(), batch.samples);
    assert_eq!(batch.pixels.len(), batch.samples * 3 * batch.size * batch.size);
    let of = batch.pixels.chunks(3 * batch.size * batch.size).zip(&batch.classes);
    of.map(|(pixels, class)| {
        let number = pixels[0].round() as usize;
        assert!(pixels.iter().all(|value| (value - pixels[0]).abs() < 1e-3));
        assert_eq!(number % 3, *class as usize);
        number
    })
    .collect()
}

fn all(batches: &TrainImages, steps: std::ops::Range<u64>) -> Vec<usize> {
    steps.flat_map(|step| numbers(&batches.batch(step).unwrap())).collect()
}

proptest! {
    #![proptest_config(config(40))]

    #[test]
    fn property_every_image_once_per_epoch(
        len in 1usize..60, mini_batch in 1usize..7, seed: u64, threads in 1usize..4,
    ) {
        let batches = train(Numbered::new(len, 2, &[]), mini_batch, seed, threads);
        prop_assert_eq!(batches.samples_per_epoch(), len as u64);
        let samples = all(&batches, 0..(2 * len).div_ceil(mini_batch) as u64);
        for epoch in samples.chunks(len).take(2) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            prop_assert!(sorted.into_iter().eq(0..len));
        }
    }

    #[test]
    fn property_a_run_that_goes_on_with_another_size_leaves_no_image_out(
        len in 1usize..50, first in 1usize..6, then in 1usize..6, steps in 0u64..9, seed: u64,
    ) {
        let small = train(Numbered::new(len, 2, &[]), first, seed, 1);
        let large = train(Numbered::new(len, 2, &[]), then, seed, 1)
            .starting_at(steps, small.samples_seen(steps));
        let mut samples = all(&small, 0..steps);
        samples.extend(all(&large, steps..steps + 9));
        let one = all(&train(Numbered::new(len, 2, &[]), 1, seed, 1), 0..samples.len() as u64);
        prop_assert_eq!(samples, one);
        prop_assert_eq!(large.epoch_of(steps), small.samples_seen(steps) / len as u64);
    }

    #[test]
    fn property_evaluation_has_every_image_once_in_order(
        len in 1usize..60, mini_batch in 1usize..7, cap in proptest::option::of(1usize..80),
        threads in 1usize..4,
    ) {
        let set = Arc::new(Numbered::new(len, 2, &[]));
        let stop = OnUnreadable::Stop;
        let images = EvaluationImages::new(set, plain(), mini_batch, cap, threads, stop).unwrap();
        let seen: Vec<usize> = images.iter().flat_map(|batch| numbers(&batch.unwrap())).collect();
        let expected = len.min(cap.unwrap_or(len));
        prop_assert_eq!(images.images(), expected);
        prop_assert!(seen.into_iter().eq((0..expected).map(|place| place * len / expected)));
        prop_assert!(images.batch(images.batches()).is_none());
        prop_assert!(images.batch(usize::MAX).is_none());
    }
}

#[test]
fn property_threads_and_the_order_of_calls_change_nothing() {
    let folder = tempdir().unwrap();
    for file in 0..12 {
        let image = varied(20 + file, 30);
        let path = folder.path().join(format!("class{}/{file}.img", file % 3));
        match file % 2 {
            0 => write_png(&path.with_extension("png"), &image),
            _ => write_jpeg(&path.with_extension("jpg"), &image, 90),
        }
    }
    let set: Arc<dyn ImageSet> = Arc::new(ImageFolder::open(folder.path()).unwrap());
    let crop = Crop::RandomResized { scale: (0.2, 1.0), ratio: (0.75, 1.33) };
    let transform =
        Transform { crop, flip: 0.5, cutout: 4, ..Transform::plain(16, [0.5; 3], [0.2; 3]) };
    let with = |threads| {
        let stop = OnUnreadable::Stop;
        TrainImages::new(set.clone(), transform.clone(), 5, 42, threads, stop).unwrap()
    };
    let (one, four, many) = (with(1), with(4), with(64));
    let forward: Vec<ImageBatch> = (0..8).map(|step| one.batch(step).unwrap()).collect();
    for step in (0..8).rev() {
        assert_eq!(four.batch(step).unwrap(), forward[step as usize]);
        assert_eq!(many.batch(step).unwrap(), forward[step as usize]);
    }
    let resumed = with(2).starting_at(6, one.samples_seen(6));
    assert_eq!(resumed.batch(7).unwrap(), forward[7]);
    // The same image is augmented differently in the next epoch.
    let pixels = |batches: &[ImageBatch]| -> std::collections::BTreeSet<Vec<u32>> {
        let images = batches.iter().flat_map(|batch| batch.pixels.chunks(3 * 256));
        images.map(|image| image.iter().map(|value| value.to_bits()).collect()).collect()
    };
    assert_eq!(pixels(&forward).len(), 40);
}

/// One of several processes that share a batch reads only the images that it feeds. Of the others
/// it finds only the classes.
#[test]
fn property_what_is_not_fed_is_not_read() {
    let of = |bad: &[usize], unreadable| {
        let set = Arc::new(Numbered::new(20, 2, bad));
        TrainImages::new(set, plain(), 8, 3, 2, unreadable).unwrap()
    };
    let whole = of(&[], OnUnreadable::Stop);
    for step in 0..5 {
        let all = whole.batch(step).unwrap();
        let values = all.pixels.len() / 8;
        for fed in [0..0, 0..3, 3..8, 5..usize::MAX, 0..usize::MAX] {
            let is_fed = |place: usize| fed.contains(&place);
            let numbers = numbers(&all);
            let others = numbers.iter().enumerate().filter(|(place, _)| !is_fed(*place));
            let mut others: Vec<usize> = others.map(|(_, number)| *number).collect();
            // A step may contain an image twice, at the end of an epoch.
            others.retain(|other| {
                !numbers.iter().enumerate().any(|(at, number)| is_fed(at) && number == other)
            });
            let images = of(&others, OnUnreadable::Stop);
            let own = images.batch_with(step, fed.clone()).unwrap();
            assert_eq!((&own.classes, own.samples), (&all.classes, 8));
            for (place, pixels) in own.pixels.chunks(values).enumerate() {
                match is_fed(place) {
                    true => assert_eq!(pixels, &all.pixels[place * values..][..values]),
                    false => assert!(pixels.iter().all(|pixel| *pixel == 0.0)),
                }
            }
            if !others.is_empty() {
                assert!(images.batch(step).is_err(), "they are not readable");
            }
            // With replacements all images are read, because the class is that of the replacement.
            let skipping = of(&others, OnUnreadable::Skip);
            assert_eq!(skipping.batch_with(step, fed).unwrap(), skipping.batch(step).unwrap());
        }
    }
}

#[test]
fn property_classes_are_found_without_reading_images() {
    let of = |unreadable: &[usize], on_unreadable| {
        let set = Arc::new(Numbered::new(10, 2, unreadable));
        EvaluationImages::new(set, plain(), 4, Some(7), 2, on_unreadable).unwrap()
    };
    let all: Vec<usize> = (0..10).collect();
    let (whole, nothing) = (of(&[], OnUnreadable::Stop), of(&all, OnUnreadable::Stop));
    for (own, batch) in nothing.clone().classes_only().iter().zip(whole.iter()) {
        let (own, batch) = (own.unwrap(), batch.unwrap());
        assert_eq!((own.classes, own.samples), (batch.classes, batch.samples));
        assert!(own.pixels.iter().all(|pixel| *pixel == 0.0));
    }
    assert!(nothing.batch(0).unwrap().is_err(), "they are not readable");
    // With `Skip` all images are read, because their number depends on which are readable.
    let skipping = of(&[0, 4, 9], OnUnreadable::Skip);
    let batches = |images: &EvaluationImages| images.iter().map(Result::unwrap).collect::<Vec<_>>();
    assert_eq!(batches(&skipping.clone().classes_only()), batches(&skipping));
}

#[test]
fn property_epochs_and_seeds_shuffle_differently() {
    let of = |seed| all(&train(Numbered::new(100, 2, &[]), 100, seed, 1), 0..2);
    let (a, b) = (of(1), of(2));
    assert_ne!(a[..100], a[100..]);
    assert_ne!(a, b);
    assert!(!a[..100].is_sorted());
}

#[test]
fn fault_unreadable_images_are_replaced_in_training() {
    // Image 6 replaces 4 and 5, and image 0 replaces 9, the last.
    let batches = train(Numbered::new(10, 2, &[4, 5, 9]), 5, 3, 2);
    let mut seen = all(&batches, 0..2);
    seen.sort_unstable();
    assert_eq!(seen, [0, 0, 1, 2, 3, 6, 6, 6, 7, 8]);
    all(&batches.clone(), 0..20);
    let unreadable = batches.unreadable();
    let names: Vec<&str> = unreadable.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["image 4", "image 5", "image 9"]);
    assert!(unreadable[0].1.contains("bad"));
}

#[test]
fn fault_unreadable_images_are_left_out_of_evaluation() {
    let set = Arc::new(Numbered::new(10, 2, &[0, 4, 8, 9]));
    let with = |on| EvaluationImages::new(set.clone(), plain(), 4, None, 3, on).unwrap();
    let images = with(OnUnreadable::Skip);
    let seen: Vec<Vec<usize>> = images.iter().map(|batch| numbers(&batch.unwrap())).collect();
    assert_eq!(seen, [vec![1, 2, 3], vec![5, 6, 7], vec![]]);
    assert_eq!(images.unreadable().len(), 4);
    let stopped: Vec<bool> = with(OnUnreadable::Stop).iter().map(|batch| batch.is_err()).collect();
    assert_eq!(stopped, [true, true, true]);
}

#[test]
fn fault_the_first_error_in_order_is_reported_whatever_the_threads() {
    let bad: Vec<usize> = (0..10).collect();
    for threads in [1, 2, 3, 10] {
        let set = Arc::new(Numbered::new(10, 2, &bad[3..]));
        let stop = OnUnreadable::Stop;
        let images = EvaluationImages::new(set, plain(), 10, None, threads, stop).unwrap();
        let error = images.batch(0).unwrap().unwrap_err().to_string();
        assert!(error.contains("image 3"), "{threads}: {error}");
    }
}

#[test]
fn fault_a_set_without_a_readable_image() {
    let bad: Vec<usize> = (0..150).collect();
    let batches = train(Numbered::new(150, 2, &bad), 1, 3, 1);
    let error = batches.batch(0).unwrap_err();
    assert!(matches!(error, Error::NothingReadable { tried: 100, .. }), "{error}");
    let few = train(Numbered::new(3, 2, &[0, 1, 2]), 1, 3, 1);
    assert!(matches!(few.batch(0), Err(Error::NothingReadable { tried: 3, .. })));
}

#[test]
fn fault_the_list_of_unreadable_images_is_bounded() {
    let bad: Vec<usize> = (0..1500).collect();
    let set = Arc::new(Numbered::new(1500, 2, &bad));
    let skip = OnUnreadable::Skip;
    let images = EvaluationImages::new(set, plain(), 500, None, 2, skip).unwrap();
    assert!(images.iter().all(|batch| batch.unwrap().samples == 0));
    assert_eq!(images.unreadable().len(), gpipe_data::images::UNREADABLE_MAX);
}

#[test]
fn fault_settings_out_of_range() {
    let new = |len, size, mini_batch, threads| {
        let transform = Transform::plain(size, [0.0; 3], [1.0; 3]);
        let set = Arc::new(Numbered::new(len, 2, &[]));
        TrainImages::new(set, transform, mini_batch, 1, threads, OnUnreadable::Stop).unwrap_err()
    };
    assert!(matches!(new(0, 2, 1, 1), Error::NoImages));
    assert!(matches!(new(3, 0, 1, 1), Error::Transform { field: "size", .. }));
    assert!(matches!(new(3, 2, 0, 1), Error::ImageBatchShape { mini_batch: 0, .. }));
    assert!(matches!(new(3, 2, usize::MAX, 1), Error::ImageBatchShape { .. }));
    assert!(matches!(new(3, 4096, 6, 1), Error::ImageBatchShape { .. }));
    assert!(matches!(new(3, 2, 1, 0), Error::ImageThreads { threads: 0 }));
    assert!(matches!(new(3, 2, 1, 65), Error::ImageThreads { threads: 65 }));
    let set = Arc::new(Numbered::new(3, 2, &[]));
    let stop = OnUnreadable::Stop;
    let none = EvaluationImages::new(set, plain(), 1, Some(0), 1, stop);
    assert!(matches!(none, Err(Error::NoImages)));
}

/// A set whose `image` panics.
#[derive(Debug)]
struct Panicking(Numbered);

impl ImageSet for Panicking {
    fn classes(&self) -> &[String] {
        self.0.classes()
    }
    fn len(&self) -> usize {
        self.0.len()
    }
    fn class(&self, index: usize) -> usize {
        self.0.class(index)
    }
    fn name(&self, index: usize) -> String {
        self.0.name(index)
    }
    fn image(&self, index: usize) -> gpipe_data::Result<gpipe_data::images::Image> {
        panic!("no image {index} today")
    }
    fn fingerprint(&self) -> u64 {
        0
    }
}

#[test]
fn fault_a_set_that_panics_is_an_error() {
    let set = Arc::new(Panicking(Numbered::new(3, 2, &[])));
    let batches = TrainImages::new(set, plain(), 2, 1, 2, OnUnreadable::Skip).unwrap();
    match batches.batch(0) {
        Err(Error::ImageThreadPanicked { reason }) => assert!(reason.contains("today")),
        other => panic!("{other:?}"),
    }
}

#[test]
fn oracle_a_part_of_a_set_is_spread_over_it() {
    // The set is sorted by class, so its beginning has only one class.
    let folder = tempdir().unwrap();
    for class in ["a", "b", "c", "d"] {
        std::fs::create_dir(folder.path().join(class)).unwrap();
        for number in 0..5 {
            let pixel = image::RgbImage::from_pixel(4, 4, image::Rgb([9, 9, 9]));
            pixel.save(folder.path().join(class).join(format!("{number}.png"))).unwrap();
        }
    }
    let set = Arc::new(ImageFolder::open(folder.path()).unwrap());
    let transform = Transform::plain(4, [0.0; 3], [1.0; 3]);
    for (most, expected) in
        [(4, vec![0, 1, 2, 3]), (2, vec![0, 2]), (40, (0..20).map(|i| i / 5).collect())]
    {
        let all = EvaluationImages::new(
            Arc::clone(&set) as Arc<dyn ImageSet>,
            transform.clone(),
            3,
            Some(most),
            1,
            OnUnreadable::Stop,
        );
        let all = all.unwrap();
        let classes: Vec<i64> = all.iter().flat_map(|batch| batch.unwrap().classes).collect();
        assert_eq!(classes, expected);
    }
}
