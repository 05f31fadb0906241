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
    /// An empty collection of tensors on `device`. What operators save elsewhere stays there.
    ///
    /// # Errors
    /// The device is neither a CPU nor a GPU.
    pub fn new(device: Device) -> Result<Self> {
        let gpu = match device {
            Device::Cpu => -1,
            Device::Cuda(gpu) => i32::try_from(gpu).unwrap_or(i32::MAX),
            other => return Err(Error(format!("no offload from {other:?}: use a CPU or a GPU"))),
        };
        Ok(Self(bridged::new_saved_tensors(gpu)?))
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
    /// let mut saved = SavedTensors::new(Device::Cpu).unwrap();
    /// let y = saved.around(|| (&x * 2).exp()).unwrap();
    /// let root = root_of(&y).unwrap();
    /// drop(y);
    /// let blocks = saved.take_away().unwrap();
    /// assert_eq!(blocks.len(), 1); // exp saves its result
    /// saved.bring_back(blocks.into_iter().map(|block| block.into_tensor()).collect()).unwrap();
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

    /// Adds the memory of a leaf of the graph. While it is away, reading the leaf's elements is an
    /// error.
    ///
    /// # Errors
    /// The tensor is undefined.
    pub fn add_leaf(&mut self, leaf: &Tensor) -> Result<()> {
        // SAFETY: the tensor is borrowed for the whole call.
        Ok(unsafe { self.0.pin_mut().add_leaf(address(leaf)) }?)
    }

    /// Takes away the memory that nothing but the graph refers to: one block for each storage. A
    /// backward then fails until they are back.
    ///
    /// # Errors
    /// Out of memory.
    pub fn take_away(&mut self) -> Result<Vec<Block>> {
        let blocks = self.0.pin_mut().take_away()?.into_iter().filter_map(adopt);
        Ok(blocks.map(Block).collect())
    }

    /// Gives the memory back: for each block of [`take_away`](Self::take_away), in the same order,
    /// a tensor of its bytes on its device.
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

/// The bytes of a storage. Nothing else refers to them.
#[derive(Debug)]
pub struct Block(Tensor);

impl Block {
    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.0.numel()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of a block on the CPU.
    ///
    /// # Errors
    /// It is on a GPU.
    pub fn bytes(&self) -> Result<&[u8]> {
        if self.0.device() != Device::Cpu {
            return Err(Error("a block on a GPU has no bytes on the CPU".into()));
        }
        if self.is_empty() {
            return Ok(&[]);
        }
        let start = self.0.data_ptr().cast::<u8>();
        // SAFETY: the tensor has `len` contiguous bytes on the CPU, and no other user, so nothing
        // writes to them while `self` is borrowed.
        Ok(unsafe { std::slice::from_raw_parts(start, self.len()) })
    }

    /// A tensor of bytes on the same memory.
    pub fn into_tensor(self) -> Tensor {
        self.0
    }
}

/// A new block of `count` bytes on the CPU, which `write` fills.
///
/// # Errors
/// Out of memory.
pub fn filled<T>(count: usize, write: impl FnOnce(&mut [u8]) -> T) -> Result<(Block, T)> {
    let size = i64::try_from(count).map_err(|_| Error(format!("a block of {count} bytes")))?;
    // A `&mut [u8]` must be initialized.
    let block = Tensor::f_zeros([size], (Kind::Uint8, Device::Cpu));
    let block = block.map_err(|error| Error(error.to_string()))?;
    if count == 0 {
        return Ok((Block(block), write(&mut [])));
    }
    // SAFETY: the tensor is new, contiguous and on the CPU, and nothing else refers to its `count`
    // bytes, which are 0.
    let bytes = unsafe { std::slice::from_raw_parts_mut(block.data_ptr().cast::<u8>(), count) };
    let written = write(bytes);
    Ok((Block(block), written))
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
        let mut saved = SavedTensors::new(Device::Cpu).unwrap();
        let y = if away { saved.around(|| forward(&x, &w)).unwrap() } else { forward(&x, &w) };
        let grad = y.detach().cos();
        let root = root_of(&y).unwrap();
        drop(y);
        if away {
            let blocks = saved.take_away().unwrap();
            assert!(!blocks.is_empty());
            let copy = |own: &Block| {
                let from = own.bytes().unwrap();
                filled(from.len(), |to| to.copy_from_slice(from)).unwrap().0.into_tensor()
            };
            let copies = blocks.iter().map(copy).collect();
            // What was saved is not in memory in the meantime.
            for own in blocks {
                let _ = own.into_tensor().fill_(77);
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
        let mut saved = SavedTensors::new(Device::Cpu).unwrap();
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
        let mut saved = SavedTensors::new(Device::Cpu).unwrap();
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
    fn fault_a_leaf_that_is_away_cannot_be_read() {
        let mut leaf = ramp(&[8]).copy();
        let mut saved = SavedTensors::new(Device::Cpu).unwrap();
        saved.add_leaf(&leaf).unwrap();
        let blocks = saved.take_away().unwrap();
        assert_eq!(blocks[0].len(), 32);
        for error in [leaf.f_exp().unwrap_err(), leaf.f_add_(&ramp(&[8])).unwrap_err()] {
            assert!(error.to_string().contains("offloaded"), "{error}");
        }
        saved.bring_back(blocks.into_iter().map(Block::into_tensor).collect()).unwrap();
        assert_eq!(bits(&leaf), bits(&ramp(&[8])));
    }

    #[test]
    fn fault_a_change_in_place_is_an_error_as_without_offload() {
        let x = ramp(&[8]).set_requires_grad(true);
        let mut saved = SavedTensors::new(Device::Cpu).unwrap();
        let y = saved.around(|| x.exp()).unwrap();
        let root = root_of(&y).unwrap();
        let _ = y.detach().fill_(3.0);
        drop(y);
        let blocks = saved.take_away().unwrap().into_iter().map(Block::into_tensor).collect();
        saved.bring_back(blocks).unwrap();
        let grad = ramp(&[8]);
        let request =
            Request { outputs: &[&root], output_grads: &[&grad], inputs: &[&x], parameters: &[] };
        let error = vjp(&request, &mut []).unwrap_err().to_string();
        assert!(error.contains("modified by an inplace operation"), "{error}");
    }

    #[test]
    fn fault_one_collection_at_a_time() {
        let (mut outer, mut inner) =
            (SavedTensors::new(Device::Cpu).unwrap(), SavedTensors::new(Device::Cpu).unwrap());
        let nested = outer.around(|| inner.around(|| ()).map_err(|error| error.to_string()));
        assert_eq!(nested.unwrap().unwrap_err(), "this thread saves already");
        outer.around(|| ()).unwrap();
    }
}
