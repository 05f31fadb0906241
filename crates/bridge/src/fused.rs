//! Operations in one pass over memory that libtorch makes of several, and attention, on CPUs in
//! float32 and bfloat16. They are differentiable once.
//!
//! Between two operations that libtorch would round after, they round, too. So
//! [`rotary`] and the forward of [`swiglu`] have the bits of libtorch's own operations.

use tch::Tensor;

use crate::{Error, Result, address, adopt, ffi::bridged};

/// Whether these operations take `x`: a dense tensor on a CPU in float32 or bfloat16.
pub fn takes(x: &Tensor) -> bool {
    // SAFETY: the tensor at this address is borrowed for the whole call.
    unsafe { bridged::can_fuse(address(x)) }.unwrap_or(false)
}

/// RMSNorm over the last axis (Zhang & Sennrich 2019): `weight * x / sqrt(mean(x^2) + eps)`, `x`
/// `[..., features]`, `weight` `[features]`. The root is computed in float32.
///
/// # Errors
/// Shapes, dtypes or devices that do not fit; out of memory.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    // SAFETY: the tensors at these addresses are borrowed for the whole call.
    let y = unsafe { bridged::fused_rms_norm(address(x), address(weight), eps) }?;
    adopt(y).ok_or_else(|| Error("rms_norm gave no tensor".into()))
}

/// The gated unit of SwiGLU (Shazeer 2020): `silu(gate) * up`, both of one shape.
///
/// # Errors
/// Shapes, dtypes or devices that do not fit; out of memory.
pub fn swiglu(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    // SAFETY: the tensors at these addresses are borrowed for the whole call.
    let y = unsafe { bridged::fused_swiglu(address(gate), address(up)) }?;
    adopt(y).ok_or_else(|| Error("swiglu gave no tensor".into()))
}

/// Rotary positions (Su et al. 2021) of `x` `[samples, heads, positions, size]`. Features `i` and
/// `i + size / 2` are turned by an angle. The tables hold its cosine and its sine:
/// `[positions, size / 2]` or `[samples, 1, positions, size / 2]`. The result is contiguous.
///
/// # Errors
/// Shapes, dtypes or devices that do not fit; out of memory.
pub fn rotary(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    // SAFETY: the tensors at these addresses are borrowed for the whole call.
    let y = unsafe { bridged::fused_turn(address(x), address(cos), address(sin)) }?;
    adopt(y).ok_or_else(|| Error("rotary gave no tensor".into()))
}

/// Whether [`attention`] computes heads of this size and length: on a CPU, in float32 or bfloat16,
/// with 16 queries or more, whose size is a multiple of 16.
pub fn attends(q: &Tensor, k: &Tensor) -> bool {
    // SAFETY: the tensors at these addresses are borrowed for the whole call.
    unsafe { bridged::can_attend(address(q), address(k)) }.unwrap_or(false)
}

/// softmax(q k^T / sqrt(size)) v (Vaswani et al. 2017, section 3.2.1), each `[samples, heads,
/// positions, size]`, in blocks that fit a cache (Dao et al. 2022). With a window, query `i` sees
/// the keys from `i + 1 - window` to `i`, of as many keys as there are queries. Keys and values may
/// have a fraction of the queries' heads: each is shared by as many heads of queries, which lie
/// side by side (Ainslie et al. 2023, section 2.2). Arithmetic is in float32 for both dtypes. In
/// memory, the heads of a position are side by side.
///
/// # Errors
/// Shapes, dtypes or devices that do not fit; out of memory.
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, window: Option<i64>) -> Result<Tensor> {
    let window = window.unwrap_or(0);
    // SAFETY: the tensors at these addresses are borrowed for the whole call.
    let y = unsafe { bridged::fused_attention(address(q), address(k), address(v), window) }?;
    adopt(y).ok_or_else(|| Error("attention gave no tensor".into()))
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;
    use crate::{
        testing,
        vjp::{Request, vjp},
    };

    fn values(shape: &[i64], seed: f64) -> Tensor {
        testing::values(shape, seed) * 1.5
    }

    /// The output and the gradients of `leaves`, in float64.
    fn found(y: &Tensor, leaves: &[Tensor]) -> Vec<Tensor> {
        let dy = values(&y.size(), 0.7).to_kind(y.kind());
        let inputs: Vec<&Tensor> = leaves.iter().collect();
        let request =
            Request { outputs: &[y], output_grads: &[&dy], inputs: &inputs, parameters: &[] };
        let gradients = vjp(&request, &mut []).unwrap();
        let all = [Some(y.detach())].into_iter().chain(gradients);
        all.map(|one| one.unwrap().to_kind(Kind::Double)).collect()
    }

    fn leaves(all: &[Tensor], kind: Kind) -> Vec<Tensor> {
        all.iter().map(|one| one.to_kind(kind).detach().set_requires_grad(true)).collect()
    }

    /// Compares with autograd's values in float64. A tolerance is of the largest value.
    fn compare(
        inputs: &[Tensor],
        [float32, bfloat16]: [f64; 2],
        own: impl Fn(&[Tensor]) -> Tensor,
        plain: impl Fn(&[Tensor]) -> Tensor,
    ) {
        for (kind, tolerance) in [(Kind::Float, float32), (Kind::BFloat16, bfloat16)] {
            // What is compared with begins from the same numbers.
            let rounded: Vec<Tensor> = inputs.iter().map(|one| one.to_kind(kind)).collect();
            let (exact, ours) = (leaves(&rounded, Kind::Double), leaves(&rounded, kind));
            let (exact, ours) = (found(&plain(&exact), &exact), found(&own(&ours), &ours));
            for (number, (a, b)) in ours.iter().zip(&exact).enumerate() {
                assert_eq!(a.size(), b.size());
                let apart = (a - b).abs().max().double_value(&[]);
                let largest = b.abs().max().double_value(&[]);
                let shape = a.size();
                assert!(
                    apart <= tolerance * largest,
                    "{kind:?} {number} {shape:?}: {apart:e} of {largest}"
                );
            }
        }
    }

    fn plain_norm(x: &Tensor, weight: &Tensor) -> Tensor {
        let squares = x.square().mean_dim(Some(&[-1][..]), true, None::<Kind>);
        x * (squares + 1e-5).rsqrt() * weight
    }

    #[test]
    fn oracle_a_norm_agrees_with_autograd() {
        // Below, at and beside a multiple of the registers; rows for several threads.
        for (rows, size) in [(3, 5), (7, 64), (2, 33), (700, 320)] {
            compare(
                &[values(&[rows, size], 0.1), values(&[size], 0.2) + 1.0],
                [4e-6, 0.02],
                |all| rms_norm(&all[0], &all[1], 1e-5).unwrap(),
                |all| plain_norm(&all[0], &all[1]),
            );
        }
    }

    #[test]
    fn oracle_a_gated_unit_agrees_with_autograd() {
        for shape in [&[3, 5][..], &[2, 64], &[2, 3, 33], &[300, 700]] {
            compare(
                &[values(shape, 0.1) * 3.0, values(shape, 0.2)],
                [4e-6, 0.02],
                |all| swiglu(&all[0], &all[1]).unwrap(),
                |all| all[0].silu() * &all[1],
            );
        }
    }

    fn tables(shape: &[i64], kind: Kind) -> [Tensor; 2] {
        let angles = values(shape, 0.3) * 2.0;
        [angles.cos().to_kind(kind), angles.sin().to_kind(kind)]
    }

    fn plain_rotary(x: &Tensor, [cos, sin]: &[Tensor; 2]) -> Tensor {
        let halves = x.chunk(2, -1);
        let (a, b) = (&halves[0], &halves[1]);
        Tensor::cat(&[a * cos - b * sin, b * cos + a * sin], -1)
    }

    #[test]
    fn oracle_turned_heads_have_the_bits_of_libtorchs_operations() {
        for (size, shape) in [(6, vec![5, 3]), (32, vec![5, 16]), (64, vec![2, 1, 5, 32])] {
            for kind in [Kind::Float, Kind::BFloat16] {
                let tables = tables(&shape, kind);
                // As a projection gives them: heads side by side.
                let x = values(&[2, 5, 3, size], 0.1).to_kind(kind).set_requires_grad(true);
                let heads = x.transpose(1, 2);
                let own = rotary(&heads, &tables[0], &tables[1]).unwrap();
                assert!(own.is_contiguous());
                let leaf = [x.shallow_clone()];
                let plain = plain_rotary(&heads, &tables);
                assert_eq!(found(&own, &leaf), found(&plain, &leaf), "{size} {kind:?}");
            }
        }
    }

    fn plain_attention(all: &[Tensor], window: Option<i64>) -> Tensor {
        let (q, k, v) = (&all[0], &all[1], &all[2]);
        let scores = q.matmul(&k.transpose(2, 3)) / (q.size()[3] as f64).sqrt();
        let hidden = window.map(|window| {
            let all = Tensor::ones([q.size()[2], k.size()[2]], (Kind::Bool, Device::Cpu));
            all.tril(0).triu(1 - window).logical_not()
        });
        let scores = match hidden {
            Some(hidden) => scores.masked_fill(&hidden, f64::NEG_INFINITY),
            None => scores,
        };
        scores.softmax(-1, None::<Kind>).matmul(v)
    }

    #[test]
    fn oracle_shared_heads_agree_with_repeated_ones() {
        // One group, several, and a head for each; a block of keys and more.
        for (heads, groups, queries, keys, window) in [
            (4, 1, 100, 100, Some(100)),
            (6, 2, 40, 40, Some(7)),
            (6, 3, 300, 300, Some(300)),
            (4, 2, 20, 77, None),
            (3, 3, 40, 40, Some(40)),
        ] {
            let of = |heads, length, seed| values(&[2, heads, length, 32], seed) * 1.5;
            let repeated = |x: &Tensor| x.repeat_interleave_self_int(heads / groups, 1, None);
            let all = [of(heads, queries, 0.1), of(groups, keys, 0.2), of(groups, keys, 0.3)];
            compare(
                &all,
                // As where each has its own. A key's gradient is a sum over its heads of queries.
                [3e-5, 0.08],
                |all| attention(&all[0], &all[1], &all[2], window).unwrap(),
                |all| {
                    let all = [all[0].shallow_clone(), repeated(&all[1]), repeated(&all[2])];
                    plain_attention(&all, window)
                },
            );
            // The output has the bits of the heads' own, in any layout.
            let [q, k, v] = all.map(|x| x.to_kind(Kind::Float));
            let own = attention(&q, &repeated(&k), &repeated(&v), window).unwrap();
            assert_eq!(attention(&q, &k, &v, window).unwrap(), own);
            let [q, k, v] = [q, k, v].map(|x| x.transpose(1, 2).contiguous().transpose(1, 2));
            assert_eq!(attention(&q, &k, &v, window).unwrap(), own);
        }
    }

    #[test]
    fn oracle_attention_agrees_with_autograd() {
        // Below, at and beyond a block of 48 queries and of 256 keys; windows within a block,
        // across blocks, and larger than the text.
        for (queries, keys, size, window) in [
            (16, 16, 16, Some(16)),
            (17, 17, 32, Some(5)),
            (128, 128, 64, Some(128)),
            (100, 100, 16, Some(7)),
            (300, 300, 32, Some(300)),
            (600, 600, 16, Some(1000)),
            (600, 600, 16, Some(70)),
            (600, 600, 48, Some(259)),
            (48, 48, 64, None),
            (20, 77, 128, None),
            (130, 531, 16, None),
        ] {
            let of = |length, seed| values(&[2, 3, length, size], seed) * 1.5;
            compare(
                &[of(queries, 0.1), of(keys, 0.2), of(keys, 0.3)],
                // Exponentials are exact to 20 units in the last place: 2.4e-6. In bfloat16, whose
                // last place is 0.008, the given gradient and the output were rounded. A query's
                // gradient is a difference of sums of either, ten times as large.
                [3e-5, 0.08],
                |all| attention(&all[0], &all[1], &all[2], window).unwrap(),
                |all| plain_attention(all, window),
            );
        }
    }

    #[test]
    fn oracle_heads_in_any_layout_give_the_same_bits() {
        let of = |seed| values(&[2, 40, 3, 32], seed).to_kind(Kind::Float);
        let (q, k, v) = (of(0.1), of(0.2), of(0.3));
        let [q, k, v] = [q, k, v].map(|one| one.transpose(1, 2));
        let y = attention(&q, &k, &v, Some(40)).unwrap();
        assert_eq!(y.stride(), q.stride());
        let dense = [&q, &k, &v].map(|one| one.contiguous());
        assert_eq!(attention(&dense[0], &dense[1], &dense[2], Some(40)).unwrap(), y);
        // A sample does not depend on the others.
        let one = [&q, &k, &v].map(|all| all.narrow(0, 1, 1));
        let alone = attention(&one[0], &one[1], &one[2], Some(40)).unwrap();
        assert_eq!(alone, y.narrow(0, 1, 1));
    }

    /// Queries beyond the first block of keys passed over a NaN in it, and over the whole block.
    #[test]
    fn regression_a_nan_among_the_keys_stays_one() {
        let of = |seed| values(&[1, 2, 600, 32], seed).to_kind(Kind::Float);
        let (q, k, v) = (of(0.1), of(0.2), of(0.3));
        let _ = k.select(2, 3).fill_(f64::NAN);
        let found = attention(&q, &k, &v, None).unwrap().isnan().any_dim(-1, false);
        assert_eq!(found.narrow(2, 3, 597).all().int64_value(&[]), 1);
    }

    #[test]
    fn fault_attention_to_what_does_not_fit() {
        let of = |shape: &[i64]| values(shape, 0.1).to_kind(Kind::Float);
        let q = of(&[2, 3, 20, 32]);
        assert!(attends(&q, &q));
        assert!(!attends(&q.narrow(2, 0, 3), &q), "few queries");
        assert!(!attends(&of(&[2, 3, 20, 8]), &q), "small heads");
        for k in [of(&[2, 3, 20, 16]), of(&[1, 3, 20, 32]), of(&[2, 2, 20, 32]), of(&[2, 3, 32])] {
            assert!(attention(&q, &k, &k, None).is_err());
        }
        let longer = of(&[2, 3, 21, 32]);
        assert!(attention(&q, &longer, &longer, None).is_ok());
        assert!(attention(&q, &longer, &longer, Some(4)).is_err());
        assert!(attention(&q, &longer, &q, None).is_err());
        for heads in [0, 2, 6] {
            let k = of(&[2, heads, 20, 32]);
            assert!(attention(&q, &k, &k, None).is_err(), "{heads} heads for 3");
        }
        assert!(attention(&q, &q, &q, Some(-1)).is_err());
        assert!(attention(&q, &q.to_kind(Kind::BFloat16), &q, None).is_err());
    }

    #[test]
    fn oracle_forwards_have_the_bits_of_libtorchs_operations() {
        for kind in [Kind::Float, Kind::BFloat16] {
            let (gate, up) = (values(&[40, 35], 0.1).to_kind(kind), values(&[40, 35], 0.2));
            let up = up.to_kind(kind);
            assert_eq!(swiglu(&gate, &up).unwrap(), gate.silu() * up, "{kind:?}");
        }
    }

    #[test]
    fn property_rows_do_not_depend_on_each_other() {
        let (x, weight) = (values(&[64, 96], 0.1), values(&[96], 0.2).to_kind(Kind::Float));
        let x = x.to_kind(Kind::Float);
        let whole = rms_norm(&x, &weight, 1e-6).unwrap();
        for (first, count) in [(0, 1), (5, 3), (33, 31)] {
            let part = rms_norm(&x.narrow(0, first, count), &weight, 1e-6).unwrap();
            assert_eq!(part, whole.narrow(0, first, count));
        }
    }

    #[test]
    fn fault_what_does_not_fit_is_an_error() {
        let (x, short) = (values(&[4, 8], 0.1), values(&[4], 0.1));
        assert!(!takes(&x) && takes(&x.to_kind(Kind::Float)));
        assert!(rms_norm(&x, &short, 1e-5).is_err());
        let (x, short) = (x.to_kind(Kind::Float), short.to_kind(Kind::Float));
        assert!(rms_norm(&x, &short, 1e-5).unwrap_err().to_string().contains("[4, 8]"));
        assert!(swiglu(&x, &short).is_err());
        assert!(swiglu(&x, &x.to_kind(Kind::BFloat16)).is_err());
        let heads = x.reshape([1, 1, 4, 8]);
        for table in [&short, &x, &x.reshape([1, 4, 8]), &x.reshape([2, 1, 4, 4])] {
            assert!(rotary(&heads, table, table).is_err());
        }
    }
}
