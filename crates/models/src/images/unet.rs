//! U-Net (Ronneberger et al. 2015), as simplified and benchmarked by torchgpipe (Kim et al. 2020,
//! section 4): five levels of stacked convolutions down and up, with a long skip at each level.

use gpipe::{
    Forward, Infer, Layer, LayerError, ParameterSpec, Sequence, TensorSpec,
    estimate::{Tape, Var},
    layer::only,
    layers::Stash,
};
use tch::Tensor;

use super::{
    ChainLayer, ImageError,
    chain::{After, Chain, Convolution, Step, Window},
    check_sizes,
};

/// Maximum number of levels. Each level halves height and width, and doubles the channels.
const DEPTH_MAX: usize = 12;
/// Probability of dropping a whole channel in training.
const DROPOUT: f64 = 0.1;

/// U-Net(B, C). Inputs and outputs have the same height and width, which must be divisible by
/// 2^depth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UNet {
    /// Number of levels: 5.
    pub depth: usize,
    /// Number of convolutions per level and side (B).
    pub convolutions: usize,
    /// Number of channels of the first level (C), even.
    pub base: i64,
    /// Number of channels of the images.
    pub channels: i64,
    /// Number of channels of the output.
    pub outputs: i64,
}

impl UNet {
    /// U-Net(B, C) with five levels, for colour images and one output.
    pub fn new(convolutions: usize, base: i64) -> Self {
        Self { depth: 5, convolutions, base, channels: 3, outputs: 1 }
    }

    /// Builds the layers: `down.0.0`, ... (level, convolution), with `down.0.stash` and
    /// `down.0.pool` after each level; `bottom.0`, ...; `up.4.join`, `up.4.0`, ...; `segment`.
    ///
    /// # Errors
    /// Fails if a size is below 1 or far too large, or if the base is odd.
    pub fn build(&self) -> Result<Sequence, ImageError> {
        let Self { depth, convolutions, base, channels, outputs } = *self;
        check_sizes("unet", &[("base", base), ("channels", channels), ("outputs", outputs)])?;
        let refuse = |reason: String| Err(ImageError { network: "unet", reason });
        if !(1..=DEPTH_MAX).contains(&depth) || !(1..=64).contains(&convolutions) || base % 2 != 0 {
            return refuse(format!(
                "{depth} levels of {convolutions} convolutions with {base} channels: use 1 to \
                {DEPTH_MAX}, 1 to 64, and an even number"
            ));
        }
        check_sizes("unet", &[("the channels of the bottom", base << depth)])?;
        let mut model = Sequence::new();
        for level in 0..depth {
            let inputs = if level == 0 { channels } else { base << (level - 1) };
            let name = format!("down.{level}");
            model = stack(model, &name, inputs, base << level, base << level, convolutions);
            let pool = Chain::default().then(Step::MaxPool(Window { size: 2, stride: 2 }));
            model = model
                .push(format!("{name}.stash"), Stash::new(&format!("level {level}")))
                .push(format!("{name}.pool"), ChainLayer { kind: "pool", chain: pool });
        }
        let top = base << (depth - 1);
        model = stack(model, "bottom", top, base << depth, top, convolutions);
        for level in (0..depth).rev() {
            let name = format!("up.{level}");
            let outputs = (base << level) / 2;
            model = model.push(format!("{name}.join"), Join { skip: format!("level {level}") });
            model = stack(model, &name, base << (level + 1), outputs, outputs, convolutions);
        }
        let segment = Convolution::new("conv", base / 2, outputs, 1);
        let segment = Convolution { after: After::Nothing, ..segment };
        let segment = Chain::default().convolve(segment);
        Ok(model.push("segment", ChainLayer { kind: "convolution", chain: segment }))
    }
}

/// Appends several convolutions, each as a layer.
fn stack(
    mut model: Sequence,
    name: &str,
    inputs: i64,
    middle: i64,
    outputs: i64,
    count: usize,
) -> Sequence {
    for number in 0..count {
        let from = if number == 0 { inputs } else { middle };
        let to = if number + 1 == count { outputs } else { middle };
        let convolution = Convolution::new("conv", from, to, 3);
        let chain = Chain::default()
            .convolve(Convolution { after: After::Nothing, ..convolution })
            .then(Step::ChannelDropout(DROPOUT))
            .then(Step::InstanceNorm)
            .then(Step::LeakyRelu);
        model = model.push(format!("{name}.{number}"), ChainLayer { kind: "convolution", chain });
    }
    model
}

/// Doubles height and width, and concatenates the value that was stashed at that size.
struct Join {
    skip: String,
}

impl Layer for Join {
    fn kind(&self) -> &'static str {
        "join"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        Vec::new()
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let mut own = Step::Upsample.infer(only(inputs)?)?;
        let skipped = ctx.pop(&self.skip)?;
        let same = |axis: usize| own.shape[axis] == skipped.shape[axis];
        if skipped.shape.len() != 4 || !(same(0) && same(2) && same(3)) {
            return Err(LayerError::Shape(format!(
                "it cannot join {skipped} to {own}: height and width of the images must divide by \
                2 at every level"
            )));
        }
        own.shape[1] += skipped.shape[1];
        Ok(vec![own])
    }

    fn may_end_early(&self) -> bool {
        true
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let skipped = ctx.pop(&self.skip)?;
        let own = Step::Upsample.forward(ctx, 0, only(inputs)?)?;
        Ok(vec![Tensor::f_cat(&[own, skipped], 1)?])
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let skipped = tape.pop(&self.skip)?;
        let own = Step::Upsample.record(tape, 0, *inputs.first()?)?;
        let mut joined = tape.spec(own).clone();
        *joined.shape.get_mut(1)? += tape.spec(skipped).shape.get(1)?;
        Some(vec![tape.concatenate(&[own, skipped], joined)])
    }
}
