//! Lower bounds on a step, whatever its timing. Dynamic programming bounds the best cut of the
//! remaining layers. There are two bounds for each stage k:
//!
//! - `work`: what must run before the stage, all its own work, and what must run after it.
//! - `turn`: the same, with the wait for the stage's first gradient. The last stage turns when it
//!   runs its first backward. Before that, it runs some forwards, which stage k must run earlier.
//!   The last of these micro-batches travels down to the last stage, and the first gradient travels
//!   up to stage k. Work of stage k that may run during this trip does not count; "the rest" is
//!   what must follow the gradient.
//!
//! ```text
//! work  | F of the first micro-batch on stages 0..k | all work of k
//!       | B of the last one on stages k-1..0 | norm, update
//!
//! turn  | the same start | F of k until the last stage turns
//!       | F down and B up through stages k+1.. | the rest of k | the same end
//! ```

use super::stages::Figures;
use crate::{cost::ModelCosts, simulate::LinkCost};

/// The bound if no plan exists.
pub(super) const NONE: u64 = u64::MAX;

/// Adds two times. The sum is less than [`NONE`], unless a part is `NONE`.
pub(super) fn plus(a: u64, b: u64) -> u64 {
    if a == NONE || b == NONE { NONE } else { a.saturating_add(b).min(NONE - 1) }
}

/// By layer, the times of messages over a cut before that layer.
#[derive(Debug, Default)]
pub(super) struct Cuts {
    forward: Vec<u64>,
    /// `None` if the bounds do not follow the gradient: nothing before this layer, or before a
    /// later one, is trained.
    backward: Vec<Option<u64>>,
    /// Whether gradients travel from every stage down to stage 0.
    whole: bool,
}

impl Cuts {
    /// `links` has, for each layer, the link of a cut before it.
    pub fn new(model: &ModelCosts, links: &[LinkCost], trains: bool) -> Self {
        let mut trained = trains;
        let mut backward = vec![None; links.len()];
        for (layer, link) in links.iter().enumerate().skip(1).rev() {
            trained &= model.trained_before.get(layer).copied().unwrap_or(false);
            backward[layer] = trained.then(|| plus(link.latency.0, link.backward.0));
        }
        let forward = links.iter().map(|link| plus(link.latency.0, link.forward.0)).collect();
        Self { forward, backward, whole: trained }
    }
}

/// Lower bounds over all cuts, for each stage and each layer that it may start with. They cover the
/// stage and everything after it.
#[derive(Debug)]
pub(super) struct Tables {
    layers: usize,
    /// A lower bound on all plans.
    pub root: u64,
    /// From the stage's start to the end of its last backward.
    chain: Vec<u64>,
    /// From the stage's start to the end of any update.
    ends: Vec<u64>,
    /// Down from the stage to the last one and back up.
    around: Vec<u64>,
}

impl Tables {
    /// Builds the tables. `cell` returns the figures of a stage of layers `start..end`, if it is
    /// possible.
    pub fn new(
        stages: usize,
        layers: usize,
        cuts: &Cuts,
        mut cell: impl FnMut(usize, usize, usize) -> Cell,
    ) -> Self {
        let entries = (stages + 1) * (layers + 1);
        let mut tables = Self {
            layers,
            root: NONE,
            chain: vec![NONE; entries],
            ends: vec![NONE; entries],
            around: vec![NONE; entries],
        };
        for stage in (0..stages).rev() {
            let rest = stages - 1 - stage;
            let starts = if stage == 0 { 0..1 } else { stage..layers - rest };
            for start in starts {
                let first_end = if rest == 0 { layers } else { start + 1 };
                for end in first_end..=layers - rest {
                    let figures = match cell(stage, start, end) {
                        Cell::Figures(figures) => figures,
                        Cell::None => continue,
                        Cell::NoLonger => break,
                    };
                    let next = (rest > 0).then_some(end);
                    tables.add(stage, start, next, figures, cuts);
                    if stage == 0 {
                        let prefix = Prefix::default().with(&figures, next, cuts);
                        tables.root = tables.root.min(tables.bound(&prefix, end));
                    }
                }
            }
        }
        tables
    }

    fn index(&self, stage: usize, start: usize) -> usize {
        stage * (self.layers + 1) + start
    }

    fn add(
        &mut self,
        stage: usize,
        start: usize,
        end: Option<usize>,
        figures: Figures,
        cuts: &Cuts,
    ) {
        let mut chain = figures.work;
        let mut ends = plus(figures.work, plus(figures.norm, figures.update));
        let mut around = figures.around;
        if let Some(end) = end {
            let next = self.index(stage + 1, end);
            let down = plus(figures.first, cuts.forward[end]);
            let up = cuts.backward[end].map(|link| plus(link, figures.last));
            chain = chain.max(plus(plus(down, up.unwrap_or(0)), self.chain[next]));
            ends = ends.max(plus(down, self.ends[next]));
            if let Some(link) = cuts.backward[end] {
                let messages = plus(link, cuts.forward[end]);
                let beyond = plus(messages, self.around[next]);
                around = plus(around, beyond);
                chain = chain.max(plus(figures.turn, beyond));
            } else if self.around[next] == NONE {
                around = NONE;
            }
        }
        let at = self.index(stage, start);
        self.chain[at] = self.chain[at].min(chain);
        self.ends[at] = self.ends[at].min(ends);
        self.around[at] = self.around[at].min(around);
    }

    /// The bound of a whole plan that starts with `prefix`. The last stage of `prefix` ends before
    /// layer `end`.
    pub fn bound(&self, prefix: &Prefix, end: usize) -> u64 {
        if prefix.stages * (self.layers + 1) >= self.chain.len() - (self.layers + 1) {
            return prefix.total();
        }
        let at = self.index(prefix.stages, end);
        let chain = plus(plus(prefix.head, prefix.tail), self.chain[at]);
        let turn = prefix.turn.map_or(0, |turn| plus(turn, self.around[at]));
        let chain = plus(prefix.floor.max(turn).max(chain), prefix.end);
        chain.max(prefix.ends).max(plus(prefix.head, self.ends[at]))
    }
}

/// A candidate stage of a table.
pub(super) enum Cell {
    /// The figures of the stage.
    Figures(Figures),
    /// The stage is impossible.
    None,
    /// Neither this stage nor a longer one is possible.
    NoLonger,
}

/// The bounds of a plan's first stages.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Prefix {
    pub stages: usize,
    /// The time until the next stage can start.
    head: u64,
    /// The time from the next stage's last backward to stage 0's.
    tail: u64,
    /// The bound of stages that later stages cannot change.
    floor: u64,
    /// The bound of stages that wait for the first gradient, without what later stages add.
    turn: Option<u64>,
    /// The bound of stages with their own norm and update.
    ends: u64,
    /// The time after stage 0's last backward.
    end: u64,
}

impl Prefix {
    /// Adds a stage. `end` is the layer after its last one; `None` for the last stage.
    pub fn with(&self, figures: &Figures, end: Option<usize>, cuts: &Cuts) -> Self {
        let own = plus(self.head, self.tail);
        let around = self.turn.map(|turn| plus(turn, figures.around));
        let floor = self.floor.max(plus(own, figures.work));
        let finish = plus(figures.norm, figures.update);
        let ends = self.ends.max(plus(plus(self.head, figures.work), finish));
        let first = if cuts.whole { finish } else { figures.update };
        let next = Self {
            stages: self.stages + 1,
            floor: floor.max(around.unwrap_or(0)),
            ends,
            end: if self.stages == 0 { first } else { self.end },
            ..*self
        };
        let Some(end) = end else { return next };
        let head = plus(self.head, plus(figures.first, cuts.forward[end]));
        let Some(link) = cuts.backward[end] else {
            return Self { head, tail: 0, turn: None, ..next };
        };
        let turn = around.unwrap_or(0).max(plus(own, figures.turn));
        let turn = plus(turn, plus(link, cuts.forward[end]));
        Self { head, tail: plus(self.tail, plus(figures.last, link)), turn: Some(turn), ..next }
    }

    /// The bound of a whole plan.
    pub fn total(&self) -> u64 {
        plus(self.floor, self.end).max(self.ends)
    }
}
