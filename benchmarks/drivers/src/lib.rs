//! Code that the benchmark programs share: arguments, a pipeline with the requested settings, its
//! run, and the line of JSON.

pub mod workload;

use std::{
    collections::{BTreeMap, HashMap},
    iter::repeat_n,
    net::TcpListener,
    process::{Child, Command},
    str::FromStr,
    sync::Arc,
    time::Duration,
};

use gpipe::{
    Balance, Device, DeviceReport, Kernels, Pipeline, PipelineBuilder, RematPolicies, Sequence,
    StepReport, TensorSpec, processes::Transport,
};
use gpipe_core::cost::{LayerCost, ModelCosts};
use gpipe_distributed::{Cluster, Meeting, Store};
use gpipe_models::Transformer;
use serde_json::{Value, json};
use tch::{Kind, Tensor};

pub type Failure = Box<dyn std::error::Error>;

/// The `key=value` arguments of the command line.
pub struct Arguments(HashMap<String, String>);

impl Arguments {
    pub fn read() -> Result<Self, Failure> {
        let mut given = HashMap::new();
        for argument in std::env::args().skip(1) {
            let (key, value) = argument.split_once('=').ok_or("write arguments as key=value")?;
            given.insert(key.to_owned(), value.to_owned());
        }
        Ok(Self(given))
    }

    /// Returns and removes the value of `key`, or the default.
    pub fn take<T: FromStr>(&mut self, key: &str, default: &str) -> Result<T, Failure>
    where
        T::Err: std::fmt::Display,
    {
        let text = self.0.remove(key).unwrap_or_else(|| default.into());
        text.parse().map_err(|error| format!("{key}={text}: {error}").into())
    }

    /// Returns the value of `key`, or the default, without removing it.
    pub fn peek<T: FromStr>(&self, key: &str, default: &str) -> Result<T, Failure>
    where
        T::Err: std::fmt::Display,
    {
        let text = self.0.get(key).map_or(default, String::as_str);
        text.parse().map_err(|error| format!("{key}={text}: {error}").into())
    }

    /// Keeps freed memory for the next step, unless `keep_freed=false`.
    pub fn keep_freed(&mut self) -> Result<(), Failure> {
        if self.take("keep_freed", "true")? {
            gpipe::keep_freed_memory();
        }
        Ok(())
    }

    /// Fails if an argument was not taken.
    pub fn done(&self) -> Result<(), Failure> {
        match self.0.keys().next() {
            Some(key) => Err(format!("there is no argument '{key}'").into()),
            None => Ok(()),
        }
    }

    /// The value of `key`, which must be one of `choices`.
    fn choose<T: Clone>(&mut self, key: &str, choices: &[(&str, T)]) -> Result<T, Failure> {
        let text: String = self.take(key, choices[0].0)?;
        let found = choices.iter().find(|(name, _)| *name == text);
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        let refusal = || format!("{key}={text}: use {}", names.join(" or "));
        Ok(found.ok_or_else(refusal)?.1.clone())
    }
}

/// Number of tokens and positions of [`gpt`].
pub const VOCABULARY: i64 = 8192;
pub const LENGTH: i64 = 128;

/// The `gpt` workload's model, with sizes from the command line. The defaults are those of [`gpt`].
pub fn gpt_of(arguments: &mut Arguments) -> Result<Transformer, Failure> {
    let default = gpt();
    let mut size = |key: &str, default: i64| arguments.take::<i64>(key, &default.to_string());
    let model = Transformer {
        vocabulary: size("vocabulary", default.vocabulary)?,
        positions: size("length", default.positions)?,
        features: size("features", default.features)?,
        heads: size("heads", default.heads)?,
        hidden: size("hidden", default.hidden)?,
        ..default
    };
    Ok(Transformer { blocks: arguments.take("blocks", &model.blocks.to_string())?, ..model })
}

/// The model of the `gpt` workload.
pub fn gpt() -> Transformer {
    Transformer {
        vocabulary: VOCABULARY,
        positions: LENGTH,
        features: 512,
        heads: 8,
        hidden: 2048,
        blocks: 8,
        dropout: 0.0,
        attention_dropout: 0.0,
        tied: false,
        split_blocks: true,
        gelu: Default::default(),
    }
}

/// A process of a multi-process run. Rank 0 starts the others with its arguments.
pub struct Processes {
    /// The rank of this process.
    pub rank: usize,
    /// The joined cluster, or `None` if this is the only process.
    pub cluster: Option<Arc<Cluster>>,
    /// The processes that this one started.
    others: Vec<Child>,
}

impl Processes {
    /// Takes `processes` and the arguments that rank 0 passes to the others, and joins the cluster.
    pub fn join(arguments: &mut Arguments, default: &str) -> Result<Self, Failure> {
        let size: usize = arguments.take("processes", default)?;
        let rank: usize = arguments.take("rank", "0")?;
        let port: u16 = arguments.take("port", "0")?;
        let (host, mut others) = ("127.0.0.1", Vec::new());
        if size == 1 {
            return Ok(Self { rank, cluster: None, others });
        }
        let store = match rank {
            0 => {
                let listener = TcpListener::bind((host, 0))?;
                let port = listener.local_addr()?.port();
                for rank in 1..size {
                    let mut command = Command::new(std::env::current_exe()?);
                    command.args(std::env::args().skip(1));
                    command.args([format!("rank={rank}"), format!("port={port}")]);
                    others.push(command.spawn()?);
                }
                Store::Serve(listener)
            }
            _ => Store::At { host: host.into(), port },
        };
        let (name, address, timeout, facts) = ("example".into(), host.into(), DEADLINE, Vec::new());
        let meeting = Meeting { rank, size, store, name, address, timeout, facts };
        Ok(Self { rank, cluster: Some(Cluster::join(meeting)?), others })
    }

    /// Configures `builder` for these processes.
    pub fn build(&self, builder: PipelineBuilder) -> PipelineBuilder {
        match &self.cluster {
            Some(cluster) => builder.processes(Arc::clone(cluster) as Arc<dyn Transport>),
            None => builder,
        }
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        drop(self.cluster.take());
        for other in &mut self.others {
            let _ = other.wait();
        }
    }
}

/// One measurement.
pub struct Measurement {
    pub samples: i64,
    steps: usize,
    folder: String,
    micro_batches: usize,
    arguments: Arguments,
    processes: Processes,
}

/// Timeout for waiting on another process.
const DEADLINE: Duration = Duration::from_secs(120);

impl Measurement {
    pub fn new(mut arguments: Arguments) -> Result<Self, Failure> {
        Ok(Self {
            processes: Processes::join(&mut arguments, "1")?,
            samples: arguments.take("samples", "32")?,
            steps: arguments.take("steps", "3")?,
            folder: arguments.take("folder", "")?,
            micro_batches: arguments.take("micro_batches", "8")?,
            arguments,
        })
    }

    /// The pipeline that the arguments request, without loss and optimizer. Each sample has shape
    /// `sample`.
    pub fn builder(
        &mut self,
        model: Sequence,
        sample: &[i64],
        kind: Kind,
    ) -> Result<PipelineBuilder, Failure> {
        let arguments = &mut self.arguments;
        let samples = (self.samples / self.micro_batches.max(1) as i64).max(1);
        let shape = [&[samples], sample].concat();
        let stages: usize = arguments.take("stages", "2")?;
        let device: Device = arguments.take("device", "cpu")?;
        let kernels = [
            ("fastest", Kernels::fastest()),
            ("aten", Kernels::Aten),
            ("channels-last", Kernels::ChannelsLast),
            ("onednn", Kernels::OneDnn),
        ];
        let dtypes = [("float32", Kind::Float), ("bfloat16", Kind::BFloat16)];
        let builder = Pipeline::builder(model, TensorSpec::new(shape, kind))
            .devices(vec![device; stages])
            .micro_batches(self.micro_batches)
            .schedule(arguments.take("schedule", "1f1b")?)
            .remat(arguments.take::<RematPolicies>("remat", "never")?)
            .early_rematerialization(arguments.take("early", "true")?)
            .threads_per_stage(arguments.take("threads", "1")?)
            .balance(arguments.take::<Balance>("balance", "cost")?)
            .kernels(arguments.choose("kernels", &kernels)?)
            .kind(arguments.choose("dtype", &dtypes)?)
            .seed(1);
        let builder = self.processes.build(builder);
        arguments.done()?;
        Ok(builder)
    }

    /// Writes the peers' starting point if a folder was given, runs the steps, if any, and prints
    /// the line.
    pub fn run(
        &self,
        workload: &str,
        mut pipeline: Pipeline,
        inputs: &Tensor,
        targets: &Tensor,
    ) -> Result<(), Failure> {
        if !self.folder.is_empty() {
            let mut tensors = pipeline.parameters()?;
            tensors.push(("inputs".into(), inputs.shallow_clone()));
            tensors.push(("targets".into(), targets.shallow_clone()));
            Tensor::write_safetensors(&tensors, format!("{}/{workload}.safetensors", self.folder))?;
        }
        if self.steps == 0 {
            return Ok(());
        }
        let reports = (0..self.steps)
            .map(|_| pipeline.train_step(inputs, targets))
            .collect::<Result<Vec<StepReport>, _>>()?;
        if self.processes.rank == 0 {
            println!("{}", json(&mut pipeline, &reports)?);
        }
        Ok(())
    }
}

/// A generator whose numbers are the same in every run, without a seed.
pub struct Numbers(u64);

impl Default for Numbers {
    fn default() -> Self {
        Self(1)
    }
}

impl Numbers {
    /// A number from 0 to 2^31 - 1.
    fn next(&mut self) -> i64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as i64
    }

    /// An int64 tensor with values from 0 to `end` - 1.
    pub fn below(&mut self, end: i64, shape: &[i64]) -> Result<Tensor, Failure> {
        let values: Vec<i64> = (0..shape.iter().product()).map(|_| self.next() % end).collect();
        Ok(Tensor::f_from_slice(&values)?.f_reshape(shape)?)
    }

    /// A float32 tensor with values from -1 to 1.
    pub fn uniform(&mut self, shape: &[i64]) -> Result<Tensor, Failure> {
        let one = |_| (self.next() as f64 / f64::from(1 << 30) - 1.0) as f32;
        let values: Vec<f32> = (0..shape.iter().product::<i64>()).map(one).collect();
        Ok(Tensor::f_from_slice(&values)?.f_reshape(shape)?)
    }
}

fn json(pipeline: &mut Pipeline, reports: &[StepReport]) -> Result<Value, Failure> {
    // The costs of one step predict the next step. A prediction from its own measurement would
    // prove nothing.
    let simulated = match reports {
        [.., before, _] => Some(pipeline.simulate(&[&before.timeline])?),
        _ => None,
    };
    let parts = |report: &StepReport| {
        let by_stage =
            |part: fn(&DeviceReport) -> f64| report.devices.iter().map(part).collect::<Vec<_>>();
        json!({
            "forward": by_stage(|stage| stage.forward.as_ms()),
            "recompute": by_stage(|stage| stage.recompute.as_ms()),
            "backward": by_stage(|stage| stage.backward.as_ms()),
            "optimizer": by_stage(|stage| stage.optimizer.as_ms()),
            "wait": by_stage(|stage| (stage.wait + stage.communication).as_ms()),
            "communication": by_stage(|stage| stage.communication.as_ms()),
            "fill_drain": by_stage(|stage| stage.fill_drain.as_ms()),
            "imbalance": by_stage(|stage| stage.imbalance.as_ms()),
            "stalls": by_stage(|stage| stage.stalls.as_ms()),
        })
    };
    let last = reports.last().ok_or("at least one step")?;
    let weights = pipeline.parameters()?;
    let gradients: usize = weights.iter().map(|(_, weight)| weight.numel() * 4).sum();
    Ok(json!({
        "loss": reports.iter().map(|report| report.loss).collect::<Vec<_>>(),
        "step_ms": reports.iter().map(|report| report.time.as_ms()).collect::<Vec<_>>(),
        "bubble": last.bubble,
        "simulated_last_ms": simulated.as_ref().map(|timeline| timeline.makespan.as_ms()),
        "simulated_bubble": simulated.as_ref().map(|timeline| timeline.bubble()),
        "balance": pipeline.balance(),
        "peak_bytes": last.devices.iter().map(|stage| stage.peak.0).collect::<Vec<_>>(),
        // All gradients in float32. They are part of a step's peak, but not live between steps.
        "gradient_bytes": gradients,
        "live_bytes": last.devices.iter().map(|stage| stage.live.0).collect::<Vec<_>>(),
        "parts_ms": reports.iter().map(parts).collect::<Vec<_>>(),
    }))
}

/// The same model with its inner layers repeated `times` times.
pub fn longer(costs: &ModelCosts, times: usize) -> ModelCosts {
    let inner = 1..costs.layers.len() - 1;
    let repeat = |all: &[LayerCost]| {
        let (first, rest) = (all[..1].to_vec(), all[inner.end..].to_vec());
        let middle = repeat_n(&all[inner.clone()], times).flatten().copied();
        first.into_iter().chain(middle).chain(rest).collect()
    };
    let sizes = |sizes: &BTreeMap<usize, Vec<_>>| {
        sizes.iter().map(|(&samples, all)| (samples, repeat(all))).collect()
    };
    let layers = repeat_n(&costs.layers[inner.clone()], times).flatten().cloned();
    let layers: Vec<_> = costs.layers[..1]
        .iter()
        .cloned()
        .chain(layers)
        .chain(costs.layers[inner.end..].iter().cloned())
        .collect();
    ModelCosts {
        trained_before: (0..=layers.len()).map(|layer| layer > 0).collect(),
        layers,
        sizes: sizes(&costs.sizes),
        under: costs.under.iter().map(|(name, own)| (name.clone(), sizes(own))).collect(),
        ..costs.clone()
    }
}
