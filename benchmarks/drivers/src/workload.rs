//! The workloads that a program runs without a peer: a model with its mini-batch.

use gpipe::{Adam, CrossEntropy, Pipeline, PipelineBuilder, Sequence, Sgd, TensorSpec};
use gpipe_models::{AmoebaNet, Transformer, Variant};
use tch::Tensor;

use super::{Failure, Numbers, gpt};

/// Number of stages, or of devices where a schedule puts several stages on each.
pub const STAGES: usize = 2;
/// Number of samples per mini-batch.
pub const SAMPLES: usize = 32;

/// A model with as many layers as [`gpt`] and a thousandth of the work.
fn tiny() -> Transformer {
    Transformer { vocabulary: 256, positions: 16, features: 64, heads: 1, hidden: 256, ..gpt() }
}

/// A model with its mini-batch.
pub struct Workload {
    pub model: Sequence,
    pub inputs: Tensor,
    pub targets: Tensor,
    adam: bool,
}

impl Workload {
    /// The workload `gpt`, `amoeba`, or `gpt-tiny`, which is for a quick trial of a measurement.
    pub fn named(name: &str) -> Result<Self, Failure> {
        let mut numbers = Numbers::default();
        let samples = SAMPLES as i64;
        match name {
            "gpt" => Self::gpt(&gpt(), &mut numbers),
            "gpt-tiny" => Self::gpt(&tiny(), &mut numbers),
            "amoeba" => {
                let (channels, classes) = (3, 10);
                let model = AmoebaNet {
                    variant: Variant::D,
                    cells: 6,
                    filters: 128,
                    channels,
                    classes,
                    drop_path: 0.0,
                    auxiliary: false,
                };
                let inputs = numbers.uniform(&[samples, channels, 64, 64])?;
                let targets = numbers.below(classes, &[samples])?;
                let model = model.build()?;
                Ok(Self { model, inputs, targets, adam: false })
            }
            other => Err(format!("workload={other}: use gpt, gpt-tiny or amoeba").into()),
        }
    }

    fn gpt(model: &Transformer, numbers: &mut Numbers) -> Result<Self, Failure> {
        let shape = [SAMPLES as i64, model.positions];
        let mut tokens = || numbers.below(model.vocabulary, &shape);
        let (inputs, targets) = (tokens()?, tokens()?);
        Ok(Self { model: model.build()?, inputs, targets, adam: true })
    }

    /// A builder of the model's pipeline on [`STAGES`] devices.
    pub fn builder(&self, micro_batches: usize) -> PipelineBuilder {
        let mut shape = self.inputs.size();
        shape[0] = (SAMPLES / micro_batches) as i64;
        let builder =
            Pipeline::builder(self.model.clone(), TensorSpec::new(shape, self.inputs.kind()))
                .stages(STAGES)
                .micro_batches(micro_batches)
                .loss(CrossEntropy::default())
                .seed(1);
        match self.adam {
            true => builder.optimizer(Adam { lr: 1e-4, ..Adam::default() }),
            false => builder.optimizer(Sgd { momentum: 0.9, ..Sgd::new(0.01) }),
        }
    }
}
