//! Fonts that are one design under several names.
//!
//! Free fonts are copied and renamed: TeX Gyre Termes, Nimbus Roman and STIX are one Times, and DejaVu Sans is also Verana
//! Sans. Split by name alone, a network would be judged by the very letters it has learnt.

use std::collections::{BTreeMap, BTreeSet};

use super::LeftOut;
use super::fonts::Face;

/// Rows and columns of a character's thumbnail.
const SIDE: usize = 8;

/// Two fonts are one design where their thumbnails differ by less than this many thousandths of their ink. Copies differ by
/// 30 and less in some style; different designs by 53 and more (Inter and TeX Gyre Heros, both bold).
const DIFFERENCE_MAX: u64 = 45;

/// A font's characters, small.
#[derive(Debug, Default)]
pub(super) struct Thumbnails {
    pixels: Vec<u8>,
    ink: u64,
}

impl Thumbnails {
    /// Adds a character: how much ink is in each pixel of a square of `side`, a multiple of 8.
    pub(super) fn add(&mut self, coverage: &[u8], side: usize) {
        let cell = (side / SIDE).max(1);
        let mut sums = [0usize; SIDE * SIDE];
        for (place, &ink) in coverage.iter().enumerate() {
            let (row, column) = (place / side / cell, place % side / cell);
            if let Some(sum) = sums.get_mut(row * SIDE + column) {
                *sum += usize::from(ink);
            }
        }
        let means = sums.map(|sum| (sum / (cell * cell)) as u8);
        self.ink += means.iter().map(|&mean| u64::from(mean)).sum::<u64>();
        self.pixels.extend(means);
    }

    fn is_like(&self, other: &Thumbnails) -> bool {
        let limit = DIFFERENCE_MAX * (self.ink + other.ink);
        let mut difference = 0;
        let characters = self.pixels.chunks(SIDE * SIDE).zip(other.pixels.chunks(SIDE * SIDE));
        for (a, b) in characters {
            let differences = a.iter().zip(b).map(|(&a, &b)| u64::from(a.abs_diff(b)));
            difference += 1000 * differences.sum::<u64>();
            // Nearly all pairs end at their first character.
            if difference >= limit {
                return false;
            }
        }
        true
    }
}

/// Leaves out fonts that look like an earlier one to the last pixel: the same outlines in another format.
pub(super) fn without_twins(faces: Vec<Face>, left_out: &mut Vec<LeftOut>) -> Vec<Face> {
    let mut first = BTreeMap::new();
    let mut kept = Vec::with_capacity(faces.len());
    for face in faces {
        if let Some(twin) = first.get(&face.looks) {
            let reason = format!("looks like `{twin}` to the last pixel");
            left_out.push(LeftOut { name: face.name, reason });
        } else {
            first.insert(face.looks, face.name.clone());
            kept.push(face);
        }
    }
    kept
}

/// Gives families that have a font alike the same name, the first of theirs by the alphabet. Thumbnails are dropped then.
pub(super) fn join_families(faces: &mut [Face]) {
    // A family, and one that it is joined to; in the end, the first of all.
    let mut joined: BTreeMap<String, String> = BTreeMap::new();
    let root = |joined: &BTreeMap<String, String>, family: &str| {
        let mut family = family;
        while let Some(next) = joined.get(family) {
            family = next;
        }
        family.to_owned()
    };
    let mut by_ink: Vec<&Face> = faces.iter().collect();
    by_ink.sort_by_key(|face| face.thumbnails.ink);
    for (place, a) in by_ink.iter().enumerate() {
        // The inks' difference is the least that the thumbnails' can be.
        let ink_max = a.thumbnails.ink * (1000 + DIFFERENCE_MAX) / (1000 - DIFFERENCE_MAX);
        let later = by_ink.iter().skip(place + 1).take_while(|b| b.thumbnails.ink <= ink_max);
        for b in later.filter(|b| a.family != b.family && a.thumbnails.is_like(&b.thumbnails)) {
            let pair = BTreeSet::from([root(&joined, &a.family), root(&joined, &b.family)]);
            if let (Some(first), Some(last), 2) = (pair.first(), pair.last(), pair.len()) {
                joined.insert(last.clone(), first.clone());
            }
        }
    }
    for face in faces {
        face.family = root(&joined, &face.family);
        face.thumbnails = Thumbnails::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thumbnails(pixels: impl Iterator<Item = u8>) -> Thumbnails {
        let mut thumbnails = Thumbnails::default();
        thumbnails.add(&pixels.collect::<Vec<_>>(), 16);
        thumbnails
    }

    #[test]
    fn oracle_a_thumbnail_is_means_of_cells() {
        let left_half = thumbnails((0..256).map(|i| if i % 16 < 7 { 200 } else { 0 }));
        let row = [200, 200, 200, 100, 0, 0, 0, 0];
        assert_eq!(left_half.pixels, row.repeat(8));
        assert_eq!(left_half.ink, 700 * 8);
    }

    #[test]
    fn oracle_likeness_is_a_part_of_the_ink() {
        let grey = |by: u8| thumbnails((0..256).map(move |_| 200 + by));
        assert!(grey(0).is_like(&grey(0)));
        assert!(grey(0).is_like(&grey(18))); // 18 of 418 is 43 thousandths,
        assert!(!grey(0).is_like(&grey(19))); // and 19 of 419 is 45.3.
    }
}
