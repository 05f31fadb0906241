//! Learning merges: byte-pair encoding (Sennrich, Haddow, Birch: "Neural machine translation of rare words with subword
//! units", 2016, algorithm 1).
//!
//! The dependency has a trainer, which is not used here. It starts threads and reads the environment, which this crate
//! does not; and nothing promises that its result is a function of the text: it may keep a pair's occurrences in several
//! queue entries with equal keys, and which of them comes first depends on random hashing. (That was never observed.)
//! Here every choice has one answer: the pair with the highest count, and of those the one with the least ids. Hash maps
//! are looked up, never iterated. A test holds the result against the dependency's, which it equals.
//!
//! ```text
//! words      [1]  "low" x5, "lot" x2          pairs counted: (l,o) 7, (o,w) 5, (o,t) 2
//! repeat     [2]  take the commonest pair     (l,o), joined to the token "lo"
//!            [3]  merge it in its words       "lo w" x5, "lo t" x2
//!            [4]  recount those words' pairs  (lo,w) 5, (lo,t) 2
//! ```

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};

use super::alphabet;

/// Two token ids side by side.
pub(super) type Pair = (u32, u32);

/// A pair seen only once teaches nothing: merging it would memorize one place.
const PAIR_COUNT_MIN: u64 = 2;

/// What was learned.
pub(super) struct Learned {
    /// Every token's text in the byte alphabet, by id.
    pub(super) tokens: Vec<String>,
    /// Pairs in the order in which an encoder merges them.
    pub(super) merges: Vec<Pair>,
    /// Those of the tokens that stand for no text.
    pub(super) specials: Vec<String>,
}

/// Learns up to `vocabulary` tokens from counted words; fewer where the words run out of repeated pairs.
/// The first tokens are `specials`, which no word contains; then the bytes, by character; then the merges, by rank.
pub(super) fn learn(words: &[(&str, u64)], vocabulary: usize, specials: Vec<String>) -> Learned {
    let mut tokens = Vocabulary::new(&specials);
    let mut words: Vec<Word> = words.iter().map(|word| tokens.spell(word)).collect();
    let mut pairs = Pairs::default();
    for (index, word) in words.iter().enumerate() {
        pairs.add(word, index, |_| true); // [1]
    }
    pairs.enqueue_touched();

    let mut merges = Vec::new();
    let mut merged = HashSet::new();
    while tokens.texts.len() < vocabulary {
        let Some(pair) = pairs.pop_commonest() else {
            break;
        };
        let id = tokens.join(pair); // [2]
        if merged.insert(pair) {
            merges.push(pair);
        }
        for index in pairs.take_words(pair) {
            if let Some(word) = words.get_mut(index) {
                pairs.remove(word);
                word.merge(pair, id); // [3]
                pairs.add(word, index, |(a, b)| a == id || b == id); // [4]
            }
        }
        pairs.enqueue_touched();
    }
    Learned { tokens: tokens.texts, merges, specials }
}

/// Tokens by id and by text.
struct Vocabulary {
    texts: Vec<String>,
    ids: HashMap<String, u32>,
    /// The id of each byte.
    bytes: [u32; 256],
}

impl Vocabulary {
    fn new(specials: &[String]) -> Self {
        let chars = alphabet::byte_chars();
        let mut sorted = chars;
        sorted.sort_unstable();
        let mut vocabulary =
            Self { texts: specials.to_vec(), ids: HashMap::new(), bytes: [0; 256] };
        for char in sorted {
            vocabulary.id(char.to_string());
        }
        vocabulary.bytes = chars.map(|char| vocabulary.id(char.to_string()));
        vocabulary
    }

    /// The id of a text, new or not.
    fn id(&mut self, text: String) -> u32 {
        let next = u32::try_from(self.texts.len()).unwrap_or(u32::MAX); // VOCABULARY_MAX is far below.
        *self.ids.entry(text).or_insert_with_key(|text| {
            self.texts.push(text.clone());
            next
        })
    }

    /// The token that a pair becomes. Two pairs may become the same: "ab" + "c" and "a" + "bc".
    fn join(&mut self, (a, b): Pair) -> u32 {
        let text = |id| self.texts.get(id as usize).map_or("", String::as_str);
        let joined = format!("{}{}", text(a), text(b));
        self.id(joined)
    }

    fn spell(&self, (text, count): &(&str, u64)) -> Word {
        let id = |byte: u8| self.bytes.get(usize::from(byte)).copied().unwrap_or(0); // Always there.
        Word { symbols: text.bytes().map(id).collect(), count: *count }
    }
}

/// A word as it is spelled so far, and how often it occurs.
struct Word {
    symbols: Vec<u32>,
    count: u64,
}

impl Word {
    fn pairs(&self) -> impl Iterator<Item = Pair> {
        let next = self.symbols.iter().skip(1);
        self.symbols.iter().copied().zip(next.copied())
    }

    /// Replaces the pair by `id`, from left to right: "aaa" becomes "(aa) a".
    fn merge(&mut self, pair: Pair, id: u32) {
        let mut merged = Vec::with_capacity(self.symbols.len());
        let mut symbols = self.symbols.iter().copied().peekable();
        while let Some(symbol) = symbols.next() {
            let joins = symbol == pair.0 && symbols.next_if_eq(&pair.1).is_some();
            merged.push(if joins { id } else { symbol });
        }
        self.symbols = merged;
    }
}

/// How often each pair occurs, and in which words.
///
/// Invariant between merges: for each pair with count c >= [`PAIR_COUNT_MIN`] the queue has an entry of at least c.
/// A count that falls leaves its entry too high; it is put right when the entry comes up.
#[derive(Default)]
struct Pairs {
    occurrences: HashMap<Pair, Occurrences>,
    queue: BinaryHeap<(u64, Reverse<Pair>)>,
    /// Pairs whose counts have risen since the queue last heard of them.
    touched: Vec<Pair>,
}

#[derive(Default)]
struct Occurrences {
    count: u64,
    /// Words that have had the pair; some no longer do, some are named twice.
    words: Vec<usize>,
}

impl Pairs {
    /// Counts the pairs of a word, and notes the word for those that may be new to it.
    fn add(&mut self, word: &Word, index: usize, is_new: impl Fn(Pair) -> bool) {
        for pair in word.pairs() {
            let occurrences = self.occurrences.entry(pair).or_default();
            occurrences.count += word.count;
            if is_new(pair) {
                occurrences.words.push(index);
                self.touched.push(pair);
            }
        }
    }

    fn remove(&mut self, word: &Word) {
        for pair in word.pairs() {
            if let Some(occurrences) = self.occurrences.get_mut(&pair) {
                occurrences.count = occurrences.count.saturating_sub(word.count);
            }
        }
    }

    fn count(&self, pair: Pair) -> u64 {
        self.occurrences.get(&pair).map_or(0, |of| of.count)
    }

    fn enqueue_touched(&mut self) {
        let mut touched = std::mem::take(&mut self.touched);
        touched.sort_unstable();
        touched.dedup();
        for pair in touched {
            self.queue.push((self.count(pair), Reverse(pair)));
        }
    }

    /// The pair with the highest count; of several the least.
    fn pop_commonest(&mut self) -> Option<Pair> {
        while let Some((recorded, Reverse(pair))) = self.queue.pop() {
            let count = self.count(pair);
            if count < PAIR_COUNT_MIN {
                continue;
            }
            if count == recorded {
                return Some(pair);
            }
            if count < recorded {
                self.queue.push((count, Reverse(pair)));
            } // Else the count has risen, and another entry says so.
        }
        None
    }

    /// The words that may have the pair, each once.
    fn take_words(&mut self, pair: Pair) -> Vec<usize> {
        let occurrences = self.occurrences.get_mut(&pair);
        let mut words = occurrences.map_or_else(Vec::new, |of| std::mem::take(&mut of.words));
        words.sort_unstable();
        words.dedup();
        words
    }
}
