//! Mini-batches of images.

pub use crate::bounds::{IMAGE_BATCH_VALUES_MAX, IMAGE_THREADS_MAX};
use std::ops::Range;
use std::sync::Arc;
use std::thread;

use super::unreadable::Unreadable;
use super::{Image, ImageSet, OnUnreadable, Transform};
use crate::hash::mix;
use crate::order::{Order, Sample};
use crate::{Error, Result};

/// Stream number that separates augmentation from the order of samples.
const AUGMENTATION_STREAM: u64 = 3;

/// A mini-batch of images as normalised values, with their classes.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageBatch {
    /// Normalised pixels. Shape: `[samples, 3, size, size]`.
    pub pixels: Vec<f32>,
    /// Class indices. Shape: `[samples]`.
    pub classes: Vec<i64>,
    /// Number of images.
    pub samples: usize,
    /// Rows and columns of each image.
    pub size: usize,
}

/// The images and settings that training and evaluation share.
#[derive(Debug, Clone)]
struct Source {
    set: Arc<dyn ImageSet>,
    transform: Transform,
    threads: usize,
    on_unreadable: OnUnreadable,
    unreadable: Unreadable,
}

impl Source {
    fn new(
        set: Arc<dyn ImageSet>,
        transform: Transform,
        mini_batch: usize,
        threads: usize,
        on_unreadable: OnUnreadable,
    ) -> Result<Self> {
        transform.check()?;
        match mini_batch.checked_mul(transform.values()) {
            Some(1..=IMAGE_BATCH_VALUES_MAX) => {}
            _ => return Err(Error::ImageBatchShape { mini_batch, size: transform.size }),
        }
        if !(1..=IMAGE_THREADS_MAX).contains(&threads) {
            return Err(Error::ImageThreads { threads });
        }
        if set.is_empty() {
            return Err(Error::NoImages);
        }
        Ok(Self { set, transform, threads, on_unreadable, unreadable: Unreadable::default() })
    }

    /// Builds a batch from what `read` finds for each element of `wanted`: an image with its index
    /// and, in training, its key.
    ///
    /// Each thread takes a contiguous chunk, and the error reported is the first in sample order.
    /// Neither pixels nor errors depend on the number of threads.
    fn batch<W: Sync>(
        &self,
        wanted: &[W],
        read: impl Fn(&W) -> Result<Option<Found>> + Sync,
    ) -> Result<ImageBatch> {
        let values = self.transform.values();
        let mut pixels = vec![0f32; wanted.len() * values];
        let run = wanted.len().div_ceil(self.threads).max(1);
        let jobs = wanted.chunks(run).zip(pixels.chunks_mut(run * values));
        let fill = |wanted: &[W], pixels: &mut [f32]| {
            wanted
                .iter()
                .zip(pixels.chunks_exact_mut(values))
                .map(|(wanted, out)| {
                    let Some(found) = read(wanted)? else { return Ok(None) };
                    if let Some(image) = &found.image {
                        self.transform.apply(image, found.key, out)?;
                    }
                    Ok(Some(self.set.class(found.index) as i64))
                })
                .collect::<Result<Vec<Option<i64>>>>()
        };
        let fill = &fill;
        let runs: Vec<Result<Vec<Option<i64>>>> = thread::scope(|scope| {
            let threads: Vec<_> = jobs
                .map(|(wanted, pixels)| {
                    thread::Builder::new()
                        .name("gpipe-images".to_owned())
                        .spawn_scoped(scope, move || fill(wanted, pixels))
                        .map_err(|source| Error::ImageThread { source })
                })
                .collect();
            threads.into_iter().map(|thread| thread?.join().unwrap_or_else(panicked)).collect()
        });
        let classes = runs.into_iter().collect::<Result<Vec<_>>>()?.concat();
        Ok(without_gaps(pixels, &classes, self.transform.size, values))
    }
}

/// An image found for a sample.
struct Found {
    index: usize,
    /// `None` if only the class is wanted.
    image: Option<Image>,
    key: Option<u64>,
}

fn panicked<T>(payload: Box<dyn std::any::Any + Send>) -> Result<T> {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
    Err(Error::ImageThreadPanicked { reason: text.unwrap_or("no message").to_owned() })
}

/// Moves pixels over the gaps of images that were left out.
fn without_gaps(
    mut pixels: Vec<f32>,
    classes: &[Option<i64>],
    size: usize,
    values: usize,
) -> ImageBatch {
    let kept = classes.iter().enumerate().filter(|(_, class)| class.is_some());
    for (to, (from, _)) in kept.enumerate() {
        if to < from {
            pixels.copy_within(from * values..(from + 1) * values, to * values);
        }
    }
    let classes: Vec<i64> = classes.iter().flatten().copied().collect();
    let samples = classes.len();
    pixels.truncate(samples * values);
    ImageBatch { pixels, classes, samples, size }
}

/// Shuffled, augmented images. [`TrainImages::batch`] is a pure function of (images, settings,
/// seed, step).
///
/// In an epoch each image is a sample once, and each epoch has a new order and new augmentations. A
/// batch may span two epochs. Clones share the images and the list of unreadable ones.
#[derive(Debug, Clone)]
pub struct TrainImages {
    source: Source,
    order: Order,
}

impl TrainImages {
    /// Creates batches of `mini_batch` images, each batch decoded on `threads` threads.
    ///
    /// # Errors
    /// Fails if there are no images, if [`Transform::check`] fails, if a batch is empty or larger
    /// than [`IMAGE_BATCH_VALUES_MAX`], or if `threads` is not 1 to [`IMAGE_THREADS_MAX`].
    pub fn new(
        set: Arc<dyn ImageSet>,
        transform: Transform,
        mini_batch: usize,
        seed: u64,
        threads: usize,
        on_unreadable: OnUnreadable,
    ) -> Result<Self> {
        let order = Order::new(set.len() as u64, mini_batch, seed);
        let source = Source::new(set, transform, mini_batch, threads, on_unreadable)?;
        Ok(Self { source, order })
    }

    /// Continues the order of samples at `step`, when the earlier steps took `samples` samples in
    /// mini-batches of another size. A run that continues with larger mini-batches thus neither
    /// repeats nor skips a sample.
    #[must_use]
    pub fn starting_at(mut self, step: u64, samples: u64) -> Self {
        self.order = self.order.starting_at(step, samples);
        self
    }

    /// Number of samples per epoch: the images of the set.
    pub fn samples_per_epoch(&self) -> u64 {
        self.order.samples_per_epoch()
    }

    /// Number of samples in all steps before `step`, counted from step 0 across epochs. Saturates
    /// at `u64::MAX`.
    pub fn samples_seen(&self, step: u64) -> u64 {
        self.order.samples_seen(step)
    }

    /// The epoch of the first sample of `step`, counted from 0.
    pub fn epoch_of(&self, step: u64) -> u64 {
        self.order.epoch_of(step)
    }

    /// The batch of `step`. Steps count from 0, or from the step given to
    /// [`TrainImages::starting_at`], and may be requested in any order.
    ///
    /// # Errors
    /// With [`OnUnreadable::Stop`], fails if an image cannot be read. With [`OnUnreadable::Skip`],
    /// fails if neither an image nor the 99 after it can be read. Fails if the system cannot start
    /// a thread.
    pub fn batch(&self, step: u64) -> Result<ImageBatch> {
        self.batch_with(step, 0..usize::MAX)
    }

    /// As [`TrainImages::batch`], but samples outside the range `pixels` get only their classes.
    /// Their pixels are zeros, and with [`OnUnreadable::Stop`] their images are not read. For one
    /// of several processes that share a batch.
    ///
    /// # Errors
    /// Fails as [`TrainImages::batch`] does, for the images that are read.
    pub fn batch_with(&self, step: u64, pixels: Range<usize>) -> Result<ImageBatch> {
        let samples: Vec<(usize, Sample)> = self.order.samples(step).enumerate().collect();
        let Source { set, on_unreadable, unreadable, .. } = &self.source;
        self.source.batch(&samples, |(place, sample)| {
            let wanted = sample.index as usize;
            // With `Skip`, another image may replace this one, so the class is known only after
            // reading.
            if !pixels.contains(place) && *on_unreadable == OnUnreadable::Stop {
                return Ok(Some(Found { index: wanted, image: None, key: None }));
            }
            let (index, image) = unreadable.read_or_next(set.as_ref(), wanted, *on_unreadable)?;
            let key = mix(self.order.key(sample.epoch, AUGMENTATION_STREAM) ^ sample.index);
            Ok(Some(Found { index, image: Some(image), key: Some(key) }))
        })
    }

    /// Names of the images that could not be read so far, with the reasons. The list is sorted, has
    /// no duplicates, and holds at most [`UNREADABLE_MAX`](super::UNREADABLE_MAX) entries.
    pub fn unreadable(&self) -> Vec<(String, String)> {
        self.source.unreadable.list()
    }
}

/// Every image once, in the order of the set and without augmentation. With a limit, the images are
/// spaced evenly over the set, because a set is often sorted by class.
#[derive(Debug, Clone)]
pub struct EvaluationImages {
    source: Source,
    mini_batch: usize,
    images: usize,
    /// Whether images are read. If false, only their classes are found.
    pixels: bool,
}

impl EvaluationImages {
    /// Creates batches of `mini_batch` images, over `images_max` images of the set if given. The
    /// last batch may be smaller.
    ///
    /// # Errors
    /// Fails as [`TrainImages::new`] does, or if `images_max` is 0.
    pub fn new(
        set: Arc<dyn ImageSet>,
        transform: Transform,
        mini_batch: usize,
        images_max: Option<usize>,
        threads: usize,
        on_unreadable: OnUnreadable,
    ) -> Result<Self> {
        let images = set.len().min(images_max.unwrap_or(usize::MAX));
        if images == 0 {
            return Err(Error::NoImages);
        }
        let source = Source::new(set, transform, mini_batch, threads, on_unreadable)?;
        Ok(Self { source, mini_batch, images, pixels: true })
    }

    /// Finds only the classes: pixels are zeros, and with [`OnUnreadable::Stop`] no image is read.
    /// For a process that leaves the pixels to another process.
    #[must_use]
    pub fn classes_only(mut self) -> Self {
        self.pixels = false;
        self
    }

    /// Number of images in all batches, including unreadable ones.
    pub fn images(&self) -> usize {
        self.images
    }

    /// Number of batches.
    pub fn batches(&self) -> usize {
        self.images.div_ceil(self.mini_batch)
    }

    /// The batch of a given number, or `None` after the last. With [`OnUnreadable::Skip`], images
    /// that cannot be read are left out, so the batch is smaller and may be empty.
    ///
    /// # Errors
    /// With [`OnUnreadable::Stop`], fails if an image cannot be read. Fails if the system cannot
    /// start a thread.
    pub fn batch(&self, number: usize) -> Option<Result<ImageBatch>> {
        let first = number.checked_mul(self.mini_batch).filter(|first| *first < self.images)?;
        let last = self.images.min(first.saturating_add(self.mini_batch));
        let indices: Vec<usize> = (first..last).collect();
        let Source { set, on_unreadable, unreadable, .. } = &self.source;
        Some(self.source.batch(&indices, |&place| {
            // In 128 bits, because the product may overflow 64.
            let index = (place as u128 * set.len() as u128 / self.images as u128) as usize;
            // With `Skip`, the size of the batch is known only after its images are read.
            if !self.pixels && *on_unreadable == OnUnreadable::Stop {
                return Ok(Some(Found { index, image: None, key: None }));
            }
            let image = unreadable.read(set.as_ref(), index, *on_unreadable)?;
            Ok(image.map(|image| Found { index, image: Some(image), key: None }))
        }))
    }

    /// All batches in order.
    pub fn iter(&self) -> impl Iterator<Item = Result<ImageBatch>> + '_ {
        (0..self.batches()).filter_map(|number| self.batch(number))
    }

    /// Names of the images that could not be read so far, as in [`TrainImages::unreadable`].
    pub fn unreadable(&self) -> Vec<(String, String)> {
        self.source.unreadable.list()
    }
}
