//! Rotary positions, as transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`)
//! write them.

use gpipe::layers::{Rotary, RotaryScaling};
use serde_json::Value;

use super::keys::{ConfigError, Keys, Result, wrong};

/// Reads the keys of rotary positions. `theta` is the base if no key gives it.
pub(super) fn read(keys: &mut Keys, theta: f64) -> Result<Rotary> {
    let positions = keys.whole("max_position_embeddings")?;
    let theta = keys.positive_or("rope_theta")?.unwrap_or(theta);
    let (old, new) = (keys.get("rope_scaling"), keys.get("rope_parameters"));
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
    let Value::Object(own) = given else {
        return wrong(name, &given, "it is an object of keys");
    };
    let mut keys = Keys::of(own, format!("{name}."));
    let theta = keys.positive_or("rope_theta")?.unwrap_or(theta);
    let scaling = scaling(&mut keys, positions)?;
    keys.finish()?;
    Ok(Rotary { theta, positions, scaling })
}

fn scaling(keys: &mut Keys, positions: i64) -> Result<RotaryScaling> {
    // Older files have the kind under `type`.
    let (new, old) = (keys.get("rope_type"), keys.get("type"));
    let kind = new.or(old).unwrap_or("default".into());
    Ok(match kind.as_str() {
        Some("default") => RotaryScaling::None,
        Some("linear") => RotaryScaling::Linear { factor: keys.positive("factor")? },
        Some("dynamic") => RotaryScaling::Dynamic { factor: keys.positive("factor")? },
        Some("llama3") => RotaryScaling::Llama3 {
            factor: keys.positive("factor")?,
            low: keys.positive("low_freq_factor")?,
            high: keys.positive("high_freq_factor")?,
            original: keys.whole("original_max_position_embeddings")?,
        },
        Some("yarn") => yarn(keys, positions)?,
        _ => {
            return keys.wrong(
                "rope_type",
                &kind,
                "supported are default, linear, dynamic, llama3 and yarn",
            );
        }
    })
}

fn yarn(keys: &mut Keys, positions: i64) -> Result<RotaryScaling> {
    let truncate = keys.truth_or("truncate", true)?;
    let original = keys.whole_or("original_max_position_embeddings")?.unwrap_or(positions);
    let factor = keys.positive_or("factor")?.unwrap_or(positions as f64 / original as f64);
    let scale = |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
    let (m, all) = (keys.positive_or("mscale")?, keys.positive_or("mscale_all_dim")?);
    let attention = match (keys.positive_or("attention_factor")?, m, all) {
        (Some(own), ..) => Some(own),
        (None, Some(m), Some(all)) => Some(scale(m) / scale(all)),
        _ => None,
    };
    Ok(RotaryScaling::Yarn {
        factor,
        attention,
        fast: keys.positive_or("beta_fast")?.unwrap_or(32.0),
        slow: keys.positive_or("beta_slow")?.unwrap_or(1.0),
        original,
        truncate,
    })
}
