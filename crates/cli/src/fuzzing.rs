//! Readers for fuzzing, which users do not need.

use std::path::Path;

use crate::{args::ConfigArguments, config::Config, plan_file::PlanFile};

/// Reads and checks a configuration with overrides. Returns it as TOML, and again after another
/// round trip.
///
/// # Errors
/// Fails if the configuration is invalid.
pub fn config(text: &str, overrides: &[String]) -> Result<[String; 2], String> {
    let read = |text: &str, overrides: &[String]| {
        let arguments = ConfigArguments { set: overrides.to_vec(), ..ConfigArguments::default() };
        let config = Config::from_text(text, Path::new("fuzzed"), &arguments);
        config.and_then(|config| config.check().map(|()| config)).map_err(|error| error.to_string())
    };
    let written = |config: Config| config.to_toml().map_err(|error| error.to_string());
    let first = written(read(text, overrides)?)?;
    let again = written(read(&first, &[]).map_err(|error| format!("what was written: {error}"))?)?;
    Ok([first, again])
}

/// Reads and checks a plan, and predicts its step.
///
/// # Errors
/// Fails if the plan is invalid.
pub fn plan(path: &Path) -> Result<(), String> {
    PlanFile::read(path).map(drop).map_err(|error| error.to_string())
}

/// Reads the contents of a `generation_config.json`.
///
/// # Errors
/// What a user would see.
pub fn generation(bytes: &[u8]) -> Result<(), String> {
    crate::generate::settings_of(bytes).map_err(|error| error.to_string())
}
