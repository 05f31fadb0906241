//! Catalogues and lines of pairs as [`crate::fuzzing`] reads them.

use std::path::Path;

use super::{Catalogue, ParallelCorpus, ParallelOptions, Source, catalogue::Plurals, clean};
use crate::Result;

/// As [`crate::fuzzing::catalogue`].
pub(crate) fn catalogue(catalogue: &Catalogue) -> usize {
    let plurals = Plurals::parse(catalogue.plural_forms.as_deref());
    let options = ParallelOptions::default();
    let forms = catalogue.messages.iter().flat_map(|message| {
        let forms = message.strings.len();
        message.strings.iter().enumerate().map(move |(form, text)| (message, form, forms, text))
    });
    let pairs = forms.filter(|(message, form, forms, text)| {
        let _ = plurals.as_ref().and_then(|plurals| plurals.number(*form, *forms));
        !clean::is_credits(message.context.as_deref(), &message.id, text)
            && clean::cleaned(text, &message.id, &options).is_ok()
    });
    pairs.count()
}

/// As [`crate::fuzzing::pairs`].
pub(crate) fn pairs(path: &Path) -> Result<usize> {
    let source = || Source::Tsv { language: "xx".into(), path: path.into() };
    let mut count = 0;
    for clean in [true, false] {
        let options = ParallelOptions { clean, fewest_pairs: 1, ..ParallelOptions::default() };
        let (_, report) = ParallelCorpus::read(&[source()], &options)?;
        count += report.languages.values().map(|own| own.train + own.validation).sum::<usize>();
    }
    Ok(count)
}
