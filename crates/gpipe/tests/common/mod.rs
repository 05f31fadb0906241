//! Shared by the test families: a small model with every feature, and comparisons of all tensors.
#![allow(dead_code)] // each test file uses a part of it

pub mod gated;
pub mod matrix;
pub mod memory;
pub mod own_loss;
pub mod views;

use std::io::Write;

use gpipe::{
    Accuracy, Adafactor, Adam, Balance, CrossEntropy, Decay, Group, LearningRate, Pipeline,
    PipelineBuilder, Remat, RmsProp, Schedule, Sequence, TensorSpec,
    layers::{Attention, BatchNorm, Embedding, Head, Mlp, Pop, Stash},
    state::State,
};
use tch::{Device, Kind, Tensor};

/// Whether the stages of this run are on GPUs (GPIPE_TEST_DEVICES).
pub fn on_gpus() -> bool {
    std::env::var("GPIPE_TEST_DEVICES").is_ok_and(|all| all.contains("cuda"))
}

/// Whether the stages of this run are on GPUs (GPIPE_TEST_DEVICES), where a test that is about CPUs
/// is left out. It writes the reason to the file that GPIPE_SKIP_LOG names.
pub fn is_about_cpus(test: &str, why: &str) -> bool {
    if on_gpus() {
        log_skipped(&format!("{test}, on GPUs: {why}"));
    }
    on_gpus()
}

/// Adds a line to the file of skipped tests.
pub fn log_skipped(line: &str) {
    let Some(path) = std::env::var_os("GPIPE_SKIP_LOG") else { return };
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
    // In a single write, because tests run in parallel.
    file.write_all(format!("{line}\n").as_bytes()).unwrap();
}

pub const VOCABULARY: i64 = 23;
pub const LENGTH: i64 = 5;
pub const FEATURES: i64 = 16;

/// Features of the model. Every value of every axis is compared bit for bit over all cuts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Features {
    pub tied: bool,
    pub skip: bool,
    pub dropout: f64,
    pub batch_norm: bool,
    /// The dtype of computation.
    pub kind: Kind,
    pub recipe: Recipe,
}

/// The training recipe.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Recipe {
    /// Adam.
    Adam,
    /// Adafactor, groups with different settings (one of them frozen), a changing learning rate,
    /// moving averages, label smoothing.
    Everything,
    /// The paper's RMSProp.
    RmsProp,
}

impl Features {
    pub fn plain() -> Self {
        let (kind, recipe) = (Kind::Float, Recipe::Adam);
        Self { tied: false, skip: false, dropout: 0.0, batch_norm: false, kind, recipe }
    }

    /// Applies the settings that belong to the builder.
    pub fn build(&self, builder: PipelineBuilder) -> PipelineBuilder {
        let builder = builder.kind(self.kind);
        match self.recipe {
            Recipe::Adam => builder,
            Recipe::RmsProp => builder.optimizer(RmsProp { lr: 1e-2, ..RmsProp::default() }),
            Recipe::Everything => builder
                .optimizer(Adafactor { weight_decay: 0.1, ..Adafactor::default() })
                .loss(CrossEntropy { label_smoothing: 0.1, ..CrossEntropy::default() })
                .group(Group::matching(["*.bias", "*norm.*"]).weight_decay(0.0))
                .group(Group::matching(["embedding.tokens"]).lr_scale(0.5))
                .group(Group::matching(["0.mlp.hidden.weight"]).frozen())
                .learning_rate(LearningRate { warmup_steps: 2, decay: Decay::InverseSquareRoot })
                .average(0.9)
                .metric(Accuracy::default())
                .training_metrics(),
        }
    }
}

pub fn model(features: Features) -> Sequence {
    let Features { tied, skip, dropout, batch_norm, .. } = features;
    let tie = tied.then(|| "tokens".to_owned());
    let (std, output_std) = (0.2, 0.1);
    let attention = Attention {
        features: FEATURES,
        heads: 2,
        head_size: FEATURES / 2,
        causal: true,
        attention_dropout: dropout,
        dropout,
        std,
        output_std,
    };
    let mlp =
        Mlp { features: FEATURES, hidden: 32, dropout, std, output_std, gelu: Default::default() };
    let embedding = Embedding {
        vocabulary: VOCABULARY,
        features: FEATURES,
        positions: LENGTH + 2,
        std,
        dropout,
        tie: tie.clone(),
    };
    let head = Head { features: FEATURES, vocabulary: VOCABULARY, std, logit_clip: 0.0, tie };
    let mut model = Sequence::new().push("embedding", embedding);
    if skip {
        model = model.push("stash", Stash::new("long"));
    }
    model = model.push("0.attention", attention);
    if batch_norm {
        model = model.push("0.norm", BatchNorm::new(LENGTH));
    }
    model = model.push("0.mlp", mlp);
    if batch_norm {
        model = model.push("1.norm", BatchNorm { momentum: None, ..BatchNorm::new(LENGTH) });
    }
    if skip {
        model = model.push("inner stash", Stash::new("short"));
    }
    model = model.push("1.attention", attention);
    if skip {
        model = model.push("pop", Pop::new("long")).push("inner pop", Pop::new("short"));
    }
    model.push("1.mlp", mlp).push("head", head)
}

/// Tokens and targets of `samples` samples: a fixed function of `seed`. Some targets are ignored,
/// so that micro-batches count different numbers of tokens.
pub fn batch(samples: i64, seed: u64) -> (Tensor, Tensor) {
    let mut random = gpipe_core::splitmix::Stream::new(seed);
    let count = (samples * (LENGTH + 1)) as usize;
    let tokens: Vec<i64> = (0..count).map(|_| random.below(VOCABULARY as usize) as i64).collect();
    let all = Tensor::from_slice(&tokens).reshape([samples, LENGTH + 1]);
    let inputs = all.narrow(1, 0, LENGTH).contiguous();
    let targets = all.narrow(1, 1, LENGTH).contiguous();
    if samples > 1 {
        let _ = targets.narrow(0, 0, 1).narrow(1, 0, 3).fill_(-100);
    }
    (inputs, targets)
}

/// How a model is run. None of these choices may change a bit.
#[derive(Debug, Clone)]
pub struct Run {
    pub stages: usize,
    pub schedule: Schedule,
    pub remat: Remat,
    pub balance: Balance,
}

pub const REMATS: [Remat; 6] = [
    Remat::Always,
    Remat::Never,
    Remat::UnlessAdjacent,
    Remat::Selective,
    Remat::Segments(2),
    Remat::Offload,
];

impl Run {
    pub fn plain() -> Self {
        let (schedule, remat) = (Schedule::GPipe, Remat::Never);
        Self { stages: 1, schedule, remat, balance: Balance::Uniform }
    }

    pub fn builder(&self, model: Sequence, micro_batches: usize) -> PipelineBuilder {
        self.builder_of(model, vec![TensorSpec::new([4, LENGTH], Kind::Int64)], micro_batches)
    }

    pub fn builder_of(
        &self,
        model: Sequence,
        inputs: Vec<TensorSpec>,
        micro_batches: usize,
    ) -> PipelineBuilder {
        Pipeline::builder(model, inputs)
            .stages(self.stages)
            .schedule(self.schedule.clone())
            .remat(self.remat)
            .balance(self.balance.clone())
            .micro_batches(micro_batches)
            .seed(11)
            .keep_gradients()
            .loss(CrossEntropy::default())
            .optimizer(Adam { lr: 1e-2, ..Adam::default() })
    }

    pub fn all(layers: usize) -> Vec<Run> {
        let mut runs = Vec::new();
        for stages in 1..=4 {
            let mut lopsided = vec![1; stages];
            lopsided[stages - 1] = layers - (stages - 1);
            let mut balances = vec![Balance::Uniform, Balance::Cost, Balance::Layers(lopsided)];
            balances.truncate(if stages == 1 { 1 } else { 3 });
            for balance in balances {
                for schedule in one_stage_per_device() {
                    for remat in REMATS {
                        let (schedule, balance) = (schedule.clone(), balance.clone());
                        runs.push(Run { stages, schedule, remat, balance });
                    }
                }
            }
        }
        // Several stages on each device.
        for (devices, schedule) in several_stages_per_device() {
            if schedule.stages(devices).is_ok_and(|stages| stages > layers) {
                continue;
            }
            let balances = match schedule {
                Schedule::Interleaved(_) => vec![Balance::Uniform, Balance::Cost],
                _ => vec![Balance::Uniform],
            };
            // All policies on two devices; elsewhere those that recompute most and least.
            let remats = if devices == 2 { &REMATS[..] } else { &REMATS[..2] };
            for balance in balances {
                for &remat in remats {
                    let (schedule, balance) = (schedule.clone(), balance.clone());
                    runs.push(Run { stages: devices, schedule, remat, balance });
                }
            }
        }
        runs
    }
}

/// Every schedule with one stage on each device.
fn one_stage_per_device() -> impl Iterator<Item = Schedule> {
    let named = Schedule::NAMED.into_iter();
    named.filter(|schedule| schedule.stages(1).is_ok_and(|stages| stages == 1))
}

/// Schedules with several stages on each device, and how many devices.
fn several_stages_per_device() -> Vec<(usize, Schedule)> {
    use Schedule::{BreadthFirst, Interleaved, InterleavedZb, VHalf, VMin, ZbV};
    let mut all = vec![(1, Interleaved(3)), (2, Interleaved(3)), (2, InterleavedZb(3))];
    for devices in 1..=3 {
        for schedule in [Interleaved(2), ZbV, VHalf, VMin, BreadthFirst(2), InterleavedZb(2)] {
            all.push((devices, schedule));
        }
    }
    all
}

pub type Named = Vec<(String, Tensor)>;

/// The whole state by name: parameters, optimizer state with its counts, averages, counters.
pub fn flat(pipeline: &mut Pipeline) -> Named {
    let state = pipeline.state().unwrap();
    let mut all = Named::new();
    for layer in state.stages.into_iter().flatten() {
        for parameter in layer.parameters {
            let name = format!("{}.{}", layer.layer, parameter.name);
            all.push((name.clone(), parameter.value));
            if let Some(kept) = parameter.optimizer {
                all.push((format!("{name} updates"), Tensor::from(kept.updates as i64)));
                let tensors = kept.tensors.into_iter();
                all.extend(tensors.map(|(tensor, value)| (format!("{name} {tensor}"), value)));
            }
            all.extend(parameter.average.map(|average| (format!("{name} average"), average)));
        }
    }
    let text = format!("{:?}", state.counters);
    all.push((text, Tensor::from(0)));
    all
}

/// Puts `state` into `pipeline`.
pub fn restore(pipeline: &mut Pipeline, state: State) {
    let counters = state.counters;
    pipeline.restore(&counters, state.into_layers()).unwrap();
}

/// The bits of a tensor: unlike ==, tells NaN from NaN and 0 from -0.
pub fn bits(tensor: &Tensor) -> Vec<u64> {
    let values: Vec<f64> = tensor.to_kind(Kind::Double).reshape([-1]).try_into().unwrap();
    values.into_iter().map(f64::to_bits).collect()
}

pub fn assert_same_bits(a: &Named, b: &Named, what: &str) {
    let names = |named: &Named| named.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(a), names(b), "{what}");
    for ((name, x), (_, y)) in a.iter().zip(b) {
        assert_eq!(x.size(), y.size(), "{what}: {name}");
        assert!(bits(x) == bits(y), "{what}: {name} differs by {:?}", (x - y).abs().max());
    }
}

/// Asserts the promised tolerance for each element: |a - b| <= relative max(|b|, 1e-3 global norm).
pub fn assert_close(a: &Named, b: &Named, relative: f64, what: &str) {
    assert_eq!(a.len(), b.len(), "{what}");
    let square = |(_, t): &(String, Tensor)| t.to_kind(Kind::Double).square().sum(Kind::Double);
    let norm = b.iter().map(|t| square(t).double_value(&[])).sum::<f64>().sqrt();
    for ((name, x), (other, y)) in a.iter().zip(b) {
        assert_eq!(name, other, "{what}");
        let (x, y) = (x.to_kind(Kind::Double), y.to_kind(Kind::Double));
        let excess = (&x - &y).abs() - y.abs().clamp_min(1e-3 * norm) * relative;
        let worst = excess.max().double_value(&[]);
        assert!(worst <= 0.0, "{what}: {name} exceeds the tolerance by {worst:e}");
    }
}

pub fn cpu(kind: Kind) -> (Kind, Device) {
    (kind, Device::Cpu)
}

/// Uniform numbers in (-1, 1): a fixed function of `seed`.
pub fn uniform(shape: &[i64], seed: u64, kind: Kind) -> Tensor {
    let mut random = gpipe_core::splitmix::Stream::new(seed);
    let unit = |bits: u64| (bits >> 11) as f64 / (1_u64 << 52) as f64 - 1.0;
    let values: Vec<f64> = (0..shape.iter().product()).map(|_| unit(random.next_u64())).collect();
    Tensor::from_slice(&values).reshape(shape).to_kind(kind)
}

/// The names of this process's threads that run.
///
/// Linux lists a thread for a moment after another has joined it. `PF_EXITING` of proc_pid_stat(5)
/// is set before a thread can be joined, so threads with it are left out.
pub fn threads() -> Vec<String> {
    const EXITING: u64 = 4;
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    tasks
        .filter_map(|task| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).ok()?;
            // The name is in parentheses and may contain some.
            let (name, others) = stat.split_once('(')?.1.rsplit_once(')')?;
            let flags: u64 = others.split_whitespace().nth(6)?.parse().unwrap();
            (flags & EXITING == 0).then(|| name.to_owned())
        })
        .collect()
}
