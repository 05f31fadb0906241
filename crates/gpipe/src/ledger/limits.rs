//! What a machine can do at most, measured: matrix products and moving memory, on several threads
//! at once.

use std::{
    sync::{
        RwLock,
        mpsc::{Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use gpipe_bridge::linear::{Kernels, linear};
use tch::{Device, Kind, Tensor};

use crate::{
    error::{self, LayerError},
    threads,
};

/// How long one measurement takes.
const LONG: Duration = Duration::from_millis(400);
/// How often it is made; the best counts, because other work on the machine slows it.
const TIMES: usize = 3;
/// Elements of a tensor that is larger than a processor's caches: 128 MiB in float32.
const ELEMENTS: i64 = 32 << 20;

/// Threads that compute at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Busy {
    /// Stages, each with a team of threads.
    pub stages: usize,
    /// Threads of each stage.
    pub threads: usize,
}

/// Floating-point operations per second of each stage for products of `[rows, inner]` by `[inner,
/// columns]` in dtype `kind`: the faster of ATen's and oneDNN's kernels.
///
/// # Errors
/// libtorch refuses the product, or there is no memory or thread.
pub fn products(busy: Busy, kind: Kind, [rows, inner, columns]: [i64; 3]) -> error::Result<f64> {
    let flops = 2.0 * rows as f64 * inner as f64 * columns as f64;
    let mut best = 0.0_f64;
    for kernels in [Kernels::Aten, Kernels::OneDnn].repeat(TIMES) {
        let per_s = rate(busy, || {
            let x = Tensor::f_ones([rows, inner], (kind, Device::Cpu))?;
            let weight = Tensor::f_ones([columns, inner], (kind, Device::Cpu))?;
            Ok(move || Ok(linear(&x, &weight, None, kernels).map(drop)?))
        })?;
        best = best.max(per_s * flops);
    }
    Ok(best)
}

/// Bytes per second that each stage reads and writes while it adds one large tensor to another.
///
/// # Errors
/// There is no memory or thread.
pub fn bandwidth(busy: Busy) -> error::Result<f64> {
    let mut best = 0.0_f64;
    for _ in 0..TIMES {
        best = best.max(additions(busy)?);
    }
    Ok(best * 3.0 * 4.0 * ELEMENTS as f64)
}

/// Additions of large tensors per second.
fn additions(busy: Busy) -> Result<f64, LayerError> {
    rate(busy, || {
        let options = (Kind::Float, Device::Cpu);
        let (mut sum, other) =
            (Tensor::f_ones([ELEMENTS], options)?, Tensor::f_ones([ELEMENTS], options)?);
        Ok(move || Ok(sum.f_add_(&other).map(drop)?))
    })
}

/// How often each stage does something per second, while all are at it.
fn rate<F>(busy: Busy, make: impl Fn() -> Result<F, LayerError> + Sync) -> Result<f64, LayerError>
where
    F: FnMut() -> Result<(), LayerError>,
{
    // Held until all have made what they need.
    let gate = RwLock::new(());
    let own = |ready: Sender<()>| {
        threads::set(i32::try_from(busy.threads).unwrap_or(i32::MAX));
        let _no_grad = tch::no_grad_guard();
        let made = make().and_then(|mut work| work().map(|()| work));
        drop(ready);
        drop(gate.read());
        let mut work = made?;
        let (start, mut times) = (Instant::now(), 0_u32);
        while times == 0 || start.elapsed() < LONG {
            work()?;
            times += 1;
        }
        Ok(f64::from(times) / start.elapsed().as_secs_f64())
    };
    let failed = |reason: String| LayerError::Value(format!("measuring the machine: {reason}"));
    let rates = thread::scope(|scope| {
        let held = gate.write();
        let (ready, all_ready) = channel::<()>();
        let begin = |ready| thread::Builder::new().spawn_scoped(scope, || own(ready));
        let begun: std::io::Result<Vec<_>> =
            (0..busy.stages).map(|_| begin(ready.clone())).collect();
        let begun = begun.map_err(|error| failed(error.to_string()))?;
        drop(ready);
        let _ = all_ready.recv(); // fails when the last sender is dropped
        drop(held);
        let ends = begun.into_iter().map(|own| own.join().map_err(|_| failed("a panic".into()))?);
        ends.collect::<Result<Vec<f64>, LayerError>>()
    })?;
    Ok(rates.iter().sum::<f64>() / busy.stages.max(1) as f64)
}
