//! What has to have happened at the end of the lists.

use super::{Checker, Invalid, Progress};
use crate::{action::Direction, ids::StageId, lower::Phase};

impl Checker<'_> {
    pub(super) fn check_complete(&self) -> Result<(), Invalid> {
        for (stage, state) in self.stages.iter().enumerate() {
            let stage = StageId::from_index(stage);
            let missing = |reason| Err(Invalid::Missing { stage, reason });
            let part = self.program.part;
            let last = match part.has(Phase::Forward) && !part.has(Phase::Backward) {
                true => Progress::Forwarded,
                false => Progress::Done,
            };
            let undone = state.progress.iter().position(|&progress| progress != last);
            if let Some(m) = undone {
                let kind = match state.progress[m] {
                    Progress::Untouched => 'F',
                    Progress::Split => 'W',
                    _ => 'B',
                };
                return missing(format!("{stage}{kind}{m} is missing"));
            }
            if state.device.is_none() {
                return missing("it is on no device".into());
            }
            if part.has(Phase::Reduce) && !state.reduced {
                return missing(format!("{stage}REDUCE is missing"));
            }
            if part.has(Phase::Update) && !state.updated {
                return missing(format!("{stage}UPDATE is missing"));
            }
        }
        self.check_matched()
    }

    /// Checks that every message an edge must carry was sent and received, in one order.
    fn check_matched(&self) -> Result<(), Invalid> {
        let part = self.program.part;
        for (id, edge) in self.program.topology.edges_where(|_| true) {
            for direction in [Direction::Forward, Direction::Backward] {
                let carries = direction == Direction::Forward || edge.kind.goes_back();
                let here = part.has(edge.kind.phase(direction)) && !self.program.hands_over(id);
                if !(here && carries) {
                    continue;
                }
                let (sender, receiver) = if direction == Direction::Forward {
                    (edge.from, edge.to)
                } else {
                    (edge.to, edge.from)
                };
                let empty: &[_] = &[];
                let sent = self.sent.get(&(id, direction)).map_or(empty, |passed| &passed.order);
                let received =
                    self.received.get(&(id, direction)).map_or(empty, |passed| &passed.order);
                let expected =
                    if edge.kind.per_micro_batch() { self.program.micro_batches } else { 1 };
                let letter = if direction == Direction::Forward { 'F' } else { 'B' };
                for (list, stage, verb) in [(sent, sender, "SEND"), (received, receiver, "RECV")] {
                    if list.len() != expected {
                        let reason = format!(
                            "edge {id} carries {expected} messages {verb}_{letter}..@{id} per \
                            step, there are {}",
                            list.len()
                        );
                        return Err(Invalid::Missing { stage, reason });
                    }
                }
                if sent != received {
                    let reason = format!(
                        "edge {id} is a queue, but messages {letter} are received in another \
                        order than they are sent"
                    );
                    return Err(Invalid::Missing { stage: receiver, reason });
                }
            }
        }
        Ok(())
    }
}
