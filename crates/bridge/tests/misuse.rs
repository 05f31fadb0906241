//! Misuse of every function that safe code can reach: tensors of the wrong shape, dtype or layout,
//! undefined ones, one tensor in two places, two threads at once. Each call must return a result or
//! an error. `make soak` runs this under valgrind's memcheck, which checks that no memory is
//! harmed.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout)] // a test

use std::panic::{AssertUnwindSafe, catch_unwind};

use gpipe_bridge::{
    Error,
    convolution::{Geometry, convolution},
    device, fill, fused,
    images::{self, Pooling, Windows},
    layout::settled,
    linear::{Kernels, linear},
    loss::cross_entropy_sum,
    memory,
    op_cache::OpCache,
    optim::{AdamStep, SgdStep, adam, sgd},
    split::split,
    vjp::{Request, vjp},
};
use tch::{Device, Kind, Tensor};

fn floats(shape: &[i64]) -> Tensor {
    let count: i64 = shape.iter().product();
    (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.37).sin().reshape(shape)
}

/// Tensors of every awkward kind, with names.
fn awkward() -> Vec<(&'static str, Tensor)> {
    let whole = floats(&[4, 6, 8]);
    vec![
        ("undefined", Tensor::new()),
        ("a number", Tensor::from(1.5_f32)),
        ("nothing", floats(&[0])),
        ("no rows", floats(&[0, 4])),
        ("no columns", floats(&[4, 0])),
        ("a vector", floats(&[4])),
        ("a matrix", floats(&[4, 4])),
        ("a matrix that learns", floats(&[4, 4]).set_requires_grad(true)),
        ("images", floats(&[2, 4, 3, 3])),
        ("small images", floats(&[2, 4, 1, 1])),
        ("five dimensions", floats(&[1, 2, 1, 2, 1])),
        ("transposed", floats(&[3, 4]).transpose(0, 1)),
        ("expanded", floats(&[1, 4]).expand([4, 4], false)),
        ("overlapping", floats(&[9]).unfold(0, 4, 1)),
        ("with gaps", whole.select(1, 2).narrow(1, 1, 4)),
        ("offset", floats(&[5, 4]).narrow(0, 1, 4)),
        ("doubles", floats(&[4, 4]).to_kind(Kind::Double)),
        ("halves", floats(&[4, 4]).to_kind(Kind::Half)),
        ("bfloat16", floats(&[4, 4]).to_kind(Kind::BFloat16)),
        ("integers", Tensor::arange(16, (Kind::Int64, Device::Cpu)).reshape([4, 4])),
        ("few integers", Tensor::from_slice(&[0_i64, 1, 2, 3])),
        ("far integers", Tensor::from_slice(&[0_i64, 1 << 40, -7, 3])),
        ("small integers", Tensor::from_slice(&[0_i32, 1, 2, 3])),
        ("bytes", Tensor::from_slice(&[0_u8, 1, 2, 3])),
        ("booleans", floats(&[4, 4]).gt(0.0)),
        ("complex", floats(&[4, 4]).to_kind(Kind::ComplexFloat)),
        ("lazily negative", floats(&[4, 4]).to_kind(Kind::ComplexFloat).conj().imag()),
        ("sparse", floats(&[4, 4]).to_sparse_sparse_dim(2)),
        ("compressed", floats(&[4, 4]).to_sparse_csr(None)),
    ]
}

/// Counts calls by outcome; a call that panics fails the test.
#[derive(Default)]
struct Calls {
    given: usize,
    refused: usize,
}

impl Calls {
    fn call<T>(&mut self, what: &str, call: impl FnOnce() -> Result<T, Error>) -> Option<T> {
        let Ok(result) = catch_unwind(AssertUnwindSafe(call)) else { panic!("{what} panicked") };
        match result {
            Ok(value) => {
                self.given += 1;
                Some(value)
            }
            Err(error) => {
                self.refused += 1;
                assert!(!error.to_string().is_empty(), "{what}");
                None
            }
        }
    }

    /// Both outcomes must occur; otherwise nothing was tested.
    fn check(&self, what: &str) {
        let Self { given, refused } = self;
        println!("soak: {what}: {given} calls gave a result, {refused} an error");
        assert!(*given > 0 && *refused > 0, "{what}: {given} {refused}");
    }
}

fn request_of<'a>(
    y: &'a [&'a Tensor],
    dy: &'a [&'a Tensor],
    x: &'a [&'a Tensor],
    w: &'a [&'a Tensor],
) -> Request<'a> {
    Request { outputs: y, output_grads: dy, inputs: x, parameters: w }
}

#[test]
fn fault_products_and_convolutions() {
    let mut calls = Calls::default();
    let all = awkward();
    let (kernels, none) = ([Kernels::Aten, Kernels::ChannelsLast, Kernels::OneDnn], None);
    for (a, x) in &all {
        for (b, w) in &all {
            for kernels in kernels {
                calls.call(&format!("linear of {a} and {b}"), || linear(x, w, none, kernels));
                calls.call("... with a bias", || linear(w, &floats(&[4, 4]), Some(x), kernels));
                for geometry in [
                    Geometry::default(),
                    Geometry { stride: [0, -1], ..Geometry::default() },
                    Geometry { padding: [-3, i64::MAX / 2], ..Geometry::default() },
                    Geometry { dilation: [0, 5], ..Geometry::default() },
                    Geometry { groups: 0, ..Geometry::default() },
                    Geometry { groups: -2, ..Geometry::default() },
                    Geometry { groups: 2, ..Geometry::default() },
                ] {
                    let what = format!("convolution of {a} and {b}, {geometry:?}");
                    calls.call(&what, || convolution(x, w, &geometry, kernels));
                }
            }
        }
    }
    calls.check("products");
}

#[test]
fn fault_operations_on_images() {
    let mut calls = Calls::default();
    let last = |t: Tensor| t.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2]);
    let mut all = awkward();
    all.push(("channels last", last(floats(&[2, 4, 3, 3]))));
    all.push(("channels last that learn", last(floats(&[2, 4, 3, 3])).set_requires_grad(true)));
    let sizes = [-1, 0, 1, 2, 3, 16, i64::MAX];
    for (a, x) in &all {
        for (b, w) in &all {
            for relu in [false, true] {
                let what = format!("batch norm of {a} with {b}");
                calls.call(&what, || images::batch_norm(x, w, w, 1e-5, relu));
            }
        }
        for (size, stride) in sizes.iter().flat_map(|&a| sizes.map(|b| (a, b))) {
            for padding in [-1, 0, 1, i64::MAX] {
                let windows = Windows { size, stride, padding, ceil: padding == 1 };
                for pooling in [Pooling::Maximum, Pooling::Average] {
                    let what = format!("{pooling:?} of {a} in {windows:?}");
                    calls.call(&what, || images::pool(x, &windows, pooling));
                }
            }
        }
        for from in [-1, 0, 1, 2] {
            let what = format!("every second pixel of {a} from {from} on");
            calls.call(&what, || images::every_second_pixel(x, from));
        }
    }
    calls.check("images");
}

#[test]
fn fault_fused_operations() {
    let mut calls = Calls::default();
    let all = awkward();
    for (a, x) in &all {
        for (b, y) in &all {
            calls.call(&format!("rms norm of {a} with {b}"), || fused::rms_norm(x, y, 1e-5));
            calls.call(&format!("swiglu of {a} and {b}"), || fused::swiglu(x, y));
            calls.call(&format!("rotary of {a} with {b}"), || fused::rotary(x, y, y));
            for window in [None, Some(-1), Some(2)] {
                let what = format!("attention of {a} and {b}, window {window:?}");
                calls.call(&what, || fused::attention(x, y, y, window));
            }
        }
    }
    calls.check("fused operations");
}

#[test]
fn fault_losses_layouts_and_fillings() {
    let mut calls = Calls::default();
    for (a, x) in awkward() {
        calls.call(&format!("settled {a}"), || settled(x.shallow_clone()));
        for (b, y) in awkward() {
            for ignore in [-100, 0, 1 << 40] {
                calls.call(&format!("loss of {a} and {b}"), || {
                    cross_entropy_sum(&x, &y, ignore, 0.1)
                });
            }
        }
    }
    for shape in [&[-1][..], &[3, -2], &[1 << 40, 1 << 40], &[0], &[2, 2], &[]] {
        calls.call("fill", || fill::float32(shape, |all| all.fill(1.0)));
        calls.call("fill", || fill::float64(shape, |all| all.fill(1.0)));
    }
    calls.check("losses");
}

#[test]
fn fault_backwards_whole_and_in_halves() {
    let mut calls = Calls::default();
    let all = awkward();
    for (a, odd) in &all {
        for (place, _) in ["output", "gradient", "input", "parameter", "sum"].iter().enumerate() {
            let x = floats(&[4, 4]).set_requires_grad(true);
            let w = floats(&[4, 4]).set_requires_grad(true);
            let y = x.matmul(&w).tanh();
            let dy = floats(&[4, 4]);
            let or = |at: usize, own: &Tensor| if place == at { odd } else { own }.shallow_clone();
            let (y, dy, x, w) = (or(0, &y), or(1, &dy), or(2, &x), or(3, &w));
            let sum = || vec![(place == 4).then(|| odd.shallow_clone())];
            let (outputs, grads, inputs, weights) = ([&y], [&dy], [&x], [&w]);
            let request = request_of(&outputs, &grads, &inputs, &weights);
            let what = format!("{a} in place {place}");
            let first = calls.call(&what, || split(&request, &mut sum(), &[place % 2 == 0]));
            if let Some(first) = first.flatten() {
                calls.call(&what, || first.later.finish(&mut sum()));
            }
            // The halves leave nothing of the graph to run: this is an error, or needs no graph.
            calls.call(&what, || vjp(&request, &mut sum()));
        }
    }
    // Lists of different lengths.
    let x = floats(&[4]).set_requires_grad(true);
    let y = x.sin();
    for (outputs, grads, sums) in
        [(vec![&y], vec![], 1), (vec![], vec![&y], 1), (vec![&y], vec![&y], 3)]
    {
        let inputs = [&x];
        let request = request_of(&outputs, &grads, &inputs, &inputs);
        let mut sums: Vec<Option<Tensor>> = (0..sums).map(|_| None).collect();
        assert!(calls.call("lists", || vjp(&request, &mut sums)).is_none());
        assert!(calls.call("lists", || split(&request, &mut sums, &[])).is_none());
    }
    calls.check("backwards");
}

/// A gradient whose shape differed from its sum's was broadcast over the sum.
#[test]
fn regression_a_sum_of_another_shape_is_an_error() {
    let x = floats(&[4]).set_requires_grad(true);
    let y = x.sin();
    let dy = floats(&[4]);
    let (outputs, grads, weights) = ([&y], [&dy], [&x]);
    let request = request_of(&outputs, &grads, &[], &weights);
    let error = vjp(&request, &mut [Some(floats(&[3, 4]))]).unwrap_err().to_string();
    assert!(error.contains("[4] is added to a sum [3, 4]"), "{error}");
}

/// ATen checks nothing: it wrote beyond tensors that were too short, and the process crashed.
#[test]
fn regression_optimizers_compare_what_they_are_given() {
    let mut calls = Calls::default();
    let all = awkward();
    let adam_step = AdamStep {
        lr: 0.1,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-8,
        weight_decay: 0.1,
        decoupled: true,
    };
    for (a, odd) in &all {
        for place in 0..5 {
            let tensors: Vec<Tensor> = (0..5)
                .map(|at| match at {
                    _ if at == place => odd.shallow_clone(),
                    4 => Tensor::from(1.0_f32),
                    _ => floats(&[4, 4]).abs(),
                })
                .collect();
            let t = |at: usize| [&tensors[at]];
            for decoupled in [true, false] {
                let step = AdamStep { decoupled, ..adam_step };
                let what = format!("adam with {a} in place {place}");
                calls.call(&what, || adam(&t(0), &t(1), &t(2), &t(3), &t(4), &step));
            }
            for momentum in [0.0, 0.9] {
                let step = SgdStep {
                    lr: 0.1,
                    momentum,
                    nesterov: momentum > 0.0,
                    weight_decay: 0.1,
                    first: place == 3,
                };
                calls.call(&format!("sgd with {a}"), || sgd(&t(0), &t(1), &t(2), &step));
                calls.call(&format!("sgd with {a}"), || sgd(&t(0), &t(1), &[], &step));
            }
        }
    }
    let (p, short) = (floats(&[64, 64]), floats(&[64]));
    let step = Tensor::from(1.0_f32);
    let error = adam(&[&p], &[&p], &[&short], &[&p], &[&step], &adam_step).unwrap_err().to_string();
    assert!(
        error.contains(
            "the exp_avg of parameter 0 is Float [64] on cpu, the parameter Float [64, 64]"
        ),
        "{error}"
    );
    let error = adam(&[&p], &[], &[&p], &[&p], &[&step], &adam_step).unwrap_err().to_string();
    assert!(error.contains("1 parameters and 0 of gradient"), "{error}");
    calls.check("optimizers");
}

#[test]
fn fault_memory_streams_and_memos() {
    let mut calls = Calls::default();
    for arena in [0, 1, memory::ARENAS - 1, memory::ARENAS, u32::MAX] {
        calls.call("stats", || memory::stats(arena));
        calls.call("reset", || memory::reset_peak(arena));
        if arena >= memory::ARENAS {
            calls.call("enter", || memory::enter(arena));
            calls.call("cap", || memory::set_cap(arena, Some(0)));
            calls.call("trim", || memory::trim(arena));
        }
    }
    for number in [device::count(), device::count() + 7, usize::MAX] {
        calls.call("stream", || device::Stream::new(number));
        calls.call("stats", || device::stats(number));
        calls.call("peak", || device::reset_peak(number));
    }
    let x = floats(&[4, 4]);
    let once = || linear(&x, &x, None, Kernels::Aten);
    let (_, memo) = OpCache::record(once).unwrap();
    calls.call("nested", || {
        OpCache::record(|| OpCache::record(once).map(drop)).and_then(|own| own.0)
    });
    calls.call("replayed", || memo.replay(|| once().and_then(|_| once())));
    calls.check("memory");
}

/// The same tensors from two threads at once: in calls that only read them, and in one graph.
#[test]
fn fault_two_threads_at_once() {
    for _ in 0..50 {
        let x = floats(&[16, 16]).set_requires_grad(true);
        let w = floats(&[16, 16]).set_requires_grad(true);
        let y = linear(&x, &w, None, Kernels::Aten).unwrap().tanh();
        let run = |x: Tensor, w: Tensor, y: Tensor| {
            let dy = floats(&[16, 16]);
            let (outputs, grads, inputs, weights) = ([&y], [&dy], [&x], [&w]);
            let request = request_of(&outputs, &grads, &inputs, &weights);
            let found = vjp(&request, &mut [None]);
            drop((settled(y.detach()).unwrap(), linear(&x, &w, None, Kernels::OneDnn).unwrap()));
            found.is_ok()
        };
        let clones = || (x.shallow_clone(), w.shallow_clone(), y.shallow_clone());
        let ends = std::thread::scope(|scope| {
            let threads = [clones(), clones()].map(|(x, w, y)| scope.spawn(move || run(x, w, y)));
            threads.map(|thread| thread.join().unwrap())
        });
        assert!(ends[0] || ends[1], "one of them has the graph");
    }
}
