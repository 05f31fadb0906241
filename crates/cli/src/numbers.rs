//! Numbers and times as people write them.

use std::time::Duration;

pub(crate) use gpipe_core::units::counted;

/// Units of large numbers, the largest first.
const UNITS: [(f64, &str); 4] = [(1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")];

const MINUTE: u64 = 60;
const HOUR: u64 = 60 * MINUTE;
const DAY: u64 = 24 * HOUR;

/// A number in two or three digits, such as 512, 12.3 k and 3.7 M.
pub(crate) fn short(number: f64) -> String {
    // What would be rounded to 1000 takes the next unit.
    let unit = UNITS.into_iter().find(|(size, _)| number >= 0.9995 * size);
    let Some((size, unit)) = unit else { return format!("{number:.0}") };
    let scaled = number / size;
    match scaled < 99.95 {
        true => format!("{scaled:.1}{unit}"),
        false => format!("{scaled:.0}{unit}"),
    }
}

/// So many seconds, or the longest time that is shown.
pub(crate) fn seconds(seconds: f64) -> Duration {
    const LONGEST: Duration = Duration::from_secs(1 << 40);
    Duration::try_from_secs_f64(seconds).map_or(LONGEST, |time| time.min(LONGEST))
}

/// A time in one or two units, such as 40 s, 4 min and 2 h 5 min.
pub(crate) fn time(time: Duration) -> String {
    let seconds = time.as_secs() + u64::from(time.subsec_millis() >= 500);
    let minutes = (seconds + MINUTE / 2) / MINUTE;
    let (hours, days) = (minutes / 60, seconds / DAY);
    match seconds {
        0..120 => format!("{seconds} s"),
        120..5400 => format!("{minutes} min"),
        _ if hours < 48 => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", seconds % DAY / HOUR),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_numbers_are_short() {
        for (number, expected) in [
            (0.0, "0"),
            (999.4, "999"),
            (999.6, "1.0 k"),
            (12_345.0, "12.3 k"),
            (123_456.0, "123 k"),
            (999_600.0, "1.0 M"),
            (3_700_000.0, "3.7 M"),
            (7.2e9, "7.2 B"),
            (3e13, "30.0 T"),
        ] {
            assert_eq!(short(number), expected);
        }
    }

    #[test]
    fn oracle_times_have_one_or_two_units() {
        for (seconds, expected) in [
            (0.4, "0 s"),
            (89.4, "89 s"),
            (240.0, "4 min"),
            (5399.0, "90 min"),
            (7500.0, "2 h 5 min"),
            (190_000.0, "2 d 4 h"),
        ] {
            assert_eq!(time(super::seconds(seconds)), expected);
        }
        assert!(time(super::seconds(f64::INFINITY)).ends_with(" h"));
    }
}
