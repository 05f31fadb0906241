//! The device that a stage runs on.

use std::{fmt, str::FromStr};

use gpipe_bridge::device;

use crate::error::{Error, Result};

/// One device of a pipeline. It holds one stage, or several if the schedule says so. Several
/// devices of a pipeline may be the same GPU: each has its own thread and stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// A thread of this process, with its own share of cores.
    Cpu,
    /// A GPU, by its number.
    Cuda(usize),
}

impl Device {
    /// The number of the GPU, if this is one.
    pub(crate) fn gpu(self) -> Option<usize> {
        match self {
            Device::Cpu => None,
            Device::Cuda(gpu) => Some(gpu),
        }
    }

    pub(crate) fn tch(self) -> tch::Device {
        match self {
            Device::Cpu => tch::Device::Cpu,
            Device::Cuda(gpu) => tch::Device::Cuda(gpu),
        }
    }

    /// Devices for `count` stages that nobody placed: CPUs.
    pub(crate) fn defaults(count: usize) -> Vec<Self> {
        #[cfg(feature = "testing")]
        if let Some(given) = for_tests() {
            return given.into_iter().cycle().take(count).collect();
        }
        vec![Device::Cpu; count]
    }

    /// Number of usable GPUs.
    pub fn gpus() -> usize {
        device::count()
    }

    /// Whether the GPUs of this process are simulated: the environment variable
    /// `GPIPE_SIMULATED_GPUS` asks for that.
    pub fn gpus_are_simulated() -> bool {
        device::is_simulated().unwrap_or(false)
    }

    /// Checks that the device exists.
    ///
    /// # Errors
    /// If it does not exist. The error names the available devices and a remedy.
    pub fn check(self) -> Result<()> {
        let Some(gpu) = self.gpu() else { return Ok(()) };
        device::is_simulated()
            .map_err(|error| Error::Setting(format!("device {self}: {error}")))?;
        let count = device::count();
        if gpu < count {
            return Ok(());
        }
        let remedy = match count {
            0 if device::has_cuda() => {
                "there is no GPU, or its driver cannot be used: use cpu, or another machine"
                    .to_owned()
            }
            0 => "this libtorch has no CUDA: use cpu, or build with the set that has it \
                  (GPIPE_LIBTORCH=cuda make setup)"
                .to_owned(),
            _ => format!("there are {count} GPUs: use cuda:0 to cuda:{}", count - 1),
        };
        Err(Error::Setting(format!("device {self}: {remedy}")))
    }
}

/// The devices, separated by commas, that tests put stages on by turns instead of the CPU.
#[cfg(feature = "testing")]
fn for_tests() -> Option<Vec<Device>> {
    let text = std::env::var("GPIPE_TEST_DEVICES").ok()?;
    text.split(',').map(|one| one.parse().ok()).collect()
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => f.write_str("cpu"),
            Device::Cuda(gpu) => write!(f, "cuda:{gpu}"),
        }
    }
}

impl FromStr for Device {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let gpu = match text {
            "cpu" => return Ok(Device::Cpu),
            "cuda" => Some(0),
            _ => text.strip_prefix("cuda:").and_then(|number| number.parse().ok()),
        };
        gpu.filter(|gpu| *gpu < 128).map(Device::Cuda).ok_or_else(|| {
            Error::Setting(format!("'{text}' is no device: use cpu, cuda or cuda:0"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_devices_print_as_they_parse() {
        for text in ["cpu", "cuda:0", "cuda:3"] {
            assert_eq!(text.parse::<Device>().unwrap().to_string(), text);
        }
        assert_eq!("cuda".parse::<Device>().unwrap(), Device::Cuda(0));
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cuda:128", "CPU"] {
            let error = text.parse::<Device>().unwrap_err().to_string();
            assert!(error.contains("use cpu, cuda or cuda:0"), "{error}");
        }
    }

    #[test]
    fn fault_a_gpu_that_is_not_there_says_what_is() {
        let missing = Device::Cuda(Device::gpus());
        let error = missing.check().unwrap_err().to_string();
        assert!(error.contains(&missing.to_string()), "{error}");
        assert!(Device::Cpu.check().is_ok());
    }
}
