//! The `gpipe` command: see the library of this crate.

use std::process::ExitCode;

fn main() -> ExitCode {
    gpipe_cli::main()
}
