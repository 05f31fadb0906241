//! Compares the paper's tables 1, 2 and 3 (Huang et al. 2019) with simulations from shapes and data
//! sheets, and measures how long the simulations take. Nothing else is measured, and no number is
//! fitted to the paper. `docs/design/simulated-scale.md` explains the differences.
//!
//! Usage: `paper_tables [throughput|memory|scale]`

use std::time::Instant;

use gpipe::{
    CrossEntropy, Kernels, Nanos, Remat, RmsProp, Schedule, Sequence, TensorSpec,
    estimate::{Rate, Training, estimate},
};
use gpipe_core::{
    Bytes, MicroBatch,
    cost::{ModelCosts, Transport},
    lower::{Topology, lower},
    partition::by_cost,
    plan::{Plan, PlanDevice, Prediction, predict},
    simulate::{Costs, LinkCost, simulate_with_room},
    topology::{Across, of_cut, ranges},
};
use gpipe_models::{AmoebaNet, Transformer, Variant};
use tch::Kind;

type Failure = Box<dyn std::error::Error>;

/// An accelerator, as described by its maker's data sheet.
#[derive(Clone, Copy)]
struct Accelerator {
    name: &'static str,
    flops_per_s: f64,
    bytes_per_s: f64,
    link_bytes_per_s: u64,
    memory: Bytes,
    kind: Kind,
}

const GIB: u64 = 1 << 30;

/// Half of a chip: 45 TFLOP/s in bfloat16, 600 GB/s, 16 GiB. A link of the torus has 496 Gbit/s.
const TPU_V2_CORE: Accelerator = Accelerator {
    name: "Cloud TPU v2 core",
    flops_per_s: 22.5e12,
    bytes_per_s: 300e9,
    link_bytes_per_s: 62_000_000_000,
    memory: Bytes(8 * GIB),
    kind: Kind::BFloat16,
};
/// Half of a chip: 123 TFLOP/s in bfloat16, 900 GB/s, 32 GiB. A link has 656 Gbit/s.
const TPU_V3_CORE: Accelerator = Accelerator {
    name: "Cloud TPU v3 core",
    flops_per_s: 61.5e12,
    bytes_per_s: 450e9,
    link_bytes_per_s: 82_000_000_000,
    memory: Bytes(16 * GIB),
    kind: Kind::BFloat16,
};
/// 9.3 TFLOP/s in float32, 732 GB/s, 16 GiB. PCIe 3 x16 moves about 12 GB/s.
const P100: Accelerator = Accelerator {
    name: "P100 over PCIe",
    flops_per_s: 9.3e12,
    bytes_per_s: 732e9,
    link_bytes_per_s: 12_000_000_000,
    memory: Bytes(16 * GIB),
    kind: Kind::Float,
};

fn amoebanet(cells: usize, filters: i64) -> Result<Sequence, Failure> {
    let (variant, channels, classes, drop_path) = (Variant::D, 3, 1000, 0.0);
    let auxiliary = false;
    Ok(AmoebaNet { variant, cells, filters, channels, classes, drop_path, auxiliary }.build()?)
}

fn transformer(blocks: usize) -> Result<Sequence, Failure> {
    let model = Transformer {
        vocabulary: 32_000,
        positions: 1024,
        features: 2048,
        heads: 32,
        hidden: 8192,
        blocks,
        dropout: 0.0,
        attention_dropout: 0.0,
        tied: false,
        split_blocks: false,
        gelu: Default::default(),
    };
    Ok(model.build()?)
}

/// A network and the size of its mini-batch.
struct Workload {
    model: Sequence,
    input: TensorSpec,
    samples: usize,
}

fn images(cells: usize, filters: i64) -> Result<Workload, Failure> {
    let (model, input) =
        (amoebanet(cells, filters)?, TensorSpec::new([1, 3, 224, 224], Kind::Float));
    Ok(Workload { model, input, samples: 128 })
}

fn text(blocks: usize) -> Result<Workload, Failure> {
    let (model, input) = (transformer(blocks)?, TensorSpec::new([1, 1024], Kind::Int64));
    Ok(Workload { model, input, samples: 32 })
}

/// Costs on `device` for equal micro-batches. The optimizer is RMSProp without momentum, which
/// takes 12 bytes per parameter including weight and gradient.
fn costs(
    work: &Workload,
    device: &Accelerator,
    micro_batches: usize,
) -> Result<ModelCosts, Failure> {
    let training = Training {
        kind: device.kind,
        kernels: Kernels::Aten,
        losses: &[&CrossEntropy::default()],
        optimizer: &RmsProp { momentum: 0.0, ..RmsProp::default() },
        average: false,
        loss_rows: None,
    };
    let Accelerator { flops_per_s, bytes_per_s, .. } = *device;
    let rate = Rate { flops_per_s, bytes_per_s, latency: Nanos(0) };
    let sizes = [work.samples.div_ceil(micro_batches), (work.samples / micro_batches).max(1)];
    let mut costs =
        estimate(&work.model, std::slice::from_ref(&work.input), &training, &sizes, &rate)?;
    costs.transport = Transport { latency: Nanos(0), bytes_per_s: device.link_bytes_per_s };
    Ok(costs)
}

/// How the sequence is cut.
#[derive(Clone, Copy, PartialEq)]
enum Cut {
    /// Minimizes the time of the slowest stage, by the layers' times.
    Slowest,
    /// Minimizes the variance of the stages' floating-point operations, as in the paper.
    Variance,
    /// Minimizes the bytes of the fullest stage.
    Bytes,
}

fn cut(costs: &ModelCosts, samples: usize, stages: usize, cut: Cut) -> Result<Vec<usize>, Failure> {
    let layers = costs.at(samples, &Schedule::GPipe);
    let of_layers = layers.iter().zip(&costs.layers);
    let time = || of_layers.clone().map(|(c, _)| (c.forward + c.rematerialize + c.backward).0);
    Ok(match cut {
        Cut::Slowest => by_cost(&time().collect::<Vec<_>>(), stages)?,
        Cut::Variance => least_variance(
            &costs.layers.iter().map(|layer| layer.flops).collect::<Vec<_>>(),
            stages,
        ),
        Cut::Bytes => {
            let bytes = of_layers.map(|(cost, state)| {
                (state.parameters + state.gradients + state.optimizer + cost.kept).0
            });
            by_cost(&bytes.collect::<Vec<_>>(), stages)?
        }
    })
}

/// The cut into cells with the least sum of squares. As the total is fixed, this minimizes the
/// variance.
fn least_variance(costs: &[u64], stages: usize) -> Vec<usize> {
    let layers = costs.len();
    let mut sums = vec![0.0];
    for &cost in costs {
        sums.push(sums[sums.len() - 1] + cost as f64);
    }
    // best[k][l]: the least sum for k cells over the first l layers, and where the last cell
    // starts.
    let mut best = vec![vec![(f64::INFINITY, 0); layers + 1]; stages + 1];
    best[0][0].0 = 0.0;
    for stage in 1..=stages {
        for end in stage..=layers {
            for start in stage - 1..end {
                let cell: f64 = sums[end] - sums[start];
                let total = best[stage - 1][start].0 + cell * cell;
                if total < best[stage][end].0 {
                    best[stage][end] = (total, start);
                }
            }
        }
    }
    let (mut balance, mut end) = (Vec::new(), layers);
    for stage in (1..=stages).rev() {
        let start = best[stage][end].1;
        balance.insert(0, end - start);
        end = start;
    }
    balance
}

fn run(
    work: &Workload,
    device: &Accelerator,
    (stages, micro_batches): (usize, usize),
    how: Cut,
    remat: Remat,
) -> Result<Prediction, Failure> {
    let micro_batches = micro_batches.min(work.samples);
    let costs = costs(work, device, micro_batches)?;
    let balance = cut(&costs, work.samples.div_ceil(micro_batches), stages, how)?;
    let plan = Plan { balance, micro_batches, schedule: Schedule::GPipe, remat: remat.into() };
    Ok(predict(&costs, &vec![PlanDevice::default(); stages], work.samples, &plan)?)
}

/// Time of the slowest stage's forward, re-materialization and backward, relative to the mean
/// stage.
fn imbalance(prediction: &Prediction) -> f64 {
    let time = |stage: &gpipe_core::plan::StagePrediction| {
        (stage.cost.forward + stage.cost.rematerialize + stage.cost.backward).0 as f64
    };
    let times: Vec<f64> = prediction.stages.iter().map(time).collect();
    times.iter().copied().fold(0.0, f64::max) * times.len() as f64 / times.iter().sum::<f64>()
}

const STAGES: [usize; 3] = [2, 4, 8];

/// Prints one network of table 2 or 3: throughput relative to that of the first cell.
fn throughput(
    name: &str,
    work: &Workload,
    device: &Accelerator,
    micro_batches: &[usize],
    paper: &[[f64; 3]],
) -> Result<(), Failure> {
    let arithmetic = Accelerator { bytes_per_s: 1e18, link_bytes_per_s: 0, ..*device };
    let ways = [(device, Cut::Slowest), (device, Cut::Variance), (&arithmetic, Cut::Slowest)];
    println!(
        "\n{name}, {}, mini-batch {}, GPipe with re-materialization",
        device.name, work.samples
    );
    println!(
        "| | paper | ours | with the paper's cut | arithmetic alone | step | bubble | imbalance, \
        ours | with the paper's cut | exchange | fullest stage |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    let base = (STAGES[0], micro_batches[0]);
    let mut bases = Vec::new();
    for (device, cut) in ways {
        bases.push(run(work, device, base, cut, Remat::Always)?.step().0 as f64);
    }
    for (&micro_batches, paper) in micro_batches.iter().zip(paper) {
        for (stages, paper) in STAGES.into_iter().zip(paper) {
            let mut ratios = Vec::new();
            for ((device, cut), base) in ways.iter().zip(&bases) {
                let step = run(work, device, (stages, micro_batches), *cut, Remat::Always)?.step();
                ratios.push(base / step.0 as f64);
            }
            let ours = run(work, device, (stages, micro_batches), Cut::Slowest, Remat::Always)?;
            let theirs = run(work, device, (stages, micro_batches), Cut::Variance, Remat::Always)?;
            let free = Accelerator { link_bytes_per_s: 0, ..*device };
            let free = run(work, &free, (stages, micro_batches), Cut::Slowest, Remat::Always)?;
            println!(
                "| K={stages}, M={micro_batches} | {paper} | {:.2} | {:.2} | {:.2} | {:.1} ms | \
                {:.1}% | {:.3} | {:.3} | {:.1}% | {} |",
                ratios[0],
                ratios[1],
                ratios[2],
                ours.step().as_ms(),
                100.0 * ours.bubble(),
                imbalance(&ours),
                imbalance(&theirs),
                100.0 * (1.0 - free.step().0 as f64 / ours.step().0 as f64),
                ours.stages.iter().map(|stage| stage.peak).max().unwrap_or_default(),
            );
        }
    }
    Ok(())
}

fn table_2_and_3() -> Result<(), Failure> {
    let am = [[1.0, 1.13, 1.38], [1.07, 1.26, 1.72], [1.21, 1.84, 3.48]];
    let tr = [[1.0, 1.07, 1.3], [1.7, 3.2, 4.8], [1.8, 3.4, 6.3]];
    println!("## Table 2: throughput over that of K = 2, M = 1");
    throughput("AmoebaNet-D(18, 256)", &images(18, 256)?, &TPU_V2_CORE, &[1, 4, 32], &am)?;
    throughput("Transformer-48", &text(48)?, &TPU_V3_CORE, &[1, 4, 32], &tr)?;
    println!("\n## Table 3: without a fast interconnect, over K = 2");
    throughput("AmoebaNet-D(18, 128)", &images(18, 128)?, &P100, &[32], &[[1.0, 1.7, 2.7]])?;
    throughput("Transformer-24", &text(24)?, &P100, &[32], &[[1.0, 1.8, 3.3]])
}

/// The largest number up to `most` that fits, or 0 if none does.
fn largest(most: usize, fits: &dyn Fn(usize) -> Result<bool, Failure>) -> Result<usize, Failure> {
    let (mut low, mut high) = (0, most + 1);
    while high - low > 1 {
        let middle = usize::midpoint(low, high);
        match fits(middle)? {
            true => low = middle,
            false => high = middle,
        }
    }
    Ok(low)
}

/// The smallest peak of the fullest stage, over all micro-batches and cuts, with its micro-batches.
fn least_peak(
    work: &Workload,
    device: &Accelerator,
    stages: usize,
    naive: bool,
) -> Result<(Bytes, usize), Failure> {
    let choices = if naive { vec![1] } else { vec![4, 8, 16, 32, 64, 128] };
    let remat = if naive { Remat::Never } else { Remat::Always };
    let mut least = (Bytes(u64::MAX), 0);
    for micro_batches in choices.into_iter().filter(|&count| count <= work.samples) {
        for cut in [Cut::Slowest, Cut::Bytes] {
            let found = run(work, device, (stages, micro_batches), cut, remat)?;
            let peak = found.stages.iter().map(|stage| stage.peak).max().unwrap_or_default();
            least = least.min((peak, micro_batches));
        }
    }
    Ok(least)
}

/// A column of table 1: its name, K, whether it is the naive one, the paper's model and its
/// parameters in millions.
type Column = (&'static str, usize, bool, &'static str, f64);

/// Prints a row. `found` and `papers` are the memory of the largest model and of the paper's model.
fn row(
    column: &Column,
    ours: String,
    work: &Workload,
    found: (Bytes, usize),
    papers: (Bytes, usize),
) {
    let (name, stages, _, paper, millions) = column;
    let own = work.model.parameter_count() as f64 / 1e6;
    let ratio = own / millions;
    println!(
        "| {name} (K={stages}) | {paper}: {millions}M | {ours}: {own:.0}M | {ratio:.2} | M={}: {} \
        | M={}: {} |",
        found.1, found.0, papers.1, papers.0
    );
}

/// Upper bound of the search for a transformer, as a multiple of the paper's number of layers.
const MULTIPLE: usize = 4;

fn table_1() -> Result<(), Failure> {
    println!("## Table 1: the largest model");
    let float = |device: Accelerator| Accelerator { kind: Kind::Float, ..device };
    for (device, label) in [(TPU_V2_CORE, "bfloat16"), (float(TPU_V2_CORE), "float32")] {
        println!(
            "\nAmoebaNet-D(L, D), mini-batch 128, {} in {label}, {}",
            device.name, device.memory
        );
        println!(
            "| | paper | ours | of the paper's | fullest stage, ours | fullest stage, the paper's \
            model |"
        );
        println!("|---|---|---|---|---|---|");
        let columns: [(Column, usize, i64); 5] = [
            (("Naive", 1, true, "(18, 208)", 82.0), 18, 208),
            (("Pipeline-1", 1, false, "(18, 416)", 318.0), 18, 416),
            (("Pipeline-2", 2, false, "(18, 544)", 542.0), 18, 544),
            (("Pipeline-4", 4, false, "(36, 544)", 1050.0), 36, 544),
            (("Pipeline-8", 8, false, "(72, 512)", 1800.0), 72, 512),
        ];
        for (column, cells, papers) in columns {
            let (_, stages, naive, ..) = column;
            let fits = |sixteens: usize| -> Result<bool, Failure> {
                let work = images(cells, 16 * sixteens as i64)?;
                Ok(least_peak(&work, &device, stages, naive)?.0 <= device.memory)
            };
            let filters = 16 * largest(64, &fits)?;
            let work = images(cells, filters.max(16) as i64)?;
            let found = least_peak(&work, &device, stages, naive)?;
            let papers = least_peak(&images(cells, papers)?, &device, stages, naive)?;
            row(&column, format!("({cells}, {filters})"), &work, found, papers);
        }
    }
    for (device, label) in [(TPU_V3_CORE, "bfloat16"), (float(TPU_V3_CORE), "float32")] {
        println!("\nTransformer, mini-batch 32, {} in {label}, {}", device.name, device.memory);
        println!(
            "| | paper | ours | of the paper's | fullest stage, ours | fullest stage, the paper's \
            model |"
        );
        println!("|---|---|---|---|---|---|");
        let columns: [(Column, usize); 5] = [
            (("Naive", 1, true, "3 layers", 282.2), 3),
            (("Pipeline-1", 1, false, "13 layers", 785.8), 13),
            (("Pipeline-8", 8, false, "103 layers", 5300.0), 103),
            (("Pipeline-32", 32, false, "415 layers", 21_000.0), 415),
            (("Pipeline-128", 128, false, "1663 layers", 83_900.0), 1663),
        ];
        for (column, papers) in columns {
            let (_, stages, naive, ..) = column;
            let fits = |blocks: usize| -> Result<bool, Failure> {
                let enough = blocks + 2 >= stages;
                Ok(!enough
                    || least_peak(&text(blocks)?, &device, stages, naive)?.0 <= device.memory)
            };
            let blocks = largest(MULTIPLE * papers, &fits)?;
            let work = text(blocks.max(1))?;
            let found = least_peak(&work, &device, stages, naive)?;
            let papers = least_peak(&text(papers)?, &device, stages, naive)?;
            row(&column, format!("{blocks} layers"), &work, found, papers);
        }
    }
    Ok(())
}

/// Measures how long a step with given stages and micro-batches takes to simulate.
fn scale() -> Result<(), Failure> {
    println!("## Time to simulate, in seconds");
    println!("| K | M | schedule | actions | lowering | simulating | with memory (predict) |");
    println!("|---|---|---|---|---|---|---|");
    for (stages, micro_batches) in [(8, 32), (64, 512), (128, 1024), (512, 1024), (512, 4096)] {
        for schedule in Schedule::SEARCHED_EXACTLY {
            let started = Instant::now();
            let compute = Remat::Always.apply(&schedule.actions(stages, micro_batches));
            let (topology, _): (Topology, _) = of_cut(&ranges(&vec![1; stages]), Across::default());
            let program = lower(&compute, &topology, micro_batches)?;
            let lowering = started.elapsed();
            let actions: usize = program.devices.iter().map(Vec::len).sum();
            let link = LinkCost { latency: Nanos(1), forward: Nanos(1), backward: Nanos(1) };
            let links = vec![link; topology.edges.len()];
            let costs = Costs { links, smaller_from: None::<MicroBatch>, ..Costs::unit(stages) };
            let started = Instant::now();
            let (_, timeline) = simulate_with_room(&program, &costs)?;
            let simulating = started.elapsed();
            drop((program, timeline));
            let predicting = predicted(stages, micro_batches, schedule.clone())?;
            println!(
                "| {stages} | {micro_batches} | {schedule} | {actions} | {:.2} | {:.2} | \
                {predicting:.2} |",
                lowering.as_secs_f64(),
                simulating.as_secs_f64()
            );
        }
    }
    Ok(())
}

/// Seconds that `predict` takes, including the bytes of every stage.
fn predicted(stages: usize, micro_batches: usize, schedule: Schedule) -> Result<f64, Failure> {
    let work = Workload { samples: micro_batches, ..text(stages)? };
    let costs = costs(&work, &TPU_V3_CORE, micro_batches)?;
    let balance = cut(&costs, 1, stages, Cut::Slowest)?;
    let plan = Plan { balance, micro_batches, schedule, remat: Remat::Always.into() };
    let devices = vec![PlanDevice::default(); stages];
    let started = Instant::now();
    predict(&costs, &devices, micro_batches, &plan)?;
    Ok(started.elapsed().as_secs_f64())
}

fn main() -> Result<(), Failure> {
    match std::env::args().nth(1).as_deref() {
        Some("throughput") => table_2_and_3(),
        Some("memory") => table_1(),
        Some("scale") => scale(),
        _ => Err("say what: throughput, memory or scale".into()),
    }
}
