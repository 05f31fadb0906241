//! The bytes that stages and plans hold.
//!
//! In a chain, a stage's memory depends only on its own layers and policy. With long skips, ties or
//! a frozen front it also depends on the other cuts. Stages are then checked against a lower bound,
//! and whole plans at the end.

use std::{ops::Range, rc::Rc};

use super::{
    Plan, PlanError,
    space::{Frame, Space, message, priced_as, whole},
};
use crate::{
    cost::ModelCosts,
    ids::StageId,
    lower::{Topology, lower},
    memory::{EdgeBytes, Moments, Order, moments},
    remat::Remat,
    schedule::ActionLists,
    simulate::{Costs, simulate_with_room},
    topology::ranges,
    units::Bytes,
};

/// How a stage's memory depends on other cuts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    /// What a stage holds does not depend on other cuts.
    Plain,
    /// Only ties matter: they may let a stage hold less at the update.
    Tied,
    /// Long skips, or boundaries without gradients, matter.
    Crossed,
}

impl Shape {
    pub fn of(model: &ModelCosts) -> Self {
        let trained = model.trained_before.iter().skip(1).all(|&trained| trained);
        match model.skips.is_empty() && trained {
            false => Shape::Crossed,
            true if model.ties.is_empty() => Shape::Plain,
            true => Shape::Tied,
        }
    }
}

impl Space<'_> {
    pub fn may_fit(
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

    pub fn certainly_fits(
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
            // As if no message were ever freed.
            Shape::Crossed => {
                let Frame { model, samples, micro_batches, .. } = self.frame;
                let ends = [range.start, range.end].map(|layer| message(&self.costs[layer]));
                let boundaries = ends.map(|bytes| bytes.forward + bytes.backward);
                let larger = samples.div_ceil(micro_batches) as u64;
                let skips = model.skips.iter();
                let skips = skips.filter(|s| range.contains(&s.stash) || range.contains(&s.pop));
                let skips =
                    skips.map(|skip| Bytes(skip.bytes.max(skip.gradient).0.saturating_mul(larger)));
                let once: Bytes = boundaries.into_iter().chain(skips).sum();
                self.peak(stage, range, policy)?
                    + Bytes(once.0.saturating_mul(micro_batches as u64))
            }
        };
        Ok(most <= cap)
    }

    /// The most that a stage holds. If that depends on other cuts, this is an estimate or a lower
    /// bound.
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
        let key = (range.start, range.end, priced_as(policy));
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
        let messages = model.held_for_receivers(&self.messages);
        Ok(match (estimates, self.shape) {
            (true, _) | (false, Shape::Plain) => all.peak(bytes, messages),
            (false, Shape::Tied) => least.peak(bytes, messages),
            (false, Shape::Crossed) => all.peak(bytes, &[]),
        })
    }

    /// The moments of a stage: all, and those without messages that ties may free before the
    /// update.
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

    /// The most that each stage of a plan holds.
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
                let bytes = model.stage_bytes(range, &costs, larger, policy);
                moments.peak(&bytes, model.held_for_receivers(edges))
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
}
