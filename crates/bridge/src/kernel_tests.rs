//! What all kernels of this crate have in common: they give the same bits on any number of threads,
//! and read gradients with their sign.

use tch::{Device, Kind, Tensor};

use crate::{
    Result,
    convolution::{Geometry, convolution},
    fused,
    images::{Pooling, Windows, batch_norm, pool},
    linear::{Kernels, linear},
    loss::cross_entropy_sum,
    testing::{leaf, values},
    threads,
    vjp::{Request, vjp},
};

type Kernel = fn(&[Tensor]) -> Result<Tensor>;

/// A name, the shapes of the arguments, and the kernel.
type Case = (&'static str, &'static [&'static [i64]], Kernel);

/// The output and the gradients of `kernel` on `count` threads. The gradient of the output is
/// `grad` of the output.
fn computed(
    count: i32,
    shapes: &'static [&'static [i64]],
    kernel: Kernel,
    grad: fn(&Tensor) -> Tensor,
) -> Vec<Tensor> {
    let work = move || {
        threads::set(count).unwrap();
        let leaves: Vec<Tensor> = shapes.iter().map(|shape| leaf(shape, 0)).collect();
        let y = kernel(&leaves).unwrap();
        let grad = grad(&y.detach());
        let inputs: Vec<&Tensor> = leaves.iter().collect();
        let request =
            Request { outputs: &[&y], output_grads: &[&grad], inputs: &inputs, parameters: &[] };
        let grads = vjp(&request, &mut []).unwrap();
        [y.detach()].into_iter().chain(grads.into_iter().map(Option::unwrap)).collect()
    };
    std::thread::spawn(work).join().unwrap()
}

/// `x` in channels-last layout.
fn images(x: &Tensor) -> Tensor {
    x.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])
}

const CASES: [Case; 14] = [
    ("swiglu", &[&[300, 700], &[300, 700]], |x| fused::swiglu(&x[0], &x[1])),
    ("attention", &[&[4, 8, 96, 32], &[4, 8, 96, 32], &[4, 8, 96, 32]], |x| {
        fused::attention(&x[0], &x[1], &x[2], None)
    }),
    ("shared heads", &[&[4, 8, 96, 32], &[4, 2, 96, 32], &[4, 2, 96, 32]], |x| {
        fused::attention(&x[0], &x[1], &x[2], Some(96))
    }),
    ("one shared head", &[&[1, 8, 96, 32], &[1, 1, 96, 32], &[1, 1, 96, 32]], |x| {
        fused::attention(&x[0], &x[1], &x[2], Some(96))
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
    ("bfloat16 batch norm", &[&[8, 80, 24, 24], &[80], &[80]], |x| {
        let own = images(&x[0]).to_kind(Kind::BFloat16);
        let normed = batch_norm(&own, &x[1], &x[2], 1e-5, true)?;
        Ok(normed.y.to_kind(Kind::Float))
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
    (ONEDNN, &[&[300, 256], &[160, 256], &[160]], |x| {
        linear(&x[0], &x[1], Some(&x[2]), Kernels::OneDnn)
    }),
    (ONEDNN, &[&[300, 64], &[320, 64], &[320]], |x| {
        linear(&x[0], &x[1], Some(&x[2]), Kernels::OneDnn)
    }),
    NORM,
];

const ONEDNN: &str = "product of oneDNN";

const NORM: Case =
    ("norm of rows", &[&[900, 200], &[200]], |x| fused::rms_norm(&x[0], &x[1], 1e-5));

#[test]
fn property_the_number_of_threads_changes_no_bit_of_our_kernels() {
    // oneDNN divides its products as it likes.
    let ours = |(name, ..): &Case| *name != NORM.0 && *name != ONEDNN;
    for (name, shapes, kernel) in CASES.into_iter().filter(ours) {
        let alone = computed(1, shapes, kernel, Tensor::cos);
        for count in [2, 3, 7] {
            let found = computed(count, shapes, kernel, Tensor::cos);
            assert_eq!(found, alone, "{name}, {count} threads");
        }
    }
}

/// Each thread adds the rows that it has, so the weight's gradient differs by rounding.
#[test]
fn oracle_the_norms_of_rows_agree_for_any_number_of_threads() {
    let (_, shapes, kernel) = NORM;
    let alone = computed(1, shapes, kernel, Tensor::cos);
    for count in [2, 3, 7] {
        let found = computed(count, shapes, kernel, Tensor::cos);
        assert_eq!(found[..2], alone[..2], "{count} threads");
        // Partial sums of 900 products below 1.5, and 900 rounding errors of 6e-8, of which the
        // root of their number remains.
        let difference = (&found[2] - &alone[2]).abs().max().double_value(&[]);
        assert!(difference < 900.0 * 1.5 * 6e-8 * 30.0, "{count} threads: {difference:e}");
    }
}

/// The gradients of a weight `[130, 64]` and its bias in `kind`, each the sum over `micro_batches`
/// of `rows` rows. `turned`: the weight is a view of a transposed one.
fn sums(threads: i32, kind: Kind, rows: i64, turned: bool, micro_batches: &[i32]) -> Vec<Tensor> {
    let work = || {
        crate::threads::set(threads).unwrap();
        let given = |shape: &[i64], seed| values(shape, seed).to_kind(kind).set_requires_grad(true);
        let weight = given(if turned { &[64, 130] } else { &[130, 64] }, 0.2);
        let bias = given(&[130], 0.3);
        let mut sums = vec![None, None];
        for &number in micro_batches {
            let x = given(&[rows, 64], 0.4 + f64::from(number));
            let own = if turned { weight.tr() } else { weight.shallow_clone() };
            let y = linear(&x, &own, Some(&bias), Kernels::ChannelsLast).unwrap();
            let dy = gradient(rows, number).to_kind(kind);
            let (outputs, output_grads) = (&[&y], &[&dy]);
            let parameters = &[&weight, &bias];
            vjp(&Request { outputs, output_grads, inputs: &[], parameters }, &mut sums).unwrap();
        }
        sums.into_iter().map(Option::unwrap).collect()
    };
    std::thread::scope(|scope| scope.spawn(work).join().unwrap())
}

/// The gradient of the outputs in [`sums`].
fn gradient(rows: i64, micro_batch: i32) -> Tensor {
    values(&[rows, 130], 0.7 + f64::from(micro_batch))
}

#[test]
fn oracle_the_gradient_of_a_bias_is_the_sum_of_rows() {
    for (kind, rows) in [(Kind::Float, 1), (Kind::Float, 700), (Kind::BFloat16, 700)] {
        let found = sums(1, kind, rows, false, &[0]).remove(1);
        let exact = gradient(rows, 0).to_kind(kind).to_kind(Kind::Double);
        let exact = exact.sum_dim_intlist(0_i64, false, Kind::Double);
        let off = (&found - &exact).abs().max().double_value(&[]);
        // 700 numbers below 1 have as many errors of 6e-8 of a sum below 100, of which the root of
        // their number remains. In bfloat16 the sum is rounded to 8 bits.
        let largest = exact.abs().max().double_value(&[]).max(1.0);
        let limit = 6e-8 * 100.0 * 27.0 + if kind == Kind::Float { 0.0 } else { largest / 256.0 };
        assert!(off <= limit, "{kind:?}, {rows} rows: off by {off}");
        for threads in [2, 3, 7] {
            let again = sums(threads, kind, rows, false, &[0]).remove(1);
            assert_eq!(again, found, "{kind:?}, {rows} rows, {threads} threads");
        }
    }
}

/// A gradient may have another layout where it came from another stage. A bias's was then summed by
/// another kernel, in another order.
#[test]
fn regression_the_layout_of_a_gradient_decides_about_no_bit_of_a_bias() {
    for kind in [Kind::Float, Kind::BFloat16] {
        let given = |shape: &[i64], seed| values(shape, seed).to_kind(kind).set_requires_grad(true);
        let (x, w, b) = (given(&[700, 64], 0.4), given(&[130, 64], 0.2), given(&[130], 0.3));
        let dense = gradient(700, 0).to_kind(kind);
        let turned = dense.tr().contiguous().tr();
        assert!(!turned.is_contiguous() && turned == dense);
        for kernels in [Kernels::ChannelsLast, Kernels::OneDnn] {
            let [a, b] = [&dense, &turned].map(|dy| {
                let y = linear(&x, &w, Some(&b), kernels).unwrap();
                let (outputs, output_grads) = (&[&y], &[dy]);
                let request = Request { outputs, output_grads, inputs: &[&b], parameters: &[] };
                vjp(&request, &mut []).unwrap().remove(0).unwrap()
            });
            assert_eq!(a, b, "{kind:?} {kernels:?}");
        }
    }
}

/// A gradient in bfloat16 is added to its sum in one pass over memory, where it lies as the sum
/// does. That of a transposed weight does not.
#[test]
fn oracle_bfloat16_gradients_are_summed_in_float32() {
    for turned in [false, true] {
        let of = |micro_batches: &[i32]| sums(1, Kind::BFloat16, 300, turned, micro_batches);
        let found = of(&[0, 1, 2]);
        let parts = [of(&[0]), of(&[1]), of(&[2])];
        for (parameter, found) in found.iter().enumerate() {
            assert_eq!(found.kind(), Kind::Float);
            let [a, b, c] = parts.each_ref().map(|part| &part[parameter]);
            assert_eq!(*found, a + b + c, "parameter {parameter}, turned {turned}");
        }
    }
}

/// `x` with the other sign in memory.
fn negated(x: &Tensor) -> Tensor {
    let negative = Tensor::complex(x, &x.neg()).conj().imag();
    assert!(negative.is_neg());
    negative
}

#[test]
fn regression_products_and_convolutions_of_lazily_negated_tensors_have_their_sign() {
    let cases = CASES.into_iter().filter(|(name, ..)| name.starts_with("few"));
    for (name, shapes, kernel) in cases {
        let plain: Vec<Tensor> = shapes.iter().map(|shape| leaf(shape, 0).detach()).collect();
        for at in 0..plain.len() {
            let mut given: Vec<Tensor> = plain.iter().map(Tensor::shallow_clone).collect();
            given[at] = negated(&given[at]);
            let (found, exact) = (kernel(&given).unwrap(), kernel(&plain).unwrap());
            // Another kernel may compute it. Sums of at most 576 products of numbers below 1.
            let difference = (found - exact).abs().max().double_value(&[]);
            assert!(difference < 576.0 * 6e-8 * 24.0, "{name}, argument {at}: {difference:e}");
        }
    }
}

/// The conjugate of a complex number gives gradients whose memory has the other sign. Kernels read
/// the memory.
#[test]
fn regression_a_lazily_negated_gradient_has_its_sign() {
    for (name, shapes, kernel) in CASES {
        let lazily = |y: &Tensor| negated(&y.cos());
        assert_eq!(
            computed(1, shapes, kernel, lazily),
            computed(1, shapes, kernel, Tensor::cos),
            "{name}"
        );
    }
}
