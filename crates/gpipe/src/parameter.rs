//! Parameters that a layer declares: name, shape, initial value, and ties to other parameters.

use tch::Kind;

use crate::precision::Precision;

/// How a parameter is initialised. The values depend only on (seed, layer, parameter), so they are
/// the same for every K.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Init {
    /// All 0.
    Zeros,
    /// All 1.
    Ones,
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f64,
    },
    /// Uniform in (-bound, bound).
    Uniform {
        /// The bound.
        bound: f64,
    },
}

/// The role of a parameter in a model with low-rank adapters
/// ([`Sequence::with_lora`](crate::Sequence::with_lora)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LoraRole {
    /// The model has no adapters.
    #[default]
    None,
    /// A parameter of the base model. It is frozen, and stored only in the dtype of the arithmetic.
    Base,
    /// A matrix of an adapter. It is trained. It starts from its initial value even if the caller
    /// gives the parameters of the base model.
    Adapter,
}

/// Declares one parameter of a layer.
#[derive(Debug, Clone, PartialEq)]
pub struct ParameterSpec {
    /// Its name within the layer.
    pub name: String,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Its initial value.
    pub init: Init,
    /// Whether it is trained.
    pub trainable: bool,
    /// Whether it is a buffer: not trained, but updated once per mini-batch, such as running
    /// statistics.
    pub buffer: bool,
    /// Name of the weight that this parameter shares. Parameters with the same tie are one weight:
    /// the first layer's initial value applies, gradients are summed in layer order, and the norm
    /// counts it once.
    pub tie: Option<String>,
    /// The role of the parameter in a model with low-rank adapters.
    pub lora: LoraRole,
}

impl ParameterSpec {
    /// A trainable parameter that is not tied.
    pub fn new(name: &str, shape: impl Into<Vec<i64>>, init: Init) -> Self {
        let (name, shape) = (name.into(), shape.into());
        let lora = LoraRole::None;
        Self { name, shape, init, trainable: true, buffer: false, tie: None, lora }
    }

    /// A buffer, such as a running statistic: not trained, but part of the pipeline's parameters
    /// and state. It is kept in float32 (or float64) whatever dtype the pipeline computes in.
    pub fn buffer(name: &str, shape: impl Into<Vec<i64>>, init: Init) -> Self {
        Self { trainable: false, buffer: true, ..Self::new(name, shape, init) }
    }

    /// Ties the parameter to all others with the same `tie`; `None` unties it.
    pub fn tied(mut self, tie: Option<&str>) -> Self {
        self.tie = tie.map(Into::into);
        self
    }

    /// The dtype in which the value is stored: `compute` for a parameter of a base model with
    /// adapters, unless it is a buffer, and otherwise `master`.
    pub(crate) fn stored(&self, precision: Precision) -> Kind {
        match self.lora == LoraRole::Base && !self.buffer {
            true => precision.compute,
            false => precision.master,
        }
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().fold(1, |product, &size| product.saturating_mul(size.max(0) as u64))
    }
}
