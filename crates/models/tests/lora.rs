//! Low-rank adapters. `oracle_`: values and gradients are those of the weights that adapters make;
//! `transparency_`: the same bits at every cut, schedule and policy; `fault_`: settings that do not
//! fit.

use gpipe::{
    Adam, CrossEntropy, Forward, Infer, IntoTensors, LORA_A, LORA_B, Layer, LayerError, Lora,
    Moments, ParameterSpec, Pipeline, Sequence, Sgd, TensorSpec, Tensors,
    layers::{DOCUMENTS, Linear, RmsNorm},
};
use gpipe_models::{Llama, Transformer};
use tch::{Device, Kind, Tensor};

use crate::{
    common::{Run, assert_same_bits},
    documents::{documents, spec},
    llama::{LENGTH, after_two_steps, experts, inputs, model, tokens},
};

fn lora(targets: &[&str]) -> Lora {
    let targets = targets.iter().map(|own| (*own).to_owned()).collect();
    Lora { rank: 3, alpha: 5.0, dropout: 0.0, targets }
}

/// A decoder of another family, whose blocks are whole.
pub fn transformer(dropout: f64) -> Transformer {
    Transformer {
        vocabulary: 31,
        positions: LENGTH,
        features: 12,
        heads: 2,
        hidden: 20,
        blocks: 2,
        dropout,
        attention_dropout: 0.0,
        tied: true,
        split_blocks: false,
        gelu: Default::default(),
    }
}

fn find<'a>(all: &'a [(String, Tensor)], name: &str) -> &'a Tensor {
    &all.iter().find(|(own, _)| own == name).unwrap_or_else(|| panic!("no {name}")).1
}

/// The parameters with adapters merged into their weights, and the names of the adapted ones.
fn merged(all: &[(String, Tensor)], scale: f64) -> (Vec<(String, Tensor)>, Vec<String>) {
    let mut adapted = Vec::new();
    let own = all.iter().filter(|(name, _)| !name.contains(".lora_")).map(|(name, value)| {
        let map = name.strip_suffix("weight").unwrap_or(name);
        let a = format!("{map}{LORA_A}");
        if !all.iter().any(|(own, _)| *own == a) {
            return (name.clone(), value.shallow_clone());
        }
        adapted.push(name.clone());
        let product = find(all, &format!("{map}{LORA_B}")).matmul(find(all, &a));
        (name.clone(), value + product * scale)
    });
    (own.collect(), adapted)
}

#[test]
fn oracle_adapters_are_a_change_of_their_weights() {
    let llama = || model().build().unwrap();
    let own = || transformer(0.0).build().unwrap();
    let mixed = || experts(0.0).build().unwrap();
    let some = ["q_proj", "model.layers.1.*_proj"];
    let models: [&dyn Fn() -> Sequence; 4] = [&llama, &llama, &own, &mixed];
    let cases: [(&[&str], usize); 4] = [(&["*"], 21), (&some, 9), (&["*"], 8), (&["*"], 15)];
    for (plain, (targets, count)) in models.into_iter().zip(cases) {
        let lora = lora(targets);
        let builder = |model: Sequence| {
            let builder = Pipeline::builder(model, inputs()).kind(Kind::Double).keep_gradients();
            builder.loss(CrossEntropy::default()).optimizer(Sgd::new(0.5))
        };
        let mut own = builder(plain().with_lora(&lora).unwrap()).build().unwrap();
        let mut whole = builder(plain()).build().unwrap();
        let before = own.parameters().unwrap();
        // Adapters that are new change nothing.
        let batch = || (tokens(7, LENGTH, 1), tokens(7, LENGTH, 4));
        let value = |of: &mut Pipeline| of.predict(batch().0).unwrap().remove(0);
        assert!(value(&mut own) == value(&mut whole));
        for _ in 0..3 {
            own.train_step(batch().0, batch().1).unwrap();
        }
        let after = own.parameters().unwrap();
        for (name, value) in &before {
            let is_adapter = name.contains(".lora_");
            assert_eq!(find(&after, name) == value, !is_adapter, "{name}");
        }
        let (all, adapted) = merged(&after, lora.alpha / lora.rank as f64);
        assert_eq!(adapted.len(), count, "{adapted:?}");
        whole.set_parameters(&all).unwrap();
        let (a, b) = (value(&mut own), value(&mut whole));
        assert!((&a - &b).abs().max().double_value(&[]) < 1e-12 * b.abs().max().double_value(&[]));
        // G of the merged weight gives those of its factors: s B^T G and s G A^T.
        own.train_step(batch().0, batch().1).unwrap();
        whole.train_step(batch().0, batch().1).unwrap();
        let (own, whole) = (own.gradients().unwrap(), whole.gradients().unwrap());
        assert_eq!(own.len(), 2 * count, "nothing else has a gradient");
        let scale = lora.alpha / lora.rank as f64;
        for name in &adapted {
            let (gradient, map) = (find(&whole, name), name.strip_suffix("weight").unwrap());
            let [a, b] = [LORA_A, LORA_B].map(|end| format!("{map}{end}"));
            let expected = [
                (&a, find(&after, &b).tr().matmul(gradient) * scale),
                (&b, gradient.matmul(&find(&after, &a).tr()) * scale),
            ];
            for (name, expected) in expected {
                let apart = (find(&own, name) - &expected).abs().max().double_value(&[]);
                let size = expected.abs().max().double_value(&[]);
                assert!(apart <= 1e-10 * size.max(1e-6), "{name}: {apart:e} of {size:e}");
            }
        }
    }
}

#[test]
fn transparency_of_adapters() {
    let lora = Lora { dropout: 0.25, ..lora(&["*"]) };
    let layers = model().build().unwrap().len();
    let dropping = Llama { attention_dropout: 0.2, ..model() };
    for (model, kind) in [(dropping, Kind::Float), (model(), Kind::BFloat16)] {
        let trained = |run: &Run| {
            let sequence = model.build().unwrap().with_lora(&lora).unwrap();
            let builder = run.builder_of(sequence, inputs(), 3);
            let pipeline = builder.kind(kind).clip_norm(1.0).build().unwrap();
            after_two_steps(pipeline, |step| {
                (tokens(7, LENGTH, step).into_tensors(), tokens(7, LENGTH, step + 5))
            })
        };
        let expected = trained(&Run::plain());
        for run in Run::all(layers).into_iter().step_by(3) {
            assert_same_bits(&trained(&run), &expected, &format!("{run:?} {kind:?}"));
        }
    }
}

/// Everything that fine-tuning in little memory combines: adapters with dropout on a frozen network
/// in bfloat16, several documents in a row, the loss on some rows at a time, moments in bfloat16.
#[test]
fn transparency_of_a_fine_tuning() {
    let lora = Lora { dropout: 0.25, ..lora(&["*"]) };
    let layers = model().build().unwrap().len();
    let trained = |run: &Run| {
        let sequence = model().build().unwrap().with_lora(&lora).unwrap();
        let builder = run.builder_of(sequence, vec![spec(2)], 3).named_input(DOCUMENTS, spec(2));
        let rule = Adam { moments: Moments::BFloat16, ..Adam::default() };
        let builder = builder.kind(Kind::BFloat16).loss_rows(5).optimizer(rule).clip_norm(1.0);
        after_two_steps(builder.build().unwrap(), |step| {
            let inputs = Tensors::new(tokens(7, LENGTH, step)).named(DOCUMENTS, documents(7));
            (inputs, tokens(7, LENGTH, step + 5))
        })
    };
    let expected = trained(&Run::plain());
    for run in Run::all(layers).into_iter().step_by(3) {
        assert_same_bits(&trained(&run), &expected, &format!("{run:?}"));
    }
}

/// The first adapters were frozen at 0, without a word.
#[test]
fn regression_adapters_are_added_once() {
    let model = model().build().unwrap().with_lora(&lora(&["q_proj"])).unwrap();
    let error = model.with_lora(&lora(&["*.down_proj"])).err().unwrap().to_string();
    assert!(error.contains("the model has adapters already"), "{error}");
}

#[test]
fn oracle_only_adapters_have_float32_values_gradients_and_state() {
    let sequence = model().build().unwrap().with_lora(&lora(&["*_proj"])).unwrap();
    let builder = Pipeline::builder(sequence, inputs()).kind(Kind::BFloat16).keep_gradients();
    let builder = builder.loss(CrossEntropy::default()).optimizer(Adam::default()).average(0.9);
    let mut pipeline = builder.build().unwrap();
    pipeline.train_step(tokens(4, LENGTH, 1), tokens(4, LENGTH, 2)).unwrap();
    for layer in pipeline.outline() {
        for own in layer.parameters {
            let is_adapter = own.name.contains("lora_");
            let kind = if is_adapter { Kind::Float } else { Kind::BFloat16 };
            assert_eq!((own.kind, own.averaged), (kind, is_adapter), "{}", own.name);
            assert_eq!(own.optimizer.is_empty(), !is_adapter);
        }
    }
    for (name, value) in pipeline.parameters().unwrap() {
        let kind = if name.contains(".lora_") { Kind::Float } else { Kind::BFloat16 };
        assert_eq!(value.kind(), kind, "{name}");
    }
    let gradients = pipeline.gradients().unwrap();
    assert!(
        gradients.iter().all(|(name, own)| name.contains(".lora_") && own.kind() == Kind::Float)
    );
}

/// Parameters that are given are those of the model; adapters start from their own values.
#[test]
fn oracle_adapters_start_anew_beside_given_parameters() {
    let sequence = || model().build().unwrap().with_lora(&lora(&["q_proj"])).unwrap();
    let built = |sequence: Sequence| Pipeline::builder(sequence, inputs()).kind(Kind::BFloat16);
    let mut own = built(sequence()).build().unwrap();
    let values = own.parameters().unwrap();
    let (adapters, base): (Vec<_>, Vec<_>) = values
        .iter()
        .map(|(name, own)| (name.clone(), own.shallow_clone()))
        .partition(|(name, _)| name.contains(".lora_"));
    let mut given = built(sequence()).given_parameters().build().unwrap();
    given.set_parameters(&base).unwrap();
    assert_eq!(adapters.len(), 6);
    assert_same_bits(&given.parameters().unwrap(), &values, "given");
    let batch = tokens(2, LENGTH, 0);
    assert!(given.predict(&batch).unwrap()[0] == own.predict(&batch).unwrap()[0]);
}

/// A linear layer that says it can be adapted, and passes a copy of its weight.
struct Copies(Linear);

impl Layer for Copies {
    fn kind(&self) -> &'static str {
        "Copies"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.0.parameters()
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        self.0.infer(ctx, inputs)
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let weight = ctx.parameter(0)?.shallow_clone();
        Ok(vec![ctx.linear(&inputs[0], &weight, Some(ctx.parameter(1)?))?])
    }

    fn adaptable(&self) -> Vec<usize> {
        vec![0]
    }
}

#[test]
fn fault_an_adapter_that_a_layer_does_not_apply_is_an_error() {
    let layers = Sequence::new().push("own", Copies(Linear::new(3, 4)));
    let layers = layers.with_lora(&lora(&["own"])).unwrap();
    let builder = Pipeline::builder(layers, TensorSpec::new([2, 3], Kind::Float));
    let builder = builder.loss(CrossEntropy::default()).optimizer(Adam::default());
    let mut pipeline = builder.build().unwrap();
    let (x, targets) =
        (Tensor::ones([2, 3], (Kind::Float, Device::Cpu)), Tensor::from_slice(&[0_i64, 1]));
    let error = pipeline.train_step(&x, &targets).unwrap_err().to_string();
    for part in ["'own'", "the adapter of its parameter 'weight'", "Forward::linear"] {
        assert!(error.contains(part), "{error}");
    }
}

/// The weights of the model are kept in bfloat16 alone, where a small update would be lost.
#[test]
fn fault_a_weight_in_bfloat16_alone_cannot_be_trained() {
    let thawed = |kind: Kind| {
        let layers = model().build().unwrap().with_lora(&lora(&["q_proj"])).unwrap();
        let builder = Pipeline::builder(layers, inputs()).kind(kind);
        let builder = builder.loss(CrossEntropy::default()).optimizer(Adam::default());
        let mut pipeline = builder.build().unwrap();
        let thawed = pipeline.unfreeze(["*.bias"]);
        pipeline.train_step(tokens(4, LENGTH, 1), tokens(4, LENGTH, 2)).unwrap();
        thawed
    };
    let error = thawed(Kind::BFloat16).unwrap_err().to_string();
    assert!(error.contains("bias cannot be trained"), "{error}");
    assert!(error.contains("compute in float32"), "{error}");
    thawed(Kind::Float).unwrap();
}

#[test]
fn fault_adapters_that_do_not_fit_are_refused() {
    let refused = |lora: Lora, part: &str| {
        let error = model().build().unwrap().with_lora(&lora).err().unwrap().to_string();
        assert!(error.contains(part), "{error}");
    };
    refused(lora(&["q_prj"]), "'q_prj'");
    refused(lora(&["q_proj", "lm_head"]), "'lm_head'");
    refused(lora(&[]), "no targets");
    refused(Lora { rank: 0, ..lora(&["*"]) }, "rank 0");
    refused(Lora { rank: 13, ..lora(&["*"]) }, "use at most 12");
    refused(Lora { alpha: f64::NAN, ..lora(&["*"]) }, "alpha NaN");
    refused(Lora { dropout: 1.0, ..lora(&["*"]) }, "dropout 1");
    let table = Sequence::new().layer(RmsNorm { features: 3, eps: 1e-6 });
    let error = table.with_lora(&lora(&["*"])).err().unwrap().to_string();
    assert!(error.contains("no layer that can be adapted"), "{error}");
    let one = Sequence::new().push("own", Linear::new(3, 4)).with_lora(&lora(&["own"])).unwrap();
    let names: Vec<String> = one.parameters().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["own.weight", "own.bias", "own.lora_A.weight", "own.lora_B.weight"]);
}
