//! Images with classes, from files to mini-batches.
//!
//! ```text
//!  ImageFolder, Cifar, ... ──► ImageSet ──► Transform ──► TrainImages / EvaluationImages
//!       [1]                        [2]          [3]            [4]
//! ```
//!
//! 1. Sources: [`ImageFolder`] reads files when asked, through [`decode()`]; [`Cifar`] is in
//!    memory.
//! 2. [`ImageSet`]: images by number, whatever the source. A user's own source implements this.
//! 3. [`Transform`]: an image as normalised numbers of one size, in training augmented by a key.
//! 4. [`TrainImages`], [`EvaluationImages`]: mini-batches by number, decoded on several threads.
//!
//! As for text, a batch is a pure function of (images, settings, seed, step): the number of
//! threads, the order of calls and a restart change nothing. Absent: tensors (an [`ImageBatch`]
//! holds plain vectors), downloads, and a cache of decoded images.
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

/// An 8-bit RGB image: rows from the top, red, green and blue of each pixel in turn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Rows.
    pub height: usize,
    /// Pixels of a row.
    pub width: usize,
    /// `height * width * 3` bytes.
    pub pixels: Vec<u8>,
}

/// Images by number, each of one class.
///
/// An image is a function of its number: whoever asks, in whatever order and on whatever thread,
/// gets the same one.
pub trait ImageSet: Debug + Send + Sync {
    /// Names of the classes.
    fn classes(&self) -> &[String];

    /// How many images there are.
    fn len(&self) -> usize;

    /// Whether there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The class of an image, as a place in [`ImageSet::classes`]; 0 for a number that is not
    /// there.
    fn class(&self, index: usize) -> usize;

    /// What messages call an image: a file's path, or where it came from.
    fn name(&self, index: usize) -> String;

    /// Reads or makes an image.
    ///
    /// # Errors
    /// A file that is gone, damaged or too large; a number that is not there.
    fn image(&self, index: usize) -> crate::Result<Image>;

    /// What tells this set from others: names, classes, and contents where they are in memory.
    fn fingerprint(&self) -> u64;
}
