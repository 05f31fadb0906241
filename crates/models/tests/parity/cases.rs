//! The runs whose results are compared with PyTorch's: a small transformer and a ragged mini-batch
//! with ignored targets, on two stages with three micro-batches. `scripts/parity.py` states the
//! same sizes and rules independently.

use gpipe::{Adam, CrossEntropy, Pipeline, PipelineBuilder, Sgd, TensorSpec};
use gpipe_models::Transformer;
use tch::{Kind, Tensor};

pub type Failure = Box<dyn std::error::Error>;

/// Number of steps per case.
pub const STEPS: usize = 5;
const VOCABULARY: i64 = 211;
const LENGTH: i64 = 24;
const SAMPLES: i64 = 7;

/// An update rule with its hyperparameters.
#[derive(Debug, Clone, Copy)]
pub enum Rule {
    Sgd,
    Momentum,
    Adam,
    AdamW,
}

/// One run.
#[derive(Debug, Clone, Copy)]
pub struct Case {
    pub kind: Kind,
    pub tied: bool,
    pub rule: Rule,
}

impl Case {
    pub fn all() -> Vec<Case> {
        let mut cases = Vec::new();
        for kind in [Kind::Double, Kind::Float] {
            for tied in [false, true] {
                for rule in [Rule::Sgd, Rule::Momentum, Rule::Adam, Rule::AdamW] {
                    cases.push(Case { kind, tied, rule });
                }
            }
        }
        cases
    }

    /// The name of the case, such as `float32-tied-adam`.
    pub fn name(&self) -> String {
        let kind = if self.kind == Kind::Double { "float64" } else { "float32" };
        let tied = if self.tied { "tied" } else { "untied" };
        format!("{kind}-{tied}-{}", format!("{:?}", self.rule).to_lowercase())
    }

    pub fn pipeline(&self) -> Result<Pipeline, Failure> {
        let model = Transformer {
            vocabulary: VOCABULARY,
            positions: LENGTH,
            features: 48,
            heads: 4,
            hidden: 96,
            blocks: 3,
            dropout: 0.0,
            attention_dropout: 0.0,
            tied: self.tied,
            split_blocks: true,
            gelu: Default::default(),
        };
        let builder = Pipeline::builder(model.build()?, TensorSpec::new([4, LENGTH], Kind::Int64))
            .stages(2)
            .micro_batches(3)
            .seed(7)
            .kind(self.kind)
            .keep_gradients()
            .loss(CrossEntropy::default());
        Ok(self.rule.give(builder).build()?)
    }
}

impl Rule {
    fn give(self, builder: PipelineBuilder) -> PipelineBuilder {
        let adam = Adam { lr: 1e-2, ..Adam::default() };
        match self {
            Rule::Sgd => builder.optimizer(Sgd::new(0.5)),
            Rule::Momentum => builder.optimizer(Sgd {
                lr: 0.1,
                momentum: 0.9,
                nesterov: false,
                weight_decay: 0.01,
            }),
            Rule::Adam => builder.optimizer(adam),
            Rule::AdamW => builder.optimizer(Adam { weight_decay: 0.1, decoupled: true, ..adam }),
        }
    }
}

/// A constant mini-batch: inputs and targets [samples, positions]. Most targets of the first
/// micro-batch are ignored, so that a mean of micro-batch means would be wrong.
pub fn batch() -> Result<(Tensor, Tensor), Failure> {
    let mut state = 1_u64;
    let mut tensor = || {
        let tokens: Vec<i64> = (0..SAMPLES * LENGTH)
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                (state >> 33) as i64 % VOCABULARY
            })
            .collect();
        Tensor::f_from_slice(&tokens)?.f_reshape([SAMPLES, LENGTH])
    };
    let (inputs, targets) = (tensor()?, tensor()?);
    let _ = targets.f_narrow(0, 0, 2)?.f_narrow(1, 5, 17)?.f_fill_(-100)?;
    let _ = targets.f_narrow(0, 6, 1)?.f_narrow(1, 0, 3)?.f_fill_(-100)?;
    Ok((inputs, targets))
}
