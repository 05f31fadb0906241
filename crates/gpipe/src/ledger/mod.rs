//! The ledger of training steps: where the time of the stages' threads goes, by kind of work.
//!
//! ```
//! use gpipe::{
//!     MeanSquaredError, Pipeline, Sequence, Sgd, TensorSpec, layers::Linear,
//!     ledger::{Ledger, Work},
//! };
//! use tch::{Device, Kind, Tensor};
//! let model = Sequence::new().layer(Linear::new(8, 32)).layer(Linear::new(32, 1));
//! let ledger = Ledger::default();
//! let mut pipeline = Pipeline::builder(model, TensorSpec::new([16, 8], Kind::Float))
//!     .loss(MeanSquaredError).optimizer(Sgd::new(0.1)).observer(ledger.clone()).build()?;
//! let x = Tensor::randn([16, 8], (Kind::Float, Device::Cpu));
//! ledger.begin();
//! pipeline.train_step(&x, &x.narrow(1, 0, 1))?;
//! let lines = ledger.end();
//! assert!(lines.iter().any(|line| line.work == Work::Products && line.flops > 0.0));
//! # Ok::<(), gpipe::Error>(())
//! ```
//!
//! - [`Work`]: the kinds of work, and which operation is of which
//! - [`limits`]: what the machine can do: products and memory
//! - here: the observer that counts

pub mod limits;
mod work;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
};

use gpipe_bridge::ledger::{self, Entry};
use gpipe_core::{Nanos, Op};

pub use self::work::Work;
use crate::{
    error::LayerError,
    observer::{ActionEvent, Observer, When},
};

/// A part of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// First forwards.
    Forward,
    /// Forwards that recompute discarded activations.
    Recompute,
    /// Backwards, whole or in halves.
    Backward,
    /// The norm of the gradients and the update.
    Update,
}

impl Phase {
    /// All phases, in the order of a step.
    pub const ALL: [Self; 4] = [Self::Forward, Self::Recompute, Self::Backward, Self::Update];

    /// `None` for messages, whose time is mostly that of waiting.
    fn of(op: Op) -> Option<Self> {
        match op {
            Op::Forward(_) => Some(Self::Forward),
            Op::Rematerialize(_) => Some(Self::Recompute),
            Op::Backward(_) | Op::BackwardInput(_) | Op::BackwardWeight(_) => Some(Self::Backward),
            Op::Reduce | Op::Norm | Op::Decide | Op::Update => Some(Self::Update),
            Op::Send(_) | Op::Receive(_) => None,
        }
    }
}

/// What all calls of one operation took in one phase, on all stages together.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// The phase.
    pub phase: Phase,
    /// The kind of work.
    pub work: Work,
    /// Name of the operation, as in [`Entry::name`]. Empty for [`Work::Dispatch`] outside of
    /// operations.
    pub operation: String,
    /// Number of calls.
    pub calls: u64,
    /// Time on the stages' threads, without that of operations inside. Threads that help a stage
    /// are not counted apart.
    pub time: Nanos,
    /// Bytes read and written.
    pub bytes: u64,
    /// Multiplications and additions of products, convolutions, and attention.
    pub flops: f64,
}

/// An observer that counts the operations of training steps between [`Ledger::begin`] and
/// [`Ledger::end`]. Its clones share one ledger. On GPUs an operation takes the time of its launch.
#[derive(Debug, Clone, Default)]
pub struct Ledger(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    counts: bool,
    seen: BTreeMap<(Phase, String), Entry>,
    /// Time of the actions, by phase.
    actions: BTreeMap<Phase, Nanos>,
}

impl Ledger {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to count, and forgets what was counted before. Call it between two steps.
    pub fn begin(&self) {
        *self.state() = State { counts: true, ..State::default() };
    }

    /// Ends the count. The lines of each phase are in descending order of time.
    pub fn end(&self) -> Vec<Line> {
        let State { seen, actions, .. } = std::mem::take(&mut *self.state());
        let mut lines: Vec<Line> = Vec::with_capacity(seen.len());
        let mut inside = BTreeMap::<Phase, Nanos>::new();
        for ((phase, operation), Entry { calls, time_ns, bytes, flops, .. }) in seen {
            let time = Nanos(time_ns);
            *inside.entry(phase).or_default() += time;
            let work = Work::of(phase, &operation, bytes);
            lines.push(Line { phase, work, operation, calls, time, bytes, flops });
        }
        for (phase, all) in actions {
            let inside = inside.get(&phase).copied().unwrap_or_default();
            lines.push(Line {
                phase,
                work: Work::Dispatch,
                operation: String::new(),
                calls: 0,
                time: Nanos(all.0.saturating_sub(inside.0)),
                bytes: 0,
                flops: 0.0,
            });
        }
        lines.sort_by(|a, b| (a.phase, b.time).cmp(&(b.phase, a.time)));
        lines
    }
}

impl Observer for Ledger {
    fn action(&self, event: &ActionEvent) -> Result<(), LayerError> {
        let Some(phase) = Phase::of(event.action.op) else { return Ok(()) };
        let time = match event.when {
            When::Before if self.state().counts => return Ok(ledger::begin()?),
            When::Before => return Ok(()),
            When::After(time) => time,
        };
        let mut state = self.state();
        if !state.counts {
            return Ok(());
        }
        for entry in ledger::end()? {
            let own = state.seen.entry((phase, entry.name.clone()));
            let own = own.or_insert_with(|| Entry {
                calls: 0,
                time_ns: 0,
                bytes: 0,
                flops: 0.0,
                name: String::new(),
            });
            own.calls += entry.calls;
            own.time_ns += entry.time_ns;
            own.bytes += entry.bytes;
            own.flops += entry.flops;
        }
        *state.actions.entry(phase).or_default() += time;
        Ok(())
    }
}
