//! Next-token logits of a [`Translation`](crate::Translation), for
//! [`BeamSearch`](gpipe::decode::BeamSearch).
//!
//! Sources and outputs are split into groups of sentences, which flow through the stages in
//! parallel.

use gpipe::{
    Error, Pipeline, Result,
    decode::{Continuation, Decoding, GroupStep, NextLogits},
};
use tch::{Kind, Tensor};

/// Logits from cached keys and values. A step computes only the new position.
pub struct CachedLogits<'p> {
    decoding: Decoding<'p>,
    sources: Vec<Tensor>,
}

impl<'p> CachedLogits<'p> {
    /// Creates logits for `sources`: one int64 tensor [sentences, length] per group, padded at the
    /// end.
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
                // The encoder has already run.
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

/// Logits from whole prefixes. Every step recomputes all positions, so this is slow. It is the
/// reference for [`CachedLogits`].
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

/// The tokens from position `from` on, for prefixes of equal length: [rows, positions].
fn rows_of(prefixes: &[Vec<i64>], from: usize) -> Result<Tensor> {
    let length = prefixes.first().map_or(0, Vec::len);
    if let Some(other) = prefixes.iter().find(|prefix| prefix.len() != length) {
        return Err(Error::Input(format!(
            "the prefixes of a group have {length} and {} tokens: give sentences that begin with \
            as many",
            other.len()
        )));
    }
    let tokens: Vec<i64> = prefixes
        .iter()
        .flat_map(|prefix| prefix.get(from..).unwrap_or_default())
        .copied()
        .collect();
    Ok(Tensor::f_from_slice(&tokens)?.f_reshape([prefixes.len() as i64, -1])?)
}

/// The last position of logits [rows, positions, vocabulary].
fn last(outputs: &[Tensor]) -> Result<Tensor> {
    match outputs {
        [logits] => Ok(logits.f_select(1, -1)?),
        _ => Err(Error::Input(format!("the model gave {} outputs", outputs.len()))),
    }
}

fn no_source(group: usize) -> Error {
    Error::Input(format!("there is no source of group {group}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tokens of prefixes of unequal length were put into one table one after another, so a
    /// sentence had another's.
    #[test]
    fn regression_prefixes_of_unequal_length_are_refused() {
        let rows = rows_of(&[vec![1, 2, 3], vec![4, 5, 6]], 1).unwrap();
        assert_eq!(rows.size(), [2, 2]);
        assert_eq!(Vec::<i64>::try_from(rows.flatten(0, -1)).unwrap(), [2, 3, 5, 6]);
        let error = rows_of(&[vec![1, 2, 3], vec![4], vec![5, 6]], 0).unwrap_err().to_string();
        assert!(error.contains("have 3 and 1 tokens"), "{error}");
    }
}
