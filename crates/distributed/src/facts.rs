//! Facts: named values that must be equal in all processes. They are compared when processes meet,
//! and again when each has built its pipeline.

use gpipe::processes::PeerError;

/// Names and values.
pub(crate) type Facts = Vec<(String, String)>;

/// Longest value in an error message, in characters.
const SHOWN_CHARS: usize = 120;

/// Encodes facts as bytes: each text with its length.
pub(crate) fn encode(facts: &[(String, String)]) -> Vec<u8> {
    let texts = facts.iter().flat_map(|(name, value)| [name, value]);
    let text = |text: &String| {
        let length = (text.len() as u32).to_le_bytes();
        length.into_iter().chain(text.bytes()).collect::<Vec<u8>>()
    };
    texts.flat_map(text).collect()
}

/// Decodes facts, as far as `bytes` is readable.
pub(crate) fn decode(mut bytes: &[u8]) -> Facts {
    let mut text = || -> Option<String> {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        let (text, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        bytes = rest;
        Some(String::from_utf8_lossy(text).into_owned())
    };
    let mut facts = Vec::new();
    while let (Some(name), Some(value)) = (text(), text()) {
        facts.push((name, value));
    }
    facts
}

/// Checks that each rank's facts equal those of rank 0.
pub(crate) fn compare(all: &[Facts]) -> Result<(), PeerError> {
    let Some((first, others)) = all.split_first() else { return Ok(()) };
    for (index, other) in others.iter().enumerate() {
        if other == first {
            continue;
        }
        let value = |facts: &Facts, name: &str| {
            let found = facts.iter().find(|(own, _)| own == name);
            found.map_or_else(|| "none".to_owned(), |(_, value)| value.clone())
        };
        let names = first.iter().chain(other).map(|(name, _)| name);
        let name = names.into_iter().find(|name| value(first, name) != value(other, name));
        let reason = match name {
            Some(name) => {
                let (own, theirs) = (shown(&value(other, name)), shown(&value(first, name)));
                format!("{name} is {own}, but {theirs} on rank 0: start all ranks with the same")
            }
            None => "it has the same facts as rank 0 in another order".to_owned(),
        };
        return Err(PeerError { process: Some(index + 1), reason });
    }
    Ok(())
}

fn shown(value: &str) -> String {
    match value.char_indices().nth(SHOWN_CHARS) {
        Some((end, _)) => format!("{}...", value.get(..end).unwrap_or_default()),
        None => value.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    // tests may panic
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn facts(pairs: &[(&str, &str)]) -> Facts {
        pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn oracle_facts_are_read_as_they_were_written() {
        let own = facts(&[("a", ""), ("", "b\n"), ("ü", "π")]);
        assert_eq!(decode(&encode(&own)), own);
        assert_eq!(decode(&encode(&own)[..9]), facts(&[("a", "")]));
    }

    #[test]
    fn fault_the_first_difference_is_named() {
        let one = facts(&[("version", "1"), ("seed", "3"), ("layers", "4")]);
        let two = facts(&[("version", "1"), ("seed", "5"), ("layers", "7")]);
        assert_eq!(compare(&[one.clone(), one.clone()]), Ok(()));
        let error = compare(&[one.clone(), one.clone(), two]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "rank 2: seed is 5, but 3 on rank 0: start all ranks with the same"
        );
        let more = facts(&[("version", "1"), ("seed", "3"), ("layers", "4"), ("loss", "x")]);
        let error = compare(&[one, more]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "rank 1: loss is x, but none on rank 0: start all ranks with the same"
        );
    }
}
