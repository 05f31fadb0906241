//! `fault_memory_*`: memory caps, while building and in a step.

use gpipe::{
    Adafactor, Adam, Balance, Bytes, Error, MeanSquaredError, Moments, Muon, Pipeline,
    PipelineBuilder, Remat, RmsProp, Schedule, Sequence, Sgd, TensorSpec, layers::Linear,
};
use tch::{Kind, Tensor};

use super::{
    assert_says,
    common::{assert_same_bits, is_about_cpus, uniform},
    refused,
};

/// Two layers of 64 x 64 on two stages.
fn capped(caps: Vec<Bytes>, micro_batches: usize) -> PipelineBuilder {
    let model = Sequence::new().push("one", Linear::new(64, 64)).push("two", Linear::new(64, 64));
    Pipeline::builder(model, TensorSpec::new([4, 64], Kind::Float))
        .stages(2)
        .balance(Balance::Uniform)
        .schedule(Schedule::GPipe)
        .remat(Remat::Never)
        .micro_batches(micro_batches)
        .memory_cap(caps)
        .loss(MeanSquaredError)
        .optimizer(Adam::default())
}

const WEIGHT: u64 = 64 * 64 * 4;

#[test]
fn fault_memory_cap_while_building() {
    // Stage 1's cap is one byte short of its weight, which is allocated first.
    let error = capped(vec![Bytes(1 << 20), Bytes(WEIGHT - 1)], 1).build().err().unwrap();
    assert!(matches!(error, Error::Step { .. }));
    let (asked, cap) = (Bytes(WEIGHT).to_string(), format!("cap {}", Bytes(WEIGHT - 1)));
    let says = [
        "device 1",
        "layer 'two'",
        "out of memory for its parameters",
        &asked,
        "asked for",
        "0 B held",
        &cap,
        "raise the cap",
    ];
    assert_says(&error.to_string(), &says);
    // Re-materialization and micro-batches do not make parameters smaller.
    assert!(!error.to_string().contains("re-materialize"), "{error}");
    // With one byte more, the bias does not fit.
    let text = refused(capped(vec![Bytes(WEIGHT)], 1).build());
    assert_says(&text, &["layer 'one'", "256 B asked for", &format!("{} held", Bytes(WEIGHT))]);
    capped(vec![Bytes(WEIGHT + 256)], 1).build().unwrap();
}

#[test]
fn fault_memory_cap_in_a_step() {
    let batch = |samples| {
        let of = |seed| uniform(&[samples, 64], seed, Kind::Float);
        (of(1), of(2))
    };
    let ((x, y), (large_x, large_y)) = (batch(4), batch(4000));
    let peaks = |(x, y): &(Tensor, Tensor)| {
        let mut free = capped(vec![], 4).build().unwrap();
        free.train_step(x, y).unwrap();
        let report = free.train_step(x, y).unwrap();
        report.devices.iter().map(|stage| stage.peak).collect::<Vec<_>>()
    };
    let (small, large) = (peaks(&batch(4)), peaks(&batch(4000)));
    for stage in 0..2 {
        assert!(large[stage].0 > 2 * small[stage].0, "{small:?} {large:?}");
        // Only this stage is short of memory: its cap is enough for the small batch, not for the
        // large one.
        let mut caps = vec![Bytes(1 << 30); 2];
        caps[stage] = Bytes((small[stage].0 + large[stage].0) / 2);
        let cap = format!("cap {}", caps[stage]);
        let mut spared = capped(vec![], 4).build().unwrap();
        let mut harmed = capped(caps, 4).build().unwrap();
        for round in 0..3 {
            let text = refused(harmed.train_step(&large_x, &large_y));
            let place = format!("stage {stage}, micro-batch ");
            let says =
                [&place, "layer '", "out of memory", " asked for", " held", &cap, "raise the cap"];
            assert_says(&text, &says);
            let (a, b) = (harmed.train_step(&x, &y).unwrap(), spared.train_step(&x, &y).unwrap());
            assert_eq!((a.loss, a.grad_norm), (b.loss, b.grad_norm), "round {round}");
        }
        let found = harmed.parameters().unwrap();
        assert_same_bits(&found, &spared.parameters().unwrap(), "after memory ran out thrice");
    }
}

#[test]
fn fault_memory_copies_that_the_user_holds_are_not_the_stages() {
    let why = "a GPU's statistics cover all its users";
    if is_about_cpus("fault_memory_copies_that_the_user_holds_are_not_the_stages", why) {
        return;
    }
    let of = |seed| uniform(&[4, 64], seed, Kind::Float);
    let (x, y) = (of(1), of(2));
    let mut free = capped(vec![], 4).build().unwrap();
    let steps = [0, 1].map(|_| free.train_step(&x, &y).unwrap());
    // The time at which the other stage frees the messages it received varies: a row of 64 numbers
    // per micro-batch.
    let messages = Bytes(4 * 64 * 4);
    let caps: Vec<Bytes> = (0..2)
        .map(|stage| steps[0].devices[stage].peak.max(steps[1].devices[stage].peak) + messages)
        .collect();
    assert!(messages.0 < WEIGHT / 4);
    // A step fits exactly. Copies that the user holds meanwhile do not make it fail.
    let mut pipeline = capped(caps, 4).build().unwrap();
    for _ in 0..2 {
        let held = [0, 1].map(|_| pipeline.parameters().unwrap());
        pipeline.train_step(&x, &y).unwrap();
        drop(held);
    }
}

/// Runs a step at every cap just below the smallest with which it succeeds. The update must never
/// run out of memory, because by then other stages may have applied theirs.
fn near_the_cap(builder: impl Fn(u64) -> PipelineBuilder) {
    let step = |cap: u64| {
        let mut pipeline = builder(cap).build()?;
        let x = uniform(&[1, 64], 1, Kind::Float);
        pipeline.train_step(&x, &x)
    };
    // `low` is known to fail, `high` to succeed.
    let (mut low, mut high) = (WEIGHT + 255, 64 * WEIGHT);
    while high - low > 1 {
        let middle = low.midpoint(high);
        if step(middle).is_ok() { high = middle } else { low = middle }
    }
    for cap in high - 64..high + 64 {
        match step(cap) {
            Ok(report) => {
                // The stage is charged for the update's temporaries, too.
                assert!(report.devices[0].peak.0 <= cap, "{} over {cap}", report.devices[0].peak);
            }
            Err(error) => {
                let text = error.to_string();
                assert_says(&text, &["out of memory", &format!("cap {}", Bytes(cap))]);
                assert!(!text.contains("restore a checkpoint"), "cap {cap}: {text}");
            }
        }
    }
}

fn one_layer(cap: u64) -> PipelineBuilder {
    let model = Sequence::new().push("one", Linear::new(64, 64));
    Pipeline::builder(model, TensorSpec::new([1, 64], Kind::Float))
        .memory_cap([Bytes(cap)])
        .loss(MeanSquaredError)
}

#[test]
fn fault_memory_never_runs_out_in_the_update_of_adam() {
    near_the_cap(|cap| one_layer(cap).optimizer(Adam::default()));
    let moments = Moments::BFloat16;
    near_the_cap(|cap| one_layer(cap).optimizer(Adam { moments, ..Adam::default() }));
}

#[test]
fn regression_memory_of_temporaries_is_asked_for_before_the_update() {
    // RMSProp and Adafactor allocate temporaries of the parameter's size. These were charged to no
    // stage and could fail half-way.
    near_the_cap(|cap| {
        one_layer(cap).optimizer(RmsProp { weight_decay: 0.1, ..RmsProp::default() })
    });
    near_the_cap(|cap| one_layer(cap).optimizer(Adafactor::default()).average(0.9));
    near_the_cap(|cap| one_layer(cap).optimizer(Muon::default()));
}

#[test]
fn fault_memory_never_runs_out_in_the_update_of_sgd_with_clipping() {
    let sgd = Sgd { momentum: 0.9, ..Sgd::new(0.1) };
    near_the_cap(|cap| one_layer(cap).clip_norm(1e-3).optimizer(sgd));
}
