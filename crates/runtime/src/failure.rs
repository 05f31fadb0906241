//! The failure of a step: the first error wins, and every worker stops.

use std::{
    sync::{PoisonError, atomic::Ordering},
    time::Duration,
};

use gpipe_core::{
    Action, DeviceId, Direction, Op, StageId,
    lower::{EdgeKind, Program},
};

use crate::{
    peers::PeerError,
    sync::{AtomicBool, Mutex},
};

/// Whose code an action runs.
fn author(action: Action) -> &'static str {
    if action.op == Op::Update { "optimizer" } else { "layer" }
}

/// Why a step failed. Parameters and optimizer state are unchanged unless the variant says
/// otherwise.
#[derive(Debug, thiserror::Error)]
pub enum StepError<E> {
    /// A stage reported an error.
    #[error("{action}: {source}")]
    Stage {
        /// The action that failed.
        action: Action,
        /// The stage's error.
        source: E,
    },
    /// A device's stages could not be built.
    #[error("device {device}, building its stages: {source}")]
    Build {
        /// The device.
        device: DeviceId,
        /// The error.
        source: E,
    },
    /// The code of a layer or of the optimizer panicked.
    #[error("{action}: the {}'s code panicked: {message}", author(*action))]
    Panic {
        /// The action that panicked.
        action: Action,
        /// The panic's message.
        message: String,
    },
    /// A wait outlasted the deadline, counted from the peer's last sign of life.
    #[error(
        "{what}; last sign of life of stage {peer} {silence:.1?} ago{doing}; raise the \
        timeout if its work takes longer"
    )]
    Deadline {
        /// Which stage waits, for what, and from which stage.
        what: String,
        /// The stage that the wait depends on.
        peer: StageId,
        /// How long that stage has been silent.
        silence: Duration,
        /// What that stage was doing, if known.
        doing: String,
    },
    /// A worker gives no sign of life, and only the driver waits for it.
    #[error(
        "device {device} has given no sign of life for {silence:.1?}{doing}; raise the \
        timeout if its work takes longer"
    )]
    Stuck {
        /// The device.
        device: DeviceId,
        /// How long the device has been silent.
        silence: Duration,
        /// What the device was doing, if known.
        doing: String,
    },
    /// Every worker is alive, and all of them wait for each other.
    #[error("nothing has moved for {standstill:.1?}: {}", waiting.join("; "))]
    Standstill {
        /// How long no worker has completed an action.
        standstill: Duration,
        /// What each worker waits for.
        waiting: Vec<String>,
    },
    /// The program does not fit the stages; `validate` should have rejected it.
    #[error("{action}: {reason}")]
    Protocol {
        /// The action.
        action: Action,
        /// What is wrong.
        reason: String,
    },
    /// Another process of the pipeline failed or is unreachable.
    #[error(transparent)]
    Peer(#[from] PeerError),
    /// Some stages began or applied the update, and others may not have.
    #[error(
        "{cause}; the update was {}, perhaps not by all others: the parameters may be of two \
        steps, restore a checkpoint (in a program, accept_torn_update uses what is there)",
        progress(applied, begun)
    )]
    Torn {
        /// Stages of this process that applied the update.
        applied: Vec<StageId>,
        /// Stages of this process that began the update and did not finish it: some of their
        /// parameters may have changed.
        begun: Vec<StageId>,
        /// The first error.
        cause: String,
    },
    /// An earlier failure left the pipeline unusable.
    #[error("the pipeline cannot go on: {reason}")]
    Unusable {
        /// The earlier failure.
        reason: String,
    },
}

/// Describes how far the update got.
fn progress(applied: &[StageId], begun: &[StageId]) -> String {
    let begun_by = || format!("begun by {} and not finished there", listed(begun));
    match (applied.is_empty(), begun.is_empty()) {
        (_, true) => format!("applied by {}", listed(applied)),
        (true, false) => begun_by(),
        (false, false) => format!("applied by {}, {}", listed(applied), begun_by()),
    }
}

/// Formats stages as text, in ascending order.
fn listed(stages: &[StageId]) -> String {
    let mut stages = stages.to_vec();
    stages.sort_unstable();
    let plural = if stages.len() == 1 { "" } else { "s" };
    let numbers: Vec<String> = stages.iter().map(ToString::to_string).collect();
    format!("stage{plural} {}", numbers.join(", "))
}

/// The first failure of a step, shared by all its workers.
#[derive(Debug)]
pub struct Failure<E> {
    raised: AtomicBool,
    first: Mutex<Option<StepError<E>>>,
}

impl<E> Default for Failure<E> {
    fn default() -> Self {
        Self { raised: AtomicBool::new(false), first: Mutex::new(None) }
    }
}

impl<E> Failure<E> {
    /// Records `error` if it is the first, and returns whether it is. The caller wakes the links.
    pub fn raise(&self, error: StepError<E>) -> bool {
        let mut first = self.first.lock().unwrap_or_else(PoisonError::into_inner);
        let is_first = !self.raised.swap(true, Ordering::SeqCst);
        if is_first {
            *first = Some(error);
        }
        is_first
    }

    /// Whether any worker has failed.
    pub fn is_raised(&self) -> bool {
        self.raised.load(Ordering::SeqCst)
    }

    /// Takes the first error; later calls return `None`.
    pub fn take(&self) -> Option<StepError<E>> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Describes what `action` of `program` waits for.
pub fn describe_wait(program: &Program, action: Action) -> String {
    let (transfer, receives) = match action.op {
        Op::Receive(transfer) => (transfer, true),
        Op::Send(transfer) => (transfer, false),
        _ => return format!("stage {} runs {action}", action.stage),
    };
    let Some(edge) = program.topology.edges.get(transfer.edge.index()) else {
        return format!("stage {} waits at {action}", action.stage);
    };
    let what = match (edge.kind, transfer.direction) {
        (EdgeKind::Boundary { .. }, Direction::Forward) => "the activation",
        (EdgeKind::Skip { .. }, Direction::Forward) => "the skip's value",
        (_, Direction::Backward) if edge.kind.per_micro_batch() => "the gradient",
        (EdgeKind::Tie, Direction::Forward) => "the gradients of tied weights",
        (EdgeKind::Tie, Direction::Backward) => "the sum of tied gradients",
        (_, Direction::Forward) => "the gradient norm",
        (_, Direction::Backward) => "the verdict on the update",
    };
    let of = transfer.micro_batch.map(|m| format!(" of micro-batch {m}")).unwrap_or_default();
    let peer = peer(program, action).map_or_else(|| "?".to_owned(), |stage| stage.to_string());
    if receives {
        format!("stage {} waits for {what}{of} from stage {peer} ({action})", action.stage)
    } else {
        format!(
            "stage {} waits for room to send {what}{of} to stage {peer} ({action})",
            action.stage
        )
    }
}

/// The stage at the other end of a transfer.
pub fn peer(program: &Program, action: Action) -> Option<StageId> {
    let (Op::Send(transfer) | Op::Receive(transfer)) = action.op else { return None };
    let edge = program.topology.edges.get(transfer.edge.index())?;
    Some(if edge.from == action.stage { edge.to } else { edge.from })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host died during an update. The error named that host last, and began with the stages that
    /// had applied the update, in Rust's list syntax. It also claimed that stages elsewhere had not
    /// applied it.
    #[test]
    fn regression_a_torn_update_names_its_cause_first() {
        let stages = |stages: &[u32]| stages.iter().copied().map(StageId).collect();
        let torn = |applied: &[u32], begun: &[u32]| StepError::<std::convert::Infallible>::Torn {
            applied: stages(applied),
            begun: stages(begun),
            cause: "rank 1: no sign of life for 3.0s".to_owned(),
        };
        assert_eq!(
            torn(&[0], &[]).to_string(),
            "rank 1: no sign of life for 3.0s; the update was applied by stage 0, perhaps not by \
            all others: \
             the parameters may be of two steps, restore a checkpoint (in a program, \
             accept_torn_update uses what is there)"
        );
        let told = torn(&[2, 0], &[1]).to_string();
        let words = "; the update was applied by stages 0, 2, begun by stage 1 and not finished \
            there, perhaps";
        assert!(told.contains(words), "{told}");
        assert!(torn(&[], &[1]).to_string().contains("; the update was begun by stage 1 and not"));
    }
}
