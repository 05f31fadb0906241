//! Profiles: what each layer of a model takes and holds where it really runs, and what that was
//! measured on, so that nobody plans with the costs of another model.
//!
//! - `measure`: trains a few steps of each size of micro-batches, with every layer measured
//! - `observed`: what such a training showed
//! - `links`: what messages between stages took
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
    measure::{Again, Profiling, profile},
    subject::{LayerSubject, Subject},
};
use crate::error::{Error, Result};

/// The format that [`Profile::to_json`] writes.
const FORMAT: u32 = 2;
/// Most layers and sizes of a profile.
const LAYERS_MAX: usize = 1 << 16;
const SIZES_MAX: usize = 1 << 10;

/// Measured costs of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    format: u32,
    /// What was measured.
    pub subject: Subject,
    /// Stages that were at work at the same time.
    pub stages: usize,
    /// Steps that were measured of each size and policy.
    pub steps: usize,
    /// What layers take in a step like most (the median over the steps of the mean in each), and
    /// the most bytes.
    pub costs: ModelCosts,
    /// How far the times are spread, by samples of a micro-batch, then by layer, the loss last.
    pub spread: BTreeMap<usize, Vec<LayerSpread>>,
    /// How often something was measured again because its steps were spread too far.
    #[serde(default)]
    pub again: usize,
}

/// The lower quartile, the median and the upper quartile of a layer's times.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSpread {
    /// Of a forward that discards.
    pub forward: [Nanos; 3],
    /// Of a re-materialization.
    pub rematerialize: [Nanos; 3],
    /// Of a backward after it.
    pub backward: [Nanos; 3],
}

impl Profile {
    /// One JSON object.
    ///
    /// # Errors
    /// None that a profile can have.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|error| Error::Setting(error.to_string()))
    }

    /// From JSON, checked. `origin` is what an error calls it.
    ///
    /// # Errors
    /// What is no profile, another format, or costs that do not fit each other.
    pub fn from_json(text: &str, origin: &str) -> Result<Self> {
        let bad = |reason: String| {
            Error::Setting(format!("{origin}: {reason}; measure again with gpipe profile"))
        };
        let profile: Self =
            serde_json::from_str(text).map_err(|error| bad(format!("no profile: {error}")))?;
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
