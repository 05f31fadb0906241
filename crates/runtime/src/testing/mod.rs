//! A mock stage with integer arithmetic, fault injection, and the unpipelined result to compare
//! with.
//!
//! A hash that does not commute replaces sums. Any change of order (of micro-batches, edges or tied
//! gradients) then changes the result, as rounding would with real tensors.

pub mod peers;

use std::{
    collections::HashMap,
    sync::{Arc, Condvar, Mutex, PoisonError},
};

use gpipe_core::{
    Action, Bytes, DeviceId, Direction, EdgeId, LayerId, MicroBatch, StageId,
    lower::{Edge, EdgeKind, Program, Topology},
    splitmix::mix,
};

use crate::{
    pool::BuildDevice,
    stage::{Keep, OnEdges, Payload, StageExecutor, Verdict, Vote},
};

/// An integer that moves on edges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Number(pub u64);

impl Payload for Number {
    fn bytes(&self) -> Bytes {
        Bytes(8)
    }
}

/// Kind of an injected fault.
#[derive(Debug, Clone)]
pub enum FaultKind {
    /// An error value.
    Error,
    /// A panic.
    Panic,
    /// A thread that blocks until the gate opens.
    Stall(Arc<Gate>),
}

/// One fault, injected at one action.
#[derive(Debug, Clone)]
pub struct Fault {
    /// The action.
    pub at: Action,
    /// The kind.
    pub kind: FaultKind,
}

/// Blocks stalled threads until the test is over.
#[derive(Debug, Default)]
pub struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    /// Lets every current and future thread pass.
    pub fn open(&self) {
        *self.open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.changed.notify_all();
    }

    fn pass(&self) {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.changed.wait_while(open, |open| !*open));
    }
}

/// The errors of a mock stage.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MockError {
    /// The injected fault.
    #[error("injected fault")]
    Injected,
    /// The runtime broke the contract of [`StageExecutor`].
    #[error("contract: {0}")]
    Contract(String),
}

/// A stage with integer arithmetic. Its parameter is one number, which each step changes.
#[derive(Debug)]
pub struct MockStage {
    stage: StageId,
    topology: Arc<Topology>,
    fault: Option<Fault>,
    parameter: u64,
    gradient: u64,
    sums: u64,
    /// The sums of tied gradients that have arrived, by edge. They may arrive in any order.
    accepted: Vec<(EdgeId, Number)>,
    /// Inputs by micro-batch, and whether the activations are present.
    held: HashMap<MicroBatch, (u64, bool)>,
    /// What the first halves of backwards leave for the second halves.
    split: HashMap<MicroBatch, u64>,
    /// The prepared update; `norm` sets it.
    ready: Option<u64>,
    outputs: Vec<u64>,
}

/// Combines two numbers; the order matters.
fn join(a: u64, b: u64) -> u64 {
    mix(a.rotate_left(7) ^ b)
}

impl MockStage {
    /// Creates a stage of `topology` with its initial parameter.
    pub fn new(stage: StageId, topology: Arc<Topology>, fault: Option<Fault>) -> Self {
        Self {
            stage,
            topology,
            fault,
            parameter: mix(u64::from(stage.0) + 1),
            gradient: 0,
            sums: 0,
            accepted: Vec::new(),
            held: HashMap::new(),
            split: HashMap::new(),
            ready: None,
            outputs: Vec::new(),
        }
    }

    /// The current parameter.
    pub fn parameter(&self) -> u64 {
        self.parameter
    }

    fn edges(&self, test: impl Fn(&Edge) -> bool) -> Vec<EdgeId> {
        self.topology.edges_where(test).map(|(edge, _)| edge).collect()
    }

    fn check_edges(&self, given: &OnEdges<Number>, expected: &[EdgeId]) -> Result<(), MockError> {
        let edges: Vec<EdgeId> = given.iter().map(|(edge, _)| *edge).collect();
        if edges == expected {
            return Ok(());
        }
        Err(MockError::Contract(format!("stage {}: edges {edges:?}, not {expected:?}", self.stage)))
    }

    fn check(&self, condition: bool, what: &str) -> Result<(), MockError> {
        if condition { Ok(()) } else { Err(MockError::Contract(what.to_owned())) }
    }
}

fn joined(start: u64, values: &OnEdges<Number>) -> u64 {
    values.iter().fold(start, |all, (_, Number(value))| join(all, *value))
}

fn on_edges(edges: &[EdgeId], value: u64) -> OnEdges<Number> {
    edges.iter().map(|&edge| (edge, Number(join(value, u64::from(edge.0))))).collect()
}

impl StageExecutor for MockStage {
    type Value = Number;
    type Feed = u64;
    type Outcome = Vec<u64>;
    type Error = MockError;

    fn stage(&self) -> StageId {
        self.stage
    }

    fn before(&mut self, action: Action) -> Result<(), MockError> {
        match &self.fault {
            Some(fault) if fault.at == action => match fault.kind.clone() {
                FaultKind::Error => Err(MockError::Injected),
                // This fault is a panic.
                #[allow(clippy::panic)]
                FaultKind::Panic => panic!("injected panic"),
                FaultKind::Stall(gate) => {
                    gate.pass();
                    Ok(())
                }
            },
            _ => Ok(()),
        }
    }

    fn begin(&mut self, feed: u64) -> Result<(), MockError> {
        self.check(
            self.held.is_empty() && self.split.is_empty(),
            "begin: something is still held",
        )?;
        (self.gradient, self.sums, self.ready) = (feed, feed, None);
        self.outputs.clear();
        Ok(())
    }

    fn forward(
        &mut self,
        micro_batch: MicroBatch,
        inputs: OnEdges<Number>,
        keep: Keep,
    ) -> Result<OnEdges<Number>, MockError> {
        self.check_edges(&inputs, &self.edges(|e| e.kind.per_micro_batch() && e.to == self.stage))?;
        let input = joined(u64::from(micro_batch.0), &inputs);
        let output = join(self.parameter, input);
        self.outputs.push(output);
        if keep != Keep::Nothing {
            self.held.insert(micro_batch, (input, keep == Keep::Activations));
        }
        Ok(on_edges(&self.edges(|e| e.kind.per_micro_batch() && e.from == self.stage), output))
    }

    fn rematerialize(&mut self, micro_batch: MicroBatch) -> Result<(), MockError> {
        match self.held.get_mut(&micro_batch) {
            Some((_, there @ false)) => {
                *there = true;
                Ok(())
            }
            _ => Err(MockError::Contract(format!("{}R{micro_batch}: nothing to do", self.stage))),
        }
    }

    fn backward(
        &mut self,
        micro_batch: MicroBatch,
        output_grads: OnEdges<Number>,
    ) -> Result<OnEdges<Number>, MockError> {
        let inputs = self.backward_input(micro_batch, output_grads)?;
        self.backward_weight(micro_batch)?;
        Ok(inputs)
    }

    fn backward_input(
        &mut self,
        micro_batch: MicroBatch,
        output_grads: OnEdges<Number>,
    ) -> Result<OnEdges<Number>, MockError> {
        let back = |e: &Edge| e.kind.per_micro_batch() && e.kind.goes_back();
        self.check_edges(&output_grads, &self.edges(|e| back(e) && e.from == self.stage))?;
        let Some((input, true)) = self.held.remove(&micro_batch) else {
            return Err(MockError::Contract(format!(
                "{}B{micro_batch}: no activations",
                self.stage
            )));
        };
        let grad = joined(join(self.parameter, input), &output_grads);
        self.split.insert(micro_batch, grad);
        Ok(on_edges(&self.edges(|e| back(e) && e.to == self.stage), grad))
    }

    fn backward_weight(&mut self, micro_batch: MicroBatch) -> Result<(), MockError> {
        let Some(grad) = self.split.remove(&micro_batch) else {
            return Err(MockError::Contract(format!(
                "{}W{micro_batch}: no first half",
                self.stage
            )));
        };
        self.gradient = join(self.gradient, grad);
        Ok(())
    }

    fn tied(&mut self, edge: EdgeId) -> Result<Number, MockError> {
        Ok(Number(join(self.gradient, u64::from(edge.0))))
    }

    fn reduce(&mut self, arrived: OnEdges<Number>) -> Result<OnEdges<Number>, MockError> {
        let edges = self.edges(|e| e.kind == EdgeKind::Tie && e.to == self.stage);
        self.check_edges(&arrived, &edges)?;
        let sum = joined(self.gradient, &arrived);
        self.sums = join(self.sums, sum);
        Ok(on_edges(&edges, sum))
    }

    fn accept(&mut self, edge: EdgeId, sums: Number) -> Result<(), MockError> {
        let edges = self.edges(|e| e.kind == EdgeKind::Tie && e.from == self.stage);
        self.check(edges.contains(&edge), "the sums of a weight that this stage does not use")?;
        self.accepted.push((edge, sums));
        Ok(())
    }

    fn norm(&mut self) -> Result<Vote, MockError> {
        let due = self.edges(|e| e.kind == EdgeKind::Tie && e.from == self.stage).len();
        let mut accepted = std::mem::take(&mut self.accepted);
        self.check(accepted.len() == due, "norm before all sums")?;
        accepted.sort_by_key(|(edge, _)| *edge);
        self.sums = joined(self.sums, &accepted);
        let ready = join(join(self.parameter, self.gradient), self.sums);
        self.ready = Some(ready);
        Ok(Vote { squares: vec![(LayerId(self.stage.0), (ready >> 40) as f64)] })
    }

    fn decide(&mut self, votes: &[Vote]) -> Result<Verdict, MockError> {
        self.check(votes.len() == self.topology.stages, "a vote is missing")?;
        let norm =
            votes.iter().flat_map(|vote| &vote.squares).fold(0.0, |sum, (_, s)| sum / 3.0 + s);
        Ok(Verdict { apply: true, norm, scale: 1.0 })
    }

    fn update(&mut self, verdict: Verdict) -> Result<(), MockError> {
        let ready = self.ready.take();
        match ready {
            Some(ready) if verdict.apply => self.parameter = join(ready, verdict.norm.to_bits()),
            Some(_) => {}
            None => return Err(MockError::Contract("update before norm".into())),
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<Vec<u64>, MockError> {
        self.check(
            self.held.is_empty() && self.split.is_empty(),
            "finish: something is still held",
        )?;
        Ok(std::mem::take(&mut self.outputs))
    }

    fn abort(&mut self) {
        self.held.clear();
        self.split.clear();
        self.ready = None;
        self.accepted.clear();
    }
}

/// Builders for a pool of mock stages, placed as in `program`.
pub fn mock_devices(program: &Program, fault: Option<&Fault>) -> Vec<BuildDevice<MockStage>> {
    let topology = Arc::new(program.topology.clone());
    (0..program.devices.len())
        .map(|device| {
            let (topology, fault) = (Arc::clone(&topology), fault.cloned());
            let stages: Vec<StageId> = program.stages_on(DeviceId::from_index(device)).collect();
            let build: BuildDevice<MockStage> = Box::new(move || {
                let stage = |k| MockStage::new(k, Arc::clone(&topology), fault.clone());
                Ok(stages.into_iter().map(stage).collect())
            });
            build
        })
        .collect()
}

/// The same feed for every stage of `program`, by device.
pub fn feeds(program: &Program, feed: u64) -> Vec<Vec<u64>> {
    let devices = (0..program.devices.len()).map(DeviceId::from_index);
    devices.map(|device| vec![feed; program.stages_on(device).count()]).collect()
}

/// Computes a step without pipeline, threads or schedule: stage after stage, in loops. Returns each
/// stage's outputs and its parameter after the step.
pub fn unpipelined(
    topology: &Arc<Topology>,
    micro_batches: usize,
    feed: u64,
) -> Result<(Vec<Vec<u64>>, Vec<u64>), MockError> {
    let mut stages: Vec<MockStage> = (0..topology.stages)
        .map(|k| MockStage::new(StageId::from_index(k), Arc::clone(topology), None))
        .collect();
    let mut mail: HashMap<(EdgeId, Direction, Option<MicroBatch>), Number> = HashMap::new();
    for stage in &mut stages {
        stage.begin(feed)?;
    }
    for m in (0..micro_batches).map(MicroBatch::from_index) {
        for stage in &mut stages {
            let into = stage.edges(|e| e.kind.per_micro_batch() && e.to == stage.stage);
            let inputs = collect(&mut mail, &into, Direction::Forward, Some(m));
            let outputs = stage.forward(m, inputs, Keep::Activations)?;
            post(&mut mail, outputs, Direction::Forward, Some(m));
        }
        for stage in stages.iter_mut().rev() {
            let back = |e: &Edge| e.kind.per_micro_batch() && e.kind.goes_back();
            let out = stage.edges(|e| back(e) && e.from == stage.stage);
            let grads = collect(&mut mail, &out, Direction::Backward, Some(m));
            let outputs = stage.backward(m, grads)?;
            post(&mut mail, outputs, Direction::Backward, Some(m));
        }
    }
    for stage in &mut stages {
        for edge in stage.edges(|e| e.kind == EdgeKind::Tie && e.from == stage.stage) {
            mail.insert((edge, Direction::Forward, None), stage.tied(edge)?);
        }
    }
    for stage in &mut stages {
        let owned = stage.edges(|e| e.kind == EdgeKind::Tie && e.to == stage.stage);
        let arrived = collect(&mut mail, &owned, Direction::Forward, None);
        let sums = stage.reduce(arrived)?;
        post(&mut mail, sums, Direction::Backward, None);
    }
    let mut votes = Vec::new();
    for stage in &mut stages {
        let used = stage.edges(|e| e.kind == EdgeKind::Tie && e.from == stage.stage);
        for (edge, sums) in collect(&mut mail, &used, Direction::Backward, None) {
            stage.accept(edge, sums)?;
        }
        votes.push(stage.norm()?);
    }
    let mut verdict = None;
    for stage in &mut stages {
        let verdict = match verdict {
            None => *verdict.insert(stage.decide(&votes)?),
            Some(verdict) => verdict,
        };
        stage.update(verdict)?;
    }
    let outputs = stages.iter_mut().map(StageExecutor::finish).collect::<Result<_, _>>()?;
    Ok((outputs, stages.iter().map(MockStage::parameter).collect()))
}

type Mail = HashMap<(EdgeId, Direction, Option<MicroBatch>), Number>;

fn collect(
    mail: &mut Mail,
    edges: &[EdgeId],
    direction: Direction,
    m: Option<MicroBatch>,
) -> OnEdges<Number> {
    edges.iter().filter_map(|&edge| Some((edge, mail.remove(&(edge, direction, m))?))).collect()
}

fn post(mail: &mut Mail, values: OnEdges<Number>, direction: Direction, m: Option<MicroBatch>) {
    mail.extend(values.into_iter().map(|(edge, value)| ((edge, direction, m), value)));
}
