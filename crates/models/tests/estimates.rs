//! Bytes that are estimated from shapes alone, held to what stages then allocate.

use std::fmt::Write;

use gpipe::{
    Adam, Balance, CrossEntropy, Kernels, Loss, MeanSquaredError, Optimizer, Pipeline, Remat,
    RmsProp, Schedule, Sequence, Sgd, TensorSpec,
    estimate::{Rate, Training, estimate},
};
use gpipe_core::{
    partition::uniform,
    plan::{Plan, PlanDevice, predict},
};
use gpipe_models::{AmoebaNet, ResNet, Transformer, UNet, Variant};
use tch::{Device, Kind, Tensor};

const SAMPLES: i64 = 8;

struct Network {
    name: &'static str,
    model: Sequence,
    input: TensorSpec,
    targets: Tensor,
}

fn images(model: Sequence, name: &'static str, size: i64) -> Network {
    let input = TensorSpec::new([SAMPLES, 3, size, size], Kind::Float);
    let targets = Tensor::zeros([SAMPLES], (Kind::Int64, Device::Cpu));
    Network { name, model, input, targets }
}

fn gpt(split_blocks: bool, attention_dropout: f64) -> Network {
    let model = Transformer {
        vocabulary: 500,
        positions: 64,
        features: 128,
        heads: 4,
        hidden: 512,
        blocks: 4,
        dropout: 0.1,
        attention_dropout,
        tied: true,
        split_blocks,
    };
    let input = TensorSpec::new([SAMPLES, 64], Kind::Int64);
    let targets = Tensor::zeros([SAMPLES, 64], (Kind::Int64, Device::Cpu));
    Network { name: "gpt", model: model.build().unwrap(), input, targets }
}

fn amoebanet(auxiliary: bool) -> Network {
    let (variant, drop_path) = (Variant::D, 0.0);
    let model = AmoebaNet {
        variant,
        cells: 3,
        filters: 32,
        channels: 3,
        classes: 10,
        drop_path,
        auxiliary,
    };
    images(model.build().unwrap(), "amoebanet", 64)
}

fn resnet() -> Network {
    let model = ResNet { blocks: [2, 2, 2, 2], width: 16, channels: 3, classes: 10 };
    images(model.build().unwrap(), "resnet", 64)
}

fn unet() -> Network {
    let model = UNet { depth: 3, ..UNet::new(2, 16) };
    let mut network = images(model.build().unwrap(), "unet", 64);
    network.targets = Tensor::zeros([SAMPLES, 1, 64, 64], (Kind::Float, Device::Cpu));
    network
}

struct Case {
    stages: usize,
    micro_batches: usize,
    schedule: Schedule,
    remat: Remat,
}

/// Measured and predicted bytes of each stage.
fn held(
    network: &Network,
    case: &Case,
    loss: impl Loss + Copy,
    optimizer: impl Optimizer + Copy,
) -> Vec<[u64; 4]> {
    let Case { stages, micro_batches, schedule, remat } = *case;
    let mut pipeline = Pipeline::builder(network.model.clone(), network.input.clone())
        .stages(stages)
        .micro_batches(micro_batches)
        .schedule(schedule)
        .remat(remat)
        .balance(Balance::Uniform)
        .kernels(Kernels::OneDnn)
        .loss(loss)
        .optimizer(optimizer)
        .build()
        .unwrap();
    let inputs = match network.input.kind {
        Kind::Int64 => Tensor::zeros(&network.input.shape, (Kind::Int64, Device::Cpu)),
        kind => Tensor::linspace(-1, 1, network.input.elements() as i64, (kind, Device::Cpu))
            .reshape(&network.input.shape),
    };
    let reports: Vec<_> =
        (0..2).map(|_| pipeline.train_step(&inputs, &network.targets).unwrap()).collect();
    let mut one = network.input.clone();
    one.shape[0] = 1;
    let (kind, kernels) = (Kind::Float, Kernels::OneDnn);
    let training = Training { kind, kernels, loss: &loss, optimizer: &optimizer, average: false };
    let sizes = [SAMPLES as usize / micro_batches];
    let costs = estimate(&network.model, &[one], &training, &sizes, &Rate::default()).unwrap();
    let balance = uniform(network.model.len(), stages).unwrap();
    let plan = Plan { balance, micro_batches, schedule, remat: remat.into() };
    let devices = vec![PlanDevice::default(); stages];
    let prediction = predict(&costs, &devices, SAMPLES as usize, &plan).unwrap();
    prediction
        .stages
        .iter()
        .enumerate()
        .map(|(stage, predicted)| {
            let peak = reports.iter().map(|report| report.stages[stage].peak.0).max().unwrap();
            let live = reports[1].stages[stage].live.0;
            [peak, predicted.peak.0, live, predicted.bytes.resident.0]
        })
        .collect()
}

#[test]
fn oracle_predicted_peaks_are_those_of_stages() {
    let mut table = String::new();
    let (mut worst_above, mut worst_below) = (0.0_f64, 0.0_f64);
    let networks = [gpt(true, 0.0), amoebanet(false), resnet(), unet()];
    for network in &networks {
        for stages in [1, 2] {
            for micro_batches in [1, 4] {
                for schedule in Schedule::TRAINING {
                    for remat in [
                        Remat::Never,
                        Remat::Always,
                        Remat::UnlessAdjacent,
                        Remat::Keep(1),
                        Remat::Segments(2),
                    ] {
                        let case = Case { stages, micro_batches, schedule, remat };
                        let all = match network.name {
                            "unet" => held(network, &case, MeanSquaredError, Sgd::new(0.1)),
                            "gpt" => held(network, &case, CrossEntropy::default(), Adam::default()),
                            _ => held(network, &case, CrossEntropy::default(), RmsProp::default()),
                        };
                        for (stage, [peak, predicted, live, resident]) in all.iter().enumerate() {
                            let ratio = *predicted as f64 / *peak as f64 - 1.0;
                            worst_above = worst_above.max(ratio);
                            worst_below = worst_below.min(ratio);
                            let name = network.name;
                            writeln!(
                                table,
                                "{name:9} K{stages} M{micro_batches} {schedule:6} {remat:16} stage {stage}: measured {peak:9} predicted {predicted:9} {:+6.2}%  live {live} {:+}",
                                100.0 * ratio, *resident as i64 - *live as i64
                            )
                            .unwrap();
                        }
                    }
                }
            }
        }
    }
    println!("{table}");
    assert!(worst_above < 0.10 && worst_below > -0.03, "{table}");
}
