//! Parameter groups: separate settings for parameters selected by name.

/// Settings for all parameters whose full name (`layer.parameter`) matches one of the patterns.
///
/// In a pattern, `*` stands for any text. A parameter belongs to the first group that matches it. A
/// tied weight is matched by the name of its first use.
///
/// ```
/// use gpipe::Group;
/// let groups = [
///     Group::matching(["*.bias", "*norm*"]).weight_decay(0.0),
///     Group::matching(["embedding.*"]).lr_scale(0.1),
/// ];
/// # let _ = groups;
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    pub(crate) patterns: Vec<String>,
    pub(crate) settings: ParameterSettings,
    pub(crate) frozen: bool,
}

impl Group {
    /// What must be equal in all processes: the settings, then the patterns, whose order is of no
    /// effect.
    pub(crate) fn fact(&self) -> String {
        let ParameterSettings { lr_scale, weight_decay } = self.settings;
        let mut patterns: Vec<&str> = self.patterns.iter().map(String::as_str).collect();
        patterns.sort_unstable();
        let decay = weight_decay.map_or_else(|| "the optimizer's".into(), |own| own.to_string());
        let frozen = if self.frozen { ", frozen" } else { "" };
        format!("rate x {lr_scale}, weight decay {decay}{frozen}: {}", patterns.join(", "))
    }
}

/// The settings that a group changes for a parameter.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct ParameterSettings {
    /// Factor on the learning rate.
    pub lr_scale: f64,
    /// Weight decay; `None` keeps the optimizer's.
    pub weight_decay: Option<f64>,
}

impl Default for ParameterSettings {
    fn default() -> Self {
        Self { lr_scale: 1.0, weight_decay: None }
    }
}

impl Group {
    /// Selects the parameters that match one of `patterns`, with the optimizer's settings.
    pub fn matching<P: Into<String>>(patterns: impl IntoIterator<Item = P>) -> Self {
        let patterns = patterns.into_iter().map(Into::into).collect();
        Self { patterns, settings: ParameterSettings::default(), frozen: false }
    }

    /// Multiplies the group's learning rate by `scale`.
    #[must_use]
    pub fn lr_scale(mut self, scale: f64) -> Self {
        self.settings.lr_scale = scale;
        self
    }

    /// Sets the group's weight decay.
    #[must_use]
    pub fn weight_decay(mut self, weight_decay: f64) -> Self {
        self.settings.weight_decay = Some(weight_decay);
        self
    }

    /// Freezes the group: its parameters get no gradient and no optimizer state. Running statistics
    /// of batch norms are still updated while the network is in training mode.
    #[must_use]
    pub fn frozen(mut self) -> Self {
        self.frozen = true;
        self
    }

    fn matches(&self, name: &str) -> bool {
        self.patterns.iter().any(|pattern| name_matches(pattern, name))
    }
}

/// What is wrong with the groups, as a message for the user.
pub(crate) type GroupError = String;

/// Returns the group of each of `names`, in order.
pub(crate) fn settings<'g>(
    groups: &'g [Group],
    names: &[String],
) -> Result<Vec<Option<&'g Group>>, GroupError> {
    for group in groups {
        if group.patterns.is_empty() {
            return Err("a group has no names: name the parameters that it is for".into());
        }
        let ParameterSettings { lr_scale, weight_decay } = group.settings;
        let numbers = [Some(("lr_scale", lr_scale)), weight_decay.map(|w| ("weight_decay", w))];
        for (what, value) in numbers.into_iter().flatten() {
            if !value.is_finite() || value < 0.0 {
                let patterns = &group.patterns;
                return Err(format!(
                    "the group of {patterns:?}: {what} = {value}: use a number of at least 0"
                ));
            }
        }
        for pattern in &group.patterns {
            if !names.iter().any(|name| name_matches(pattern, name)) {
                let some: Vec<&str> = names.iter().take(4).map(String::as_str).collect();
                return Err(format!(
                    "no parameter matches '{pattern}' in a group's names: the model has, for \
                    example, {}",
                    some.join(", ")
                ));
            }
        }
    }
    Ok(names.iter().map(|name| groups.iter().find(|group| group.matches(name))).collect())
}

/// Whether `pattern` matches the whole `name`, where each `*` stands for any text.
///
/// The match is greedy and backtracks to the last `*` only: linear in practice, quadratic at worst.
pub fn name_matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut p, mut n) = (0, 0);
    let mut back: Option<(usize, usize)> = None;
    while n < name.len() {
        if pattern.get(p) == Some(&b'*') {
            back = Some((p, n));
            p += 1;
        } else if pattern.get(p) == Some(&name[n]) {
            (p, n) = (p + 1, n + 1);
        } else if let Some((star, from)) = back {
            (p, n) = (star + 1, from + 1);
            back = Some((star, from + 1));
        } else {
            return false;
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_patterns_match_as_their_plain_definition_says() {
        /// The definition: `*` takes some prefix, and the rest of the pattern matches the rest.
        fn slow(pattern: &[u8], name: &[u8]) -> bool {
            match pattern.split_first() {
                None => name.is_empty(),
                Some((b'*', rest)) => (0..=name.len()).any(|taken| slow(rest, &name[taken..])),
                Some((byte, rest)) => name.first() == Some(byte) && slow(rest, &name[1..]),
            }
        }
        let texts = |letters: &[u8], length: u32| -> Vec<String> {
            let count = letters.len().pow(length);
            let text = |mut number: usize| {
                let mut text = String::new();
                for _ in 0..length {
                    text.push(letters[number % letters.len()] as char);
                    number /= letters.len();
                }
                text
            };
            (0..count).map(text).collect()
        };
        let mut matched = 0;
        for pattern in (0..5).flat_map(|length| texts(b"ab*", length)) {
            for name in (0..6).flat_map(|length| texts(b"ab", length)) {
                let expected = slow(pattern.as_bytes(), name.as_bytes());
                assert_eq!(name_matches(&pattern, &name), expected, "{pattern} {name}");
                matched += usize::from(expected);
            }
        }
        assert!(matched > 500);
    }

    #[test]
    fn fault_groups_that_match_nothing_or_hold_no_number() {
        let names = ["a.weight".to_owned(), "a.bias".to_owned()];
        let none = settings(&[Group::matching(["*.wieght"])], &names).unwrap_err();
        assert!(none.contains("'*.wieght'") && none.contains("a.weight"), "{none}");
        let nan = settings(&[Group::matching(["*"]).lr_scale(f64::NAN)], &names).unwrap_err();
        assert!(nan.contains("lr_scale = NaN"), "{nan}");
        let groups = [Group::matching(["*.bias"]).weight_decay(0.0), Group::matching(["*"])];
        let found = settings(&groups, &names).unwrap();
        assert_eq!(found, [Some(&groups[1]), Some(&groups[0])]);
    }
}
