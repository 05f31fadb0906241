//! A worker's mailbox: values received but not yet used, or computed but not yet sent.

use gpipe_core::{Direction, MicroBatch, StageId, Transfer};

use crate::stage::{OnEdges, Verdict, Vote};

/// One worker's values in a step. The edges of its stages bound its size, because each compute
/// action takes out the values that it uses.
pub(crate) struct Mailbox<V> {
    arrived: Vec<(StageId, Transfer, V)>,
    leaving: Vec<(StageId, Transfer, V)>,
    /// Parts of the gradient norm, each with its stage: the parts of this device's stages and, on
    /// stage 0's device, those received.
    votes: Vec<(StageId, Vote)>,
    /// The decision, for each stage of this device that has received it.
    verdicts: Vec<(StageId, Verdict)>,
}

impl<V> Mailbox<V> {
    pub(crate) fn new() -> Self {
        Self { arrived: Vec::new(), leaving: Vec::new(), votes: Vec::new(), verdicts: Vec::new() }
    }

    /// Stores a value that arrived for `stage`.
    pub(crate) fn arrive(&mut self, stage: StageId, transfer: Transfer, value: V) {
        self.arrived.push((stage, transfer, value));
    }

    /// Takes the values that arrived for a compute action of `stage`, in edge order.
    pub(crate) fn take_arrived(
        &mut self,
        stage: StageId,
        direction: Direction,
        micro_batch: Option<MicroBatch>,
    ) -> OnEdges<V> {
        let wanted = |to: StageId, transfer: &Transfer| {
            to == stage && transfer.direction == direction && transfer.micro_batch == micro_batch
        };
        let mut values: OnEdges<V> = self
            .arrived
            .extract_if(.., |(to, transfer, _)| wanted(*to, transfer))
            .map(|(_, transfer, value)| (transfer.edge, value))
            .collect();
        values.sort_by_key(|(edge, _)| *edge);
        values
    }

    /// Stores a value that `stage` produced for a send.
    pub(crate) fn leave(&mut self, stage: StageId, transfer: Transfer, value: V) {
        self.leaving.push((stage, transfer, value));
    }

    /// Takes the value that a compute action of `stage` left for a send.
    pub(crate) fn take_leaving(&mut self, stage: StageId, transfer: Transfer) -> Option<V> {
        let at =
            self.leaving.iter().position(|(from, left, _)| *from == stage && *left == transfer)?;
        Some(self.leaving.swap_remove(at).2)
    }

    /// Stores stage `of`'s part of the norm, replacing an earlier copy: on a device with several
    /// stages, the same part may be both computed and received.
    pub(crate) fn vote(&mut self, of: StageId, vote: Vote) {
        self.votes.retain(|(stage, _)| *stage != of);
        self.votes.push((of, vote));
    }

    /// Stage `of`'s part of the norm, for sending.
    pub(crate) fn vote_of(&self, of: StageId) -> Option<Vote> {
        self.votes.iter().find(|(stage, _)| *stage == of).map(|(_, vote)| vote.clone())
    }

    /// All parts of the norm known on this device, in stage order.
    pub(crate) fn all_votes(&mut self) -> Vec<Vote> {
        self.votes.sort_by_key(|(stage, _)| *stage);
        self.votes.iter().map(|(_, vote)| vote.clone()).collect()
    }

    /// Stores the decision that `stage` made or received.
    pub(crate) fn decided(&mut self, stage: StageId, verdict: Verdict) {
        self.verdicts.push((stage, verdict));
    }

    /// The decision, if `stage` has it.
    pub(crate) fn verdict_of(&self, stage: StageId) -> Option<Verdict> {
        self.verdicts.iter().find(|(of, _)| *of == stage).map(|(_, verdict)| *verdict)
    }
}
