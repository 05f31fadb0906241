//! A forward's graph without the tensors that autograd saved, and the recomputation that fills it.
//!
//! The recomputation ends with the last tensor that the graph lacks, so it ends where no backward
//! reads further. PyTorch's checkpoints do the same (`torch.utils.checkpoint`, `early_stop`).

use cxx::UniquePtr;
use tch::Tensor;

use crate::{Error, Result, address, addresses, ffi::bridged};

/// The graph of a forward whose saved tensors are not in memory.
pub struct HollowGraph(UniquePtr<bridged::HollowGraph>);

// SAFETY: one owner at a time uses the graph, and moving it between threads moves no reference into
// a thread: the thread-local that points to it is cleared when `record` and `fill` return.
unsafe impl Send for HollowGraph {}

/// Ends the recording or filling when dropped.
struct Leave;

impl Drop for Leave {
    fn drop(&mut self) {
        bridged::leave_hollow_graph();
    }
}

impl HollowGraph {
    /// Runs `forward`, whose graph the caller keeps, and drops what its operators saved. What was
    /// saved through hooks of PyTorch's own stays.
    ///
    /// # Errors
    /// This thread is already recording or filling.
    ///
    /// ```
    /// use gpipe_bridge::hollow::HollowGraph;
    /// # use gpipe_bridge::vjp::{Request, vjp};
    /// use tch::{Device, Kind, Tensor};
    /// let x = Tensor::ones([4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    /// let forward = || (&x * 2).f_exp().and_then(|y| y.f_add_scalar(1));
    /// let (y, graph) = HollowGraph::record(forward).unwrap();
    /// graph.fill(|| forward().map(drop)).unwrap().unwrap(); // ends when `exp` has saved its result
    /// let grad = Tensor::ones([4], (Kind::Float, Device::Cpu));
    /// # let request = Request {
    /// #     outputs: &[&y.unwrap()], output_grads: &[&grad], inputs: &[&x], parameters: &[],
    /// # };
    /// # assert_eq!(vjp(&request, &mut []).unwrap()[0], Some((&x.detach() * 2).exp() * 2));
    /// ```
    pub fn record<T>(forward: impl FnOnce() -> T) -> Result<(T, Self)> {
        let graph = bridged::new_hollow_graph()?;
        graph.enter(false)?;
        let leave = Leave;
        let made = forward();
        drop(leave);
        graph.empty();
        Ok((made, Self(graph)))
    }

    /// Whether the graph of `outputs` may keep more than what operators saved: tensors of a
    /// function of Python's, of a hook, or of a checkpoint within the forward. Their memory stays
    /// as long as the graph.
    ///
    /// # Errors
    /// An error of libtorch.
    pub fn keeps_memory<'t>(&self, outputs: impl IntoIterator<Item = &'t Tensor>) -> Result<bool> {
        // SAFETY: the tensors are borrowed for the whole call.
        Ok(unsafe { self.0.keeps_memory(&addresses(outputs)) }?)
    }

    /// Drops the memory of a leaf of the graph. Reading its elements is an error from then on. It
    /// stays if anybody but the caller and the graph refers to the leaf.
    ///
    /// # Errors
    /// The tensor is undefined.
    pub fn empty_leaf(&self, leaf: &Tensor) -> Result<()> {
        // SAFETY: the tensor is borrowed for the whole call.
        Ok(unsafe { self.0.empty_leaf(address(leaf)) }?)
    }

    /// Runs the same forward again and fills the graph with what its operators save. The last
    /// tensor that is missing ends it with an error of libtorch, which is not one of this call.
    /// Once the graph is full, what `forward` returns does not matter.
    ///
    /// # Errors
    /// The outer one: `forward` succeeds and saves fewer tensors than the first time; this thread
    /// is already recording or filling. The inner one: `forward` failed before the graph was full.
    /// It does so if it saves another tensor than the first time.
    pub fn fill<E>(
        &self,
        forward: impl FnOnce() -> std::result::Result<(), E>,
    ) -> Result<std::result::Result<(), E>> {
        if self.0.count() == 0 {
            return Ok(Ok(())); // a backward that reads nothing
        }
        self.0.enter(true)?;
        let _leave = Leave;
        let made = forward();
        match made {
            _ if self.0.is_full() => Ok(Ok(())),
            Err(error) => Ok(Err(error)),
            Ok(()) => Err(Error(
                "a forward that is computed again saves less than the first time: it must not \
                 depend on anything but its inputs, its parameters and its random numbers"
                    .into(),
            )),
        }
    }
}

/// Whether this thread is in the forward of [`HollowGraph::fill`], and the graph is full. An error
/// of the forward is then no failure.
pub fn is_filled() -> bool {
    bridged::is_filled()
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::{
        custom::custom,
        linear::{Kernels, linear},
        testing::leaf,
        vjp::{Request, vjp},
    };

    fn gradients(y: &Tensor, leaves: &[&Tensor]) -> Vec<Option<Tensor>> {
        let grad = Tensor::ones(y.size(), (Kind::Float, Device::Cpu)).cumsum(0, Kind::Float).sin();
        let request =
            Request { outputs: &[y], output_grads: &[&grad], inputs: leaves, parameters: &[] };
        vjp(&request, &mut []).unwrap()
    }

    #[test]
    fn transparency_a_filled_graph_has_the_gradients_of_one_that_was_never_hollow() {
        let (x, w, b) = (leaf(&[6, 5], 1), leaf(&[7, 5], 2), leaf(&[7], 3));
        let leaves = [&x, &w, &b];
        type End = fn(&Tensor) -> std::result::Result<Tensor, tch::TchError>;
        // A product, an addition, a saved result, a mask made from values.
        let ends: [End; 4] = [
            |y| Ok(y.shallow_clone()),
            |y| y.f_add_scalar(1.0),
            |y| y.f_tanh(),
            |y| y.f_mul(&y.f_gt(0.1)?.f_to_kind(Kind::Float)?)?.f_add(y),
        ];
        for (number, end) in ends.iter().enumerate() {
            for kernels in [Kernels::Aten, Kernels::OneDnn] {
                let forward = || -> std::result::Result<Tensor, Box<dyn std::error::Error>> {
                    let x = x.f_mul(&x)?.f_softmax(-1, None)?;
                    Ok(end(&linear(&x, &w, Some(&b), kernels).map_err(|own| own.0)?)?)
                };
                let plain = gradients(&forward().unwrap(), &leaves);
                let (y, graph) = HollowGraph::record(forward).unwrap();
                graph.fill(|| forward().map(drop)).unwrap().unwrap();
                let case = format!("end {number}, {kernels:?}");
                assert_eq!(gradients(&y.unwrap(), &leaves), plain, "{case}");
            }
        }
    }

    #[test]
    fn property_nothing_is_computed_past_the_last_saved_tensor() {
        let x = leaf(&[5], 1);
        let steps = std::cell::Cell::new(0);
        let forward = || {
            let y = (&x * &x).f_tanh()?;
            steps.set(steps.get() + 1);
            let y = y.f_add(&x)?;
            steps.set(steps.get() + 1);
            y.f_mul_scalar(3.0)
        };
        let (_y, graph) = HollowGraph::record(forward).unwrap();
        assert_eq!(steps.replace(0), 2);
        graph.fill(|| forward().map(drop)).unwrap().unwrap();
        assert_eq!(steps.get(), 0, "tanh saves its result and ends the forward");
        // A forward whose backward reads nothing is not run at all.
        let (_y, graph) = HollowGraph::record(|| x.f_add(&x)).unwrap();
        graph.fill(|| -> std::result::Result<(), ()> { panic!("it ran") }).unwrap().unwrap();
    }

    #[test]
    fn property_a_value_without_a_graph_is_computed_although_little_is_missing() {
        // The product decides what the last saved tensor is.
        let (x, w) = (leaf(&[6, 5], 1), leaf(&[5, 5], 2));
        let forward = || {
            let gate = tch::no_grad(|| linear(&x, &w, None, Kernels::Aten)).unwrap();
            x.f_mul(&gate.gt(0.2).to_kind(Kind::Float))
        };
        let plain = gradients(&forward().unwrap(), &[&x]);
        let (y, graph) = HollowGraph::record(forward).unwrap();
        graph.fill(|| forward().map(drop)).unwrap().unwrap();
        assert_eq!(gradients(&y.unwrap(), &[&x]), plain);
    }

    #[test]
    fn property_a_backward_within_the_forward_has_its_values() {
        let x = leaf(&[5], 1);
        let forward = || {
            let inner = x.f_mul(&x)?.f_exp()?.f_sum(Kind::Float)?;
            let inner = Tensor::f_run_backward(&[inner], &[&x], true, true)?;
            inner[0].f_tanh()?.f_add_scalar(1.0)
        };
        let plain = gradients(&forward().unwrap(), &[&x]);
        let (y, graph) = HollowGraph::record(forward).unwrap();
        graph.fill(|| forward().map(drop)).unwrap().unwrap();
        assert_eq!(gradients(&y.unwrap(), &[&x]), plain);
    }

    #[test]
    fn property_a_hollow_graph_holds_no_memory() {
        let arena = crate::memory::Arena::acquire().unwrap();
        crate::memory::enter(arena.id()).unwrap();
        let live = || crate::memory::stats(arena.id()).unwrap().live as i64;
        let before = live();
        let x = tch::no_grad(|| leaf(&[256, 64], 1)).detach().set_requires_grad(true);
        let one = live() - before;
        let forward = || (&x * &x).exp().tanh();
        let (y, graph) = HollowGraph::record(forward).unwrap();
        let root = crate::offload::root_of(&y).unwrap();
        drop(y);
        graph.empty_leaf(&x).unwrap();
        assert!(live() - before < one / 8, "{} of {one}", live() - before);
        assert!(x.f_exp().is_err(), "its memory is gone");
        drop((root, graph, x));
        // A leaf that a layer holds on to stays.
        let x = leaf(&[256, 64], 1);
        let held = x.shallow_clone();
        let (_y, graph) = HollowGraph::record(|| x.exp()).unwrap();
        graph.empty_leaf(&x).unwrap();
        assert!(held.f_exp().is_ok());
        crate::memory::enter(0).unwrap();
    }

    /// RReLU saves its noise before it draws it. A recomputation that ended there had gradients of
    /// what had been in that memory, sometimes NaN.
    #[test]
    fn regression_a_recomputation_does_not_end_before_noise_is_drawn() {
        let x = leaf(&[6, 5], 1);
        let (y, graph) = HollowGraph::record(|| x.rrelu(false)).unwrap(); // tch cannot train it
        assert!(graph.keeps_memory([&y]).unwrap());
        let (y, graph) = HollowGraph::record(|| x.relu()).unwrap();
        assert!(!graph.keeps_memory([&y]).unwrap());
    }

    /// What a graph with code of Python's keeps is tested in Python.
    #[test]
    fn property_only_a_graph_of_known_operations_keeps_nothing_else() {
        let (x, w) = (leaf(&[6, 5], 1), leaf(&[5, 5], 2));
        let keeps = |forward: &dyn Fn() -> Tensor| {
            let (y, graph) = HollowGraph::record(forward).unwrap();
            graph.keeps_memory([&y]).unwrap()
        };
        assert!(!keeps(&|| linear(&x, &w, None, Kernels::OneDnn).unwrap().tanh() + &x));
        assert!(!keeps(&|| x.view([30]).narrow(0, 3, 9).cumsum(0, Kind::Float)));
        assert!(!keeps(&|| tch::no_grad(|| &x * 2.0)), "there is no graph");
        let twice = || {
            let y = tch::no_grad(|| &x * 2.0);
            let backward = |_: &[Tensor], grads: &[Option<Tensor>], _: &[bool]| {
                Ok(vec![grads[0].as_ref().map(|grad| grad * 2.0)])
            };
            custom(&[&x], &[y], &[], backward).unwrap().remove(0)
        };
        assert!(keeps(&|| twice().tanh()), "a backward of the user's may hold tensors");
        let copied = |into: fn(&Tensor) -> Tensor| {
            let mut y = into(&x);
            y.copy_(&(&x * 2.0));
            y.tanh()
        };
        assert!(!keeps(&|| copied(Tensor::empty_like)));
        let into_view = || {
            let y = &x * 2.0;
            y.narrow(0, 0, 2).copy_(&x.narrow(0, 1, 2));
            y.tanh()
        };
        assert!(keeps(&into_view), "what it wrote over is known to its node alone");
    }

    #[test]
    fn fault_another_forward_is_refused_and_leaves_nothing_behind() {
        let (x, short) = (leaf(&[6], 1), leaf(&[3], 2));
        let forward = |x: &Tensor| x.f_exp()?.f_tanh()?.f_sin();
        let (y, graph) = HollowGraph::record(|| forward(&x)).unwrap();
        let error = graph.fill(|| forward(&short).map(drop)).unwrap().unwrap_err().to_string();
        assert!(error.contains("saves Float[3] where it saved Float[6]"), "{error}");
        let fewer = graph.fill(|| x.f_exp().map(drop)).unwrap_err().to_string();
        assert!(fewer.contains("saves less than the first time"), "{fewer}");
        let request = |y: &Tensor| {
            let grad = x.detach();
            let request =
                Request { outputs: &[y], output_grads: &[&grad], inputs: &[&x], parameters: &[] };
            vjp(&request, &mut []).map(drop)
        };
        assert_eq!(graph.fill(|| Err("its own")).unwrap(), Err("its own"));
        let error = request(y.as_ref().unwrap()).unwrap_err().to_string();
        assert!(error.contains("not computed again yet"), "{error}");
        let nested = HollowGraph::record(|| HollowGraph::record(|| ()).is_err()).unwrap();
        assert!(nested.0);
        assert!(!is_filled());
    }
}
