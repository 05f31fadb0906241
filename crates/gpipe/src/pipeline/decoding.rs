//! Decoding: outputs are made one position after the other, each from the ones before it.
//!
//! Layers keep what they need of earlier positions on their stages
//! ([`Forward::cache`](crate::Forward::cache)). Samples are in groups, which flow through the
//! stages like micro-batches.

use gpipe_core::lower::Part;
use tch::Tensor;

use super::{Pipeline, mini_batch::MiniBatch, outputs_of, run::Task};
use crate::{
    arguments::Arguments,
    error::{Error, Result},
    spec::TensorSpec,
    stage::feed::{Group, Mode, Slice},
};

/// A pipeline while it decodes. The layers' caches are dropped when another decoding begins, when
/// the pipeline is used for anything else, or after a failure.
pub struct Decoding<'p> {
    pipeline: &'p mut Pipeline,
    /// For each group: the number of positions so far, and of samples in the last step.
    groups: Vec<(i64, i64)>,
    only_last: bool,
}

/// The input of one group for one decoding step.
#[derive(Debug)]
pub struct GroupStep {
    /// The group's number: any small number, the same in every step.
    pub group: usize,
    /// The model's inputs, by position. Those that are not shared have samples on their first axis.
    /// The last of these has the new positions on its second axis. Decoding takes no inputs by
    /// name.
    pub inputs: Vec<Tensor>,
    /// For each sample, the index of the sample in the previous step that it continues (beam search
    /// reorders them). `None` keeps the order, and is required in the first step.
    pub rows: Option<Vec<i64>>,
}

/// The most groups in a decoding.
const GROUPS_MAX: usize = 1 << 12;

impl Pipeline {
    /// Begins a decoding, without dropout, with the current parameters.
    ///
    /// Layers that mix positions must keep what they need in
    /// [`Forward::cache`](crate::Forward::cache), as those in [`layers`](crate::layers) do. Any
    /// other layer sees only the new positions.
    pub fn decoding(&mut self) -> Decoding<'_> {
        Decoding { pipeline: self, groups: Vec::new(), only_last: false }
    }
}

impl Decoding<'_> {
    /// Lets [`step`](Self::step) return the first output of the last new position alone: [samples,
    /// 1, ..]. The next token of a text needs no other. The other outputs stay as they are.
    ///
    /// If the model's last layer works by rows ([`Layer::by_rows`](crate::Layer::by_rows)), it
    /// computes nothing else. This saves much memory in the first step: for a prompt of 16,000
    /// tokens and a vocabulary of 150,000, logits of all positions would take 10 GB in float32.
    pub fn only_last(self) -> Self {
        Self { only_last: true, ..self }
    }

    /// Returns the outputs of the new positions of each group in `steps`, in that order. Groups
    /// that are left out do not advance.
    ///
    /// Outputs are on the CPU, in float32 if the arithmetic is in bfloat16 or float16.
    ///
    /// # Errors
    /// [`Error::Input`] if inputs, rows and groups do not fit; otherwise as for
    /// [`Pipeline::predict`].
    pub fn step(&mut self, steps: Vec<GroupStep>) -> Result<Vec<Vec<Tensor>>> {
        if let Some(own) = self.pipeline.model.sequence.inputs.named.first() {
            return Err(Error::Setting(format!(
                "this pipeline has an input '{}', and a decoding takes none by name",
                own.name
            )));
        }
        let begins = self.groups.is_empty();
        let mut batch = MiniBatch { begins, ..MiniBatch::default() };
        let mut first = 0;
        for step in steps {
            if batch.groups.iter().any(|other| other.id == step.group) {
                return Err(Error::Input(format!(
                    "group {} is there twice: a step has each group once",
                    step.group
                )));
            }
            let past = self.check(&step)?;
            let samples = sizes(&step.inputs, &self.pipeline.model.sequence.inputs).0;
            let rows = step.rows.map(|rows| Tensor::f_from_slice(&rows)).transpose()?;
            batch.groups.push(Group { id: step.group, past, rows, only_last: self.only_last });
            batch.slices.push(Slice { first, count: samples as usize });
            batch.specs.push(step.inputs.iter().map(TensorSpec::of).collect());
            batch.inputs.push(step.inputs);
            batch.targets.push(Vec::new());
            first += samples as usize;
        }
        if batch.groups.is_empty() {
            return Ok(Vec::new());
        }
        let ran = match self.pipeline.run(Task::new(Mode::Decode, Part::Inference, &batch)) {
            Ok(ran) => ran,
            Err(error) => {
                // The failed step dropped the layers' caches.
                self.groups.clear();
                return Err(error);
            }
        };
        for (group, inputs) in batch.groups.iter().zip(&batch.inputs) {
            let (samples, positions) = sizes(inputs, &self.pipeline.model.sequence.inputs);
            if self.groups.len() <= group.id {
                self.groups.resize(group.id + 1, (0, 0));
            }
            self.groups[group.id] = (group.past + positions, samples);
        }
        let given = |tensors: Vec<Tensor>| {
            tensors.iter().map(|tensor| self.pipeline.model.returned(tensor)).collect::<Result<_>>()
        };
        outputs_of(ran).into_iter().map(given).collect()
    }

    /// Checks a step. Returns the number of earlier positions of its group.
    fn check(&self, step: &GroupStep) -> Result<i64> {
        let bad = |reason: String| Err(Error::Input(format!("group {}: {reason}", step.group)));
        if step.group >= GROUPS_MAX {
            return bad(format!("use numbers below {GROUPS_MAX}"));
        }
        let (past, before) = self.groups.get(step.group).copied().unwrap_or_default();
        let (samples, positions) = sizes(&step.inputs, &self.pipeline.model.sequence.inputs);
        if samples < 1 || positions < 1 {
            return bad(
                "it has no samples, or no new positions along the last input's second axis".into(),
            );
        }
        let arguments = &self.pipeline.model.sequence.inputs;
        let mut own = with_samples(&step.inputs, arguments);
        if let Some(other) = own.find(|input| input.size().first() != Some(&samples)) {
            return bad(format!(
                "its inputs have {samples} samples, and one is {:?}",
                other.size()
            ));
        }
        match &step.rows {
            Some(_) if past == 0 => return bad("there is no step before its first".into()),
            Some(rows) if rows.len() as i64 != samples => {
                return bad(format!("{} rows for {samples} samples", rows.len()));
            }
            Some(rows) if rows.iter().any(|row| !(0..before).contains(row)) => {
                return bad(format!("a row is outside of the {before} samples before"));
            }
            None if past > 0 && samples != before => {
                return bad(format!("{samples} samples go on from {before}: say from which"));
            }
            _ => {}
        }
        let specs: Vec<TensorSpec> = step.inputs.iter().map(TensorSpec::of).collect();
        self.pipeline.model.check_shapes(&specs, &[])?;
        Ok(past)
    }
}

/// The inputs that have a sample axis.
fn with_samples<'a>(
    inputs: &'a [Tensor],
    arguments: &'a Arguments,
) -> impl Iterator<Item = &'a Tensor> {
    let all = inputs.iter().enumerate();
    all.filter(|(at, own)| own.defined() && !arguments.shared.contains(at)).map(|(_, own)| own)
}

/// The number of samples, and of new positions.
fn sizes(inputs: &[Tensor], arguments: &Arguments) -> (i64, i64) {
    let last = with_samples(inputs, arguments).last().map(Tensor::size).unwrap_or_default();
    (last.first().copied().unwrap_or(0), last.get(1).copied().unwrap_or(0))
}
