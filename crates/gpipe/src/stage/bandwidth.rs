//! How fast activations leave a device's memory and come back, measured.
//!
//! A file is written and read through the system's cache of files, as in training. Where a step
//! offloads more than that cache holds, its speed is the disk's, which may be far lower.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use gpipe_bridge::{device::Stream, offload::filled};
use gpipe_core::cost::OffloadSpeed;
use tch::{Kind, Tensor};

use super::{SHARED_ARENA, spill::Spill};
use crate::{device::Device, error::LayerError};

/// Bytes that are moved: as many blocks as a few layers save, too large for a processor's caches.
const BLOCKS: usize = 16;
const BLOCK: usize = 4 << 20;
/// The fastest of these rounds counts: the first one makes the file, or the pinned memory.
const ROUNDS: usize = 4;

/// Measures the speed of stages on `device` whose files are in `folder`. One thing may take
/// `patience`.
///
/// # Errors
/// The folder or the GPU cannot be used.
pub(crate) fn offload_speed(
    device: Device,
    folder: Option<&Path>,
    patience: Duration,
) -> Result<OffloadSpeed, LayerError> {
    type Times = Result<(Duration, Duration), LayerError>;
    let measure: Box<dyn Fn(usize) -> Times> = match device.gpu() {
        Some(gpu) => {
            // Memory is kept for each stream. With one, the fastest round allocates none.
            let stream = Stream::new(gpu)?;
            Box::new(move |_| through_host(&stream))
        }
        None => {
            let spill = Spill::new(folder, SHARED_ARENA, patience)?;
            Box::new(move |round| through_file(&spill, round))
        }
    };
    let (mut out, mut back) = (Duration::MAX, Duration::MAX);
    for round in 0..ROUNDS {
        let (left, returned) = measure(round)?;
        (out, back) = (out.min(left), back.min(returned));
    }
    let per_s = |time: Duration| {
        let bytes = (BLOCKS * BLOCK) as f64;
        ((bytes / time.as_secs_f64().max(1e-9)) as u64).max(1)
    };
    Ok(OffloadSpeed { out_bytes_per_s: per_s(out), back_bytes_per_s: per_s(back) })
}

fn through_file(spill: &Spill, round: usize) -> Result<(Duration, Duration), LayerError> {
    // No two blocks are equal, for file systems that would keep one copy.
    let block = |at| {
        let start = (BLOCKS * round + at) * BLOCK;
        Ok(filled(BLOCK, |bytes| {
            for (number, eight) in bytes.chunks_exact_mut(8).enumerate() {
                eight.copy_from_slice(&((start + number) as u64).to_le_bytes());
            }
        })?
        .0)
    };
    let blocks = (0..BLOCKS).map(block).collect::<Result<Vec<_>, LayerError>>()?;
    let begun = Instant::now();
    let stored = spill.store(blocks)?;
    spill.finish_write()?;
    let out = begun.elapsed();
    let begun = Instant::now();
    drop(spill.load(stored)?);
    Ok((out, begun.elapsed()))
}

fn through_host(stream: &Stream) -> Result<(Duration, Duration), LayerError> {
    // On the stream of the copies, which then need not wait for another.
    let empty = Tensor::f_zeros([BLOCK as i64], (Kind::Uint8, tch::Device::Cpu))?;
    let block = |_| Ok(stream.upload(&empty)?);
    let blocks = (0..BLOCKS).map(block).collect::<Result<Vec<_>, LayerError>>()?;
    stream.synchronize()?;
    let begun = Instant::now();
    let copies = blocks.iter().map(|block| stream.copy(block, None)).collect::<Result<Vec<_>, _>>();
    let copies = copies?;
    stream.synchronize()?;
    let out = begun.elapsed();
    let begun = Instant::now();
    let again = copies.iter().map(|copy| stream.upload(copy)).collect::<Result<Vec<_>, _>>()?;
    stream.synchronize()?;
    drop(again);
    Ok((out, begun.elapsed()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn property_a_speed_is_above_0_and_a_folder_that_is_not_there_is_an_error() {
        let patience = Duration::from_secs(60);
        let found = offload_speed(Device::Cpu, None, patience).unwrap();
        assert!(found.out_bytes_per_s > 1 && found.back_bytes_per_s > 1, "{found:?}");
        let gone = Path::new("/no/such/folder");
        let error = offload_speed(Device::Cpu, Some(gone), patience).unwrap_err().to_string();
        assert!(error.contains("/no/such/folder"), "{error}");
    }
}
