//! AmoebaNet-B and AmoebaNet-D (Real et al. 2019), at the sizes of GPipe's paper.
//!
//! A cell takes the outputs of the two preceding cells. Five times, it picks two of the values it
//! has so far, applies an operation to each and adds the results as a new value. Values that no
//! combination used form the output.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};

use gpipe::{
    Forward, Infer, Layer, LayerError, ParameterSpec, Sequence, TensorSpec,
    estimate::{Tape, Var},
};
use tch::Tensor;

use super::{
    ChainLayer, Classifier, ImageError, LAYERS_MAX,
    auxiliary::{AUXILIARY, AuxiliaryHead},
    chain::{After, Chain, Convolution, FactorizedReduce, Step, Window},
    check_sizes,
};

/// The cell architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Variant {
    /// AmoebaNet-B. The paper trained its (18, 512) on ImageNet.
    B,
    /// AmoebaNet-D, used in the paper's table 1.
    D,
}

/// AmoebaNet(L, D): `cells` normal cells behind a stem that reduces the input eight times. The
/// first cells have `filters` filters, and each of two reduction cells doubles the number.
#[derive(Debug, Clone, PartialEq)]
pub struct AmoebaNet {
    /// The cell architecture.
    pub variant: Variant,
    /// Number of normal cells (L), a multiple of 3.
    pub cells: usize,
    /// Number of filters of the first normal cells (D), a multiple of 4.
    pub filters: i64,
    /// Number of channels of the images.
    pub channels: i64,
    /// Number of classes.
    pub classes: i64,
    /// Probability of dropping a whole path of the last cell for a sample in training, at least 0
    /// and below 1. Earlier cells use smaller probabilities (Larsson et al. 2017; Zoph et al. 2018,
    /// section 3).
    pub drop_path: f64,
    /// Whether a second classifier follows the second third of the normal cells. It is the
    /// network's second output, for [`gpipe::WithAuxiliary`].
    pub auxiliary: bool,
}

/// Number of cells in the stem.
const STEM_CELLS: usize = 2;

/// An operation that a cell applies to one of its values.
#[derive(Debug, Clone, Copy)]
enum Operation {
    Identity,
    Conv1x1,
    /// Uses a quarter of the channels internally, as does `Conv1x7And7x1`.
    Conv3x3,
    Conv1x7And7x1,
    AveragePool3,
    MaxPool2,
    MaxPool3,
    /// Depthwise and pointwise convolutions, twice.
    Separable(i64),
    /// As `Separable`, with a dilation of 2.
    DilatedSeparable(i64),
}

use Operation::{
    AveragePool3, Conv1x1, Conv1x7And7x1, Conv3x3, DilatedSeparable, Identity, MaxPool2, MaxPool3,
    Separable,
};

/// A cell architecture: five pairs of (value index, operation), and the values joined as the
/// output.
struct Genotype {
    pairs: [[(usize, Operation); 2]; 5],
    joined: &'static [usize],
}

/// The normal cell of AmoebaNet-D. The output joins values 0, 3, 4 and 6, as in the authors'
/// program, not 4, 5 and 6, as in their paper's figure. Only the former reproduces the parameter
/// counts of GPipe's table 1.
const NORMAL_D: Genotype = Genotype {
    pairs: [
        [(1, Conv1x1), (1, MaxPool3)],
        [(1, Identity), (0, Conv1x7And7x1)],
        [(0, Conv1x1), (0, Conv1x7And7x1)],
        [(2, MaxPool3), (2, Identity)],
        [(1, AveragePool3), (5, Conv1x1)],
    ],
    joined: &[0, 3, 4, 6],
};

const REDUCTION_D: Genotype = Genotype {
    pairs: [
        [(0, MaxPool2), (0, MaxPool3)],
        [(2, Identity), (1, Conv3x3)],
        [(2, Conv1x7And7x1), (2, MaxPool3)],
        [(3, Identity), (1, MaxPool2)],
        [(2, AveragePool3), (3, Conv1x1)],
    ],
    joined: &[4, 5, 6],
};

const NORMAL_B: Genotype = Genotype {
    pairs: [
        [(1, Conv1x1), (1, MaxPool3)],
        [(1, Identity), (0, Separable(3))],
        [(1, Conv1x1), (0, Separable(3))],
        [(2, Conv1x1), (2, Identity)],
        [(1, AveragePool3), (5, Conv1x1)],
    ],
    joined: &[0, 3, 4, 6],
};

const REDUCTION_B: Genotype = Genotype {
    pairs: [
        [(0, MaxPool2), (0, MaxPool3)],
        [(2, Identity), (1, Conv3x3)],
        [(2, DilatedSeparable(5)), (2, MaxPool3)],
        [(3, Identity), (1, Separable(3))],
        [(4, AveragePool3), (3, Conv1x1)],
    ],
    joined: &[5, 6],
};

impl AmoebaNet {
    /// Builds the layers: `stem`, `stem.0`, `stem.1`, the numbered cells, and `classifier`. The
    /// numbering includes reduction cells. `auxiliary` comes before the second reduction cell.
    ///
    /// # Errors
    /// Fails if `cells` is not a multiple of 3, if `filters` is not a multiple of 4, or if a size
    /// is below 1 or far too large.
    pub fn build(&self) -> Result<Sequence, ImageError> {
        let refuse = |reason: String| Err(ImageError { network: "amoebanet", reason });
        let Self { variant, cells, filters, channels, classes, drop_path, auxiliary } = *self;
        check_sizes(
            "amoebanet",
            &[("filters", filters), ("channels", channels), ("classes", classes)],
        )?;
        if cells == 0 || !cells.is_multiple_of(3) || cells > LAYERS_MAX {
            return refuse(format!("{cells} normal cells: use a multiple of 3 up to {LAYERS_MAX}"));
        }
        if !(0.0..1.0).contains(&drop_path) {
            return refuse(format!("drop_path is {drop_path}: use at least 0 and below 1"));
        }
        if filters % 4 != 0 {
            return refuse(format!(
                "{filters} filters: the stem has a quarter, use a multiple of 4"
            ));
        }
        let first = filters / 4;
        let convolution = Convolution::new("conv", channels, first, 3).stride(2);
        let stem =
            ChainLayer { kind: "stem", chain: Chain::default().relu().convolve(convolution) };
        let mut before = Before { channels: first, earlier: first, reduced: false, single: true };
        let mut model = Sequence::new().push("stem", stem);
        let third = cells / 3;
        let reductions = [third, 2 * third + 1];
        let mut scale = filters / 2;
        // Deeper cells drop more.
        let all = STEM_CELLS + cells + reductions.len();
        let dropped = |number: usize| drop_path * (number + 1) as f64 / all as f64;
        for number in 0..STEM_CELLS {
            let cell = before.cell(variant, scale, true);
            model =
                model.push(format!("stem.{number}"), Cell { drop_path: dropped(number), ..cell });
            scale *= 2;
        }
        scale = filters;
        for number in 0..cells + reductions.len() {
            let reduction = reductions.contains(&number);
            if auxiliary && number == reductions[1] {
                model = model.push("auxiliary", AuxiliaryHead::new(before.channels, classes));
            }
            scale *= if reduction { 2 } else { 1 };
            let cell = before.cell(variant, scale, reduction);
            let drop_path = dropped(number + STEM_CELLS);
            model = model.push(number.to_string(), Cell { drop_path, ..cell });
        }
        let auxiliary = auxiliary.then_some(AUXILIARY);
        let classifier = Classifier { channels: before.channels, classes, auxiliary };
        Ok(model.push("classifier", classifier))
    }
}

/// What the next cell needs to know about the preceding cells.
struct Before {
    /// Channels of the preceding cell, and of the one before it.
    channels: i64,
    earlier: i64,
    /// Whether the preceding cell halved height and width.
    reduced: bool,
    /// Whether the only output so far is the stem's, which the first cell takes twice.
    single: bool,
}

impl Before {
    /// The next cell, with `filters` filters.
    fn cell(&mut self, variant: Variant, filters: i64, reduction: bool) -> Cell {
        let genotype = match (variant, reduction) {
            (Variant::B, false) => &NORMAL_B,
            (Variant::B, true) => &REDUCTION_B,
            (Variant::D, false) => &NORMAL_D,
            (Variant::D, true) => &REDUCTION_D,
        };
        let one = |channels: i64| {
            Chain::default().relu().convolve(Convolution::new("conv", channels, filters, 1))
        };
        let earlier = match (self.reduced, self.earlier == filters) {
            (true, _) => {
                let reduce = FactorizedReduce { channels: self.earlier, outputs: filters };
                Chain::default().relu().then(Step::FactorizedReduce(reduce))
            }
            (false, true) => Chain::default(),
            (false, false) => one(self.earlier),
        };
        let operations = genotype.pairs.iter().flatten().map(|&(value, operation)| {
            // Only values from outside the cell are reduced.
            let stride = if reduction && value < 2 { 2 } else { 1 };
            let (relu, chain) = operation.chain(filters, stride).split_relu();
            Applied { value, relu, chain }
        });
        let cell = Cell {
            previous: one(self.channels),
            earlier,
            operations: operations.collect(),
            joined: genotype.joined,
            single: std::mem::take(&mut self.single),
            drop_path: 0.0,
        };
        (self.earlier, self.channels) = (self.channels, filters * genotype.joined.len() as i64);
        self.reduced = reduction;
        cell
    }
}

impl Operation {
    fn chain(self, channels: i64, stride: i64) -> Chain {
        let empty = Chain::default();
        let few = (channels / 4).max(1);
        let inner = |middle: Vec<Convolution>| {
            let chain = empty.clone().relu().convolve(Convolution::new("in", channels, few, 1));
            let chain = middle.into_iter().fold(chain, |chain, c| chain.relu().convolve(c));
            chain.relu().convolve(Convolution::new("out", few, channels, 1))
        };
        let separable = |size: i64, dilation: i64| {
            let half = |chain: Chain, depthwise, pointwise, stride| {
                let depthwise =
                    Convolution::new(depthwise, channels, channels, size).stride(stride);
                let after = After::Nothing;
                let depthwise = Convolution { groups: channels, dilation, after, ..depthwise };
                chain
                    .relu()
                    .convolve(depthwise)
                    .convolve(Convolution::new(pointwise, channels, channels, 1))
            };
            let first = half(Chain::default(), "depthwise0", "pointwise0", stride);
            half(first, "depthwise1", "pointwise1", 1)
        };
        match self {
            Identity => empty,
            Conv1x1 => empty
                .relu()
                .convolve(Convolution::new("conv", channels, channels, 1).stride(stride)),
            Conv3x3 => inner(vec![Convolution::new("conv", few, few, 3).stride(stride)]),
            Conv1x7And7x1 => {
                let wide = Convolution::new("wide", few, few, 7);
                let high = Convolution::new("high", few, few, 7);
                inner(vec![
                    Convolution { kernel: [1, 7], stride: [1, stride], ..wide },
                    Convolution { kernel: [7, 1], stride: [stride, 1], ..high },
                ])
            }
            AveragePool3 => empty.then(Step::AveragePool(Window { size: 3, stride })),
            MaxPool2 => empty.then(Step::MaxPool(Window { size: 2, stride })),
            MaxPool3 => empty.then(Step::MaxPool(Window { size: 3, stride })),
            Separable(size) => separable(size, 1),
            DilatedSeparable(size) => separable(size, 2),
        }
    }
}

/// A cell layer. Inputs: (output of the preceding cell, output of the one before it). Outputs:
/// (output of this cell, output of the preceding cell).
struct Cell {
    previous: Chain,
    earlier: Chain,
    /// The operations in pairs.
    operations: Vec<Applied>,
    joined: &'static [usize],
    /// Whether the cell takes one tensor as both inputs.
    single: bool,
    /// Probability that an operation is dropped for a sample.
    drop_path: f64,
}

/// An operation on one of a cell's values.
struct Applied {
    /// The index of the value.
    value: usize,
    /// Whether a ReLU comes first. Operations on the same value share it.
    relu: bool,
    chain: Chain,
}

impl Cell {
    /// The chains of the cell, with the prefixes of their parameters.
    fn parts(&self) -> impl Iterator<Item = (String, &Chain)> {
        let inputs =
            [("previous.".to_owned(), &self.previous), ("earlier.".to_owned(), &self.earlier)];
        let operations = self.operations.iter().enumerate();
        let side = ["left", "right"];
        let operations = operations.map(move |(number, own)| {
            (format!("{}.{}.", number / 2, side[number % 2]), &own.chain)
        });
        inputs.into_iter().chain(operations)
    }

    fn both<'a, T>(&self, inputs: &'a [T]) -> Result<(&'a T, &'a T), LayerError> {
        match (inputs, self.single) {
            ([only], true) => Ok((only, only)),
            ([previous, earlier], false) => Ok((previous, earlier)),
            _ => Err(LayerError::Shape(format!(
                "it takes the outputs of two cells, it got {}",
                inputs.len()
            ))),
        }
    }
}

impl Layer for Cell {
    fn kind(&self) -> &'static str {
        "cell"
    }

    fn parameters(&self) -> Vec<ParameterSpec> {
        self.parts().flat_map(|(prefix, chain)| chain.parameters(&prefix)).collect()
    }

    fn infer(&self, _: &mut Infer, inputs: &[TensorSpec]) -> Result<Vec<TensorSpec>, LayerError> {
        let (previous, earlier) = self.both(inputs)?;
        let mut values = vec![self.previous.infer(previous)?, self.earlier.infer(earlier)?];
        for pair in self.operations.chunks(2) {
            let outputs = pair.iter().map(|own| own.chain.infer(&values[own.value]));
            let outputs = outputs.collect::<Result<Vec<_>, _>>()?;
            if outputs.windows(2).any(|two| two[0] != two[1]) {
                return Err(LayerError::Shape(format!("a cell cannot add {outputs:?}")));
            }
            values.extend(outputs.into_iter().next());
        }
        let mut shape = values[self.joined[0]].shape.clone();
        shape[1] = self.joined.iter().map(|&value| values[value].shape[1]).sum();
        Ok(vec![TensorSpec::new(shape, previous.kind), previous.clone()])
    }

    fn may_end_early(&self) -> bool {
        true
    }

    fn forward(&self, ctx: &mut Forward, inputs: &[Tensor]) -> Result<Vec<Tensor>, LayerError> {
        let (previous, earlier) = self.both(inputs)?;
        let mut values = vec![self.previous.forward(ctx, 0, previous)?];
        let mut first = self.previous.count();
        values.push(self.earlier.forward(ctx, first, earlier)?);
        first += self.earlier.count();
        let mut active: BTreeMap<usize, Tensor> = BTreeMap::new();
        for pair in self.operations.chunks(2) {
            let mut sum: Option<Tensor> = None;
            for Applied { value, relu, chain } in pair {
                let mut input = &values[*value];
                if *relu {
                    input = match active.entry(*value) {
                        Entry::Occupied(made) => made.into_mut(),
                        Entry::Vacant(place) => place.insert(input.f_relu()?),
                    };
                }
                let output = chain.forward(ctx, first, input)?;
                let output = match chain.is_identity() {
                    true => output,
                    false => drop_path(ctx, &output, self.drop_path)?,
                };
                first += chain.count();
                sum = Some(match sum {
                    None => output,
                    Some(other) => other.f_add(&output)?,
                });
            }
            values.extend(sum);
        }
        let joined: Vec<&Tensor> = self.joined.iter().map(|&value| &values[value]).collect();
        Ok(vec![ctx.concatenate(&joined, 1)?, previous.shallow_clone()])
    }

    fn flops(&self, inputs: &[TensorSpec]) -> Option<f64> {
        let (previous, earlier) = self.both(inputs).ok()?;
        let mut values =
            vec![self.previous.infer(previous).ok()?, self.earlier.infer(earlier).ok()?];
        let mut sum = self.previous.flops(previous) + self.earlier.flops(earlier);
        let mut active = BTreeSet::new();
        for pair in self.operations.chunks(2) {
            sum += pair.iter().map(|own| own.chain.flops(&values[own.value])).sum::<f64>();
            let own = pair.first()?;
            let output = own.chain.infer(&values[own.value]).ok()?;
            sum += output.elements();
            values.push(output);
            for own in pair.iter().filter(|own| own.relu) {
                if active.insert(own.value) {
                    sum += values[own.value].elements();
                }
            }
        }
        Some(sum)
    }

    fn record(&self, tape: &mut Tape, inputs: &[Var]) -> Option<Vec<Var>> {
        let (&previous, &earlier) = self.both(inputs).ok()?;
        let mut values = vec![self.previous.record(tape, 0, previous)?];
        let mut first = self.previous.count();
        values.push(self.earlier.record(tape, first, earlier)?);
        first += self.earlier.count();
        let mut active: BTreeMap<usize, Var> = BTreeMap::new();
        for pair in self.operations.chunks(2) {
            let mut sum: Option<Var> = None;
            for Applied { value, relu, chain } in pair {
                let mut input = values[*value];
                if *relu {
                    input =
                        *active.entry(*value).or_insert_with(|| tape.elementwise_by_output(input));
                }
                let output = chain.record(tape, first, input)?;
                first += chain.count();
                let own = match self.drop_path > 0.0 && !chain.is_identity() {
                    true => record_drop_path(tape, output),
                    false => output,
                };
                sum = Some(match sum {
                    None => own,
                    Some(other) => {
                        let both = tape.add(other, own);
                        let made = [other, own].into_iter().filter(|var| !values.contains(var));
                        made.for_each(|var| tape.release(var));
                        both
                    }
                });
            }
            values.extend(sum);
        }
        let joined: Vec<Var> = self.joined.iter().map(|&value| values[value]).collect();
        let mut spec = tape.spec(*joined.first()?).clone();
        let channels = |var: &Var| tape.spec(*var).shape.get(1).copied();
        *spec.shape.get_mut(1)? = joined.iter().map(channels).sum::<Option<i64>>()?;
        Some(vec![tape.joined(&joined, spec), previous])
    }
}

/// Records [`drop_path`] on the tape and releases `x`.
fn record_drop_path(tape: &mut Tape, x: Var) -> Var {
    let spec = tape.spec(x);
    let samples = spec.shape.first().copied().unwrap_or(0) as f64;
    let mask = samples * spec.kind.elt_size_in_bytes() as f64;
    let kept = tape.scaled(x, mask);
    tape.release(x);
    kept
}

/// Drop path: in training, zeroes whole samples of `x` [samples, ...] with probability `p` and
/// scales up the others. The choice depends only on seed, layer, step and global sample.
fn drop_path(ctx: &mut Forward, x: &Tensor, p: f64) -> Result<Tensor, LayerError> {
    if !ctx.training() || p <= 0.0 {
        return Ok(x.shallow_clone());
    }
    let samples = x.size().first().copied().unwrap_or(0);
    let mask = ctx.dropout(&Tensor::f_ones([samples, 1, 1, 1], (x.kind(), x.device()))?, p)?;
    Ok(x.f_mul(&mask)?)
}
