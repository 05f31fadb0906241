//! Profiles: the time and memory of each layer of a model, measured on the real pipeline.
//!
//! A profile also records its subject, so that nobody plans with the costs of another model.
//!
//! - `measure`: trains a few steps for each micro-batch size and measures every layer
//! - `observed`: the measurements of one training
//! - `links`: times of messages between stages
//! - `subject`: what was measured
//! - here: the profile itself

mod links;
mod measure;
mod observed;
mod subject;

use std::collections::BTreeMap;

use gpipe_core::{Nanos, cost::ModelCosts};
use serde::{Deserialize, Serialize};

pub use self::{
    measure::{Again, Measurement, Profiling, profile},
    subject::{LayerSubject, Subject},
};
use crate::error::{Error, Result};

/// The version of the format that [`Profile::to_json`] writes.
const FORMAT: u32 = 2;
/// Upper bounds on the layers and the sizes of a profile.
const LAYERS_MAX: usize = 1 << 16;
const SIZES_MAX: usize = 1 << 10;

/// Measured costs of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    format: u32,
    /// What was measured.
    pub subject: Subject,
    /// Number of stages that ran at the same time.
    pub stages: usize,
    /// Number of measured steps for each size and policy.
    pub steps: usize,
    /// Times of layers, and peak bytes. A time is averaged within each step; the median over the
    /// steps is stored.
    pub costs: ModelCosts,
    /// The spread of the times, by samples per micro-batch, then by layer. The loss is last.
    pub spread: BTreeMap<usize, Vec<LayerSpread>>,
    /// How many measurements were repeated because their steps varied too much.
    #[serde(default)]
    pub again: usize,
}

/// The lower quartile, the median and the upper quartile of a layer's times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSpread {
    /// Of a forward that discards its activations.
    pub forward: [Nanos; 3],
    /// Of a re-materialization.
    pub rematerialize: [Nanos; 3],
    /// Of a backward after a re-materialization.
    pub backward: [Nanos; 3],
}

impl Profile {
    /// Writes the profile as one JSON object.
    ///
    /// # Errors
    /// None in practice: every profile can be written.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| Error::Setting(error.to_string()))
    }

    /// Reads and checks a profile from JSON. `origin` names the source in errors.
    ///
    /// # Errors
    /// The text is not a profile, has another format version, or holds inconsistent costs.
    pub fn from_json(text: &str, origin: &str) -> Result<Self> {
        let bad = |reason: String| Error::Setting(format!("{origin}: {reason}; measure again"));
        let profile: Self = serde_json::from_str(text).map_err(|error| {
            let (line, column) = (error.line(), error.column());
            bad(format!("it is not a profile that gpipe wrote (line {line}, column {column})"))
        })?;
        if profile.format != FORMAT {
            return Err(bad(format!("format {}, this gpipe reads {FORMAT}", profile.format)));
        }
        profile.costs.check().map_err(|error| bad(error.to_string()))?;
        let (layers, sizes) = (profile.costs.layers.len(), profile.costs.sizes.len());
        if layers > LAYERS_MAX || sizes > SIZES_MAX {
            return Err(bad(format!(
                "{layers} layers and {sizes} sizes: at most {LAYERS_MAX} and {SIZES_MAX}"
            )));
        }
        if layers != profile.subject.layers.len() {
            let named = profile.subject.layers.len();
            return Err(bad(format!("it names {named} layers and has costs of {layers}")));
        }
        Ok(profile)
    }
}
