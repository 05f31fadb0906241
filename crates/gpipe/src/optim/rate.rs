//! The learning rate schedule: a warm-up, then a decay.

/// How the learning rate falls after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Decay {
    /// The rate stays constant.
    #[default]
    Constant,
    /// Half a cosine from 1 down to `floor` at step `steps` (Loshchilov & Hutter 2017), then
    /// constant.
    Cosine {
        /// The step at which the floor is reached, warm-up included.
        steps: u64,
        /// The final rate, as a share of the rate after the warm-up.
        floor: f64,
    },
    /// sqrt(w / (w + t)), where w is the number of warm-up steps, at least 1, and t counts the
    /// steps after the warm-up (Vaswani et al. 2017, section 5.3).
    InverseSquareRoot,
    /// `rate` to the power of t / `every`, where t counts the steps after the warm-up.
    Exponential {
        /// Factor for every `every` steps: above 0, at most 1.
        rate: f64,
        /// Number of steps, at least 1.
        every: u64,
    },
}

/// A linear warm-up, then a [`Decay`]. Its factor multiplies the optimizer's learning rate.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LearningRate {
    /// Number of steps n over which the factor rises linearly from 1 / n to 1.
    pub warmup_steps: u64,
    /// The decay after the warm-up.
    pub decay: Decay,
}

impl LearningRate {
    /// The factor at `step`, counted from 0.
    pub fn factor(&self, step: u64) -> f64 {
        let warmup = self.warmup_steps;
        if step < warmup {
            return (step + 1) as f64 / warmup as f64;
        }
        let after = (step - warmup) as f64;
        match self.decay {
            Decay::Constant => 1.0,
            Decay::Cosine { steps, floor } if step >= steps => floor,
            Decay::Cosine { steps, floor } => {
                let length = steps.saturating_sub(warmup).max(1) as f64;
                let cosine = 0.5 * (1.0 + (std::f64::consts::PI * (after / length).min(1.0)).cos());
                floor + (1.0 - floor) * cosine
            }
            Decay::InverseSquareRoot => {
                let first = warmup.max(1) as f64;
                (first / (after + first)).sqrt()
            }
            Decay::Exponential { rate, every } => rate.powf(after / every.max(1) as f64),
        }
    }

    /// Checks that the settings are in range.
    ///
    /// # Errors
    /// Names the setting that is out of range, and its valid range.
    pub fn check(&self) -> Result<(), String> {
        match self.decay {
            Decay::Cosine { floor, .. } if !(0.0..=1.0).contains(&floor) => {
                Err(format!("decay_floor = {floor}: use 0 to 1"))
            }
            Decay::Exponential { rate, every } if !(rate > 0.0 && rate <= 1.0) || every == 0 => {
                Err(format!(
                    "decay_rate = {rate}, decay_every = {every}: use a rate above 0 and at most 1, \
                    every 1 or more steps"
                ))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: f64, b: f64) {
        assert!((a - b).abs() < 1e-12, "{a} {b}");
    }

    #[test]
    fn oracle_every_decay_meets_its_known_points() {
        let rate = |decay| LearningRate { warmup_steps: 10, decay };
        for decay in [Decay::Constant, Decay::InverseSquareRoot] {
            close(rate(decay).factor(0), 0.1);
            close(rate(decay).factor(9), 1.0);
            close(rate(decay).factor(10), 1.0);
        }
        let cosine = rate(Decay::Cosine { steps: 110, floor: 0.1 });
        close(cosine.factor(60), 0.55);
        close(cosine.factor(110), 0.1);
        close(cosine.factor(u64::MAX), 0.1);
        // The warm-up ends after the decay has.
        close(rate(Decay::Cosine { steps: 5, floor: 0.1 }).factor(10), 0.1);
        close(rate(Decay::InverseSquareRoot).factor(40), 0.5); // sqrt(10 / 40)
        close(rate(Decay::Exponential { rate: 0.5, every: 20 }).factor(50), 0.25);
        close(LearningRate::default().factor(0), 1.0);
        let all = [cosine, rate(Decay::InverseSquareRoot)];
        for rate in all {
            assert!((10..109).all(|step| rate.factor(step) >= rate.factor(step + 1)));
        }
    }

    #[test]
    fn fault_numbers_that_make_no_schedule() {
        let check = |decay| LearningRate { warmup_steps: 0, decay }.check();
        assert!(check(Decay::Cosine { steps: 1, floor: 1.1 }).is_err());
        assert!(check(Decay::Exponential { rate: 0.0, every: 1 }).is_err());
        assert!(check(Decay::Exponential { rate: 0.5, every: 0 }).is_err());
        assert!(check(Decay::Exponential { rate: f64::NAN, every: 1 }).is_err());
        assert!(check(Decay::Constant).is_ok());
    }
}
