//! A parameter that a layer wants: its name, shape and initial value, and what it is tied to.

/// How a parameter starts. Keyed by (seed, layer, parameter), so the same at every K.
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

/// A parameter that a layer wants.
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
    /// Whether it is not trained but counted: running statistics, which change once per mini-batch.
    pub buffer: bool,
    /// Parameters with the same tie are one weight: the first layer's initial value holds,
    /// gradients are summed in layer order, and the norm counts it once.
    pub tie: Option<String>,
}

impl ParameterSpec {
    /// A trainable parameter that is not tied.
    pub fn new(name: &str, shape: impl Into<Vec<i64>>, init: Init) -> Self {
        let (name, shape) = (name.into(), shape.into());
        Self { name, shape, init, trainable: true, buffer: false, tie: None }
    }

    /// A running statistic: kept in float32 (or float64) whatever the arithmetic is in, not
    /// trained, and part of the pipeline's parameters and state.
    pub fn buffer(name: &str, shape: impl Into<Vec<i64>>, init: Init) -> Self {
        Self { trainable: false, buffer: true, ..Self::new(name, shape, init) }
    }

    /// The same, tied.
    pub fn tied(mut self, tie: Option<&str>) -> Self {
        self.tie = tie.map(Into::into);
        self
    }

    /// Number of elements.
    pub fn elements(&self) -> u64 {
        self.shape.iter().fold(1, |product, &size| product.saturating_mul(size.max(0) as u64))
    }
}
