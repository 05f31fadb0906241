//! Chooses the next token from a model's logits: temperature, top-k and nucleus sampling.
//!
//! It is a pure function: the caller gives the random number. So the same seed gives the same text
//! however the model is cut.
//!
//! ```text
//! logits --finite?--> sorted, ties by index --top-k--> exp((l - max) / T)
//!        --top-p--> the token at `uniform`
//! ```
//!
//! Absent: tensors, tokens' meaning, any generator with state.

use gpipe_core::splitmix;

/// Distinguishes sampling from other uses of the seed.
const SAMPLING_STREAM: u64 = 0x0073_616d_706c_6500;

/// Validated sampling settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sampling {
    temperature: f64,
    top_k: Option<usize>,
    top_p: f64,
}

/// Invalid settings, or invalid logits.
#[derive(Debug, thiserror::Error, PartialEq)]
pub(crate) enum SamplingError {
    #[error("--temperature {0}: use 0 (always the likeliest token) or a positive number")]
    Temperature(f64),
    #[error("--top-k 0 leaves no token: use at least 1, or leave it out to allow all")]
    TopK,
    #[error("--top-p {0}: use a probability above 0 and at most 1 (1 allows every token)")]
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
    /// Validates settings. Temperature 0 is greedy: it takes the most likely token, whatever the
    /// other settings are.
    ///
    /// # Errors
    /// Fails if `temperature` is negative, infinite or NaN, if `top_k` is 0, or if `top_p` is
    /// outside (0, 1].
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

    /// Samples an index of `logits`.
    ///
    /// Keeps the `top_k` greatest logits (of equal ones the first), and of those the smallest set
    /// whose probability reaches `top_p` (nucleus sampling: Holtzman et al. 2020, section 3.1).
    /// `uniform`, from [0, 1), selects one of them.
    ///
    /// # Errors
    /// Fails if there are no logits or one is not finite.
    pub(crate) fn sample(&self, logits: &[f32], uniform: f64) -> Result<usize, SamplingError> {
        if let Some((token, value)) = logits.iter().enumerate().find(|(_, l)| !l.is_finite()) {
            return Err(SamplingError::NotFinite { token, value: *value });
        }
        let mut ranked: Vec<(usize, f32)> = logits.iter().copied().enumerate().collect();
        // The sort is stable, so equal logits stay in the order of their indices. 0 and -0 are
        // equal.
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
        // Only a positive weight increases the sum, so a token with probability 0 is never chosen.
        let chosen = running(&weights).position(|sum| sum > at);
        Ok(chosen.and_then(|rank| ranked.get(rank)).map_or(likeliest, |&(token, _)| token))
    }
}

/// The cumulative sums of the weights.
fn running(weights: &[f64]) -> impl Iterator<Item = f64> {
    weights.iter().scan(0.0, |sum, weight| {
        *sum += weight;
        Some(*sum)
    })
}

/// The number in [0, 1) that selects the token at `position` of a text.
pub(crate) fn uniform(seed: u64, position: u64) -> f64 {
    let bits = splitmix::at(splitmix::key(&[seed, SAMPLING_STREAM]), position);
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests;
