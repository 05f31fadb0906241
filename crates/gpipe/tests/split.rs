//! Split backwards in cases where PyTorch's are known to be wrong. PyTorch counts a weight twice if
//! a layer uses it twice (pytorch#180952), and mixes up nodes with several outputs
//! (pytorch#170277).
//!
//! Under ZB-H1 each network here must have the gradients of unsplit backwards, to the bit, and
//! those that autograd computes for the network as one graph.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use crate::common;

use common::{Named, assert_close, assert_same_bits, uniform};
use gpipe::{
    Forward, Infer, Init, Layer, LayerError, MeanSquaredError, ParameterSpec, Pipeline, Remat,
    Schedule, Sequence, Sgd, TensorSpec, layers::Linear,
};
use tch::{Kind, Tensor};

const WIDTH: i64 = 12;
const SAMPLES: i64 = 6;

type Result = std::result::Result<Tensor, LayerError>;

/// Computes a layer's output from its input and its weights `[WIDTH, WIDTH]`. The output has the
/// input's shape.
type Compute = fn(&Tensor, &[Tensor]) -> Result;

struct Net {
    weights: usize,
    compute: Compute,
}

impl Layer for Net {
    fn kind(&self) -> &'static str {
        "net"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        let spec =
            |i| ParameterSpec::new(&format!("w{i}"), [WIDTH, WIDTH], Init::Normal { std: 0.3 });
        (0..self.weights).map(spec).collect()
    }

    fn infer(
        &self,
        _: &mut Infer,
        inputs: &[TensorSpec],
    ) -> std::result::Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(
        &self,
        ctx: &mut Forward,
        inputs: &[Tensor],
    ) -> std::result::Result<Vec<Tensor>, LayerError> {
        let weights = (0..self.weights).map(|i| Ok(ctx.parameter(i)?.shallow_clone()));
        let weights = weights.collect::<std::result::Result<Vec<_>, LayerError>>()?;
        Ok(vec![(self.compute)(&inputs[0], &weights)?])
    }
}

/// The networks: name, number of weights, function.
const NETWORKS: &[(&str, usize, Compute)] = &[
    ("twice in a row", 1, |x, w| Ok(x.f_matmul(&w[0])?.f_tanh()?.f_matmul(&w[0])?)),
    ("twice side by side", 1, |x, w| {
        Ok(x.f_matmul(&w[0])?.f_add(&x.f_sin()?.f_matmul(&w[0].f_transpose(0, 1)?)?)?)
    }),
    ("three times, once through another", 2, |x, w| {
        let both = w[0].f_matmul(&w[1])?;
        Ok(x.f_matmul(&both)?.f_tanh()?.f_matmul(&w[0])?.f_sigmoid()?.f_matmul(&w[1])?)
    }),
    ("in the input's way and beside it", 1, |x, w| {
        Ok(x.f_matmul(&w[0])?.f_add(&w[0].f_exp()?.f_sum_dim_intlist(0_i64, false, None)?)?)
    }),
    ("a product with itself", 1, |x, w| Ok(x.f_matmul(&w[0].f_matmul(&w[0])?)?)),
    ("halves of one weight", 1, |x, w| {
        let parts = w[0].f_chunk(2, 1)?;
        let left = x.f_matmul(&parts[0])?;
        let right = x.f_cos()?.f_matmul(&parts[1])?;
        Ok(Tensor::f_cat(&[&right, &left], 1)?)
    }),
    ("three parts of one product, as attention has them", 3, |x, w| {
        let weights = Tensor::f_cat(&[&w[0], &w[1], &w[2]], 1)?;
        let parts = x.f_matmul(&weights)?.f_chunk(3, 1)?;
        let scores = parts[0].f_matmul(&parts[1].f_transpose(0, 1)?)?;
        Ok(scores.f_softmax(1, Kind::Float)?.f_matmul(&parts[2])?)
    }),
    ("of several outputs, one unused", 2, |x, w| {
        let parts = x.f_matmul(&w[0])?.f_split(WIDTH / 3, 1)?;
        Ok(Tensor::f_cat(&[&parts[2], &parts[0], &parts[2]], 1)?.f_matmul(&w[1])?)
    }),
    ("unbound rows in another order", 1, |x, w| {
        let columns = x.f_matmul(&w[0])?.f_unbind(1)?;
        let turned: Vec<&Tensor> = columns.iter().rev().collect();
        Ok(Tensor::f_stack(&turned, 1)?)
    }),
    ("variance and mean of one node", 2, |x, w| {
        let hidden = x.f_matmul(&w[0])?;
        let (variance, mean) = hidden.f_var_mean_dim(1_i64, true, true)?;
        let normed = hidden.f_sub(&mean)?.f_div(&variance.f_add_scalar(1.0)?.f_sqrt()?)?;
        Ok(normed.f_matmul(&w[1])?.f_add(&mean)?)
    }),
    ("values and places of a sort", 1, |x, w| {
        let hidden = x.f_matmul(&w[0])?;
        let (values, places) = hidden.f_sort(1, false)?;
        Ok(values.f_add(&x.f_gather(1, &places, false)?)?)
    }),
    ("the largest and its place", 2, |x, w| {
        let hidden = x.f_matmul(&w[0])?;
        let (largest, _) = hidden.f_max_dim(1, true)?;
        let (smallest, _) = hidden.f_min_dim(1, true)?;
        Ok(hidden.f_mul(&largest)?.f_add(&smallest)?.f_matmul(&w[1])?)
    }),
    ("a decomposition", 1, |x, w| {
        let square = w[0].f_transpose(0, 1)?.f_matmul(&w[0])?;
        let one = Tensor::f_eye(WIDTH, (Kind::Float, x.device()))?;
        let (values, vectors) = square.f_add(&one)?.f_linalg_eigh("L")?;
        Ok(x.f_matmul(&vectors.f_mul(&values)?.f_matmul(&vectors.f_transpose(0, 1)?)?)?)
    }),
    ("one input by two ways to one weight", 2, |x, w| {
        let inner = x.f_matmul(&w[0])?;
        let outer = inner.f_tanh()?.f_add(&inner.f_square()?)?;
        Ok(outer.f_matmul(&w[1])?.f_add(&inner)?.f_add(x)?)
    }),
];

fn sequence(weights: usize, compute: Compute) -> Sequence {
    Sequence::new()
        .push("first", Linear::new(WIDTH, WIDTH))
        .push("own", Net { weights, compute })
        .push("again", Net { weights, compute })
        .push("last", Linear::new(WIDTH, WIDTH))
}

fn data() -> (Tensor, Tensor) {
    (uniform(&[SAMPLES, WIDTH], 1, Kind::Float), uniform(&[SAMPLES, WIDTH], 2, Kind::Float))
}

/// The gradients of two steps.
fn train(model: Sequence, stages: usize, schedule: &Schedule, remat: Remat, m: usize) -> Named {
    let mut pipeline = Pipeline::builder(model, TensorSpec::new([SAMPLES, WIDTH], Kind::Float))
        .stages(stages)
        .micro_batches(m)
        .schedule(schedule.clone())
        .remat(remat)
        .seed(5)
        .keep_gradients()
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.05))
        .build()
        .unwrap();
    let (x, y) = data();
    let mut all = Named::new();
    for step in 0..2 {
        pipeline.train_step(&x, &y).unwrap();
        let named = pipeline.gradients().unwrap().into_iter();
        all.extend(named.map(|(name, gradient)| (format!("{step} {name}"), gradient)));
    }
    all
}

#[test]
fn regression_split_backwards_have_the_gradients_of_whole_ones() {
    for &(what, weights, compute) in NETWORKS {
        let model = || sequence(weights, compute);
        for m in [1, 4] {
            let whole = train(model(), 1, &Schedule::GPipe, Remat::Never, m);
            assert_eq!(whole.len(), 2 * (2 * 2 + 2 * weights), "{what}: a gradient of each");
            for stages in [1, 2, 4] {
                for remat in [Remat::Never, Remat::Always] {
                    let found = train(model(), stages, &Schedule::ZbH1, remat, m);
                    let at = format!("{what}: {stages} stages, {remat:?}, M = {m}");
                    assert_same_bits(&found, &whole, &at);
                }
            }
        }
    }
}

/// Compares with autograd on one graph, without a pipeline.
#[test]
fn oracle_split_backwards_have_autograds_gradients() {
    for &(what, weights, compute) in NETWORKS {
        let mut pipeline = Pipeline::builder(
            sequence(weights, compute),
            TensorSpec::new([SAMPLES, WIDTH], Kind::Float),
        )
        .stages(2)
        .micro_batches(1)
        .schedule(Schedule::ZbH1)
        .seed(5)
        .keep_gradients()
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.05))
        .build()
        .unwrap();
        let leaves: Named = pipeline.parameters().unwrap();
        let leaf = |name: &str| {
            let found = leaves.iter().find(|(own, _)| own == name).unwrap();
            found.1.shallow_clone().set_requires_grad(true)
        };
        let linear = |x: &Tensor, name: &str| {
            x.linear(&leaf(&format!("{name}.weight")), Some(leaf(&format!("{name}.bias"))))
        };
        let own = |x: &Tensor, name: &str| {
            let all: Vec<Tensor> = (0..weights).map(|i| leaf(&format!("{name}.w{i}"))).collect();
            compute(x, &all).unwrap()
        };
        let (x, y) = data();
        let hidden = own(&own(&linear(&x, "first"), "own"), "again");
        let output = linear(&hidden, "last");
        output.mse_loss(&y, tch::Reduction::Mean).backward();
        let expected: Named = leaves.iter().map(|(name, own)| (name.clone(), own.grad())).collect();
        pipeline.train_step(&x, &y).unwrap();
        // The same sums in another order, because the pipeline's graphs end at each layer.
        assert_close(&pipeline.gradients().unwrap(), &expected, 1e-5, what);
    }
}
