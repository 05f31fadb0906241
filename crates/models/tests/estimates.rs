//! Compares bytes estimated from shapes alone with what stages allocate.
#![allow(clippy::unwrap_used)] // helpers of tests may panic

use std::{fmt::Write, process::Command};

use gpipe::{
    Adam, Balance, Bytes, CrossEntropy, Kernels, Lora, Loss, MeanSquaredError, Moments, Optimizer,
    Pipeline, Remat, RmsProp, Schedule, Sequence, Sgd, TensorSpec, WithAuxiliary,
    estimate::{Rate, Training, estimate},
    layers::{ExpertNames, Rotary, RotaryScaling},
};
use gpipe_core::{
    cost::{LayerState, ModelCosts},
    memory::{StageBytes, peaks},
    partition::uniform,
    plan::{Plan, PlanDevice, StagePrediction, predict},
    simulate::LINK_CAPACITY,
};
use gpipe_models::{AmoebaNet, Experts, Llama, ResNet, Transformer, Translation, UNet, Variant};
use tch::{Device, Kind, Tensor};

const SAMPLES: i64 = 8;

struct Network {
    name: &'static str,
    model: Sequence,
    inputs: Vec<TensorSpec>,
    targets: Tensor,
    loss_rows: Option<usize>,
    /// Bytes of the tied weight's gradient. Another stage may release the owner's copy after the
    /// owner has measured its memory.
    tied: u64,
}

fn images(model: Sequence, name: &'static str, size: i64) -> Network {
    let inputs = vec![TensorSpec::new([SAMPLES, 3, size, size], Kind::Float)];
    let targets = Tensor::zeros([SAMPLES], (Kind::Int64, Device::Cpu));
    Network { name, model, inputs, targets, loss_rows: None, tied: 0 }
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
        gelu: Default::default(),
    };
    let inputs = vec![TensorSpec::new([SAMPLES, 64], Kind::Int64)];
    let targets = Tensor::zeros([SAMPLES, 64], (Kind::Int64, Device::Cpu));
    let tied = (model.vocabulary * model.features * 4) as u64;
    Network { name: "gpt", model: model.build().unwrap(), inputs, targets, loss_rows: None, tied }
}

/// Grouped queries with norms, a window in half of the blocks, biases.
fn llama(attention_dropout: f64) -> Network {
    llama_with(attention_dropout, None)
}

fn llama_with(attention_dropout: f64, experts: Option<Experts>) -> Network {
    let model = Llama {
        vocabulary: 500,
        features: 128,
        hidden: 352,
        windows: vec![None, Some(16), None, Some(16)],
        heads: 4,
        groups: 2,
        head_size: 32,
        rotary: Rotary { theta: 1e4, positions: 64, scaling: RotaryScaling::None },
        eps: 1e-6,
        qkv_bias: true,
        output_bias: false,
        mlp_bias: false,
        head_norms: true,
        experts,
        attention_dropout,
        tied: true,
        padding: None,
        std: 0.02,
    };
    let inputs = vec![TensorSpec::new([SAMPLES, 64], Kind::Int64)];
    let targets = Tensor::zeros([SAMPLES, 64], (Kind::Int64, Device::Cpu));
    let tied = (model.vocabulary * model.features * 4) as u64;
    Network { name: "llama", model: model.build().unwrap(), inputs, targets, loss_rows: None, tied }
}

/// Four experts in half of the blocks. As tokens are divided unequally, an expert's tensors are
/// larger or smaller than predicted.
fn experts() -> Network {
    let experts = Experts {
        experts: 4,
        top_k: 2,
        hidden: 256,
        normalise: true,
        balance: 0.0,
        names: ExpertNames::Qwen,
        blocks: vec![true, false, true, false],
    };
    llama_with(0.0, Some(experts))
}

/// 8,000 words.
fn large_vocabulary() -> Network {
    let model = Llama {
        vocabulary: 8000,
        features: 64,
        hidden: 128,
        windows: vec![None; 2],
        heads: 2,
        groups: 1,
        head_size: 32,
        rotary: Rotary { theta: 1e4, positions: 64, scaling: RotaryScaling::None },
        eps: 1e-6,
        qkv_bias: false,
        output_bias: false,
        mlp_bias: false,
        head_norms: false,
        experts: None,
        attention_dropout: 0.0,
        tied: true,
        padding: None,
        std: 0.02,
    };
    let tied = (model.vocabulary * model.features * 4) as u64;
    Network { model: model.build().unwrap(), tied, loss_rows: Some(48), ..llama(0.0) }
}

/// Adapters in all blocks; all else is frozen.
fn adapted(dropout: f64) -> Network {
    let own = llama(0.0);
    let lora = Lora { rank: 8, alpha: 16.0, dropout, targets: vec!["*".into()] };
    Network { model: own.model.with_lora(&lora).unwrap(), tied: 0, ..own }
}

/// Sources of 40 tokens, targets of 56.
fn translation(split_blocks: bool, attention_dropout: f64) -> Network {
    let model = Translation {
        source_vocabulary: 400,
        target_vocabulary: 500,
        pad: 1,
        features: 128,
        heads: 3,
        head_size: 32,
        hidden: 512,
        encoder_layers: 3,
        decoder_layers: 3,
        dropout: 0.1,
        attention_dropout,
        logit_clip: 10.0,
        tied: true,
        shared: false,
        split_blocks,
    };
    let inputs = [40, 56].map(|length| TensorSpec::new([SAMPLES, length], Kind::Int64)).into();
    let targets = Tensor::zeros([SAMPLES, 56], (Kind::Int64, Device::Cpu));
    let tied = (model.target_vocabulary * model.features * 4) as u64;
    Network {
        name: "translation",
        model: model.build().unwrap(),
        inputs,
        targets,
        loss_rows: None,
        tied,
    }
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
    let name = if auxiliary { "amoebanet with auxiliary" } else { "amoebanet" };
    images(model.build().unwrap(), name, 64)
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
    kernels: Kernels,
    kind: Kind,
}

/// The memory of a stage, measured and predicted.
struct Held {
    peak: f64,
    /// Predicted peaks: `least` if no message outlives its sender's action or comes ahead, `most`
    /// if each message lives until the sender learns of its release, or comes as early as it can.
    /// What is offloaded is likewise gone at once, or on its way for as long as it may be.
    least: f64,
    most: f64,
    live: u64,
    resident: u64,
}

fn held(
    network: &Network,
    case: &Case,
    loss: impl Loss + Copy,
    optimizer: impl Optimizer + Copy,
) -> Vec<Held> {
    let Case { stages, micro_batches, ref schedule, remat, kernels, kind } = *case;
    let builder = Pipeline::builder(network.model.clone(), network.inputs.clone());
    let builder = match network.loss_rows {
        Some(rows) => builder.loss_rows(rows),
        None => builder,
    };
    let mut pipeline = builder
        .stages(stages)
        .micro_batches(micro_batches)
        .schedule(schedule.clone())
        .remat(remat)
        .balance(Balance::Uniform)
        .kernels(kernels)
        .kind(kind)
        .loss(loss)
        .optimizer(optimizer)
        .average(0.9)
        .build()
        .unwrap();
    let input = |TensorSpec { shape, kind, .. }: &TensorSpec| match kind {
        Kind::Int64 => Tensor::zeros(shape, (Kind::Int64, Device::Cpu)),
        kind => Tensor::linspace(-1, 1, shape.iter().product::<i64>(), (*kind, Device::Cpu))
            .reshape(shape),
    };
    let inputs: Vec<Tensor> = network.inputs.iter().map(input).collect();
    let reports: Vec<_> =
        (0..2).map(|_| pipeline.train_step(&inputs[..], &network.targets).unwrap()).collect();
    let mut one = network.inputs.clone();
    one.iter_mut().for_each(|input| input.shape[0] = 1);
    let loss_rows = network.loss_rows;
    let training = Training {
        kind,
        kernels,
        losses: &[&loss],
        optimizer: &optimizer,
        average: true,
        loss_rows,
    };
    let samples = SAMPLES as usize;
    let sizes = [samples / micro_batches];
    let costs = estimate(&network.model, &one, &training, &sizes, &Rate::default()).unwrap();
    let costs = ModelCosts { own_memory: on_gpus(), ..costs };
    let balance = uniform(network.model.len(), stages).unwrap();
    let schedule = schedule.clone();
    let plan = Plan { balance, micro_batches, schedule, remat: remat.into() };
    let devices = vec![PlanDevice::default(); stages];
    let predicted = predict(&costs, &devices, samples, &plan).unwrap();
    let bytes = predicted.stages.iter().map(|stage| StageBytes {
        ahead: Bytes(0),
        moving: Bytes(0),
        ..stage.bytes
    });
    let bytes: Vec<_> = bytes.collect();
    let least = peaks(&predicted.program, LINK_CAPACITY, &bytes, &[]);
    let stage = |(stage, predicted): (usize, &StagePrediction)| Held {
        peak: reports.iter().map(|report| report.devices[stage].peak.0).max().unwrap() as f64,
        least: least[stage].0 as f64,
        most: predicted.peak.0 as f64,
        live: reports[1].devices[stage].live.0,
        resident: predicted.bytes.resident.0,
    };
    predicted.stages.iter().enumerate().map(stage).collect()
}

/// Whether the stages of this run are on GPUs.
fn on_gpus() -> bool {
    std::env::var("GPIPE_TEST_DEVICES").is_ok_and(|all| all.contains("cuda"))
}

/// Compares every case. `above` and `below` bound the relative error of a prediction.
fn compare(networks: &[Network], cases: &[Case], above: f64, below: f64) {
    let (mut table, mut wrong) = (String::new(), 0);
    for network in networks {
        for case in cases {
            let all = match network.name {
                "unet" => {
                    held(network, case, MeanSquaredError, Sgd { momentum: 0.9, ..Sgd::new(0.1) })
                }
                "gpt" | "translation" | "llama" => {
                    held(network, case, CrossEntropy::default(), Adam::default())
                }
                "gpt with rounded moments" => {
                    let adam = Adam { moments: Moments::BFloat16, ..Adam::default() };
                    held(network, case, CrossEntropy::default(), adam)
                }
                "amoebanet with auxiliary" => {
                    let loss = WithAuxiliary { loss: CrossEntropy::default(), weight: 0.4 };
                    held(network, case, loss, RmsProp::default())
                }
                _ => held(network, case, CrossEntropy::default(), RmsProp::default()),
            };
            for (stage, Held { peak, least, most, live, resident }) in all.into_iter().enumerate() {
                let fits = least <= peak * (1.0 + above) && most >= peak * (1.0 - below);
                let (least, most) = (100.0 * (least / peak - 1.0), 100.0 * (most / peak - 1.0));
                let fits = fits && (live == resident || live == resident + network.tied);
                wrong += usize::from(!fits);
                let mark = if fits { "" } else { " <--" };
                let Case { stages, micro_batches, schedule, remat, kernels, kind } = case;
                writeln!(
                    table,
                    "{} K={stages} M={micro_batches} {schedule} {remat} {kernels:?} {kind:?}, \
                    stage {stage}: {:.2} MB, predicted {least:+.2}% to {most:+.2}%; after the \
                    step {live}, predicted {resident}{mark}",
                    network.name,
                    peak / 1e6,
                )
                .unwrap();
            }
        }
    }
    assert_eq!(wrong, 0, "{table}");
}

fn cases(kernels: Kernels, kind: Kind) -> Vec<Case> {
    let remats = [
        Remat::Never,
        Remat::Always,
        Remat::UnlessAdjacent,
        Remat::Keep(1),
        Remat::Selective,
        Remat::Segments(2),
    ];
    let mut all = Vec::new();
    for (stages, micro_batches) in [(1, 1), (1, 4), (2, 4), (3, 4)] {
        for schedule in Schedule::SEARCHED_EXACTLY {
            for remat in remats {
                let schedule = schedule.clone();
                all.push(Case { stages, micro_batches, schedule, remat, kernels, kind });
            }
        }
    }
    all
}

/// A stage's memory for messages depends on when their receivers release them. A measured peak may
/// lie anywhere between no message and every message that may still be alive, which is what a plan
/// counts. In addition, a prediction may be up to 11% too high, because a skip whose tensor is also
/// the start of a segment counts twice. For predictions that are too low, see [`below`].
#[test]
fn oracle_predicted_peaks_are_those_of_stages() {
    let networks = [gpt(true, 0.0), translation(true, 0.0), amoebanet(false), resnet(), unet()];
    compare(&networks, &cases(Kernels::OneDnn, Kind::Float), 0.11, below());
}

/// What is held after a step is predicted to the byte: the moments count 4 bytes for a parameter.
#[test]
fn oracle_moments_in_bfloat16_are_predicted() {
    let rounded = Network { name: "gpt with rounded moments", ..gpt(true, 0.0) };
    compare(&[rounded], &some_cases(Kernels::OneDnn, Kind::Float), 0.11, below());
}

/// Maximum relative underestimate in float32, because the scratch memory of convolutions is not
/// modelled. With AVX-512, oneDNN pads small channels, which takes up to 3%. With AVX2 alone
/// (measured on Zen 3), it takes up to 9.5% of these ResNet stages.
fn below() -> f64 {
    if has("avx512f") { 0.03 } else { 0.10 }
}

/// Whether the processor has these instructions. Always true on processors other than x86, which
/// selects the narrower bounds.
fn has(instructions: &str) -> bool {
    #[cfg(target_arch = "x86_64")]
    return match instructions {
        "avx512bf16" => std::arch::is_x86_feature_detected!("avx512bf16"),
        _ => std::arch::is_x86_feature_detected!("avx512f"),
    };
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = instructions;
        true
    }
}

fn some_cases(kernels: Kernels, kind: Kind) -> Vec<Case> {
    cases(kernels, kind).into_iter().filter(|case| case.micro_batches == 4).step_by(4).collect()
}

#[test]
fn oracle_other_kernels_and_parts_hold_what_is_predicted() {
    let networks = [gpt(false, 0.1), translation(false, 0.1), amoebanet(true)];
    compare(&networks, &some_cases(Kernels::OneDnn, Kind::Float), 0.11, below());
    let networks = [gpt(true, 0.0), translation(true, 0.0), amoebanet(false), resnet(), unet()];
    compare(&networks, &some_cases(Kernels::Aten, Kind::Float), 0.11, below());
    let networks = [amoebanet(false), resnet(), unet()];
    compare(&networks, &some_cases(Kernels::ChannelsLast, Kind::Float), 0.11, below());
}

#[test]
fn oracle_offload_holds_what_is_predicted() {
    let networks = [gpt(true, 0.0), translation(true, 0.0), amoebanet(false), resnet(), unet()];
    let mut cases = Vec::new();
    for (stages, micro_batches) in [(1, 4), (2, 4), (3, 4)] {
        for schedule in Schedule::SEARCHED_EXACTLY {
            let (kernels, kind) = (Kernels::OneDnn, Kind::Float);
            let remat = Remat::Offload;
            cases.push(Case { stages, micro_batches, schedule, remat, kernels, kind });
        }
    }
    compare(&networks, &cases, 0.11, below());
}

#[test]
fn oracle_llama_holds_what_is_predicted() {
    let cases = some_cases(Kernels::Aten, Kind::Float);
    compare(&[llama(0.0), llama(0.1)], &cases, 0.11, below());
    compare(&[llama(0.0)], &some_cases(Kernels::OneDnn, Kind::Float), 0.11, below());
    compare(&[experts()], &cases, 0.11, below());
}

/// A vocabulary whose logits take more than all else, on 48 rows of 128 or of 256 at a time.
#[test]
fn oracle_rows_of_the_loss_hold_what_is_predicted() {
    let mut networks = [large_vocabulary(), large_vocabulary()];
    networks[1].loss_rows = None;
    let mut cases = some_cases(Kernels::OneDnn, Kind::Float);
    cases.retain(|case| case.stages > 1);
    compare(&networks, &cases, 0.11, below());
    let case = || Case {
        stages: 2,
        micro_batches: 1,
        schedule: Schedule::OneFOneB,
        remat: Remat::Never,
        kernels: Kernels::OneDnn,
        kind: Kind::Float,
    };
    let peak = |network: &Network| {
        held(network, &case(), CrossEntropy::default(), Adam::default())[1].peak
    };
    let (rows, all) = (peak(&networks[0]), peak(&networks[1]));
    assert!(rows < 0.5 * all, "{rows} of {all}");
}

#[test]
fn oracle_adapters_hold_what_is_predicted() {
    let mut cases = some_cases(Kernels::OneDnn, Kind::Float);
    // With three, the last stage is a frozen norm and a head: a megabyte, predicted at 1.25.
    cases.retain(|case| case.stages < 3);
    compare(&[adapted(0.0), adapted(0.1)], &cases, 0.11, below());
}

/// On a GPU a stage also holds copies of what it is fed and what it receives. A prediction may be
/// up to 6% too high, because it counts the scratch memory that convolutions need on a CPU.
#[test]
fn oracle_on_gpus_stages_hold_what_is_predicted() {
    if !on_gpus() {
        skipped("oracle_on_gpus_stages_hold_what_is_predicted", "the stages are on CPUs");
        return;
    }
    // Targets are not counted. They are a larger part where activations take two bytes.
    for (kind, below) in [(Kind::Float, 0.01), (Kind::BFloat16, 0.02)] {
        let networks = [gpt(true, 0.1), translation(true, 0.1), amoebanet(false), resnet(), unet()];
        compare(&networks, &some_cases(Kernels::Aten, kind), 0.06, below);
    }
}

/// The scratch memory of oneDNN's bfloat16 convolutions is not modelled. It takes up to 6% of these
/// stages with AVX-512. With AMX it takes up to a megabyte each, in stages of two megabytes, so AMX
/// is disabled. oneDNN reads this setting at its first use, so the test runs in a separate process.
/// Without bfloat16 instructions, oneDNN converts to float32 and back, which takes up to half of a
/// stage, so nothing is compared.
#[test]
fn oracle_bfloat16_holds_what_is_predicted() {
    if !has("avx512bf16") {
        skipped("oracle_bfloat16_holds_what_is_predicted", "the processor has no AVX512-BF16");
        return;
    }
    const INSTRUCTIONS: (&str, &str) = ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16");
    if std::env::var(INSTRUCTIONS.0).as_deref() != Ok(INSTRUCTIONS.1) {
        let mut own = Command::new(std::env::current_exe().unwrap());
        let (_, module) = module_path!().split_once("::").unwrap();
        own.args(["--exact", &format!("{module}::oracle_bfloat16_holds_what_is_predicted")]);
        let output = own.env(INSTRUCTIONS.0, INSTRUCTIONS.1).output().unwrap();
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && printed.contains("1 passed"), "{printed}");
        return;
    }
    let networks = [gpt(true, 0.0), translation(true, 0.0), amoebanet(false), resnet(), unet()];
    compare(&networks, &some_cases(Kernels::OneDnn, Kind::BFloat16), 0.11, 0.06);
    compare(&[adapted(0.0)], &some_cases(Kernels::OneDnn, Kind::BFloat16), 0.11, 0.06);
}

/// Records a skipped test in the file from which CI prints it.
fn skipped(name: &str, reason: &str) {
    if let Some(path) = std::env::var_os("GPIPE_SKIP_LOG") {
        let mut log = std::fs::OpenOptions::new().create(true).append(true).open(path).unwrap();
        std::io::Write::write_all(&mut log, format!("{name}: {reason}\n").as_bytes()).unwrap();
    }
}

/// Running AmoebaNet-D(72, 512) would need a hundred gigabytes.
#[test]
fn property_an_estimate_builds_nothing() {
    let (variant, drop_path) = (Variant::D, 0.0);
    let model = AmoebaNet {
        variant,
        cells: 72,
        filters: 512,
        channels: 3,
        classes: 1000,
        drop_path,
        auxiliary: false,
    };
    let model = model.build().unwrap();
    let training = Training {
        kind: Kind::Float,
        kernels: Kernels::OneDnn,
        losses: &[&CrossEntropy::default()],
        optimizer: &RmsProp::default(),
        average: false,
        loss_rows: None,
    };
    let one = [TensorSpec::new([1, 3, 224, 224], Kind::Float)];
    let costs = estimate(&model, &one, &training, &[1, 4, 128], &Rate::default()).unwrap();
    costs.check().unwrap();
    let bytes = |of: fn(&LayerState) -> u64| costs.layers.iter().map(of).sum::<u64>();
    let gradients = bytes(|layer| layer.gradients.0);
    assert_eq!(gradients, 4 * model.parameter_count());
    assert!(gradients > 7_000_000_000);
    // Mean square and momentum.
    assert_eq!(bytes(|layer| layer.optimizer.0), 2 * gradients);
}
