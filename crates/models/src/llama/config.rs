//! `config.json` of Hugging Face's transformers.
//!
//! A key changes the model, or is known to change nothing, or is refused. None is ignored.

use gpipe::layers::{Rotary, RotaryScaling};
use serde_json::{Map, Value};

use super::Llama;

/// Why a `config.json` cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("config.json: {0}")]
pub struct ConfigError(String);

type Result<T> = std::result::Result<T, ConfigError>;

/// The architectures, by `model_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

impl Family {
    const ALL: [(&'static str, Self); 4] = [
        ("llama", Self::Llama),
        ("mistral", Self::Mistral),
        ("qwen2", Self::Qwen2),
        ("qwen3", Self::Qwen3),
    ];

    fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|(own, _)| *own == name).map(|(_, family)| family)
    }
}

/// Keys that say nothing about what is computed.
const SILENT: &[&str] = &[
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "is_llama_config",
    "pad_token_id",
    "torch_dtype",
    "transformers.js_config",
    "transformers_version",
    "use_cache",
    // In which parts a product is computed by other programs.
    "pretraining_tp",
];

/// Reads the text of a `config.json`.
///
/// # Errors
/// [`ConfigError`]: it is not JSON; another architecture; a key that is missing, has another type
/// or value, or is not supported.
pub fn read(text: &str) -> Result<Llama> {
    let parsed: Value = serde_json::from_str(text)
        .map_err(|error| ConfigError(format!("it is not JSON ({error})")))?;
    let Value::Object(keys) = parsed else {
        return Err(ConfigError("it is not an object of keys".into()));
    };
    Reader { keys, used: Vec::new() }.model()
}

struct Reader {
    keys: Map<String, Value>,
    /// Keys that were asked for.
    used: Vec<&'static str>,
}

fn wrong<T>(key: &str, value: &Value, remedy: &str) -> Result<T> {
    Err(ConfigError(format!("{key} is {value}: {remedy}")))
}

impl Reader {
    /// The value of a key; `None` if it is missing or null.
    fn get(&mut self, key: &'static str) -> Option<Value> {
        self.used.push(key);
        self.keys.get(key).filter(|value| !value.is_null()).cloned()
    }

    fn whole_or(&mut self, key: &'static str) -> Result<Option<i64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_i64() {
            Some(number) if number > 0 => Ok(Some(number)),
            _ => wrong(key, &value, "it is a whole number of at least 1"),
        }
    }

    fn whole(&mut self, key: &'static str) -> Result<i64> {
        self.whole_or(key)?.ok_or_else(|| ConfigError(format!("{key} is missing")))
    }

    fn number_or(&mut self, key: &'static str, default: f64) -> Result<f64> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_f64().map_or_else(|| wrong(key, &value, "it is a number"), Ok)
    }

    fn truth_or(&mut self, key: &'static str, default: bool) -> Result<bool> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().map_or_else(|| wrong(key, &value, "it is true or false"), Ok)
    }

    fn model(mut self) -> Result<Llama> {
        let family = self.family()?;
        let heads = self.whole("num_attention_heads")?;
        let features = self.whole("hidden_size")?;
        let blocks = self.whole("num_hidden_layers")?;
        let head_size = match (self.whole_or("head_dim")?, family) {
            (Some(size), _) => size,
            (None, Family::Qwen3) => 128,
            (None, _) if features % heads == 0 => features / heads,
            (None, _) => {
                return Err(ConfigError(format!(
                    "head_dim is missing, and hidden_size {features} is no multiple of \
                    num_attention_heads {heads}"
                )));
            }
        };
        if let Some(activation) = self.get("hidden_act").filter(|own| own != "silu") {
            return wrong("hidden_act", &activation, "only \"silu\" is supported");
        }
        if let Some(name) = self.get("rope_interleaved").filter(|own| own != &Value::Bool(false)) {
            return wrong("rope_interleaved", &name, "only false is supported");
        }
        let attention_bias = match family {
            Family::Llama | Family::Qwen3 => self.truth_or("attention_bias", false)?,
            Family::Mistral | Family::Qwen2 => false,
        };
        let model = Llama {
            vocabulary: self.whole("vocab_size")?,
            features,
            hidden: self.whole("intermediate_size")?,
            windows: self.windows(family, blocks)?,
            heads,
            groups: self.whole_or("num_key_value_heads")?.unwrap_or(heads),
            head_size,
            rotary: self.rotary()?,
            eps: self.number_or("rms_norm_eps", 1e-6)?,
            qkv_bias: attention_bias || family == Family::Qwen2,
            output_bias: attention_bias,
            mlp_bias: family == Family::Llama && self.truth_or("mlp_bias", false)?,
            head_norms: family == Family::Qwen3,
            attention_dropout: self.number_or("attention_dropout", 0.0)?,
            tied: self.truth_or("tie_word_embeddings", false)?,
            std: self.number_or("initializer_range", 0.02)?,
        };
        let unknown = self.keys.iter().find(|(key, value)| {
            !value.is_null()
                && !self.used.contains(&key.as_str())
                && !SILENT.contains(&key.as_str())
        });
        match unknown {
            None => Ok(model),
            Some((key, value)) => wrong(key, value, "this key is not supported"),
        }
    }

    fn family(&mut self) -> Result<Family> {
        let named = self.get("model_type");
        let name = named.as_ref().and_then(Value::as_str).unwrap_or("missing").to_owned();
        Family::of(&name).ok_or_else(|| {
            let known = Family::ALL.map(|(name, _)| name).join(", ");
            ConfigError(format!("model_type is {name}: supported are {known}"))
        })
    }

    /// The window of each block.
    fn windows(&mut self, family: Family, blocks: i64) -> Result<Vec<Option<i64>>> {
        let count = usize::try_from(blocks).unwrap_or(usize::MAX).min(super::BLOCKS_MAX + 1);
        let window = match family {
            Family::Llama => None,
            // Its first version has one without the key.
            Family::Mistral if !self.keys.contains_key("sliding_window") => Some(4096),
            Family::Mistral => self.whole_or("sliding_window")?,
            Family::Qwen2 | Family::Qwen3 => {
                let window = self.whole_or("sliding_window")?;
                let is_used = self.truth_or("use_sliding_window", false)?;
                // Without the key it is what transformers takes.
                is_used.then_some(window.unwrap_or(4096))
            }
        };
        if !matches!(family, Family::Qwen2 | Family::Qwen3) {
            return Ok(vec![window; count]);
        }
        let first = self.get("max_window_layers");
        let first = match first.as_ref().map(|value| (value, value.as_u64())) {
            None => 28,
            Some((_, Some(first))) => first,
            Some((value, None)) => {
                return wrong("max_window_layers", value, "it is a whole number");
            }
        };
        let Some(types) = self.get("layer_types") else {
            let of = |block: usize| window.filter(|_| block as u64 >= first);
            return Ok((0..count).map(of).collect());
        };
        let Some(listed) = types.as_array().filter(|own| own.len() == count) else {
            let remedy = format!("it is a list of {blocks} types, one for each block");
            return wrong("layer_types", &types, &remedy);
        };
        let of = |own: &Value| match own.as_str() {
            Some("full_attention") => Ok(None),
            Some("sliding_attention") => window.map(Some).ok_or_else(|| {
                ConfigError(
                    "layer_types has \"sliding_attention\", and there is no sliding_window".into(),
                )
            }),
            _ => wrong(
                "layer_types",
                own,
                "supported are \"full_attention\" and \"sliding_attention\"",
            ),
        };
        listed.iter().map(of).collect()
    }

    /// Rotary positions, as versions 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`)
    /// write them.
    fn rotary(&mut self) -> Result<Rotary> {
        let positions = self.whole("max_position_embeddings")?;
        let theta = self.number_or("rope_theta", 10_000.0)?;
        let (old, new) = (self.get("rope_scaling"), self.get("rope_parameters"));
        let (name, given) = match (old, new) {
            (Some(old), None) => ("rope_scaling", old),
            (None, Some(new)) => ("rope_parameters", new),
            (None, None) => return Ok(Rotary { theta, positions, scaling: RotaryScaling::None }),
            (Some(_), Some(_)) => {
                return Err(ConfigError(
                    "it has rope_scaling and rope_parameters: keep one of them".into(),
                ));
            }
        };
        let Value::Object(keys) = given else {
            return wrong(name, &given, "it is an object of keys");
        };
        RopeReader { name, keys, used: Vec::new() }.read(theta, positions)
    }
}

/// Reads the keys of rotary positions.
struct RopeReader {
    name: &'static str,
    keys: Map<String, Value>,
    used: Vec<&'static str>,
}

impl RopeReader {
    fn number(&mut self, key: &'static str) -> Result<Option<f64>> {
        self.used.push(key);
        let Some(value) = self.keys.get(key).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        match value.as_f64() {
            Some(number) if number > 0.0 => Ok(Some(number)),
            _ => wrong(&format!("{}.{key}", self.name), value, "it is a number above 0"),
        }
    }

    fn needed(&mut self, key: &'static str) -> Result<f64> {
        let found = self.number(key)?;
        found.ok_or_else(|| ConfigError(format!("{}.{key} is missing", self.name)))
    }

    fn original(&mut self) -> Result<i64> {
        let original = self.needed("original_max_position_embeddings")?;
        // Positions are far below where a float skips whole numbers.
        Ok(original.round() as i64)
    }

    fn read(mut self, theta: f64, positions: i64) -> Result<Rotary> {
        let theta = self.number("rope_theta")?.unwrap_or(theta);
        let kind = self.kind()?;
        let scaling = match kind.as_str() {
            "default" => RotaryScaling::None,
            "linear" => RotaryScaling::Linear { factor: self.needed("factor")? },
            "dynamic" => RotaryScaling::Dynamic { factor: self.needed("factor")? },
            "llama3" => RotaryScaling::Llama3 {
                factor: self.needed("factor")?,
                low: self.needed("low_freq_factor")?,
                high: self.needed("high_freq_factor")?,
                original: self.original()?,
            },
            "yarn" => self.yarn(positions)?,
            other => {
                return Err(ConfigError(format!(
                    "{}.rope_type is {other}: supported are default, linear, dynamic, llama3 and \
                    yarn",
                    self.name
                )));
            }
        };
        let unknown = self
            .keys
            .iter()
            .find(|(key, own)| !own.is_null() && !self.used.contains(&key.as_str()));
        match unknown {
            None => Ok(Rotary { theta, positions, scaling }),
            Some((key, value)) => {
                wrong(&format!("{}.{key}", self.name), value, "this key is not supported")
            }
        }
    }

    /// The kind of scaling; older files have it under `type`.
    fn kind(&mut self) -> Result<String> {
        self.used.extend(["rope_type", "type"]);
        let named = self.keys.get("rope_type").or_else(|| self.keys.get("type"));
        match named {
            None => Ok("default".into()),
            Some(value) => value.as_str().map(ToOwned::to_owned).map_or_else(
                || wrong(&format!("{}.rope_type", self.name), value, "it is a name"),
                Ok,
            ),
        }
    }

    fn yarn(&mut self, positions: i64) -> Result<RotaryScaling> {
        self.used.push("truncate");
        let truncate = match self.keys.get("truncate") {
            None | Some(Value::Null) => true,
            Some(value) => match value.as_bool() {
                Some(truncate) => truncate,
                None => return wrong("truncate", value, "it is true or false"),
            },
        };
        let original = match self.keys.contains_key("original_max_position_embeddings") {
            true => self.original()?,
            false => positions,
        };
        let factor = match self.number("factor")? {
            Some(factor) => factor,
            None => positions as f64 / original as f64,
        };
        let scale = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
        let (m, all) = (self.number("mscale")?, self.number("mscale_all_dim")?);
        let attention = match (self.number("attention_factor")?, m, all) {
            (Some(own), ..) => Some(own),
            (None, Some(m), Some(all)) => Some(scale(m) / scale(all)),
            _ => None,
        };
        Ok(RotaryScaling::Yarn {
            factor,
            attention,
            fast: self.number("beta_fast")?.unwrap_or(32.0),
            slow: self.number("beta_slow")?.unwrap_or(1.0),
            original,
            truncate,
        })
    }
}
