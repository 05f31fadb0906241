//! Family `fault_`: bad input, a failing layer, too little memory or a stall cause one clear error
//! (what, where, the remedy), never a panic or a hang. Afterwards the pipeline still works, and its
//! parameters and optimizer state are unchanged to the bit.
//!
//! - `fault_build_*`: settings and models that do not fit, found before anything runs
//! - `fault_input_*`: mini-batches that the pipeline rejects, and values that layers reject
//! - `fault_layer_*`: layers that fail, panic or produce NaN, in forward, re-materialization or the
//!   second run, which names the layer of a NaN
//! - `fault_memory_*`: memory caps, while building and in a step
//! - `fault_stall_*`: a layer that never returns, with a short deadline
//!
//! Catches missing checks, errors that name the wrong layer, gradients or updates that survive a
//! failed step, stages that wait for a failed one, and updates applied by only some stages.

// clippy.toml allows these in test functions, but not in shared helpers.
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "faults/build.rs"]
mod build;
use crate::common;
#[path = "faults/input.rs"]
mod input;
#[path = "faults/layer.rs"]
mod layer;
#[path = "faults/memory.rs"]
mod memory;
#[path = "faults/stall.rs"]
mod stall;

use std::{
    sync::{
        Arc, Condvar, Mutex, Once,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use common::{assert_same_bits, uniform};
use gpipe::{
    Adam, Balance, CrossEntropy, Forward, Infer, Init, Layer, LayerError, MeanSquaredError,
    ParameterSpec, Pipeline, PipelineBuilder, Remat, Schedule, Sequence, TensorSpec,
    layers::{Activation, Embedding, Head, Linear, Mlp},
};
use tch::{Kind, Tensor};

/// What the trapped layer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Deed {
    Error,
    Panic,
    /// Produces NaN in one call.
    Nan,
    /// Produces NaN wherever its input is above 1000, in every run on that data.
    NanAbove,
    /// Waits until the trap is opened.
    Stall,
}

/// A trap that springs in call number `at`, counted from 0; -1 disarms it.
struct Trap {
    deed: Deed,
    at: AtomicI64,
    open: Mutex<bool>,
    opened: Condvar,
}

impl Trap {
    fn new(deed: Deed) -> Arc<Self> {
        let (open, opened) = (Mutex::new(false), Condvar::new());
        Arc::new(Self { deed, at: AtomicI64::new(-1), open, opened })
    }

    /// Springs in call number `call`, counted from now.
    fn set(&self, call: i64) {
        self.at.store(call, Ordering::SeqCst);
    }

    fn open(&self) {
        *self.open.lock().unwrap() = true;
        self.opened.notify_all();
    }
}

/// y = x scale, one scale per feature.
struct Trapped(Arc<Trap>);

impl Layer for Trapped {
    fn kind(&self) -> &'static str {
        "trapped"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        vec![ParameterSpec::new("scale", [8], Init::Ones)]
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let trap = &self.0;
        let y = inputs[0].f_mul(ctx.parameter(0)?)?;
        if trap.deed == Deed::NanAbove {
            return Ok(vec![y.f_masked_fill(&inputs[0].f_gt(1000.0)?, f64::NAN)?]);
        }
        if trap.at.fetch_sub(1, Ordering::SeqCst) != 0 {
            return Ok(vec![y]);
        }
        match trap.deed {
            Deed::Error => Err(LayerError::Value("injected error: do not inject it".into())),
            Deed::Panic => panic!("injected panic"),
            Deed::Nan | Deed::NanAbove => Ok(vec![y.f_mul_scalar(f64::NAN)?]),
            Deed::Stall => {
                let mut open = trap.open.lock().unwrap();
                while !*open {
                    open = trap.opened.wait(open).unwrap();
                }
                Ok(vec![y])
            }
        }
    }
}

/// Suppresses injected panics: the default hook would print each with its backtrace.
fn silence_injected_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let here = std::thread::current();
            let staged = here.name().is_some_and(|name| name.starts_with("gpipe-device-"));
            if !(staged && info.payload().downcast_ref() == Some(&"injected panic")) {
                before(info);
            }
        }));
    });
}

/// How the trapped model is run.
#[derive(Debug, Clone)]
struct Way {
    stages: usize,
    schedule: Schedule,
    remat: Remat,
}

/// K = 1, 2 and 4, with plain schedules and one that splits backwards, with and without
/// recomputation.
fn ways() -> Vec<Way> {
    let mut ways = Vec::new();
    for stages in [1, 2, 4] {
        for schedule in [Schedule::GPipe, Schedule::OneFOneB, Schedule::ZbH1] {
            for remat in [Remat::Never, Remat::Always, Remat::Selective, Remat::Offload] {
                let schedule = schedule.clone();
                ways.push(Way { stages, schedule, remat });
            }
        }
    }
    ways
}

const M: usize = 3;
const SAMPLES: i64 = 6;

impl Way {
    fn plain(stages: usize) -> Self {
        Self { stages, schedule: Schedule::GPipe, remat: Remat::Never }
    }

    /// A builder of four layers (first, the trapped middle, tanh, last) with uniform cuts.
    fn builder(&self, trap: &Arc<Trap>) -> PipelineBuilder {
        let model = Sequence::new()
            .push("first", Linear::new(4, 8))
            .push("middle", Trapped(Arc::clone(trap)))
            .push("tanh", Activation::Tanh)
            .push("last", Linear::new(8, 2));
        Pipeline::builder(model, TensorSpec::new([SAMPLES, 4], Kind::Float))
            .stages(self.stages)
            .balance(Balance::Uniform)
            .schedule(self.schedule.clone())
            .remat(self.remat)
            .micro_batches(M)
            .seed(5)
            .timeout(Duration::from_secs(20)) // a hang becomes a failure
            .loss(MeanSquaredError)
            .optimizer(Adam { lr: 0.01, ..Adam::default() })
    }

    /// The stage of a layer under uniform cuts of 4 layers into 1, 2 or 4 stages.
    fn stage_of(&self, layer: usize) -> usize {
        layer * self.stages / 4
    }
}

fn data() -> (Tensor, Tensor) {
    (uniform(&[SAMPLES, 4], 1, Kind::Float), uniform(&[SAMPLES, 2], 2, Kind::Float))
}

/// A pipeline to be harmed, and an equal one that is spared. Both have made one step, so that the
/// optimizer has a state that could be damaged.
struct Pair {
    harmed: Pipeline,
    spared: Pipeline,
    what: String,
}

impl Pair {
    fn new(way: &Way, trap: &Arc<Trap>) -> Self {
        let built = |trap: &Arc<Trap>| {
            let mut pipeline = way.builder(trap).build().unwrap();
            let (x, y) = data();
            pipeline.train_step(&x, &y).unwrap();
            pipeline
        };
        let what = format!("{way:?} {:?}", trap.deed);
        Self { harmed: built(trap), spared: built(&Trap::new(trap.deed)), what }
    }

    /// Runs a call that must fail, and checks that it leaves no trace: parameters, the step count,
    /// and the next step's loss and parameters equal those of the spared pipeline.
    fn harm<T>(&mut self, call: impl FnOnce(&mut Pipeline) -> gpipe::Result<T>) -> String {
        let error = call(&mut self.harmed).err();
        let text = error.unwrap_or_else(|| panic!("no error: {}", self.what)).to_string();
        let what = format!("{} after: {text}", self.what);
        let parameters = |pipeline: &mut Pipeline| pipeline.parameters().unwrap();
        let (harmed, spared) = (&mut self.harmed, &mut self.spared);
        assert_same_bits(&parameters(harmed), &parameters(spared), &what);
        assert_eq!(harmed.steps(), spared.steps(), "{what}");
        let (x, y) = data();
        assert_eq!(harmed.evaluate(&x, &y).unwrap(), spared.evaluate(&x, &y).unwrap(), "{what}");
        let (a, b) = (harmed.train_step(&x, &y).unwrap(), spared.train_step(&x, &y).unwrap());
        assert_eq!((a.loss, a.grad_norm, a.step), (b.loss, b.grad_norm, b.step), "{what}");
        assert_same_bits(&parameters(harmed), &parameters(spared), &what);
        text
    }
}

#[track_caller]
fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "'{part}' is not in: {text}");
    }
}

/// The error of a call that must fail.
#[track_caller]
fn refused<T>(result: gpipe::Result<T>) -> String {
    match result {
        Ok(_) => panic!("it was accepted"),
        Err(error) => error.to_string(),
    }
}

/// An embedding, an MLP, and a head tied to the embedding, with the vocabularies of embedding and
/// head.
fn tokens_model(vocabulary: [i64; 2]) -> Sequence {
    let tie = Some("tokens".to_owned());
    let embedding = Embedding {
        vocabulary: vocabulary[0],
        features: 4,
        positions: 3,
        std: 0.1,
        dropout: 0.0,
        tie: tie.clone(),
    };
    let mlp = Mlp {
        features: 4,
        hidden: 8,
        dropout: 0.0,
        std: 0.1,
        output_std: 0.1,
        gelu: Default::default(),
    };
    let head = Head { features: 4, vocabulary: vocabulary[1], std: 0.1, logit_clip: 0.0, tie };
    Sequence::new().push("embedding", embedding).push("mlp", mlp).push("head", head)
}

fn tokens_builder(model: Sequence) -> PipelineBuilder {
    Pipeline::builder(model, TensorSpec::new([SAMPLES, 3], Kind::Int64))
        .micro_batches(M)
        .balance(Balance::Uniform)
        .loss(CrossEntropy::default())
        .optimizer(Adam::default())
}
