//! Where the costs of a plan come from: a profile, or estimates from shapes.

use std::path::Path;

use gpipe::{Nanos, estimate::Rate, profile::Profile};

use crate::{
    CliError, args::PlanArguments, config::Config, plan_file::Source, profile, setup, task,
};

/// Default floating-point operations and bytes per second of a device.
const RATE: f64 = 1e11;
const BANDWIDTH: f64 = 2e10;

/// The costs that `gpipe plan` uses: a profile, or estimates from shapes.
pub(crate) fn source(arguments: &PlanArguments, config: &Config) -> Result<Source, CliError> {
    let path = match (&arguments.profile, arguments.analytic) {
        (Some(path), _) => Some(path.clone()),
        (None, true) => None,
        (None, false) => profile::existing(profile::default_path(&arguments.config)),
    };
    let mut source = match path {
        Some(path) => {
            let found = profile::read(&path)?;
            // The numbers of tokens and classes are those of the profiled data, since no data are
            // read here.
            let size = usize::try_from(found.subject.classes).unwrap_or(0);
            let model = task::model(config, size)?;
            let found_in = path.display().to_string();
            let own = profile::subject(config, &model)?;
            found.subject.check(&own, &found_in).map_err(profile::measure_again)?;
            measured(found, &path)
        }
        None => analytic(arguments, config)?,
    };
    if !source.analytic && (arguments.flops.is_some() || arguments.bandwidth.is_some()) {
        return Err(CliError::Usage(
            "--flops and --bandwidth are of analytic costs, and these are measured: give \
            --analytic, too"
                .into(),
        ));
    }
    let transport = &mut source.costs.transport;
    if let Some(bytes_per_s) = arguments.link_bandwidth {
        transport.bytes_per_s = positive("--link-bandwidth", bytes_per_s)?.max(1.0) as u64;
    }
    if let Some(latency_us) = arguments.link_latency {
        if !(0.0..1e12).contains(&latency_us) {
            return Err(CliError::Usage(format!(
                "--link-latency {latency_us}: give microseconds, 0 or more"
            )));
        }
        transport.latency = Nanos((latency_us * 1e3) as u64);
    }
    Ok(source)
}

/// Costs estimated from shapes.
fn analytic(arguments: &PlanArguments, config: &Config) -> Result<Source, CliError> {
    let rate = Rate {
        flops_per_s: positive("--flops", arguments.flops.unwrap_or(RATE))?,
        bytes_per_s: positive("--bandwidth", arguments.bandwidth.unwrap_or(BANDWIDTH))?,
        latency: Nanos(0),
    };
    // The devices need not exist here. Bytes are those of CPU kernels.
    let mut config = config.clone();
    config.pipeline.devices.0 = vec![gpipe::Device::Cpu];
    let model = task::model(&config, task::planned_size(&config)?)?;
    let subject = profile::subject(&config, &model)?.of_shapes();
    // Costs between powers of two are interpolated linearly.
    let samples = config.samples_of_a_pipeline();
    let sizes: Vec<usize> = powers_of_two(samples).chain([samples]).collect();
    config.pipeline.memory.0.clear();
    let costs = setup::pipeline(&config, model)?.estimate(&sizes, &rate)?;
    let why =
        if arguments.analytic { "" } else { " (there is no profile: gpipe profile measures one)" };
    let text = format!(
        "analytic, of devices with {:.4} TFLOP/s and {:.1} GB/s{why}",
        rate.flops_per_s / 1e12,
        rate.bytes_per_s / 1e9
    );
    Ok(Source { costs, text, subject, analytic: true })
}

/// The powers of two up to `most`.
pub(crate) fn powers_of_two(most: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1_usize), |m| m.checked_mul(2)).take_while(move |&m| m <= most)
}

/// The costs of a profile.
pub(crate) fn measured(found: Profile, path: &Path) -> Source {
    let text = format!(
        "measured on {} with {} stages at work ({})",
        found.subject.machine,
        found.stages,
        path.display()
    );
    Source { costs: found.costs, text, subject: found.subject, analytic: false }
}

/// A flag's number, which must be above 0.
pub(crate) fn positive(name: &str, value: f64) -> Result<f64, CliError> {
    match value.is_finite() && value > 0.0 {
        true => Ok(value),
        false => Err(CliError::Usage(format!("{name} {value}: give a number above 0"))),
    }
}
