//! The texts to continue.

use std::{
    io::{IsTerminal, Read},
    path::Path,
};

use crate::{CliError, args::GenerateArguments, files::io, output::complain};

/// Maximum size of all prompts of a command: 1 MiB.
const PROMPTS_BYTES_MAX: u64 = 1 << 20;

/// The texts, exactly as given. There is at least one.
pub(super) fn read_all(arguments: &GenerateArguments) -> Result<Vec<String>, CliError> {
    if !arguments.prompt.is_empty() {
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

fn read(from: impl Read, name: &Path) -> Result<String, CliError> {
    let mut bytes = Vec::new();
    from.take(PROMPTS_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(io(name))?;
    let name = name.display();
    if bytes.len() as u64 > PROMPTS_BYTES_MAX {
        return Err(CliError::Usage(format!(
            "{name}: prompts have at most {PROMPTS_BYTES_MAX} bytes: give the end of a longer one"
        )));
    }
    String::from_utf8(bytes).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        CliError::Usage(format!(
            "{name} is not UTF-8: invalid byte at offset {offset}: convert it, for example with \
            `iconv -t UTF-8`"
        ))
    })
}
