//! Image files as pixels.
//!
//! The content of a file decides its format, not its name, because collections have PNG files named
//! `.jpg`. Any file may be cut off, hostile or not an image at all, so sizes are checked before
//! memory is allocated.

use std::io::Cursor;
use std::panic::catch_unwind;
use std::path::Path;

use gpipe_files::ReadError;
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader, ImageResult, Limits};

use super::Image;
use crate::{Error, Result};

/// Maximum size of an image file: 64 MiB.
pub const IMAGE_FILE_BYTES_MAX: u64 = 64 << 20;

/// Maximum number of pixels of a decoded image: 100 million.
pub const IMAGE_PIXELS_MAX: u64 = 100_000_000;

/// Maximum memory of a decoder beside its output: 8 bytes for each pixel of the largest image,
/// rounded up.
const DECODER_BYTES_MAX: u64 = 1 << 30;

/// Reads a JPEG or PNG file as 8-bit RGB.
///
/// Grey becomes three equal channels and 16 bits become 8. CMYK becomes RGB by the plain formula,
/// without colour profiles, and transparency is dropped. EXIF orientation is applied.
///
/// # Errors
/// Fails if the file cannot be read, is larger than [`IMAGE_FILE_BYTES_MAX`], has more than
/// [`IMAGE_PIXELS_MAX`] pixels, is neither JPEG nor PNG, or is damaged or truncated.
pub fn decode(path: &Path) -> Result<Image> {
    let bytes = read(path, IMAGE_FILE_BYTES_MAX)?;
    guarded(&bytes).map_err(|reason| Error::Image { path: path.to_path_buf(), reason })
}

/// Decodes a file's bytes. Decoders are third-party code that reads untrusted bytes, so a panic in
/// one becomes this file's error and does not end the run.
pub(crate) fn guarded(bytes: &[u8]) -> Result<Image, String> {
    catch_unwind(|| pixels(bytes)).unwrap_or_else(|_| Err("the decoder panicked".to_owned()))
}

/// Reads a file of at most `bytes_max` bytes.
pub(super) fn read(path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    let refused = |reason: String| Error::Image { path: path.to_path_buf(), reason };
    gpipe_files::read(path, bytes_max).map_err(|error| match error {
        ReadError::Io(source) => Error::io("read", path)(source),
        ReadError::NotAFile => refused(error.to_string()),
        ReadError::TooLarge { most, .. } => {
            refused(format!("the file is larger than {} MiB", most >> 20))
        }
    })
}

fn pixels(bytes: &[u8]) -> Result<Image, String> {
    let format = match image::guess_format(bytes) {
        _ if bytes.is_empty() => return Err("the file is empty".to_owned()),
        Ok(format @ (ImageFormat::Jpeg | ImageFormat::Png)) => format,
        _ => return Err("it is neither JPEG nor PNG".to_owned()),
    };
    if format == ImageFormat::Jpeg && !jpeg_reaches_its_end(bytes) {
        return Err("it ends before its end marker, as a file does that was cut off".to_owned());
    }
    let mut decoder = decoder(bytes, format).map_err(|error| error.to_string())?;
    let (width, height) = decoder.dimensions();
    let count = u64::from(width) * u64::from(height);
    if count == 0 || count > IMAGE_PIXELS_MAX {
        return Err(format!(
            "it has {height} x {width} pixels, and 1 to {IMAGE_PIXELS_MAX} are allowed"
        ));
    }
    // Damaged metadata is not a reason to refuse intact pixels.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let mut image = DynamicImage::from_decoder(decoder).map_err(|error| error.to_string())?;
    image.apply_orientation(orientation);
    let image = image.into_rgb8();
    let (width, height) = (image.width() as usize, image.height() as usize);
    Ok(Image { height, width, pixels: image.into_raw() })
}

fn decoder(bytes: &[u8], format: ImageFormat) -> ImageResult<impl ImageDecoder + '_> {
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut limits = Limits::no_limits();
    limits.max_alloc = Some(DECODER_BYTES_MAX);
    reader.limits(limits);
    reader.into_decoder()
}

/// Whether a JPEG has its end marker. The decoder accepts a file without one and fills the rest of
/// the picture with grey. Its strict mode would also refuse harmless oddities.
fn jpeg_reaches_its_end(bytes: &[u8]) -> bool {
    let mut at = 0;
    while let Some(next) = bytes.get(at..).and_then(|rest| rest.iter().position(|&b| b == 0xff)) {
        at += next + 1;
        match bytes.get(at..) {
            Some([0xd9, ..]) => return true,
            // Padding before a marker. The next byte decides.
            Some([0xff, ..]) => {}
            // A byte of a scan that happens to be 0xff, or a marker without content.
            Some([0x00 | 0x01 | 0xd0..=0xd8, ..]) => at += 1,
            // A segment with its length. It is skipped, because metadata may hold a small JPEG with
            // its own end marker.
            Some([_, high, low, ..]) => at += 1 + usize::from(u16::from_be_bytes([*high, *low])),
            _ => return false,
        }
    }
    false
}
