//! Positions as sines and cosines, without parameters and for any length.

use std::ops::Range;

use tch::{Device, Kind, Tensor};

use crate::error::LayerError;

/// Longest wavelength, in units of 2 pi.
const WAVELENGTH_MAX: f64 = 10_000.0;
/// Temporary bytes of [`sinusoids`] per element of its output, in float64.
///
/// Angles, sines and cosines each have half as many elements as the output; the tensor that
/// combines them has as many.
pub(super) const TEMPORARY: f64 = 8.0 * (0.5 + 0.5 + 0.5 + 1.0);

/// Sinusoidal positions [positions, features], computed in float64 (Vaswani et al. 2017, section
/// 3.5).
///
/// Position p has sin(p r^i) and cos(p r^i) in alternation, for i from 0 and r = 10000^(-2 /
/// features).
pub(super) fn sinusoids(
    positions: Range<i64>,
    features: i64,
    kind: Kind,
    device: Device,
) -> Result<Tensor, LayerError> {
    let options = (Kind::Double, device);
    let exponent = -2.0 * WAVELENGTH_MAX.ln() / features as f64;
    let rate = Tensor::f_arange(features / 2, options)?.f_mul_scalar(exponent)?.f_exp()?;
    let length = positions.end - positions.start;
    let position = Tensor::f_arange_start(positions.start, positions.end, options)?;
    let angle = position.f_unsqueeze(1)?.f_mul(&rate)?;
    let waves = Tensor::f_stack(&[angle.f_sin()?, angle.f_cos()?], -1)?;
    Ok(waves.f_reshape([length, features])?.f_to_kind(kind)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_the_papers_formula() {
        let found = sinusoids(3..9, 10, Kind::Double, Device::Cpu).unwrap();
        assert_eq!(found.size(), [6, 10]);
        for (row, position) in (3..9).enumerate() {
            for i in 0..5 {
                let angle = f64::from(position) / 10_000_f64.powf(2.0 * f64::from(i) / 10.0);
                let at = |column: i64| found.double_value(&[row as i64, column]);
                assert!((at(2 * i64::from(i)) - angle.sin()).abs() < 1e-12);
                assert!((at(2 * i64::from(i) + 1) - angle.cos()).abs() < 1e-12);
            }
        }
    }

    #[test]
    fn property_a_later_range_is_a_part_of_a_longer_one() {
        let whole = sinusoids(0..40, 16, Kind::Float, Device::Cpu).unwrap();
        for (start, end) in [(0, 40), (0, 1), (7, 23), (39, 40), (5, 5)] {
            let part = sinusoids(start..end, 16, Kind::Float, Device::Cpu).unwrap();
            assert_eq!(part, whole.narrow(0, start, end - start));
        }
    }
}
