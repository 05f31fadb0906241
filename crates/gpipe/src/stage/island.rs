//! One layer as an autograd island: its inputs are leaves, and its VJP is taken separately.
//!
//! With one graph per stage, autograd would sum gradients that meet (at a residual or a skip) in an
//! order that depends on the cut. The sums of an island are inside one layer, so no cut can change
//! them. Each layer's memory is also released as soon as its backward is done.

use gpipe_bridge::{
    hollow::HollowGraph,
    layout::settled,
    linear::Kernels,
    offload::root_of,
    split::{First, split},
    vjp::{Request, vjp},
};
use gpipe_core::LayerId;
use tch::{Kind, Tensor};

use super::{
    differentiable,
    feed::Slice,
    gradients::OrderedAccumulator,
    hollow::HollowIsland,
    later::{Later, WeightGradients},
};
use crate::{
    arguments::if_defined,
    batch_norm::BatchStatistics,
    cache::Cache,
    error::{LayerError, StageError},
    guard::{Untouched, catching},
    inspect::{Inspection, Inspections},
    layer::{Forward, Infer},
    rng::{MaskKey, Random},
    sequence::NamedLayer,
    spec::TensorSpec,
};

/// The inputs of one run of a layer.
pub(super) struct LayerRun<'a> {
    pub layer: &'a NamedLayer,
    pub id: LayerId,
    pub parameters: &'a [Tensor],
    /// The pipeline's inputs by name.
    pub named: &'a [(String, Tensor)],
    pub input_grads: bool,
    pub training: bool,
    pub seed: u64,
    pub step: u64,
    pub slice: Slice,
    pub kind: Kind,
    pub kernels: Kernels,
    /// Whether anybody reads the outputs' values.
    pub is_read: bool,
    /// Whether the graph stays for the recomputation, without what autograd saves.
    pub is_hollow: bool,
}

/// The graph of a layer's forward: the leaves, and what was computed from them.
pub(super) struct Island {
    id: LayerId,
    inputs: Vec<Tensor>,
    pops: Vec<(usize, Tensor)>,
    outputs: Vec<Tensor>,
    stashed: Vec<(String, Tensor)>,
    parameters: Vec<Tensor>,
}

/// What the random numbers of layer `id` depend on.
pub(super) fn random(seed: u64, id: LayerId, step: u64, slice: Slice) -> Random {
    let (layer, first_sample) = (id.0.into(), slice.first as u64);
    Random::new(MaskKey { seed, layer, step, site: 0, first_sample }, slice.count as i64)
}

/// The number of the loss among layers.
pub(super) const LOSS: LayerId = LayerId(u32::MAX);

/// Returns detached tensors that share the data. They require a gradient if `grads` is set.
pub(super) fn leaves(tensors: &[Tensor], grads: bool) -> Result<Vec<Tensor>, LayerError> {
    tensors.iter().map(|tensor| leaf(tensor, grads)).collect()
}

fn leaf(tensor: &Tensor, grads: bool) -> Result<Tensor, LayerError> {
    let leaf = if_defined(tensor, Tensor::f_detach)?;
    Ok(if grads && differentiable(&leaf) { leaf.f_set_requires_grad(true)? } else { leaf })
}

/// Prepares a layer's output for the next layer: without a graph, and in the layout that all values
/// between layers have.
fn passed_on(tensor: &Tensor) -> Result<Tensor, LayerError> {
    if_defined(tensor, |tensor| Ok(settled(tensor.f_detach()?)?))
}

/// The result of running a layer.
pub(super) struct Ran {
    pub outputs: Vec<Tensor>,
    /// Stashed skips by name.
    pub stashed: Vec<(String, Tensor)>,
    /// The island, if the run had a graph.
    pub island: Option<Island>,
    /// The island of a run that is hollow.
    pub hollow: Option<HollowIsland>,
    /// The statistics of the layer's batch norms.
    pub statistics: Vec<BatchStatistics>,
    /// The layer's cache, while decoding.
    pub cache: Option<Cache>,
    /// Checks of the layer that are left to do.
    pub inspections: Vec<Inspection>,
}

impl LayerRun<'_> {
    /// Runs the layer. `pops` are (skip, name, value). With `graph`, also returns an island for the
    /// backward.
    pub(super) fn forward(
        &self,
        inputs: Vec<Tensor>,
        pops: Vec<(usize, String, Tensor)>,
        cache: Option<Cache>,
        graph: bool,
    ) -> Result<Ran, StageError> {
        self.run(inputs, pops, cache, graph).map_err(|source| {
            self.layer.layer.failed(&source);
            StageError::Layer { layer: self.layer.name.clone(), source }
        })
    }

    fn run(
        &self,
        inputs: Vec<Tensor>,
        pops: Vec<(usize, String, Tensor)>,
        cache: Option<Cache>,
        graph: bool,
    ) -> Result<Ran, LayerError> {
        let grads = graph && self.input_grads;
        let inputs = if graph { leaves(&inputs, grads)? } else { inputs };
        let pops = self.popped(pops, grads)?;
        let mut ctx = self.context(&pops, cache);
        let popped = pops.iter().map(|(_, _, tensor)| tensor);
        let named = self.named.iter().map(|(_, tensor)| tensor);
        let given = Untouched::new(inputs.iter().chain(popped).chain(named))?;
        let weights = Untouched::new(self.parameters)?;
        let mut forward = || {
            let _scope = ctx.random.enter()?;
            catching(|| self.layer.layer.forward(&mut ctx, &inputs))
        };
        let (ran, hollow) = match self.is_hollow {
            true => HollowGraph::record(&mut forward).map(|(ran, graph)| (ran, Some(graph)))?,
            false => (forward(), None),
        };
        if let Some(index) = weights.changed()? {
            let spec = self.layer.parameters.get(index);
            return Err(LayerError::ParameterChanged(
                spec.map_or_else(String::new, |spec| spec.name.clone()),
            ));
        }
        let outputs = ran?;
        let (stashed, statistics, cache) = (ctx.stashed, ctx.statistics, ctx.cache);
        let inspections = ctx.inspections.take();
        if let Some((name, _)) = ctx.pops.first() {
            return Err(LayerError::Value(format!(
                "its infer pops a skip '{name}', and its forward does not take it: call pop in both"
            )));
        }
        self.check_outputs(&inputs, &pops, &outputs, &stashed)?;
        if given.changed()?.is_some() {
            let reason =
                "its forward changes its input in place: use the form that makes a new tensor";
            return Err(LayerError::Value(reason.into()));
        }
        if graph {
            self.check_trains(&inputs, &pops, &outputs, &stashed)?;
        }
        let passed_on = outputs.iter().map(passed_on).collect::<Result<_, LayerError>>()?;
        let sent =
            stashed.iter().map(|(name, tensor)| Ok((name.clone(), self::passed_on(tensor)?)));
        let sent = sent.collect::<Result<_, LayerError>>()?;
        let island = graph.then(|| Island {
            id: self.id,
            inputs,
            pops: pops.into_iter().map(|(index, _, tensor)| (index, tensor)).collect(),
            outputs,
            stashed,
            parameters: self.parameters.iter().map(Tensor::shallow_clone).collect(),
        });
        let (island, hollow) = match (island, hollow) {
            (Some(island), Some(graph)) => (None, HollowIsland::new(island, graph)?),
            (island, _) => (island, None),
        };
        let (outputs, stashed) = (passed_on, sent);
        Ok(Ran { outputs, stashed, island, hollow, statistics, cache, inspections })
    }
}

impl LayerRun<'_> {
    /// The skips that the layer pops, as leaves.
    pub(super) fn popped(
        &self,
        pops: Vec<(usize, String, Tensor)>,
        grads: bool,
    ) -> Result<Vec<(usize, String, Tensor)>, LayerError> {
        let popped = |(index, name, tensor)| Ok((index, name, leaf(&tensor, grads)?));
        pops.into_iter().map(popped).collect()
    }

    /// What the layer's forward sees besides its inputs.
    pub(super) fn context(
        &self,
        pops: &[(usize, String, Tensor)],
        cache: Option<Cache>,
    ) -> Forward<'_> {
        Forward {
            parameters: self.parameters,
            kernels: self.kernels,
            training: self.training,
            random: random(self.seed, self.id, self.step, self.slice),
            named: self.named,
            pops: pops.iter().map(|(_, name, t)| (name.clone(), t.shallow_clone())).collect(),
            stashed: Vec::new(),
            statistics: Vec::new(),
            cache,
            inspections: Inspections::default(),
            adapters: Default::default(),
            adapted: Default::default(),
            unread: self.layer.layer.unread().filter(|_| !self.is_read),
        }
    }

    /// Checks that the outputs match what `infer` declared. A mismatch would surface later as
    /// silent broadcasting, or not at all.
    fn check_outputs(
        &self,
        inputs: &[Tensor],
        pops: &[(usize, String, Tensor)],
        outputs: &[Tensor],
        stashed: &[(String, Tensor)],
    ) -> Result<(), LayerError> {
        let specs = |tensors: &[Tensor]| tensors.iter().map(TensorSpec::of).collect::<Vec<_>>();
        let pops = pops.iter().map(|(_, name, tensor)| (name.clone(), TensorSpec::of(tensor)));
        let mut ctx = Infer::with_open(self.kind, pops.collect());
        let named = self.named.iter();
        ctx.named = named.map(|(name, tensor)| (name.clone(), TensorSpec::of(tensor))).collect();
        let promised = self.layer.layer.infer(&mut ctx, &specs(inputs))?;
        let made = specs(outputs);
        let names: Vec<&str> = stashed.iter().map(|(name, _)| name.as_str()).collect();
        if names != ctx.stashed {
            return Err(LayerError::Shape(format!(
                "its forward stashed {names:?}, its infer says {:?}",
                ctx.stashed
            )));
        }
        for (name, tensor) in stashed {
            let made = TensorSpec::of(tensor);
            let promised = ctx.open.iter().find(|(open, _)| open == name).map(|(_, spec)| spec);
            if let Some(promised) = promised.filter(|promised| **promised != made) {
                return Err(LayerError::Shape(format!(
                    "its forward stashed {made} as '{name}', its infer says {promised}"
                )));
            }
        }
        if made == promised {
            return Ok(());
        }
        let list = |specs: &[TensorSpec]| match specs {
            [] => "nothing".to_owned(),
            specs => specs.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
        };
        Err(LayerError::Shape(format!(
            "its forward gave {}, its infer says {}",
            list(&made),
            list(&promised)
        )))
    }

    /// Checks that the outputs depend on trained values, if this layer or an earlier one is
    /// trained. Otherwise training would run step after step without learning.
    fn check_trains(
        &self,
        inputs: &[Tensor],
        pops: &[(usize, String, Tensor)],
        outputs: &[Tensor],
        stashed: &[(String, Tensor)],
    ) -> Result<(), LayerError> {
        let popped = pops.iter().map(|(_, _, tensor)| tensor);
        let trained = inputs.iter().chain(popped).chain(self.parameters);
        let mut made = outputs.iter().chain(stashed.iter().map(|(_, tensor)| tensor)).peekable();
        if !trained.into_iter().any(Tensor::requires_grad)
            || made.peek().is_none()
            || made.clone().any(Tensor::requires_grad)
            || !made.any(differentiable)
        {
            return Ok(());
        }
        Err(LayerError::Value(
            "no output of its forward has a gradient, so neither it nor any layer before it would \
             learn: do not detach the outputs or compute them without gradients, or freeze the \
             parameters up to here"
                .into(),
        ))
    }
}

/// Gradients of a layer's inputs, and of the skips that it popped.
type Back = (Vec<Option<Tensor>>, Vec<(usize, Option<Tensor>)>);

impl Island {
    /// An island for the loss, after the last layer's.
    pub(super) fn of_loss(outputs: Vec<Tensor>, sums: Vec<Tensor>) -> Self {
        Self {
            id: LOSS,
            inputs: outputs,
            pops: Vec::new(),
            outputs: sums,
            stashed: Vec::new(),
            parameters: Vec::new(),
        }
    }

    /// The layer's position within a stage whose first layer is `first`.
    pub(super) fn position(&self, first: usize) -> usize {
        self.id.index() - first
    }

    /// The names of the skips that the layer stashed, in order.
    pub(super) fn stashed_names(&self) -> impl Iterator<Item = &str> {
        self.stashed.iter().map(|(name, _)| name.as_str())
    }

    /// Gradients of the losses' sums: `factors`, or NaN if the sum of a loss that `trains` is not
    /// finite. It does not look at the sums, so that it does not wait for a GPU.
    pub(super) fn seeds(
        &self,
        factors: impl Iterator<Item = f64>,
        trains: impl Iterator<Item = bool>,
    ) -> Result<Vec<Option<Tensor>>, LayerError> {
        let _no_grad = tch::no_grad_guard();
        let mut zero = None::<Tensor>;
        for (sum, _) in self.outputs.iter().zip(trains).filter(|(_, trains)| *trains) {
            let own = sum.f_detach()?.f_mul_scalar(0.0)?; // NaN if the sum is not finite
            zero = Some(match zero {
                Some(others) => others.f_add(&own)?,
                None => own,
            });
        }
        let seed = |(sum, factor): (&Tensor, f64)| -> Result<Option<Tensor>, LayerError> {
            let factor = sum.f_full_like(factor)?.f_detach()?;
            Ok(Some(match &zero {
                Some(zero) => factor.f_add(&zero.f_reshape(factor.size().as_slice())?)?,
                None => factor,
            }))
        };
        self.outputs.iter().zip(factors).map(seed).collect()
    }

    /// The VJP. `grads` are the gradients of the outputs, `stashes` those of stashed skips. The
    /// gradients of the parameters are added to `accumulators`. Consumes the graph.
    pub(super) fn backward(
        self,
        grads: Vec<Option<Tensor>>,
        stashes: Vec<Option<Tensor>>,
        accumulators: &mut [Option<Tensor>],
    ) -> Result<Back, LayerError> {
        let trained = self.trained();
        let found = self.pull(&grads, &stashes, &trained, |request| {
            let mut sums: Vec<_> = trained.iter().map(|&i| accumulators[i].take()).collect();
            let found = vjp(request, &mut sums)?;
            for (&i, sum) in trained.iter().zip(sums) {
                accumulators[i] = sum;
            }
            Ok(found)
        })?;
        self.back(found)
    }

    /// The first half of the VJP. Returns the gradients of inputs and skips, and the rest for the
    /// second half. Parameter gradients that are already computed are added if it is their turn;
    /// the others are left to the second half.
    pub(super) fn backward_input(
        self,
        grads: Vec<Option<Tensor>>,
        stashes: Vec<Option<Tensor>>,
        mut turn: OrderedAccumulator<'_>,
    ) -> Result<(Back, WeightGradients), LayerError> {
        let trained = self.trained();
        let in_turn: Vec<bool> = trained.iter().map(|&i| turn.is_of(i)).collect();
        let mut later = Later::Gradients(Vec::new());
        let found = self.pull(&grads, &stashes, &trained, |request| {
            let mut sums: Vec<_> = trained.iter().map(|&i| turn.take(i)).collect();
            let split = split(request, &mut sums, &in_turn)?;
            let (found, summed) = match split {
                Some(First { inputs, summed, later: rest }) => {
                    later = Later::Graph(rest);
                    (inputs, summed)
                }
                None => {
                    // The layer cannot be split: compute both halves now.
                    let own = sums.iter_mut().zip(&in_turn);
                    let own = own.map(|(sum, &in_turn)| sum.take_if(|_| in_turn));
                    let mut own: Vec<_> = own.collect();
                    let found = vjp(request, &mut own)?;
                    for ((sum, own), _) in
                        sums.iter_mut().zip(&mut own).zip(&in_turn).filter(|(_, in_turn)| **in_turn)
                    {
                        *sum = own.take();
                    }
                    later = Later::Gradients(own);
                    (found, in_turn.clone())
                }
            };
            for ((&i, sum), summed) in trained.iter().zip(sums).zip(summed) {
                turn.put(i, sum, summed);
            }
            Ok(found)
        })?;
        let weights = WeightGradients { id: self.id, trained, later };
        Ok((self.back(found)?, weights))
    }

    /// The indices of the trained parameters.
    fn trained(&self) -> Vec<usize> {
        (0..self.parameters.len()).filter(|&i| self.parameters[i].requires_grad()).collect()
    }

    /// Calls `pull` to compute the gradients of the inputs and skips that require one. Returns
    /// nothing if there is no gradient to compute.
    fn pull(
        &self,
        grads: &[Option<Tensor>],
        stashes: &[Option<Tensor>],
        trained: &[usize],
        pull: impl FnOnce(&Request<'_>) -> Result<Vec<Option<Tensor>>, LayerError>,
    ) -> Result<Vec<Option<Tensor>>, LayerError> {
        let made = self.outputs.iter().zip(grads);
        let sent = self.stashed.iter().map(|(_, tensor)| tensor).zip(stashes);
        let (outputs, output_grads): (Vec<&Tensor>, Vec<&Tensor>) = made
            .chain(sent)
            .filter_map(|(output, grad)| Some((output, grad.as_ref()?)))
            .filter(|(output, _)| output.requires_grad())
            .unzip();
        let inputs: Vec<&Tensor> = self.leaves().filter(|tensor| tensor.requires_grad()).collect();
        let parameters: Vec<&Tensor> = trained.iter().map(|&i| &self.parameters[i]).collect();
        if outputs.is_empty() || (inputs.is_empty() && parameters.is_empty()) {
            return Ok(Vec::new());
        }
        pull(&Request {
            outputs: &outputs,
            output_grads: &output_grads,
            inputs: &inputs,
            parameters: &parameters,
        })
    }

    /// Replaces the outputs by tensors without memory at the same places in the graph.
    pub(super) fn keep_roots_only(&mut self) -> Result<(), LayerError> {
        let stashed = self.stashed.iter_mut().map(|(_, tensor)| tensor);
        for output in self.outputs.iter_mut().chain(stashed).filter(|output| output.defined()) {
            *output = root_of(output)?;
        }
        Ok(())
    }

    /// What the layer's forward gave.
    pub(super) fn outputs_and_stashed(&self) -> impl Iterator<Item = &Tensor> {
        self.outputs.iter().chain(self.stashed.iter().map(|(_, tensor)| tensor))
    }

    /// The leaves that have memory: the layer's inputs, and the skips that it popped.
    pub(super) fn inputs_and_pops(&self) -> impl Iterator<Item = &Tensor> {
        self.leaves().filter(|leaf| leaf.defined())
    }

    fn leaves(&self) -> impl Iterator<Item = &Tensor> {
        self.inputs.iter().chain(self.pops.iter().map(|(_, tensor)| tensor))
    }

    /// Assigns the computed gradients to inputs and skips, in the layout of values between layers.
    fn back(&self, found: Vec<Option<Tensor>>) -> Result<Back, LayerError> {
        let mut found = found.into_iter();
        let wanted = self.leaves().map(Tensor::requires_grad);
        let mut all = wanted
            .map(|wanted| if wanted { found.next().flatten() } else { None })
            .map(|found| Ok(found.map(settled).transpose()?))
            .collect::<Result<Vec<_>, LayerError>>()?
            .into_iter();
        let inputs = all.by_ref().take(self.inputs.len()).collect();
        let pops = self.pops.iter().map(|(index, _)| *index).zip(all).collect();
        Ok((inputs, pops))
    }
}
