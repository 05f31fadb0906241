//! Produces the results that `scripts/parity.py` compares with PyTorch. Runs every case and writes
//! a safetensors file for each.
//!
//! Usage: `parity FOLDER`
//!
//! FOLDER/CASE.safetensors holds `inputs`, `targets` and `0/parameter/NAME`, and after each step S
//! from 1 `S/loss`, `S/gradient/NAME` and `S/parameter/NAME`.

#[path = "../../../../crates/models/tests/parity/cases.rs"]
mod cases;

use cases::{Case, Failure, STEPS, batch};
use tch::Tensor;

fn main() -> Result<(), Failure> {
    let folder = std::env::args().nth(1).ok_or("usage: parity FOLDER")?;
    Case::all().iter().try_for_each(|case| write(case, &folder))
}

fn write(case: &Case, folder: &str) -> Result<(), Failure> {
    let mut pipeline = case.pipeline()?;
    let (inputs, targets) = batch()?;
    let mut tensors = named("0/parameter", pipeline.parameters()?);
    for step in 1..=STEPS {
        let report = pipeline.train_step(&inputs, &targets)?;
        tensors.push((format!("{step}/loss"), Tensor::f_from_slice(&[report.loss])?));
        tensors.extend(named(&format!("{step}/gradient"), pipeline.gradients()?));
        tensors.extend(named(&format!("{step}/parameter"), pipeline.parameters()?));
    }
    tensors.push(("inputs".into(), inputs));
    tensors.push(("targets".into(), targets));
    Ok(Tensor::write_safetensors(&tensors, format!("{folder}/{}.safetensors", case.name()))?)
}

fn named(prefix: &str, tensors: Vec<(String, Tensor)>) -> Vec<(String, Tensor)> {
    tensors.into_iter().map(|(name, tensor)| (format!("{prefix}/{name}"), tensor)).collect()
}
