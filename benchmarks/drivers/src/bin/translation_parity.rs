//! Produces the results that `scripts/translation_parity.py` compares with PyTorch. Trains a small
//! encoder-decoder for several steps on two stages, and writes a safetensors file for each case.
//!
//! Usage: `translation_parity FOLDER`
//!
//! FOLDER/DTYPE-TIES-LAYERS.safetensors holds `source`, `target`, `targets`, `0/parameter/NAME`,
//! `S/loss`, `S/gradient/NAME` and `S/parameter/NAME` after each step S from 1, and the
//! evaluation's `logits` after the last step.

use gpipe::{Adam, Balance, CrossEntropy, Pipeline, TensorSpec};
use gpipe_drivers::{Failure, Numbers};
use gpipe_models::Translation;
use tch::{Kind, Tensor};

const STEPS: usize = 3;
const PAD: i64 = 0;
const BEGIN: i64 = 1;
const END: i64 = 2;
const IGNORED: i64 = -100;
/// Tokens of each source and target sentence, without the target's begin and end. Three
/// micro-batches have 3, 2 and 2 samples.
const LENGTHS: [(i64, i64); 7] = [(9, 8), (1, 3), (4, 0), (13, 11), (2, 2), (7, 12), (11, 5)];

/// Which weights are shared: as in the paper (softmax and target embedding), all three, or none.
const TIES: [(&str, bool, bool); 3] =
    [("paper", true, false), ("shared", true, true), ("untied", false, false)];

fn main() -> Result<(), Failure> {
    let folder = std::env::args().nth(1).ok_or("usage: translation_parity FOLDER")?;
    for (dtype, kind) in [("float64", Kind::Double), ("float32", Kind::Float)] {
        for (name, tied, shared) in TIES {
            for split_blocks in [true, false] {
                let layers = if split_blocks { "split" } else { "blocks" };
                let model = model(tied, shared, split_blocks);
                let path = format!("{folder}/{dtype}-{name}-{layers}.safetensors");
                Tensor::write_safetensors(&trained(&model, kind)?, path)?;
            }
        }
    }
    Ok(())
}

/// A model of width 48 whose attention has 3 heads of 12, so its width is 36.
fn model(tied: bool, shared: bool, split_blocks: bool) -> Translation {
    Translation {
        source_vocabulary: if shared { 131 } else { 151 },
        target_vocabulary: 131,
        pad: PAD,
        features: 48,
        heads: 3,
        head_size: 12,
        hidden: 96,
        encoder_layers: 2,
        decoder_layers: 2,
        dropout: 0.0,
        attention_dropout: 0.0,
        logit_clip: 2.0,
        tied,
        shared,
        split_blocks,
    }
}

type Named = Vec<(String, Tensor)>;

fn trained(model: &Translation, kind: Kind) -> Result<Named, Failure> {
    let (inputs, targets) = batch(model)?;
    // The second stage starts inside a decoder layer, or with the last decoder layer.
    let cut = if model.split_blocks { vec![8, 5] } else { vec![5, 2] };
    let specs: Vec<_> = inputs.iter().map(TensorSpec::of).collect();
    let mut pipeline = Pipeline::builder(model.build()?, specs)
        .stages(2)
        .balance(Balance::Layers(cut))
        .micro_batches(3)
        .seed(7)
        .kind(kind)
        .keep_gradients()
        .loss(CrossEntropy { label_smoothing: 0.1, ignore: IGNORED })
        .optimizer(Adam { lr: 1e-2, ..Adam::default() })
        .build()?;
    let mut tensors = named("0/parameter", pipeline.parameters()?);
    for step in 1..=STEPS {
        let report = pipeline.train_step(&inputs[..], &targets)?;
        tensors.push((format!("{step}/loss"), Tensor::f_from_slice(&[report.loss])?));
        tensors.extend(named(&format!("{step}/gradient"), pipeline.gradients()?));
        tensors.extend(named(&format!("{step}/parameter"), pipeline.parameters()?));
    }
    let logits = pipeline.predict(&inputs[..])?.into_iter().next().ok_or("there is no output")?;
    let [source, target] = <[Tensor; 2]>::try_from(inputs).map_err(|_| "two inputs")?;
    tensors.extend([
        ("logits".into(), logits),
        ("source".into(), source),
        ("target".into(), target),
        ("targets".into(), targets),
    ]);
    Ok(tensors)
}

/// Sources, and targets that begin with [`BEGIN`], padded with [`PAD`], and the loss's targets,
/// which end with [`END`].
fn batch(model: &Translation) -> Result<(Vec<Tensor>, Tensor), Failure> {
    let mut numbers = Numbers::default();
    let mut sentence = |vocabulary: i64, length: i64| -> Result<Vec<i64>, Failure> {
        Ok(numbers.below(vocabulary - 3, &[length])?.f_add_scalar(3)?.try_into()?)
    };
    let (mut sources, mut given, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
    for (source, target) in LENGTHS {
        sources.push(sentence(model.source_vocabulary, source)?);
        let said = sentence(model.target_vocabulary, target)?;
        given.push([&[BEGIN], &said[..]].concat());
        wanted.push([&said[..], &[END]].concat());
    }
    let inputs = vec![filled(&sources, PAD)?, filled(&given, PAD)?];
    Ok((inputs, filled(&wanted, IGNORED)?))
}

/// Rows padded to the same length.
fn filled(rows: &[Vec<i64>], fill: i64) -> Result<Tensor, Failure> {
    let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
    let row = |row: &Vec<i64>| {
        let mut row = row.clone();
        row.resize(longest, fill);
        row
    };
    let all: Vec<i64> = rows.iter().flat_map(row).collect();
    Ok(Tensor::f_from_slice(&all)?.f_reshape([rows.len() as i64, longest as i64])?)
}

fn named(prefix: &str, tensors: Named) -> Named {
    tensors.into_iter().map(|(name, tensor)| (format!("{prefix}/{name}"), tensor)).collect()
}
