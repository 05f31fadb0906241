//! An action: one thing that one stage does. `2F0` is the printed form of stage 2, forward,
//! micro-batch 0.
//!
//! | text | meaning |
//! |---|---|
//! | `2F0` `2R0` `2B0` | forward, re-materialize, full backward of micro-batch 0 |
//! | `2I0` `2W0` | the halves of a split backward: input gradients, then weight gradients |
//! | `2SEND_F0@1` `3RECV_F0@1` | the value of micro-batch 0 over edge 1, in the edge's direction |
//! | `3SEND_B0@1` `2RECV_B0@1` | the gradient of that value, against the edge's direction |
//! | `2SEND_F@5` `0RECV_F@5` `0SEND_B@5` `2RECV_B@5` | the same, once per step: tied gradients and their sum, norms and the verdict |
//! | `0REDUCE` | sum the gradients of tied weights, in layer order |
//! | `0NORM` | the stage's part of the global gradient norm; makes the update ready |
//! | `0DECIDE` | the global norm, and whether every stage may update |
//! | `0UPDATE` | apply the update, or leave everything as it was |
//!
//! ```
//! use gpipe_core::{Action, Op, MicroBatch, StageId};
//! let action: Action = "2F0".parse().unwrap();
//! assert_eq!(action, Action { stage: StageId(2), op: Op::Forward(MicroBatch(0)) });
//! assert_eq!(action.to_string(), "2F0");
//! ```

use std::{fmt, str::FromStr};

use crate::ids::{EdgeId, MicroBatch, StageId};

/// For each device, an ordered list of actions.
pub type ActionLists = Vec<Vec<Action>>;

/// What a stage does at one position of its device's list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// The stage that acts.
    pub stage: StageId,
    /// What it does.
    pub op: Op,
}

/// The kinds of action.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Op {
    /// Compute the stage's outputs from its inputs.
    Forward(MicroBatch),
    /// Recompute the activations that the forward discarded.
    Rematerialize(MicroBatch),
    /// Compute input and parameter gradients; releases the activations.
    Backward(MicroBatch),
    /// The first half of a split backward: compute the input gradients and keep what the weight
    /// gradients need.
    BackwardInput(MicroBatch),
    /// The second half: compute the weight gradients and release what the first half kept.
    BackwardWeight(MicroBatch),
    /// Put a message on a link.
    Send(Transfer),
    /// Take a message from a link.
    Receive(Transfer),
    /// Sum the gradients of the tied weights that this stage owns, in layer order.
    Reduce,
    /// Compute this stage's part of the global norm and make the update ready.
    Norm,
    /// Compute the global norm and decide for all stages.
    Decide,
    /// Apply the update, or drop it, as decided.
    Update,
}

/// A message on an edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Transfer {
    /// Whether the message goes along the edge or against it.
    pub direction: Direction,
    /// The micro-batch; `None` for a message that moves once per step.
    pub micro_batch: Option<MicroBatch>,
    /// The edge that carries the message.
    pub edge: EdgeId,
}

/// The two directions of an edge.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Direction {
    /// From the edge's source to its target: values, tied gradients, parts of the norm.
    Forward,
    /// From the target back to the source: gradients, the sum of tied gradients, the verdict.
    Backward,
}

impl Op {
    /// Whether this is a send or a receive.
    pub fn communicates(self) -> bool {
        matches!(self, Op::Send(_) | Op::Receive(_))
    }

    /// The message that this action sends or receives.
    pub fn transfer(self) -> Option<Transfer> {
        match self {
            Op::Send(transfer) | Op::Receive(transfer) => Some(transfer),
            _ => None,
        }
    }

    /// The micro-batch that a compute action works on.
    pub fn computes(self) -> Option<MicroBatch> {
        match self {
            Op::Forward(m)
            | Op::Rematerialize(m)
            | Op::Backward(m)
            | Op::BackwardInput(m)
            | Op::BackwardWeight(m) => Some(m),
            _ => None,
        }
    }

    /// The micro-batch whose input gradients this action computes. They can be sent after it.
    pub fn goes_back(self) -> Option<MicroBatch> {
        match self {
            Op::Backward(m) | Op::BackwardInput(m) => Some(m),
            _ => None,
        }
    }

    /// The micro-batch whose weight gradients this action completes. The stage holds nothing for
    /// that micro-batch afterwards.
    pub fn completes(self) -> Option<MicroBatch> {
        match self {
            Op::Backward(m) | Op::BackwardWeight(m) => Some(m),
            _ => None,
        }
    }
}

impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let direction = match self.direction {
            Direction::Forward => "F",
            Direction::Backward => "B",
        };
        match self.micro_batch {
            Some(m) => write!(f, "{direction}{m}@{}", self.edge),
            None => write!(f, "{direction}@{}", self.edge),
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.stage)?;
        match self.op {
            Op::Forward(m) => write!(f, "F{m}"),
            Op::Rematerialize(m) => write!(f, "R{m}"),
            Op::Backward(m) => write!(f, "B{m}"),
            Op::BackwardInput(m) => write!(f, "I{m}"),
            Op::BackwardWeight(m) => write!(f, "W{m}"),
            Op::Send(transfer) => write!(f, "SEND_{transfer}"),
            Op::Receive(transfer) => write!(f, "RECV_{transfer}"),
            Op::Reduce => f.write_str("REDUCE"),
            Op::Norm => f.write_str("NORM"),
            Op::Decide => f.write_str("DECIDE"),
            Op::Update => f.write_str("UPDATE"),
        }
    }
}

/// A text that is not an action.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{text}' is not an action: {reason}; write it like 2F0, 2R0, 2B0, 2I0, 2W0, 2SEND_F0@1, \
    2RECV_B@1 or 0NORM"
)]
pub struct ParseActionError {
    text: String,
    reason: &'static str,
}

impl ParseActionError {
    /// What is wrong with the text.
    pub fn reason(&self) -> &'static str {
        self.reason
    }
}

impl FromStr for Action {
    type Err = ParseActionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).map_err(|reason| ParseActionError { text: text.to_owned(), reason })
    }
}

fn parse(text: &str) -> Result<Action, &'static str> {
    let end = text.find(|c: char| !c.is_ascii_digit()).ok_or("it has no operation")?;
    let (stage, rest) = text.split_at(end);
    let stage = StageId(number(stage, "it does not start with a stage number")?);
    let micro = |text| number(text, "its micro-batch is not a number").map(MicroBatch);
    let op = match rest {
        "REDUCE" => Op::Reduce,
        "NORM" => Op::Norm,
        "DECIDE" => Op::Decide,
        "UPDATE" => Op::Update,
        _ => {
            if let Some(transfer) = rest.strip_prefix("SEND_") {
                Op::Send(parse_transfer(transfer)?)
            } else if let Some(transfer) = rest.strip_prefix("RECV_") {
                Op::Receive(parse_transfer(transfer)?)
            } else if let Some(m) = rest.strip_prefix('F') {
                Op::Forward(micro(m)?)
            } else if let Some(m) = rest.strip_prefix('R') {
                Op::Rematerialize(micro(m)?)
            } else if let Some(m) = rest.strip_prefix('B') {
                Op::Backward(micro(m)?)
            } else if let Some(m) = rest.strip_prefix('I') {
                Op::BackwardInput(micro(m)?)
            } else if let Some(m) = rest.strip_prefix('W') {
                Op::BackwardWeight(micro(m)?)
            } else {
                return Err("its operation is unknown");
            }
        }
    };
    Ok(Action { stage, op })
}

fn parse_transfer(text: &str) -> Result<Transfer, &'static str> {
    let (message, edge) = text.split_once('@').ok_or("its message names no edge")?;
    let edge = EdgeId(number(edge, "its edge is not a number")?);
    let (direction, micro) = if let Some(micro) = message.strip_prefix('F') {
        (Direction::Forward, micro)
    } else if let Some(micro) = message.strip_prefix('B') {
        (Direction::Backward, micro)
    } else {
        return Err("its message is neither F nor B");
    };
    let micro_batch = match micro {
        "" => None,
        _ => Some(MicroBatch(number(micro, "its micro-batch is not a number")?)),
    };
    Ok(Transfer { direction, micro_batch, edge })
}

/// Parses digits without a leading zero, so that a parsed action prints as the same text.
fn number(text: &str, reason: &'static str) -> Result<u32, &'static str> {
    let canonical = text == "0" || !text.starts_with('0');
    if !canonical || !text.bytes().all(|b| b.is_ascii_digit()) {
        return Err(reason);
    }
    text.parse().map_err(|_| reason)
}
