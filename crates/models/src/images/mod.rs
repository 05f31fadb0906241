//! Image networks as sequences of layers: inputs are [samples, channels, height, width], outputs
//! logits [samples, classes] (U-Net: [samples, channels, height, width]).
//!
//! - [`amoebanet`]: AmoebaNet-B and -D (`auxiliary`: their second head); [`resnet`]: ResNet-50 and
//!   -101; [`unet`]: U-Net
//! - `chain`: convolution, batch norm and pooling, of which their layers are made

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

/// Sizes that make no network.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{network}: {reason}")]
pub struct ImageError {
    network: &'static str,
    reason: String,
}

/// Largest number of channels: products of two, and of a kernel, stay far from overflowing.
const CHANNELS_MAX: i64 = 1 << 20;
/// Most layers.
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

/// A [`Chain`] as a layer of its own: the first of its inputs goes through it.
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

/// The mean over height and width, then an affine map to the classes: the softmax of the
/// literature, without the normalisation, which is the loss's. Of several inputs it takes the
/// first.
struct Classifier {
    channels: i64,
    classes: i64,
    /// Logits of an auxiliary head, which are its second output: the skip that they come by.
    auxiliary: Option<&'static str>,
}

/// An affine map's weight and bias, as PyTorch starts them.
fn affine(prefix: &str, inputs: i64, outputs: i64) -> [ParameterSpec; 2] {
    let uniform = Init::Uniform { bound: 1.0 / (inputs as f64).sqrt() };
    [
        ParameterSpec::new(&format!("{prefix}weight"), [outputs, inputs], uniform),
        ParameterSpec::new(&format!("{prefix}bias"), [outputs], uniform),
    ]
}

/// The mean over height and width.
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
