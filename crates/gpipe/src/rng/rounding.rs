//! Stochastic rounding to bfloat16: up or down, with probabilities that make the mean exact.
//!
//! A moving average changes by less than half a bfloat16 step in most updates. Rounding to nearest
//! would drop these changes, and the average would stop. Stochastic rounding preserves the changes
//! in the mean (Gupta et al. 2015, section 3).
//!
//! The random bits are a function of (seed, parameter, tensor, update, element). They are the same
//! on every device.

use gpipe_bridge::{device::upload, fill};
use gpipe_core::splitmix::{at, key};
use tch::{Device, Kind, Tensor};

use super::{ROUNDING, name_hash, on_device};
use crate::error::LayerError;

/// The key of the random bits, without the element.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RoundingKey<'a> {
    pub seed: u64,
    /// Full name of the parameter. A tied weight has the name of its first use.
    pub parameter: &'a str,
    /// Index of the state tensor among the parameter's state tensors.
    pub tensor: u64,
    /// Number of the parameter's update.
    pub update: u64,
}

impl RoundingKey<'_> {
    fn stream(&self) -> u64 {
        let Self { seed, parameter, tensor, update } = *self;
        key(&[ROUNDING, seed, name_hash(parameter), tensor, update])
    }
}

/// The largest finite bfloat16.
const MOST: f64 = 3.389_531_389_251_535_5e38;

/// Number of elements that share one 64-bit random number.
const PER_WORD: i64 = 4;

/// Rounds `values`, float32 `[count]`, into `target`, bfloat16 `[count]`. Overwrites `values`.
///
/// `first`: the index in the state tensor of the first value, a multiple of 4. A value keeps its
/// sign. Infinities and values beyond the largest finite bfloat16 become that number, so rounding
/// never produces an infinity. NaN stays NaN.
///
/// # Errors
/// libtorch's error, such as for lack of memory.
pub(crate) fn round_to_bfloat16(
    values: Tensor,
    target: &Tensor,
    key: RoundingKey,
    first: i64,
) -> Result<(), LayerError> {
    let mut values = values;
    let (count, device) = (values.size1()?, values.device());
    let draws = match device {
        Device::Cpu => on_host(key.stream(), first, count)?,
        device => on_any(key.stream(), first, count, device)?,
    };
    // A bfloat16 is the upper half of a float32. Adding a uniform number of 16 bits to the whole
    // carries into the upper half with a probability equal to the lower half's share of a step. The
    // lower half is then cut off. The largest bfloat16 has a lower half of zeros, so it stays.
    let _ = values.f_clamp_(-MOST, MOST)?;
    // Of all NaNs the one whose lower half is 0: adding to another may carry into its sign.
    let nan = values.f_isnan()?;
    let _ = values.f_masked_fill_(&nan, f64::NAN)?;
    let mut bits = values.f_view_dtype(Kind::Int)?;
    let _ = bits.f_add_(&draws)?.f_add_scalar_(0x8000)?; // the draws are signed
    let halves = bits.f_view_dtype(Kind::Int16)?.f_reshape([count, 2])?;
    target.f_view_dtype(Kind::Int16)?.f_copy_(&halves.f_select(1, 1)?)?; // little-endian
    Ok(())
}

/// Random int16 `[count]` for the elements from `first` on, computed on the host.
fn on_host(stream: u64, first: i64, count: i64) -> Result<Tensor, LayerError> {
    let first = (first / PER_WORD) as u64;
    Ok(fill::int16(&[count], |elements| {
        for (index, four) in elements.chunks_mut(PER_WORD as usize).enumerate() {
            let mut bits = at(stream, first + index as u64);
            for element in four {
                *element = bits as i16;
                bits >>= 16;
            }
        }
    })?)
}

/// Computes the values of [`on_host`] with int64 arithmetic on `device`.
fn on_any(stream: u64, first: i64, count: i64, device: Device) -> Result<Tensor, LayerError> {
    let keys = upload(&Tensor::f_from_slice(&[stream as i64])?, device)?.f_reshape([1, 1])?;
    let words = on_device(&keys, first / PER_WORD, (count + PER_WORD - 1) / PER_WORD)?;
    Ok(words.f_view_dtype(Kind::Int16)?.f_reshape([-1])?.f_narrow(0, 0, count)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: RoundingKey = RoundingKey { seed: 1, parameter: "a.w", tensor: 0, update: 3 };
    const CPU: Device = Device::Cpu;

    fn rounded(values: &Tensor, key: RoundingKey, first: i64) -> Tensor {
        let target = Tensor::zeros(values.size(), (Kind::BFloat16, CPU));
        round_to_bfloat16(values.copy(), &target, key, first).unwrap();
        target.to_kind(Kind::Float)
    }

    fn values(all: &[f32]) -> Tensor {
        Tensor::from_slice(all)
    }

    #[test]
    fn oracle_the_mean_of_roundings_is_the_value() {
        // A step of bfloat16 is 2^-7 between 1 and 2, and 2^-11 between 2^-4 and 2^-3.
        for (value, step) in
            [(1.003_f32, 2_f64.powi(-7)), (-1.0011, 2_f64.powi(-7)), (0.07, 2_f64.powi(-11))]
        {
            let count = 1 << 18;
            let all = rounded(&Tensor::full([count], f64::from(value), (Kind::Float, CPU)), KEY, 0);
            let mean = all.mean(Kind::Double).double_value(&[]);
            // The standard error is at most half a step / sqrt(count); five of them.
            let bound = 5.0 * step / 2.0 / (count as f64).sqrt();
            assert!((mean - f64::from(value)).abs() < bound, "{value}: {mean}");
            // Only the two neighbours occur, and both do.
            let apart = (&all - f64::from(value)).abs().max().double_value(&[]);
            assert!(apart < step, "{value}: {apart}");
            assert!(all.std(true).double_value(&[]) > 0.0, "{value}");
        }
    }

    #[test]
    fn property_what_bfloat16_can_hold_is_not_changed() {
        let exact = Tensor::arange(1000, (Kind::Float, CPU)).to_kind(Kind::BFloat16);
        let exact = exact.to_kind(Kind::Float) * 0.125 - 60.0;
        let exact = exact.to_kind(Kind::BFloat16).to_kind(Kind::Float);
        assert_eq!(rounded(&exact, KEY, 0), exact);
    }

    #[test]
    fn property_extremes_stay_finite_and_keep_their_sign() {
        let small = [0.0, f32::MIN_POSITIVE, f32::from_bits(1), 1e-40, 3e-39];
        let large = [f32::MAX, 3.389_531_4e38, 3.39e38, f32::INFINITY];
        for update in 0..200 {
            let key = RoundingKey { update, ..KEY };
            for value in small.iter().chain(&large) {
                let found = Vec::<f32>::try_from(rounded(&values(&[*value, -value]), key, 0));
                let found = found.unwrap();
                assert!(found[0].is_finite() && found[0].is_sign_positive(), "{value}: {found:?}");
                assert!(found[1].is_finite() && found[1].is_sign_negative(), "{value}: {found:?}");
            }
        }
        let nans = [f32::NAN, -f32::NAN, f32::from_bits(u32::MAX), f32::from_bits(0x7f80_0001)];
        for update in 0..20 {
            let nan = rounded(&values(&nans), RoundingKey { update, ..KEY }, 0);
            assert!(bool::try_from(nan.isnan().all()).unwrap(), "{nan:?}");
        }
    }

    #[test]
    fn property_bits_depend_on_the_key_and_the_element_alone() {
        let x = Tensor::full([1001], 1.003, (Kind::Float, CPU));
        let whole = rounded(&x, KEY, 0);
        for (first, count) in [(0, 4), (4, 500), (504, 497), (1000, 1)] {
            let part = rounded(&x.narrow(0, first, count), KEY, first);
            assert_eq!(part, whole.narrow(0, first, count), "{first}");
        }
        let others = [
            RoundingKey { seed: 2, ..KEY },
            RoundingKey { parameter: "a.v", ..KEY },
            RoundingKey { tensor: 1, ..KEY },
            RoundingKey { update: 4, ..KEY },
        ];
        let up = |all: &Tensor| all.gt(1.003).to_kind(Kind::Double);
        let share = up(&whole).mean(Kind::Double).double_value(&[]);
        for other in others {
            let found = rounded(&x, other, 0);
            assert_ne!(found, whole, "{other:?}");
            // Independent roundings both go up with the product of their probabilities. The
            // standard error is below 0.5 / sqrt(1001) = 0.016; five of them.
            let both = (up(&whole) * up(&found)).mean(Kind::Double).double_value(&[]);
            assert!((both - share * share).abs() < 0.08, "{other:?}: {both} {share}");
        }
    }

    #[test]
    fn oracle_the_device_arithmetic_gives_the_same_bits() {
        for (first, count) in [(0, 1), (0, 64), (8, 1001), (1 << 20, 7)] {
            let host = on_host(KEY.stream(), first, count).unwrap();
            assert_eq!(on_any(KEY.stream(), first, count, CPU).unwrap(), host);
        }
    }
}
