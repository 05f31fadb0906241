//! Images with classes, from files to mini-batches.
//!
//! ```text
//!  ImageFolder, Cifar, ... ──► ImageSet ──► Transform ──► TrainImages / EvaluationImages
//!       [1]                        [2]          [3]            [4]
//! ```
//!
//! 1. Sources: [`ImageFolder`] reads files on request, through [`decode()`]; [`Cifar`] is held in
//!    memory.
//! 2. [`ImageSet`]: images by index, from any source. Implement it to add a source.
//! 3. [`Transform`]: turns an image into normalised values of one size. In training, a key selects
//!    its augmentation.
//! 4. [`TrainImages`], [`EvaluationImages`]: mini-batches by number, decoded on several threads.
//!
//! As for text, a batch is a pure function of (images, settings, seed, step). The number of
//! threads, the order of calls and restarts change nothing. This module has no tensors (an
//! [`ImageBatch`] holds plain vectors), no downloads and no cache of decoded images.
//!
//! ```no_run
//! use std::path::Path;
//! use std::sync::Arc;
//!
//! use gpipe_data::images::{Crop, ImageFolder, OnUnreadable, TrainImages, Transform};
//!
//! # fn main() -> gpipe_data::Result<()> {
//! let images = ImageFolder::open(Path::new("imagenet/train"))?;
//! let transform = Transform {
//!     resize: 256,
//!     crop: Crop::RandomResized { scale: (0.08, 1.0), ratio: (3.0 / 4.0, 4.0 / 3.0) },
//!     flip: 0.5,
//!     ..Transform::plain(224, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
//! };
//! let batches = TrainImages::new(Arc::new(images), transform, 256, 42, 8, OnUnreadable::Skip)?;
//! let batch = batches.batch(1_000)?; // No need to ask for the 1,000 batches before it.
//! assert_eq!(batch.pixels.len(), 256 * 3 * 224 * 224);
//! # Ok(())
//! # }
//! ```

mod batches;
mod cifar;
pub(crate) mod decode;
mod distort;
mod folder;
mod resample;
mod transform;
mod unreadable;

use std::fmt::Debug;

use crate::hash::unit;

pub use batches::{
    EvaluationImages, IMAGE_BATCH_VALUES_MAX, IMAGE_THREADS_MAX, ImageBatch, TrainImages,
};
pub use cifar::{Cifar, CifarKind, CifarPart};
pub use decode::{IMAGE_FILE_BYTES_MAX, IMAGE_PIXELS_MAX, decode};
pub use distort::{Affine, Tone};
pub use folder::ImageFolder;
pub use transform::{Crop, IMAGE_SIZE_MAX, Transform};
pub use unreadable::{OnUnreadable, UNREADABLE_MAX};

/// An 8-bit RGB image: rows from the top, with interleaved red, green and blue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Number of rows.
    pub height: usize,
    /// Number of pixels per row.
    pub width: usize,
    /// `height * width * 3` bytes.
    pub pixels: Vec<u8>,
}

/// A set of images by index, each with one class.
///
/// An image is a function of its index alone: every caller, in any order and on any thread, gets
/// the same image.
pub trait ImageSet: Debug + Send + Sync {
    /// Names of the classes.
    fn classes(&self) -> &[String];

    /// Number of images.
    fn len(&self) -> usize;

    /// Whether there are no images.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The class of an image, as an index into [`ImageSet::classes`]. 0 if `index` is out of range.
    fn class(&self, index: usize) -> usize;

    /// The name of an image in messages: a file's path, or where the image came from.
    fn name(&self, index: usize) -> String;

    /// Reads or generates an image.
    ///
    /// # Errors
    /// Fails if the file is missing, damaged or too large, or if `index` is out of range.
    fn image(&self, index: usize) -> crate::Result<Image>;

    /// A hash that identifies the set: names, classes, and the contents if they are in memory.
    fn fingerprint(&self) -> u64;
}
