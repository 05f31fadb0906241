//! A callable of Python as a loss.

use gpipe::{LayerError, Loss, LossContext, TensorSpec};
use pyo3::prelude::*;
use pyo3_tch::PyTensor;
use tch::Tensor;

use crate::{
    convert::tuple,
    failure::{Failure, Raised},
    gil,
};

/// `sum(outputs, targets)` is a scalar; `count(targets)` a number.
pub(crate) struct PyLoss {
    pub sum: Py<PyAny>,
    pub count: Py<PyAny>,
    pub failure: Failure,
}

impl Loss for PyLoss {
    fn check(
        &self,
        _: &LossContext<'_, TensorSpec>,
        _: &[TensorSpec],
        _: &[TensorSpec],
    ) -> Result<(), LayerError> {
        Ok(()) // the callable checks its tensors itself
    }

    fn sum(
        &self,
        _: &LossContext<'_>,
        outputs: &[Tensor],
        targets: &[Tensor],
    ) -> Result<Tensor, LayerError> {
        gil::with(&self.failure, |py| {
            drop(PyErr::take(py));
            let run = || -> PyResult<Tensor> {
                let of = |all: &[Tensor]| tuple(py, all.iter().map(Tensor::shallow_clone));
                let sum = self.sum.bind(py).call1((of(outputs)?, of(targets)?))?;
                Ok(sum.extract::<PyTensor>()?.0)
            };
            run().map_err(|exception| self.failure.keep(py, Raised::Loss, exception))
        })
    }

    fn count(&self, _: &LossContext<'_>, targets: &[Tensor]) -> Result<f64, LayerError> {
        gil::with(&self.failure, |py| {
            let run = || -> PyResult<f64> {
                let targets = tuple(py, targets.iter().map(Tensor::shallow_clone))?;
                self.count.bind(py).call1((targets,))?.extract()
            };
            run().map_err(|exception| self.failure.keep(py, Raised::Count, exception))
        })
    }
}
