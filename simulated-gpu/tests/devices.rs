//! What a simulated GPU computes, holds and refuses.
#![allow(clippy::unwrap_used)]

mod common;

use common::passes;
use gpipe_bridge::device;
use tch::{Device, Kind, Tensor};

const GPU: Device = Device::Cuda(0);

fn data(shape: &[i64], device: Device) -> Tensor {
    let count = shape.iter().product::<i64>();
    (Tensor::arange(count, (Kind::Float, Device::Cpu)) * 0.37).sin().reshape(shape).to(device)
}

/// Results and gradients of operators of many kinds: of one output, of several, in place, on views,
/// with integers, with a choice of kernel.
fn computed(device: Device) -> Vec<(&'static str, Tensor)> {
    let mut found = Vec::new();
    let mut keep = |name, tensors: &[Tensor]| {
        found.extend(tensors.iter().map(|tensor| (name, tensor.detach().to(Device::Cpu))));
    };
    let leaf = |shape: &[i64]| data(shape, device).set_requires_grad(true);

    let (x, w, b) = (leaf(&[5, 6]), leaf(&[8, 6]), leaf(&[8]));
    let targets = Tensor::from_slice(&[0_i64, 1, 2, 3, 7]).to(device);
    let loss = x.linear(&w, Some(&b)).gelu("none").cross_entropy_for_logits(&targets);
    keep("linear", &Tensor::run_backward(&[&loss], &[&x, &w, &b], false, false));
    keep("loss", &[loss]);

    let (image, kernel) = (leaf(&[2, 4, 9, 9]), leaf(&[4, 1, 3, 3]));
    let convolved = image.conv2d(&kernel, None::<Tensor>, [1, 1], [1, 1], [1, 1], 4);
    let none = || None::<Tensor>;
    let normed = convolved.batch_norm(none(), none(), none(), none(), true, 0.1, 1e-5, true);
    let pooled = normed.max_pool2d([2, 2], [2, 2], [0, 0], [1, 1], false);
    let sum = pooled.square().sum(Kind::Float);
    keep("convolution", &Tensor::run_backward(&[&sum], &[&image, &kernel], false, false));

    let q = leaf(&[2, 2, 5, 4]);
    let attended = Tensor::scaled_dot_product_attention(&q, &q, &q, none(), 0.0, true, None, false);
    keep("attention", &Tensor::run_backward(&[&attended.sum(Kind::Float)], &[&q], false, false));

    let table = leaf(&[10, 4]);
    let rows = Tensor::embedding(&table, &targets, -1, false, false);
    let normed = rows.layer_norm([4], none(), none(), 1e-5, true).pow_tensor_scalar(3);
    keep("rows", &Tensor::run_backward(&[&normed.sum(Kind::Float)], &[&table], false, false));

    let (top, at) = image.detach().topk(3, -1, true, true);
    keep("several outputs", &[top, at]);
    let y = data(&[4, 4], device);
    let _row = y.narrow(0, 1, 2).fill_(7.0);
    keep("a view in place", &[y.transpose(0, 1).contiguous(), Tensor::cat(&[&y, &y], 1)]);
    let picked = y.index_select(1, &Tensor::from_slice(&[1_i64, 2]).to(device));
    keep("indices", &[picked, y.nonzero(), y.ge(1.0).to_kind(Kind::Int64)]);
    let half = y.to_kind(Kind::BFloat16);
    keep("bfloat16", &[half.matmul(&half.tr()).to_kind(Kind::Float)]);
    found
}

#[test]
fn oracle_a_simulated_gpu_computes_what_the_cpu_does() {
    passes("computes_as_the_cpu");
}

#[test]
#[ignore = "runs in a process of its own"]
fn computes_as_the_cpu() {
    let expected = computed(Device::Cpu);
    for gpu in 0..2 {
        let found = computed(Device::Cuda(gpu));
        assert_eq!(found.len(), expected.len());
        for ((name, found), (_, expected)) in found.iter().zip(&expected) {
            // Attention on a CPU is one kernel, on a GPU the formula: sums in another order.
            let tolerance = if *name == "attention" { 1e-6 } else { 0.0 };
            let difference = (found - expected).abs().max().double_value(&[]);
            assert!(difference <= tolerance, "{name} on cuda:{gpu}: {difference}");
        }
    }
}

#[test]
fn oracle_memory_is_counted_and_capped() {
    passes("counts_memory");
}

#[test]
#[ignore = "runs in a process of its own"]
fn counts_memory() {
    let before = device::stats(1).unwrap();
    assert_eq!((before.live, before.peak), (0, 0));
    let x = Tensor::zeros([1000], (Kind::Double, Device::Cuda(1)));
    assert_eq!(device::stats(1).unwrap().live, 8000);
    let y = &x + 1.0;
    drop(x);
    let after = device::stats(1).unwrap();
    assert_eq!((after.live, after.peak), (8000, 16000));
    device::reset_peak(1).unwrap();
    assert_eq!(device::stats(1).unwrap().peak, 8000);
    assert_eq!(y.double_value(&[999]), 1.0);
    assert_eq!(device::stats(0).unwrap().live, 0, "it belongs to the other GPU");
    let error = Tensor::f_zeros([1 << 28], (Kind::Double, GPU)).unwrap_err().to_string();
    for word in ["CUDA out of memory (simulated)", "2147483648 bytes", "1073741824 bytes"] {
        assert!(error.contains(word), "{error}");
    }
}

#[test]
fn oracle_what_a_program_asks_for_is_counted() {
    passes("counts_what_is_asked_for");
}

#[test]
#[ignore = "runs in a process of its own"]
fn counts_what_is_asked_for() {
    let counted = |work: &dyn Fn() -> Tensor| {
        let before = device::simulated_counts();
        let tensor = work();
        let after = device::simulated_counts();
        let counts = [
            after.launches - before.launches,
            after.allocations - before.allocations,
            after.copies_in - before.copies_in,
            after.copies_out - before.copies_out,
            after.copies_across - before.copies_across,
            after.host_waits - before.host_waits,
        ];
        (counts, tensor)
    };
    let host = data(&[4], Device::Cpu);
    // Copies from and to memory that is not pinned wait.
    let (counts, x) = counted(&|| host.to(GPU));
    assert_eq!(counts, [1, 1, 1, 0, 0, 1]);
    let (counts, _) = counted(&|| &x + &x);
    assert_eq!(counts, [1, 1, 0, 0, 0, 0]);
    let (counts, _) = counted(&|| x.to(Device::Cuda(1)));
    assert_eq!(counts, [1, 1, 0, 0, 1, 0]);
    let (counts, back) = counted(&|| x.to(Device::Cpu));
    assert_eq!(counts, [1, 0, 0, 1, 0, 1]);
    assert_eq!(back, host);
}

#[test]
fn fault_what_cuda_refuses_is_refused() {
    passes("refuses_what_cuda_refuses");
}

#[test]
#[ignore = "runs in a process of its own"]
fn refuses_what_cuda_refuses() {
    let on = |device| Tensor::zeros([2], (Kind::Float, device));
    for (a, b) in [(Device::Cpu, GPU), (GPU, Device::Cpu), (GPU, Device::Cuda(1))] {
        let error = on(a).f_add(&on(b)).unwrap_err().to_string();
        assert!(error.contains("at least two devices"), "{a:?} and {b:?}: {error}");
    }
    let error = Tensor::f_cat(&[on(GPU), on(Device::Cpu)], 0).unwrap_err().to_string();
    assert!(error.contains("at least two devices"), "{error}");
    // A number may be on the CPU.
    let one = Tensor::from(1.0_f32);
    assert_eq!(on(GPU).f_add(&one).unwrap().double_value(&[1]), 1.0);

    let error = on(GPU).f_to_mkldnn(None).unwrap_err().to_string();
    assert!(error.contains("CUDA has no such kernel"), "{error}");
    let error = Tensor::f_zeros([1], (Kind::Float, Device::Cuda(2))).unwrap_err().to_string();
    assert!(error.contains("invalid device ordinal"), "{error}");
}
