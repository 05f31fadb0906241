//! How many threads share an operation. OpenMP gives each thread that calls operations a team of
//! its own.

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

#[cfg(test)]
mod tests {
    use tch::{Device, Kind, Tensor};

    use super::*;
    use crate::{
        convolution::{Geometry, convolution},
        fused,
        images::{Pooling, Windows, batch_norm, pool},
        linear::{Kernels, linear},
        loss::cross_entropy_sum,
        vjp::{Request, vjp},
    };

    /// A leaf whose values in (-1, 1) depend only on their positions.
    fn leaf(shape: &[i64]) -> Tensor {
        let position = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
        let values = (position * 12.9898).sin().reshape(shape).to_kind(Kind::Float);
        values.set_requires_grad(true)
    }

    /// The output and the gradients of `kernel`, computed by `count` threads.
    fn computed(
        count: i32,
        shapes: &[&[i64]],
        kernel: fn(&[Tensor]) -> Result<Tensor>,
    ) -> Vec<Tensor> {
        let shapes: Vec<Vec<i64>> = shapes.iter().map(|shape| shape.to_vec()).collect();
        let work = move || {
            set(count).unwrap();
            let leaves: Vec<Tensor> = shapes.iter().map(|shape| leaf(shape)).collect();
            let y = kernel(&leaves).unwrap();
            let grad = y.detach().cos();
            let inputs: Vec<&Tensor> = leaves.iter().collect();
            let request = Request {
                outputs: &[&y],
                output_grads: &[&grad],
                inputs: &inputs,
                parameters: &[],
            };
            let grads = vjp(&request, &mut []).unwrap();
            [y.detach()].into_iter().chain(grads.into_iter().map(Option::unwrap)).collect()
        };
        std::thread::spawn(work).join().unwrap()
    }

    /// `x` in channels-last layout.
    fn images(x: &Tensor) -> Tensor {
        x.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])
    }

    #[test]
    fn property_the_number_of_threads_changes_no_bit_of_our_kernels() {
        type Case = (&'static str, &'static [&'static [i64]], fn(&[Tensor]) -> Result<Tensor>);
        let cases: [Case; 8] = [
            ("swiglu", &[&[300, 700], &[300, 700]], |x| fused::swiglu(&x[0], &x[1])),
            ("attention", &[&[4, 8, 96, 32], &[4, 8, 96, 32], &[4, 8, 96, 32]], |x| {
                fused::attention(&x[0], &x[1], &x[2], None)
            }),
            ("few rows", &[&[48, 512], &[272, 512], &[272]], |x| {
                linear(&x[0], &x[1], Some(&x[2]), Kernels::OneDnn)
            }),
            ("few positions", &[&[4, 64, 4, 4], &[144, 64, 3, 3]], |x| {
                let geometry = Geometry { padding: [1, 1], ..Geometry::default() };
                convolution(&x[0], &x[1], &geometry, Kernels::OneDnn)
            }),
            ("batch norm", &[&[8, 80, 24, 24], &[80], &[80]], |x| {
                batch_norm(&images(&x[0]), &x[1], &x[2], 1e-5, true).map(|normed| normed.y)
            }),
            ("maximum", &[&[8, 80, 25, 25]], |x| {
                let windows = Windows { size: 3, stride: 2, padding: 1, ceil: true };
                pool(&images(&x[0]), &windows, Pooling::Maximum)
            }),
            ("average", &[&[8, 80, 25, 25]], |x| {
                let windows = Windows { size: 3, stride: 1, padding: 1, ceil: false };
                pool(&images(&x[0]), &windows, Pooling::Average)
            }),
            ("cross entropy", &[&[500, 300]], |x| {
                let target = Tensor::arange(500, (Kind::Int64, Device::Cpu)).remainder(300);
                cross_entropy_sum(&x[0], &target, -100, 0.1)
            }),
        ];
        for (name, shapes, kernel) in cases {
            let alone = computed(1, shapes, kernel);
            for count in [2, 3, 7] {
                assert_eq!(computed(count, shapes, kernel), alone, "{name}, {count} threads");
            }
        }
    }

    /// Each thread adds the rows that it has, so the weight's gradient differs by rounding.
    #[test]
    fn oracle_the_norms_of_rows_agree_for_any_number_of_threads() {
        let norm = |x: &[Tensor]| fused::rms_norm(&x[0], &x[1], 1e-5);
        let shapes: [&[i64]; 2] = [&[900, 200], &[200]];
        let alone = computed(1, &shapes, norm);
        for count in [2, 3, 7] {
            let found = computed(count, &shapes, norm);
            assert_eq!(found[..2], alone[..2], "{count} threads");
            // Partial sums of 900 products below 1.5, and 900 rounding errors of 6e-8, of which the
            // root of their number remains.
            let difference = (&found[2] - &alone[2]).abs().max().double_value(&[]);
            assert!(difference < 900.0 * 1.5 * 6e-8 * 30.0, "{count} threads: {difference:e}");
        }
    }

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
