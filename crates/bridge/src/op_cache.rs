//! Selective re-materialization: keeps the outputs of a forward's products and convolutions, so
//! that its re-materialization need not compute them again.
//!
//! Korthikanti et al. 2022 (arXiv 2205.05198, section 5) keep what is expensive to compute relative
//! to its size.
//!
//! The cache holds the results of [`crate::linear::linear`] and [`crate::convolution::convolution`]
//! on this thread, in order. A result that was changed in place is computed again.

use cxx::UniquePtr;

use crate::{Result, ffi::bridged};

/// The outputs of one forward's products and convolutions.
pub struct OpCache(UniquePtr<bridged::OpCache>);

/// Ends an incomplete recording or replay when dropped.
struct Forget;

impl Drop for Forget {
    fn drop(&mut self) {
        bridged::forget_op_caches();
    }
}

impl OpCache {
    /// Runs `forward`, and keeps the outputs of its products and convolutions.
    ///
    /// # Errors
    /// This thread is already recording or replaying.
    ///
    /// ```
    /// use gpipe_bridge::{linear::{Kernels, linear}, op_cache::OpCache};
    /// use tch::{Device, Kind, Tensor};
    /// let x = Tensor::randn([4, 8], (Kind::Float, Device::Cpu));
    /// let w = Tensor::randn([3, 8], (Kind::Float, Device::Cpu));
    /// let forward = || linear(&x, &w, None, Kernels::Aten);
    /// let (y, cache) = OpCache::record(forward).unwrap();
    /// let again = cache.replay(forward).unwrap();
    /// assert_eq!(again.unwrap().data_ptr(), y.unwrap().data_ptr());
    /// ```
    pub fn record<T>(forward: impl FnOnce() -> T) -> Result<(T, Self)> {
        bridged::begin_recording()?;
        let forget = Forget;
        let made = forward();
        let cache = bridged::end_recording()?;
        drop(forget);
        Ok((made, Self(cache)))
    }

    /// Total size of the kept outputs, in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.bytes()
    }

    /// Runs the same `forward` again, but its products and convolutions return the kept outputs.
    /// Gradients are the same as if the outputs had been computed, to the bit. The inner result is
    /// that of `forward`.
    ///
    /// # Errors
    /// `forward` succeeds with fewer products than the first time. (If it has more products, or
    /// different ones, the product itself fails.) This thread is already recording or replaying.
    pub fn replay<T, E>(
        self,
        forward: impl FnOnce() -> std::result::Result<T, E>,
    ) -> Result<std::result::Result<T, E>> {
        bridged::begin_replay(self.0)?;
        let _forget = Forget;
        let made = forward();
        if made.is_ok() {
            bridged::end_replay()?;
        }
        Ok(made)
    }

    /// [`replay`](Self::replay) for a forward that may end early: fewer products are no error.
    ///
    /// # Errors
    /// This thread is already recording or replaying.
    pub fn replay_part<T>(self, forward: impl FnOnce() -> T) -> Result<T> {
        bridged::begin_replay(self.0)?;
        let _forget = Forget;
        Ok(forward())
    }
}

/// Ends the range of [`unread`] when dropped.
struct Read;

impl Drop for Read {
    fn drop(&mut self) {
        bridged::set_unread(false);
    }
}

/// Runs `forward`. Its [`crate::linear::linear`] gives zeros in place of the product, with the
/// product's backward: for a forward that is computed again, where no backward reads the result.
pub fn unread<T>(forward: impl FnOnce() -> T) -> T {
    bridged::set_unread(true);
    let _read = Read;
    forward()
}

#[cfg(test)]
mod tests {
    use tch::{Kind, Tensor};

    use super::*;
    use crate::{
        convolution::{Geometry, convolution},
        linear::{Kernels, linear},
        testing::leaf,
        vjp::{Request, vjp},
    };

    /// The output, and the gradients of all leaves.
    fn gradients(y: &Tensor, leaves: &[&Tensor]) -> Vec<Option<Tensor>> {
        let grad = y.detach().cos();
        let mut sums = Vec::new();
        let request =
            Request { outputs: &[y], output_grads: &[&grad], inputs: leaves, parameters: &[] };
        let found = vjp(&request, &mut sums).unwrap();
        [Some(y.detach())].into_iter().chain(found).collect()
    }

    #[test]
    fn transparency_an_unread_product_has_the_gradients_of_a_computed_one() {
        let (x, w, b) = (leaf(&[3, 64, 96], 1), leaf(&[128, 96], 2), leaf(&[128], 3));
        let forward = || linear(&x, &w, Some(&b), Kernels::OneDnn).unwrap();
        let (computed, left_out) = (forward(), unread(forward));
        assert_eq!(left_out.size(), computed.size());
        assert_eq!(left_out.abs().max().double_value(&[]), 0.0);
        let grad = computed.detach().cos();
        let of = |y: &Tensor| {
            let inputs = [&x, &w, &b];
            let request =
                Request { outputs: &[y], output_grads: &[&grad], inputs: &inputs, parameters: &[] };
            vjp(&request, &mut []).unwrap()
        };
        assert_eq!(of(&left_out), of(&computed));
        assert_eq!(forward(), computed, "only within the call");
    }

    #[test]
    fn transparency_a_replay_has_the_bits_of_what_it_replays() {
        let (x, w, b) = (leaf(&[3, 64, 96], 1), leaf(&[128, 96], 2), leaf(&[128], 3));
        let (image, kernel) = (leaf(&[2, 128, 8, 12], 4), leaf(&[128, 8, 3, 3], 5));
        let point = leaf(&[64, 128, 1, 1], 6);
        for kernels in [Kernels::Aten, Kernels::OneDnn] {
            for kind in [Kind::Float, Kind::BFloat16] {
                let of = |t: &Tensor| t.to_kind(kind).detach().set_requires_grad(true);
                let [x, w, b, image, kernel, point] = [&x, &w, &b, &image, &kernel, &point].map(of);
                let geometry = Geometry { padding: [1; 2], groups: 16, ..Geometry::default() };
                let forward = || -> Result<Tensor> {
                    let rows = linear(&x, &w, Some(&b), kernels).unwrap().gelu("none");
                    let maps = convolution(&image, &kernel, &geometry, kernels).unwrap().tanh();
                    let maps = convolution(&maps, &point, &Geometry::default(), kernels).unwrap();
                    Ok(rows.flatten(0, -1) * maps.flatten(0, -1).repeat([2]))
                };
                let leaves = [&x, &w, &b, &image, &kernel, &point];
                let plain = gradients(&forward().unwrap(), &leaves);
                let (first, cache) = OpCache::record(forward).unwrap();
                drop(first);
                let again = gradients(&cache.replay(forward).unwrap().unwrap(), &leaves);
                assert!(plain.iter().all(Option::is_some));
                assert_eq!(plain, again, "{kernels:?} {kind:?}");
            }
        }
    }

    #[test]
    fn transparency_what_was_changed_in_place_is_computed_again() {
        let (x, w) = (leaf(&[5, 7], 1), leaf(&[9, 7], 2));
        let forward = || {
            let y = linear(&x, &w, None, Kernels::Aten).unwrap();
            // A layer may do this to save memory.
            Ok::<_, ()>(tch::no_grad(|| y.detach().g_add_scalar_(1.0)) * &y)
        };
        let plain = forward();
        let (_, cache) = OpCache::record(forward).unwrap();
        assert_eq!(cache.replay(forward).unwrap(), plain);
        // So may a later layer, which receives the output.
        let forward = || linear(&x, &w, None, Kernels::Aten);
        let plain = forward().unwrap();
        let (y, cache) = OpCache::record(forward).unwrap();
        let _ = tch::no_grad(|| y.unwrap().detach().g_add_scalar_(1.0));
        assert_eq!(cache.replay(forward).unwrap().unwrap(), plain);
    }

    #[test]
    fn fault_another_forward_is_refused_and_leaves_nothing_behind() {
        let (x, w, other) = (leaf(&[5, 7], 1), leaf(&[9, 7], 2), leaf(&[8, 7], 3));
        let once = || linear(&x, &w, None, Kernels::Aten);
        let twice = || once().and_then(|_| once());
        let recorded = || OpCache::record(once).unwrap().1;
        let error = recorded().replay(twice).unwrap().unwrap_err().to_string();
        assert!(error.contains("more products than the first time (1)"), "{error}");
        let error = recorded().replay(|| Ok::<_, ()>(())).err().unwrap().to_string();
        assert!(error.contains("0 products where it had 1"), "{error}");
        assert_eq!(recorded().replay(|| Err::<(), _>("its own")).unwrap(), Err("its own"));
        let changed = || linear(&x, &other, None, Kernels::Aten);
        let error = recorded().replay(changed).unwrap().unwrap_err().to_string();
        assert!(error.contains("a product [5, 8] where it had [5, 9]"), "{error}");
        assert!(OpCache::record(|| OpCache::record(once).is_err()).unwrap().0);
        let panicked =
            std::panic::catch_unwind(|| OpCache::record(|| panic!("a layer's")).map(drop));
        assert!(panicked.is_err());
        assert!(recorded().replay(once).unwrap().is_ok());
    }

    #[test]
    fn property_what_is_kept_is_what_products_gave() {
        let arena = crate::memory::Arena::acquire().unwrap();
        crate::memory::enter(arena.id()).unwrap();
        let (x, w) = (leaf(&[256, 64], 1), leaf(&[128, 64], 2));
        let live = || crate::memory::stats(arena.id()).unwrap().live as i64;
        let before = live();
        let forward = || linear(&x, &w, None, Kernels::Aten).map(|y| y.tanh().exp().tanh());
        let (y, cache) = OpCache::record(forward).unwrap();
        drop(y);
        let (held, one) = (live() - before, 256 * 128 * 4);
        assert_eq!(cache.bytes(), one as u64);
        assert!((one..one + one / 2).contains(&held), "{held}");
        drop(cache.replay(forward).unwrap().unwrap());
        assert_eq!(live(), before);
        crate::memory::enter(0).unwrap();
    }
}
