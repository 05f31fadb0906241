//! Rotary positions, and how they are scaled to longer texts.
//!
//! Tables are made in float32, by the operations and in the order of Hugging Face's transformers.
//! So a model that was trained there sees the same angles here, to the last bit.

use gpipe_bridge::{device::upload, fused};
use tch::{Device, Kind, Tensor};

use crate::{error::LayerError, layer::Forward};

/// Rotary position embedding (Su et al. 2021): features `i` and `i + size / 2` of a query or key
/// are turned by an angle that grows with the position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rotary {
    /// The slowest pair turns about once in `2 pi theta` positions.
    pub theta: f64,
    /// The most positions that the model was made for.
    pub positions: i64,
    /// How the angles are changed.
    pub scaling: RotaryScaling,
}

/// How angles are changed, so that a model sees longer texts than it was trained on.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum RotaryScaling {
    /// Not at all.
    #[default]
    None,
    /// All angles divided by a factor (Chen et al. 2023).
    Linear {
        /// Above 0.
        factor: f64,
    },
    /// A theta that grows with the length of a text beyond [`Rotary::positions`] (NTK-aware
    /// scaling).
    Dynamic {
        /// Above 0.
        factor: f64,
    },
    /// Slow pairs divided by a factor, fast ones kept, and those between blended (Llama 3.1).
    Llama3 {
        /// Above 0.
        factor: f64,
        /// Pairs that turn fewer times in `original` positions are divided.
        low: f64,
        /// Pairs that turn more often are kept. Above `low`.
        high: f64,
        /// Positions of the first training.
        original: i64,
    },
    /// As [`RotaryScaling::Llama3`] with a linear blend over the pairs, and scaled tables (YaRN;
    /// Peng et al. 2023).
    Yarn {
        /// Above 0.
        factor: f64,
        /// Factor of both tables; `None`: `0.1 ln(factor) + 1`.
        attention: Option<f64>,
        /// Turns in `original` positions from which on a pair is kept.
        fast: f64,
        /// Turns up to which a pair is divided.
        slow: f64,
        /// Positions of the first training.
        original: i64,
        /// Whether the blend begins and ends at whole pairs.
        truncate: bool,
    },
}

/// Cosine and sine of each position's angles. Both are [positions, size / 2], or [samples, 1,
/// positions, size / 2].
pub(super) struct Tables {
    cos: Tensor,
    sin: Tensor,
}

impl Rotary {
    /// Checks the settings for heads of `size` features.
    pub(super) fn check(&self, size: i64) -> Result<(), LayerError> {
        let refuse = |reason: String| Err(LayerError::Value(reason));
        if size < 2 || size % 2 != 0 {
            return refuse(format!("heads of size {size}: rotary positions need an even size"));
        }
        if !(self.theta.is_finite() && self.theta > 1.0) || self.positions < 1 {
            let Self { theta, positions, .. } = self;
            return refuse(format!(
                "rotary positions with theta {theta} and {positions} positions: use a theta above \
                1 and at least 1 position"
            ));
        }
        let (numbers, original): (&[f64], i64) = match &self.scaling {
            RotaryScaling::None => (&[], 1),
            RotaryScaling::Linear { factor } => (&[*factor], 1),
            RotaryScaling::Dynamic { factor } if size > 2 => (&[*factor], 1),
            RotaryScaling::Dynamic { .. } => {
                return refuse(
                    "dynamic rotary positions need heads of more than 2 features".into(),
                );
            }
            RotaryScaling::Llama3 { factor, low, high, original } if high > low => {
                (&[*factor, *low, *high], *original)
            }
            RotaryScaling::Llama3 { low, high, .. } => {
                return refuse(format!(
                    "rotary positions: the high frequency factor {high} must be above the low one, \
                    {low}"
                ));
            }
            RotaryScaling::Yarn { factor, attention, fast, slow, original, .. } => {
                (&[*factor, attention.unwrap_or(1.0), *fast, *slow], *original)
            }
        };
        if numbers.iter().all(|number| number.is_finite() && *number > 0.0) && original > 0 {
            return Ok(());
        }
        refuse(format!("rotary positions: every number of {:?} must be above 0", self.scaling))
    }

    /// Checks that documents can share rows of `length` positions.
    pub(super) fn check_documents(&self, length: i64) -> Result<(), LayerError> {
        match self.scaling {
            RotaryScaling::Dynamic { .. } if length > self.positions => {
                Err(LayerError::Value(format!(
                    "dynamic rotary positions change with the length of a document, so documents \
                    share rows of at most {} positions, not {length}",
                    self.positions
                )))
            }
            _ => Ok(()),
        }
    }

    /// Angle per position of each pair in a text of `length` positions: float32 [size / 2].
    fn frequencies(&self, size: i64, length: i64) -> Result<Tensor, LayerError> {
        let exponents = Tensor::f_arange_start_step(0, size, 2, (Kind::Float, Device::Cpu))?
            .f_div_scalar(size)?;
        let turned = |theta: f64| Tensor::f_pow_scalar(theta, &exponents);
        let plain = || turned(self.theta)?.f_reciprocal();
        Ok(match self.scaling {
            RotaryScaling::None => plain()?,
            RotaryScaling::Linear { factor } => plain()?.f_div_scalar(factor)?,
            RotaryScaling::Dynamic { .. } if length <= self.positions => plain()?,
            RotaryScaling::Dynamic { factor } => {
                let theta = Tensor::from(length)
                    .f_mul_scalar(factor)?
                    .f_div_scalar(self.positions)?
                    .f_sub_scalar(factor - 1.0)?
                    .f_pow_tensor_scalar(size as f64 / (size - 2) as f64)?
                    .f_mul_scalar(self.theta)?;
                theta.f_pow(&exponents)?.f_reciprocal()?
            }
            RotaryScaling::Llama3 { factor, low, high, original } => {
                let (plain, original) = (plain()?, original as f64);
                let wavelengths = plain.f_reciprocal()?.f_mul_scalar(2.0 * std::f64::consts::PI)?;
                let slow = wavelengths.f_gt(original / low)?;
                let fast = wavelengths.f_lt(original / high)?;
                let divided = plain.f_div_scalar(factor)?;
                let scaled = divided.f_where_self(&slow, &plain)?;
                let blend = wavelengths
                    .f_reciprocal()?
                    .f_mul_scalar(original)?
                    .f_sub_scalar(low)?
                    .f_div_scalar(high - low)?;
                let rest = blend.f_neg()?.f_add_scalar(1.0)?;
                let blended =
                    rest.f_mul(&scaled)?.f_div_scalar(factor)?.f_add(&blend.f_mul(&scaled)?)?;
                let between = slow.f_logical_or(&fast)?.f_logical_not()?;
                blended.f_where_self(&between, &scaled)?
            }
            RotaryScaling::Yarn { factor, fast, slow, original, truncate, .. } => {
                let powers = turned(self.theta)?;
                let kept = powers.f_reciprocal()?;
                let divided = powers.f_mul_scalar(factor)?.f_reciprocal()?;
                // The pair that turns this often in the positions of the first training.
                let pair = |turns: f64| {
                    let ratio = original as f64 / (turns * 2.0 * std::f64::consts::PI);
                    size as f64 * ratio.ln() / (2.0 * self.theta.ln())
                };
                let (mut first, mut last) = (pair(fast), pair(slow));
                if truncate {
                    (first, last) = (first.floor(), last.ceil());
                }
                let first = first.max(0.0);
                let mut last = last.min((size - 1) as f64);
                if first == last {
                    last += 0.001; // no division by 0
                }
                let ramp = Tensor::f_arange(size / 2, (Kind::Float, Device::Cpu))?
                    .f_sub_scalar(first)?
                    .f_div_scalar(last - first)?
                    .f_clamp(0.0, 1.0)?;
                let kept_share = ramp.f_neg()?.f_add_scalar(1.0)?;
                let divided_share = kept_share.f_neg()?.f_add_scalar(1.0)?;
                divided.f_mul(&divided_share)?.f_add(&kept.f_mul(&kept_share)?)?
            }
        })
    }

    /// Factor of both tables.
    fn amplitude(&self) -> f64 {
        match self.scaling {
            RotaryScaling::Yarn { attention: Some(own), .. } => own,
            RotaryScaling::Yarn { factor, .. } if factor > 1.0 => 0.1 * factor.ln() + 1.0,
            _ => 1.0,
        }
    }

    /// The tables of `length` positions after `past`, for heads of `size` features.
    pub(super) fn tables(
        &self,
        size: i64,
        past: i64,
        length: i64,
        (kind, device): (Kind, Device),
    ) -> Result<Tables, LayerError> {
        let frequencies = self.frequencies(size, past + length)?;
        let options = (Kind::Float, Device::Cpu);
        let positions = Tensor::f_arange_start(past, past + length, options)?.f_unsqueeze(-1)?;
        let Tables { cos, sin } = self.turning(&positions.f_mul(&frequencies)?, kind)?;
        Ok(Tables { cos: upload(&cos, device)?, sin: upload(&sin, device)? })
    }

    /// The tables of rows in which position numbers restart at 0 with each document.
    ///
    /// `documents`: int64 [samples, positions], as for [`DOCUMENTS`](super::DOCUMENTS).
    pub(super) fn tables_of(
        &self,
        size: i64,
        documents: &Tensor,
        kind: Kind,
    ) -> Result<Tables, LayerError> {
        let (_, length) = documents.size2()?;
        let device = documents.device();
        let frequencies = upload(&self.frequencies(size, length)?, device)?;
        let positions = Tensor::f_arange(length, (Kind::Int64, device))?.f_sub(documents)?;
        let positions = positions.f_to_kind(Kind::Float)?.f_unsqueeze(1)?.f_unsqueeze(-1)?;
        self.turning(&positions.f_mul(&frequencies)?, kind)
    }

    fn turning(&self, angles: &Tensor, kind: Kind) -> Result<Tables, LayerError> {
        let table = |values: Tensor| -> Result<Tensor, LayerError> {
            Ok(values.f_mul_scalar(self.amplitude())?.f_to_kind(kind)?)
        };
        Ok(Tables { cos: table(angles.f_cos()?)?, sin: table(angles.f_sin()?)? })
    }
}

impl Tables {
    /// Turns `x` [samples, heads, positions, size].
    pub(super) fn turn(&self, ctx: &Forward, x: &Tensor) -> Result<Tensor, LayerError> {
        let Self { cos, sin } = self;
        if ctx.fuses(x) {
            return Ok(fused::rotary(x, cos, sin)?);
        }
        // One node in the backward, where two views would each fill a tensor as large as `x`.
        let halves = x.f_chunk(2, -1)?;
        let [a, b] = halves.as_slice() else {
            return Err(LayerError::Shape("a head has no two halves".into()));
        };
        let first = a.f_mul(cos)?.f_sub(&b.f_mul(sin)?)?;
        let second = b.f_mul(cos)?.f_add(&a.f_mul(sin)?)?;
        Ok(Tensor::f_cat(&[first, second], -1)?)
    }
}
