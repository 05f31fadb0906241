//! Chains of convolution, batch norm and pooling, from which layers are built.

use gpipe::{
    Forward, Geometry, Init, LayerError, ParameterSpec, Pooling, TensorSpec, Windows,
    estimate::{Strides, Tape, Var},
    layers::BatchNorm,
};
use tch::Tensor;

/// A sequence of steps. Parameters are in the order of the steps.
#[derive(Debug, Clone, Default)]
pub(super) struct Chain(pub Vec<Step>);

#[derive(Debug, Clone)]
pub(super) enum Step {
    Relu,
    Convolve(Convolution),
    /// Pads to keep the size at stride 1. The padding is excluded from the average.
    AveragePool(Window),
    MaxPool(Window),
    /// Half of the channels come from every second pixel and half from the pixels between them
    /// (Zoph et al. 2018, NASNet), so no pixel is left out as with a stride.
    FactorizedReduce(FactorizedReduce),
    LeakyRelu,
    /// Normalises each channel of each sample by its mean and variance, without parameters (Ulyanov
    /// et al. 2016).
    InstanceNorm,
    /// Drops whole channels with this probability (Tompson et al. 2015).
    ChannelDropout(f64),
    /// Doubles height and width by repeating each pixel four times.
    Upsample,
}

/// What follows a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    BatchNorm,
    BatchNormRelu,
    Nothing,
}

/// A square pooling window.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window {
    pub size: i64,
    pub stride: i64,
}

impl Window {
    fn windows(self) -> Windows {
        let Self { size, stride } = self;
        // The last window of an even size may reach over the border.
        Windows { size, stride, padding: (size - 1) / 2, ceil: size % 2 == 0 }
    }
}

/// A convolution without bias, optionally followed by batch norm.
#[derive(Debug, Clone)]
pub(super) struct Convolution {
    pub name: &'static str,
    pub channels: i64,
    pub outputs: i64,
    pub kernel: [i64; 2],
    pub stride: [i64; 2],
    pub dilation: i64,
    pub groups: i64,
    pub after: After,
}

#[derive(Debug, Clone)]
pub(super) struct FactorizedReduce {
    pub channels: i64,
    pub outputs: i64,
}

impl Convolution {
    /// A square convolution that keeps the size, apart from its stride.
    pub(super) fn new(name: &'static str, channels: i64, outputs: i64, size: i64) -> Self {
        let (kernel, stride) = ([size; 2], [1; 2]);
        let (dilation, groups, after) = (1, 1, After::BatchNorm);
        Self { name, channels, outputs, kernel, stride, dilation, groups, after }
    }

    pub(super) fn stride(mut self, stride: i64) -> Self {
        self.stride = [stride; 2];
        self
    }

    fn padding(&self) -> [i64; 2] {
        self.kernel.map(|size| self.dilation * (size - 1) / 2)
    }

    fn parameters(&self, prefix: &str) -> Vec<ParameterSpec> {
        let name = format!("{prefix}{}.", self.name);
        let inputs = self.channels / self.groups;
        // Preserves the variance in the forward pass (He et al. 2015).
        let fan_in = (inputs * self.kernel[0] * self.kernel[1]) as f64;
        let init = Init::Normal { std: (2.0 / fan_in).sqrt() };
        let shape = [self.outputs, inputs, self.kernel[0], self.kernel[1]];
        let mut all = vec![ParameterSpec::new(&format!("{name}weight"), shape, init)];
        if self.after != After::Nothing {
            all.extend(BatchNorm::new(self.outputs).parameters(&format!("{name}norm.")));
        }
        all
    }

    fn forward(&self, ctx: &mut Forward, first: usize, x: &Tensor) -> Result<Tensor, LayerError> {
        let geometry = Geometry {
            stride: self.stride,
            padding: self.padding(),
            dilation: [self.dilation; 2],
            groups: self.groups,
        };
        let y = ctx.convolution(x, ctx.parameter(first)?, &geometry)?;
        match self.after {
            After::BatchNorm => ctx.batch_norm(first + 1, &BatchNorm::new(self.outputs), &y),
            After::BatchNormRelu => {
                ctx.batch_norm_relu(first + 1, &BatchNorm::new(self.outputs), &y)
            }
            After::Nothing => Ok(y),
        }
    }
}

impl Step {
    /// Number of parameters.
    fn count(&self) -> usize {
        match self {
            Self::Convolve(convolution) if convolution.after != After::Nothing => 6,
            Self::Convolve(_) => 1,
            Self::FactorizedReduce(_) => 7,
            _ => 0,
        }
    }

    fn parameters(&self, prefix: &str) -> Vec<ParameterSpec> {
        match self {
            Self::Convolve(convolution) => convolution.parameters(prefix),
            Self::FactorizedReduce(FactorizedReduce { channels, outputs }) => {
                let std = (2.0 / *channels as f64).sqrt();
                let half = |name: &str, outputs: i64| {
                    let shape = [outputs, *channels, 1, 1];
                    ParameterSpec::new(&format!("{prefix}{name}"), shape, Init::Normal { std })
                };
                let mut all = vec![
                    half("even.weight", outputs / 2),
                    half("odd.weight", outputs - outputs / 2),
                ];
                all.extend(BatchNorm::new(*outputs).parameters(&format!("{prefix}norm.")));
                all
            }
            _ => Vec::new(),
        }
    }

    pub(super) fn infer(&self, input: &TensorSpec) -> Result<TensorSpec, LayerError> {
        let &[samples, channels, height, width] = &input.shape[..] else {
            let reason = format!("it takes [samples, channels, height, width], it got {input}");
            return Err(LayerError::Shape(reason));
        };
        let takes = |expected: i64| match channels == expected {
            true => Ok(()),
            false => {
                Err(LayerError::Shape(format!("it takes {expected} channels, it got {input}")))
            }
        };
        let halved = |size: i64, stride: i64| (size - 1) / stride + 1;
        if matches!(self, Self::InstanceNorm) && height * width == 1 {
            return Err(LayerError::Shape(format!(
                "it got {input}: the norm of a single pixel is 0, use larger images or less depth"
            )));
        }
        let shape = match self {
            Self::Relu | Self::LeakyRelu | Self::InstanceNorm | Self::ChannelDropout(_) => {
                [samples, channels, height, width]
            }
            Self::Convolve(convolution) => {
                takes(convolution.channels)?;
                let size = |axis: usize, size: i64| {
                    let span = convolution.dilation * (convolution.kernel[axis] - 1);
                    (size + 2 * convolution.padding()[axis] - span - 1) / convolution.stride[axis]
                        + 1
                };
                [samples, convolution.outputs, size(0, height), size(1, width)]
            }
            Self::AveragePool(window) | Self::MaxPool(window) => {
                [samples, channels, halved(height, window.stride), halved(width, window.stride)]
            }
            Self::FactorizedReduce(reduce) => {
                takes(reduce.channels)?;
                [samples, reduce.outputs, halved(height, 2), halved(width, 2)]
            }
            Self::Upsample => [samples, channels, 2 * height, 2 * width],
        };
        if shape.iter().any(|&size| size < 1) {
            return Err(LayerError::Shape(format!("{input} is too small for it")));
        }
        Ok(TensorSpec::new(shape, input.kind))
    }

    pub(super) fn forward(
        &self,
        ctx: &mut Forward,
        first: usize,
        x: &Tensor,
    ) -> Result<Tensor, LayerError> {
        match self {
            Self::Relu => Ok(x.f_relu()?),
            Self::Convolve(convolution) => convolution.forward(ctx, first, x),
            Self::AveragePool(window) => ctx.pool(x, &window.windows(), Pooling::Average),
            Self::MaxPool(window) => ctx.pool(x, &window.windows(), Pooling::Maximum),
            Self::FactorizedReduce(reduce) => {
                let geometry = Geometry { stride: [2; 2], ..Geometry::default() };
                let even = ctx.convolution(x, ctx.parameter(first)?, &geometry)?;
                let between = ctx.every_second_pixel(x, 1)?;
                let plain = Geometry::default();
                let odd = ctx.convolution(&between, ctx.parameter(first + 1)?, &plain)?;
                let both = ctx.concatenate(&[&even, &odd], 1)?;
                ctx.batch_norm(first + 2, &BatchNorm::new(reduce.outputs), &both)
            }
            Self::LeakyRelu => Ok(x.f_leaky_relu()?),
            Self::InstanceNorm => {
                let none = None::<&Tensor>;
                Ok(x.f_instance_norm(none, none, none, none, true, 0.0, EPS, false)?)
            }
            Self::ChannelDropout(p) => {
                let (samples, channels) = (x.size()[0], x.size()[1]);
                let ones = Tensor::f_ones([samples, channels], (x.kind(), x.device()))?;
                let mask = ctx.dropout(&ones, *p)?;
                Ok(x.f_mul(&mask.f_reshape([samples, channels, 1, 1])?)?)
            }
            Self::Upsample => {
                let (height, width) = (x.size()[2], x.size()[3]);
                Ok(x.f_upsample_nearest2d([2 * height, 2 * width], None, None)?)
            }
        }
    }

    /// Records [`Step::forward`] on the tape. `x` is not released.
    pub(super) fn record(&self, tape: &mut Tape, first: usize, x: Var) -> Option<Var> {
        let output = self.infer(tape.spec(x)).ok()?;
        Some(match self {
            Self::Relu => tape.elementwise_by_output(x),
            Self::LeakyRelu => tape.elementwise(x),
            Self::Convolve(convolution) => {
                let strided = convolution.stride != [1; 2];
                let strides = Strides { strided, groups: convolution.groups };
                let y = tape.convolution(x, first, output, strides);
                match convolution.after {
                    After::BatchNorm => normalised(tape, y, first + 1, false),
                    After::BatchNormRelu => normalised(tape, y, first + 1, true),
                    After::Nothing => y,
                }
            }
            Self::AveragePool(_) => tape.pool(x, output, Pooling::Average),
            Self::MaxPool(_) => tape.pool(x, output, Pooling::Maximum),
            Self::FactorizedReduce(reduce) => {
                let half = |channels: i64| {
                    let mut shape = output.shape.clone();
                    shape[1] = channels;
                    TensorSpec::new(shape, output.kind)
                };
                let strides = |strided| Strides { strided, groups: 1 };
                let (left, right) =
                    (half(reduce.outputs / 2), half(reduce.outputs - reduce.outputs / 2));
                let even = tape.convolution(x, first, left, strides(true));
                let mut pixels = output.clone();
                pixels.shape[1] = reduce.channels;
                let between = tape.resized(x, pixels);
                let odd = tape.convolution(between, first + 1, right, strides(false));
                let both = tape.joined(&[even, odd], output);
                [even, between, odd].into_iter().for_each(|var| tape.release(var));
                normalised(tape, both, first + 2, false)
            }
            Self::InstanceNorm => tape.instance_norm(x),
            Self::ChannelDropout(_) => {
                let planes: f64 = output.shape.iter().take(2).map(|&size| size as f64).product();
                tape.scaled(x, planes * output.kind.elt_size_in_bytes() as f64)
            }
            Self::Upsample => tape.resized(x, output),
        })
    }

    /// Floating-point operations of a forward: the multiplications and additions of convolutions,
    /// and a few operations per element for other steps.
    fn flops(&self, input: &TensorSpec, output: &TensorSpec) -> f64 {
        match self {
            Self::Convolve(c) => {
                let each = (c.channels / c.groups * c.kernel[0] * c.kernel[1]) as f64;
                let after = match c.after {
                    After::Nothing => 0.0,
                    After::BatchNorm => NORM,
                    After::BatchNormRelu => NORM + 1.0,
                };
                output.elements() * (2.0 * each + after)
            }
            Self::FactorizedReduce(r) => output.elements() * (2.0 * r.channels as f64 + NORM),
            Self::AveragePool(w) | Self::MaxPool(w) => output.elements() * (w.size * w.size) as f64,
            Self::InstanceNorm => input.elements() * NORM,
            Self::Relu | Self::LeakyRelu | Self::ChannelDropout(_) => input.elements(),
            Self::Upsample => output.elements(),
        }
    }
}

/// Records batch norm of `x`, with or without a ReLU, and releases `x`.
fn normalised(tape: &mut Tape, x: Var, first: usize, relu: bool) -> Var {
    let y = if relu { tape.batch_norm_relu(x, first) } else { tape.batch_norm(x, first) };
    tape.release(x);
    y
}

/// Added to the variance in instance norm.
const EPS: f64 = 1e-5;
/// Operations per element of a norm.
const NORM: f64 = 8.0;

impl Chain {
    /// Appends a step.
    pub(super) fn then(mut self, step: Step) -> Self {
        self.0.push(step);
        self
    }

    /// Appends a convolution.
    pub(super) fn convolve(self, convolution: Convolution) -> Self {
        self.then(Step::Convolve(convolution))
    }

    /// Appends a ReLU, which becomes one with a batch norm before it.
    pub(super) fn relu(mut self) -> Self {
        if let Some(Step::Convolve(last)) = self.0.last_mut()
            && last.after == After::BatchNorm
        {
            last.after = After::BatchNormRelu;
            return self;
        }
        self.then(Step::Relu)
    }

    /// Whether the chain begins with a ReLU, and the steps behind it.
    pub(super) fn split_relu(mut self) -> (bool, Self) {
        let begins = matches!(self.0.first(), Some(Step::Relu));
        self.0.drain(..usize::from(begins));
        (begins, self)
    }

    /// Whether the chain has no steps.
    pub(super) fn is_identity(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of parameters.
    pub(super) fn count(&self) -> usize {
        self.0.iter().map(Step::count).sum()
    }

    pub(super) fn parameters(&self, prefix: &str) -> Vec<ParameterSpec> {
        self.0.iter().flat_map(|step| step.parameters(prefix)).collect()
    }

    pub(super) fn infer(&self, input: &TensorSpec) -> Result<TensorSpec, LayerError> {
        self.0.iter().try_fold(input.clone(), |value, step| step.infer(&value))
    }

    /// Runs the steps, with parameters from index `first` on.
    pub(super) fn forward(
        &self,
        ctx: &mut Forward,
        mut first: usize,
        x: &Tensor,
    ) -> Result<Tensor, LayerError> {
        let mut value = x.shallow_clone();
        for step in &self.0 {
            value = step.forward(ctx, first, &value)?;
            first += step.count();
        }
        Ok(value)
    }

    /// Records [`Chain::forward`] on the tape.
    pub(super) fn record(&self, tape: &mut Tape, mut first: usize, x: Var) -> Option<Var> {
        let mut value = x;
        for step in &self.0 {
            let next = step.record(tape, first, value)?;
            if value != x {
                tape.release(value);
            }
            value = next;
            first += step.count();
        }
        Some(value)
    }

    pub(super) fn flops(&self, input: &TensorSpec) -> f64 {
        let mut value = input.clone();
        let mut sum = 0.0;
        for step in &self.0 {
            let Ok(next) = step.infer(&value) else { break };
            sum += step.flops(&value, &next);
            value = next;
        }
        sum
    }
}
