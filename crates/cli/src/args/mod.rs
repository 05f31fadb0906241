//! The command line. Flags are shorthands for configuration keys. They take precedence over
//! `--set`, which takes precedence over the file.
//!
//! - [`config`]: arguments of all commands that read a configuration
//! - [`train`]: arguments of the commands that train, and that start processes
//! - [`pipeline`]: arguments of the commands that run, measure and plan a pipeline
//! - [`trained`]: arguments of the commands that use a trained model
//! - [`files`]: arguments of the commands that read, draw and convert files
//! - here: the commands

mod config;
mod files;
mod pipeline;
mod train;
mod trained;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

pub(crate) use self::config::{ConfigArguments, Typed, typed};
pub(crate) use self::files::{
    CompletionsArguments, ExportArguments, ImportArguments, InitArguments, InspectArguments,
    PlotArguments,
};
pub(crate) use self::pipeline::{
    LedgerArguments, PipelineArguments, PlanArguments, PlanChoice, ProfileArguments,
    ScheduleArguments, TraceArguments, VerifyArguments,
};
pub(crate) use self::train::{LaunchArguments, TrainArguments};
pub(crate) use self::trained::{
    EvalArguments, GenerateArguments, PredictArguments, RunArguments, SearchArguments,
    TranslateArguments,
};

/// Pipeline-parallel training: the number of stages never changes the result.
#[derive(Debug, Parser)]
#[command(name = "gpipe", version, max_term_width = 100)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train the model that a configuration describes, then evaluate it on held-out data
    #[command(after_help = "Example: gpipe train configs/small.toml --text notes/ --stages 2")]
    Train(TrainArguments),
    /// Train a few steps under every given combination and compare all losses, gradients and
    /// parameters bit by bit
    #[command(
        after_help = "Example: gpipe verify configs/small.toml --stages 1,2 --schedule gpipe,1f1b"
    )]
    Verify(VerifyArguments),
    /// Run another gpipe command in several processes on this machine, each with its share of the
    /// stages
    ///
    /// If one process fails, all of them end. On several machines use torchrun instead, or set
    /// RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process.
    #[command(after_help = "Example: gpipe launch --processes 2 train configs/small.toml")]
    Launch(LaunchArguments),
    /// Measure a trained model on held-out data
    ///
    /// A text model reports loss, perplexity, bits per byte and next-token accuracy. An image model
    /// reports loss, top-1 and top-5 accuracy, and the classes it confuses. For each language, a
    /// translation model reports its perplexity, the perplexity of a unigram model, its perplexity
    /// with shuffled sources, and BLEU and chrF of its translations.
    #[command(after_help = "Example: gpipe eval out/small --text more/")]
    Eval(EvalArguments),
    /// Print the most likely classes of each image, with their probabilities
    #[command(after_help = "Example: gpipe predict out/letters a.png b.jpg --top 3")]
    Predict(PredictArguments),
    /// Continue texts with a trained model, or with a model's folder from Hugging Face
    ///
    /// Only the new text is printed: that of one prompt as it is made, those of several when they
    /// are ready. A transformer sees the last data.sequence tokens of the text so far, so it
    /// forgets the beginning of a longer text, and from there on each token costs a forward over
    /// that whole length. A model with rotary positions, such as a Llama, keeps keys and values of
    /// the whole text.
    #[command(after_help = "Example: gpipe generate out/small --prompt 'Once upon' --tokens 50")]
    Generate(GenerateArguments),
    /// Translate the lines of standard input into English, one line of output for each
    ///
    /// Translations are printed as lines arrive. An empty line stays empty. A sentence with more
    /// than data.length tokens is cut to that length, with a warning. A line that is not UTF-8 ends
    /// the command, after the lines before it are translated.
    #[command(after_help = "Example: gpipe translate out/translation --from de < lines.txt")]
    Translate(TranslateArguments),
    /// Draw one training step, the measured timeline below the predicted one
    ///
    /// The step is drawn in the terminal, and on request as SVG, as an HTML page with zoom, or as
    /// Chrome trace JSON (chrome://tracing, ui.perfetto.dev).
    ///
    /// `gpipe trace RUN_DIR` draws the latest step that a run recorded in its folder (step.json,
    /// written after ten steps and at the end). `gpipe trace CONFIG.toml` trains a few steps, draws
    /// one of them and writes trace.json.
    #[command(after_help = "Example: gpipe trace out/small --html")]
    Trace(TraceArguments),
    /// Measure the time and memory of each layer under real conditions, for `gpipe plan`
    ///
    /// The layers run on real data while all stages are at work.
    #[command(after_help = "Example: gpipe profile configs/small.toml --stages 2")]
    Profile(ProfileArguments),
    /// Train a few steps and show where their time goes: products, norms, copies, and so on
    ///
    /// Beside each kind of work is the least time that it would take on this machine: products at
    /// the speed of the largest of them alone, everything else at the speed of memory. Both are
    /// measured at the end.
    #[command(after_help = "Example: gpipe ledger configs/small.toml --stages 2")]
    Ledger(LedgerArguments),
    /// Find the fastest way to run a model: cuts, micro-batches, schedule and re-materialization
    ///
    /// The plan predicts the time and memory of a step, and names what limits them and which
    /// alternatives were considered.
    #[command(after_help = "Example: gpipe plan configs/small.toml --devices 2 --schedule auto")]
    Plan(PlanArguments),
    /// Print a schedule in the format that --schedule file:PATH reads
    ///
    /// Each device has one line of compute actions. Comments give the bubble and what each stage
    /// holds at most.
    #[command(after_help = "Example: gpipe schedule zb-h1 --stages 4 --micro-batches 8 --draw")]
    Schedule(ScheduleArguments),
    /// Draw the loss, speed, bubble and memory of one or several runs as one SVG page
    #[command(after_help = "Example: gpipe plot out/small out/small-2 --out both.svg")]
    Plot(PlotArguments),
    /// Show what a checkpoint, a run, a model's folder or a safetensors file holds, and verify its
    /// checksums
    ///
    /// Every file of a checkpoint is compared with its SHA-256. Every tensor of
    /// weights.safetensors, averages.safetensors and other files written by gpipe is compared with
    /// the digest in the file's metadata. A file from elsewhere has no digests, and the output says
    /// so. The other files of a run's folder are not checked.
    #[command(after_help = "Example: gpipe inspect out/small")]
    Inspect(InspectArguments),
    /// Write the parameters of a checkpoint or run to one safetensors file, named layer.parameter,
    /// or to a folder for Hugging Face's transformers
    #[command(after_help = "Example: gpipe export out/qwen --to Qwen3-0.6B-mine/")]
    Export(ExportArguments),
    /// Convert another program's weights: a safetensors file, such as a PyTorch state dict, or a
    /// model's folder
    ///
    /// A folder with config.json needs neither --config nor --names.
    ///
    /// NAMES.toml maps tensors of the file to parameters. The first rule that
    /// matches a name wins:
    ///
    ///   prefix = "transformer."
    ///   reinit = ["*.scale"]
    ///
    ///   [[names]]
    ///   from = "h.*.attn.c_attn.weight"
    ///   to = "*.attention.qkv.weight"
    ///   transpose = true
    ///
    ///   [[names]]
    ///   from = "*.attn.bias"
    ///   ignore = true
    ///   optional = true
    ///
    ///   [[names]]
    ///   from = "lm_head.weight"
    ///   to = "head.weight"
    ///   copy_of = "wte.weight"
    ///
    /// A `*` matches any text. The n-th `*` of `to` stands for the text that the
    /// n-th `*` of `from` matched. `prefix` is removed from names that begin with
    /// it. Parameters that match `reinit` need not be in the file. `gpipe inspect`
    /// lists the names on either side.
    ///
    /// A rule that matches no tensor is an error, unless it is `optional`.
    /// `copy_of` names another tensor of the file. If the model has no parameter
    /// `to`, the matched tensor is left out. It must then equal the tensor that
    /// `copy_of` names, bit for bit. The number of attention heads is not visible
    /// in any shape, so it is compared with the config.json beside the file, if
    /// there is one.
    #[command(verbatim_doc_comment)] // its lines must fit a narrow terminal
    #[command(after_help = "Example: gpipe import gpt2/ --out gpt2.safetensors")]
    Import(ImportArguments),
    /// Look at a folder of data and write a configuration that trains on it at once
    ///
    /// The folder holds text, JSONL, a folder of images for each class, pairs of sentences
    /// (LANGUAGE.tsv), or a model as Hugging Face distributes it. Comments of the configuration say
    /// what was chosen.
    #[command(after_help = "Example: gpipe init --data notes/ --out notes.toml")]
    Init(InitArguments),
    /// Print a script that completes commands and flags in a shell
    #[command(after_help = "Example: gpipe completions bash > ~/.local/share/bash-completion/\
completions/gpipe")]
    Completions(CompletionsArguments),
}

/// The commands by what they are for, in the order of `gpipe --help`.
pub(crate) const GROUPS: [(&str, &[&str]); 4] = [
    ("Train", &["init", "train", "verify", "launch"]),
    ("Use a trained model", &["eval", "generate", "predict", "translate"]),
    ("See and plan", &["trace", "plot", "profile", "plan", "schedule", "ledger"]),
    ("Files", &["inspect", "export", "import", "completions"]),
];

impl Arguments {
    /// The command line, whose help lists the commands in [`GROUPS`].
    pub(crate) fn grouped() -> clap::Command {
        let command = Self::command();
        let mut text = String::new();
        for (group, names) in GROUPS {
            text += &format!("{group}:\n");
            for name in names {
                let about = command.find_subcommand(name).and_then(clap::Command::get_about);
                let about = about.map(ToString::to_string).unwrap_or_default();
                text += &format!("  {name:<12}{}\n", wrapped(&about, 14));
            }
            text += "\n";
        }
        let begin = "{about-with-newline}\n{usage-heading} {usage}\n\n";
        let end = "Options:\n{options}\n\nEach command explains itself: gpipe train --help";
        command.help_template(format!("{begin}{text}{end}"))
    }

    /// Reads the command line of this process. An error or a question for help ends the process.
    pub(crate) fn read() -> Self {
        let matches = Self::grouped().get_matches();
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }
}

/// `text` in lines of at most 80 columns, all but the first with `indent` spaces in front.
fn wrapped(text: &str, indent: usize) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.last().map_or(0, String::len);
        if last > 0 && indent + last + 1 + word.len() > 80 {
            lines.push(String::new());
        }
        if let Some(last) = lines.last_mut() {
            *last += if last.is_empty() { "" } else { " " };
            *last += word;
        }
    }
    lines.join(&format!("\n{}", " ".repeat(indent)))
}
