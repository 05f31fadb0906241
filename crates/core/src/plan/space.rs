//! The plans of one K, M and schedule: the times of a stage of any layers under each policy that
//! fits, and the step of a whole plan. Memory is computed in `memory_bounds`.

use std::{collections::HashMap, ops::Range, rc::Rc};

use super::{
    Plan, PlanDevice, PlanError,
    bound::{Cell as BoundCell, Cuts, Prefix, Tables},
    costs_of,
    memory_bounds::Shape,
    stages::{Compared, Figures, Lists, Patterns, segments},
    sums::Sums,
};
use crate::{
    cost::{LayerCost, ModelCosts},
    lower::{Edge, Program, lower},
    memory::{EdgeBytes, Moments, Order, StageBytes},
    remat::{Remat, RematPolicies},
    schedule::Schedule,
    simulate::{Costs, StageCost, simulate, simulate_with_room},
    topology::{of_cut, ranges},
};

/// What all plans of a space have in common.
#[derive(Debug, Clone, Copy)]
pub(super) struct Frame<'a> {
    pub model: &'a ModelCosts,
    /// One for each stage.
    pub devices: &'a [PlanDevice],
    pub samples: usize,
    pub micro_batches: usize,
    pub schedule: &'a Schedule,
    /// The only allowed cut, if it is fixed.
    pub balance: Option<&'a [usize]>,
    /// The only allowed policies, if they are fixed.
    pub remat: Option<&'a RematPolicies>,
}

/// A policy that a stage may have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    pub policy: Remat,
    pub figures: Figures,
}

/// The choices for a stage of certain layers.
#[derive(Debug, Default)]
pub(super) struct Cell {
    /// The policies that fit and are not certainly slower than another, the likely fastest first.
    pub choices: Vec<Choice>,
    /// Whether a policy was left out that is certainly slower only if no send waits for room.
    pub with_room: bool,
}

/// The result of simulating a plan.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    pub step: u64,
    /// The step if links could hold any number of messages.
    pub unblocked: u64,
}

/// A program, shared by all cuts that make the same edges.
pub(super) struct Lowered {
    pub program: Program,
    pub capacity: Option<usize>,
    pub moments: Option<Rc<Vec<Moments>>>,
}

/// The number of programs to cache.
const PROGRAMS_MAX: usize = 16;

pub(super) struct Space<'a> {
    pub frame: Frame<'a>,
    pub lists: Lists,
    pub cuts: Cuts,
    /// The number of actions simulated so far.
    pub spent: u64,
    /// Whether a stage's peak is estimated as that of a plain chain. Otherwise it is a lower bound,
    /// if the two differ.
    pub(super) estimates: bool,
    /// Whether the costs of `selective` are known.
    selective: bool,
    pub(super) shape: Shape,
    pub(super) costs: Vec<LayerCost>,
    pub(super) sums: Vec<Sums>,
    patterns: Vec<Option<Rc<Patterns>>>,
    pub(super) order: Option<Rc<Order>>,
    pub(super) moments: HashMap<(usize, Remat), Rc<(Moments, Moments)>>,
    pub(super) bytes: HashMap<(usize, usize, Remat), StageBytes>,
    cells: HashMap<(usize, usize, usize), Rc<Cell>>,
    programs: HashMap<(Vec<Edge>, Vec<Remat>), Lowered>,
    pub(super) messages: Vec<EdgeBytes>,
}

impl<'a> Space<'a> {
    pub fn new(frame: Frame<'a>) -> Self {
        let Frame { model, devices, samples, micro_batches, schedule, .. } = frame;
        let lists = Lists::new(schedule, devices.len(), micro_batches, samples);
        let (larger, smaller) = (samples.div_ceil(micro_batches), samples / micro_batches);
        let costs = model.at(larger, schedule);
        let layers = model.layers.len();
        let edges: Vec<EdgeBytes> = costs[..layers].iter().map(message).collect();
        let mut sums = vec![Sums::new(model, &costs)];
        if smaller < larger {
            sums.push(Sums::new(model, &model.at(smaller, schedule)));
        }
        Self {
            frame,
            cuts: Cuts::new(model, &model.link_costs(&edges), lists.trains),
            spent: 0,
            estimates: true,
            selective: model.has_selective(larger, schedule),
            shape: Shape::of(model),
            sums,
            costs,
            patterns: vec![None; devices.len()],
            order: None,
            moments: HashMap::new(),
            bytes: HashMap::new(),
            cells: HashMap::new(),
            programs: HashMap::new(),
            messages: vec![EdgeBytes::default(); devices.len()],
            lists,
        }
    }

    pub fn stages(&self) -> usize {
        self.frame.devices.len()
    }

    pub fn layers(&self) -> usize {
        self.frame.model.layers.len()
    }

    /// Whether a stage may have these layers.
    pub fn allows(&self, stage: usize, start: usize, end: usize) -> bool {
        self.frame.balance.is_none_or(|balance| {
            balance[..stage].iter().sum::<usize>() == start && start + balance[stage] == end
        })
    }

    /// Whether a stage's memory is independent of other cuts.
    pub fn is_plain(&self) -> bool {
        self.shape == Shape::Plain
    }

    pub fn has_caps(&self) -> bool {
        self.frame.devices.iter().any(|device| device.memory.is_some())
    }

    /// From now on, takes a stage's peak as that of a plain chain (`estimates`), or as a lower
    /// bound.
    pub fn estimate(&mut self, estimates: bool) {
        if self.estimates != estimates && !self.is_plain() {
            self.cells.clear();
        }
        self.estimates = estimates || self.is_plain();
    }

    /// The costs of a stage, by size of micro-batches.
    fn stage_costs(&self, stage: usize, range: &Range<usize>, policy: Remat) -> [StageCost; 2] {
        let speed = self.frame.devices[stage].speed;
        let larger = self.sums[0].stage_cost(range, policy, speed);
        match self.sums.get(1) {
            Some(sums) => [larger, sums.stage_cost(range, policy, speed)],
            None => [larger; 2],
        }
    }

    /// Lower bounds on a stage's figures under any policy, ignoring memory.
    pub fn loose(&self, stage: usize, start: usize, end: usize) -> Figures {
        let mut costs = self.stage_costs(stage, &(start..end), Remat::Always);
        if self.selective {
            let selective = self.stage_costs(stage, &(start..end), Remat::Selective);
            for (cost, own) in costs.iter_mut().zip(selective) {
                cost.rematerialize = cost.rematerialize.min(own.rematerialize);
            }
        }
        self.lists.loose(&costs)
    }

    /// Every policy to try for a stage of `layers` layers, with the index of its pattern.
    pub fn policies(&mut self, stage: usize, layers: usize) -> Vec<(Remat, usize)> {
        let patterns = &self.patterns(stage).all;
        let selective = self.selective;
        if self.frame.remat.is_some() {
            return vec![(patterns[0].policy, 0)];
        }
        let last = patterns.len() - 1;
        let whole = patterns.iter().enumerate().map(|(index, pattern)| (pattern.policy, index));
        let recomputes = patterns[last].policy != Remat::Never;
        let parts = recomputes.then(|| segments(layers)).into_iter().flatten();
        // `selective` and `offload` apply to the same micro-batches as `unless-adjacent`.
        let adjacent = self.lists.pattern(stage, Remat::UnlessAdjacent);
        let same = patterns.iter().position(|pattern| pattern.recomputes_as(&adjacent));
        let offloads = same.filter(|_| self.frame.model.offload.is_some() && adjacent.recomputes());
        let offload = offloads.map(|index| (Remat::Offload, index));
        let same = same.filter(|_| selective && adjacent.recomputes());
        let selective = same.map(|index| (Remat::Selective, index));
        whole.chain(offload).chain(selective).chain(parts.map(|policy| (policy, last))).collect()
    }

    fn patterns(&mut self, stage: usize) -> Rc<Patterns> {
        if let Some(patterns) = &self.patterns[stage] {
            return patterns.clone();
        }
        let patterns = match self.frame.remat {
            Some(remat) => vec![self.lists.pattern(stage, remat.of(stage))],
            None => self.lists.patterns(stage),
        };
        let patterns = Rc::new(Patterns::new(patterns, &self.lists));
        self.patterns[stage].insert(patterns).clone()
    }

    /// The choices for a stage of layers `start..end`.
    pub fn cell(&mut self, stage: usize, start: usize, end: usize) -> Result<Rc<Cell>, PlanError> {
        if let Some(cell) = self.cells.get(&(stage, start, end)) {
            return Ok(cell.clone());
        }
        let cell = Rc::new(self.make_cell(stage, start..end)?);
        self.cells.insert((stage, start, end), cell.clone());
        Ok(cell)
    }

    fn make_cell(&mut self, stage: usize, range: Range<usize>) -> Result<Cell, PlanError> {
        let mut cell = Cell::default();
        let cap = self.frame.devices[stage].memory;
        if cap.is_some_and(|cap| self.sums[0].states(&range) > cap) {
            return Ok(cell);
        }
        let patterns = self.patterns(stage);
        let mut taken: Vec<(usize, [StageCost; 2])> = Vec::new();
        for (policy, pattern) in self.policies(stage, range.len()) {
            let costs = self.stage_costs(stage, &range, policy);
            let own = (pattern, &costs);
            let compared =
                taken.iter().map(|(other, costs)| patterns.compare((*other, costs), own));
            match compared.max().unwrap_or(Compared::Open) {
                Compared::Faster => continue,
                // Whether it would fit is not checked.
                Compared::FasterWithRoom => cell.with_room = true,
                Compared::Open => {
                    if self.may_fit(stage, &range, policy)? {
                        let figures = self.lists.figures(&patterns.all[pattern], &costs);
                        cell.choices.push(Choice { policy, figures });
                        // Only a policy that fits whatever the other cuts are may rule out others.
                        if self.certainly_fits(stage, &range, policy)? {
                            taken.push((pattern, costs));
                        }
                    }
                }
            }
        }
        Ok(cell)
    }

    /// The plan with this cut and a policy for each stage.
    pub fn plan(&self, balance: Vec<usize>, policies: Vec<Remat>) -> Plan {
        let Frame { micro_batches, schedule, .. } = self.frame;
        Plan {
            balance,
            micro_batches,
            schedule: schedule.clone(),
            remat: RematPolicies::by_stage(policies),
        }
    }

    /// The figures of a stage under `policy`.
    fn figures(&mut self, stage: usize, range: &Range<usize>, policy: Remat) -> Figures {
        let patterns = self.patterns(stage);
        let costs = self.stage_costs(stage, range, policy);
        match patterns.all.iter().find(|pattern| pattern.policy == whole(policy)) {
            Some(pattern) => self.lists.figures(pattern, &costs),
            None => self.lists.figures(&self.lists.pattern(stage, policy), &costs),
        }
    }

    /// A lower bound on a plan's step.
    pub fn bound_of(&mut self, plan: &Plan) -> u64 {
        let mut prefix = Prefix::default();
        for (stage, range) in ranges(&plan.balance).into_iter().enumerate() {
            let figures = self.figures(stage, &range, plan.remat.of(stage));
            let end = (stage + 1 < self.stages()).then_some(range.end);
            prefix = prefix.with(&figures, end, &self.cuts);
        }
        prefix.total()
    }

    /// Simulates a plan.
    pub fn run(&mut self, plan: &Plan) -> Result<Run, PlanError> {
        self.lowered(plan, |lowered, costs, _| {
            let program = &lowered.program;
            let (capacity, timeline) = match lowered.capacity {
                Some(capacity) => (capacity, simulate(program, costs, capacity)?),
                None => simulate_with_room(program, costs)?,
            };
            lowered.capacity = Some(capacity);
            let mut timed = timeline.devices.iter().flatten();
            let waits = timed.any(|timed| {
                matches!(timed.action.op, crate::Op::Send(_)) && timed.end > timed.start
            });
            let step = timeline.makespan.0;
            let unblocked = match waits {
                true => simulate(program, costs, usize::MAX)?.makespan.0,
                false => step,
            };
            Ok((Run { step, unblocked }, if waits { 2 } else { 1 }))
        })
    }

    /// Calls `use_it` with a plan's program. `use_it` also returns how often it went through the
    /// program.
    pub(super) fn lowered<T>(
        &mut self,
        plan: &Plan,
        use_it: impl FnOnce(&mut Lowered, &Costs, &[EdgeBytes]) -> Result<(T, u64), PlanError>,
    ) -> Result<T, PlanError> {
        let Frame { model, devices, samples, .. } = self.frame;
        let ranges = ranges(&plan.balance);
        let (skips, ties) = model.ends();
        let (topology, purposes) = of_cut(&ranges, model.across(&skips, &ties));
        let policies = (0..ranges.len()).map(|stage| whole(plan.remat.of(stage))).collect();
        let key = (topology.edges.clone(), policies);
        if !self.programs.contains_key(&key) {
            let compute = plan.remat.apply(&self.lists.lists);
            let program = lower(&compute, &topology, plan.micro_batches)?;
            if self.programs.len() >= PROGRAMS_MAX {
                self.programs.clear();
            }
            let lowered = Lowered { program, capacity: None, moments: None };
            self.programs.insert(key.clone(), lowered);
        }
        let at = |samples| model.at(samples, &plan.schedule);
        let (costs, edges) = costs_of(model, devices, (samples, &at), plan, &ranges, &purposes);
        let Some(lowered) = self.programs.get_mut(&key) else {
            return Err(PlanError::Setting("a program was lost".into()));
        };
        let actions = lowered.program.devices.iter().map(|list| list.len() as u64).sum::<u64>();
        let (result, times) = use_it(lowered, &costs, &edges)?;
        self.spent += actions * times;
        Ok(result)
    }

    /// Builds tables from the policies that fit, for stages whose work is at most `limit`.
    pub fn tables(&mut self, limit: u64) -> Result<Tables, PlanError> {
        let mut failed = None;
        let (stages, layers) = (self.stages(), self.layers());
        let cuts = std::mem::take(&mut self.cuts);
        let tables = Tables::new(stages, layers, &cuts, |stage, start, end| {
            if !self.allows(stage, start, end) {
                return BoundCell::None;
            }
            if failed.is_some() || self.loose(stage, start, end).work > limit {
                return BoundCell::NoLonger;
            }
            let cap = self.frame.devices[stage].memory;
            if cap.is_some_and(|cap| self.sums[0].states(&(start..end)) > cap) {
                return BoundCell::NoLonger;
            }
            match self.cell(stage, start, end) {
                Ok(cell) => {
                    let figures = cell.choices.iter().map(|choice| choice.figures);
                    figures.reduce(Figures::min).map_or(BoundCell::None, BoundCell::Figures)
                }
                Err(error) => {
                    failed = Some(error);
                    BoundCell::NoLonger
                }
            }
        });
        self.cuts = cuts;
        failed.map_or(Ok(tables), Err)
    }

    /// A lower bound on all plans of the space, ignoring caps.
    pub fn loose_bound(&self) -> u64 {
        let (stages, layers) = (self.stages(), self.layers());
        let tables = Tables::new(stages, layers, &self.cuts, |stage, start, end| {
            match self.allows(stage, start, end) {
                true => BoundCell::Figures(self.loose(stage, start, end)),
                false => BoundCell::None,
            }
        });
        tables.root
    }
}

/// The unsegmented policy that recomputes the same: `always` for segments, `unless-adjacent` for
/// `selective` and `offload`.
pub(super) fn whole(policy: Remat) -> Remat {
    match policy {
        Remat::Segments(_) => Remat::Always,
        Remat::Selective | Remat::Offload => Remat::UnlessAdjacent,
        other => other,
    }
}

/// A policy under which a stage's actions hold the same.
pub(super) fn priced_as(policy: Remat) -> Remat {
    match policy {
        Remat::Segments(_) | Remat::Selective | Remat::Offload => policy,
        _ => Remat::Never,
    }
}

/// The message that crosses a cut before a layer.
pub(super) fn message(cost: &LayerCost) -> EdgeBytes {
    EdgeBytes { forward: cost.inputs, backward: cost.input_gradients }
}
