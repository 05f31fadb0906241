//! Chooses the next token from a model's logits: repetition penalty, temperature, top-k, nucleus
//! and min-p sampling, in this order, which is that of Hugging Face's transformers.
//!
//! It is a pure function: the caller gives the random number. So the same seed gives the same text
//! however the model is cut.
//!
//! ```text
//! logits --finite?--> the k greatest, ties by index --> exp((l - max) / T)
//!        --top-p, min-p--> the token at `uniform`
//! ```
//!
//! Absent: tensors, tokens' meaning, any generator with state.

use gpipe_core::splitmix;

/// Distinguishes sampling from other uses of the seed.
const SAMPLING_STREAM: u64 = 0x0073_616d_706c_6500;

/// Sampling settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Sampling {
    /// What logits are divided by. 0 is greedy: the most likely token, whatever the other settings
    /// are.
    pub temperature: f64,
    /// Only this many of the most likely tokens.
    pub top_k: Option<usize>,
    /// Only the smallest set of tokens with this probability.
    pub top_p: f64,
    /// Only tokens with at least this part of the greatest probability.
    pub min_p: f64,
    /// What the logits of tokens that are in the text are divided by, or multiplied with if they
    /// are negative.
    pub repetition_penalty: f64,
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
    #[error("--min-p {0}: use a number from 0 (allows every token) to less than 1")]
    MinP(f64),
    #[error("--repetition-penalty {0}: use a positive number (1 changes nothing)")]
    RepetitionPenalty(f64),
    #[error(
        "the model's output for token {token} is {value}: its weights are damaged or its training \
        diverged; use other weights"
    )]
    NotFinite { token: usize, value: f32 },
    #[error("the model gives no outputs to choose from: use weights of a language model")]
    Empty,
}

impl Sampling {
    /// Validates settings.
    ///
    /// # Errors
    /// Fails if `temperature` is negative, infinite or NaN, if `top_k` is 0, if `top_p` is outside
    /// (0, 1], if `min_p` is outside [0, 1), or if the penalty is not positive.
    pub(crate) fn new(settings: Self) -> Result<Self, SamplingError> {
        let Self { temperature, top_k, top_p, min_p, repetition_penalty } = settings;
        if !temperature.is_finite() || temperature < 0.0 {
            return Err(SamplingError::Temperature(temperature));
        }
        if top_k == Some(0) {
            return Err(SamplingError::TopK);
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return Err(SamplingError::TopP(top_p));
        }
        if !(0.0..1.0).contains(&min_p) {
            return Err(SamplingError::MinP(min_p));
        }
        if !(repetition_penalty > 0.0 && repetition_penalty.is_finite()) {
            return Err(SamplingError::RepetitionPenalty(repetition_penalty));
        }
        Ok(settings)
    }

    /// Makes tokens less likely that are in the text (Keskar et al. 2019, section 4.1).
    pub(crate) fn penalise(&self, logits: &mut [f32], text: &[u32]) {
        if self.repetition_penalty == 1.0 {
            return;
        }
        let penalty = self.repetition_penalty as f32;
        let mut seen: Vec<usize> = text.iter().map(|&token| token as usize).collect();
        seen.sort_unstable();
        seen.dedup();
        for token in seen {
            if let Some(logit) = logits.get_mut(token) {
                *logit = if *logit < 0.0 { *logit * penalty } else { *logit / penalty };
            }
        }
    }

    /// Samples an index of `logits`.
    ///
    /// Keeps the `top_k` greatest logits (of equal ones the first); of those the smallest set whose
    /// probability reaches `top_p` (nucleus sampling: Holtzman et al. 2020, section 3.1); and of
    /// those the tokens with `min_p` of the greatest probability (Nguyen et al. 2024). `uniform`,
    /// from [0, 1), selects one of them.
    ///
    /// # Errors
    /// Fails if there are no logits or one is not finite.
    pub(crate) fn sample(&self, logits: &[f32], uniform: f64) -> Result<usize, SamplingError> {
        if let Some((token, value)) = logits.iter().enumerate().find(|(_, l)| !l.is_finite()) {
            return Err(SamplingError::NotFinite { token, value: *value });
        }
        // Of equal logits the first is the greatest. 0 and -0 are equal.
        let greater = |a: &usize, b: &usize| {
            let by_logit = logits[*b].partial_cmp(&logits[*a]);
            by_logit.unwrap_or(std::cmp::Ordering::Equal).then(a.cmp(b))
        };
        let likeliest = (0..logits.len()).min_by(greater).ok_or(SamplingError::Empty)?;
        if self.temperature == 0.0 {
            return Ok(likeliest);
        }
        let max = f64::from(logits[likeliest]);
        // The greatest exponent is 0, so nothing overflows and the first weight is 1.
        let weight = |token: usize| ((f64::from(logits[token]) - max) / self.temperature).exp();
        let mut ranked: Vec<usize> = (0..logits.len()).collect();
        if let Some(k) = self.top_k.filter(|k| *k < ranked.len()) {
            ranked.select_nth_unstable_by(k, greater);
            ranked.truncate(k);
        }
        ranked.sort_unstable_by(greater);
        let mut weights: Vec<f64> = ranked.iter().map(|&token| weight(token)).collect();
        if self.top_p < 1.0 {
            let enough = self.top_p * weights.iter().sum::<f64>();
            let kept = running(&weights).position(|sum| sum >= enough);
            weights.truncate(kept.map_or(usize::MAX, |last| last + 1));
        }
        weights.retain(|&weight| weight >= self.min_p); // the first weight is 1
        let at = uniform * running(&weights).last().unwrap_or(0.0);
        // Only a positive weight increases the sum, so a token with probability 0 is never chosen.
        let chosen = running(&weights).position(|sum| sum > at);
        Ok(chosen.and_then(|rank| ranked.get(rank)).copied().unwrap_or(likeliest))
    }
}

/// The cumulative sums of the weights.
fn running(weights: &[f64]) -> impl Iterator<Item = f64> {
    weights.iter().scan(0.0, |sum, weight| {
        *sum += weight;
        Some(*sum)
    })
}

/// The number in [0, 1) that selects the token at `position` of text number `text`.
pub(crate) fn uniform(seed: u64, text: u64, position: u64) -> f64 {
    let key = match text {
        0 => splitmix::key(&[seed, SAMPLING_STREAM]),
        _ => splitmix::key(&[seed, SAMPLING_STREAM, text]),
    };
    (splitmix::at(key, position) >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
#[path = "sampling_tests.rs"]
mod tests;
