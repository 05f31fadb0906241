//! What a layer of nearly no work costs: a sequence of affine maps `[4]` to `[4]` on one stage,
//! with one sample.
//!
//! `layer_calls layers=N steps=N` prints one line of JSON with microseconds per step.
//! `benchmarks/python_package.py` runs the same sequence through the Python package. The layer
//! calls the operator that `nn.Linear` calls, so that the difference is that of the languages, and
//! not that of gpipe's own `Linear`, whose backward is one node instead of three.
#![allow(clippy::print_stdout)]

use gpipe::{
    Forward, Infer, Init, Kernels, Layer, LayerError, MeanSquaredError, ParameterSpec, Pipeline,
    RematPolicies, Sequence, Sgd, TensorSpec,
};
use tch::{Device, Kind, Tensor};

/// `torch.nn.functional.linear`.
struct Linear;

impl Layer for Linear {
    fn kind(&self) -> &'static str {
        "linear"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        let init = Init::Uniform { bound: 0.5 };
        vec![ParameterSpec::new("weight", [4, 4], init), ParameterSpec::new("bias", [4], init)]
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        Ok(vec![inputs[0].f_linear(ctx.parameter(0)?, Some(ctx.parameter(1)?))?])
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let number = |name: &str, otherwise: usize| {
        let own = std::env::args().find_map(|own| own.strip_prefix(name)?.parse().ok());
        own.unwrap_or(otherwise)
    };
    let (layers, steps) = (number("layers=", 100), number("steps=", 200));
    let mut sequence = Sequence::new();
    for at in 0..layers {
        sequence = sequence.push(at.to_string(), Linear);
    }
    let mut pipeline = Pipeline::builder(sequence, TensorSpec::new([1, 4], Kind::Float))
        .remat("never".parse::<RematPolicies>()?)
        .kernels(Kernels::Aten)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.01))
        .build()?;
    let x = Tensor::ones([1, 4], (Kind::Float, Device::Cpu));
    let mut spent = Vec::new();
    for _ in 0..steps {
        // As the package reports it: the stage's time, without the driver's.
        spent.push(pipeline.train_step(&x, &x)?.time.0 as f64 * 1e-3);
    }
    println!("{{\"layers\": {layers}, \"step_us\": {spent:?}}}");
    Ok(())
}
