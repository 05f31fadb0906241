//! Tests of profiles. `oracle_`: one run's profile predicts the bytes of another. `fault_`:
//! profiles of other models are rejected. `property_`: changed files are handled.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // helpers of tests may panic

use gpipe::{
    Adam, CrossEntropy, Pipeline, PipelineBuilder, Remat, RematPolicies, Schedule, Sequence, Sgd,
    TensorSpec, Tensors,
    plan::{Plan, PlanDevice, predict},
    profile::{Profile, Profiling, profile},
};
use gpipe_core::{Nanos, cost::LayerCost, splitmix::Stream};
use gpipe_models::{AmoebaNet, Transformer, Variant};
use tch::{Device, Kind, Tensor};

struct Subject {
    name: &'static str,
    model: Sequence,
    input: TensorSpec,
    batch: (Tensor, Tensor),
}

fn transformer() -> Subject {
    let model = Transformer {
        vocabulary: 300,
        positions: 32,
        features: 64,
        heads: 4,
        hidden: 256,
        blocks: 4,
        dropout: 0.1,
        attention_dropout: 0.0,
        tied: true,
        split_blocks: true,
        gelu: Default::default(),
    };
    let tokens = Tensor::arange(16 * 32, (Kind::Int64, Device::Cpu)).view([16, 32]).remainder(300);
    let input = TensorSpec::new([16, 32], Kind::Int64);
    let model = model.build().unwrap();
    Subject { name: "transformer", model, input, batch: (tokens.shallow_clone(), tokens) }
}

fn amoebanet() -> Subject {
    let model = AmoebaNet {
        variant: Variant::D,
        cells: 3,
        filters: 32,
        channels: 3,
        classes: 10,
        drop_path: 0.0,
        auxiliary: false,
    };
    tch::manual_seed(1);
    let images = Tensor::randn([16, 3, 64, 64], (Kind::Float, Device::Cpu));
    let classes = Tensor::arange(16, (Kind::Int64, Device::Cpu)).remainder(10);
    let input = TensorSpec::new([16, 3, 64, 64], Kind::Float);
    let model = model.build().unwrap();
    Subject { name: "amoebanet", model, input, batch: (images, classes) }
}

impl Subject {
    fn builder(&self) -> PipelineBuilder {
        Pipeline::builder(self.model.clone(), self.input.clone())
            .stages(2)
            .loss(CrossEntropy::default())
            .optimizer(Adam::default())
    }

    fn profile(&self) -> Profile {
        let (inputs, targets) = (&self.batch.0, &self.batch.1);
        let settings = Profiling {
            micro_batches: &[1, 2, 4, 8],
            schedules: &[Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1],
            steps: 1,
            passes: 2,
            batches: &[(Tensors::new(inputs), Tensors::new(targets))],
            machine: "here",
            values: &[],
        };
        profile(&settings, || Ok(self.builder()), |_| {}, |_| Ok(None)).unwrap()
    }
}

#[test]
fn fault_a_profile_of_something_else_is_refused() {
    let subject = transformer();
    let settings = Profiling {
        micro_batches: &[8],
        schedules: &[],
        steps: 1,
        passes: 1,
        batches: &[(Tensors::new(&subject.batch.0), Tensors::new(&subject.batch.1))],
        machine: "here",
        values: &[],
    };
    let found = profile(&settings, || Ok(subject.builder()), |_| {}, |_| Ok(None)).unwrap();
    let json = found.to_json().unwrap();
    assert_eq!(Profile::from_json(&json, "p.json").unwrap(), found);
    let refused = |mut builder: PipelineBuilder, machine: &str| {
        found.subject.check(&builder.subject(machine).unwrap(), "p.json").unwrap_err().to_string()
    };
    found.subject.check(&subject.builder().subject("here").unwrap(), "p.json").unwrap();
    // The planner's choices are not part of the subject.
    let other = subject.builder().stages(3).micro_batches(2).schedule(Schedule::GPipe);
    found.subject.check(&{ other }.subject("here").unwrap(), "p.json").unwrap();
    for (text, part) in [
        (refused(subject.builder(), "there"), "its machine is 'here', here it is 'there'"),
        (refused(subject.builder().kind(Kind::Double), "here"), "dtype"),
        (refused(subject.builder().optimizer(Sgd::new(0.1)), "here"), "optimizer"),
        (refused(subject.builder().threads_per_stage(2), "here"), "threads per stage"),
        (refused(amoebanet().builder(), "here"), "number of layers"),
    ] {
        assert!(text.contains(part) && text.contains("measure again"), "{text}");
    }
    for (text, part) in [
        ("", "not a profile that gpipe wrote"),
        ("{}", "not a profile that gpipe wrote"),
        (&json.replace("\"format\":2", "\"format\":9"), "format 9, this gpipe reads 2"),
        (&json.replacen("\"trained_before\":[false,", "\"trained_before\":[", 1), "trained_before"),
        (&json[..json.len() / 2], "not a profile that gpipe wrote"),
    ] {
        let error = Profile::from_json(text, "p.json").unwrap_err().to_string();
        assert!(error.starts_with("p.json: ") && error.contains(part), "{error}");
    }
}

/// Every configuration is measured once per pass, and the schedules of one size follow each other.
#[test]
fn property_passes_measure_everything_in_turn() {
    let subject = transformer();
    let batch = (Tensors::new(&subject.batch.0), Tensors::new(&subject.batch.1));
    let (batches, mut told, mut parts) = ([batch], Vec::new(), Vec::new());
    let settings = Profiling {
        micro_batches: &[8, 4],
        schedules: &[Schedule::OneFOneB, Schedule::ZbH1],
        steps: 1,
        passes: 2,
        batches: &batches,
        machine: "here",
        values: &[],
    };
    let found = profile(
        &settings,
        || Ok(subject.builder()),
        |next| {
            parts.push((next.done, next.all));
            told.push(next.what.to_owned());
        },
        |_| Ok(None),
    );
    let found = found.unwrap();
    assert_eq!(found.steps, 2);
    // The speed of offload is none of the 20 trainings.
    let counted = [(0, 20)].into_iter().chain((0..20).map(|done| (done, 20)));
    assert_eq!(parts, counted.collect::<Vec<_>>());
    assert_eq!(told.remove(0), "the speed of offload");
    let (first, second) = told.split_at(told.len() / 2);
    let plain = |all: &[String], pass: &str| -> Vec<String> {
        all.iter().map(|what| what.strip_prefix(pass).unwrap().to_owned()).collect()
    };
    let first = plain(first, "1 of 2: ");
    assert_eq!(first, plain(second, "2 of 2: "));
    // Discarding, keeping and, under the first schedule, selective. M = 8 comes before M = 4.
    let order = ["1f1b", "1f1b", "1f1b", "zb-h1", "zb-h1"];
    let order = ["(M = 8)", "(M = 4)"].into_iter().flat_map(|m| order.map(|name| (m, name)));
    assert_eq!(first.len(), 10);
    for (what, (m, name)) in first.iter().zip(order) {
        assert!(what.contains(m) && what.contains(name), "{what}");
    }
    let one = profile(
        &Profiling { passes: 1, ..settings },
        || Ok(subject.builder()),
        |_| {},
        |_| Ok(None),
    );
    let one = one.unwrap();
    assert_eq!(one.steps, 1);
    // Bytes are the same for one pass, unlike times.
    let schedule = Schedule::ZbH1;
    for (samples, costs) in &found.costs.sizes {
        assert_eq!(costs.len(), found.costs.layers.len() + 1);
        let (two, one) = (found.costs.at(*samples, &schedule), one.costs.at(*samples, &schedule));
        for (two, one) in two.iter().zip(&one) {
            assert_eq!((two.kept, two.inputs, two.products), (one.kept, one.inputs, one.products));
            assert_eq!(two.backward_weight > Nanos(0), one.backward_weight > Nanos(0));
        }
    }
}

#[test]
fn property_a_changed_profile_never_panics() {
    let subject = transformer();
    let settings = Profiling {
        micro_batches: &[8],
        schedules: &[],
        steps: 1,
        passes: 1,
        batches: &[(Tensors::new(&subject.batch.0), Tensors::new(&subject.batch.1))],
        machine: "here",
        values: &[],
    };
    let text = profile(&settings, || Ok(subject.builder()), |_| {}, |_| Ok(None))
        .unwrap()
        .to_json()
        .unwrap();
    let costs = text.find("\"costs\"").unwrap();
    let pieces = ["9999999999999999999", "00", "-", "18446744073709551615", "[0],"];
    let mut random = Stream::new(7);
    let (mut read, mut refused) = (0, 0);
    for _ in 0..3000 {
        let mut bytes = text.clone().into_bytes();
        // Mostly within the numbers.
        let from = if random.below(4) == 0 { 0 } else { costs };
        let at = from + random.below(bytes.len() - from);
        match random.below(3) {
            0 => drop(bytes.drain(at..(at + 1 + random.below(9)).min(bytes.len()))),
            1 => drop(bytes.splice(at..at, pieces[random.below(pieces.len())].bytes())),
            _ => bytes[at] = b"0123456789,:{}[]\"-e."[random.below(20)],
        }
        let Ok(found) = Profile::from_json(&String::from_utf8_lossy(&bytes), "p.json") else {
            refused += 1;
            continue;
        };
        read += 1;
        let layers = found.costs.layers.len();
        let plan = Plan {
            balance: vec![layers / 2, layers - layers / 2],
            micro_batches: 1 + random.below(16),
            schedule: Schedule::SEARCHED_EXACTLY[random.below(2)].clone(),
            remat: ["never", "always", "keep:1,segments:3"][random.below(3)].parse().unwrap(),
        };
        // Absurd numbers may yield an absurd prediction or an error.
        let _ = predict(&found.costs, &[PlanDevice::default(); 2], 16, &plan);
    }
    assert!(read > 300 && refused > 300, "{read} read, {refused} refused");
}

#[test]
fn oracle_a_stage_that_is_not_trained_costs_what_it_does() {
    let mut subject = amoebanet();
    subject.model = subject.model.freeze_except(["classifier*"]);
    let costs = subject.profile().costs;
    let layers = &costs.sizes[&4];
    for (number, cost) in layers[..layers.len() - 1].iter().enumerate() {
        assert!(cost.forward.0 > 0 && cost.forward_kept.0 > 0, "layer {number}: {cost:?}");
        assert!(cost.kept.0 > 0 && cost.forward_peak.0 > 0, "layer {number}: {cost:?}");
        // Another cut may recompute these layers and hold their products.
        assert!(cost.rematerialize_selective.0 > 0, "layer {number}: {cost:?}");
        assert!(cost.products.0 > 0 && cost.selective_peak.0 > 0, "layer {number}: {cost:?}");
    }
    assert!(layers[0].backward.0 == 0 && layers[layers.len() - 2].backward.0 > 0);
}

/// A profile of an even cut under 1F1B predicts other cuts, schedules, sizes and policies.
#[test]
fn oracle_predicted_bytes_are_what_is_held() {
    let mut bad = Vec::new();
    for subject in [transformer(), amoebanet()] {
        let costs = subject.profile().costs;
        let layers = costs.layers.len();
        // Measured even where a backward directly follows its forward and nothing would be
        // recomputed.
        let seen = |own: &Vec<LayerCost>| {
            own[..layers].iter().all(|cost| cost.rematerialize_selective > Nanos(0))
        };
        assert!(costs.sizes.values().all(seen), "{}", subject.name);
        for (schedule, remat, micro_batches, first) in [
            (Schedule::GPipe, "never", 4, layers / 2),
            (Schedule::OneFOneB, "never", 8, layers / 3),
            (Schedule::GPipe, "always", 8, layers / 2),
            (Schedule::OneFOneB, "always", 4, 2 * layers / 3),
            (Schedule::OneFOneB, "unless-adjacent", 2, layers / 2),
            (Schedule::GPipe, "keep:2,always", 8, layers / 2),
            (Schedule::GPipe, "selective", 8, layers / 2),
            (Schedule::OneFOneB, "selective,always", 4, layers / 3),
            (Schedule::OneFOneB, "segments:2,never", 4, layers / 2),
            (Schedule::OneFOneB, "never", 1, layers / 2),
            (Schedule::ZbH1, "never", 4, layers / 2),
            (Schedule::ZbH1, "always", 8, layers / 3),
        ] {
            let remat: RematPolicies = remat.parse().unwrap();
            let balance = vec![first, layers - first];
            let plan = Plan { balance, micro_batches, schedule, remat };
            let predicted = predict(&costs, &[PlanDevice::default(); 2], 16, &plan).unwrap();
            let mut pipeline = subject.builder().planned(&plan).build().unwrap();
            let mut peaks = vec![0; 2];
            for _ in 0..4 {
                let report = pipeline.train_step(&subject.batch.0, &subject.batch.1).unwrap();
                for (peak, stage) in peaks.iter_mut().zip(&report.devices) {
                    *peak = stage.peak.0.max(*peak);
                }
            }
            for (stage, (own, &measured)) in predicted.stages.iter().zip(&peaks).enumerate() {
                let ratio = own.peak.0 as f64 / measured as f64;
                // The prediction may be low only if a sample caught another stage halfway through
                // releasing memory. It may be high because of three effects: gradients that may
                // still be queued, but were not in this run; with kept segments, tensors shared by
                // two layers' inputs (AmoebaNet's pairs), which count twice; with split backwards,
                // inputs that a receiver may hold until its second half. Two more such inputs may
                // be alive than under 1F1B, an eighth of what three layers of AmoebaNet hold.
                let wide = plan.remat.of(stage).segments() > 1 || plan.schedule.splits();
                // The last layer that is computed again does not hold its inputs, and a cell's
                // backward reads their ReLU instead. That they are free is not predicted; here it
                // is 1.6% at most.
                let early = if plan.remat.of(stage) == Remat::Never { 0.0 } else { 0.02 };
                let above = early + if wide { 1.125 } else { 1.05 };
                if !(0.999..=above).contains(&ratio) {
                    bad.push(format!("{} {plan:?} stage {stage}: {ratio:.4}", subject.name));
                }
            }
        }
    }
    assert!(bad.is_empty(), "{bad:#?}");
}
