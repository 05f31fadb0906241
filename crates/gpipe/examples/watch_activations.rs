//! An observer: prints the size and the time of every layer's output in one step, and which layers
//! were computed again.
//!
//! `cargo run --release --example watch_activations`
#![allow(clippy::print_stdout)]

use gpipe::{
    LayerError, LayerEvent, MeanSquaredError, Observer, Pass, Pipeline, Remat, Sequence, Sgd,
    TensorSpec, When,
    layers::{Activation, Linear},
};
use tch::{Device, Kind, Tensor};

struct Watch;

impl Observer for Watch {
    // Called on the threads of the stages, before and after each pass of each layer.
    fn layer(&self, event: &LayerEvent) -> Result<(), LayerError> {
        let (Pass::Forward | Pass::Recompute, When::After(time)) = (event.pass, event.when) else {
            return Ok(());
        };
        for output in event.tensors.iter().flatten() {
            let size = output.f_norm()?.f_double_value(&[])?;
            let (micro_batch, layer, pass) = (event.micro_batch, event.layer, event.pass);
            println!("micro-batch {micro_batch}, {layer}: {pass:?} norm {size:.3} in {time}");
        }
        Ok(())
    }
}

fn main() -> gpipe::Result<()> {
    tch::manual_seed(0);
    let model = Sequence::new()
        .push("first", Linear::new(8, 32))
        .push("tanh", Activation::Tanh)
        .push("last", Linear::new(32, 1));
    let mut pipeline = Pipeline::builder(model, TensorSpec::new([16, 8], Kind::Float))
        .stages(2)
        .micro_batches(2)
        .remat(Remat::Always)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.1))
        .observer(Watch)
        .build()?;
    let x = Tensor::randn([16, 8], (Kind::Float, Device::Cpu));
    let report = pipeline.train_step(&x, x.sum_dim_intlist(1_i64, true, None))?;
    println!("loss {:.4}", report.loss);
    Ok(())
}
