//! Activation offload: what autograd saves of a forward, taken out of memory and put back.
//!
//! Blocks are whole storages, so what comes back has the strides, dtypes and aliases that it had.
//! Where blocks are meanwhile is the caller's business.

use cxx::UniquePtr;
use tch::{Device, Kind, Tensor};

use crate::{Error, Result, address, addresses, adopt, ffi::bridged};

/// The tensors that the graph of a forward keeps for its backward.
pub struct SavedTensors(UniquePtr<bridged::SavedTensors>);

// SAFETY: one owner at a time uses the collection, and moving it between threads moves no reference
// into a thread: the thread-local that points to it is cleared when `around` returns.
unsafe impl Send for SavedTensors {}

/// Ends the collecting when dropped.
struct Leave<'a>(&'a mut SavedTensors);

impl Drop for Leave<'_> {
    fn drop(&mut self) {
        self.0.0.pin_mut().leave();
    }
}

impl SavedTensors {
    /// An empty collection.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new() -> Result<Self> {
        Ok(Self(bridged::new_saved_tensors()?))
    }

    /// Runs `forward`, and collects what its operators save on this thread.
    ///
    /// # Errors
    /// This thread already collects.
    ///
    /// ```
    /// use gpipe_bridge::offload::{SavedTensors, root_of};
    /// use tch::{Device, Kind, Tensor};
    /// let x = Tensor::ones([4], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    /// let mut saved = SavedTensors::new().unwrap();
    /// let y = saved.around(|| (&x * 2).exp()).unwrap();
    /// let root = root_of(&y).unwrap();
    /// drop(y);
    /// let blocks = saved.take_away().unwrap();
    /// assert_eq!(blocks.len(), 1); // exp saves its result
    /// saved.bring_back(blocks).unwrap();
    /// let grad = Tensor::ones([4], (Kind::Float, Device::Cpu));
    /// # let request = gpipe_bridge::vjp::Request {
    /// #     outputs: &[&root], output_grads: &[&grad], inputs: &[&x], parameters: &[],
    /// # };
    /// # let found = gpipe_bridge::vjp::vjp(&request, &mut []).unwrap();
    /// # assert_eq!(found[0], Some((&x.detach() * 2).exp() * 2));
    /// ```
    pub fn around<T>(&mut self, forward: impl FnOnce() -> T) -> Result<T> {
        self.0.pin_mut().enter()?;
        let _leave = Leave(self);
        Ok(forward())
    }

    /// Adds the memory of a leaf of the graph. The leaf must be the caller's own: its elements must
    /// not be read while they are away.
    ///
    /// # Errors
    /// The tensor is undefined.
    pub fn add_leaf(&mut self, leaf: &Tensor) -> Result<()> {
        // SAFETY: the tensor is borrowed for the whole call.
        Ok(unsafe { self.0.pin_mut().add_leaf(address(leaf)) }?)
    }

    /// Takes away the memory that nothing but the graph refers to: one tensor of bytes for each
    /// storage. A backward then fails until they are back.
    ///
    /// # Errors
    /// Out of memory.
    pub fn take_away(&mut self) -> Result<Vec<Tensor>> {
        Ok(self.0.pin_mut().take_away()?.into_iter().filter_map(adopt).collect())
    }

    /// Gives back what [`take_away`](Self::take_away) returned, or copies, in the same order.
    ///
    /// # Errors
    /// Another number of blocks.
    pub fn bring_back(&mut self, blocks: Vec<Tensor>) -> Result<()> {
        // SAFETY: the tensors are borrowed for the whole call.
        Ok(unsafe { self.0.pin_mut().bring_back(&addresses(&blocks)) }?)
    }
}

/// A tensor without elements at the same place in the graph as `output`, from which a backward can
/// start. It does not keep the memory of `output`.
///
/// # Errors
/// The tensor is undefined.
pub fn root_of(output: &Tensor) -> Result<Tensor> {
    // SAFETY: the tensor is borrowed for the whole call.
    let root = unsafe { bridged::root_of(address(output)) }?;
    adopt(root).ok_or_else(|| Error("an output without a root".into()))
}

/// Calls `read` with the bytes of a block on the CPU.
///
/// # Errors
/// The tensor is not contiguous bytes on the CPU.
pub fn with_bytes<T>(block: &Tensor, read: impl FnOnce(&[u8]) -> T) -> Result<T> {
    if block.kind() != Kind::Uint8 || block.device() != Device::Cpu || !block.is_contiguous() {
        return Err(Error("a block of saved activations is not bytes on the CPU".into()));
    }
    let count = block.numel();
    if count == 0 {
        return Ok(read(&[]));
    }
    // SAFETY: the tensor is contiguous, on the CPU and of `count` bytes, and is borrowed for the
    // call. Blocks have no other users, so nothing writes to it meanwhile.
    Ok(read(unsafe { std::slice::from_raw_parts(block.data_ptr().cast::<u8>(), count) }))
}

/// A new block of `count` bytes on the CPU, which `write` fills.
///
/// # Errors
/// Out of memory.
pub fn block<T>(count: usize, write: impl FnOnce(&mut [u8]) -> T) -> Result<(Tensor, T)> {
    let size = i64::try_from(count).map_err(|_| Error(format!("a block of {count} bytes")))?;
    let block = Tensor::f_empty([size], (Kind::Uint8, Device::Cpu));
    let block = block.map_err(|error| Error(error.to_string()))?;
    if count == 0 {
        return Ok((block, write(&mut [])));
    }
    let start = block.data_ptr().cast::<u8>();
    // SAFETY: the tensor is new, contiguous and on the CPU, and nothing else refers to its `count`
    // bytes. They are set to 0 first, because a `&mut [u8]` must be initialized.
    let bytes = unsafe {
        start.write_bytes(0, count);
        std::slice::from_raw_parts_mut(start, count)
    };
    let written = write(bytes);
    Ok((block, written))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vjp::{Request, vjp};

    fn ramp(shape: &[i64]) -> Tensor {
        let count: i64 = shape.iter().product();
        let x = Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.37;
        x.sin().reshape(shape)
    }

    fn bits(tensor: &Tensor) -> Vec<u32> {
        let values: Vec<f32> = tensor.detach().reshape([-1]).try_into().unwrap();
        values.into_iter().map(f32::to_bits).collect()
    }

    /// The gradients of `x` and `w`; with `away`, the saved activations go through bytes.
    fn gradients(forward: impl Fn(&Tensor, &Tensor) -> Tensor, away: bool) -> Vec<Vec<u32>> {
        let x = ramp(&[2, 3, 4, 4]).contiguous_memory_format().detach().set_requires_grad(true);
        let w = ramp(&[3, 3, 3, 3]).set_requires_grad(true);
        let mut saved = SavedTensors::new().unwrap();
        let y = if away { saved.around(|| forward(&x, &w)).unwrap() } else { forward(&x, &w) };
        let grad = y.detach().cos();
        let root = root_of(&y).unwrap();
        drop(y);
        if away {
            let blocks = saved.take_away().unwrap();
            assert!(!blocks.is_empty());
            let copy = |own: &Tensor| {
                let count = own.numel();
                let copied = with_bytes(own, |from| block(count, |to| to.copy_from_slice(from)));
                copied.unwrap().unwrap().0
            };
            let copies = blocks.iter().map(copy).collect();
            // What was saved is not in memory in the meantime.
            for own in blocks {
                let _ = own.shallow_clone().fill_(77);
            }
            saved.bring_back(copies).unwrap();
        }
        let request =
            Request { outputs: &[&root], output_grads: &[&grad], inputs: &[&x], parameters: &[&w] };
        let mut sums = vec![None];
        let found = vjp(&request, &mut sums).unwrap();
        found.iter().chain(&sums).map(|own| bits(own.as_ref().unwrap())).collect()
    }

    trait ChannelsLast {
        fn contiguous_memory_format(self) -> Tensor;
    }

    impl ChannelsLast for Tensor {
        /// The same values with the channels last in memory.
        fn contiguous_memory_format(self) -> Tensor {
            self.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])
        }
    }

    #[test]
    fn transparency_of_strides_views_and_doubles() {
        let forward = |x: &Tensor, w: &Tensor| {
            let y = x.conv2d(w, None::<Tensor>, [1], [1], [1], 1).tanh();
            let half = y.narrow(1, 0, 2).transpose(2, 3);
            // Saves `half` twice, and a view of it.
            let squared = &half * &half;
            (squared * half.flip([0])).exp().sum_dim_intlist([1].as_slice(), true, None)
        };
        assert_eq!(gradients(forward, true), gradients(forward, false));
    }

    #[test]
    fn property_what_others_hold_stays() {
        let x = ramp(&[8]).set_requires_grad(true);
        let mut saved = SavedTensors::new().unwrap();
        let y = saved.around(|| x.exp()).unwrap();
        let held = y.detach();
        drop(y);
        // `exp` saved its result, which `held` still refers to; `x` is the caller's.
        assert!(saved.take_away().unwrap().is_empty());
        assert_eq!(bits(&held), bits(&x.exp()));
    }

    #[test]
    fn fault_a_backward_without_its_activations_is_an_error() {
        let x = ramp(&[8]).set_requires_grad(true);
        let mut saved = SavedTensors::new().unwrap();
        let root = root_of(&saved.around(|| x.exp()).unwrap()).unwrap();
        let blocks = saved.take_away().unwrap();
        assert_eq!(blocks.len(), 1);
        let grad = ramp(&[8]);
        let request =
            Request { outputs: &[&root], output_grads: &[&grad], inputs: &[&x], parameters: &[] };
        let error = vjp(&request, &mut []).unwrap_err().to_string();
        assert!(error.contains("not back in memory"), "{error}");
        let error = saved.bring_back(Vec::new()).unwrap_err().to_string();
        assert!(error.contains("1 blocks") && error.contains("0 come back"), "{error}");
    }

    #[test]
    fn fault_a_change_in_place_is_an_error_as_without_offload() {
        let x = ramp(&[8]).set_requires_grad(true);
        let mut saved = SavedTensors::new().unwrap();
        let y = saved.around(|| x.exp()).unwrap();
        let root = root_of(&y).unwrap();
        let _ = y.detach().fill_(3.0);
        drop(y);
        let blocks = saved.take_away().unwrap();
        saved.bring_back(blocks).unwrap();
        let grad = ramp(&[8]);
        let request =
            Request { outputs: &[&root], output_grads: &[&grad], inputs: &[&x], parameters: &[] };
        let error = vjp(&request, &mut []).unwrap_err().to_string();
        assert!(error.contains("modified by an inplace operation"), "{error}");
    }

    #[test]
    fn fault_one_collection_at_a_time() {
        let (mut outer, mut inner) = (SavedTensors::new().unwrap(), SavedTensors::new().unwrap());
        let nested = outer.around(|| inner.around(|| ()).map_err(|error| error.to_string()));
        assert_eq!(nested.unwrap().unwrap_err(), "this thread saves already");
        outer.around(|| ()).unwrap();
    }
}
