//! The plans of one K, M and schedule: what a stage of any layers takes and holds under each policy, and what a whole plan takes.
//!
//! A stage's memory depends on its own layers and policy alone where stages are a chain; with long skips, ties or a frozen
//! front it also depends on the other cuts, so that a stage is looked at without its messages first, and whole plans at the end.

use std::{collections::HashMap, ops::Range, rc::Rc};

use super::{
    Plan, PlanDevice, PlanError,
    bound::{Cell as BoundCell, Cuts, Prefix, Tables},
    costs_of,
    stages::{Compared, Figures, Lists, Patterns, segments},
};
use crate::{
    cost::{LayerCost, ModelCosts},
    ids::StageId,
    lower::{Edge, Program, Topology, lower},
    memory::{EdgeBytes, Moments, Order, StageBytes, moments},
    remat::{Remat, RematPolicies},
    schedule::{ActionLists, Schedule},
    simulate::{Costs, StageCost, simulate, simulate_with_room},
    topology::{of_cut, ranges},
    units::{Bytes, Nanos},
};

/// What all plans of a space have in common.
#[derive(Debug, Clone, Copy)]
pub(super) struct Frame<'a> {
    pub model: &'a ModelCosts,
    /// One for each stage.
    pub devices: &'a [PlanDevice],
    pub samples: usize,
    pub micro_batches: usize,
    pub schedule: Schedule,
    /// The only cut, if it is given.
    pub balance: Option<&'a [usize]>,
    /// The only policies, if they are given.
    pub remat: Option<&'a RematPolicies>,
}

/// A policy that a stage may have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Choice {
    pub policy: Remat,
    pub figures: Figures,
}

/// A stage of certain layers.
#[derive(Debug, Default)]
pub(super) struct Cell {
    /// What fits and is not certainly slower than another, the likely fastest first.
    pub choices: Vec<Choice>,
    /// Whether something was left out that is slower only where no send waits for room.
    pub with_room: bool,
}

/// What a simulated plan takes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    pub step: u64,
    /// The same if links held any number of messages.
    pub unblocked: u64,
}

/// A program, for all cuts that make the same edges.
struct Lowered {
    program: Program,
    capacity: Option<usize>,
    moments: Option<Rc<Vec<Moments>>>,
}

/// How stages hang together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Shape {
    /// What a stage holds does not depend on other cuts.
    Plain,
    /// The same but for ties, which may let a stage hold less at the update.
    Tied,
    /// Long skips, or boundaries without gradients.
    Crossed,
}

impl Shape {
    fn of(model: &ModelCosts) -> Self {
        let trained = model.trained_before.iter().skip(1).all(|&trained| trained);
        match model.skips.is_empty() && trained {
            false => Shape::Crossed,
            true if model.ties.is_empty() => Shape::Plain,
            true => Shape::Tied,
        }
    }
}

/// Programs that are remembered.
const PROGRAMS_MAX: usize = 16;

pub(super) struct Space<'a> {
    pub frame: Frame<'a>,
    pub lists: Lists,
    pub cuts: Cuts,
    /// Actions that were simulated.
    pub spent: u64,
    /// Whether a stage's peak is that of a plain chain; else what it holds at least, where the two differ.
    estimates: bool,
    shape: Shape,
    costs: Vec<LayerCost>,
    sums: [Sums; 2],
    patterns: Vec<Option<Rc<Patterns>>>,
    order: Option<Rc<Order>>,
    moments: HashMap<(usize, Remat), Rc<(Moments, Moments)>>,
    bytes: HashMap<(usize, usize, usize), StageBytes>,
    cells: HashMap<(usize, usize, usize), Rc<Cell>>,
    programs: HashMap<(Vec<Edge>, Vec<Remat>), Lowered>,
    messages: Vec<EdgeBytes>,
}

impl<'a> Space<'a> {
    pub fn new(frame: Frame<'a>) -> Self {
        let Frame { model, devices, samples, micro_batches, .. } = frame;
        let lists = Lists::new(frame.schedule, devices.len(), micro_batches, samples);
        let (larger, smaller) = (samples.div_ceil(micro_batches), samples / micro_batches);
        let costs = model.at(larger);
        let layers = model.layers.len();
        let edges: Vec<EdgeBytes> = costs[..layers].iter().map(message).collect();
        Self {
            frame,
            cuts: Cuts::new(model, &model.link_costs(&edges), lists.trains),
            spent: 0,
            estimates: true,
            shape: Shape::of(model),
            sums: [Sums::new(model, &costs), Sums::new(model, &model.at(smaller))],
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

    /// Whether what a stage holds does not depend on other cuts.
    pub fn is_plain(&self) -> bool {
        self.shape == Shape::Plain
    }

    pub fn has_caps(&self) -> bool {
        self.frame.devices.iter().any(|device| device.memory.is_some())
    }

    /// Takes peaks of a plain chain for the peaks of stages from now on, or what stages hold at least.
    pub fn estimate(&mut self, estimates: bool) {
        if self.estimates != estimates && !self.is_plain() {
            self.cells.clear();
        }
        self.estimates = estimates || self.is_plain();
    }

    /// What a stage takes, by size of micro-batches.
    fn stage_costs(&self, stage: usize, range: &Range<usize>, policy: Remat) -> [StageCost; 2] {
        let speed = self.frame.devices[stage].speed;
        [0, 1].map(|size| self.sums[size].stage_cost(range, policy, speed))
    }

    /// No more than a stage takes under any policy, memory aside.
    pub fn loose(&self, stage: usize, start: usize, end: usize) -> Figures {
        self.lists.loose(&self.stage_costs(stage, &(start..end), Remat::Always))
    }

    /// Every policy that may be tried for a stage of so many layers, with its pattern.
    pub fn policies(&mut self, stage: usize, layers: usize) -> Vec<(Remat, usize)> {
        let patterns = &self.patterns(stage).all;
        if self.frame.remat.is_some() {
            return vec![(patterns[0].policy, 0)];
        }
        let last = patterns.len() - 1;
        let whole = patterns.iter().enumerate().map(|(index, pattern)| (pattern.policy, index));
        let recomputes = patterns[last].policy != Remat::Never;
        let parts = recomputes.then(|| segments(layers)).into_iter().flatten();
        whole.chain(parts.map(|policy| (policy, last))).collect()
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

    /// What a stage of layers `start..end` may be.
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
        if cap.is_some_and(|cap| self.states(&range) > cap) {
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
                // Whether it would fit is not looked at.
                Compared::FasterWithRoom => cell.with_room = true,
                Compared::Open => {
                    if self.may_fit(stage, &range, policy)? {
                        let figures = self.lists.figures(&patterns.all[pattern], &costs);
                        cell.choices.push(Choice { policy, figures });
                        // Others are left out only for what fits whatever the other cuts are.
                        if self.certainly_fits(stage, &range, policy)? {
                            taken.push((pattern, costs));
                        }
                    }
                }
            }
        }
        Ok(cell)
    }

    /// Parameters, what the optimizer keeps, and gradients: less than any plan holds there.
    pub fn states(&self, range: &Range<usize>) -> Bytes {
        self.sums[0].states[range.end] - self.sums[0].states[range.start]
    }

    fn may_fit(
        &mut self,
        stage: usize,
        range: &Range<usize>,
        policy: Remat,
    ) -> Result<bool, PlanError> {
        match self.frame.devices[stage].memory {
            Some(cap) => Ok(self.peak(stage, range, policy)? <= cap),
            None => Ok(true),
        }
    }

    fn certainly_fits(
        &mut self,
        stage: usize,
        range: &Range<usize>,
        policy: Remat,
    ) -> Result<bool, PlanError> {
        let Some(cap) = self.frame.devices[stage].memory else { return Ok(true) };
        if self.estimates {
            return Ok(true);
        }
        let most = match self.shape {
            Shape::Plain | Shape::Tied => self.peak_as(stage, range, policy, true)?,
            // As if no message ever went.
            Shape::Crossed => {
                let Frame { model, samples, micro_batches, .. } = self.frame;
                let ends = [range.start, range.end].map(|layer| message(&self.costs[layer]));
                let boundaries = ends.map(|bytes| bytes.forward + bytes.backward);
                let larger = samples.div_ceil(micro_batches) as u64;
                let skips = model.skips.iter();
                let skips = skips.filter(|s| range.contains(&s.stash) || range.contains(&s.pop));
                let skips = skips.map(|skip| Bytes(skip.bytes.0.saturating_mul(larger)));
                let once: Bytes = boundaries.into_iter().chain(skips).sum();
                self.peak(stage, range, policy)?
                    + Bytes(once.0.saturating_mul(micro_batches as u64))
            }
        };
        Ok(most <= cap)
    }

    /// Most that a stage holds; where that depends on other cuts, an estimate, or no more than that.
    pub fn peak(
        &mut self,
        stage: usize,
        range: &Range<usize>,
        policy: Remat,
    ) -> Result<Bytes, PlanError> {
        self.peak_as(stage, range, policy, self.estimates)
    }

    fn peak_as(
        &mut self,
        stage: usize,
        range: &Range<usize>,
        policy: Remat,
        estimates: bool,
    ) -> Result<Bytes, PlanError> {
        let (all, least) = &*self.moments(stage, policy)?;
        let key = (range.start, range.end, policy.segments());
        let (model, costs) = (self.frame.model, &self.costs);
        let bytes = self.bytes.entry(key);
        let larger = self.frame.samples.div_ceil(self.frame.micro_batches);
        let bytes =
            bytes.or_insert_with(|| model.stage_bytes(range.clone(), costs, larger, policy));
        // Boundary k is between stages k and k + 1.
        let last = stage + 1 == self.frame.devices.len();
        self.messages[stage] = match last {
            true => EdgeBytes::default(),
            false => message(&self.costs[range.end]),
        };
        if stage > 0 {
            self.messages[stage - 1] = message(&self.costs[range.start]);
        }
        Ok(match (estimates, self.shape) {
            (true, _) | (false, Shape::Plain) => all.peak(bytes, &self.messages),
            (false, Shape::Tied) => least.peak(bytes, &self.messages),
            (false, Shape::Crossed) => all.peak(bytes, &[]),
        })
    }

    /// All, and those without what ties may do away with.
    fn moments(
        &mut self,
        stage: usize,
        policy: Remat,
    ) -> Result<Rc<(Moments, Moments)>, PlanError> {
        let policy = whole(policy);
        if let Some(moments) = self.moments.get(&(stage, policy)) {
            return Ok(moments.clone());
        }
        let topology = Topology::chain(self.stages());
        let micro_batches = self.frame.micro_batches;
        let order = match &self.order {
            Some(order) => order.clone(),
            None => {
                let program = lower(&self.lists.lists, &topology, micro_batches)?;
                let (capacity, timeline) = simulate_with_room(&program, &Costs::default())?;
                self.spent += timeline.actions().count() as u64;
                self.order.insert(Rc::new(Order::new(&program, capacity))).clone()
            }
        };
        let mut own: ActionLists = vec![Vec::new(); self.stages()];
        own[stage] = policy.apply(&vec![self.lists.lists[stage].clone()]).swap_remove(0);
        let program = lower(&own, &topology, micro_batches)?;
        let list = &program.devices[stage];
        self.spent += list.len() as u64;
        let moments = order.moments_of(StageId::from_index(stage), list);
        let least = moments.forget_messages_at_update();
        let moments = Rc::new((moments, least));
        self.moments.insert((stage, policy), moments.clone());
        Ok(moments)
    }

    /// The plan of a cut and a policy for each stage.
    pub fn plan(&self, balance: Vec<usize>, policies: Vec<Remat>) -> Plan {
        let Frame { micro_batches, schedule, .. } = self.frame;
        Plan { balance, micro_batches, schedule, remat: RematPolicies::by_stage(policies) }
    }

    /// What a stage takes under any policy.
    fn figures(&mut self, stage: usize, range: &Range<usize>, policy: Remat) -> Figures {
        let patterns = self.patterns(stage);
        let costs = self.stage_costs(stage, range, policy);
        match patterns.all.iter().find(|pattern| pattern.policy == whole(policy)) {
            Some(pattern) => self.lists.figures(pattern, &costs),
            None => self.lists.figures(&self.lists.pattern(stage, policy), &costs),
        }
    }

    /// A plan takes no less.
    pub fn bound_of(&mut self, plan: &Plan) -> u64 {
        let mut prefix = Prefix::default();
        for (stage, range) in ranges(&plan.balance).into_iter().enumerate() {
            let figures = self.figures(stage, &range, plan.remat.of(stage));
            let end = (stage + 1 < self.stages()).then_some(range.end);
            prefix = prefix.with(&figures, end, &self.cuts);
        }
        prefix.total()
    }

    /// What a plan takes.
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

    /// Most that each stage of a plan holds.
    pub fn peaks(&mut self, plan: &Plan) -> Result<Vec<Bytes>, PlanError> {
        let costs = self.costs.clone();
        let model = self.frame.model;
        let larger = self.frame.samples.div_ceil(self.frame.micro_batches);
        self.lowered(plan, |lowered, times, edges| {
            let capacity = match lowered.capacity {
                Some(capacity) => capacity,
                None => simulate_with_room(&lowered.program, times)?.0,
            };
            lowered.capacity = Some(capacity);
            let all =
                lowered.moments.get_or_insert_with(|| Rc::new(moments(&lowered.program, capacity)));
            let ranges = ranges(&plan.balance);
            let stages = all.iter().zip(ranges).enumerate().map(|(stage, (moments, range))| {
                let policy = plan.remat.of(stage);
                moments.peak(&model.stage_bytes(range, &costs, larger, policy), edges)
            });
            Ok((stages.collect(), 1))
        })
    }

    /// Whether every stage of a plan fits.
    pub fn fits(&mut self, plan: &Plan) -> Result<bool, PlanError> {
        if !self.has_caps() {
            return Ok(true);
        }
        let peaks = match self.is_plain() {
            true => {
                let stages = ranges(&plan.balance).into_iter().enumerate();
                let peak = |(stage, range)| self.peak(stage, &range, plan.remat.of(stage));
                stages.map(peak).collect::<Result<Vec<Bytes>, _>>()?
            }
            false => self.peaks(plan)?,
        };
        let mut stages = peaks.iter().zip(self.frame.devices);
        Ok(stages.all(|(&peak, device)| device.memory.is_none_or(|cap| peak <= cap)))
    }

    /// `use_it` of a plan's program, which says how many times it went through it.
    fn lowered<T>(
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
        let (costs, edges) = costs_of(model, devices, samples, plan, &ranges, &purposes);
        let Some(lowered) = self.programs.get_mut(&key) else {
            return Err(PlanError::Setting("a program was lost".into()));
        };
        let actions = lowered.program.devices.iter().map(|list| list.len() as u64).sum::<u64>();
        let (result, times) = use_it(lowered, &costs, &edges)?;
        self.spent += actions * times;
        Ok(result)
    }

    /// Tables from the policies that fit, over stages that take no longer than `limit` in all.
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
            if cap.is_some_and(|cap| self.states(&(start..end)) > cap) {
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

    /// A bound of all plans of the space, caps aside.
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

/// Segments recompute what `always` does.
fn whole(policy: Remat) -> Remat {
    if matches!(policy, Remat::Segments(_)) { Remat::Always } else { policy }
}

/// What crosses a cut before a layer.
fn message(cost: &LayerCost) -> EdgeBytes {
    EdgeBytes { forward: cost.inputs, backward: cost.input_gradients }
}

/// Sums over the layers before each one, so that a stage is priced without going through its layers.
struct Sums {
    layers: usize,
    times: Vec<[Nanos; 5]>,
    ends: Vec<[Nanos; 2]>,
    states: Vec<Bytes>,
}

impl Sums {
    fn new(model: &ModelCosts, costs: &[LayerCost]) -> Self {
        let (mut times, mut ends) = (vec![[Nanos(0); 5]], vec![[Nanos(0); 2]]);
        let mut states = vec![Bytes(0)];
        for cost in costs {
            let own = [
                cost.forward,
                cost.forward_kept,
                cost.rematerialize,
                cost.backward,
                cost.backward_kept,
            ];
            let before = times[times.len() - 1];
            times.push([0, 1, 2, 3, 4].map(|kind| before[kind] + own[kind]));
        }
        for state in &model.layers {
            let before = ends[ends.len() - 1];
            ends.push([before[0] + state.norm, before[1] + state.update]);
            let bytes = state.parameters + state.optimizer;
            states.push(states[states.len() - 1] + bytes);
        }
        Self { layers: model.layers.len(), times, ends, states }
    }

    /// As [`ModelCosts::stage_cost`].
    fn stage_cost(&self, range: &Range<usize>, policy: Remat, speed: f64) -> StageCost {
        let segments = policy.segments().min(range.len().max(1));
        let last = range.start + (segments - 1) * range.len() / segments;
        let end = if range.end == self.layers { range.end + 1 } else { range.end };
        let between = |kind: usize, from: usize| self.times[end][kind] - self.times[from][kind];
        let scale = |time: Nanos| Nanos((time.0 as f64 / speed) as u64);
        let rest = self.times[last][2] - self.times[range.start][2];
        let ends = [0, 1].map(|kind| self.ends[range.end][kind] - self.ends[range.start][kind]);
        StageCost {
            forward: scale(between(0, range.start)),
            forward_kept: scale(between(1, range.start)),
            rematerialize: scale(between(2, last)),
            backward: scale(rest + between(3, range.start)),
            backward_kept: scale(between(4, range.start)),
            norm: scale(ends[0]),
            update: scale(ends[1]),
        }
    }
}
