//! Quantities with their unit in the type, and numbers of things in words.

use std::{
    fmt,
    iter::Sum,
    ops::{Add, AddAssign, Sub},
    str::FromStr,
};

use serde::{Deserialize, Serialize};

/// A number of things: `3 stages`, `2 micro-batches` or `1 stage`.
pub fn counted(count: impl ToString, one: &str) -> String {
    let count = count.to_string();
    let s = match () {
        () if count == "1" => "",
        () if one.ends_with("ch") => "es",
        () => "s",
    };
    format!("{count} {one}{s}")
}

macro_rules! quantity {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize,
            Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u64);

        impl Add for $name {
            type Output = Self;
            fn add(self, other: Self) -> Self {
                Self(self.0.saturating_add(other.0))
            }
        }

        impl Sub for $name {
            type Output = Self;
            /// Saturates at zero.
            fn sub(self, other: Self) -> Self {
                Self(self.0.saturating_sub(other.0))
            }
        }

        impl AddAssign for $name {
            fn add_assign(&mut self, other: Self) {
                *self = *self + other;
            }
        }

        impl Sum for $name {
            fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
                iter.fold(Self(0), Add::add)
            }
        }
    };
}

impl Bytes {
    /// Multiplies by `count`; saturates.
    pub fn times(self, count: usize) -> Self {
        Self(self.0.saturating_mul(count as u64))
    }
}

quantity! {
    /// A time or a duration in nanoseconds.
    Nanos
}
quantity! {
    /// An amount of memory in bytes.
    Bytes
}

impl Nanos {
    /// The value in milliseconds.
    pub fn as_ms(self) -> f64 {
        self.0 as f64 / 1e6
    }
}

impl fmt::Display for Nanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0..1_000 => write!(f, "{} ns", self.0),
            1_000..1_000_000 => write!(f, "{:.1} us", self.0 as f64 / 1e3),
            1_000_000..1_000_000_000 => write!(f, "{:.1} ms", self.0 as f64 / 1e6),
            _ => write!(f, "{:.2} s", self.0 as f64 / 1e9),
        }
    }
}

const BYTE_UNITS: [(&str, u64); 4] =
    [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match BYTE_UNITS.iter().find(|(_, size)| self.0 >= *size) {
            Some((unit, size)) => write!(f, "{:.1} {unit}", self.0 as f64 / *size as f64),
            None => write!(f, "{} B", self.0),
        }
    }
}

/// A text that is not an amount of memory.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not an amount of memory: write a number with B, KiB, MiB, GiB or TiB, such as 512MiB"
)]
pub struct ParseBytesError(String);

impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || ParseBytesError(text.to_owned());
        let trimmed = text.trim();
        let split = trimmed.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let size = match unit {
            "" | "B" => 1,
            _ => BYTE_UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(error)?.1,
        };
        let number: f64 = number.trim().parse().map_err(|_| error())?;
        let bytes = number * size as f64;
        if !(0.0..9.0e18).contains(&bytes) {
            return Err(error());
        }
        Ok(Bytes(bytes as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_bytes_parse_and_print() {
        assert_eq!("1.5GiB".parse(), Ok(Bytes(3 << 29)));
        assert_eq!("700".parse(), Ok(Bytes(700)));
        assert_eq!(Bytes(3 << 29).to_string(), "1.5 GiB");
        for bad in ["", "GiB", "-1MiB", "1GB", "nan", "1e40TiB"] {
            assert!(bad.parse::<Bytes>().is_err(), "{bad}");
        }
    }
}
