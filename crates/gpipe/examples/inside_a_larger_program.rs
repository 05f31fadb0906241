//! Two pipelines inside a program that computes the losses: a generator and a critic (Goodfellow et
//! al. 2014, with the least-squares loss of Mao et al. 2017) learn a normal distribution around 3.
//!
//! `cargo run --release --example inside_a_larger_program`
#![allow(clippy::print_stdout)]

use gpipe::{
    Adam, Pipeline, Sequence, TensorSpec,
    layers::{Activation, Linear},
};
use tch::{Device, Kind, Tensor};

fn pipeline(inputs: i64) -> gpipe::Result<Pipeline> {
    let model = Sequence::new()
        .layer(Linear::new(inputs, 32))
        .layer(Activation::Relu)
        .layer(Linear::new(32, 1));
    Pipeline::builder(model, TensorSpec::new([128, inputs], Kind::Float))
        .stages(2)
        .micro_batches(4)
        .optimizer(Adam { lr: 2e-3, beta1: 0.5, ..Adam::default() })
        .input_gradients() // the generator learns through the critic's
        .build()
}

/// How far scores are from saying "real" (1) or "made" (0).
fn loss(scores: &[Tensor], says: f64) -> Tensor {
    (&scores[0] - says).square().mean(Kind::Float)
}

fn main() -> gpipe::Result<()> {
    tch::manual_seed(1);
    let (mut generator, mut critic) = (pipeline(4)?, pipeline(1)?);
    let normal = |columns: i64| Tensor::randn([128, columns], (Kind::Float, Device::Cpu));
    for step in 0..=600 {
        let made = generator.forward(normal(4))?;
        let fake = made.tensors()[0].detach();
        // The critic learns to tell real samples from made ones.
        let (on_real, on_fake) = (critic.forward(normal(1) * 0.5 + 3.0)?, critic.forward(&fake)?);
        (loss(on_real.tensors(), 1.0) + loss(on_fake.tensors(), 0.0)).backward();
        critic.backward(&on_real, on_real.gradients())?;
        critic.backward(&on_fake, on_fake.gradients())?;
        critic.update()?;
        // The generator learns to make what the critic takes for real.
        let judged = critic.forward(&fake)?;
        loss(judged.tensors(), 1.0).backward();
        let through = critic.backward(&judged, judged.gradients())?;
        critic.discard_update()?;
        generator.backward(&made, through)?;
        generator.update()?;
        if step % 100 == 0 {
            println!("step {step}: mean {:.2}", fake.mean(Kind::Float).double_value(&[]));
        }
    }
    Ok(())
}
