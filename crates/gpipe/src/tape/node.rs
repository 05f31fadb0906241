//! A differentiable operation, as recorded on a [`super::Tape`].

use crate::spec::TensorSpec;

/// A tensor on a [`super::Tape`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Var(pub(super) usize);

/// One differentiable operation. By default it allocates its output, saves nothing, and allocates a
/// new gradient for each input. Sizes are in bytes.
#[derive(Debug, Clone)]
pub struct Node {
    pub(super) inputs: Vec<Var>,
    pub(super) output: TensorSpec,
    pub(super) view: bool,
    pub(super) saved: Vec<Var>,
    pub(super) saves_output: bool,
    pub(super) saved_bytes: f64,
    pub(super) forward_bytes: f64,
    pub(super) backward_bytes: f64,
    /// Parameter numbers, and whether the first accumulation must copy the gradient because of its
    /// layout.
    pub(super) parameters: Vec<(usize, bool)>,
    pub(super) gradient: Gradient,
    pub(super) channels_last: Option<bool>,
}

/// How an operation's backward obtains the gradients of its inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gradient {
    New,
    /// The output's gradient itself, or parts of it.
    Passed,
    /// The gradient overwrites what the forward saved in `saved_bytes`.
    Overwritten,
}

impl Node {
    /// An operation on `inputs` that allocates `output`.
    pub fn new(inputs: &[Var], output: TensorSpec) -> Self {
        Self {
            inputs: inputs.to_vec(),
            output,
            view: false,
            saved: Vec::new(),
            saves_output: false,
            saved_bytes: 0.0,
            forward_bytes: 0.0,
            backward_bytes: 0.0,
            parameters: Vec::new(),
            gradient: Gradient::New,
            channels_last: None,
        }
    }

    /// A view: the memory of `input` in another shape.
    pub fn view(input: Var, output: TensorSpec) -> Self {
        Self { view: true, gradient: Gradient::Passed, ..Self::new(&[input], output) }
    }

    /// Saves these tensors for the backward.
    #[must_use]
    pub fn saving(mut self, tensors: &[Var]) -> Self {
        self.saved.extend(tensors);
        self
    }

    /// Saves the output for the backward.
    #[must_use]
    pub fn saving_output(mut self) -> Self {
        self.saves_output = true;
        self
    }

    /// Saves this many more bytes for the backward, for example a mask.
    #[must_use]
    pub fn saving_bytes(mut self, bytes: f64) -> Self {
        self.saved_bytes += bytes;
        self
    }

    /// Adds temporary bytes of the forward.
    #[must_use]
    pub fn forward_bytes(mut self, bytes: f64) -> Self {
        self.forward_bytes += bytes;
        self
    }

    /// Adds temporary bytes of the backward, besides gradients.
    #[must_use]
    pub fn backward_bytes(mut self, bytes: f64) -> Self {
        self.backward_bytes += bytes;
        self
    }

    /// Uses the layer's parameter `number`.
    #[must_use]
    pub fn parameter(mut self, number: usize) -> Self {
        self.parameters.push((number, false));
        self
    }

    /// Uses the layer's parameter `number`, with a gradient that the step's first accumulation must
    /// copy. Its layout differs, for example because it is a transposed product.
    #[must_use]
    pub fn parameter_transposed(mut self, number: usize) -> Self {
        self.parameters.push((number, true));
        self
    }

    /// Makes each input's gradient the output's gradient, or a part of it.
    #[must_use]
    pub fn passing_gradient(mut self) -> Self {
        self.gradient = Gradient::Passed;
        self
    }

    /// Makes the input's gradient overwrite the bytes saved by [`Node::saving_bytes`].
    #[must_use]
    pub fn overwriting_saved(mut self) -> Self {
        self.gradient = Gradient::Overwritten;
        self
    }

    /// Sets the layout of an output that holds images. The default is the first input's layout.
    #[must_use]
    pub fn channels_last(mut self, channels_last: bool) -> Self {
        self.channels_last = Some(channels_last);
        self
    }
}
