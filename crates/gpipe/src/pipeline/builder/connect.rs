//! How the stages of different processes are connected.

use std::collections::HashMap;

use gpipe_core::{
    DeviceId, EdgeId,
    exchange::Exchanges,
    lower::{Edge, Program, Topology},
};

use gpipe_bridge::c10d::gpus::has_nccl;

use super::PipelineBuilder;
use crate::{
    device::Device,
    error::{Error, Result},
    processes::{Links, Transport, process_of},
};

impl PipelineBuilder {
    /// The process that runs a device.
    pub(super) fn process(&self, device: usize) -> usize {
        let processes = self.transport.as_ref().map_or(1, |transport| transport.size());
        process_of(device, self.devices.len(), processes)
    }

    /// Whether values pass from GPU to GPU.
    fn connects_gpus(&self) -> bool {
        self.links == Links::Nccl && self.transport.as_ref().is_some_and(|own| own.size() > 1)
    }

    /// The links, and whether this program has what they need.
    pub(super) fn links_fact(&self) -> String {
        match self.connects_gpus() && !has_nccl() {
            true => format!("{}, in a program without NCCL", self.links),
            false => self.links.to_string(),
        }
    }

    /// Checks that the links fit the devices, and that `program` does not deadlock on them.
    pub(super) fn check_links(&self, program: &Program, capacity: usize) -> Result<()> {
        if !self.connects_gpus() {
            return Ok(());
        }
        let refuse = |reason: String| Err(Error::Setting(format!("links over NCCL: {reason}")));
        let processes = self.transport.as_ref().map_or(1, |transport| transport.size());
        let devices = self.devices.len();
        if devices != processes {
            return refuse(format!(
                "{devices} devices in {processes} processes: each process has one; start {devices} \
                processes, or use gloo"
            ));
        }
        if let Some(cpu) = self.devices.iter().position(|device| device.gpu().is_none()) {
            return refuse(format!("device {cpu} is a CPU: use GPUs only, or gloo"));
        }
        let process_of = |device: DeviceId| self.process(device.index());
        match Exchanges::new(program, process_of, capacity) {
            Ok(_) => Ok(()),
            Err(error) => refuse(error.to_string()),
        }
    }

    /// Connects the GPU of this process with those of others. Returns whether it did.
    pub(super) fn connect_gpus(&self, transport: &dyn Transport) -> Result<bool> {
        if !self.connects_gpus() {
            return Ok(false);
        }
        let gpu = self.devices.get(transport.rank()).and_then(|device| device.gpu());
        let connected = transport.connect_gpus(gpu.unwrap_or_default());
        connected.map_err(|error| Error::Setting(error.to_string()))?;
        Ok(true)
    }

    /// The device at the other end of each of a stage's edges.
    pub(super) fn peers(
        &self,
        stage: usize,
        placement: &[usize],
        topology: &Topology,
    ) -> HashMap<EdgeId, Device> {
        let edges = topology.edges.iter().enumerate();
        let peer = |(index, edge): (usize, &Edge)| {
            let (from, to) = (edge.from.index(), edge.to.index());
            let other = if from == stage { to } else { from };
            let own = from == stage || to == stage;
            let device = if self.process(placement[other]) == self.process(placement[stage]) {
                self.devices[placement[other]]
            } else if self.connects_gpus() {
                // The transport takes values from this device.
                self.devices[placement[stage]]
            } else {
                Device::Cpu
            };
            own.then(|| (EdgeId::from_index(index), device))
        };
        edges.filter_map(peer).collect()
    }
}
