//! A process's share of a step as bytes, for the other processes. Nothing else reads the bytes, and
//! all processes run the same version.

use gpipe_bridge::memory::Stats;
use gpipe_core::{Bytes, DeviceId, Nanos, StageId, lower::Program, simulate::TimedAction};
use gpipe_runtime::{Verdict, peers::Share, report::Report};
use serde::{Deserialize, Serialize};
use tch::Tensor;

use crate::arguments::or_undefined;
use crate::processes::dtype;
use crate::stage::{Stage, feed::Outcome, offload::Moved, recorder::StageProfile};

/// See [`crate::fuzzing::share`].
#[cfg(feature = "fuzzing")]
pub(crate) fn fuzzed(bytes: &[u8], program: &Program) -> std::result::Result<(), String> {
    unpack(bytes, Some(program)).map(drop)
}

/// A process's share of a run, in serializable form.
#[derive(Serialize, Deserialize)]
struct PackedShare {
    origin: Nanos,
    reports: Vec<PackedReport>,
}

/// The report of one device. The actions themselves are in the program.
#[derive(Serialize, Deserialize)]
struct PackedReport {
    device: DeviceId,
    times: Vec<(Nanos, Nanos)>,
    sent: Bytes,
    outcomes: Vec<(StageId, PackedOutcome)>,
}

/// An [`Outcome`] whose fields can all be serialized.
#[derive(Serialize, Deserialize)]
struct PackedOutcome {
    loss_sums: Vec<Vec<f64>>,
    metric_sums: Vec<Vec<f64>>,
    outputs: Vec<Vec<Option<PackedTensor>>>,
    input_grads: Vec<Vec<Option<PackedTensor>>>,
    verdict: Option<(bool, f64, f64)>,
    memory: [u64; 3],
    levels: Vec<u64>,
    /// Offloaded bytes, and nanoseconds of waiting for their moves.
    moved: [u64; 2],
    profile: Option<StageProfile>,
}

#[derive(Serialize, Deserialize)]
struct PackedTensor {
    dtype: u8,
    shape: Vec<i64>,
    bytes: Vec<u8>,
}

pub(super) fn pack(share: &Share<Stage>) -> std::result::Result<Vec<u8>, String> {
    let report = |(device, report): &(DeviceId, Report<Stage>)| {
        let outcomes = report.outcomes.iter().map(|(stage, own)| Ok((*stage, pack_outcome(own)?)));
        Ok(PackedReport {
            device: *device,
            times: report.actions.iter().map(|timed| (timed.start, timed.end)).collect(),
            sent: report.sent,
            outcomes: outcomes.collect::<std::result::Result<_, String>>()?,
        })
    };
    let reports = share.reports.iter().map(report).collect::<std::result::Result<_, String>>()?;
    let packed = PackedShare { origin: share.origin, reports };
    postcard::to_stdvec(&packed).map_err(|error| format!("packing a step's outcome: {error}"))
}

fn pack_outcome(outcome: &Outcome) -> std::result::Result<PackedOutcome, String> {
    let output = |tensor: &Tensor| tensor.defined().then(|| pack_tensor(tensor)).transpose();
    let outputs = outcome.outputs.iter().map(|tensors| tensors.iter().map(output).collect());
    let packed = |grad: &Option<Tensor>| grad.as_ref().map(pack_tensor).transpose();
    let grads = outcome.input_grads.iter().map(|grads| grads.iter().map(packed).collect());
    let Stats { live, peak, kept } = outcome.memory;
    let profile = outcome.profile.as_ref().map(|profile| StageProfile {
        samples: profile.samples.clone(),
        layers: profile.layers.clone(),
    });
    Ok(PackedOutcome {
        loss_sums: outcome.loss_sums.clone(),
        metric_sums: outcome.metric_sums.clone(),
        outputs: outputs.collect::<std::result::Result<_, String>>()?,
        input_grads: grads.collect::<std::result::Result<_, String>>()?,
        verdict: outcome.verdict.map(|verdict| (verdict.apply, verdict.norm, verdict.scale)),
        memory: [live, peak, kept],
        levels: outcome.levels.clone(),
        moved: [outcome.moved.bytes.0, outcome.moved.waited.0],
        profile,
    })
}

fn pack_tensor(tensor: &Tensor) -> std::result::Result<PackedTensor, String> {
    let failed = |error: tch::TchError| format!("packing an output: {error}");
    let tensor = tensor.f_to(tch::Device::Cpu).and_then(|t| t.f_contiguous()).map_err(failed)?;
    let kind = tensor.kind();
    let dtype = dtype::code(kind).ok_or_else(|| format!("an output of {kind:?} cannot be sent"))?;
    let mut bytes = vec![0; tensor.numel() * tensor.kind().elt_size_in_bytes()];
    tensor.f_copy_data_u8(&mut bytes, tensor.numel()).map_err(failed)?;
    Ok(PackedTensor { dtype, shape: tensor.size(), bytes })
}

pub(super) fn unpack(
    bytes: &[u8],
    program: Option<&Program>,
) -> std::result::Result<Share<Stage>, String> {
    let packed: PackedShare = postcard::from_bytes(bytes)
        .map_err(|error| format!("what it sent of its step cannot be read: {error}"))?;
    let report = |report: PackedReport| {
        let list = program.and_then(|program| program.devices.get(report.device.index()));
        let list = list.map_or(&[][..], Vec::as_slice);
        if list.len() != report.times.len() {
            let (due, came) = (list.len(), report.times.len());
            return Err(format!("it did {came} actions on device {}, not {due}", report.device));
        }
        let timed = |(&action, (start, end))| TimedAction { action, start, end };
        let outcomes = report.outcomes.into_iter();
        let outcomes = outcomes.map(|(stage, own)| Ok((stage, unpack_outcome(own)?)));
        Ok((
            report.device,
            Report {
                actions: list.iter().zip(report.times).map(timed).collect(),
                outcomes: outcomes.collect::<std::result::Result<_, String>>()?,
                sent: report.sent,
            },
        ))
    };
    let reports = packed.reports.into_iter().map(report);
    let reports = reports.collect::<std::result::Result<_, String>>()?;
    Ok(Share { origin: packed.origin, reports })
}

fn unpack_outcome(packed: PackedOutcome) -> std::result::Result<Outcome, String> {
    let outputs = packed.outputs.into_iter();
    let unpacked = |tensor: Option<PackedTensor>| tensor.map(unpack_tensor).transpose();
    let output = |tensor| unpacked(tensor).map(or_undefined);
    let outputs = outputs.map(|tensors| tensors.into_iter().map(output).collect());
    let grads = packed.input_grads.into_iter();
    let grads = grads.map(|grads| grads.into_iter().map(unpacked).collect());
    let [live, peak, kept] = packed.memory;
    Ok(Outcome {
        loss_sums: packed.loss_sums,
        metric_sums: packed.metric_sums,
        outputs: outputs.collect::<std::result::Result<_, String>>()?,
        input_grads: grads.collect::<std::result::Result<_, String>>()?,
        verdict: packed.verdict.map(|(apply, norm, scale)| Verdict { apply, norm, scale }),
        memory: Stats { live, peak, kept },
        levels: packed.levels,
        moved: Moved { bytes: Bytes(packed.moved[0]), waited: Nanos(packed.moved[1]) },
        profile: packed.profile,
    })
}

fn unpack_tensor(packed: PackedTensor) -> std::result::Result<Tensor, String> {
    let kind = dtype::kind(packed.dtype).ok_or_else(|| format!("dtype number {}", packed.dtype))?;
    let elements = packed.shape.iter().try_fold(1_i64, |all, &size| all.checked_mul(size));
    let bytes = elements
        .and_then(|all| usize::try_from(all).ok())
        .map(|all| all.saturating_mul(kind.elt_size_in_bytes()));
    if bytes != Some(packed.bytes.len()) {
        return Err(format!("{} bytes for an output {:?}", packed.bytes.len(), packed.shape));
    }
    Tensor::f_from_data_size(&packed.bytes, &packed.shape, kind).map_err(|error| error.to_string())
}
