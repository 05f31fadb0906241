//! Counts which classes an image model confuses.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write,
};

use tch::{Kind, Tensor};

use crate::CliError;

/// Minimum and maximum width of the classes' names in a table.
const NAMES: (usize, usize) = (12, 24);
/// Width in which the columns of a table may have more than `least` characters of their names.
const WIDTH: usize = 80;
/// Width of the last column.
const RIGHT: usize = 8;

/// The heads of a table's columns and of its rows. Columns have the shortest beginnings, of `least`
/// characters or more, that tell the classes apart. Without such, both have numbers.
fn labels(classes: &[String], least: usize) -> (Vec<String>, Vec<String>) {
    let column = longest(classes).clamp(NAMES.0, NAMES.1);
    for length in least..=NAMES.1 {
        if length > least && column + classes.len() * (length + 1) + RIGHT > WIDTH {
            break;
        }
        let own: Vec<String> = classes.iter().map(|class| start(class, length)).collect();
        if own.iter().collect::<BTreeSet<_>>().len() == own.len() {
            return (own, classes.to_vec());
        }
    }
    let numbered = classes.iter().enumerate();
    numbered.map(|(at, class)| ((at + 1).to_string(), format!("{} {class}", at + 1))).unzip()
}

fn longest(all: &[String]) -> usize {
    all.iter().map(|one| one.chars().count()).max().unwrap_or(0)
}

fn start(name: &str, length: usize) -> String {
    name.chars().take(length).collect()
}

/// Counts of (true class, most likely class), and other metrics of logits.
pub(crate) struct Confusion {
    classes: usize,
    /// Nonzero counts by (true class, most likely class).
    counts: BTreeMap<(usize, usize), u64>,
    /// Number of images by the rank of their true class in the order of likelihood, from 0.
    ranks: Vec<u64>,
    count: u64,
    nats: f64,
}

impl Confusion {
    pub(crate) fn new(classes: usize) -> Self {
        let (counts, ranks) = (BTreeMap::new(), vec![0; classes]);
        Self { classes, counts, ranks, count: 0, nats: 0.0 }
    }

    /// Adds `logits` [samples, classes], finite and in float64, for `targets` [samples]. Of classes
    /// with equal logits, the lower one counts as more likely.
    pub(crate) fn add(&mut self, logits: &Tensor, targets: &Tensor) -> Result<(), CliError> {
        let own = logits.f_gather(1, &targets.f_unsqueeze(1)?, false)?;
        let nats = logits.f_logsumexp(&[1_i64][..], true)?.f_sub(&own)?;
        self.nats += nats.f_sum(Kind::Double)?.f_double_value(&[])?;
        let places = Tensor::f_arange(self.classes as i64, (Kind::Int64, logits.device()))?;
        let equal = logits.f_eq_tensor(&own)?;
        let equal = equal.f_logical_and(&places.f_lt_tensor(&targets.f_unsqueeze(1)?)?)?;
        let before = logits.f_gt_tensor(&own)?.f_logical_or(&equal)?;
        let ranks = before.f_sum_dim_intlist(1_i64, false, Kind::Int64)?;
        let list = |tensor: &Tensor| Vec::<i64>::try_from(tensor);
        let likeliest = logits.f_argmax(1, false)?;
        let all = list(targets)?.into_iter().zip(list(&likeliest)?).zip(list(&ranks)?);
        for ((class, likeliest), rank) in all {
            *self.counts.entry((class as usize, likeliest as usize)).or_default() += 1;
            self.count += 1;
            if let Some(count) = self.ranks.get_mut(rank as usize) {
                *count += 1;
            }
        }
        Ok(())
    }

    /// The number of images.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// The mean cross entropy, in nats.
    pub(crate) fn loss(&self) -> f64 {
        self.nats / self.count() as f64
    }

    /// The fraction of images whose class is among the `k` most likely ones.
    pub(crate) fn top(&self, k: usize) -> f64 {
        self.ranks.iter().take(k).sum::<u64>() as f64 / self.count() as f64
    }

    fn row(&self, class: usize) -> Vec<u64> {
        let count = |other| self.counts.get(&(class, other)).copied().unwrap_or(0);
        (0..self.classes).map(count).collect()
    }

    /// The most frequent confusions, as (true class, most likely class, count, images of the true
    /// class).
    pub(crate) fn worst(&self, most: usize) -> Vec<(usize, usize, u64, u64)> {
        let mut images = BTreeMap::<usize, u64>::new();
        for (&(class, _), count) in &self.counts {
            *images.entry(class).or_default() += count;
        }
        let of = |class: usize| images.get(&class).copied().unwrap_or(0);
        let others = self.counts.iter().filter(|((class, other), _)| class != other);
        let others = others.map(|(&(class, other), &count)| (class, other, count, of(class)));
        let mut all: Vec<_> = others.collect();
        all.sort_by_key(|&(class, other, count, _)| (std::cmp::Reverse(count), class, other));
        all.truncate(most);
        all
    }

    /// All counts for a terminal: one row per true class, `.` for 0.
    pub(crate) fn table(&self, classes: &[String]) -> String {
        let most = self.counts.values().max().copied().unwrap_or(0);
        let least = most.to_string().len().max(2);
        let (heads, names) = labels(classes, least);
        let width = longest(&heads).max(least) + 1;
        let column = longest(&names).clamp(NAMES.0, NAMES.1);
        let name = |class: usize| start(&names[class], column);
        let mut text = String::new();
        let heads: String = heads.iter().map(|head| format!("{head:>width$}")).collect();
        let _ = writeln!(text, "{:column$}{heads}   right", "");
        for class in 0..self.classes {
            let row = self.row(class);
            let cells = row.iter().map(|&count| match count {
                0 => format!("{:>width$}", "."),
                count => format!("{count:>width$}"),
            });
            let all = row.iter().sum::<u64>();
            let right = match all {
                0 => String::new(),
                all => format!("  {:>5.1}%", 100.0 * row[class] as f64 / all as f64),
            };
            let _ = writeln!(text, "{:<column$}{}{right}", name(class), cells.collect::<String>());
        }
        text
    }

    /// All counts as tab-separated values, with the names of the classes.
    pub(crate) fn tsv(&self, classes: &[String]) -> String {
        // A name comes from a folder and may contain anything.
        let clean = |name: &String| name.replace(['\t', '\n', '\r'], " ");
        let mut text = String::from("true class");
        for class in classes {
            let _ = write!(text, "\t{}", clean(class));
        }
        for (number, class) in classes.iter().enumerate() {
            let _ = write!(text, "\n{}", clean(class));
            for count in self.row(number) {
                let _ = write!(text, "\t{count}");
            }
        }
        text.push('\n');
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regression_equal_logits_are_no_hits() {
        let mut confusion = Confusion::new(3);
        let equal = Tensor::zeros([3, 3], (Kind::Double, tch::Device::Cpu));
        let targets = Tensor::from_slice(&[0_i64, 1, 2]);
        confusion.add(&equal, &targets).unwrap();
        assert_eq!((confusion.top(1), confusion.top(2)), (1.0 / 3.0, 2.0 / 3.0));
    }

    /// Columns had two letters of the names, which were the same for several classes.
    #[test]
    fn regression_the_table_tells_classes_apart() {
        let table = |names: &[&str]| {
            let mut confusion = Confusion::new(names.len());
            let logits = Tensor::eye(names.len() as i64, (Kind::Double, tch::Device::Cpu));
            confusion
                .add(&logits, &Tensor::zeros([names.len() as i64], (Kind::Int64, tch::Device::Cpu)))
                .unwrap();
            let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
            confusion.table(&names)
        };
        let head = |table: &str| table.lines().next().unwrap().to_owned();
        assert_eq!(head(&table(&["a", "b"])), "              a  b   right");
        let two = table(&["cat_black", "cat_white", "Kühe im Stall"]);
        assert_eq!(head(&two), "              cat_b cat_w Kühe    right");
        assert!(two.contains("\nKühe im Stall "), "{two}");
        let alike = "the same for all of its letters but ";
        let names: Vec<String> = (0..3).map(|end| format!("{alike}{end}")).collect();
        let three = table(&names.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!(head(&three).split_whitespace().collect::<Vec<_>>(), ["1", "2", "3", "right"]);
        assert!(three.contains("\n2 the same for"), "{three}");
    }

    #[test]
    fn oracle_what_is_counted_is_what_a_hand_counts() {
        // Images of classes 0, 0, 1 and 2, classified as 0, 1, 1 and 0.
        let logits = [
            [3.0, 1.0, 0.0], // right
            [1.0, 2.0, 0.0],
            [0.0, 5.0, 1.0], // right
            [2.0, 1.0, 0.0], // in the last place
        ];
        let logits = Tensor::from_slice2(&logits).to_kind(Kind::Double);
        let targets = Tensor::from_slice(&[0_i64, 0, 1, 2]);
        let mut confusion = Confusion::new(3);
        confusion.add(&logits.narrow(0, 0, 3), &targets.narrow(0, 0, 3)).unwrap();
        confusion.add(&logits.narrow(0, 3, 1), &targets.narrow(0, 3, 1)).unwrap();
        let expected = [((0, 0), 1), ((0, 1), 1), ((1, 1), 1), ((2, 0), 1)];
        assert_eq!(confusion.counts, BTreeMap::from(expected));
        assert_eq!((confusion.top(1), confusion.top(2), confusion.top(5)), (0.5, 0.75, 1.0));
        assert_eq!(confusion.worst(9), [(0, 1, 1, 2), (2, 0, 1, 1)]);
        let expected = logits.log_softmax(1, Kind::Double).nll_loss(&targets).double_value(&[]);
        assert!((confusion.loss() - expected).abs() < 1e-12);
        let names = ["a\tb".to_owned(), "c".into(), "d".into()];
        assert_eq!(
            confusion.tsv(&names),
            "true class\ta b\tc\td\na b\t1\t1\t0\nc\t0\t1\t0\nd\t1\t0\t0\n"
        );
        assert!(confusion.table(&names).contains("50.0%"));
    }
}
