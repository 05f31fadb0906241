//! The dtypes of a run: what is computed in, and what is kept.

use tch::Kind;

use crate::spec::TensorSpec;

/// Where arithmetic is in bfloat16 or float16, weights are kept, gradients summed, losses taken and
/// optimizers run in float32 (Micikevicius et al. 2018, section 3.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Precision {
    /// Activations, their gradients, and the copies of the weights that layers see.
    pub compute: Kind,
    /// Master weights, gradient sums, optimizer state, losses.
    pub master: Kind,
}

impl Precision {
    /// The dtypes that go with arithmetic in `kind`, if that is supported.
    pub(crate) fn of(kind: Kind) -> Option<Self> {
        match kind {
            Kind::Float | Kind::Double => Some(Self { compute: kind, master: kind }),
            Kind::BFloat16 | Kind::Half => Some(Self { compute: kind, master: Kind::Float }),
            _ => None,
        }
    }

    /// What the first layer is fed where `specs` are the user's: float32 is narrowed.
    pub(crate) fn fed(self, specs: &[TensorSpec]) -> Vec<TensorSpec> {
        replace(specs, self.master, self.compute)
    }

    /// What losses see where the last layer gives `specs`: widened again.
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
    specs.iter().map(|spec| TensorSpec::new(spec.shape.clone(), kind(spec))).collect()
}

/// Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2): gradients are computed
/// of a multiple of the loss, so that small ones do not become 0. A step whose gradients overflow
/// is skipped and the scale halved; after many good ones it doubles. Scales are powers of two, so
/// that scaling changes no bit of what neither overflows nor underflows.
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
    /// For arithmetic in `kind`: 1 for ever, but for float16.
    pub(crate) fn new(kind: Kind) -> Self {
        let dynamic = kind == Kind::Half;
        Self { scale: if dynamic { FIRST } else { 1.0 }, good: 0, dynamic }
    }

    /// The scale, where it is dynamic.
    pub(crate) fn dynamic_scale(&self) -> Option<f64> {
        self.dynamic.then_some(self.scale)
    }

    /// As it was when a state was taken; a state of other arithmetic has no scale, and this one
    /// starts anew.
    pub(crate) fn restore(&mut self, scale: Option<f64>, good: u32) {
        if self.dynamic {
            (self.scale, self.good) = scale.map_or((FIRST, 0), |scale| (scale, good));
        }
    }

    /// After a step that was applied.
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

    /// After a step whose gradients were not finite; whether a smaller scale may help.
    pub(crate) fn step_overflowed(&mut self) -> bool {
        self.good = 0;
        if !self.dynamic {
            return false;
        }
        if self.scale <= 1.0 {
            // No scale helps: the error is not one of range, and must not leave the scale at its
            // least.
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
        assert_eq!((halvings, scale.scale), (15, FIRST)); // given up, and ready for the next step
        let mut fixed = LossScale::new(Kind::BFloat16);
        assert!(!fixed.step_overflowed());
        assert_eq!(fixed.scale, 1.0);
    }
}
