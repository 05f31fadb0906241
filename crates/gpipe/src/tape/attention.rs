//! What attention computes and holds.

use gpipe_bridge::linear::Kernels;
use tch::Kind;

use super::{Node, Tape, Var, bytes, operations::FLOAT};
use crate::spec::TensorSpec;

impl Tape {
    /// Causal attention of separate queries, keys and values, each [samples, positions, heads *
    /// size]. `masks`: the number of masks [positions, positions] of visible keys; 0 if all earlier
    /// keys are visible.
    pub fn attention_of(
        &mut self,
        queries: Var,
        keys: Var,
        values: Var,
        heads: i64,
        masks: i64,
        p: f64,
    ) -> Var {
        let output = self.spec(queries).clone();
        let size = |axis: usize| output.shape.get(axis).copied().unwrap_or(0);
        let (samples, length) = (size(0), size(1));
        let square = length as f64 * length as f64;
        let hidden = square * masks.max(1) as f64;
        let inputs = [queries, keys, values];
        if p <= 0.0 {
            let rows = FLOAT * samples as f64 * heads as f64 * length as f64;
            if masks == 0 && self.attends(queries, heads, length) {
                let blocks = attention_scratch(length, output.last() / heads.max(1));
                let node = Node::new(&inputs, output).saving(&inputs).saving_output();
                let node = node.saving_bytes(rows).forward_bytes(blocks).backward_bytes(blocks);
                return self.push(node);
            }
            let block = attention_block(length);
            let width = output.last() / heads.max(1);
            let blocks = FLOAT * block as f64 * (length.min(512) as f64 + 2.0 + width as f64);
            // The visible keys, and the numbers that are added to the scores.
            let mask = masks as f64 * square * (1.0 + output.kind.elt_size_in_bytes() as f64);
            let node = Node::new(&inputs, output).saving(&inputs).saving_output();
            return self.push(node.saving_bytes(rows + mask).forward_bytes(blocks));
        }
        let weights = TensorSpec::new([samples, heads, length, length], output.kind);
        let own = bytes(&output);
        let scores = Node::new(&[queries, keys], weights.clone()).saving_bytes(2.0 * own);
        let scores = self.push(scores);
        let scaled = self.push(Node::new(&[scores], weights.clone()).passing_gradient());
        self.release(scores);
        let masked = Node::new(&[scaled], weights).saving_bytes(hidden).forward_bytes(hidden);
        let masked = self.push(masked);
        self.release(scaled);
        let weights = self.elementwise_by_output(masked);
        let dropped = self.dropout(weights, p);
        let node = Node::new(&[dropped, values], output).saving(&[dropped]).saving_bytes(own);
        let attended = self.push(node);
        [masked, weights, dropped].into_iter().for_each(|var| self.release(var));
        attended
    }

    /// Attention in ATen's fused kernel. Returns [samples, queries, features]. Without a `mask` of
    /// the keys it is causal.
    ///
    /// In self-attention, `queries` and `keys` are the same tensor, which also has the values:
    /// [samples, positions, 3 features]. Otherwise `queries` are [samples, queries, features], and
    /// `keys` has keys and values: [samples, keys, 2 features].
    pub fn fused_attention(
        &mut self,
        queries: Var,
        keys: Var,
        heads: i64,
        mask: Option<Var>,
    ) -> Var {
        let Attended { inputs, samples, length, seen, output } = self.attended(queries, keys);
        let (block, size) = (attention_block(length), output.last() / heads.max(1));
        let is_own = mask.is_none() && self.attends_in(&output, heads, length);
        let (blocks, back) = match is_own {
            true => (attention_scratch(seen, size), attention_scratch(seen, size)),
            false => (FLOAT * block as f64 * (seen.min(512) as f64 + 2.0 + size as f64), 0.0),
        };
        // The mask, converted to numbers that are added to the scores.
        let added = mask.map_or(0.0, |mask| bytes(&self.spec(mask).with_kind(output.kind)));
        let node = Node::new(&inputs, output).saving(&inputs).saving_output();
        let node = node
            .saving_bytes(FLOAT * samples as f64 * heads as f64 * length as f64 + added)
            .forward_bytes(blocks);
        // The gradients are computed separately, then stacked.
        let apart = self.bytes(keys);
        self.push(node.backward_bytes(apart.max(back)))
    }

    /// Like [`Tape::fused_attention`], but as separate operations, with dropout of the weights.
    pub fn unfused_attention(
        &mut self,
        queries: Var,
        keys: Var,
        heads: i64,
        mask: Option<Var>,
        p: f64,
    ) -> Var {
        let Attended { inputs, samples, length, seen, output } = self.attended(queries, keys);
        let (query, key) = (bytes(&output), bytes(&output) / length.max(1) as f64 * seen as f64);
        let weights = TensorSpec::new([samples, heads, length, seen], output.kind);
        let square = bytes(&weights);
        let hidden = mask.map_or(length as f64 * length as f64, |mask| self.bytes(mask));
        // The product copies q and k^T. Scores, scaled scores and masked scores are variables.
        let scores = self.push(Node::new(&inputs, weights.clone()).saving_bytes(query + key));
        let scaled = self.push(Node::new(&[scores], weights.clone()).passing_gradient());
        let masked = Node::new(&[scaled], weights).saving_bytes(hidden).forward_bytes(hidden);
        self.release(scores);
        let masked = self.push(masked);
        self.release(scaled);
        let weights = self.elementwise_by_output(masked);
        let dropped = self.dropout(weights, p);
        let node = Node::new(&[dropped, keys], output).saving(&[dropped]).saving_bytes(key);
        let attended = self.push(node.backward_bytes(square.min(key)));
        [masked, weights, dropped].into_iter().for_each(|var| self.release(var));
        attended
    }

    fn attended(&self, queries: Var, keys: Var) -> Attended {
        let size = |of: Var, axis: usize| self.spec(of).shape.get(axis).copied().unwrap_or(0);
        let own = queries == keys;
        let features = self.spec(queries).last() / if own { 3 } else { 1 };
        Attended {
            inputs: if own { vec![queries] } else { vec![queries, keys] },
            samples: size(queries, 0),
            length: size(queries, 1),
            seen: size(keys, 1),
            output: self.spec(queries).with_last(features),
        }
    }

    /// Whether the bridge's attention computes `queries` [samples, length, features] without a mask
    /// tensor and without dropout.
    pub fn attends(&self, queries: Var, heads: i64, length: i64) -> bool {
        self.attends_in(self.spec(queries), heads, length)
    }

    fn attends_in(&self, queries: &TensorSpec, heads: i64, length: i64) -> bool {
        let size = queries.last() / heads.max(1);
        let is_taken = matches!(queries.kind, Kind::Float | Kind::BFloat16);
        self.kernels() != Kernels::Aten && is_taken && size > 0 && size % 16 == 0 && length >= 16
    }
}

/// What one thread of the bridge's attention works with: four times a head's keys, and blocks of 48
/// queries and 256 keys.
fn attention_scratch(keys: i64, size: i64) -> f64 {
    let padded = (keys + 15) / 16 * 16;
    FLOAT * (4 * padded * size + 4 * 48 * size + 2 * 48 * 256) as f64
}

/// The fused kernel splits queries and keys into blocks of this size.
fn attention_block(length: i64) -> i64 {
    let block = match length {
        768.. => 256,
        192.. => 64,
        _ => 32,
    };
    block.min(length)
}

/// Sizes of an attention, and the spec of its output.
struct Attended {
    inputs: Vec<Var>,
    samples: i64,
    /// Queries per sample.
    length: i64,
    /// Keys per sample.
    seen: i64,
    output: TensorSpec,
}
