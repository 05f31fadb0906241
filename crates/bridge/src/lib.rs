//! All C++ of gpipe, and its only `extern`: libtorch features that tch does not bind.
//!
//! - [`vjp`]: vector-Jacobian products with given output gradients, accumulated exactly
//! - [`split`]: the same in two halves, first for the inputs and later for the parameters
//! - [`memory`]: a CPU allocator with accounting, caps and reuse, per arena
//! - [`device`]: streams, events and memory of GPUs
//! - [`layout`]: the memory layout of values that pass from one layer to the next
//! - [`ledger`]: what libtorch's operations take on a thread: time, bytes, FLOPs
//! - [`linear`]: the affine map through the faster of two float32 kernels
//! - [`fused`]: attention; norms, gated units and rotary positions in one pass over memory
//! - [`convolution`]: of images in channels-last layout, 1x1 ones as matrix products
//! - [`images`]: batch norm with its ReLU, and pooling, in channels-last layout
//! - [`custom`]: operations whose backward is Rust code
//! - [`op_cache`]: outputs of products and convolutions, kept for re-materialization
//! - [`offload`]: what autograd saves of a forward, taken out of memory and put back
//! - [`hollow`]: a forward's graph without what autograd saved, and how it is filled again
//! - [`loss`]: cross entropy with an in-place backward
//! - [`optim`]: ATen's fused optimizer kernels over tensors that the caller owns
//! - [`c10d`]: PyTorch's store and process groups, for pipelines of several processes
//! - [`random`]: generators keyed by what runs, for operators of libtorch
//! - [`threads`]: how many threads share an operation, and which vector units compute it
//! - [`fill`]: writing a new tensor's elements from Rust without a copy
//!
//! Signatures are safe and thin. Tensors cross as addresses of `at::Tensor`, which is what tch
//! holds, so nothing is copied. Every C++ exception becomes an [`Error`], even one that is not a
//! `std::exception`. Decisions about training do not live here.
//!
//! With the feature `allocator`, linking this crate installs the counting allocator for the whole
//! process, before `main`.
//!
//! # Side channels
//!
//! Eight thread-locals in C++ bypass the signatures, because libtorch's own calls lie between their
//! two ends and take no argument of ours:
//!
//! | what | set by | read by | why not an argument |
//! |---|---|---|---|
//! | the current arena | [`memory::enter`], before each action | the allocator, at each allocation | ATen allocates inside its operators |
//! | the last refusal | the allocator, when a cap refuses | [`memory::take_refusal`], when an operator failed | an allocator can only throw, and ATen turns that into text |
//! | the [`op_cache`] that records or replays | [`op_cache::OpCache`], around one layer's forward | [`linear`] and [`convolution`] | a layer's code calls these, and must not know whether it is recomputed |
//! | whether nobody reads a product | [`op_cache::unread`], around one product | [`linear`] | a layer's code calls it, and must not know whether it is recomputed |
//! | the [`offload::SavedTensors`] that collects | [`offload::SavedTensors::around`], around a stage's forward | autograd's hooks, for each tensor that an operator saves | ATen saves tensors inside its operators |
//! | the [`hollow::HollowGraph`] that records or is filled | [`hollow::HollowGraph`], around one layer's forward | autograd's hooks, for each tensor that an operator saves, and [`linear`] | ATen saves tensors inside its operators |
//! | the [`ledger`] that counts | [`ledger::begin`], before an action | libtorch's dispatcher, at each operation | ATen runs operations inside its operators |
//! | the [`random`] scopes | [`random::Scope`], around one layer's forward | libtorch's random operators, through a dispatch key | a layer's code calls these |
//!
//! All eight belong to the thread of one device's stages. gpipe passes nothing else this way.

pub mod c10d;
pub mod convolution;
pub mod custom;
mod custom_backward;
pub mod device;
mod ffi;
pub mod fill;
pub mod fused;
pub mod hollow;
pub mod images;
#[cfg(test)]
mod kernel_tests;
pub mod layout;
pub mod ledger;
pub mod linear;
pub mod loss;
pub mod memory;
pub mod offload;
pub mod op_cache;
pub mod optim;
pub mod random;
pub mod split;
#[cfg(test)]
mod testing;
pub mod threads;
pub mod vjp;

/// A C++ exception as a value. The text is the exception's message, without its backtrace.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(pub String);

impl From<cxx::Exception> for Error {
    fn from(exception: cxx::Exception) -> Self {
        Error(exception.what().to_owned())
    }
}

/// The result of a bridged call.
pub type Result<T> = std::result::Result<T, Error>;

/// The version of libtorch and its build, such as `2.11.0+cpu`.
pub fn version() -> &'static str {
    env!("GPIPE_LIBTORCH_VERSION")
}

/// The address of the `at::Tensor` behind a tch tensor; valid while `tensor` is borrowed.
fn address(tensor: &tch::Tensor) -> usize {
    tensor.as_ptr() as usize
}

fn addresses<'a>(tensors: impl IntoIterator<Item = &'a tch::Tensor>) -> Vec<usize> {
    tensors.into_iter().map(address).collect()
}

/// Takes ownership of a tensor that C++ returned; 0 means "none".
fn adopt(address: usize) -> Option<tch::Tensor> {
    // SAFETY: a non-zero address comes from `give` in bridge.h, which creates a new `at::Tensor` on
    // the heap, owned by the caller. tch deletes it when the returned tensor is dropped.
    (address != 0).then(|| unsafe { tch::Tensor::from_ptr(address as *mut _) })
}

#[cfg(test)]
mod tests {
    use super::ffi::bridged;

    #[test]
    fn fault_every_exception_becomes_an_error() {
        let texts: Vec<String> = (0..3)
            .map(|kind| bridged::throw_for_test(kind).unwrap_err().what().to_owned())
            .collect();
        assert_eq!(
            texts,
            ["a c10::Error", "a std::exception", "a C++ exception that is not a std::exception"]
        );
    }
}
