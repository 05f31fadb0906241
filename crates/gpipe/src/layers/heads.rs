//! Multi-head attention between its projections (Vaswani et al. 2017, section 3.2), shared by
//! self-attention and cross-attention.

use gpipe_bridge::fused;
use tch::{Device, Kind, Tensor};

use crate::{
    error::LayerError,
    layer::Forward,
    layers::dropout::check_probability,
    spec::TensorSpec,
    tape::{Tape, Var},
};

/// Which keys a query attends to.
#[derive(Debug, Clone, Copy)]
pub(super) enum Visible<'a> {
    /// All keys. A new position of a decoding attends to itself and all earlier positions; there
    /// are no later ones.
    All,
    /// Keys up to the query's own position.
    Earlier,
    /// This many keys: the one at the query's own position, and those before it.
    Latest(i64),
    /// For every query, the keys that are true here: bool [samples, keys]. Each sample needs at
    /// least one, because a softmax over no keys is NaN.
    Unmasked(&'a Tensor),
    /// The keys that are true for each query: bool [samples, 1, queries, keys]. Each query needs at
    /// least one key.
    Chosen(&'a Tensor),
}

impl Visible<'_> {
    /// The mask of hidden keys, which broadcasts to [samples, heads, queries, keys].
    fn hidden(self, queries: i64, device: Device) -> Result<Tensor, LayerError> {
        Ok(match self {
            Visible::All => Tensor::f_zeros([1, 1], (Kind::Bool, device))?,
            Visible::Earlier => {
                Tensor::f_ones([queries, queries], (Kind::Bool, device))?.f_triu(1)?
            }
            Visible::Latest(window) => latest(queries, window, device)?.f_logical_not()?,
            Visible::Unmasked(mask) => by_key(mask)?.f_logical_not()?,
            Visible::Chosen(mask) => mask.f_logical_not()?,
        })
    }
}

/// The latest `window` keys of each query: bool [queries, queries].
pub(super) fn latest(queries: i64, window: i64, device: Device) -> Result<Tensor, LayerError> {
    let all = Tensor::f_ones([queries, queries], (Kind::Bool, device))?;
    Ok(all.f_tril(0)?.f_triu(1 - window)?)
}

/// [samples, keys] -> [samples, 1, 1, keys].
fn by_key(mask: &Tensor) -> Result<Tensor, LayerError> {
    Ok(mask.f_unsqueeze(1)?.f_unsqueeze(1)?)
}

/// How attention is split into heads. The width, `count * size`, may differ from the model's size.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heads {
    pub count: i64,
    pub size: i64,
    /// Dropout of the weights. Above 0, training uses the unfused path.
    pub dropout: f64,
}

impl Heads {
    pub fn width(&self) -> i64 {
        self.count * self.size
    }

    pub fn check(&self) -> Result<(), LayerError> {
        check_probability("attention_dropout", self.dropout)?;
        let Self { count, size, .. } = self;
        if *count > 0 && *size > 0 {
            return Ok(());
        }
        Err(LayerError::Shape(format!("{count} heads of size {size}: both start at 1")))
    }

    /// [samples, positions, width] -> [samples, heads, positions, size].
    pub fn apart(&self, x: &Tensor) -> Result<Tensor, LayerError> {
        let (samples, length, _) = x.size3()?;
        Ok(x.f_reshape([samples, length, self.count, self.size])?.f_transpose(1, 2)?)
    }

    /// [samples, positions, N * width] -> N times [samples, heads, positions, size].
    pub fn parts<const N: usize>(&self, x: &Tensor) -> Result<[Tensor; N], LayerError> {
        let (samples, length, _) = x.size3()?;
        let x = x.f_reshape([samples, length, N as i64, self.count, self.size])?;
        // N selects would be slower: the backward of each would fill and add a tensor as large as
        // all parts.
        let parts = x.f_permute([2, 0, 3, 1, 4])?.f_unbind(0)?;
        parts.try_into().map_err(|_| LayerError::Shape(format!("it has not {N} parts")))
    }

    /// [samples, heads, positions, size] -> [samples, positions, width].
    pub fn joined(&self, x: &Tensor) -> Result<Tensor, LayerError> {
        let (samples, _, length, _) = x.size4()?;
        Ok(x.f_transpose(1, 2)?.f_reshape([samples, length, self.width()])?)
    }

    /// softmax(q k^T / sqrt(size)) v, each [samples, heads, positions, size]. Hidden keys have a
    /// weight of exactly 0. Keys and values may have fewer heads, each shared by as many heads of
    /// queries, which lie side by side (Ainslie et al. 2023, section 2.2).
    pub fn attend(
        &self,
        ctx: &mut Forward,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        visible: Visible,
    ) -> Result<Tensor, LayerError> {
        let drops = ctx.training() && self.dropout > 0.0;
        if !drops && let Some(window) = Self::window_of(ctx, q, k, visible) {
            return Ok(fused::attention(q, k, v, window)?);
        }
        let (k, v) = (&self.repeated(k)?, &self.repeated(v)?);
        if !drops {
            // The fused CPU kernel supports both forms. The test module `kernels` checks that it is
            // used.
            let (mask, causal) = match visible {
                Visible::All => (None, false),
                Visible::Earlier => (None, true),
                Visible::Latest(window) => {
                    let queries = q.size().get(2).copied().unwrap_or(0);
                    (Some(latest(queries, window, q.device())?), false)
                }
                Visible::Unmasked(mask) => (Some(by_key(mask)?), false),
                Visible::Chosen(mask) => (Some(mask.shallow_clone()), false),
            };
            let fused =
                Tensor::f_scaled_dot_product_attention(q, k, v, mask, 0.0, causal, None, false)?;
            return Ok(fused);
        }
        let (_, _, queries, size) = q.size4()?;
        let scores = q
            .f_matmul(&k.f_transpose(2, 3)?)?
            .f_mul_scalar(1.0 / (size as f64).sqrt())?
            .f_masked_fill(&visible.hidden(queries, q.device())?, f64::NEG_INFINITY)?;
        let weights = scores.f_softmax(-1, None)?;
        Ok(ctx.dropout(&weights, self.dropout)?.f_matmul(v)?)
    }

    /// Repeats each head of keys or values for the heads of queries that share it: [samples,
    /// groups, positions, size] -> [samples, heads, positions, size].
    fn repeated(&self, x: &Tensor) -> Result<Tensor, LayerError> {
        let (samples, groups, length, size) = x.size4()?;
        if groups == self.count {
            return Ok(x.shallow_clone());
        }
        let shared = self.count / groups.max(1);
        let repeated =
            x.f_unsqueeze(2)?.f_expand([samples, groups, shared, length, size], false)?;
        Ok(repeated.f_reshape([samples, self.count, length, size])?)
    }

    /// The window of [`fused::attention`], if it computes this.
    fn window_of(ctx: &Forward, q: &Tensor, k: &Tensor, visible: Visible) -> Option<Option<i64>> {
        let window = match visible {
            Visible::All => None,
            Visible::Earlier => Some(q.size().get(2).copied()?),
            Visible::Latest(window) => Some(window),
            Visible::Unmasked(_) | Visible::Chosen(_) => return None,
        };
        (ctx.fuses(q) && fused::attends(q, k)).then_some(window)
    }

    /// Records what [`Heads::attend`] computes in training mode. [`Tape::fused_attention`]
    /// describes `queries` and `keys`.
    pub fn record(&self, tape: &mut Tape, queries: Var, keys: Var, mask: Option<Var>) -> Var {
        match self.dropout > 0.0 {
            true => tape.unfused_attention(queries, keys, self.count, mask, self.dropout),
            false => tape.fused_attention(queries, keys, self.count, mask),
        }
    }
}

/// Finds the mask for keys [samples, positions, ...] among a layer's inputs, and checks it.
pub(super) fn check_mask<'a>(
    keys: &TensorSpec,
    mask: Option<&'a TensorSpec>,
) -> Result<&'a TensorSpec, LayerError> {
    let wanted = TensorSpec::new(keys.shape.get(..2).unwrap_or_default(), Kind::Bool);
    let found = || mask.map_or("none".to_owned(), ToString::to_string);
    mask.filter(|mask| **mask == wanted).ok_or_else(|| {
        LayerError::Shape(format!("it takes a mask {wanted} after {keys}, it got {}", found()))
    })
}

#[cfg(test)]
mod tests {
    use gpipe_bridge::linear::Kernels;

    use super::*;
    use crate::rng::{MaskKey, Random};

    const HEADS: Heads = Heads { count: 3, size: 8, dropout: 0.0 };
    /// ATen's number for its fused CPU kernel.
    const FUSED: i64 = 1;

    fn training() -> Forward<'static> {
        Forward {
            parameters: &[],
            kernels: Kernels::Aten,
            training: true,
            random: Random::new(
                MaskKey { seed: 1, layer: 2, step: 3, site: 0, first_sample: 0 },
                2,
            ),
            named: &[],
            pops: Vec::new(),
            stashed: Vec::new(),
            statistics: Vec::new(),
            cache: None,
            inspections: Default::default(),
            adapters: Default::default(),
            adapted: Default::default(),
            unread: None,
        }
    }

    fn leaf(length: i64, seed: i64, kind: Kind) -> Tensor {
        let shape = [2, HEADS.count, length, HEADS.size];
        let position = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
        let values = ((position + seed as f64) * 12.9898).sin() * 2.0;
        values.reshape(shape).to_kind(kind).set_requires_grad(true)
    }

    /// A mask that shows all five keys of the first sample, and three of the second.
    fn mask() -> Tensor {
        let seen = [true, true, true, true, true, true, true, true, false, false];
        Tensor::from_slice(&seen).reshape([2, 5])
    }

    /// The output and the gradients of q, k and v, for 4 queries and 5 keys (4 if causal).
    fn attended(heads: Heads, visible: Visible, kind: Kind) -> [Tensor; 4] {
        let keys = if let Visible::Earlier = visible { 4 } else { 5 };
        let [q, k, v] = [leaf(4, 1, kind), leaf(keys, 1001, kind), leaf(keys, 2001, kind)];
        let y = heads.attend(&mut training(), &q, &k, &v, visible).unwrap();
        (&y * y.detach().cos()).sum(kind).backward();
        [y.detach(), q.grad(), k.grad(), v.grad()]
    }

    #[test]
    fn oracle_the_fused_kernel_takes_both_forms() {
        for kind in [Kind::Double, Kind::Float, Kind::BFloat16] {
            let (q, k) = (leaf(4, 1, kind), leaf(5, 2, kind));
            let choose = |k: &Tensor, mask: Option<Tensor>, causal| {
                Tensor::f_internal_fused_sdp_choice(&q, k, k, mask, 0.0, causal, None, false)
            };
            assert_eq!(choose(&k, Some(by_key(&mask()).unwrap()), false).unwrap(), FUSED);
            assert_eq!(choose(&q, None, true).unwrap(), FUSED);
        }
    }

    #[test]
    fn oracle_fused_and_unfused_attention_agree() {
        // A probability that rounds to 0 selects the unfused path, but drops nothing.
        let unfused = Heads { dropout: 1e-9, ..HEADS };
        for (kind, tolerance) in [(Kind::Double, 1e-13), (Kind::Float, 1e-5)] {
            for visible in [Visible::Earlier, Visible::Unmasked(&mask())] {
                let found = attended(HEADS, visible, kind);
                for (a, b) in found.iter().zip(attended(unfused, visible, kind)) {
                    let apart = (a - &b).abs().max().double_value(&[]);
                    assert!(apart <= tolerance * b.abs().max().double_value(&[]), "{apart:e}");
                }
            }
        }
    }

    #[test]
    fn oracle_what_is_masked_has_no_weight_and_no_gradient() {
        for (dropout, kind) in [(0.0, Kind::Float), (0.3, Kind::Float), (0.0, Kind::BFloat16)] {
            let heads = Heads { dropout, ..HEADS };
            let [_, _, k, v] = attended(heads, Visible::Unmasked(&mask()), kind);
            for gradient in [k, v] {
                let largest = |first, count| {
                    let part = gradient.narrow(0, 1, 1).narrow(2, first, count).abs().max();
                    part.double_value(&[])
                };
                assert!(largest(0, 3) > 0.0);
                assert_eq!(largest(3, 2), 0.0);
            }
        }
    }

    #[test]
    fn property_parts_lie_behind_each_other_and_are_joined_again() {
        let x = Tensor::arange(2 * 5 * 72, (Kind::Float, Device::Cpu)).reshape([2, 5, 72]);
        let parts: [Tensor; 3] = HEADS.parts(&x).unwrap();
        for (number, part) in parts.iter().enumerate() {
            let own = x.narrow(2, 24 * number as i64, 24);
            assert_eq!(part.size(), [2, 3, 5, 8]);
            assert_eq!(HEADS.joined(part).unwrap(), own);
            assert_eq!(HEADS.apart(&own).unwrap(), *part);
        }
        assert!(HEADS.parts::<2>(&x).is_err());
    }
}
