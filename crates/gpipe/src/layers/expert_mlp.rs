//! The feed-forward part of a Llama block as a mixture of experts.
//!
//! ```text
//! x [T, d] -- router --> p = softmax(x W) [T, E] -- top k --> experts and weights of each token
//! each token k times, sorted by expert:  e0 e0 e0 | e1 | e3 e3 ...      [T k, d]
//! each expert on its rows, one after the other; unsorted, weighted, summed over k
//! ```
//!
//! Sorting makes each expert's rows contiguous. Summing a token's experts in a fixed order keeps
//! results independent of the number of stages. On a GPU, the host waits for the number of rows of
//! each expert.

use tch::{Kind, Tensor};

use crate::{
    error::LayerError,
    layer::{Forward, Init, ParameterSpec},
    layers::{documents::DOCUMENTS, gated_mlp::gated},
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// Names of the experts' parameters in Hugging Face's transformers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertNames {
    /// `block_sparse_moe.gate`, `block_sparse_moe.experts.0.w1`, ...
    Mixtral,
    /// `mlp.gate`, `mlp.experts.0.gate_proj`, ...
    Qwen,
}

impl ExpertNames {
    /// The prefix of all, and the names of the three maps: gate, up, down.
    fn parts(self) -> (&'static str, [&'static str; 3]) {
        match self {
            Self::Mixtral => ("block_sparse_moe.", ["w1", "w3", "w2"]),
            Self::Qwen => ("mlp.", ["gate_proj", "up_proj", "down_proj"]),
        }
    }
}

/// A mixture of experts: each token goes through `top_k` of them (Shazeer et al. 2017), each of
/// which is a SwiGLU as [`GatedMlp`](super::GatedMlp) is. [samples, positions, features] -> the
/// same shape. A part of [`LlamaBlock`](super::LlamaBlock). All experts of a layer are on the
/// device of its stage.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertMlp {
    /// Size of the model.
    pub features: i64,
    /// Size of an expert's hidden layer.
    pub hidden: i64,
    /// Number of experts.
    pub experts: i64,
    /// Number of experts that a token goes through.
    pub top_k: i64,
    /// Whether the weights of a token's experts are divided by their sum.
    pub normalise: bool,
    /// Whether the block hands on what [`BalancedExperts`](crate::BalancedExperts) needs.
    pub balance: bool,
    /// Names of the parameters.
    pub names: ExpertNames,
    /// Standard deviation of the initial weights.
    pub std: f64,
}

/// Maximum number of experts. Each has three parameters.
const EXPERTS_MAX: i64 = 4096;

/// What the layer made of its input.
pub(super) struct Mixed {
    /// As the input.
    pub output: Tensor,
    /// How the tokens were divided: [samples, 2, experts], in float32 at least. First the number of
    /// times that an expert was chosen, then the sum of its probabilities. Padding does not count.
    pub division: Option<Tensor>,
}

impl ExpertMlp {
    /// How many parameters it has.
    pub(super) fn count(&self) -> usize {
        1 + 3 * usize::try_from(self.experts.clamp(0, EXPERTS_MAX)).unwrap_or_default()
    }

    /// The number of the parameter of expert `expert`, if the layer's first one is `first`. `map`
    /// is 0 for gate, 1 for up, 2 for down.
    fn number(first: usize, expert: usize, map: usize) -> usize {
        first + 1 + 3 * expert + map
    }

    pub(super) fn check(&self) -> Result<(), LayerError> {
        let refuse = |reason: String| Err(LayerError::Value(reason));
        if !(1..=EXPERTS_MAX).contains(&self.experts) {
            return refuse(format!("{} experts: use 1 to {EXPERTS_MAX}", self.experts));
        }
        if !(1..=self.experts).contains(&self.top_k) {
            return refuse(format!(
                "a token goes through {} of {} experts: use 1 to {}",
                self.top_k, self.experts, self.experts
            ));
        }
        Ok(())
    }

    pub(super) fn parameters(&self) -> Vec<ParameterSpec> {
        let (prefix, maps) = self.names.parts();
        let (d, h) = (self.features, self.hidden);
        let of = |name: String, shape: [i64; 2]| {
            ParameterSpec::new(&name, shape, Init::Normal { std: self.std })
        };
        let mut all = vec![of(format!("{prefix}gate.weight"), [self.experts, d])];
        for expert in 0..self.experts.clamp(0, EXPERTS_MAX) {
            for (map, shape) in maps.iter().zip([[h, d], [h, d], [d, h]]) {
                all.push(of(format!("{prefix}experts.{expert}.{map}.weight"), shape));
            }
        }
        all
    }

    /// The spec of [`Mixed::division`], for a layer that computes in `kind`.
    pub(super) fn division(&self, samples: i64, kind: Kind) -> TensorSpec {
        TensorSpec::new([samples, 2, self.experts], wide(kind))
    }

    /// The forward with parameters from number `first` on.
    pub(super) fn apply(
        &self,
        ctx: &Forward,
        first: usize,
        x: &Tensor,
    ) -> Result<Mixed, LayerError> {
        let (k, experts) = (self.top_k, self.experts);
        let flat = x.f_reshape([-1, self.features])?;
        let tokens = flat.size()[0];
        let scores = ctx.linear(&flat, ctx.parameter(first)?, None)?;
        let probabilities = scores.f_softmax(-1, wide(x.kind()))?;
        let (weights, chosen) = probabilities.f_topk(k, -1, true, true)?;
        let weights = match self.normalise {
            true => {
                weights.f_div(&weights.f_sum_dim_intlist([-1_i64].as_slice(), true, None)?)?
            }
            false => weights,
        };
        let division = match self.balance {
            true => Some(self.divided(ctx, &probabilities, &chosen, x.size()[0])?),
            false => None,
        };
        let slots = chosen.f_reshape([-1])?;
        let order = slots.f_argsort_stable(true, 0, false)?;
        let rows = flat.f_unsqueeze(1)?.f_expand([tokens, k, self.features], false)?;
        let rows = rows.f_reshape([-1, self.features])?.f_index_select(0, &order)?;
        let counts = slots.f_bincount::<Tensor>(None, experts)?;
        let counts: Vec<i64> = Vec::try_from(&counts.f_to(tch::Device::Cpu)?)?;
        // One split: the backward of a slice of its own would fill zeros for all other rows.
        let own = rows.f_split_with_sizes(counts.as_slice(), 0)?;
        let mut made = Vec::new();
        for (expert, own) in own.iter().enumerate() {
            // In training, an expert without tokens has a gradient, too: zeros. So its momentum and
            // its weight decay go on, as transformers' do.
            if own.numel() == 0 && !ctx.training {
                continue;
            }
            made.push(self.expert(ctx, first, expert, own)?);
        }
        drop(own);
        drop(rows);
        let positions = Tensor::f_arange(tokens * k, (Kind::Int64, x.device()))?;
        let back = positions.f_zeros_like()?.f_scatter(0, &order, &positions)?;
        let made = match made.is_empty() {
            true => flat.f_narrow(0, 0, 0)?,
            false => Tensor::f_cat(&made, 0)?.f_index_select(0, &back)?,
        };
        let made = made.f_reshape([tokens, k, self.features])?;
        let weighted = made.f_mul(&weights.f_to_kind(x.kind())?.f_unsqueeze(-1)?)?;
        let output = weighted.f_sum_dim_intlist([1_i64].as_slice(), false, None)?;
        Ok(Mixed { output: output.f_reshape(x.size())?, division })
    }

    /// Expert number `expert` of its rows.
    fn expert(
        &self,
        ctx: &Forward,
        first: usize,
        expert: usize,
        rows: &Tensor,
    ) -> Result<Tensor, LayerError> {
        let map = |x: &Tensor, map: usize| {
            ctx.linear(x, ctx.parameter(Self::number(first, expert, map))?, None)
        };
        let (gate, up) = (map(rows, 0)?, map(rows, 1)?);
        let gated = gated(ctx, &gate, &up)?;
        drop((gate, up));
        map(&gated, 2)
    }

    /// [`Mixed::division`].
    fn divided(
        &self,
        ctx: &Forward,
        probabilities: &Tensor,
        chosen: &Tensor,
        samples: i64,
    ) -> Result<Tensor, LayerError> {
        let kind = probabilities.kind();
        let mut ones = chosen.f_one_hot(self.experts)?.f_to_kind(kind)?;
        let mut probabilities = probabilities.shallow_clone();
        if let Some(documents) = ctx.named(DOCUMENTS) {
            let is_token = documents.f_ge(0)?.f_reshape([-1, 1])?.f_to_kind(kind)?;
            probabilities = probabilities.f_mul(&is_token)?;
            ones = ones.f_mul(&is_token.f_unsqueeze(-1)?)?;
        }
        let of_samples = |x: &Tensor| x.f_reshape([samples, -1, self.experts]);
        let sum = |x: Tensor| x.f_sum_dim_intlist([1_i64].as_slice(), false, None);
        let counts = sum(of_samples(&ones)?)?;
        Ok(Tensor::f_stack(&[counts, sum(of_samples(&probabilities)?)?], 1)?)
    }

    /// Records what [`ExpertMlp::apply`] computes, assuming tokens are spread evenly over experts.
    /// Returns the output, and [`Mixed::division`].
    pub(super) fn record(&self, tape: &mut Tape, first: usize, x: Var) -> (Var, Option<Var>) {
        let (experts, k) = (self.experts.max(1), self.top_k);
        let kind = tape.spec(x).kind;
        let shape = tape.spec(x).shape.clone();
        let tokens: i64 = shape.iter().rev().skip(1).product();
        let rows = |count: i64| TensorSpec::new([count, self.features], kind);
        let scores = tape.linear(x, first, None);
        let wide_scores = tape.cast(scores, wide(kind));
        let probabilities = tape.elementwise_by_output(wide_scores);
        // The chosen weights, and which they are.
        let weights = tape.indexed(probabilities, TensorSpec::new([tokens, k], wide(kind)));
        let division = self.balance.then(|| {
            let samples = shape.first().copied().unwrap_or(1);
            tape.resized(probabilities, self.division(samples, kind))
        });
        let spread = tape.resized(x, rows(tokens * k));
        let sorted = tape.indexed(spread, rows(tokens * k));
        tape.release(spread);
        let mut made = Vec::new();
        for expert in 0..experts {
            let count = tokens * k / experts + i64::from(expert < tokens * k % experts);
            let number = |map| Self::number(first, expert as usize, map);
            let own = tape.sliced(sorted, rows(count));
            let gate = tape.linear(own, number(0), None);
            let up = tape.linear(own, number(1), None);
            let gated = tape.gated(gate, up);
            [gate, up].into_iter().for_each(|var| tape.release(var));
            made.push(tape.linear(gated, number(2), None));
            tape.release(gated);
        }
        tape.release(sorted);
        let joined = tape.concatenate(&made, rows(tokens * k));
        let unsorted = tape.indexed(joined, rows(tokens * k));
        tape.release(joined);
        let weighted = tape.weighted(unsorted, weights);
        let output = tape.resized(weighted, TensorSpec::new(shape, kind));
        let rest = [scores, wide_scores, probabilities, weights, unsorted, weighted];
        made.into_iter().chain(rest).for_each(|var| tape.release(var));
        (output, division)
    }

    /// Floating-point operations of one forward on this many positions.
    pub(super) fn operations(&self, positions: f64) -> f64 {
        let (d, h) = (self.features as f64, self.hidden as f64);
        positions * d * (2.0 * self.experts as f64 + 6.0 * self.top_k as f64 * h)
    }
}

/// The dtype of probabilities where values are in `kind`.
fn wide(kind: Kind) -> Kind {
    match kind {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}
