//! Images with classes, from files, fonts or pixels on disk to mini-batches.

use std::fmt::Debug;

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
/// An image is a function of its number: whoever asks, in whatever order and on whatever thread, gets the same one.
pub trait ImageSet: Debug + Send + Sync {
    /// Names of the classes.
    fn classes(&self) -> &[String];

    /// How many images there are.
    fn len(&self) -> usize;

    /// Whether there is none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The class of an image, as a place in [`ImageSet::classes`]; 0 for a number that is not there.
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
