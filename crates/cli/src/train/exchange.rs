//! The one exchange of a step among the processes of a run: what is asked of all of them.

use serde::{Deserialize, Serialize};

use crate::{CliError, processes::Processes};

/// What is asked of a run between two steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Asked {
    /// The signal that asks it to stop.
    pub signal: Option<i32>,
    /// Whether it is time to save.
    pub save: bool,
}

impl Asked {
    /// What is asked of all processes, where `self` is asked of this one: any may be asked to stop.
    /// When it is time to save is the first one's to say, because clocks differ.
    ///
    /// # Errors
    /// Another process failed or is gone.
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

    /// It was taken for "not due", and the run went on to its next step.
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
