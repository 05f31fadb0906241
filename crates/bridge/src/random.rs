//! Random numbers that depend on a key alone, for operators of libtorch.
//!
//! libtorch's operators draw from one generator for the whole process, so what they draw depends on
//! what ran before them, on any thread. Inside a [`Scope`] they draw from a generator of their own.

use crate::{Result, ffi::bridged};

/// While it lives, operators of this thread that are given no generator draw from one that starts
/// at the scope's seed. Scopes nest; the innermost applies.
///
/// An operator that is given a generator is an error inside a scope.
pub struct Scope {
    /// Ends on the thread where it began.
    _thread: std::marker::PhantomData<*const ()>,
}

impl Scope {
    /// Enters a scope.
    ///
    /// # Errors
    /// libtorch refuses the kernels that hand the generator to its operators.
    ///
    /// ```
    /// use gpipe_bridge::random::Scope;
    /// use tch::{Device, Kind, Tensor};
    /// let draw = |seed| {
    ///     let _scope = Scope::enter(seed).unwrap();
    ///     Tensor::rand([4], (Kind::Float, Device::Cpu))
    /// };
    /// assert_eq!(draw(1), draw(1));
    /// assert_ne!(draw(1), draw(2));
    /// ```
    pub fn enter(seed: u64) -> Result<Self> {
        bridged::enter_random(seed)?;
        Ok(Self { _thread: std::marker::PhantomData })
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        bridged::leave_random();
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;

    const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

    /// Operators that draw, also through others that they are made of.
    fn draws() -> Vec<Tensor> {
        let x = Tensor::ones([3, 4, 5], CPU);
        let lstm = || {
            let weights: Vec<Tensor> = [[8, 5], [8, 2], [8, 2], [8, 2]]
                .iter()
                .map(|size| Tensor::ones(&size[..], CPU))
                .collect();
            let state = [Tensor::zeros([2, 3, 2], CPU), Tensor::zeros([2, 3, 2], CPU)];
            x.lstm(&state, &weights, false, 2, 0.5, true, false, true).0
        };
        vec![
            Tensor::rand([3], CPU),
            Tensor::randn([3], CPU),
            Tensor::randint(1000, [3], CPU),
            Tensor::randperm(50, CPU),
            x.dropout(0.5, true),
            x.native_dropout(0.5, true).0,
            x.alpha_dropout(0.5, true),
            x.feature_dropout(0.5, true),
            x.rand_like(),
            (&x * 0.5).bernoulli(),
            x.multinomial_of_rows(),
            Tensor::scaled_dot_product_attention(
                &x,
                &x,
                &x,
                None::<Tensor>,
                0.5,
                false,
                None,
                false,
            ),
            lstm(),
        ]
    }

    trait Rows {
        fn multinomial_of_rows(&self) -> Tensor;
    }

    impl Rows for Tensor {
        fn multinomial_of_rows(&self) -> Tensor {
            self.reshape([12, 5]).multinomial(2, true)
        }
    }

    #[test]
    fn property_what_operators_draw_depends_on_the_seed_alone() {
        let scoped = |seed| {
            let _scope = Scope::enter(seed).unwrap();
            draws()
        };
        let first = scoped(7);
        let _ = Tensor::rand([10], CPU);
        let elsewhere = std::thread::spawn(move || scoped(7)).join().unwrap();
        assert_eq!(first, elsewhere);
        let other = scoped(8);
        let same: Vec<usize> = (0..first.len()).filter(|&i| first[i] == other[i]).collect();
        assert_eq!(same, [0_usize; 0], "these draws do not depend on the seed");
    }

    #[test]
    fn property_scopes_nest() {
        let draw = || Tensor::rand([4], CPU);
        let _outer = Scope::enter(1).unwrap();
        let first = draw();
        let inner = {
            let _inner = Scope::enter(1).unwrap();
            draw()
        };
        assert_eq!(first, inner);
        assert_ne!(draw(), inner, "the outer scope goes on");
    }

    #[test]
    fn property_gradients_go_through_a_draw() {
        let x = Tensor::ones([100], CPU).set_requires_grad(true);
        let _scope = Scope::enter(1).unwrap();
        let y = x.dropout(0.5, true);
        y.sum(Kind::Float).backward();
        assert_eq!(x.grad(), y.detach());
        let x = Tensor::ones([100], CPU).set_requires_grad(true);
        let y = x.native_dropout(0.5, true).0;
        y.sum(Kind::Float).backward();
        assert_eq!(x.grad(), y.detach());
        let kept = y.gt(0.0).sum(Kind::Int64).int64_value(&[]);
        assert!((20..80).contains(&kept) && y.max().double_value(&[]) == 2.0, "{kept} of 100");
        assert_eq!(x.native_dropout(0.5, false).0, x, "in evaluation");
    }
}
