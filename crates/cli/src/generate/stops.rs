//! Strings that end a text.

/// Finds the first of some strings in a text that arrives in pieces, and holds back what may be
/// the beginning of one.
#[derive(Debug, Clone, Default)]
pub(super) struct Stops {
    strings: Vec<String>,
    held: String,
}

impl Stops {
    /// `strings` are not empty.
    pub fn new(strings: &[String]) -> Self {
        Self { strings: strings.to_vec(), held: String::new() }
    }

    /// Adds a piece. Returns the text that goes before any of the strings, and whether one was
    /// found. What follows it is dropped.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        let found = self.strings.iter().filter_map(|own| self.held.find(own.as_str())).min();
        if let Some(at) = found {
            let text = self.held.get(..at).unwrap_or_default().to_owned();
            self.held.clear();
            return (text, true);
        }
        let keep = self.open();
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// The number of bytes at the end that may begin one of the strings.
    fn open(&self) -> usize {
        let longest = self.strings.iter().map(String::len).max().unwrap_or(0);
        let candidates = (1..longest.min(self.held.len() + 1)).rev();
        let begins = |count: &usize| {
            let tail = self.held.get(self.held.len() - count..);
            tail.is_some_and(|tail| self.strings.iter().any(|own| own.starts_with(tail)))
        };
        candidates.into_iter().find(begins).unwrap_or(0)
    }

    /// The rest of a text in which none was found.
    pub fn finish(self) -> String {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use gpipe_core::splitmix::Stream;

    use super::*;

    #[test]
    fn oracle_a_string_is_found_across_pieces() {
        let mut stops = Stops::new(&["END".into(), "é!".into()]);
        assert_eq!(stops.push("abE"), ("ab".into(), false));
        assert_eq!(stops.push("N"), (String::new(), false));
        assert_eq!(stops.push("xé"), ("ENx".into(), false));
        assert_eq!(stops.push("!rest"), (String::new(), true));
        let mut stops = Stops::new(&["END".into()]);
        assert_eq!(stops.push("abEN"), ("ab".into(), false));
        assert_eq!(stops.finish(), "EN");
        assert_eq!(Stops::new(&[]).push("all"), ("all".into(), false));
    }

    /// However a text arrives, what is printed is the text before the first string.
    #[test]
    fn property_pieces_do_not_matter() {
        let mut stream = Stream::new(5);
        for _ in 0..500 {
            let mut text = |most: usize| -> String {
                (0..stream.below(most)).map(|_| ['a', 'b', 'é'][stream.below(3)]).collect()
            };
            let (all, mut strings) = (text(30), vec![text(4), text(4)]);
            strings.retain(|own| !own.is_empty());
            let expected = strings.iter().filter_map(|own| all.find(own.as_str())).min();
            let (mut stops, mut printed, mut found) = (Stops::new(&strings), String::new(), false);
            for c in all.chars() {
                let (text, is_end) = stops.push(&c.to_string());
                printed.push_str(&text);
                found |= is_end;
                if found {
                    break;
                }
            }
            if !found {
                printed.push_str(&stops.finish());
            }
            // With one string inside another, the one that is complete first ends the text.
            match expected {
                None => assert!(!found && printed == all, "{all} {strings:?}"),
                Some(first) => {
                    assert!(found && all.starts_with(&printed), "{all} {strings:?}");
                    assert!(printed.len() >= first, "{all} {strings:?} {printed}");
                    let rest = &all[printed.len()..];
                    assert!(strings.iter().any(|own| rest.starts_with(own)), "{all} {strings:?}");
                }
            }
        }
    }
}
