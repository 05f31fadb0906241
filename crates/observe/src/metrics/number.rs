//! Numbers in JSON: non-finite ones as `null`, and counts that older files wrote as `56.0`.

use serde::{Deserialize, Deserializer, Serializer, de::Error};

/// Writes a finite number, or `null`.
pub(super) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(*value) // serde_json writes NaN and infinities as null
}

/// Reads a number; `null` becomes NaN.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Reads a non-negative integer, with or without `.0`.
pub(super) fn count<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let value = serde_json::Number::deserialize(deserializer)?;
    let whole = |value: f64| {
        ((0.0..=9e15).contains(&value) && value.fract() == 0.0).then_some(value as u64)
    };
    let count = value.as_u64().or_else(|| value.as_f64().and_then(whole));
    count.ok_or_else(|| D::Error::custom(format!("{value} is no count: a whole number from 0")))
}

/// The same for maps from names to numbers.
pub(super) mod map {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(
        map: &BTreeMap<String, f64>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        map.serialize(serializer)
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<BTreeMap<String, f64>, D::Error> {
        let map = BTreeMap::<String, Option<f64>>::deserialize(deserializer)?;
        Ok(map.into_iter().map(|(name, value)| (name, value.unwrap_or(f64::NAN))).collect())
    }
}
