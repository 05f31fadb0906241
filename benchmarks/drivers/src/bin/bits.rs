//! Tests whether the number of stages changes a bit, for `scripts/gpu_first_hour.sh`.
//!
//! Trains one network at K = 1 and at larger K, under several schedules and re-materialization
//! policies. Compares every loss, gradient and parameter with those of K = 1. Prints a line of JSON
//! for each configuration: `equal`, or the first tensor that differs.
//!
//! The first line runs K = 1 a second time. If it differs, a kernel is not reproducible, and K is
//! not the cause.
//!
//! ```text
//! Usage: bits [network=gpt|amoeba] [device=cpu] [dtype=float32|bfloat16] [samples=32]
//!        [micro_batches=8] [stages=1,2,3,4] [steps=2] [deterministic=true]
//!        network=gpt:    [vocabulary=8192] [length=128] [features=512] [heads=8] [hidden=2048]
//!                        [blocks=8]
//!        network=amoeba: [cells=6] [filters=128] [size=64]
//! ```
//!
//! With `deterministic=false`, libtorch may choose any kernel on a GPU.

use std::{io::Write, str::FromStr};

use gpipe::{Adam, CrossEntropy, Device, Pipeline, Remat, Schedule, Sequence, Sgd, TensorSpec};
use gpipe_drivers::{Arguments, Failure, Numbers};
use gpipe_models::{AmoebaNet, Variant};
use serde_json::{Value, json};
use tch::{Kind, Tensor};

const CHANNELS: i64 = 3;
const CLASSES: i64 = 10;

/// A network with its mini-batch, and the settings that all configurations share.
struct Work {
    model: Sequence,
    inputs: Tensor,
    targets: Tensor,
    adam: bool,
    device: Device,
    kind: Kind,
    micro_batches: usize,
    steps: usize,
    deterministic: bool,
}

/// One configuration.
struct Way {
    stages: usize,
    schedule: &'static str,
    remat: Remat,
}

/// The results of a run, by name and in order: losses, gradients of each step, parameters.
type Computed = Vec<(String, Tensor)>;

impl Work {
    fn read(arguments: &mut Arguments) -> Result<Self, Failure> {
        let samples: i64 = arguments.take("samples", "32")?;
        let network: String = arguments.take("network", "gpt")?;
        let mut numbers = Numbers::default();
        let (model, inputs, targets) = match network.as_str() {
            "gpt" => {
                let model = gpipe_drivers::gpt_of(arguments)?;
                let mut tokens = || numbers.below(model.vocabulary, &[samples, model.positions]);
                (model.build()?, tokens()?, tokens()?)
            }
            "amoeba" => {
                let model = AmoebaNet {
                    variant: Variant::D,
                    cells: arguments.take("cells", "6")?,
                    filters: arguments.take("filters", "128")?,
                    channels: CHANNELS,
                    classes: CLASSES,
                    drop_path: 0.0,
                    auxiliary: false,
                };
                let size: i64 = arguments.take("size", "64")?;
                let images = numbers.uniform(&[samples, CHANNELS, size, size])?;
                (model.build()?, images, numbers.below(CLASSES, &[samples])?)
            }
            other => return Err(format!("network={other}: use gpt or amoeba").into()),
        };
        let dtype: String = arguments.take("dtype", "float32")?;
        let kind = match dtype.as_str() {
            "float32" => Kind::Float,
            "bfloat16" => Kind::BFloat16,
            other => return Err(format!("dtype={other}: use float32 or bfloat16").into()),
        };
        Ok(Self {
            model,
            inputs,
            targets,
            adam: network == "gpt",
            device: arguments.take("device", "cpu")?,
            kind,
            micro_batches: arguments.take("micro_batches", "8")?,
            steps: arguments.take("steps", "2")?,
            deterministic: arguments.take("deterministic", "true")?,
        })
    }

    fn pipeline(&self, way: &Way) -> Result<Pipeline, Failure> {
        let mut shape = self.inputs.size();
        shape[0] = (shape[0] / self.micro_batches.max(1) as i64).max(1);
        let spec = TensorSpec::new(shape, self.inputs.kind());
        let builder = Pipeline::builder(self.model.clone(), spec)
            .devices(vec![self.device; way.stages])
            .micro_batches(self.micro_batches)
            .schedule(Schedule::from_str(way.schedule)?)
            .remat(way.remat)
            .loss(CrossEntropy::default())
            .kind(self.kind)
            .seed(1)
            .keep_gradients();
        let pipeline = match self.adam {
            true => builder.optimizer(Adam { lr: 1e-4, ..Adam::default() }).build()?,
            false => builder.optimizer(Sgd { momentum: 0.9, ..Sgd::new(0.01) }).build()?,
        };
        // A stage on a GPU requests deterministic kernels when it is built.
        if !self.deterministic {
            gpipe_bridge::device::set_determinism(gpipe_bridge::device::Determinism::Off)?;
        }
        Ok(pipeline)
    }

    fn run(&self, way: &Way) -> Result<Computed, Failure> {
        let mut pipeline = self.pipeline(way)?;
        let mut all = Computed::new();
        for step in 1..=self.steps {
            let loss = pipeline.train_step(&self.inputs, &self.targets)?.loss;
            all.push((format!("step {step} loss"), Tensor::f_from_slice(&[loss])?));
            let gradients = pipeline.gradients()?.into_iter();
            all.extend(gradients.map(|(name, one)| (format!("step {step} gradient {name}"), one)));
        }
        let parameters = pipeline.parameters()?.into_iter();
        all.extend(parameters.map(|(name, one)| (format!("parameter {name}"), one)));
        Ok(all)
    }

    /// The output line of a configuration, compared with the results of K = 1.
    fn line(&self, what: &str, way: &Way, expected: &Computed) -> Result<Value, Failure> {
        let mut line = json!({
            "what": what,
            "stages": way.stages,
            "schedule": way.schedule,
            "remat": way.remat.to_string(),
            "tensors": expected.len(),
        });
        match self.run(way).and_then(|found| differing(&found, expected)) {
            Ok(different) => {
                line["equal"] = different.is_empty().into();
                line["different"] = different.len().into();
                line["first"] = different.into_iter().next().unwrap_or_default();
            }
            // A failing configuration does not hide the others.
            Err(error) => line["error"] = error.to_string().into(),
        }
        Ok(line)
    }
}

/// The tensors whose bits differ, each with its largest difference.
fn differing(found: &Computed, expected: &Computed) -> Result<Vec<Value>, Failure> {
    if found.len() != expected.len() {
        return Err(format!("{} tensors, not {}", found.len(), expected.len()).into());
    }
    let mut different = Vec::new();
    for ((name, x), (other, y)) in found.iter().zip(expected) {
        if name != other || x.size() != y.size() || x.kind() != y.kind() {
            return Err(format!("{name} {:?} is not {other} {:?}", x.size(), y.size()).into());
        }
        if bits(x)?.f_equal(&bits(y)?)? {
            continue;
        }
        let apart = x.f_sub(y)?.f_abs()?.f_max()?.f_double_value(&[])?;
        let size = y.f_abs()?.f_max()?.f_double_value(&[])?;
        different.push(json!({ "tensor": name, "difference": apart, "largest_value": size }));
    }
    Ok(different)
}

/// The same memory as integers, so that NaN equals itself and 0 differs from -0.
fn bits(tensor: &Tensor) -> Result<Tensor, Failure> {
    let kind = match tensor.kind() {
        Kind::Float => Kind::Int,
        Kind::Double => Kind::Int64,
        other => return Err(format!("parameters of kind {other:?} are not compared").into()),
    };
    Ok(tensor.f_contiguous()?.f_view_dtype(kind)?)
}

/// Several schedules and re-materialization policies at each K.
fn ways(stages: &[usize]) -> Vec<Way> {
    let mut all = Vec::new();
    for &stages in stages {
        let way = |schedule, remat| Way { stages, schedule, remat };
        all.push(way("gpipe", Remat::Always));
        all.push(way("1f1b", Remat::Never));
        if stages > 1 {
            all.push(way("1f1b", Remat::Selective));
            all.push(way("zb-h1", Remat::Never));
        }
        if stages == 2 {
            all.push(way("interleaved:2", Remat::Never));
        }
    }
    all
}

fn print(line: &Value) -> std::io::Result<()> {
    println!("{line}");
    std::io::stdout().flush()
}

fn main() -> Result<(), Failure> {
    let mut arguments = Arguments::read()?;
    let stages: String = arguments.take("stages", "1,2,3,4")?;
    let stages = stages.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
    let work = Work::read(&mut arguments)?;
    arguments.done()?;
    let plain = Way { stages: 1, schedule: "gpipe", remat: Remat::Never };
    let expected = work.run(&plain)?;
    print(&work.line("again", &plain, &expected)?)?;
    for way in ways(&stages) {
        print(&work.line("way", &way, &expected)?)?;
    }
    Ok(())
}
