//! One weight in two layers: a language model's embedding on the first stage and its output
//! projection on the last. Each use has its own gradient. The gradients are summed once per
//! mini-batch, in layer order, so the sum has the same bits for any number of stages.
//!
//! `cargo run --release --example tied_weights`
#![allow(clippy::print_stdout)]

use gpipe::{
    Adam, CrossEntropy, Pipeline, Sequence, TensorSpec,
    layers::{Activation, Embedding, Head, Linear},
};
use tch::{Device, Kind, Tensor};

const VOCABULARY: i64 = 50;
const FEATURES: i64 = 32;
const LENGTH: i64 = 12; // tokens

fn main() -> gpipe::Result<()> {
    let tie = Some("tokens".to_owned());
    let model = Sequence::new()
        .push(
            "embedding",
            Embedding {
                vocabulary: VOCABULARY,
                features: FEATURES,
                positions: LENGTH,
                std: 0.1,
                dropout: 0.0,
                tie: tie.clone(),
            },
        )
        .push("hidden", Linear::new(FEATURES, FEATURES))
        .push("gelu", Activation::Gelu)
        .push(
            "head",
            Head { features: FEATURES, vocabulary: VOCABULARY, std: 0.1, logit_clip: 0.0, tie },
        );
    let mut pipeline = Pipeline::builder(model, TensorSpec::new([8, LENGTH], Kind::Int64))
        .stages(2)
        .micro_batches(2)
        .loss(CrossEntropy::default())
        .optimizer(Adam::default())
        .build()?;

    tch::manual_seed(0);
    let tokens = Tensor::randint(VOCABULARY, [8, LENGTH + 1], (Kind::Int64, Device::Cpu));
    let (inputs, targets) = (tokens.narrow(1, 0, LENGTH), tokens.narrow(1, 1, LENGTH));
    for _ in 0..3 {
        let report = pipeline.train_step(&inputs, &targets)?;
        println!("step {}: loss {:.4}", report.step, report.loss);
    }
    for (name, value) in pipeline.parameters()? {
        println!("{name} {:?}", value.size()); // the tied weight appears once
    }
    Ok(())
}
