//! The native part of the Python package: layers, losses and a pipeline on Python's tensors.
//!
//! - [`engine`]: the class behind `gpipe.Pipeline`; [`settings`]: what it is built from
//! - [`driver`]: the thread that owns a pipeline, and how Python waits for it
//! - [`layer`]: a module of Python as a layer; [`loss`]: a callable of Python as a loss
//! - [`running`]: what a module's code can ask of the layer that runs it
//! - [`gil`]: threads of stages in Python; [`failure`]: exceptions and errors
//! - [`report`]: what a step returns; [`planning`]: profiles and plans
//! - [`convert`]: tensors and their specs

mod convert;
mod driver;
mod engine;
mod failure;
mod gil;
mod layer;
mod loss;
mod planning;
mod report;
mod running;
mod settings;

use pyo3::prelude::*;

/// `gpipe._gpipe`. Private: `gpipe` is its only user.
#[pymodule]
fn _gpipe(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("libtorch", gpipe_bridge::version())?;
    module.add_class::<engine::Engine>()?;
    module.add_class::<engine::OpenForward>()?;
    module.add_class::<report::Timeline>()?;
    module.add_class::<running::RandomKey>()?;
    module.add_function(wrap_pyfunction!(running::in_layer, module)?)?;
    module.add_function(wrap_pyfunction!(running::dropout, module)?)?;
    module.add_function(wrap_pyfunction!(running::keeps_samples, module)?)?;
    module.add_function(wrap_pyfunction!(running::batch_norm, module)?)?;
    module.add_function(wrap_pyfunction!(running::random_key, module)?)?;
    module.add_function(wrap_pyfunction!(running::stash, module)?)?;
    module.add_function(wrap_pyfunction!(running::pop, module)?)?;
    module.add_function(wrap_pyfunction!(planning::plan, module)?)?;
    module.add_function(wrap_pyfunction!(planning::cut, module)?)?;
    module.add_function(wrap_pyfunction!(planning::checkpoint_parameters, module)?)?;
    module.add_function(wrap_pyfunction!(planning::checkpoint_file, module)?)?;
    Ok(())
}
