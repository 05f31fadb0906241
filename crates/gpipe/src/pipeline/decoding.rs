//! A decoding: outputs are made one position after the other, each from the ones before it. Layers
//! keep what they need of earlier positions ([`Forward::cache`](crate::Forward::cache)), on their
//! stages; samples are in groups, which flow through the stages as micro-batches do.

use tch::Tensor;

use super::{Pipeline, mini_batch::MiniBatch, outputs};
use crate::{
    error::{Error, Result},
    spec::TensorSpec,
    stage::feed::{Group, Mode, Slice},
};

/// A pipeline that decodes. What its layers keep is let go of when another decoding begins, the
/// pipeline is used for something else, or fails.
pub struct Decoding<'p> {
    pipeline: &'p mut Pipeline,
    /// By group: positions so far, and samples in the last step.
    groups: Vec<(i64, i64)>,
}

/// What a group goes on with.
#[derive(Debug)]
pub struct GroupStep {
    /// The group's number: any that is small, the same in every step.
    pub group: usize,
    /// The model's inputs, the first size of each samples. The last input has the new positions
    /// along its second axis.
    pub inputs: Vec<Tensor>,
    /// Which sample of the step before each sample goes on from; `None`: they are the same. The
    /// first step has none before it.
    pub rows: Option<Vec<i64>>,
}

/// Most groups of a decoding.
const GROUPS_MAX: usize = 1 << 12;

impl Pipeline {
    /// Begins a decoding, without dropout, with the parameters as they are. Layers that mix
    /// positions must keep what they need in [`Forward::cache`](crate::Forward::cache), as
    /// [`layers`](crate::layers) do: another one would see the new position alone.
    pub fn decoding(&mut self) -> Decoding<'_> {
        Decoding { pipeline: self, groups: Vec::new() }
    }
}

impl Decoding<'_> {
    /// The outputs of the new positions of each group in `steps`, in that order, on the CPU, in
    /// float32 where the arithmetic is in bfloat16 or float16. Groups that are left out rest.
    ///
    /// # Errors
    /// [`Error::Input`] where inputs, rows and groups do not fit; else as [`Pipeline::predict`].
    pub fn step(&mut self, steps: Vec<GroupStep>) -> Result<Vec<Vec<Tensor>>> {
        let begins = self.groups.is_empty();
        let mut batch = MiniBatch { begins, ..MiniBatch::default() };
        let mut first = 0;
        for step in steps {
            let past = self.check(&step)?;
            let samples = sizes(&step.inputs).0;
            let rows = step.rows.map(|rows| Tensor::f_from_slice(&rows)).transpose()?;
            batch.groups.push(Group { id: step.group, past, rows });
            batch.slices.push(Slice { first, count: samples as usize });
            batch.inputs.push(step.inputs);
            batch.targets.push(Vec::new());
            first += samples as usize;
        }
        if batch.groups.is_empty() {
            return Ok(Vec::new());
        }
        let ran = match self.pipeline.run(Mode::Decode, &batch, 1.0, false) {
            Ok(ran) => ran,
            Err(error) => {
                // What the layers kept is gone.
                self.groups.clear();
                return Err(error);
            }
        };
        for (group, inputs) in batch.groups.iter().zip(&batch.inputs) {
            let (samples, positions) = sizes(inputs);
            if self.groups.len() <= group.id {
                self.groups.resize(group.id + 1, (0, 0));
            }
            self.groups[group.id] = (group.past + positions, samples);
        }
        let given = |tensors: Vec<Tensor>| {
            tensors.iter().map(|tensor| self.pipeline.model.given(tensor)).collect::<Result<_>>()
        };
        outputs(ran).into_iter().map(given).collect()
    }

    /// Positions that came before this step of a group.
    fn check(&self, step: &GroupStep) -> Result<i64> {
        let bad = |reason: String| Err(Error::Input(format!("group {}: {reason}", step.group)));
        if step.group >= GROUPS_MAX {
            return bad(format!("use numbers below {GROUPS_MAX}"));
        }
        let (past, before) = self.groups.get(step.group).copied().unwrap_or_default();
        let (samples, positions) = sizes(&step.inputs);
        if samples < 1 || positions < 1 {
            return bad(
                "it has no samples, or no new positions along the last input's second axis".into(),
            );
        }
        if let Some(other) = step.inputs.iter().find(|input| input.size().first() != Some(&samples))
        {
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

/// Samples, and the new positions.
fn sizes(inputs: &[Tensor]) -> (i64, i64) {
    let last = inputs.last().map(Tensor::size).unwrap_or_default();
    (last.first().copied().unwrap_or(0), last.get(1).copied().unwrap_or(0))
}
