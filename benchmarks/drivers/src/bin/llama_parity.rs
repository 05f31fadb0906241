//! Produces the results that `scripts/llama_parity.py` compares with Hugging Face's transformers:
//! trains a model of a `config.json` for several steps, and writes a safetensors file.
//!
//! ```text
//! Usage: llama_parity FOLDER float64|float32 STAGES SCHEDULE
//! ```
//!
//! FOLDER has `config.json`, `model.safetensors` with the weights, and `data.safetensors` with
//! `tokens` and `targets` [samples, positions]. FOLDER/gpipe.safetensors then holds:
//!
//! - `logits` before training;
//! - `S/loss` of each step S, and `1/gradient/NAME`;
//! - `5/parameter/NAME`.

use gpipe::{Adam, BalancedExperts, CrossEntropy, Pipeline, Remat, Schedule, TensorSpec};
use gpipe_drivers::Failure;
use gpipe_models::{
    Llama,
    huggingface::{
        self, Network,
        names::{Found, Name},
    },
};
use tch::{Kind, Tensor};

const STEPS: usize = 5;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, dtype, stages, schedule] = &arguments[..] else {
        return Err("usage: llama_parity FOLDER DTYPE STAGES SCHEDULE".into());
    };
    let kind = match dtype.as_str() {
        "float64" => Kind::Double,
        "float32" => Kind::Float,
        other => return Err(format!("{other}: use float64 or float32").into()),
    };
    let text = std::fs::read_to_string(format!("{folder}/config.json"))?;
    let network = huggingface::config(&text)?.network;
    let read = |name: &str| Tensor::read_safetensors(format!("{folder}/{name}.safetensors"));
    let data = read("data")?;
    let given = |wanted: &str| {
        let found = data.iter().find(|(name, _)| name == wanted);
        found.map(|(_, tensor)| tensor).ok_or_else(|| format!("data without {wanted}"))
    };
    let (tokens, targets) = (given("tokens")?, given("targets")?);
    let sample = TensorSpec::new([2, tokens.size()[1]], Kind::Int64);
    let builder = Pipeline::builder(network.build()?, sample)
        .stages(stages.parse()?)
        .schedule(schedule.parse::<Schedule>()?)
        .remat(Remat::Selective)
        .micro_batches(3)
        .kind(kind)
        .keep_gradients()
        .optimizer(Adam { lr: 1e-3, weight_decay: 0.1, decoupled: true, ..Adam::default() })
        .clip_norm(1.0);
    let loss = CrossEntropy::default();
    let mut pipeline = match &network {
        Network::Llama(Llama { experts: Some(own), .. }) if own.balance > 0.0 => {
            builder.loss(BalancedExperts { loss, weight: own.balance, top_k: own.top_k })
        }
        _ => builder.loss(loss),
    }
    .build()?;
    let weights = read("model")?;
    for (name, own) in weights {
        if let Found::Parameter(Name { name, transpose }) = network.parameter_of(&name) {
            let own = turned(&own, transpose)?.f_to_kind(kind)?;
            pipeline.set_parameters(&[(name, own)])?;
        }
    }
    let logits = pipeline.predict(tokens)?.into_iter().next().ok_or("no logits")?;
    let mut tensors = vec![("logits".to_owned(), logits)];
    for step in 1..=STEPS {
        let report = pipeline.train_step(tokens, targets)?;
        tensors.push((format!("{step}/loss"), Tensor::f_from_slice(&[report.loss])?));
        if step == 1 {
            for (name, own) in pipeline.gradients()? {
                let Name { name, transpose } = network.name_of(&name);
                tensors.push((format!("1/gradient/{name}"), turned(&own, transpose)?));
            }
        }
    }
    for (name, own) in pipeline.parameters()? {
        let Name { name, transpose } = network.name_of(&name);
        tensors.push((format!("{STEPS}/parameter/{name}"), turned(&own, transpose)?));
    }
    Ok(Tensor::write_safetensors(&tensors, format!("{folder}/gpipe.safetensors"))?)
}

/// A matrix, the other way round if the folder has it so.
fn turned(own: &Tensor, transpose: bool) -> Result<Tensor, Failure> {
    Ok(if transpose { own.f_transpose(0, 1)?.f_contiguous()? } else { own.shallow_clone() })
}
