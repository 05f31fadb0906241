//! ResNet-50 and -101 (He et al. 2016), with each bottleneck as three layers. The first layer
//! stashes the block's input as a long skip, and the last pops it. A cut may thus fall within a
//! block, and the input goes directly to the stage that adds it.

use gpipe::{
    Forward, Infer, Layer, LayerError, ParameterSpec, Sequence, TensorSpec,
    estimate::{Tape, Var},
    layer::only,
};
use tch::Tensor;

use super::{
    ChainLayer, Classifier, ImageError,
    chain::{Chain, Convolution, Step, Window},
    check_sizes,
};

/// Number of blocks in each of the four groups.
const BLOCKS_50: [usize; 4] = [3, 4, 6, 3];
const BLOCKS_101: [usize; 4] = [3, 4, 23, 3];
/// Ratio of a bottleneck's outer to its inner channels.
const EXPANSION: i64 = 4;

/// A residual network of bottlenecks. The 3x3 convolution has the stride.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ResNet {
    /// Number of bottlenecks in each of the four groups.
    pub blocks: [usize; 4],
    /// Number of channels after the stem and inside the first bottlenecks: 64.
    pub width: i64,
    /// Number of channels of the images.
    pub channels: i64,
    /// Number of classes.
    pub classes: i64,
}

impl ResNet {
    /// ResNet-50.
    pub fn resnet50(classes: i64) -> Self {
        Self { blocks: BLOCKS_50, width: 64, channels: 3, classes }
    }

    /// ResNet-101.
    pub fn resnet101(classes: i64) -> Self {
        Self { blocks: BLOCKS_101, ..Self::resnet50(classes) }
    }

    /// Builds the layers: `stem`; `1.0.in`, `1.0.middle`, `1.0.out`, ... (group, block);
    /// `classifier`.
    ///
    /// # Errors
    /// Fails if a size is below 1 or far too large.
    pub fn build(&self) -> Result<Sequence, ImageError> {
        let Self { blocks, width, channels, classes } = *self;
        check_sizes("resnet", &[("width", width), ("channels", channels), ("classes", classes)])?;
        if blocks.iter().any(|&count| !(1..=512).contains(&count)) {
            let reason = format!("blocks are {blocks:?}: use 1 to 512 in each group");
            return Err(ImageError { network: "resnet", reason });
        }
        let chain = Chain::default()
            .convolve(Convolution::new("conv", channels, width, 7).stride(2))
            .relu()
            .then(Step::MaxPool(Window { size: 3, stride: 2 }));
        let mut model = Sequence::new().push("stem", ChainLayer { kind: "stem", chain });
        let mut inputs = width;
        for (group, &count) in blocks.iter().enumerate() {
            let inner = width << group;
            let outer = EXPANSION * inner;
            for block in 0..count {
                let name = format!("{}.{block}", group + 1);
                let stride = if block == 0 && group > 0 { 2 } else { 1 };
                let conv =
                    |channels, outputs, size| Convolution::new("conv", channels, outputs, size);
                let first = Chain::default().convolve(conv(inputs, inner, 1)).relu();
                let middle = Chain::default().convolve(conv(inner, inner, 3).stride(stride)).relu();
                let last = Chain::default().convolve(conv(inner, outer, 1));
                let projected = inputs != outer || stride != 1;
                let projection = Convolution::new("projection", inputs, outer, 1).stride(stride);
                let shortcut = match projected {
                    true => Chain::default().convolve(projection),
                    false => Chain::default(),
                };
                model = model
                    .push(format!("{name}.in"), ResidualIn { skip: name.clone(), chain: first })
                    .push(
                        format!("{name}.middle"),
                        ChainLayer { kind: "convolution", chain: middle },
                    )
                    .push(format!("{name}.out"), ResidualOut { skip: name, chain: last, shortcut });
                inputs = outer;
            }
        }
        Ok(model.push("classifier", Classifier { channels: inputs, classes, auxiliary: None }))
    }
}

/// Stashes its input and passes it through a chain.
struct ResidualIn {
    skip: String,
    chain: Chain,
}

impl Layer for ResidualIn {
    fn kind(&self) -> &'static str {
        "residual in"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.chain.parameters("")
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let input = only(inputs)?;
        ctx.stash(&self.skip, input.clone())?;
        Ok(vec![self.chain.infer(input)?])
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let x = only(inputs)?;
        ctx.stash(&self.skip, x);
        Ok(vec![self.chain.forward(ctx, 0, x)?])
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        Some(self.chain.flops(inputs.first()?))
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let x = *inputs.first()?;
        tape.stash(&self.skip, x);
        Some(vec![self.chain.record(tape, 0, x)?])
    }
}

/// Adds the stashed value, through a projection if the shapes differ.
struct ResidualOut {
    skip: String,
    chain: Chain,
    shortcut: Chain,
}

impl Layer for ResidualOut {
    fn kind(&self) -> &'static str {
        "residual out"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        [self.chain.parameters(""), self.shortcut.parameters("")].concat()
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let (own, skipped) = (self.chain.infer(only(inputs)?)?, ctx.pop(&self.skip)?);
        let skipped = self.shortcut.infer(&skipped)?;
        match own == skipped {
            true => Ok(vec![own]),
            false => Err(LayerError::Shape(format!("it cannot add {skipped} to {own}"))),
        }
    }

    fn may_end_early(&self) -> bool {
        true
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let skipped = ctx.pop(&self.skip)?;
        let own = self.chain.forward(ctx, 0, only(inputs)?)?;
        let skipped = self.shortcut.forward(ctx, self.chain.count(), &skipped)?;
        Ok(vec![own.f_add(&skipped)?.f_relu()?])
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        let input = inputs.first()?;
        // The projection has the input's size or four times as many pixels, so it counts like the
        // chain.
        let shortcut = if self.shortcut.is_identity() { 0.0 } else { self.chain.flops(input) };
        Some(self.chain.flops(input) + shortcut)
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let skipped = tape.pop(&self.skip)?;
        let own = self.chain.record(tape, 0, *inputs.first()?)?;
        let skipped = self.shortcut.record(tape, self.chain.count(), skipped)?;
        let sum = tape.add(own, skipped);
        let output = tape.elementwise_by_output(sum);
        [own, skipped, sum].into_iter().for_each(|var| tape.release(var));
        Some(vec![output])
    }
}
