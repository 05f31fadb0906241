//! The texts to continue.

use std::{
    fmt::Display,
    io::{IsTerminal, Read},
    path::Path,
};

use crate::{
    CliError,
    args::GenerateArguments,
    files::{io, without_mark},
    output::complain,
};

/// Maximum size of all prompts of a command: 1 MiB.
const PROMPTS_BYTES_MAX: u64 = 1 << 20;

/// Whether the texts come from the standard input.
pub(super) fn are_typed(arguments: &GenerateArguments) -> bool {
    arguments.prompt.is_empty() && arguments.prompt_file.is_none() && arguments.prompts.is_none()
}

/// The texts as given, but for a byte order mark that begins a file. There is at least one.
pub(super) fn read_all(arguments: &GenerateArguments) -> Result<Vec<String>, CliError> {
    if !arguments.prompt.is_empty() {
        let bytes: u64 = arguments.prompt.iter().map(|prompt| prompt.len() as u64).sum();
        check_size("--prompt", bytes)?;
        return Ok(arguments.prompt.clone());
    }
    if let Some(path) = &arguments.prompt_file {
        return Ok(vec![read(std::fs::File::open(path).map_err(io(path))?, path)?]);
    }
    if let Some(path) = &arguments.prompts {
        let text = read(std::fs::File::open(path).map_err(io(path))?, path)?;
        let lines: Vec<String> = text.lines().map(ToOwned::to_owned).collect();
        return match lines.is_empty() {
            false => Ok(lines),
            true => Err(CliError::Usage(format!(
                "--prompts {}: it is empty: give one prompt on each line",
                path.display()
            ))),
        };
    }
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        complain!("gpipe: type the text to continue, then Ctrl-D");
    }
    Ok(vec![read(stdin.lock(), Path::new("the standard input"))?])
}

fn check_size(name: impl Display, bytes: u64) -> Result<(), CliError> {
    match bytes > PROMPTS_BYTES_MAX {
        true => Err(CliError::Usage(format!(
            "{name}: prompts have at most {PROMPTS_BYTES_MAX} bytes: give the end of a longer one"
        ))),
        false => Ok(()),
    }
}

fn read(from: impl Read, name: &Path) -> Result<String, CliError> {
    let mut bytes = Vec::new();
    from.take(PROMPTS_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(io(name))?;
    let name = name.display();
    check_size(&name, bytes.len() as u64)?;
    String::from_utf8(bytes).map(without_mark).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        CliError::Usage(format!(
            "{name} is not UTF-8: invalid byte at offset {offset}: convert it, for example with \
            `iconv -t UTF-8`"
        ))
    })
}
