//! The attention of a Llama block: grouped queries and rotary positions.

use tch::Tensor;

use crate::{
    error::LayerError,
    layer::{Forward, Infer, ParameterSpec},
    layers::{
        RmsNorm,
        documents::{self, DOCUMENTS},
        heads::{Heads, Visible},
        projections::{Projection, Projections},
        rotary::Rotary,
    },
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// Causal self-attention in which several heads of queries share one head of keys and values
/// (Ainslie et al. 2023), with rotary positions: [samples, positions, features] -> the same shape.
/// A part of [`LlamaBlock`](super::LlamaBlock).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GroupedAttention {
    /// Size of the model.
    pub features: i64,
    /// Number of heads of queries.
    pub heads: i64,
    /// Number of heads of keys and values, a divisor of `heads`.
    pub groups: i64,
    /// Size of a head, an even number. `heads * head_size` may differ from `features`.
    pub head_size: i64,
    /// Whether queries, keys and values add a bias.
    pub qkv_bias: bool,
    /// Whether the output adds a bias.
    pub output_bias: bool,
    /// The `eps` of the RMSNorm of each head of queries and keys, before they are turned (Qwen 3);
    /// `None`: there is no norm.
    pub norm: Option<f64>,
    /// A position sees this many positions: its own and those before it (Beltagy et al. 2020);
    /// `None`: all before it.
    pub window: Option<i64>,
    /// Rotary positions.
    pub rotary: Rotary,
    /// Dropout of the attention weights. Above 0, training uses the unfused path.
    pub dropout: f64,
    /// Standard deviation of the initial weights.
    pub std: f64,
}

/// The projections, by number.
const QUERIES: usize = 0;
const KEYS: usize = 1;
const VALUES: usize = 2;
const OUTPUT: usize = 3;

impl GroupedAttention {
    fn queries(&self) -> Heads {
        Heads { count: self.heads, size: self.head_size, dropout: self.dropout }
    }

    fn keys(&self) -> Heads {
        Heads { count: self.groups, ..self.queries() }
    }

    fn head_norm(&self) -> Option<RmsNorm> {
        self.norm.map(|eps| RmsNorm { features: self.head_size, eps })
    }

    fn projections(&self) -> Projections<4> {
        let (d, q, k) = (self.features, self.queries().width(), self.keys().width());
        let of = |name, outputs| Projection { name, inputs: d, outputs, bias: self.qkv_bias };
        let output = Projection { name: "o_proj", inputs: q, outputs: d, bias: self.output_bias };
        Projections([of("q_proj", q), of("k_proj", k), of("v_proj", k), output])
    }

    /// How many parameters it has.
    pub(super) fn count(&self) -> usize {
        self.projections().count() + if self.norm.is_some() { 2 } else { 0 }
    }

    pub(super) fn parameters(&self, prefix: &str) -> Vec<ParameterSpec> {
        let mut parameters = self.projections().parameters(prefix, self.std);
        if let Some(norm) = self.head_norm() {
            let names = ["q_norm", "k_norm"].map(|name| format!("{prefix}{name}.weight"));
            parameters.extend(names.map(|name| norm.parameter(&name)));
        }
        parameters
    }

    /// The number of the norm of queries; that of keys follows it.
    fn norm_number(&self, first: usize) -> usize {
        first + self.count() - 2
    }

    /// Checks the settings for the input `x` [samples, positions, features].
    pub(super) fn check(&self, ctx: &mut Infer, x: &TensorSpec) -> Result<(), LayerError> {
        if documents::declare(ctx, x)? {
            self.rotary.check_documents(x.shape.get(1).copied().unwrap_or(0))?;
        }
        self.queries().check()?;
        self.keys().check()?;
        self.rotary.check(self.head_size)?;
        if let Some(norm) = self.head_norm() {
            norm.check()?;
        }
        if self.heads % self.groups != 0 {
            return Err(LayerError::Shape(format!(
                "{} heads of queries for {} of keys: use a multiple",
                self.heads, self.groups
            )));
        }
        if self.window.is_some_and(|window| window < 1) {
            return Err(LayerError::Value("a window of no positions: use at least 1".into()));
        }
        Ok(())
    }

    /// The forward with parameters from number `first` on.
    pub(super) fn apply(
        &self,
        ctx: &mut Forward,
        first: usize,
        x: &Tensor,
    ) -> Result<Tensor, LayerError> {
        let length = x.size().get(1).copied().unwrap_or(0);
        let place = (x.kind(), x.device());
        let documents = ctx.named(DOCUMENTS);
        let tables = match documents {
            None => self.rotary.tables(self.head_size, ctx.past(), length, place)?,
            Some(documents) => self.rotary.tables_of(self.head_size, documents, x.kind())?,
        };
        let own = documents.map(|own| documents::visible(own, self.window)).transpose()?;
        let projections = self.projections();
        let turned = |ctx: &Forward, heads: Heads, number: usize| {
            let mut own = projections.apply(ctx, first, number, x)?;
            if let Some(norm) = self.head_norm() {
                let shape = own.size();
                let apart = own.f_reshape([-1, heads.count, heads.size])?;
                own = norm.apply(ctx, self.norm_number(first) + number, &apart)?;
                own = own.f_reshape(shape)?;
            }
            tables.turn(ctx, &heads.apart(&own)?)
        };
        let q = turned(ctx, self.queries(), QUERIES)?;
        let mut k = turned(ctx, self.keys(), KEYS)?;
        let mut v = self.keys().apart(&projections.apply(ctx, first, VALUES, x)?)?;
        let mut visible = own.as_ref().map_or_else(|| self.visible(length), Visible::Chosen);
        if let Some(cache) = ctx.cache() {
            let past = cache.past();
            k = cache.append(first, &k, 2)?;
            v = cache.append(first + 1, &v, 2)?;
            if past > 0 {
                if length != 1 {
                    let reason = "after its first step a decoding makes one position at a time";
                    return Err(LayerError::Value(reason.into()));
                }
                visible = Visible::All;
                let seen = self.window.unwrap_or(i64::MAX).min(past + 1);
                k = k.f_narrow(2, past + 1 - seen, seen)?;
                v = v.f_narrow(2, past + 1 - seen, seen)?;
            }
        }
        let attended = self.queries().attend(ctx, &q, &k, &v, visible)?;
        projections.apply(ctx, first, OUTPUT, &self.queries().joined(&attended)?)
    }

    fn visible<'a>(&self, length: i64) -> Visible<'a> {
        match self.window {
            Some(window) if window < length => Visible::Latest(window),
            _ => Visible::Earlier,
        }
    }

    /// Records what [`GroupedAttention::apply`] computes.
    pub(super) fn record(&self, tape: &mut Tape, first: usize, x: Var) -> Option<Var> {
        let [samples, length, _] = tape.spec(x).shape[..] else { return None };
        let has_documents = tape.named(DOCUMENTS).is_some();
        let projections = self.projections();
        let turned = |tape: &mut Tape, number: usize| {
            let mut own = projections.record(tape, first, number, x);
            if self.norm.is_some() {
                let normed =
                    tape.rms_norm_of_heads(own, self.head_size, self.norm_number(first) + number);
                tape.release(own);
                own = normed;
            }
            let turned = tape.turned(own);
            tape.release(own);
            turned
        };
        let rows = if has_documents { samples } else { 1 };
        let table = (rows * length * self.head_size) as f64;
        tape.tables(table);
        let q = turned(tape, QUERIES);
        let k = turned(tape, KEYS);
        let v = projections.record(tape, first, VALUES, x);
        // The bridge's attention needs no mask for a window, and repeats no heads.
        let is_fused = !has_documents && self.dropout == 0.0 && tape.attends(q, self.heads, length);
        let shared = if is_fused { 1 } else { self.heads / self.groups };
        let repeated = |tape: &mut Tape, own: Var| match shared {
            1 => own,
            _ => {
                let wide = tape.repeated(own, shared);
                tape.release(own);
                wide
            }
        };
        let (k, v) = (repeated(tape, k), repeated(tape, v));
        // The number of masks: one per row, one for all rows, or none.
        let masks = match has_documents {
            true => samples,
            false => i64::from(!is_fused && self.window.is_some_and(|window| window < length)),
        };
        let attended = tape.attention_of(q, k, v, self.heads, masks, self.dropout);
        [q, k, v].into_iter().for_each(|var| tape.release(var));
        // Rotated queries are contiguous, and so is libtorch's attended output per head. Joining
        // the heads therefore copies.
        let joined = if is_fused { attended } else { tape.copied(attended) };
        if !is_fused {
            tape.release(attended);
        }
        let output = projections.record(tape, first, OUTPUT, joined);
        tape.release(joined);
        Some(output)
    }

    /// Floating-point operations of one forward.
    pub(super) fn operations(&self, input: &TensorSpec) -> Option<f64> {
        let [samples, length, features] = input.shape[..] else { return None };
        let (q, k) = (self.queries().width() as f64, self.keys().width() as f64);
        let (length, features) = (length as f64, features as f64);
        let products = 2.0 * features * (2.0 * q + 2.0 * k);
        Some(samples as f64 * length * (products + 4.0 * q * length))
    }
}
