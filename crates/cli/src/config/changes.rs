//! The keys that differ between the configuration of a checkpoint and the one that resumes it, and
//! what each change does.

use super::{Config, ConfigError, keys::flatten};

/// A key with two different values.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Change {
    pub key: String,
    pub old: String,
    pub new: String,
    pub effect: Effect,
}

/// The effect of a change on the rest of the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// No result changes, not even by a bit.
    Nothing,
    /// No result changes if the training data stay the same, which is checked once they are read.
    Text,
    /// Results differ by rounding from those of an uninterrupted run.
    Rounding,
    /// Training is unaffected, but evaluations use other data.
    Evaluations,
    /// From here on, training and evaluations see the data presented in another way.
    Presentation,
    /// From here on, results are those of another recipe.
    FromHereOn,
    /// The saved state cannot be used with the new value, for this reason.
    Refused(&'static str),
}

impl Effect {
    /// A short description for the user.
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Nothing => "changes no result",
            Self::Text => "the training data must be the same",
            Self::Rounding => "changes the last bits",
            Self::Evaluations => "validation data change; the best checkpoint is chosen anew",
            Self::Presentation => "from here on; the best checkpoint is chosen anew",
            Self::FromHereOn => "from here on",
            Self::Refused(reason) => reason,
        }
    }
}

/// The keys whose values differ, in the order of the file.
pub(crate) fn changes(old: &Config, new: &Config) -> Result<Vec<Change>, ConfigError> {
    let table = |config: &Config| {
        toml::Table::try_from(config).map_err(|error| ConfigError::Parse {
            path: "config.toml".into(),
            reason: error.to_string(),
        })
    };
    let has_adapters = new.lora.rank > 0;
    let (old, new) = (flatten(&table(old)?), flatten(&table(new)?));
    let value = |all: &[(String, toml::Value)], key: &str| {
        all.iter().find(|(name, _)| name == key).map(|(_, value)| value.clone())
    };
    let only_old = old.iter().filter(|(key, _)| value(&new, key).is_none());
    let keys: Vec<&String> = new.iter().chain(only_old).map(|(key, _)| key).collect();
    let shown =
        |value: &Option<toml::Value>| value.as_ref().map_or("none".into(), toml::Value::to_string);
    let change = |key: &String| {
        let (before, after) = (value(&old, key), value(&new, key));
        (before != after).then(|| Change {
            key: key.clone(),
            old: shown(&before),
            new: shown(&after),
            effect: match key.as_str() {
                "pipeline.dtype" if has_adapters => {
                    Effect::Refused("the weights below the adapters are saved in the old dtype")
                }
                _ => effect(key, &before, &after),
            },
        })
    };
    Ok(keys.into_iter().filter_map(change).collect())
}

/// The effect of changing `key`.
fn effect(key: &str, old: &Option<toml::Value>, new: &Option<toml::Value>) -> Effect {
    match key {
        "seed" => Effect::Refused("the order of the data and dropout are drawn from it"),
        "data.sequence" => Effect::Refused("the place to resume in the data depends on it"),
        "data.validation" | "data.validation_bytes" | "train.validation_tokens" => {
            Effect::Evaluations
        }
        "data.validation_pairs" => Effect::Evaluations,
        "data.length" | "data.temperature" | "data.packing" => {
            Effect::Refused("the place to resume in the data depends on it")
        }
        "data.batch_tokens" => Effect::FromHereOn,
        "data.cache" => Effect::Nothing,
        "data.tokenizer" => {
            Effect::Refused("the model was trained with the checkpoint's tokenizer")
        }
        _ if key.starts_with("data.") => Effect::Text,
        "images.validation_images" => Effect::Evaluations,
        "images.threads" => Effect::Nothing,
        "images.crop" | "images.flip" | "images.cutout" | "images.degrees" | "images.scale"
        | "images.shear" | "images.translate" | "images.contrast" | "images.invert" => {
            Effect::FromHereOn
        }
        _ if key.starts_with("images.") => Effect::Presentation,
        "model.auxiliary" => {
            let is_zero = |value: &Option<toml::Value>| {
                value.as_ref().and_then(toml::Value::as_float) == Some(0.0)
            };
            match is_zero(old) == is_zero(new) {
                true => Effect::FromHereOn,
                false => Effect::Refused(
                    "the auxiliary head has parameters that only one of the two networks has",
                ),
            }
        }
        "model.dropout" | "model.attention_dropout" | "model.drop_path" => Effect::FromHereOn,
        "pipeline.replicas"
        | "pipeline.micro_batches"
        | "pipeline.kernels"
        | "pipeline.loss_rows"
        | "pipeline.threads_per_stage"
        | "pipeline.devices" => Effect::Rounding,
        "pipeline.dtype" => {
            let is_double = |value: &Option<toml::Value>| {
                value.as_ref().and_then(toml::Value::as_str) == Some("float64")
            };
            match is_double(old) == is_double(new) {
                true => Effect::FromHereOn,
                false => Effect::Refused("the checkpoint's state has another precision"),
            }
        }
        "optimizer.name" => {
            // Both keep the same two moments.
            let adam = |value: &Option<toml::Value>| {
                matches!(value.as_ref().and_then(toml::Value::as_str), Some("adam" | "adamw"))
            };
            match adam(old) && adam(new) {
                true => Effect::FromHereOn,
                false => Effect::Refused("the two optimizers keep different state"),
            }
        }
        "optimizer.adam.moments" => {
            Effect::Refused("the checkpoint's moments have the other dtype")
        }
        "optimizer.sgd.momentum" | "optimizer.rmsprop.momentum" => {
            // With momentum, the state has one more tensor.
            let is_zero = |value: &Option<toml::Value>| {
                value.as_ref().and_then(toml::Value::as_float) == Some(0.0)
            };
            match is_zero(old) == is_zero(new) {
                true => Effect::FromHereOn,
                false => Effect::Refused(
                    "momentum adds state that the checkpoint has only if it was above 0",
                ),
            }
        }
        // `on_nan` only says whether a run goes on after a NaN: no finite step depends on it.
        "train.validate_every" | "train.log_every" | "train.prefetch" | "train.on_nan" => {
            Effect::Nothing
        }
        "lora.dropout" => Effect::FromHereOn,
        _ if key.starts_with("model.") || key.starts_with("lora.") => {
            Effect::Refused("the saved parameters are of another model")
        }
        _ if key.starts_with("pipeline.") || key.starts_with("checkpoint.") => Effect::Nothing,
        _ => Effect::FromHereOn, // optimizer.*, train.*
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Dtype, Model, MomentsChoice, OptimizerName, TransformerConfig};

    fn effects(change: impl FnOnce(&mut Config)) -> Vec<(String, Effect)> {
        let old = Config::default();
        let mut new = old.clone();
        change(&mut new);
        let all = changes(&old, &new).unwrap();
        all.into_iter().map(|change| (change.key, change.effect)).collect()
    }

    #[test]
    fn oracle_each_kind_of_change_is_told_for_what_it_is() {
        assert_eq!(effects(|_| ()), []);
        let one = |key: &str, effect| vec![(key.to_owned(), effect)];
        assert_eq!(effects(|c| c.pipeline.stages = 7), one("pipeline.stages", Effect::Nothing));
        let found = effects(|c| c.pipeline.micro_batches = 7);
        assert_eq!(found, one("pipeline.micro_batches", Effect::Rounding));
        assert_eq!(effects(|c| c.train.steps = 7), one("train.steps", Effect::FromHereOn));
        let found = effects(|c| c.optimizer.name = OptimizerName::AdamW);
        assert_eq!(found, one("optimizer.name", Effect::FromHereOn));
        let refused = |change: fn(&mut Config), key: &str| {
            let found = effects(change);
            assert!(
                found.len() == 1 && found[0].0 == key && matches!(found[0].1, Effect::Refused(_)),
                "{found:?}"
            );
        };
        refused(|c| c.optimizer.name = OptimizerName::Sgd, "optimizer.name");
        refused(|c| c.optimizer.adam.moments = MomentsChoice::BFloat16, "optimizer.adam.moments");
        refused(|c| c.pipeline.dtype = Dtype::Float64, "pipeline.dtype");
        refused(
            |c| {
                c.model = Model::Transformer(TransformerConfig {
                    hidden: 8,
                    ..TransformerConfig::default()
                })
            },
            "model.hidden",
        );
        refused(|c| c.seed = 8, "seed");
        assert_eq!(
            effects(|c| c.pipeline.dtype = Dtype::BFloat16),
            one("pipeline.dtype", Effect::FromHereOn)
        );
    }

    #[test]
    fn oracle_both_values_are_shown() {
        let old = Config::default();
        let mut new = old.clone();
        new.optimizer.lr = 0.5;
        let all = changes(&old, &new).unwrap();
        assert_eq!((all[0].old.as_str(), all[0].new.as_str()), ("0.001", "0.5"));
    }
}
