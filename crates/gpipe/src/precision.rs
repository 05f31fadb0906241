//! The dtypes of a run: of computation and of storage.

use tch::Kind;

use crate::spec::TensorSpec;

/// The dtypes of a run. With bfloat16 or float16 arithmetic, master weights, gradient sums, losses
/// and optimizers are in float32 (Micikevicius et al. 2018, section 3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Precision {
    /// Activations, their gradients, and the copies of the weights that layers see.
    pub compute: Kind,
    /// Master weights, gradient sums, optimizer state, losses.
    pub master: Kind,
}

impl Precision {
    /// The dtypes for arithmetic in `kind`, or `None` if it is not supported.
    pub(crate) fn of(kind: Kind) -> Option<Self> {
        match kind {
            Kind::Float | Kind::Double => Some(Self { compute: kind, master: kind }),
            Kind::BFloat16 | Kind::Half => Some(Self { compute: kind, master: Kind::Float }),
            _ => None,
        }
    }

    /// The specs of the first layer's inputs for a user's inputs `specs`: float32 becomes the
    /// compute dtype.
    pub(crate) fn fed(self, specs: &[TensorSpec]) -> Vec<TensorSpec> {
        replace(specs, self.master, self.compute)
    }

    /// The specs that losses see for the last layer's outputs `specs`: the compute dtype becomes
    /// the master dtype.
    pub(crate) fn seen_by_losses(self, specs: &[TensorSpec]) -> Vec<TensorSpec> {
        replace(specs, self.compute, self.master)
    }

    /// Whether layers see copies of the weights in a smaller dtype.
    pub(crate) fn is_reduced(self) -> bool {
        self.compute != self.master
    }
}

fn replace(specs: &[TensorSpec], from: Kind, to: Kind) -> Vec<TensorSpec> {
    let kind = |spec: &TensorSpec| if spec.kind == from { to } else { spec.kind };
    specs.iter().map(|spec| spec.with_kind(kind(spec))).collect()
}

/// Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2). The loss is multiplied
/// by a scale so that small gradients do not become 0. A step whose gradients overflow is skipped
/// and the scale halved; after many good steps it doubles. Scales are powers of two, so scaling
/// changes no bit of values that neither overflow nor underflow.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct LossScale {
    pub scale: f64,
    /// Good steps since the last change.
    pub good: u32,
    dynamic: bool,
}

/// As in PyTorch's GradScaler.
const FIRST: f64 = 65536.0;
const GROWTH_INTERVAL: u32 = 2000;
const LARGEST: f64 = 16_777_216.0;

impl LossScale {
    /// The initial scale for arithmetic in `kind`: always 1 except in float16.
    pub(crate) fn new(kind: Kind) -> Self {
        let dynamic = kind == Kind::Half;
        Self { scale: if dynamic { FIRST } else { 1.0 }, good: 0, dynamic }
    }

    /// The scale, if it is dynamic.
    pub(crate) fn dynamic_scale(&self) -> Option<f64> {
        self.dynamic.then_some(self.scale)
    }

    /// Restores the scale and the good steps of a saved state. A state saved by a run without a
    /// dynamic scale has none; the scale then starts anew.
    pub(crate) fn restore(&mut self, scale: Option<f64>, good: u32) {
        if self.dynamic {
            (self.scale, self.good) = scale.map_or((FIRST, 0), |scale| (scale, good));
        }
    }

    /// Records a step that was applied.
    pub(crate) fn step_was_good(&mut self) {
        if !self.dynamic {
            return;
        }
        self.good += 1;
        if self.good == GROWTH_INTERVAL {
            self.good = 0;
            self.scale = (2.0 * self.scale).min(LARGEST);
        }
    }

    /// Records a step whose gradients were not finite. Returns whether a smaller scale may help.
    pub(crate) fn step_overflowed(&mut self) -> bool {
        self.good = 0;
        if !self.dynamic {
            return false;
        }
        if self.scale <= 1.0 {
            // No scale helps, so the error is not one of range. Start over instead of keeping the
            // smallest scale.
            self.scale = FIRST;
            return false;
        }
        self.scale *= 0.5;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_the_scale_halves_on_overflow_and_doubles_after_many_good_steps() {
        let mut scale = LossScale::new(Kind::Half);
        assert!(scale.step_overflowed());
        assert_eq!(scale.scale, 32768.0);
        for _ in 0..GROWTH_INTERVAL - 1 {
            scale.step_was_good();
        }
        assert!(scale.step_overflowed()); // counting starts again
        for _ in 0..GROWTH_INTERVAL {
            scale.step_was_good();
        }
        assert_eq!(scale.scale, 32768.0);
        let halvings = (0..100).take_while(|_| scale.step_overflowed()).count();
        assert_eq!((halvings, scale.scale), (15, FIRST)); // gave up, and reset for the next step
        let mut fixed = LossScale::new(Kind::BFloat16);
        assert!(!fixed.step_overflowed());
        assert_eq!(fixed.scale, 1.0);
    }
}
