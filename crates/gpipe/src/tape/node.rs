//! A differentiable operation, as a [`super::Tape`] takes it.

use crate::spec::TensorSpec;

/// A tensor on a [`super::Tape`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Var(pub(super) usize);

/// One differentiable operation. Unless told otherwise it makes a new tensor, saves nothing, and
/// makes a new gradient for each of its inputs. Sizes are in bytes.
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
    /// Numbers, and whether the gradient is laid out so that the first accumulation copies it.
    pub(super) parameters: Vec<(usize, bool)>,
    pub(super) gradient: Gradient,
    pub(super) channels_last: Option<bool>,
}

/// Where an operation's backward gets the gradients of its inputs from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Gradient {
    New,
    /// The output's gradient itself, or parts of it.
    Passed,
    /// It overwrites what the forward saved in `saved_bytes`.
    Overwritten,
}

impl Node {
    /// An operation on `inputs` that gives a new `output`.
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

    /// The same memory in another shape.
    pub fn view(input: Var, output: TensorSpec) -> Self {
        Self { view: true, gradient: Gradient::Passed, ..Self::new(&[input], output) }
    }

    /// The backward needs these tensors.
    #[must_use]
    pub fn saving(mut self, tensors: &[Var]) -> Self {
        self.saved.extend(tensors);
        self
    }

    /// The backward needs the output.
    #[must_use]
    pub fn saving_output(mut self) -> Self {
        self.saves_output = true;
        self
    }

    /// The backward needs so many bytes more, such as a mask's.
    #[must_use]
    pub fn saving_bytes(mut self, bytes: f64) -> Self {
        self.saved_bytes += bytes;
        self
    }

    /// The forward needs so many bytes while it runs.
    #[must_use]
    pub fn forward_bytes(mut self, bytes: f64) -> Self {
        self.forward_bytes += bytes;
        self
    }

    /// The backward needs so many bytes while it runs, besides gradients.
    #[must_use]
    pub fn backward_bytes(mut self, bytes: f64) -> Self {
        self.backward_bytes += bytes;
        self
    }

    /// It uses this parameter of the layer.
    #[must_use]
    pub fn parameter(mut self, number: usize) -> Self {
        self.parameters.push((number, false));
        self
    }

    /// The same; the gradient comes in a layout that the step's first accumulation has to copy (a
    /// transposed product's).
    #[must_use]
    pub fn parameter_transposed(mut self, number: usize) -> Self {
        self.parameters.push((number, true));
        self
    }

    /// The gradient of each input is the output's, or a part of it.
    #[must_use]
    pub fn passing_gradient(mut self) -> Self {
        self.gradient = Gradient::Passed;
        self
    }

    /// The gradient of the input takes the place of what was saved by [`Node::saving_bytes`].
    #[must_use]
    pub fn overwriting_saved(mut self) -> Self {
        self.gradient = Gradient::Overwritten;
        self
    }

    /// The layout of its output, if it is images; else that of the first input.
    #[must_use]
    pub fn channels_last(mut self, channels_last: bool) -> Self {
        self.channels_last = Some(channels_last);
        self
    }
}
