//! Family `oracle_`: compares losses and gradient norms of five steps with values from PyTorch,
//! recorded in `parity/recorded.json` by `scripts/parity.py --record`. These tests need no PyTorch.
//! They catch what that script catches, except a wrong gradient with the right norm. The initial
//! weights depend only on the seed.

// clippy.toml allows these only in test functions, not in shared helpers.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "parity/cases.rs"]
mod cases;

use cases::{Case, STEPS, batch};
use serde_json::Value;
use tch::Kind;

const RECORDED: &str = include_str!("parity/recorded.json");

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

fn norm(tensor: &tch::Tensor) -> f64 {
    tensor.to_kind(Kind::Double).square().sum(Kind::Double).double_value(&[]).sqrt()
}

/// The recorded values that a case is compared with.
struct Recorded {
    losses: Vec<f64>,
    /// Maximum difference of a norm per step, relative to max(norm, 1e-3 global norm). It is 1e-5
    /// in float32 and 1e-10 in float64, or more if PyTorch's float32 trajectory is further from its
    /// float64 one. Adam divides by sqrt(v), so the update is arbitrary where a gradient is as
    /// small as its rounding error.
    tolerances: Vec<f64>,
    /// Gradient norms by parameter, then by step.
    norms: Vec<(String, Vec<f64>)>,
}

impl Recorded {
    fn of(case: &Case) -> Self {
        let recorded: Value = serde_json::from_str(RECORDED).unwrap();
        let found = &recorded["cases"][&case.name()];
        let norms = found["gradient_norm"].as_object().unwrap().iter();
        Self {
            losses: numbers(&found["loss"]),
            tolerances: numbers(&found["gradient_tolerance"]),
            norms: norms.map(|(name, steps)| (name.clone(), numbers(steps))).collect(),
        }
    }

    fn check(&self, case: &Case, loss_tolerance: f64) {
        let mut pipeline = case.pipeline().unwrap();
        let (inputs, targets) = batch().unwrap();
        for step in 0..STEPS {
            let loss = pipeline.train_step(&inputs, &targets).unwrap().loss;
            let what = format!("{}, step {}", case.name(), step + 1);
            let error = (loss - self.losses[step]).abs() / self.losses[step];
            assert!(error <= loss_tolerance, "{what}: the loss {loss} differs by {error:e}");
            let gradients = pipeline.gradients().unwrap();
            assert_eq!(gradients.len(), self.norms.len(), "{what}: other parameters");
            let global = self.norms.iter().map(|(_, n)| n[step].powi(2)).sum::<f64>().sqrt();
            for (name, gradient) in &gradients {
                let expected = self.norms.iter().find(|(own, _)| own == name);
                let expected = expected.unwrap_or_else(|| panic!("{what}: no {name}")).1[step];
                let error = (norm(gradient) - expected).abs() / expected.max(1e-3 * global);
                let tolerance = self.tolerances[step];
                assert!(error <= tolerance, "{what}: the norm of {name} differs by {error:e}");
            }
        }
    }
}

fn check_all(kind: Kind, loss_tolerance: f64) {
    let cases: Vec<Case> = Case::all().into_iter().filter(|case| case.kind == kind).collect();
    assert_eq!(cases.len(), 8);
    for case in cases {
        Recorded::of(&case).check(&case, loss_tolerance);
    }
}

#[test]
fn oracle_recorded_pytorch_in_float64() {
    check_all(Kind::Double, 1e-10);
}

#[test]
fn oracle_recorded_pytorch_in_float32() {
    check_all(Kind::Float, 1e-6);
}
