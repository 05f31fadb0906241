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
use gpipe_core::Nanos;
use tch::{Device, Kind, Tensor};

use crate::{
    error::{self, LayerError},
    estimate::Rate,
    threads,
};

/// How long one measurement takes.
const LONG: Duration = Duration::from_millis(400);
/// How long one measurement of [`roughly`] takes.
const SHORT: Duration = Duration::from_millis(50);
/// The product of [`roughly`]: rows, inner, columns. It is large enough that its speed is that of
/// larger ones.
const USUAL: [i64; 3] = [512, 512, 1024];
/// Elements of the tensors that [`roughly`] adds, which are larger than most caches.
const USUAL_ELEMENTS: i64 = 4 << 20;
/// What [`roughly`] assumes each layer's forward and backward to take beside its operations' work:
/// about ten operations of a few microseconds.
const LATENCY: Nanos = Nanos(50_000);
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
    let mut best = 0.0_f64;
    for kernels in [Kernels::Aten, Kernels::OneDnn].repeat(TIMES) {
        best = best.max(product(busy, LONG, (kind, kernels), [rows, inner, columns])?);
    }
    Ok(best)
}

/// The speed of each stage in dtype `kind`, measured once and shortly, with these kernels. It takes
/// a fifth of a second, and serves to say how long a training may take.
///
/// # Errors
/// As [`products`] and [`bandwidth`].
pub fn roughly(busy: Busy, kind: Kind, kernels: Kernels) -> error::Result<Rate> {
    let flops_per_s = product(busy, SHORT, (kind, kernels), USUAL)?;
    let bytes_per_s = additions(busy, SHORT, USUAL_ELEMENTS)?;
    Ok(Rate { flops_per_s, bytes_per_s, latency: LATENCY })
}

/// Floating-point operations per second of each stage, measured for the time `long`.
fn product(
    busy: Busy,
    long: Duration,
    (kind, kernels): (Kind, Kernels),
    [rows, inner, columns]: [i64; 3],
) -> Result<f64, LayerError> {
    let per_s = rate(busy, long, || {
        let x = Tensor::f_ones([rows, inner], (kind, Device::Cpu))?;
        let weight = Tensor::f_ones([columns, inner], (kind, Device::Cpu))?;
        Ok(move || Ok(linear(&x, &weight, None, kernels).map(drop)?))
    })?;
    Ok(per_s * 2.0 * rows as f64 * inner as f64 * columns as f64)
}

/// Bytes per second that each stage reads and writes while it adds one large tensor to another.
///
/// # Errors
/// There is no memory or thread.
pub fn bandwidth(busy: Busy) -> error::Result<f64> {
    let mut best = 0.0_f64;
    for _ in 0..TIMES {
        best = best.max(additions(busy, LONG, ELEMENTS)?);
    }
    Ok(best)
}

/// Bytes per second of each stage that adds tensors of so many elements, measured for the time
/// `long`.
fn additions(busy: Busy, long: Duration, elements: i64) -> Result<f64, LayerError> {
    let per_s = rate(busy, long, || {
        let options = (Kind::Float, Device::Cpu);
        let (mut sum, other) =
            (Tensor::f_ones([elements], options)?, Tensor::f_ones([elements], options)?);
        Ok(move || Ok(sum.f_add_(&other).map(drop)?))
    })?;
    // Two tensors are read and one is written, in float32.
    Ok(per_s * 3.0 * 4.0 * elements as f64)
}

/// How often each stage does something per second, while all are at it for the time `long`.
fn rate<F>(
    busy: Busy,
    long: Duration,
    make: impl Fn() -> Result<F, LayerError> + Sync,
) -> Result<f64, LayerError>
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
        while times == 0 || start.elapsed() < long {
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
