//! Family `gpu_`: tests that need a GPU. Without one, every test here is skipped and notes that in
//! the file that GPIPE_SKIP_LOG names. Equality to the bit holds for deterministic kernels, and
//! these tests use no others.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

mod common;

use common::{Features, Recipe, Run, assert_close, assert_same_bits, batch, log_skipped, model};
use gpipe::{
    Bytes, Device, Forward, Infer, Layer, LayerError, MeanSquaredError, Pipeline, Remat, Schedule,
    Sequence, Sgd, TensorSpec, TopK, layers::Linear,
};
use tch::{Kind, Tensor};

/// Whether `test` must be skipped; if so, writes that to the log.
fn skipped(test: &str) -> bool {
    if Device::gpus() > 0 {
        return false;
    }
    log_skipped(&format!("{test}: there is no GPU"));
    true
}

const GPU: Device = Device::Cuda(0);

/// The gradients of 3 steps, and the parameters after them.
fn train(run: &Run, devices: Vec<Device>, features: Features) -> common::Named {
    let builder = features.build(run.builder(model(features), 3)).devices(devices);
    let mut pipeline = builder.build().unwrap();
    let mut all = Vec::new();
    for step in 0..3 {
        let (inputs, targets) = batch(7, step);
        pipeline.train_step(&inputs, &targets).unwrap();
        let gradients = pipeline.gradients().unwrap().into_iter();
        all.extend(gradients.map(|(name, gradient)| (format!("{step} {name}"), gradient)));
    }
    all.extend(pipeline.parameters().unwrap());
    all
}

/// The shared matrix, over one to four GPUs, of which stages share some.
#[test]
fn gpu_stages_on_one_to_four_gpus_are_transparent() {
    if skipped("gpu_stages_on_one_to_four_gpus_are_transparent") {
        return;
    }
    let features =
        |kind| Features { tied: true, skip: true, dropout: 0.2, kind, ..Features::plain() };
    for features in [
        Features { batch_norm: true, ..features(Kind::Float) },
        Features { recipe: Recipe::Everything, ..features(Kind::BFloat16) },
        features(Kind::Half),
    ] {
        let expected = train(&Run::plain(), vec![GPU], features);
        for (number, run) in Run::all(model(features).len()).into_iter().enumerate() {
            let gpus = 1 + number % Device::gpus().min(4);
            let devices = (0..run.stages).map(|stage| Device::Cuda(stage % gpus)).collect();
            let found = train(&run, devices, features);
            assert_same_bits(&found, &expected, &format!("{run:?} {gpus} {:?}", features.kind));
        }
    }
}

/// Whatever crossed between two GPUs is freed with the pipeline.
#[test]
fn gpu_memory_that_was_freed_is_all_back_after_a_pipeline() {
    if skipped("gpu_memory_that_was_freed_is_all_back_after_a_pipeline") {
        return;
    }
    if !Device::gpus_are_simulated() {
        // CUDA's libraries keep a workspace for each stream.
        log_skipped(
            "gpu_memory_that_was_freed_is_all_back_after_a_pipeline: only simulated GPUs count",
        );
        return;
    }
    let features = Features { skip: true, batch_norm: true, ..Features::plain() };
    let last = Device::Cuda(Device::gpus() - 1);
    let held = || [GPU, last].map(|gpu| gpipe_bridge::device::stats(gpu_number(gpu)).unwrap().live);
    let before = held();
    let run = Run { stages: 4, remat: Remat::Never, ..Run::plain() };
    let _ = train(&run, vec![GPU, last, GPU, last], features);
    assert_eq!(held(), before);
}

fn gpu_number(device: Device) -> usize {
    match device {
        Device::Cuda(number) => number,
        Device::Cpu => 0,
    }
}

#[test]
fn gpu_mixed_with_cpu_stages_agrees_with_the_cpu() {
    if skipped("gpu_mixed_with_cpu_stages_agrees_with_the_cpu") {
        return;
    }
    // In float64 only the order of sums differs between kernels. Dropout draws the same masks.
    let kind = Kind::Double;
    let features = Features { skip: true, dropout: 0.2, kind, ..Features::plain() };
    let expected = train(&Run::plain(), vec![Device::Cpu], features);
    let cpu = Device::Cpu;
    for devices in
        [vec![GPU], vec![GPU, cpu], vec![cpu, GPU], vec![GPU, cpu, GPU], vec![cpu, GPU, cpu]]
    {
        let run = Run { stages: devices.len(), remat: Remat::Always, ..Run::plain() };
        let found = train(&run, devices.clone(), features);
        assert_close(&found, &expected, 1e-9, &format!("{devices:?}"));
    }
}

#[test]
fn gpu_memory_is_reported_and_a_cap_is_an_error_that_names_the_stage() {
    if skipped("gpu_memory_is_reported_and_a_cap_is_an_error_that_names_the_stage") {
        return;
    }
    let build = |cap: Option<Bytes>| {
        let builder = Run::plain().builder(model(Features::plain()), 2).devices([GPU]);
        match cap {
            Some(cap) => builder.memory_cap([cap]).build(),
            None => builder.build(),
        }
    };
    let (inputs, targets) = batch(8, 1);
    let report = build(None).unwrap().train_step(&inputs, &targets).unwrap();
    assert!(report.devices[0].peak > report.devices[0].live && report.devices[0].live.0 > 0);
    let Err(error) = build(Some(Bytes(1024))) else { panic!("its parameters exceed the cap") };
    let error = error.to_string();
    for part in ["device 0", "layer 'embedding'", "out of memory for its parameters", "asked for"] {
        assert!(error.contains(part), "no '{part}' in: {error}");
    }
    // In a step it names the layer, and what that asked for.
    let held = report.devices[0].live;
    let mut pipeline = build(Some(Bytes(held.0 + 1024))).unwrap();
    let error = pipeline.train_step(&inputs, &targets).unwrap_err();
    assert!(error.is_out_of_memory() && error.layer().is_some(), "{error}");
    assert!(!error.to_string().contains("0 B asked for"), "{error}");
}

/// The thread of a stage waits for its GPU at the ends of a step and where a number decides how the
/// step goes on. None of that depends on the number of micro-batches or layers.
#[test]
fn gpu_waits_of_a_step_do_not_depend_on_its_micro_batches() {
    if skipped("gpu_waits_of_a_step_do_not_depend_on_its_micro_batches") {
        return;
    }
    if !Device::gpus_are_simulated() {
        log_skipped(
            "gpu_waits_of_a_step_do_not_depend_on_its_micro_batches: only simulated GPUs count",
        );
        return;
    }
    let last = Device::Cuda(Device::gpus() - 1);
    let plain = Features::plain();
    for features in [
        Features { skip: true, dropout: 0.2, tied: true, ..plain },
        Features { batch_norm: true, ..plain },
    ] {
        for remat in [Remat::Never, Remat::Always] {
            let run = Run { stages: 2, remat, ..Run::plain() };
            let waits = |micro_batches| {
                let builder = run.builder(model(features), micro_batches);
                let mut pipeline = features.build(builder).devices([GPU, last]).build().unwrap();
                let (inputs, targets) = batch(7, 1);
                pipeline.train_step(&inputs, &targets).unwrap();
                let before = gpipe_bridge::device::simulated_counts().host_waits;
                pipeline.train_step(&inputs, &targets).unwrap();
                gpipe_bridge::device::simulated_counts().host_waits - before
            };
            // The beginning, the norm, what is read at the end, and the end, of each GPU. One batch
            // norm here counts its mini-batches, to weigh them equally.
            let most = 2 * 4 + u64::from(features.batch_norm);
            assert!(waits(2) <= most, "{remat}: {} waits", waits(2));
            assert_eq!(waits(7), waits(2), "{remat}");
        }
    }
}

/// Times come from the GPU's events. They are those of a timeline: one action after the other, and
/// no message before it was sent.
#[test]
fn gpu_times_of_a_step_are_a_timeline() {
    if skipped("gpu_times_of_a_step_are_a_timeline") {
        return;
    }
    let last = Device::Cuda(Device::gpus() - 1);
    let run = Run { stages: 3, ..Run::plain() };
    let devices = [GPU, last, Device::Cpu];
    let mut pipeline = run.builder(model(Features::plain()), 4).devices(devices).build().unwrap();
    let (inputs, targets) = batch(8, 1);
    for _ in 0..3 {
        let start = std::time::Instant::now();
        let report = pipeline.train_step(&inputs, &targets).unwrap();
        assert!(u128::from(report.timeline.makespan.0) <= start.elapsed().as_nanos());
        for actions in &report.timeline.devices {
            assert!(actions.iter().all(|timed| timed.start <= timed.end));
            assert!(actions.windows(2).all(|pair| pair[0].end <= pair[1].start));
            let computes = actions.iter().filter(|timed| timed.action.op.computes().is_some());
            assert!(computes.clone().count() >= 8);
            assert!(computes.clone().all(|timed| timed.end > timed.start));
        }
    }
}

/// What a layer finds wrong with a value on a GPU is known after the step's work. It fails the step
/// before anything is updated, and names the micro-batch.
#[test]
fn gpu_values_out_of_range_fail_the_step_and_change_nothing() {
    if skipped("gpu_values_out_of_range_fail_the_step_and_change_nothing") {
        return;
    }
    let last = Device::Cuda(Device::gpus() - 1);
    let run = Run { stages: 2, ..Run::plain() };
    let builder = run.builder(model(Features::plain()), 4).metric(TopK::new(2));
    let mut pipeline = builder.devices([GPU, last]).build().unwrap();
    let (inputs, targets) = batch(8, 1);
    pipeline.train_step(&inputs, &targets).unwrap();
    let before = common::flat(&mut pipeline);
    for (what, micro_batch) in [("token", 2), ("target", 3)] {
        let wrong = |good: &tch::Tensor, is_it: bool| {
            let wrong = good.copy();
            if is_it {
                let _ = wrong.narrow(0, 2 * micro_batch, 1).fill_(999);
            }
            wrong
        };
        let (x, y) = (wrong(&inputs, what == "token"), wrong(&targets, what == "target"));
        for error in
            [pipeline.train_step(&x, &y).unwrap_err(), pipeline.evaluate(&x, &y).unwrap_err()]
        {
            let error = error.to_string();
            for part in [what, "999", &format!("micro-batch {micro_batch}")] {
                assert!(error.contains(part), "no '{part}' in: {error}");
            }
        }
        assert_same_bits(&common::flat(&mut pipeline), &before, what);
    }
    pipeline.train_step(&inputs, &targets).unwrap();
}

/// Offload copies every block of saved activations to the host once, and back once. It copies the
/// same bytes for each micro-batch, and none for a micro-batch whose backward follows at once.
#[test]
fn gpu_offload_copies_out_and_back_what_a_micro_batch_saved() {
    let name = "gpu_offload_copies_out_and_back_what_a_micro_batch_saved";
    if skipped(name) {
        return;
    }
    if !Device::gpus_are_simulated() {
        log_skipped(&format!("{name}: only simulated GPUs count"));
        return;
    }
    let last = Device::Cuda(Device::gpus() - 1);
    let copies = |remat, schedule: &Schedule, micro_batches: usize| {
        let run = Run { stages: 2, remat, schedule: schedule.clone(), ..Run::plain() };
        let builder = run.builder(model(Features::plain()), micro_batches);
        let mut pipeline = builder.devices([GPU, last]).build().unwrap();
        let (inputs, targets) = batch(8, 1);
        pipeline.train_step(&inputs, &targets).unwrap();
        let before = gpipe_bridge::device::simulated_counts();
        pipeline.train_step(&inputs, &targets).unwrap();
        let after = gpipe_bridge::device::simulated_counts();
        (after.copies_out - before.copies_out, after.copies_in - before.copies_in)
    };
    for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1] {
        let moved = |micro_batches| {
            let never = copies(Remat::Never, &schedule, micro_batches);
            let offload = copies(Remat::Offload, &schedule, micro_batches);
            let (out, back) = (offload.0 - never.0, offload.1 - never.1);
            assert_eq!(out, back, "{schedule} M={micro_batches}");
            out
        };
        let (two, four, eight) = (moved(2), moved(4), moved(8));
        assert!(two > 0 && four > two, "{schedule}: {two} {four} {eight}");
        // From two to four micro-batches come as many blocks, twice, as from four to eight.
        assert_eq!(eight - four, 2 * (four - two), "{schedule}: {two} {four} {eight}");
    }
}

/// On GPUs, dropout and attention are operators that draw without being given a generator. They
/// drew from the process's, so a recomputation had another mask than the forward.
#[test]
fn regression_gpu_operators_that_draw_draw_the_same_again() {
    if skipped("regression_gpu_operators_that_draw_draw_the_same_again") {
        return;
    }
    struct Draws;
    impl Layer for Draws {
        fn kind(&self) -> &'static str {
            "draws"
        }
        fn infer(&self, _: &mut Infer, x: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
            Ok(x.to_vec())
        }
        fn forward(&self, _: &mut Forward, x: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
            let x = x[0].f_dropout(0.5, true)?;
            let (q, mask) = (x.f_reshape([-1, 1, 4, 8])?, None::<Tensor>);
            let y =
                Tensor::f_scaled_dot_product_attention(&q, &q, &q, mask, 0.5, false, None, false)?;
            Ok(vec![y.f_reshape(x.size())?.f_add(&x)?])
        }
    }
    let trained = |remat: Remat, devices: &[Device]| {
        let model = Sequence::new().push("in", Linear::new(32, 32)).push("draws", Draws);
        let model = model.push("out", Linear::new(32, 3));
        let builder = Pipeline::builder(model, TensorSpec::new([2, 32], Kind::Float)).seed(5);
        let builder = builder.loss(MeanSquaredError).optimizer(Sgd::new(0.1)).remat(remat);
        let builder = builder.micro_batches(3).stages(devices.len()).devices(devices.to_vec());
        let mut pipeline = builder.build().unwrap();
        let x = Tensor::arange(192, (Kind::Float, tch::Device::Cpu)).sin().reshape([6, 32]);
        for _ in 0..3 {
            pipeline.train_step(&x, x.narrow(1, 0, 3)).unwrap();
        }
        pipeline.parameters().unwrap()
    };
    let last = Device::Cuda(Device::gpus() - 1);
    let expected = trained(Remat::Never, &[GPU]);
    for (remat, devices) in
        [(Remat::Always, &[GPU][..]), (Remat::Never, &[GPU, last]), (Remat::Always, &[last, GPU])]
    {
        assert_same_bits(&trained(remat, devices), &expected, &format!("{remat} {devices:?}"));
    }
}
