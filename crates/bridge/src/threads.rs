//! How many threads share an operation, and which vector units compute it. OpenMP gives each thread
//! that calls operations a team of its own.

use crate::{Result, ffi::bridged};

/// Lets `count` threads share each operation that the calling thread begins: libtorch's, and those
/// of this crate. [`tch::set_num_threads`] sets the number of libtorch's operations alone, and a
/// thread's first operation may overwrite it.
///
/// # Errors
/// `count` is below 1.
pub fn set(count: i32) -> Result<()> {
    Ok(bridged::set_threads(count)?)
}

/// The vector units that libtorch's operations use, such as `AVX512`: those of the processor, or
/// fewer if `ATEN_CPU_CAPABILITY` says so. Results with others differ in the last bits.
///
/// # Errors
/// A C++ exception.
pub fn cpu_capability() -> Result<String> {
    Ok(bridged::cpu_capability()?)
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::fused;

    /// The first of our kernels on a thread adopted the number that another thread had set since.
    /// A stage with two threads computed with one.
    #[test]
    fn regression_the_first_kernel_of_a_thread_leaves_the_number_alone() {
        let numbers = |count: i32| {
            let rows = Tensor::ones([4, 64], (Kind::Float, Device::Cpu));
            set(count).unwrap();
            std::thread::spawn(|| set(1).unwrap()).join().unwrap();
            drop(fused::swiglu(&rows, &rows).unwrap());
            tch::get_num_threads()
        };
        for count in [1, 2, 5] {
            let own = std::thread::spawn(move || numbers(count)).join().unwrap();
            assert_eq!(own, count);
        }
    }

    #[test]
    fn fault_no_threads_are_refused() {
        assert!(set(0).unwrap_err().to_string().contains("positive"), "{:?}", set(0));
    }
}
