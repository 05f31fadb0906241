//! Matches a file's tensors to a model's parameters, for import and for fine-tuning from part of a
//! file.
//!
//! [`Fit::new`] compares the whole file with the whole model, by names and shapes alone.
//! [`Fit::read`] then reads the tensors that fit. Only a value's dtype may change, and a matrix is
//! transposed only where the map says so. Nothing is reshaped, padded or cut.

use std::{
    collections::{BTreeMap, btree_map},
    fmt,
};

use tch::{Kind, Tensor};

use crate::{
    names::{Mapped, Names},
    tensor_file::{Entry, FileError, TensorError, shown},
    tensor_set::TensorSet,
};

/// Maximum number of names that a report lists per category.
const LISTED_MAX: usize = 10;

/// A parameter and the tensor it is read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    /// The parameter.
    pub parameter: String,
    /// The tensor's name in the file.
    pub from: String,
    /// Whether the tensor, a matrix, is transposed.
    pub transpose: bool,
    /// The tensor's dtype in the file.
    pub kind: Kind,
    /// The parameter's shape.
    pub shape: Vec<i64>,
}

/// A parameter and a tensor of the same name but another shape.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// The parameter.
    pub parameter: String,
    /// The tensor's name in the file.
    pub from: String,
    /// The parameter's shape.
    pub expected: Vec<i64>,
    /// The tensor's shape, transposed where the map says so.
    pub found: Vec<i64>,
}

/// A tensor that is left out because it equals another tensor, which is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyOf {
    /// The tensor's name in the file.
    pub name: String,
    /// The name in the file of the tensor that it must equal bit for bit.
    pub of: String,
    /// What to do if it does not.
    pub remedy: String,
}

/// How a file fits a model. Parameters are in the model's order, tensors in the order of their
/// names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fit {
    /// Parameters with a tensor of the same shape.
    pub loaded: Vec<Pair>,
    /// Parameters without a tensor in the file.
    pub missing: Vec<String>,
    /// Tensors in the file that match no parameter.
    pub unexpected: Vec<String>,
    /// Parameters whose tensor has another shape.
    pub mismatched: Vec<Mismatch>,
    /// Tensors that the map ignores.
    pub ignored: Vec<String>,
    /// Tensors that the map leaves out as copies. [`Fit::read`] compares them with their originals.
    pub copies: Vec<CopyOf>,
    /// Parameters that deliberately keep the model's values; see [`Fit::without`].
    pub reinit: Vec<String>,
}

impl Fit {
    /// Compares `file` with a model's `parameters`, given as full names and shapes. `names` maps
    /// the file's names to the model's.
    ///
    /// # Errors
    /// [`FileError`] if
    /// - two tensors map to one parameter
    /// - a tensor for a parameter is not floating-point, or is not a matrix but is to be transposed
    /// - a rule of the map that is not optional matches no tensor
    /// - a tensor is declared a copy of one that the file does not have, and whose parameter the
    ///   model does not have
    pub fn new(
        parameters: &[(String, Vec<i64>)],
        file: &TensorSet,
        names: &dyn Names,
    ) -> Result<Self, FileError> {
        let mut all = file.entries().map(|entry| entry.name.as_str());
        if let Some(rule) = names.unused(&mut all) {
            let file = file.path().display();
            let reason = format!(
                "it is the first match of no tensor in {file}: correct it, or add `optional = true`"
            );
            return Err(FileError::Rule { rule, reason });
        }
        let mut fit = Self::default();
        let mut sources = BTreeMap::new();
        for entry in file.entries() {
            let (name, transpose) = match names.map(&entry.name) {
                Mapped::Ignored => {
                    fit.ignored.push(entry.name.clone());
                    continue;
                }
                Mapped::Unmatched => {
                    fit.unexpected.push(entry.name.clone());
                    continue;
                }
                Mapped::Copy { to: Some(to), .. } if parameters.iter().any(|own| own.0 == to) => {
                    (to, false)
                }
                Mapped::Copy { to, of } => match instead(parameters, file, names, &of) {
                    Some(source) => source,
                    None => {
                        fit.copies.push(copy(file, names, &entry.name, &of, to)?);
                        continue;
                    }
                },
                Mapped::To { name, transpose } => (name, transpose),
            };
            match sources.entry(name) {
                btree_map::Entry::Vacant(place) => {
                    place.insert((entry, transpose));
                }
                btree_map::Entry::Occupied(place) => {
                    let first = &place.get().0.name;
                    return Err(FileError::format(
                        file.path(),
                        format!(
                            "{} and {} both become {}: {}",
                            shown(first),
                            shown(&entry.name),
                            shown(place.key()),
                            names.advice()
                        ),
                    ));
                }
            }
        }
        for (parameter, shape) in parameters {
            match sources.remove(parameter) {
                None => fit.missing.push(parameter.clone()),
                Some((entry, transpose)) => {
                    let source = (entry, transpose);
                    fit.pair(parameter, shape, file, source, names.advice())?;
                }
            }
        }
        let rest = sources.into_values().map(|(entry, _)| entry.name.clone());
        fit.unexpected.extend(rest);
        fit.unexpected.sort();
        Ok(fit)
    }

    /// Excludes the parameters whose names match one of `patterns`, in which `*` is any text. A new
    /// softmax on a trained network is one use. Unexpected tensors that match are ignored, too.
    #[must_use]
    pub fn without(mut self, patterns: &[&str]) -> Self {
        let matches =
            |name: &str| patterns.iter().any(|pattern| gpipe::name_matches(pattern, name));
        let taken = self.loaded.extract_if(.., |pair| matches(&pair.parameter));
        self.reinit.extend(taken.map(|pair| pair.parameter));
        let taken = self.mismatched.extract_if(.., |other| matches(&other.parameter));
        self.reinit.extend(taken.map(|other| other.parameter));
        self.reinit.extend(self.missing.extract_if(.., |name| matches(name)));
        self.ignored.extend(self.unexpected.extract_if(.., |name| matches(name)));
        self
    }

    fn pair(
        &mut self,
        parameter: &str,
        shape: &[i64],
        file: &TensorSet,
        (entry, transpose): (&Entry, bool),
        advice: &str,
    ) -> Result<(), FileError> {
        let refuse = |reason: &str| {
            let text =
                format!("{} ({:?}, {}) {reason}", shown(&entry.name), entry.shape, entry.dtype);
            Err(FileError::format(file.path(), text))
        };
        let Some(kind) = entry.kind.filter(|kind| is_floating(*kind)) else {
            return refuse(&format!(
                "cannot become {parameter}: that takes F64, F32, F16 or BF16; {advice}"
            ));
        };
        let mut found = entry.shape.clone();
        if transpose {
            if found.len() != 2 {
                return refuse("is no matrix to be transposed: correct its rule");
            }
            found.reverse();
        }
        let (parameter, from) = (parameter.to_owned(), entry.name.clone());
        let expected = shape.to_owned();
        if found == expected {
            self.loaded.push(Pair { parameter, from, transpose, kind, shape: expected });
        } else {
            self.mismatched.push(Mismatch { parameter, from, expected, found });
        }
        Ok(())
    }

    /// Whether every parameter is read and no tensor is left over, except those left out on
    /// purpose.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.mismatched.is_empty()
    }

    /// Compares tensors that should be copies with their originals.
    ///
    /// # Errors
    /// [`FileError`] if one differs.
    pub fn check_copies(&self, file: &mut TensorSet) -> Result<(), FileError> {
        self.copies.iter().try_for_each(|copy| copy.check(file))
    }

    /// Reads the tensors that fit from `file`, one at a time. Converts each tensor to the `kind` of
    /// its parameter, which must be floating-point. Reads only the tensors of `wanted` parameters.
    /// Values beyond the range of a narrower dtype become infinite. Copies are compared with their
    /// originals before anything is read. `file` must be the file that this `Fit` was made from.
    ///
    /// # Errors
    /// [`FileError`] if a tensor that the map calls a copy differs from its original. Each item of
    /// the iterator carries its own error.
    pub fn read<'a>(
        &'a self,
        file: &'a mut TensorSet,
        kind: impl Fn(&str) -> Kind + 'a,
        wanted: impl Fn(&str) -> bool + 'a,
    ) -> Result<impl Iterator<Item = Result<(String, Tensor), FileError>> + 'a, FileError> {
        self.check_copies(file)?;
        let own = self.loaded.iter().filter(move |pair| wanted(&pair.parameter));
        Ok(own.map(move |pair| {
            let tensor = file.read(&pair.from)?;
            pair.adapt(&tensor, kind(&pair.parameter))
                .map(|tensor| (pair.parameter.clone(), tensor))
                .map_err(|error| FileError::format(file.path(), error.to_string()))
        }))
    }
}

/// The parameter that the tensor `of` becomes, and whether it is transposed, if `file` has no such
/// tensor. A copy then takes its place: some programs write only one of two equal tensors.
fn instead(
    parameters: &[(String, Vec<i64>)],
    file: &TensorSet,
    names: &dyn Names,
    of: &str,
) -> Option<(String, bool)> {
    let Mapped::To { name, transpose } = names.map(of) else { return None };
    let is_missing = !file.entries().any(|entry| names.bare(&entry.name) == of);
    let is_there = parameters.iter().any(|own| own.0 == name);
    (is_missing && is_there).then_some((name, transpose))
}

/// Resolves the tensor `name`, which the map declares a copy of `of`.
fn copy(
    file: &TensorSet,
    names: &dyn Names,
    name: &str,
    of: &str,
    parameter: Option<String>,
) -> Result<CopyOf, FileError> {
    let found = file.entries().find(|entry| names.bare(&entry.name) == of);
    let Some(found) = found.filter(|found| found.name != name) else {
        let (name, of) = (shown(&name), shown(&of));
        let reason =
            format!("{name} is said to be a copy of {of}, which is not there: correct the rule");
        return Err(FileError::format(file.path(), reason));
    };
    let remedy = names.remedy(name, parameter.as_deref());
    Ok(CopyOf { name: name.to_owned(), of: found.name.clone(), remedy })
}

impl CopyOf {
    /// Compares the copy with its original.
    fn check(&self, file: &mut TensorSet) -> Result<(), FileError> {
        if file.are_equal(&self.name, &self.of)? {
            return Ok(());
        }
        let (name, of) = (shown(&self.name), shown(&self.of));
        let reason =
            format!("{name} differs from {of}, of which it should be a copy: {}", self.remedy);
        Err(FileError::format(file.path(), reason))
    }
}

impl Pair {
    fn adapt(&self, tensor: &Tensor, kind: Kind) -> Result<Tensor, TensorError> {
        let swapped = if self.transpose {
            tensor.f_transpose(0, 1).and_then(|matrix| matrix.f_contiguous())
        } else {
            Ok(tensor.shallow_clone())
        };
        let swapped = swapped.map_err(|error| TensorError::of(&self.from, error))?;
        if swapped.size() != self.shape {
            let reason = format!("{:?} is not {:?}: another file", swapped.size(), self.shape);
            return Err(TensorError::of(&self.from, reason));
        }
        to_kind(&self.from, &swapped, kind)
    }
}

/// Converts `tensors` to `kind`, a floating-point dtype, for export. Tensors that already have this
/// dtype share their storage with the result.
///
/// # Errors
/// [`TensorError`] if a tensor or `kind` is not floating-point.
pub fn convert(
    tensors: &[(String, Tensor)],
    kind: Kind,
) -> Result<Vec<(String, Tensor)>, TensorError> {
    tensors.iter().map(|(name, tensor)| Ok((name.clone(), to_kind(name, tensor, kind)?))).collect()
}

fn to_kind(name: &str, tensor: &Tensor, kind: Kind) -> Result<Tensor, TensorError> {
    let error = |error| TensorError::of(name, error);
    let from = tensor.f_kind().map_err(error)?;
    if !is_floating(from) || !is_floating(kind) {
        return Err(TensorError::of(name, format!("{from:?} is not converted to {kind:?}")));
    }
    tensor.f_detach().and_then(|tensor| tensor.f_to_kind(kind)).map_err(error)
}

fn is_floating(kind: Kind) -> bool {
    matches!(kind, Kind::Double | Kind::Float | Kind::Half | Kind::BFloat16)
}

impl fmt::Display for Fit {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let all =
            self.loaded.len() + self.missing.len() + self.mismatched.len() + self.reinit.len();
        write!(f, "{} of {all} parameters are in the file", self.loaded.len())?;
        list(f, "missing from the file", &self.missing, |name| shown(name))?;
        list(f, "in the file but not in the model", &self.unexpected, |name| shown(name))?;
        list(
            f,
            "mismatched in shape",
            &self.mismatched,
            |Mismatch { parameter, from, expected, found }| {
                format!("{}: {expected:?}, but {} is {found:?}", shown(parameter), shown(from))
            },
        )?;
        list(f, "start from random values", &self.reinit, |name| shown(name))?;
        list(f, "copies of others, to the bit", &self.copies, |CopyOf { name, of, .. }| {
            format!("{} of {}", shown(name), shown(of))
        })?;
        list(f, "ignored", &self.ignored, |name| shown(name))
    }
}

fn list<T>(
    f: &mut fmt::Formatter,
    title: &str,
    items: &[T],
    line: impl Fn(&T) -> String,
) -> fmt::Result {
    if items.is_empty() {
        return Ok(());
    }
    write!(f, "\n{} {title}:", items.len())?;
    for item in items.iter().take(LISTED_MAX) {
        write!(f, "\n  {}", line(item))?;
    }
    match items.len().checked_sub(LISTED_MAX) {
        None | Some(0) => Ok(()),
        Some(more) => write!(f, "\n  ... and {more} more"),
    }
}
