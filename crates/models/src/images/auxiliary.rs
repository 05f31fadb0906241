//! An auxiliary classifier in the middle of a network. Its loss reaches the lower layers by a
//! shorter path (Szegedy et al. 2015, section 5). In AmoebaNet's published program it is at two
//! thirds of the depth. Evaluation and prediction compute it, too.

use gpipe::{
    Forward, Infer, Layer, LayerError, ParameterSpec, TensorSpec,
    estimate::{Tape, Var},
};
use tch::Tensor;

use super::{
    affine,
    chain::{Chain, Convolution},
    mean_of_places,
};

/// The skip that carries the logits to the classifier.
pub(super) const AUXILIARY: &str = "auxiliary";
/// Window and stride of the initial average pooling.
const WINDOW: i64 = 5;
const STRIDE: i64 = 3;
/// Channels of the two convolutions.
const NARROW: i64 = 128;
const WIDE: i64 = 768;

/// Passes its inputs on, and stashes the logits computed from the first input. The mean over all
/// positions replaces the original's convolution over the whole map, so that one network takes
/// images of any size.
pub(super) struct AuxiliaryHead {
    convolutions: Chain,
    channels: i64,
    classes: i64,
}

impl AuxiliaryHead {
    pub(super) fn new(channels: i64, classes: i64) -> Self {
        let convolutions = Chain::default()
            .convolve(Convolution::new("narrow", channels, NARROW, 1))
            .relu()
            .convolve(Convolution::new("wide", NARROW, WIDE, 1))
            .relu();
        Self { convolutions, channels, classes }
    }

    /// The shape after pooling: [samples, channels, height, width].
    fn pooled(input: &TensorSpec) -> Result<TensorSpec, LayerError> {
        let mut output = input.clone();
        for size in output.shape.iter_mut().skip(2) {
            *size = (*size - WINDOW.min(*size)) / STRIDE + 1;
        }
        Ok(output)
    }
}

impl Layer for AuxiliaryHead {
    fn kind(&self) -> &'static str {
        "auxiliary head"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        let mut all = self.convolutions.parameters("");
        all.extend(affine("", WIDE, self.classes));
        all
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let input = match inputs.first() {
            Some(input) if input.shape.len() == 4 && input.shape[1] == self.channels => input,
            _ => {
                return Err(LayerError::Shape(format!(
                    "it takes [samples, {} channels, height, width], it got {inputs:?}",
                    self.channels
                )));
            }
        };
        self.convolutions.infer(&Self::pooled(input)?)?;
        ctx.stash(AUXILIARY, TensorSpec::new([input.shape[0], self.classes], input.kind))?;
        Ok(inputs.to_vec())
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let x = inputs.first().ok_or_else(|| LayerError::Shape("it takes an input".into()))?;
        let window = [x.size()[2].min(WINDOW), x.size()[3].min(WINDOW)];
        let pooled = x.f_relu()?.f_avg_pool2d(window, [STRIDE; 2], [0; 2], false, true, None)?;
        let features = self.convolutions.forward(ctx, 0, &pooled)?;
        let means = features.f_mean_dim(&[2_i64, 3][..], false, None)?;
        let first = self.convolutions.count();
        let (weight, bias) = (ctx.parameter(first)?, ctx.parameter(first + 1)?);
        let logits = ctx.linear(&means, weight, Some(bias))?;
        ctx.stash(AUXILIARY, &logits);
        Ok(inputs.iter().map(Tensor::shallow_clone).collect())
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        let pooled = Self::pooled(inputs.first()?).ok()?;
        let samples = *pooled.shape.first()? as f64;
        Some(self.convolutions.flops(&pooled) + 2.0 * samples * (WIDE * self.classes) as f64)
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let active = tape.elementwise_by_output(*inputs.first()?);
        let pooled = Self::pooled(tape.spec(active)).ok()?;
        let pooled = tape.average_pool(active, pooled);
        let features = self.convolutions.record(tape, 0, pooled)?;
        let means = mean_of_places(tape, features)?;
        let first = self.convolutions.count();
        let logits = tape.linear(means, first, Some(first + 1));
        tape.stash(AUXILIARY, logits);
        Some(inputs.to_vec())
    }
}
