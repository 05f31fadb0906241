//! Checks of values that do not wait for a GPU.

use std::cell::RefCell;

use tch::{Device, Kind, Tensor};

use crate::{error::LayerError, spec::is_float};

/// A check of values, on the CPU. They have one dimension, and are float64 or int64.
pub(crate) type Check = Box<dyn FnOnce(&Tensor) -> Result<(), LayerError>>;

/// Values on a GPU, and the check of them that is left to do.
pub(crate) struct Inspection {
    pub values: Values,
    pub check: Check,
}

/// Values with one dimension, float64 or int64, on any device.
pub(crate) struct Values(Tensor);

impl Values {
    pub(crate) fn new(tensor: &Tensor) -> Result<Self, LayerError> {
        let wide = if is_float(tensor.kind()) { Kind::Double } else { Kind::Int64 };
        Ok(Self(tensor.f_detach()?.f_reshape([-1])?.f_to_kind(wide)?))
    }

    /// Reads all values in one copy from their device.
    pub(crate) fn read(all: &[&Self]) -> Result<Vec<Tensor>, LayerError> {
        // As the bits of integers, because both kinds have 8 bytes.
        let bits = |own: &&Self| own.0.f_view_dtype(Kind::Int64);
        let bits = all.iter().map(bits).collect::<Result<Vec<_>, _>>()?;
        let bits = match &bits[..] {
            [] => return Ok(Vec::new()),
            [one] => one.f_to(Device::Cpu)?,
            several => Tensor::f_cat(several, 0)?.f_to(Device::Cpu)?,
        };
        let mut start = 0;
        let own = |Self(values): &&Self| {
            let count = values.numel() as i64;
            start += count;
            Ok(bits.f_narrow(0, start - count, count)?.f_view_dtype(values.kind())?)
        };
        all.iter().map(own).collect()
    }
}

/// The inspections that a layer or a loss asked for.
#[derive(Default)]
pub(crate) struct Inspections(RefCell<Vec<Inspection>>);

impl Inspections {
    /// Checks values on the CPU now, and those on a GPU later.
    pub(crate) fn add(
        &self,
        values: &Tensor,
        check: impl FnOnce(&Tensor) -> Result<(), LayerError> + 'static,
    ) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        let values = Values::new(values)?;
        match values.0.device() {
            Device::Cpu => check(&values.0),
            _ => {
                // A copy: the layer may go on to change the tensor in place.
                let values = Values(values.0.f_detach_copy()?);
                self.0.borrow_mut().push(Inspection { values, check: Box::new(check) });
                Ok(())
            }
        }
    }

    pub(crate) fn take(&self) -> Vec<Inspection> {
        self.0.take()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_values_of_both_kinds_are_read_as_they_were() {
        let whole = Tensor::from_slice(&[i64::MAX, -1]);
        let flags = Tensor::from_slice(&[true, false]);
        let floats = Tensor::from_slice(&[0.1_f32, f32::NAN]).reshape([2, 1]);
        let all = [&whole, &flags, &floats].map(|tensor| Values::new(tensor).unwrap());
        let read = Values::read(&all.iter().collect::<Vec<_>>()).unwrap();
        assert_eq!(Vec::<i64>::try_from(&read[0]).unwrap(), [i64::MAX, -1]);
        assert_eq!(Vec::<i64>::try_from(&read[1]).unwrap(), [1, 0]);
        let floats = Vec::<f64>::try_from(&read[2]).unwrap();
        assert!(floats[0] == f64::from(0.1_f32) && floats[1].is_nan());
    }
}
