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

/// What augmentation is told apart by from the order of samples.
const AUGMENTATION_STREAM: u64 = 3;

/// Images as numbers, and their classes.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageBatch {
    /// Normalised pixels. `[samples, 3, size, size]`
    pub pixels: Vec<f32>,
    /// `[samples]`
    pub classes: Vec<i64>,
    /// How many images.
    pub samples: usize,
    /// Rows and columns of each.
    pub size: usize,
}

/// Where images come from and how they become a batch: what training and evaluation share.
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

    /// A batch of what `read` finds for each of `wanted`: an image with its number and, in
    /// training, its key.
    ///
    /// Each thread has a run of neighbours, and the first error in their order is the one reported:
    /// neither pixels nor errors depend on the number of threads.
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

/// An image that was looked for.
struct Found {
    index: usize,
    /// None: only its class is wanted.
    image: Option<Image>,
    key: Option<u64>,
}

fn panicked<T>(payload: Box<dyn std::any::Any + Send>) -> Result<T> {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| payload.downcast_ref::<&str>().copied());
    Err(Error::ImageThreadPanicked { reason: text.unwrap_or("no message").to_owned() })
}

/// Closes the gaps of images that were left out.
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
/// In an epoch each image is a sample once, in another order and with another augmentation each
/// time. A batch may span two epochs. Clones share the images and the list of unreadable ones.
#[derive(Debug, Clone)]
pub struct TrainImages {
    source: Source,
    order: Order,
}

impl TrainImages {
    /// Batches of `mini_batch` images, each batch decoded on `threads` threads.
    ///
    /// # Errors
    /// There are no images; [`Transform::check`] fails; a batch is empty or larger than
    /// [`IMAGE_BATCH_VALUES_MAX`]; `threads` is not 1 to [`IMAGE_THREADS_MAX`].
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

    /// The same order of samples, where the steps before `step` took `samples` of them in
    /// mini-batches of another size: a run that goes on with larger ones neither repeats a sample
    /// nor leaves one out.
    #[must_use]
    pub fn starting_at(mut self, step: u64, samples: u64) -> Self {
        self.order = self.order.starting_at(step, samples);
        self
    }

    /// How many samples an epoch has: the images of the set.
    pub fn samples_per_epoch(&self) -> u64 {
        self.order.samples_per_epoch()
    }

    /// How many samples the steps before `step` have, from 0 and through all epochs; no more than
    /// `u64::MAX`.
    pub fn samples_seen(&self, step: u64) -> u64 {
        self.order.samples_seen(step)
    }

    /// The epoch, from 0, of the first sample of `step`.
    pub fn epoch_of(&self, step: u64) -> u64 {
        self.order.epoch_of(step)
    }

    /// The batch of a step, from 0 (or from that of [`TrainImages::starting_at`]). Steps may be
    /// asked for in any order.
    ///
    /// # Errors
    /// With [`OnUnreadable::Stop`] an image cannot be read; with [`OnUnreadable::Skip`] neither it
    /// nor the 99 after it can. The system gives no thread.
    pub fn batch(&self, step: u64) -> Result<ImageBatch> {
        self.batch_with(step, 0..usize::MAX)
    }

    /// As [`TrainImages::batch`], but of the samples outside of `pixels` only the classes are
    /// found: their pixels are zeros, and with [`OnUnreadable::Stop`] their images are not read.
    /// For one of several processes that share a batch out.
    ///
    /// # Errors
    /// As there, of the images that are read.
    pub fn batch_with(&self, step: u64, pixels: Range<usize>) -> Result<ImageBatch> {
        let samples: Vec<(usize, Sample)> = self.order.samples(step).enumerate().collect();
        let Source { set, on_unreadable, unreadable, .. } = &self.source;
        self.source.batch(&samples, |(place, sample)| {
            let wanted = sample.index as usize;
            // Where others take the place of unreadable ones, a class is known when its image is.
            if !pixels.contains(place) && *on_unreadable == OnUnreadable::Stop {
                return Ok(Some(Found { index: wanted, image: None, key: None }));
            }
            let (index, image) = unreadable.read_or_next(set.as_ref(), wanted, *on_unreadable)?;
            let key = mix(self.order.key(sample.epoch, AUGMENTATION_STREAM) ^ sample.index);
            Ok(Some(Found { index, image: Some(image), key: Some(key) }))
        })
    }

    /// Names of the images that could not be read so far, each once and sorted, and why; the first
    /// [`UNREADABLE_MAX`](super::UNREADABLE_MAX).
    pub fn unreadable(&self) -> Vec<(String, String)> {
        self.source.unreadable.list()
    }
}

/// Every image once, in the order of the set and without augmentation; or so many of them, as far
/// apart as they can be, because a set is often sorted by class.
#[derive(Debug, Clone)]
pub struct EvaluationImages {
    source: Source,
    mini_batch: usize,
    images: usize,
    /// Whether images are read, and not their classes alone.
    pixels: bool,
}

impl EvaluationImages {
    /// Batches of `mini_batch` images, over `images_max` of the set where given. The last batch may
    /// be smaller.
    ///
    /// # Errors
    /// As for [`TrainImages::new`]; `images_max` is 0.
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

    /// The same, but only the classes are found: pixels are zeros, and with [`OnUnreadable::Stop`]
    /// no image is read. For a process that leaves the pixels to another one.
    #[must_use]
    pub fn classes_only(mut self) -> Self {
        self.pixels = false;
        self
    }

    /// How many images the batches have, unreadable ones included.
    pub fn images(&self) -> usize {
        self.images
    }

    /// How many batches there are.
    pub fn batches(&self) -> usize {
        self.images.div_ceil(self.mini_batch)
    }

    /// A batch by its number, or none behind the last one. With [`OnUnreadable::Skip`] images that
    /// cannot be read are left out: the batch is smaller, and may be empty.
    ///
    /// # Errors
    /// With [`OnUnreadable::Stop`] an image cannot be read. The system gives no thread.
    pub fn batch(&self, number: usize) -> Option<Result<ImageBatch>> {
        let first = number.checked_mul(self.mini_batch).filter(|first| *first < self.images)?;
        let last = self.images.min(first.saturating_add(self.mini_batch));
        let indices: Vec<usize> = (first..last).collect();
        let Source { set, on_unreadable, unreadable, .. } = &self.source;
        Some(self.source.batch(&indices, |&place| {
            // In 128 bits: a place times the size of a set may be more than 64 hold.
            let index = (place as u128 * set.len() as u128 / self.images as u128) as usize;
            // Where unreadable ones are left out, how many there are is known when they are read.
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

    /// Names of the images that could not be read so far, as [`TrainImages::unreadable`] gives
    /// them.
    pub fn unreadable(&self) -> Vec<(String, String)> {
        self.source.unreadable.list()
    }
}
