//! Low-rank adapters (LoRA; Hu et al. 2021): beside a frozen weight W [outputs, inputs], trained
//! matrices A [rank, inputs] and B [outputs, rank]. A linear layer becomes
//! `x W^T + alpha / rank * dropout(x) A^T B^T`. B starts at 0, so training starts from the model.

use std::sync::Arc;

use tch::Tensor;

use crate::{
    adapter::Adapter,
    error::{Error, LayerError},
    layer::{Forward, Infer, Init, Layer, ParameterSpec},
    optim::name_matches,
    parameter::LoraRole,
    sequence::Sequence,
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// What the name of a matrix A ends with.
pub const LORA_A: &str = "lora_A.weight";
/// What the name of a matrix B ends with.
pub const LORA_B: &str = "lora_B.weight";
/// What the names of weights end with.
const WEIGHT: &str = "weight";

/// Low-rank adapters, and the weights that get them.
#[derive(Debug, Clone, PartialEq)]
pub struct Lora {
    /// The rank of the matrices, at least 1.
    pub rank: i64,
    /// The adapters' product is scaled by `alpha / rank`.
    pub alpha: f64,
    /// Dropout of the adapters' inputs, from 0 to below 1.
    pub dropout: f64,
    /// Patterns of the names of the linear layers that get adapters. `*` stands for any text. A
    /// pattern matches a whole name, such as `model.layers.0.self_attn.q_proj`, or its last part,
    /// such as `q_proj`.
    pub targets: Vec<String>,
}

impl Sequence {
    /// Adds low-rank adapters to the linear layers whose names match, and freezes all else. The
    /// parameters of the model are then kept only in the dtype of computation.
    ///
    /// Adapters are parameters of their layers: `NAME.lora_A.weight` [rank, inputs], uniform in
    /// +-1/sqrt(inputs), and `NAME.lora_B.weight` [outputs, rank], 0, beside `NAME.weight`.
    ///
    /// # Errors
    /// A setting is out of range; the rank is larger than a linear layer; a pattern matches no
    /// linear layer that can be adapted ([`Layer::adaptable`]); the model has adapters already.
    pub fn with_lora(mut self, lora: &Lora) -> Result<Self, Error> {
        check(lora)?;
        let mut parameters = self.layers.iter().flat_map(|layer| &layer.parameters);
        if parameters.any(|own| own.lora == LoraRole::Adapter) {
            return Err(Error::Setting(
                "the model has adapters already: name all their targets in one call".into(),
            ));
        }
        let mut unmatched = vec![true; lora.targets.len()];
        let mut known = Vec::new();
        for layer in &mut self.layers {
            for spec in &mut layer.parameters {
                spec.trainable = false;
                spec.lora = LoraRole::Base;
            }
            let mut adapters = Vec::new();
            for weight in layer.layer.adaptable() {
                let Some(spec) = layer.parameters.get(weight) else { continue };
                let ([outputs, inputs], Some(map)) =
                    (&spec.shape[..], spec.name.strip_suffix(WEIGHT))
                else {
                    continue;
                };
                let (outputs, inputs, map) = (*outputs, *inputs, map.to_owned());
                let name = format!("{}.{map}", layer.name);
                let name = name.trim_end_matches('.');
                let last = name.rsplit('.').next().unwrap_or_default();
                let mut is_target = false;
                for (pattern, unmatched) in lora.targets.iter().zip(&mut unmatched) {
                    let matches = name_matches(pattern, name) || name_matches(pattern, last);
                    *unmatched &= !matches;
                    is_target |= matches;
                }
                known.push(name.to_owned());
                if !is_target {
                    continue;
                }
                if lora.rank > inputs.min(outputs) {
                    return Err(Error::Setting(format!(
                        "adapters: rank {} is larger than the linear layer {name} [{outputs}, \
                        {inputs}]: use at most {}",
                        lora.rank,
                        inputs.min(outputs)
                    )));
                }
                let number = adapters.len() as u64;
                let (first, scale) = (layer.parameters.len(), lora.alpha / lora.rank as f64);
                adapters.push(Adapter { weight, first, number, scale, dropout: lora.dropout });
                let uniform = Init::Uniform { bound: 1.0 / (inputs as f64).sqrt() };
                let both = [
                    (LORA_A, [lora.rank, inputs], uniform),
                    (LORA_B, [outputs, lora.rank], Init::Zeros),
                ];
                layer.parameters.extend(both.map(|(end, shape, init)| ParameterSpec {
                    lora: LoraRole::Adapter,
                    ..ParameterSpec::new(&format!("{map}{end}"), shape, init)
                }));
            }
            if !adapters.is_empty() {
                let (inner, adapters) = (Arc::clone(&layer.layer), adapters.into());
                layer.layer =
                    Arc::new(Adapted { inner, adapters, parameters: layer.parameters.clone() });
            }
        }
        let missed = lora.targets.iter().zip(unmatched).find(|(_, unmatched)| *unmatched);
        match missed {
            None => Ok(self),
            Some((pattern, _)) => Err(Error::Setting(format!(
                "no linear layer matches the pattern '{pattern}' of adapters: {}",
                match known.first() {
                    Some(name) => format!("names are such as {name}"),
                    None => "the model has no layer that can be adapted".to_owned(),
                }
            ))),
        }
    }
}

fn check(lora: &Lora) -> Result<(), Error> {
    let refuse = |what: String| Err(Error::Setting(format!("adapters: {what}")));
    if lora.rank < 1 {
        return refuse(format!("rank {}: use at least 1", lora.rank));
    }
    if !lora.alpha.is_finite() || lora.alpha <= 0.0 {
        return refuse(format!("alpha {}: use a number above 0", lora.alpha));
    }
    if !(0.0..1.0).contains(&lora.dropout) {
        return refuse(format!("dropout {}: use a number from 0 to below 1", lora.dropout));
    }
    if lora.targets.is_empty() {
        return refuse("no targets: name linear layers, or all with *".into());
    }
    Ok(())
}

/// A layer with adapters.
struct Adapted {
    inner: Arc<dyn Layer>,
    adapters: Arc<[Adapter]>,
    /// Those of the layer, then those of the adapters.
    parameters: Vec<ParameterSpec>,
}

impl Layer for Adapted {
    fn kind(&self) -> &'static str {
        self.inner.kind()
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.parameters.clone()
    }

    fn infer(&self, ctx: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        self.inner.infer(ctx, inputs)
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        ctx.adapters = Arc::clone(&self.adapters);
        let outputs = self.inner.forward(ctx, inputs)?;
        // A layer that decodes may keep what an earlier step computed.
        let missed = self.adapters.iter().find(|own| !ctx.adapted.borrow().contains(&own.number));
        match missed.filter(|_| ctx.training) {
            None => Ok(outputs),
            Some(own) => Err(LayerError::Value(format!(
                "the adapter of its parameter '{}' was not applied: pass the parameter to \
                `Forward::linear` as `Forward::parameter` returns it, or leave it out of \
                `Layer::adaptable`",
                self.parameters.get(own.weight).map_or("", |own| own.name.as_str()),
            ))),
        }
    }

    fn failed(&self, error: &LayerError) {
        self.inner.failed(error);
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        let inner = self.inner.flops(inputs)?;
        let x = inputs.first()?;
        let positions = x.elements() / x.last().max(1) as f64;
        let adapters = self.parameters.iter().filter(|own| own.lora == LoraRole::Adapter);
        let elements: u64 = adapters.map(ParameterSpec::elements).sum();
        Some(inner + 2.0 * positions * elements as f64)
    }

    fn may_end_early(&self) -> bool {
        self.inner.may_end_early()
    }

    fn unread(&self) -> Option<usize> {
        self.inner.unread()
    }

    fn by_rows(&self) -> bool {
        self.inner.by_rows() && self.adapters.iter().all(|own| own.dropout == 0.0)
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        tape.adapt(Arc::clone(&self.adapters));
        self.inner.record(tape, inputs)
    }
}
