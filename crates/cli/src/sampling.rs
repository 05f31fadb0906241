//! Which token comes next, from a model's logits: temperature, top-k, nucleus. A pure function; the
//! randomness is a number that the caller gives, so that the same seed gives the same text however
//! the model is cut.
//!
//! ```text
//! logits --finite?--> sorted, ties by index --top-k--> exp((l - max) / T) --top-p--> the token at `uniform`
//! ```
//!
//! Absent: tensors, tokens' meaning, any generator with state.

use gpipe_core::splitmix;

/// What the seed's use for sampling is told apart by.
const SAMPLING_STREAM: u64 = 0x0073_616d_706c_6500;

/// How to choose, checked.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sampling {
    temperature: f64,
    top_k: Option<usize>,
    top_p: f64,
}

/// What cannot be sampled with, or from.
#[derive(Debug, thiserror::Error, PartialEq)]
pub(crate) enum SamplingError {
    #[error("the temperature is {0}: use 0 (always the likeliest token) or a positive number")]
    Temperature(f64),
    #[error("top-k is 0, which leaves no token: use at least 1, or leave it out to allow all")]
    TopK,
    #[error("top-p is {0}: it is a probability, above 0 and at most 1 (1 allows every token)")]
    TopP(f64),
    #[error(
        "the model's output for token {token} is {value}: its weights are damaged or its training \
        diverged; use other weights"
    )]
    NotFinite { token: usize, value: f32 },
    #[error("the model gives no outputs to choose from: use weights of a language model")]
    Empty,
}

impl Sampling {
    /// Temperature 0 is greedy: the likeliest token, whatever the rest says.
    ///
    /// # Errors
    /// A temperature below 0, infinite or not a number; a `top_k` of 0; a `top_p` outside (0, 1].
    pub(crate) fn new(
        temperature: f64,
        top_k: Option<usize>,
        top_p: f64,
    ) -> Result<Self, SamplingError> {
        if !temperature.is_finite() || temperature < 0.0 {
            return Err(SamplingError::Temperature(temperature));
        }
        if top_k == Some(0) {
            return Err(SamplingError::TopK);
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(SamplingError::TopP(top_p));
        }
        Ok(Self { temperature, top_k, top_p })
    }

    /// The index of one of `logits`: the `top_k` greatest of them (of equals the first), of those
    /// the fewest whose probability reaches `top_p` (nucleus: Holtzman et al. 2020, section 3.1),
    /// and of those the one that `uniform`, from [0, 1), points at.
    ///
    /// # Errors
    /// No logits; one that is not finite.
    pub(crate) fn sample(&self, logits: &[f32], uniform: f64) -> Result<usize, SamplingError> {
        if let Some((token, value)) = logits.iter().enumerate().find(|(_, l)| !l.is_finite()) {
            return Err(SamplingError::NotFinite { token, value: *value });
        }
        let mut ranked: Vec<(usize, f32)> = logits.iter().copied().enumerate().collect();
        // Stable, so equals stay in the order of their indices; 0 and -0 are equal.
        ranked.sort_by(|(_, a), (_, b)| b.partial_cmp(a).unwrap_or(std::cmp::Ordering::Equal));
        let &(likeliest, max) = ranked.first().ok_or(SamplingError::Empty)?;
        if self.temperature == 0.0 {
            return Ok(likeliest);
        }
        ranked.truncate(self.top_k.unwrap_or(usize::MAX));
        // The greatest exponent is 0, so nothing overflows and the first weight is 1.
        let weight = |logit: f32| ((f64::from(logit) - f64::from(max)) / self.temperature).exp();
        let mut weights: Vec<f64> = ranked.iter().map(|&(_, logit)| weight(logit)).collect();
        if self.top_p < 1.0 {
            let enough = self.top_p * weights.iter().sum::<f64>();
            let kept = running(&weights).position(|sum| sum >= enough);
            weights.truncate(kept.map_or(usize::MAX, |last| last + 1));
        }
        let at = uniform * running(&weights).last().unwrap_or(0.0);
        // The sum grows only by a positive weight: what has probability 0 is never chosen.
        let chosen = running(&weights).position(|sum| sum > at);
        Ok(chosen.and_then(|rank| ranked.get(rank)).map_or(likeliest, |&(token, _)| token))
    }
}

/// The sums of the first 1, 2, ... weights.
fn running(weights: &[f64]) -> impl Iterator<Item = f64> {
    weights.iter().scan(0.0, |sum, weight| {
        *sum += weight;
        Some(*sum)
    })
}

/// The number in [0, 1) that chooses the token at `position` of a text.
pub(crate) fn uniform(seed: u64, position: u64) -> f64 {
    let bits = splitmix::at(splitmix::key(&[seed, SAMPLING_STREAM]), position);
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests;
