//! A custom layer: a gate with one scale per feature, y = x * sigmoid(scale * x).
//!
//! A layer is only a description: it declares its parameters and how to compute. The stage that
//! gets the layer creates and holds the parameters. So the same network runs in any number of
//! stages.
//!
//! `cargo run --release --example custom_layer`
#![allow(clippy::print_stdout)]

use gpipe::{
    Forward, Infer, Init, Layer, LayerError, MeanSquaredError, ParameterSpec, Pipeline, Sequence,
    Sgd, TensorSpec, layers::Linear,
};
use tch::{Device, Kind, Tensor};

/// x: [samples, features] -> [samples, features].
struct Gate {
    features: i64,
}

impl Layer for Gate {
    fn kind(&self) -> &'static str {
        "gate"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![ParameterSpec::new("scale", [self.features], Init::Ones)]
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    // `f_mul` and the other `f_*` forms return an error where `mul` would panic.
    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let gate = inputs[0].f_mul(ctx.parameter(0)?)?.f_sigmoid()?;
        Ok(vec![inputs[0].f_mul(&gate)?])
    }
}

fn main() -> gpipe::Result<()> {
    tch::manual_seed(0);
    let x = Tensor::randn([16, 8], (Kind::Float, Device::Cpu));
    for stages in [1, 2, 3] {
        let model = Sequence::new()
            .layer(Linear::new(8, 32))
            .layer(Gate { features: 32 })
            .layer(Linear::new(32, 8));
        let mut pipeline = Pipeline::builder(model, TensorSpec::new([16, 8], Kind::Float))
            .stages(stages)
            .micro_batches(4)
            .loss(MeanSquaredError)
            .optimizer(Sgd::new(0.1))
            .build()?;
        let report = pipeline.train_step(&x, &x)?;
        println!("{stages} stages: loss {}", report.loss); // the same bits each time
    }
    Ok(())
}
