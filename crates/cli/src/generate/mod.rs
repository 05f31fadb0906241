//! `gpipe generate`: continues texts token by token.
//!
//! ```text
//! prompt  a b c              (a transformer of 5 learned positions)
//! see     a b c  ->  d       layers keep keys and values of these positions
//! see           d  ->  e     one position at a time
//! see             e  ->  f
//! see     b c d e f  ->  g   the window slides: every token has another position now, so all is
//! see     c d e f g  ->  h   computed again
//! ```
//!
//! Rotary positions have no limit, so a model of the Llama family keeps extending what it keeps.
//! The result does not depend on the number of stages. Texts of equal length share a step. Groups
//! of texts flow through the stages like micro-batches.
//!
//! - [`chat`]: a chat in the terminal
//! - [`prompts`]: the texts to continue; [`settings`]: how; [`texts`]: texts while they grow
//! - [`sampling`]: chooses the next token; [`stops`]: strings that end a text
//! - [`writer`]: prints them
//! - here: the model's part

mod chat;
mod prompts;
pub(crate) mod sampling;
mod settings;
mod stops;
mod texts;
mod writer;

use std::{cell::Cell, collections::BTreeMap};

use gpipe::{
    Pipeline,
    decode::{Decoding, GroupStep},
};
use tch::{Kind, Tensor};

use gpipe_distributed::environment::Environment;

use self::{settings::Settings, texts::Text, writer::Writer};
use crate::{
    CliError,
    args::GenerateArguments,
    config::{Config, Data, Model},
    output::complain,
    processes::Processes,
    run_folder::RunFolder,
    task::{logits, sequence},
};

/// Tokens of prompts that a group's first step computes at most, unless one prompt has more. Logits
/// take this times the vocabulary.
const PROMPT_TOKENS: usize = 2048;
/// The same where a window slides: 4 windows of 1,024 positions.
const WINDOW_TOKENS: usize = 4096;
/// Maximum number of texts that are continued at once.
const BATCH_MAX: usize = 4096;

/// Continues the prompts and prints the new text.
pub(crate) fn run(
    arguments: &GenerateArguments,
    here: Option<&Environment>,
) -> Result<(), CliError> {
    let timeout_s = arguments.run.timeout_s();
    Processes::among(here, timeout_s, |processes| go_on(arguments, processes))
}

/// Reads the contents of a `generation_config.json`, without flags.
#[cfg(feature = "fuzzing")]
pub(crate) fn settings_of(text: &[u8]) -> Result<(), CliError> {
    Settings::of_file(&GenerateArguments::default(), text).map(drop)
}

fn go_on(arguments: &GenerateArguments, processes: &Processes) -> Result<(), CliError> {
    if !(1..=BATCH_MAX).contains(&arguments.batch) {
        return Err(CliError::Usage(format!("--batch {}: use 1 to {BATCH_MAX}", arguments.batch)));
    }
    if arguments.system.is_some() && !arguments.chat {
        return Err(CliError::Usage("--system needs --chat".into()));
    }
    let mut run = RunFolder::open(&arguments.run, processes)?;
    if matches!(run.config.data, Data::Parallel(_)) {
        return Err(CliError::Usage(
            "the model translates, and does not continue a text: use gpipe translate".into(),
        ));
    }
    run.config.one_document_per_row();
    let tokenizer = run.vocabulary.tokenizer()?;
    let mut settings = Settings::new(arguments, &run.config, &run.vocabulary)?;
    if !settings.unused.is_empty() && processes.is_first() {
        complain!(
            "gpipe: warning: not used of generation_config.json: {}",
            settings.unused.join(", ")
        );
    }
    run.config.train.mini_batch = 1; // cuts by cost are for one sample
    if arguments.chat {
        let template = chat::template(&run.vocabulary, &mut settings, processes)?;
        let positions = Positions::of(&run.config)?;
        let chat = chat::Chat { template, tokenizer, settings, seed: arguments.seed, positions };
        return chat.hold(&mut run.pipeline(processes)?, arguments.system.as_deref());
    }
    let read = || processes.decided(|| prompts::read_all(arguments));
    // Whoever types can do so once the model is ready. Rank 0 alone reads, so it decides.
    let are_typed = processes.decided(|| Ok(prompts::are_typed(arguments)))?;
    let given = if are_typed { None } else { Some(read()?) };
    let mut pipeline = run.pipeline(processes)?;
    let all = given.map_or_else(read, Ok)?;
    let writer = match (arguments.json, all.len()) {
        (true, _) => Writer::Json,
        (false, 1) => Writer::Stream,
        (false, _) => Writer::Headings,
    };
    let positions = Positions::of(&run.config)?;
    let mut number = 0;
    for prompts in all.chunks(arguments.batch) {
        let mut texts = Vec::with_capacity(prompts.len());
        for (at, prompt) in prompts.iter().enumerate() {
            texts.push(Text::new(number + at, prompt.clone(), tokenizer, &settings)?);
        }
        let mut batch =
            Batch { texts, settings: &settings, seed: arguments.seed, positions: &positions };
        if !batch.complete(&mut pipeline, |piece| processes.decided(|| writer.piece(piece)))? {
            return Ok(());
        }
        let whole = || {
            let mut goes_on = true;
            for (at, text) in batch.texts.iter().enumerate() {
                goes_on &= writer.whole(number + at, text)?;
            }
            Ok(goes_on)
        };
        if !processes.decided(whole)? {
            return Ok(());
        }
        number += prompts.len();
    }
    Ok(())
}

/// The positions of a model.
struct Positions {
    /// The number of positions that the model has at most.
    most: usize,
    /// The number of positions that it was trained on.
    trained: usize,
    /// Whether the user knows that a text has more than those.
    is_told: Cell<bool>,
}

impl Positions {
    fn of(config: &Config) -> Result<Self, CliError> {
        let (ends, trained) = match &config.model {
            Model::Llama(_) => (false, sequence(config)),
            Model::HuggingFace(_) => {
                let network = config.network()?;
                let trained = usize::try_from(network.positions()).unwrap_or(usize::MAX);
                (network.ends_with_positions(), trained)
            }
            _ => (true, sequence(config)),
        };
        let most = if ends { trained } else { usize::MAX };
        Ok(Self { most, trained, is_told: Cell::new(false) })
    }

    /// Warns once if a text of `length` tokens has positions that the model was not trained on.
    fn tell(&self, length: usize) {
        if length > self.trained && self.trained < self.most && !self.is_told.replace(true) {
            complain!(
                "gpipe: warning: the text has more than {} tokens, the positions that the model \
                was trained on: what follows may be poor",
                self.trained
            );
        }
    }
}

/// Texts that are continued together.
struct Batch<'t> {
    texts: Vec<Text<'t>>,
    settings: &'t Settings,
    seed: u64,
    positions: &'t Positions,
}

/// Texts of the same length, which the layers keep in this order.
struct Group {
    texts: Vec<usize>,
    /// The number of tokens that the layers have seen.
    seen: usize,
}

impl Batch<'_> {
    /// Continues all texts to their ends, and prints what is new of the first one. Returns false if
    /// the reader is gone.
    fn complete(
        &mut self,
        pipeline: &mut Pipeline,
        mut print: impl FnMut(&str) -> Result<bool, CliError>,
    ) -> Result<bool, CliError> {
        let mut by_length: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (number, text) in self.texts.iter().enumerate() {
            by_length.entry(text.tokens.len()).or_default().push(number);
        }
        let mut groups = Vec::new();
        for (length, texts) in by_length {
            let own = texts.chunks((PROMPT_TOKENS / length.max(1)).max(1));
            groups.extend(own.map(|texts| Group { texts: texts.to_vec(), seen: 0 }));
        }
        let mut decoding = pipeline.decoding().only_last();
        loop {
            let steps = self.steps(&mut groups)?;
            if steps.is_empty() {
                break;
            }
            let numbers: Vec<usize> = steps.iter().map(|step| step.group).collect();
            for (group, outputs) in numbers.iter().zip(step(&mut decoding, steps)?) {
                let Some(group) = groups.get(*group) else { continue };
                if !self.grow(&group.texts, outputs, &mut print)? {
                    return Ok(false);
                }
            }
        }
        drop(decoding);
        self.slide(pipeline, print)
    }

    /// The next step of each group whose texts still fit the model's positions.
    fn steps(&self, groups: &mut [Group]) -> Result<Vec<GroupStep>, CliError> {
        let mut steps = Vec::new();
        for (number, group) in groups.iter_mut().enumerate() {
            let goes_on = |text: &usize| self.texts[*text].end.is_none();
            let rows: Vec<usize> =
                (0..group.texts.len()).filter(|row| goes_on(&group.texts[*row])).collect();
            let kept: Vec<usize> = rows.iter().map(|row| group.texts[*row]).collect();
            let length = kept.first().map_or(0, |&text| self.texts[text].tokens.len());
            if kept.is_empty() || length > self.positions.most {
                continue;
            }
            self.positions.tell(length);
            let new = kept.iter().flat_map(|&text| &self.texts[text].tokens[group.seen..length]);
            let new: Vec<i64> = new.map(|&token| i64::from(token)).collect();
            let tokens = Tensor::f_from_slice(&new)?.f_reshape([kept.len() as i64, -1])?;
            let is_same = group.seen == 0 || kept.len() == group.texts.len();
            let rows = (!is_same).then(|| rows.iter().map(|row| *row as i64).collect());
            steps.push(GroupStep { group: number, inputs: vec![tokens], rows });
            (group.texts, group.seen) = (kept, length);
        }
        Ok(steps)
    }

    /// Adds a token to each of `texts`, from logits [texts, positions, vocabulary], of which the
    /// last position counts.
    fn grow(
        &mut self,
        texts: &[usize],
        logits: Tensor,
        print: &mut impl FnMut(&str) -> Result<bool, CliError>,
    ) -> Result<bool, CliError> {
        let last = logits.f_select(1, -1)?.f_to_kind(Kind::Float)?;
        for (row, &text) in texts.iter().enumerate() {
            let mut own = Vec::try_from(&last.f_select(0, row as i64)?.f_contiguous()?)?;
            let piece = self.texts[text].go_on(&mut own, self.settings, self.seed)?;
            if text == 0 && !print(&piece)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Continues texts that are longer than the model's positions. It sees their last tokens.
    fn slide(
        &mut self,
        pipeline: &mut Pipeline,
        mut print: impl FnMut(&str) -> Result<bool, CliError>,
    ) -> Result<bool, CliError> {
        let positions = self.positions.most;
        loop {
            let goes_on = |text: &usize| self.texts[*text].end.is_none();
            let open: Vec<usize> = (0..self.texts.len()).filter(goes_on).collect();
            if open.is_empty() {
                return Ok(true);
            }
            for open in open.chunks((WINDOW_TOKENS / positions).max(1)) {
                let mut windows: Vec<i64> = Vec::with_capacity(open.len() * positions);
                for &text in open {
                    let tokens = &self.texts[text].tokens;
                    let from = tokens.len().saturating_sub(positions);
                    windows.extend(tokens[from..].iter().map(|&token| i64::from(token)));
                }
                let tokens = Tensor::f_from_slice(&windows)?;
                let tokens = tokens.f_reshape([open.len() as i64, positions as i64])?;
                let outputs = logits(pipeline, tokens)?;
                if !self.grow(open, outputs, &mut print)? {
                    return Ok(false);
                }
            }
        }
    }
}

/// The logits of each group's last position.
fn step(decoding: &mut Decoding<'_>, steps: Vec<GroupStep>) -> Result<Vec<Tensor>, CliError> {
    let none = || CliError::Usage("the model has no output".into());
    let outputs = decoding.step(steps)?.into_iter();
    outputs.map(|own| own.into_iter().next().ok_or_else(none)).collect()
}
