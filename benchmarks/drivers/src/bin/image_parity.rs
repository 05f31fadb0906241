//! Produces the results that `scripts/image_parity.py` compares with PyTorch. Trains an image
//! network for several steps on two stages, and writes a safetensors file.
//!
//! ```text
//! Usage: image_parity FOLDER resnet|amoebanet|unet float64|float32 MICRO_BATCHES
//! ```
//!
//! FOLDER/NETWORK-DTYPE-MICRO_BATCHES.safetensors holds:
//!
//! - `inputs`, `targets`, `0/parameter/NAME`, `1/gradient/NAME` and `3/parameter/NAME`;
//! - `1/running/NAME`, the running statistics of batch norms after the first step;
//! - `S/loss` of each step S;
//! - `output` of the evaluation after the last step;
//! - `S/mask/LAYER` of U-Net's dropouts.

use std::sync::{Arc, Mutex, PoisonError};

use gpipe::{
    CrossEntropy, Forward, Infer, Kernels, Layer, LayerError, MeanSquaredError, Pipeline, Sequence,
    Sgd, TensorSpec, layer::only,
};
use gpipe_drivers::{Failure, Numbers};
use gpipe_models::{AmoebaNet, ResNet, UNet, Variant};
use tch::{Kind, Tensor};

const STEPS: usize = 3;
/// Four micro-batches have 3, 3, 2 and 2 samples.
const SAMPLES: i64 = 10;
const SEED: u64 = 5;
const CLASSES: i64 = 10;
type Named = Vec<(String, Tensor)>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, network, dtype, micro_batches] = &arguments[..] else {
        return Err("usage: image_parity FOLDER NETWORK DTYPE MICRO_BATCHES".into());
    };
    let kind = match dtype.as_str() {
        "float64" => Kind::Double,
        "float32" => Kind::Float,
        other => return Err(format!("{other}: use float64 or float32").into()),
    };
    // AmoebaNet reduces 72 to 9, 5 and 3. Reductions pad these odd sizes.
    let (model, size) = match network.as_str() {
        "resnet" => (ResNet::resnet50(CLASSES).build()?, 64),
        "amoebanet" => (amoebanet().build()?, 72),
        "unet" => (unet().build()?, 32),
        other => return Err(format!("{other}: use resnet, amoebanet or unet").into()),
    };
    let micro_batches: usize = micro_batches.parse()?;
    let mut numbers = Numbers::default();
    let inputs = numbers.uniform(&[SAMPLES, 3, size, size])?.f_to_kind(kind)?;
    let sample = TensorSpec::new([3, 3, size, size], kind);
    let builder = Pipeline::builder(model, sample)
        .stages(2)
        // These are the kernels that PyTorch uses. With others, a value near 0 may pass a ReLU on
        // one side only, which these networks of ten small images amplify. `tests/images.rs`
        // compares oneDNN's kernels with float64 over several draws.
        .kernels(Kernels::Aten)
        .micro_batches(micro_batches)
        .seed(SEED)
        .kind(kind)
        .keep_gradients()
        .optimizer(Sgd { momentum: 0.9, ..Sgd::new(1e-3) });
    let (builder, targets, mut tensors) = if network == "unet" {
        let targets = numbers.uniform(&[SAMPLES, 1, size, size])?.f_to_kind(kind)?;
        (builder.loss(MeanSquaredError), targets, masks(&unet().build()?, kind)?)
    } else {
        (builder.loss(CrossEntropy::default()), numbers.below(CLASSES, &[SAMPLES])?, Named::new())
    };
    let mut pipeline = builder.build()?;
    tensors.extend(named("0/parameter", pipeline.parameters()?));
    for step in 1..=STEPS {
        let report = pipeline.train_step(&inputs, &targets)?;
        tensors.push((format!("{step}/loss"), Tensor::f_from_slice(&[report.loss])?));
        if step == 1 {
            tensors.extend(named("1/gradient", pipeline.gradients()?));
            let kept = pipeline.parameters()?.into_iter().filter(|(name, _)| running(name));
            tensors.extend(named("1/running", kept.collect()));
        }
    }
    tensors.extend(named(&format!("{STEPS}/parameter"), pipeline.parameters()?));
    let output =
        pipeline.predict(&inputs)?.into_iter().next().ok_or("the network has no output")?;
    tensors.extend([
        ("output".into(), output),
        ("inputs".into(), inputs),
        ("targets".into(), targets),
    ]);
    let path = format!("{folder}/{network}-{dtype}-{micro_batches}.safetensors");
    Ok(Tensor::write_safetensors(&tensors, path)?)
}

fn amoebanet() -> AmoebaNet {
    let (variant, drop_path) = (Variant::D, 0.0);
    let auxiliary = false;
    AmoebaNet {
        variant,
        cells: 3,
        filters: 16,
        channels: 3,
        classes: CLASSES,
        drop_path,
        auxiliary,
    }
}

fn unet() -> UNet {
    UNet { depth: 3, ..UNet::new(2, 8) }
}

fn running(name: &str) -> bool {
    name.ends_with(".running_mean") || name.ends_with(".running_variance")
}

fn named(prefix: &str, tensors: Named) -> Named {
    tensors.into_iter().map(|(name, tensor)| (format!("{prefix}/{name}"), tensor)).collect()
}

/// A layer that records the masks of U-Net's dropouts. Masks depend only on seed, layer, step,
/// sample and element, so another layer in the same place draws the same masks.
struct Draw {
    channels: i64,
    drawn: Arc<Mutex<Vec<Tensor>>>,
}

/// The fraction of channels that a convolution of U-Net drops.
const DROPOUT: f64 = 0.1;

impl Layer for Draw {
    fn kind(&self) -> &'static str {
        "draw"
    }

    fn parameters(&self) -> Vec<gpipe::ParameterSpec> {
        vec![gpipe::ParameterSpec::new("scale", [1], gpipe::Init::Ones)]
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        Ok(inputs.to_vec())
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let x = only(inputs)?;
        if self.channels > 0 {
            let ones = Tensor::f_ones([x.size()[0], self.channels], (x.kind(), x.device()))?;
            let mask = ctx.dropout(&ones, DROPOUT)?;
            self.drawn.lock().unwrap_or_else(PoisonError::into_inner).push(mask);
        }
        Ok(vec![x.f_mul(ctx.parameter(0)?)?])
    }
}

/// `S/mask/LAYER` of each convolution: [samples, channels], with 0 or the scale of kept channels.
fn masks(unet: &Sequence, kind: Kind) -> Result<Named, Failure> {
    let channels = |name: &str| match name.split('.').collect::<Vec<_>>()[..] {
        ["down", level, number] if number.parse::<usize>().is_ok() => {
            Ok::<_, Failure>(8 << level.parse::<i64>()?)
        }
        ["bottom", "0"] => Ok(64),
        ["bottom", _] => Ok(32),
        ["up", level, number] if number.parse::<usize>().is_ok() => {
            Ok((8 << level.parse::<i64>()?) / 2)
        }
        _ => Ok(0),
    };
    let mut model = Sequence::new();
    let mut all = Vec::new();
    for name in unet.names() {
        let drawn = Arc::<Mutex<Vec<Tensor>>>::default();
        all.push((name.to_owned(), drawn.clone()));
        model = model.push(name, Draw { channels: channels(name)?, drawn });
    }
    let mut pipeline = Pipeline::builder(model, TensorSpec::new([SAMPLES, 1], kind))
        .seed(SEED)
        .kind(kind)
        .loss(MeanSquaredError)
        .optimizer(Sgd::new(0.0))
        .build()?;
    let x = Tensor::f_zeros([SAMPLES, 1], (kind, tch::Device::Cpu))?;
    for _ in 0..STEPS {
        pipeline.train_step(&x, &x)?;
    }
    let mut found = Named::new();
    for (name, drawn) in all {
        let masks = std::mem::take(&mut *drawn.lock().unwrap_or_else(PoisonError::into_inner));
        let steps = masks.into_iter().enumerate();
        found.extend(steps.map(|(step, mask)| (format!("{}/mask/{name}", step + 1), mask)));
    }
    Ok(found)
}
