//! Image networks as sequences of layers. Inputs are [samples, channels, height, width]. Outputs
//! are logits [samples, classes] (U-Net: [samples, channels, height, width]).
//!
//! - [`amoebanet`]: AmoebaNet-B and -D (`auxiliary`: their auxiliary head); [`resnet`]: ResNet-50
//!   and -101; [`unet`]: U-Net
//! - `chain`: convolution, batch norm and pooling, from which their layers are built

pub mod amoebanet;
mod auxiliary;
mod chain;
pub mod resnet;
pub mod unet;

use chain::Chain;
use gpipe::{
    Forward, Infer, Init, Layer, LayerError, ParameterSpec, TensorSpec,
    estimate::{Tape, Var},
};
use tch::Tensor;

/// A network's sizes are invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{network}: {reason}")]
pub struct ImageError {
    network: &'static str,
    reason: String,
}

/// Maximum number of channels. Products of two channel counts and a kernel stay far from overflow.
const CHANNELS_MAX: i64 = 1 << 20;
/// Maximum number of layers.
const LAYERS_MAX: usize = 4096;

fn check_sizes(network: &'static str, sizes: &[(&str, i64)]) -> Result<(), ImageError> {
    match sizes.iter().find(|(_, size)| !(1..=CHANNELS_MAX).contains(size)) {
        None => Ok(()),
        Some((name, size)) => {
            let reason = format!("{name} is {size}: use 1 to {CHANNELS_MAX}");
            Err(ImageError { network, reason })
        }
    }
}

/// A layer that applies a [`Chain`] to the first of its inputs.
struct ChainLayer {
    kind: &'static str,
    chain: Chain,
}

impl Layer for ChainLayer {
    fn kind(&self) -> &'static str {
        self.kind
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.chain.parameters("")
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(vec![self.chain.infer(gpipe::layer::only(inputs)?)?])
    }

    fn may_end_early(&self) -> bool {
        true
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        Ok(vec![self.chain.forward(ctx, 0, gpipe::layer::only(inputs)?)?])
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        Some(self.chain.flops(inputs.first()?))
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        Some(vec![self.chain.record(tape, 0, *inputs.first()?)?])
    }
}

/// The mean over height and width, followed by an affine map to the classes. The literature calls
/// this the softmax layer, but here the loss does the normalisation. Of several inputs, only the
/// first is used.
struct Classifier {
    channels: i64,
    classes: i64,
    /// The skip that carries an auxiliary head's logits, which become the second output.
    auxiliary: Option<&'static str>,
}

/// Weight and bias of an affine map, with PyTorch's initialization.
fn affine(prefix: &str, inputs: i64, outputs: i64) -> [ParameterSpec; 2] {
    let uniform = Init::Uniform { bound: 1.0 / (inputs as f64).sqrt() };
    [
        ParameterSpec::new(&format!("{prefix}weight"), [outputs, inputs], uniform),
        ParameterSpec::new(&format!("{prefix}bias"), [outputs], uniform),
    ]
}

/// Records the mean over height and width on the tape.
fn mean_of_places(tape: &mut Tape, x: Var) -> Option<Var> {
    let spec = tape.spec(x);
    let means = TensorSpec::new(spec.shape.get(..2)?, spec.kind);
    Some(tape.resized(x, means))
}

impl Layer for Classifier {
    fn kind(&self) -> &'static str {
        "classifier"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        affine("", self.channels, self.classes).into()
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let mut outputs = match inputs.first().map(|input| (&input.shape[..], input.kind)) {
            Some((&[samples, channels, _, _], kind)) if channels == self.channels => {
                vec![TensorSpec::new([samples, self.classes], kind)]
            }
            _ => {
                return Err(LayerError::Shape(format!(
                    "it takes [samples, {} channels, height, width], it got {inputs:?}",
                    self.channels
                )));
            }
        };
        if let Some(auxiliary) = self.auxiliary {
            outputs.push(ctx.pop(auxiliary)?);
        }
        Ok(outputs)
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let x = inputs.first().ok_or_else(|| LayerError::Shape("it takes an input".into()))?;
        let means = x.f_mean_dim(&[2_i64, 3][..], false, None)?;
        let mut outputs = vec![ctx.linear(&means, ctx.parameter(0)?, Some(ctx.parameter(1)?))?];
        if let Some(auxiliary) = self.auxiliary {
            outputs.push(ctx.pop(auxiliary)?);
        }
        Ok(outputs)
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        let input = inputs.first()?;
        let samples = *input.shape.first()? as f64;
        Some(input.elements() + 2.0 * samples * (self.channels * self.classes) as f64)
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let means = mean_of_places(tape, *inputs.first()?)?;
        let mut outputs = vec![tape.linear(means, 0, Some(1))];
        if let Some(auxiliary) = self.auxiliary {
            outputs.push(tape.pop(auxiliary)?);
        }
        Some(outputs)
    }
}
