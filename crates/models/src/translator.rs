//! The next token's logits of a [`Translation`](crate::Translation), for
//! [`BeamSearch`](gpipe::decode::BeamSearch).
//!
//! Sources and outputs are cut into groups of sentences, which flow through the stages side by
//! side.

use gpipe::{
    Error, Pipeline, Result,
    decode::{Continuation, Decoding, GroupStep, NextLogits},
};
use tch::{Kind, Tensor};

/// Logits from cached keys and values: a step computes the new position alone.
pub struct CachedLogits<'p> {
    decoding: Decoding<'p>,
    sources: Vec<Tensor>,
}

impl<'p> CachedLogits<'p> {
    /// For `sources`: by group int64 [sentences, length], padded at the end.
    pub fn new(pipeline: &'p mut Pipeline, sources: Vec<Tensor>) -> Self {
        Self { decoding: pipeline.decoding(), sources }
    }
}

impl NextLogits for CachedLogits<'_> {
    type Error = Error;

    fn next(&mut self, groups: &[Continuation<'_>]) -> Result<Vec<Tensor>> {
        let step = |group: &Continuation<'_>| {
            let source = self.sources.get(group.group).ok_or_else(|| no_source(group.group))?;
            let (source, new) = match group.rows {
                None => (source.shallow_clone(), 0),
                // The encoder has done its work.
                Some(rows) => {
                    let none =
                        Tensor::f_zeros([rows.len() as i64, 0], (Kind::Int64, tch::Device::Cpu))?;
                    (none, group.prefixes.first().map_or(0, |prefix| prefix.len() - 1))
                }
            };
            Ok(GroupStep {
                group: group.group,
                inputs: vec![source, rows_of(group.prefixes, new)?],
                rows: group.rows.map(<[i64]>::to_vec),
            })
        };
        let steps = groups.iter().map(step).collect::<Result<_>>()?;
        self.decoding.step(steps)?.iter().map(|outputs| last(outputs)).collect()
    }
}

/// Logits from whole prefixes: every step computes all positions again. Slow, and what
/// [`CachedLogits`] is held against.
pub struct RecomputedLogits<'p> {
    pipeline: &'p mut Pipeline,
    sources: Vec<Tensor>,
}

impl<'p> RecomputedLogits<'p> {
    /// As [`CachedLogits::new`].
    pub fn new(pipeline: &'p mut Pipeline, sources: Vec<Tensor>) -> Self {
        Self { pipeline, sources }
    }
}

impl NextLogits for RecomputedLogits<'_> {
    type Error = Error;

    fn next(&mut self, groups: &[Continuation<'_>]) -> Result<Vec<Tensor>> {
        let mut logits = Vec::with_capacity(groups.len());
        for group in groups {
            let source = self.sources.get(group.group).ok_or_else(|| no_source(group.group))?;
            let of: Vec<i64> = group.sentences.iter().map(|&sentence| sentence as i64).collect();
            let source = source.f_index_select(0, &Tensor::f_from_slice(&of)?)?;
            let outputs = self.pipeline.predict(vec![source, rows_of(group.prefixes, 0)?])?;
            logits.push(last(&outputs)?);
        }
        Ok(logits)
    }
}

/// The tokens of all prefixes, which are of one length, from position `from` on: [rows, positions].
fn rows_of(prefixes: &[Vec<i64>], from: usize) -> Result<Tensor> {
    let tokens: Vec<i64> = prefixes
        .iter()
        .flat_map(|prefix| prefix.get(from..).unwrap_or_default())
        .copied()
        .collect();
    Ok(Tensor::f_from_slice(&tokens)?.f_reshape([prefixes.len() as i64, -1])?)
}

/// Of logits [rows, positions, vocabulary] the last position's.
fn last(outputs: &[Tensor]) -> Result<Tensor> {
    match outputs {
        [logits] => Ok(logits.f_select(1, -1)?),
        _ => Err(Error::Input(format!("the model gave {} outputs", outputs.len()))),
    }
}

fn no_source(group: usize) -> Error {
    Error::Input(format!("there is no source of group {group}"))
}
