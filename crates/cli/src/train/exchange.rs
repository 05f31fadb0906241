//! The one exchange of a step among a run's processes: requests to stop or to save.

use serde::{Deserialize, Serialize};

use crate::{CliError, processes::Processes};

/// Requests to a run between two steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Asked {
    /// The signal that asks the run to stop.
    pub signal: Option<i32>,
    /// Whether it is time to save.
    pub save: bool,
}

impl Asked {
    /// Combines the requests to all processes, where `self` are those to this one.
    ///
    /// Any process may be asked to stop. Only rank 0 decides when to save, because clocks differ.
    ///
    /// # Errors
    /// Fails if another process failed or is gone.
    pub(super) fn of_all(self, processes: &Processes) -> Result<Self, CliError> {
        if !processes.are_several() {
            return Ok(self);
        }
        let all = processes.gathered(&self)?;
        Ok(Self {
            signal: all.iter().filter_map(|own| own.signal).max(),
            save: all.first().is_some_and(|first| first.save),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::processes::tests::in_two;

    #[test]
    fn oracle_any_process_may_stop_a_run_and_the_first_says_when_to_save() {
        let found = in_two(|processes| {
            let own = match processes.is_first() {
                true => Asked { signal: None, save: false },
                false => Asked { signal: Some(15), save: true },
            };
            own.of_all(processes).map_err(|error| error.to_string())
        });
        assert_eq!(found, vec![Ok(Asked { signal: Some(15), save: false }); 2]);
    }

    /// The error of another process must not be taken for "no save is due", or the run continues.
    #[test]
    fn regression_an_error_of_another_process_is_no_answer_to_whether_a_save_is_due() {
        let told = in_two(|processes| {
            if !processes.is_first() {
                processes.fail(&CliError::Usage("the disk of this one is gone".into()));
                return None;
            }
            let own = Asked { signal: None, save: true };
            Some(own.of_all(processes).map_err(|error| error.to_string()))
        });
        let error = told[0].clone().unwrap().unwrap_err();
        assert!(error.contains("rank 1: the disk of this one is gone"), "{error}");
    }
}
