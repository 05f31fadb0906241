//! A stage's parameters: their values, optimizer state and averages.

use gpipe_core::LayerId;
use tch::Tensor;

use super::{
    config::StageConfig, device::StageDevice, recorder::LayerBytes, sharding::Sharding,
    update::Updater,
};
use crate::{
    error::{LayerError, StageError},
    parameter::LoraRole,
    rng,
    sequence::TieGroup,
    value::tensor_bytes,
};

/// The place of a parameter: the layer's position within the stage, and the parameter's in the
/// layer.
pub(super) type ParamIndex = (usize, usize);

/// The parameters of one stage.
pub(crate) struct Parameters {
    /// The values that are updated, by layer of the stage, in the order of the layer's specs. Tied
    /// parameters share storage.
    pub(super) masters: Vec<Vec<Tensor>>,
    /// The values that layers see, by layer: the masters themselves, or copies in the compute
    /// dtype.
    working: Vec<Vec<Tensor>>,
    /// Gradients of the last step by full name, if gradients are kept.
    pub(super) last_grads: Vec<(String, Tensor)>,
    /// Optimizer state and averages.
    pub(super) updater: Updater,
    /// Which replica keeps the optimizer state of which parameter; `None` if each keeps all.
    pub(super) sharding: Option<Sharding>,
    trains: bool,
}

impl Parameters {
    /// Creates the initial values of the stage's layers.
    pub(super) fn build(config: &StageConfig, device: &StageDevice) -> Result<Self, StageError> {
        let trains = trains(config);
        let (mut masters, mut working) = (Vec::new(), Vec::new());
        for (position, layer) in config.named.iter().enumerate() {
            let id = LayerId::from_index(config.layers.start + position);
            masters.push(Vec::with_capacity(layer.parameters.len()));
            working.push(Vec::with_capacity(layer.parameters.len()));
            for slot in 0..layer.parameters.len() {
                let pair = device
                    .begin_work()
                    .and_then(|()| initial(config, &masters, &working, id, slot))
                    .and_then(|pair| device.check_cap().map(|()| pair));
                let named = |source| {
                    let source = match source {
                        LayerError::OutOfMemory(refusal) => {
                            LayerError::ParametersOutOfMemory(refusal)
                        }
                        source => source,
                    };
                    StageError::Layer { layer: layer.name.clone(), source }
                };
                let (master, seen) = pair.map_err(named)?;
                masters[position].push(master);
                working[position].push(seen);
            }
        }
        let (last_grads, updater) = (Vec::new(), Updater::default());
        let sharding = Sharding::new(config);
        Ok(Self { masters, working, last_grads, updater, sharding, trains })
    }

    /// Takes a new configuration: what is trained, and the optimizer. State that does not fit the
    /// optimizer is dropped, and starts anew with the next update.
    pub(super) fn reconfigure(&mut self, config: &StageConfig) -> Result<(), LayerError> {
        for (layer, named) in config.named.iter().enumerate() {
            for (slot, spec) in named.parameters.iter().enumerate() {
                // Leaves of graphs; the masters of reduced dtypes are part of none.
                let seen = &self.working[layer][slot];
                if seen.requires_grad() != spec.trainable {
                    let _ = seen.f_set_requires_grad(spec.trainable)?;
                }
            }
        }
        self.trains = trains(config);
        self.updater.keep_fitting(config, &self.masters);
        Ok(())
    }

    /// Bytes that each layer holds between steps, once its optimizer state exists.
    pub(super) fn bytes(&self, config: &StageConfig) -> Vec<LayerBytes> {
        let of_layer = |layer: usize| {
            let mut bytes = LayerBytes::default();
            for (slot, spec) in config.named[layer].parameters.iter().enumerate() {
                let (master, seen) = (&self.masters[layer][slot], &self.working[layer][slot]);
                let copy = if master.kind() == seen.kind() { 0 } else { tensor_bytes(seen) };
                let value = tensor_bytes(master) + copy;
                let state = self.updater.bytes((layer, slot));
                bytes.gradients += if spec.trainable { tensor_bytes(master) } else { 0 };
                match spec.tie.as_ref().and_then(|t| config.ties.iter().find(|g| g.name == *t)) {
                    None => {
                        bytes.parameters += value;
                        bytes.optimizer += state;
                    }
                    Some(group) if first_place(config, group) == Some((layer, slot)) => {
                        bytes.tied_parameters += value;
                        bytes.tied_optimizer += state;
                    }
                    Some(_) => {}
                }
            }
            bytes
        };
        (0..config.named.len()).map(of_layer).collect()
    }

    /// The parameters of the layer at `position`, as the layer sees them.
    pub(super) fn of_layer(&self, position: usize) -> &[Tensor] {
        &self.working[position]
    }

    /// Whether anything up to the end of this stage is trained.
    pub(super) fn trains_up_to_here(&self) -> bool {
        self.trains
    }

    /// Drops the last step's gradients, because a failed step has none to show.
    pub(super) fn forget_last_grads(&mut self) {
        self.last_grads.clear();
    }

    /// Copies the masters of the trained parameters of the layer at `position` to the values that
    /// the layer sees, if the dtypes differ.
    pub(super) fn refresh(&self, position: usize) -> Result<(), LayerError> {
        for (master, seen) in self.masters[position].iter().zip(&self.working[position]) {
            if master.kind() != seen.kind() && seen.requires_grad() {
                seen.shallow_clone().f_copy_(master)?;
            }
        }
        Ok(())
    }

    /// As [`Parameters::refresh`], for all layers, with frozen parameters.
    pub(crate) fn refresh_all(&self) -> Result<(), LayerError> {
        let _no_grad = tch::no_grad_guard();
        let pairs = self.masters.iter().flatten().zip(self.working.iter().flatten());
        for (master, seen) in pairs.filter(|(master, seen)| master.kind() != seen.kind()) {
            seen.shallow_clone().f_copy_(master)?;
        }
        Ok(())
    }

    /// Copies of the parameters on the CPU with their full names. A tied parameter appears under
    /// its first use in the model, and only on the stage that owns it.
    pub(crate) fn copies(
        &self,
        names: &[(String, ParamIndex)],
    ) -> Result<Vec<(String, Tensor)>, LayerError> {
        let _no_grad = tch::no_grad_guard();
        let copy = |(name, (layer, slot)): &(String, ParamIndex)| {
            Ok((name.clone(), copy_to_cpu(&self.masters[*layer][*slot])?))
        };
        names.iter().map(copy).collect()
    }

    /// Copies of the last step's gradients on the CPU, if they were kept.
    pub(crate) fn last_grads(&self) -> Result<Vec<(String, Tensor)>, LayerError> {
        let copy = |(name, grad): &(String, Tensor)| Ok((name.clone(), copy_to_cpu(grad)?));
        self.last_grads.iter().map(copy).collect()
    }

    /// Overwrites a parameter at all of its `places` on the stage.
    pub(crate) fn set_all(
        &mut self,
        places: &[ParamIndex],
        value: &Tensor,
    ) -> Result<(), LayerError> {
        let Some((&first, rest)) = places.split_first() else { return Ok(()) };
        self.set(first, value)?;
        for &place in rest {
            // A tied weight that had no memory: all uses take that of the first.
            if is_placeholder(&self.masters[place.0][place.1]) {
                let shared = self.masters[first.0][first.1].shallow_clone();
                self.share(place, &shared, false)?;
            } else {
                self.set(place, value)?;
            }
        }
        Ok(())
    }

    fn set(&mut self, (layer, slot): ParamIndex, value: &Tensor) -> Result<(), LayerError> {
        if is_placeholder(&self.masters[layer][slot]) {
            let own = value.f_detach()?.f_detach_copy()?;
            return self.share((layer, slot), &own, true);
        }
        let _no_grad = tch::no_grad_guard();
        self.masters[layer][slot].f_copy_(value)?;
        let (master, seen) = (&self.masters[layer][slot], &self.working[layer][slot]);
        if master.kind() != seen.kind() {
            seen.shallow_clone().f_copy_(master)?; // including frozen parameters
        }
        Ok(())
    }

    /// Makes `value` the storage of a parameter on the CPU. Elsewhere its values are copied.
    pub(crate) fn share(
        &mut self,
        (layer, slot): ParamIndex,
        value: &Tensor,
        is_first: bool,
    ) -> Result<(), LayerError> {
        let (master, seen) = (&self.masters[layer][slot], &self.working[layer][slot]);
        if master.device() != value.device() {
            return self.set((layer, slot), value);
        }
        let is_copied = master.kind() != seen.kind();
        let (was_master, trains) = (master.requires_grad(), seen.requires_grad());
        // A leaf for each use of a tied weight, as in `initial`.
        let own = if is_first { value.shallow_clone() } else { value.f_detach()? };
        if is_copied {
            self.masters[layer][slot] = own.f_detach()?;
            let _no_grad = tch::no_grad_guard();
            seen.shallow_clone().f_copy_(value)?;
            return Ok(());
        }
        let own = own.f_set_requires_grad(was_master || trains)?;
        self.masters[layer][slot] = own.shallow_clone();
        self.working[layer][slot] = own;
        Ok(())
    }
}

/// Whether anything up to the end of the stage is trained.
fn trains(config: &StageConfig) -> bool {
    config.input_grads.iter().any(|&needed| needed)
        || config.named.iter().flat_map(|layer| &layer.parameters).any(|p| p.trainable)
}

/// A copy on the CPU that shares no storage.
pub(super) fn copy_to_cpu(tensor: &Tensor) -> Result<Tensor, LayerError> {
    if tensor.device() == tch::Device::Cpu {
        return Ok(tensor.f_detach_copy()?);
    }
    Ok(tensor.f_detach()?.f_to(tch::Device::Cpu)?)
}

/// Stands for a parameter whose value the caller gives later. It has the shape and no memory.
fn placeholder(shape: &[i64], kind: tch::Kind) -> Result<Tensor, LayerError> {
    Ok(Tensor::f_zeros([1], (kind, tch::Device::Cpu))?.f_expand(shape, false)?)
}

fn is_placeholder(tensor: &Tensor) -> bool {
    // An axis of one element may have any stride.
    let mut axes = tensor.size().into_iter().zip(tensor.stride());
    tensor.numel() > 1 && axes.all(|(size, stride)| size == 1 || stride == 0)
}

/// Creates the master of a parameter, and the value that its layer sees. A tied parameter starts as
/// its first use does, on whichever stage that is.
fn initial(
    config: &StageConfig,
    masters: &[Vec<Tensor>],
    working: &[Vec<Tensor>],
    id: LayerId,
    slot: usize,
) -> Result<(Tensor, Tensor), LayerError> {
    let spec = &config.named[id.index() - config.layers.start].parameters[slot];
    let group = spec.tie.as_ref().and_then(|tie| config.ties.iter().find(|g| g.name == *tie));
    let reduced = config.precision.is_reduced();
    // Set in place on the leaf itself; only values that layers see are part of graphs.
    let leaf = |tensor: Tensor| tensor.f_set_requires_grad(spec.trainable);
    if let Some((layer, slot)) = group.and_then(|group| first_place(config, group))
        && let (Some(master), Some(seen)) = (
            masters.get(layer).and_then(|values| values.get(slot)),
            working.get(layer).and_then(|values| values.get(slot)),
        )
    {
        // The same storage, but a separate leaf. A leaf that a layer uses twice would receive the
        // sum of both gradients for each use.
        let seen = leaf(seen.f_detach()?)?;
        let master = if reduced { master.shallow_clone() } else { seen.shallow_clone() };
        return Ok((master, seen));
    }
    let (first, init, name) = match group {
        Some(group) => (group.uses[0].0, group.init, group.parameter.as_str()),
        None => (id, spec.init, spec.name.as_str()),
    };
    let key = (config.seed, u64::from(first.0), name);
    let stored = spec.stored(config.precision);
    let master = match config.given_parameters && spec.lora != LoraRole::Adapter {
        true => placeholder(&spec.shape, stored)?,
        false => {
            rng::initial(init, &spec.shape, config.precision.master, key)?.f_to_kind(stored)?
        }
    };
    let master = master.f_to(config.device.tch())?;
    if reduced && !spec.buffer && stored == config.precision.master {
        let seen = leaf(master.f_to_kind(config.precision.compute)?)?;
        return Ok((master, seen));
    }
    let master = leaf(master)?;
    Ok((master.shallow_clone(), master))
}

/// The uses of `group` on this stage, in layer order.
pub(super) fn places(config: &StageConfig, group: &TieGroup) -> Vec<ParamIndex> {
    let here = group.uses.iter().filter(|(layer, _)| config.layers.contains(&layer.index()));
    here.map(|(layer, slot)| (layer.index() - config.layers.start, *slot)).collect()
}

pub(super) fn first_place(config: &StageConfig, group: &TieGroup) -> Option<ParamIndex> {
    places(config, group).first().copied()
}
