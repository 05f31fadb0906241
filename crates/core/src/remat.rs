//! Re-materialization: which forwards discard their activations, and where they are recomputed.
//!
//! R is added here, in one pass over a schedule, so no schedule has to know about it. R stands
//! directly before B (or I). [`crate::lower`] puts the wait for the gradient between the two, so
//! that recomputation starts before the gradient arrives (Huang et al. 2019, section 2.3).

use std::{
    collections::{HashMap, HashSet},
    fmt,
    ops::Range,
    str::FromStr,
};

use crate::{
    action::{Action, Op},
    ids::{MicroBatch, StageId},
    lower::RematSet,
    schedule::ActionLists,
};

/// The re-materialization policy of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Remat {
    /// Every forward keeps only its inputs; every backward recomputes first.
    Always,
    /// Every forward keeps all its activations.
    Never,
    /// Every forward discards, unless its backward directly follows: there, discarding would save
    /// nothing.
    #[default]
    UnlessAdjacent,
    /// `Keep(N)`: like `UnlessAdjacent`, but up to N micro-batches at a time also keep their
    /// activations. A stage then holds the activations of at most N + 1 micro-batches.
    Keep(u32),
    /// Like `UnlessAdjacent`, but the outputs of matrix products and convolutions are kept and not
    /// computed again. This saves about half of the activations for a small part of the time
    /// (selective activation recomputation: Korthikanti et al. 2022, arXiv 2205.05198, section 5).
    Selective,
    /// Like `Always`, but the stage is cut into this many segments. Each segment keeps its inputs,
    /// and segments are recomputed one at a time, so the peak is one segment's activations (Chen et
    /// al. 2016, arXiv 1604.06174).
    Segments(u32),
    /// Like `UnlessAdjacent`, but nothing is computed again: what a forward would keep is moved out
    /// of the device's memory, and R moves it back. A GPU moves it to the host's memory, a CPU to a
    /// file.
    Offload,
}

/// The largest N that [`Remat::Keep`] accepts.
const NUMBER_MAX: u32 = 1 << 16;
/// The most segments of a stage.
const SEGMENTS_MAX: u32 = 1024;

impl Remat {
    /// Whether a forward discards its activations. `adjacent`: its backward follows directly.
    /// `kept`: how many other micro-batches keep their activations at that time.
    fn discards(self, adjacent: bool, kept: usize) -> bool {
        match self {
            Remat::Never => false,
            Remat::Always | Remat::Segments(_) => true,
            Remat::UnlessAdjacent | Remat::Selective | Remat::Offload => !adjacent,
            Remat::Keep(most) => !adjacent && kept >= most as usize,
        }
    }

    /// Whether activations leave the device's memory instead of being computed again.
    pub fn offloads(self) -> bool {
        self == Remat::Offload
    }

    /// The number of segments that a stage is cut into where it re-materializes.
    pub fn segments(self) -> usize {
        match self {
            Remat::Segments(segments) => segments.max(1) as usize,
            _ => 1,
        }
    }

    /// The layer ranges that a stage of `layers` layers is cut into where it re-materializes.
    pub fn segment_ranges(self, layers: usize) -> Vec<Range<usize>> {
        let segments = self.segments().min(layers.max(1));
        let bound = |segment: usize| segment * layers / segments;
        (0..segments).map(|segment| bound(segment)..bound(segment + 1)).collect()
    }
}

/// The policies of a pipeline: one for all stages, or one per stage. In text, `always` or
/// `keep:2,never`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RematPolicies(Vec<Remat>);

impl Default for RematPolicies {
    fn default() -> Self {
        Self(vec![Remat::default()])
    }
}

impl From<Remat> for RematPolicies {
    fn from(remat: Remat) -> Self {
        Self(vec![remat])
    }
}

impl RematPolicies {
    /// Builds policies with one entry per stage.
    pub fn by_stage(policies: impl Into<Vec<Remat>>) -> Self {
        let policies = policies.into();
        match policies.first() {
            Some(first) if policies.iter().all(|policy| policy == first) => Self(vec![*first]),
            Some(_) => Self(policies),
            None => Self::default(),
        }
    }

    /// The policy of a stage.
    pub fn of(&self, stage: usize) -> Remat {
        match &self.0[..] {
            [one] => *one,
            all => all.get(stage).copied().unwrap_or_default(),
        }
    }

    /// Checks that there is one policy for all stages, or one for each of `stages` stages.
    ///
    /// # Errors
    /// A message that says what does not fit, with the remedy.
    pub fn check(&self, stages: usize) -> Result<(), String> {
        match self.0.len() {
            1 => Ok(()),
            count if count == stages => Ok(()),
            count => Err(format!(
                "remat {self} has {count} policies for {stages} stages: give one for all, or one \
                per stage"
            )),
        }
    }

    /// Adds R before each B or I whose forward discards. Micro-batches that `lists` already
    /// re-materialize stay as they are.
    pub fn apply(&self, lists: &ActionLists) -> ActionLists {
        lists.iter().map(|list| self.apply_to_device(list)).collect()
    }

    fn apply_to_device(&self, list: &[Action]) -> Vec<Action> {
        let mut result = Vec::with_capacity(list.len() * 2);
        let mut discarded: HashSet<(StageId, MicroBatch)> = HashSet::new();
        let mut kept: HashMap<StageId, Vec<MicroBatch>> = HashMap::new();
        let already = RematSet::from_actions(list.iter());
        for (position, &action) in list.iter().enumerate() {
            let stage = action.stage;
            let kept = kept.entry(stage).or_default();
            match action.op {
                Op::Forward(m) => {
                    let next = list.get(position + 1).filter(|next| next.stage == stage);
                    let adjacent = next.is_some_and(|next| next.op.goes_back() == Some(m));
                    if already.contains(stage, m) {
                        // The list already contains an R for this forward.
                    } else if self.of(stage.index()).discards(adjacent, kept.len()) {
                        discarded.insert((stage, m));
                    } else {
                        kept.push(m);
                    }
                }
                Op::Backward(m) | Op::BackwardInput(m) if discarded.contains(&(stage, m)) => {
                    result.push(Action { stage, op: Op::Rematerialize(m) });
                }
                Op::Backward(m) | Op::BackwardWeight(m) => kept.retain(|other| *other != m),
                _ => {}
            }
            result.push(action);
        }
        result
    }
}

impl Remat {
    /// Like [`RematPolicies::apply`], with this policy for all stages.
    pub fn apply(self, lists: &ActionLists) -> ActionLists {
        RematPolicies::from(self).apply(lists)
    }
}

impl fmt::Display for Remat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Remat::Always => f.write_str("always"),
            Remat::Never => f.write_str("never"),
            Remat::UnlessAdjacent => f.write_str("unless-adjacent"),
            Remat::Keep(kept) => write!(f, "keep:{kept}"),
            Remat::Selective => f.write_str("selective"),
            Remat::Offload => f.write_str("offload"),
            Remat::Segments(segments) => write!(f, "segments:{segments}"),
        }
    }
}

impl fmt::Display for RematPolicies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, policy) in self.0.iter().enumerate() {
            let comma = if index > 0 { "," } else { "" };
            write!(f, "{comma}{policy}")?;
        }
        Ok(())
    }
}

/// A re-materialization policy that does not exist.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "there is no re-materialization '{0}': use always, never, unless-adjacent, selective, \
    offload, keep:N (N from 1 to {NUMBER_MAX}) or segments:N (N from 1 to {SEGMENTS_MAX})"
)]
pub struct UnknownRemat(String);

impl FromStr for Remat {
    type Err = UnknownRemat;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || UnknownRemat(text.to_owned());
        let number = |text: &str, most: u32| match text.parse() {
            Ok(number) if (1..=most).contains(&number) => Ok(number),
            _ => Err(error()),
        };
        match text.split_once(':') {
            None => match text {
                "always" => Ok(Remat::Always),
                "never" => Ok(Remat::Never),
                "unless-adjacent" => Ok(Remat::UnlessAdjacent),
                "selective" => Ok(Remat::Selective),
                "offload" => Ok(Remat::Offload),
                _ => Err(error()),
            },
            Some(("segments", text)) => Ok(Remat::Segments(number(text, SEGMENTS_MAX)?)),
            Some(("keep", text)) => Ok(Remat::Keep(number(text, NUMBER_MAX)?)),
            Some(_) => Err(error()),
        }
    }
}

impl FromStr for RematPolicies {
    type Err = UnknownRemat;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let policies: Result<Vec<Remat>, _> =
            text.split(',').map(|policy| policy.trim().parse()).collect();
        policies.map(Self)
    }
}
