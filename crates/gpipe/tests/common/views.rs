//! A model whose layers return awkward values: overlapping, expanded, strided and offset views, a
//! tensor without elements, booleans, and tensors of one element. Gradients return as views, too.

use gpipe::{
    CrossEntropy, Forward, Infer, Init, Layer, LayerError, ParameterSpec, PipelineBuilder,
    Sequence, Sgd, TensorSpec,
};
use tch::{Kind, Tensor};

use super::{Run, uniform};

/// Rows and columns of a sample. They are odd, so that samples are not aligned in memory.
const ROWS: i64 = 9;
const COLUMNS: i64 = 21;
const CLASSES: i64 = 7;

type Result<T> = std::result::Result<T, LayerError>;

/// A layer made of functions: its weights, output shapes (without samples) from input shapes, and
/// outputs.
struct Step {
    kind: &'static str,
    weights: &'static [&'static [i64]],
    shapes: fn(&[TensorSpec]) -> Vec<TensorSpec>,
    forward: fn(&Forward, &[Tensor]) -> Result<Vec<Tensor>>,
}

impl Layer for Step {
    fn kind(&self) -> &'static str {
        self.kind
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        let spec = |(i, shape): (usize, &&[i64])| {
            ParameterSpec::new(&format!("w{i}"), *shape, Init::Normal { std: 0.4 })
        };
        self.weights.iter().enumerate().map(spec).collect()
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>> {
        Ok((self.shapes)(inputs))
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>> {
        (self.forward)(ctx, inputs)
    }
}

fn like(input: &TensorSpec, shape: &[i64]) -> TensorSpec {
    TensorSpec::new([&input.shape[..1], shape].concat(), input.kind)
}

pub fn model() -> Sequence {
    let scale = Step {
        kind: "scale",
        weights: &[&[COLUMNS]],
        shapes: |inputs| inputs.to_vec(),
        forward: |ctx, inputs| Ok(vec![inputs[0].f_mul(ctx.parameter(0)?)?]),
    };
    let windows = Step {
        kind: "overlapping windows",
        weights: &[],
        shapes: |inputs| vec![like(&inputs[0], &[ROWS - 2, COLUMNS, 3])],
        forward: |_, inputs| Ok(vec![inputs[0].f_unfold(1, 3, 1)?]),
    };
    let weigh = Step {
        kind: "weighted windows",
        weights: &[&[COLUMNS, 3]],
        shapes: |inputs| vec![like(&inputs[0], &[COLUMNS, 3])],
        forward: |ctx, inputs| {
            let weighed = inputs[0].f_mul(ctx.parameter(0)?)?;
            Ok(vec![weighed.f_mean_dim(1_i64, false, None)?])
        },
    };
    let expand = Step {
        kind: "expanded",
        weights: &[],
        shapes: |inputs| vec![like(&inputs[0], &[5, COLUMNS, 3])],
        forward: |_, inputs| Ok(vec![inputs[0].f_unsqueeze(1)?.f_expand([-1, 5, -1, -1], false)?]),
    };
    let strided = Step {
        kind: "strided and offset",
        weights: &[&[5, COLUMNS, 3]],
        shapes: |inputs| {
            let x = &inputs[0];
            let (mask, one) = (like(x, &[COLUMNS]).with_kind(Kind::Bool), like(x, &[1, 1]));
            vec![like(x, &[COLUMNS, 2]), like(x, &[COLUMNS]), mask, like(x, &[0, 4]), one]
        },
        forward: |ctx, inputs| {
            let x = inputs[0].f_mul(ctx.parameter(0)?)?.f_sum_dim_intlist(1_i64, false, None)?;
            let gaps = x.f_narrow(2, 1, 2)?;
            let row = x.f_select(2, 0)?.f_contiguous()?;
            // Dense, but starts 84 bytes into its memory.
            let first = row.f_narrow(0, 0, 1)?;
            let offset = Tensor::f_cat(&[&first, &row], 0)?.f_narrow(0, 1, row.size()[0])?;
            let mask = gaps.f_select(2, 1)?.f_gt(0.0)?;
            let empty = x.f_narrow(1, 0, 0)?.f_narrow(2, 0, 1)?.f_expand([-1, 0, 4], false)?;
            let one = x.f_narrow(1, 3, 1)?.f_narrow(2, 2, 1)?;
            Ok(vec![gaps, offset, mask, empty, one])
        },
    };
    let join = Step {
        kind: "joined",
        weights: &[&[COLUMNS, 2], &[COLUMNS, COLUMNS]],
        shapes: |inputs| vec![like(&inputs[1], &[COLUMNS]), inputs[2].clone(), inputs[3].clone()],
        forward: |ctx, inputs| {
            let gaps = inputs[0].f_mul(ctx.parameter(0)?)?.f_sum_dim_intlist(2_i64, false, None)?;
            let offset = inputs[1].f_matmul(ctx.parameter(1)?)?;
            let x = gaps.f_add(&offset)?.f_add(&inputs[4].f_squeeze_dim(2)?)?;
            let (mask, empty) = (inputs[2].shallow_clone(), inputs[3].shallow_clone());
            Ok(vec![x.f_tanh()?, mask, empty])
        },
    };
    let finish = Step {
        kind: "logits",
        weights: &[&[CLASSES, COLUMNS]],
        shapes: |inputs| vec![like(&inputs[0], &[3, CLASSES])],
        forward: |ctx, inputs| {
            let masked = inputs[0].f_masked_fill(&inputs[1].f_logical_not()?, 0.0)?;
            let nothing =
                inputs[2].f_sum_dim_intlist(&[1_i64, 2][..], false, None)?.f_unsqueeze(1)?;
            let w = ctx.parameter(0)?;
            let logits = w.f_matmul(&masked.f_add(&nothing)?.f_transpose(0, 1)?)?;
            Ok(vec![logits.f_transpose(0, 1)?.f_unsqueeze(1)?.f_expand([-1, 3, -1], false)?])
        },
    };
    let sum = Step {
        kind: "sum, whose gradient is expanded",
        weights: &[],
        shapes: |inputs| vec![like(&inputs[0], &[CLASSES])],
        forward: |_, inputs| Ok(vec![inputs[0].f_sum_dim_intlist(1_i64, false, None)?]),
    };
    Sequence::new()
        .push("scale", scale)
        .push("windows", windows)
        .push("weigh", weigh)
        .push("expand", expand)
        .push("strided", strided)
        .push("join", join)
        .push("logits", finish)
        .push("sum", sum)
}

/// Inputs and targets: a fixed function of `seed`. The inputs are themselves a strided view.
pub fn batch(samples: i64, seed: u64) -> (Vec<Tensor>, Tensor) {
    let whole = uniform(&[samples, ROWS, COLUMNS + 2], seed, Kind::Float);
    let targets = uniform(&[samples], seed + 1000, Kind::Float).abs() * CLASSES as f64;
    (vec![whole.narrow(2, 1, COLUMNS)], targets.floor().to_kind(Kind::Int64))
}

pub fn inputs() -> Vec<TensorSpec> {
    vec![TensorSpec::new([4, ROWS, COLUMNS], Kind::Float)]
}

pub fn build(builder: PipelineBuilder) -> PipelineBuilder {
    builder.loss(CrossEntropy::default()).optimizer(Sgd {
        lr: 0.05,
        momentum: 0.9,
        nesterov: false,
        weight_decay: 0.0,
    })
}

/// A builder of the model, to be run as `run` says.
pub fn builder(run: &Run, micro_batches: usize) -> PipelineBuilder {
    build(run.builder_of(model(), inputs(), micro_batches))
}
