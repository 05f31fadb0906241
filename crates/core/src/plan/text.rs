//! Writes settings in a plan's file as they are written on the command line.

use std::{fmt::Display, str::FromStr};

use serde::{Deserialize, Deserializer, Serializer, de::Error};

pub(super) fn serialize<S: Serializer>(
    value: &impl Display,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

/// Schedules in full, so that one that was made is read again.
pub(super) mod schedule {
    use serde::Serializer;

    pub(in super::super) use super::deserialize;
    use crate::schedule::Schedule;

    pub(in super::super) fn serialize<S: Serializer>(
        schedule: &Schedule,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&schedule.in_full())
    }
}

pub(super) fn deserialize<'de, T, D>(deserializer: D) -> Result<T, D::Error>
where
    T: FromStr<Err: Display>,
    D: Deserializer<'de>,
{
    String::deserialize(deserializer)?.parse().map_err(D::Error::custom)
}
