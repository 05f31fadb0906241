//! Sums of tensors over all processes of a group (all-reduce), and copies of one process's tensor
//! for all (broadcast).

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    time::Duration,
};

use tch::{Device, Kind, Tensor};

use super::{Error, Result, group::Raw};

/// Maximum number of sums in flight.
const UNDER_WAY_MAX: usize = 4096;
/// Longest wait for c10d: the other replicas may be slow. A process that is gone ends it.
const LONGEST: Duration = Duration::from_secs(24 * 3600);

/// The tag of the parts of sums. Nothing else is sent in a group that has sums.
const TAG: usize = 0;

/// Sums and broadcasts over all processes of a group. Every process must begin them in the same
/// order. A thread executes them one after the other. It compares the tensors' sizes first, because
/// Gloo would end a process that is sent more than it expects.
pub struct Sums {
    jobs: SyncSender<Job>,
    under_way: VecDeque<Receiver<Result<Tensor>>>,
}

struct Job {
    tensor: Tensor,
    /// The process whose tensor all get; `None` for a sum.
    from: Option<usize>,
    done: SyncSender<Result<Tensor>>,
}

impl Sums {
    pub(super) fn start(group: Arc<Raw>) -> Result<Self> {
        let (jobs, asked) = sync_channel::<Job>(UNDER_WAY_MAX);
        let run = move || {
            for Job { tensor, from, done } in asked {
                // The caller may be gone.
                let _ = done.send(match from {
                    None => sum(&group, tensor),
                    Some(from) => broadcast(&group, tensor, from),
                });
            }
        };
        let thread = std::thread::Builder::new().name("gpipe-sums".into()).spawn(run);
        thread.map_err(|source| {
            error(format!("no thread: {source}; raise the limit on threads (ulimit -u)"))
        })?;
        Ok(Self { jobs, under_way: VecDeque::new() })
    }

    /// Starts to sum `tensor` over all processes, in the order of their ranks.
    ///
    /// # Errors
    /// The tensor is not contiguous or not on the CPU; too many sums are in flight.
    pub fn begin(&mut self, tensor: Tensor) -> Result<()> {
        self.start_job(tensor, None)
    }

    /// Starts to copy the tensor of process `from` into `tensor`, which has the same size and dtype
    /// in all processes. It may have any dtype. Its values are undefined until
    /// [`Sums::end`] returns it.
    ///
    /// # Errors
    /// As [`Sums::begin`].
    pub fn begin_broadcast(&mut self, tensor: Tensor, from: usize) -> Result<()> {
        self.start_job(tensor, Some(from))
    }

    fn start_job(&mut self, tensor: Tensor, from: Option<usize>) -> Result<()> {
        if !tensor.defined() || tensor.device() != Device::Cpu || !tensor.is_contiguous() {
            return Err(error("a tensor to exchange is contiguous and on the CPU".into()));
        }
        let (done, ended) = sync_channel(1);
        match self.jobs.try_send(Job { tensor, from, done }) {
            Ok(()) => self.under_way.push_back(ended),
            Err(TrySendError::Full(_)) => {
                return Err(error(format!("more than {UNDER_WAY_MAX} exchanges are under way")));
            }
            Err(TrySendError::Disconnected(_)) => return Err(error("its thread is gone".into())),
        }
        Ok(())
    }

    /// Waits for the oldest sum or broadcast that was begun; `None` if it does not end within
    /// `slice`.
    ///
    /// # Errors
    /// None was begun; another process's tensor has another size or dtype; a process is gone.
    pub fn end(&mut self, slice: Duration) -> Result<Option<Tensor>> {
        let Some(oldest) = self.under_way.front() else {
            return Err(error("one ends that has not begun".into()));
        };
        let ended = match oldest.recv_timeout(slice) {
            Err(RecvTimeoutError::Timeout) => return Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(error("its thread is gone".into())),
            Ok(ended) => ended,
        };
        self.under_way.pop_front();
        ended.map(Some)
    }
}

fn sum(group: &Raw, tensor: Tensor) -> Result<Tensor> {
    compare(group, &tensor)?;
    if tensor.numel() == 0 {
        return Ok(tensor);
    }
    if group.size <= 2 {
        // Two numbers have the same sum in either order.
        group.all_reduce(&tensor, false)?.wait(LONGEST)?;
        return Ok(tensor);
    }
    in_rank_order(group, &tensor).map(|()| tensor)
}

/// Sums in the order of the ranks. Gloo's own order depends on an element's position. Each process
/// adds one part of the tensor for all, so as many bytes move as in a ring.
fn in_rank_order(group: &Raw, tensor: &Tensor) -> Result<()> {
    let _no_grad = tch::no_grad_guard();
    let torch = |source: tch::TchError| error(source.to_string());
    let flat = tensor.f_view([-1]).map_err(torch)?;
    let (size, rank, count) = (group.size, group.rank, tensor.numel());
    let part = |of: usize| {
        let (start, end) = (of * count / size, (of + 1) * count / size);
        flat.f_narrow(0, start as i64, (end - start) as i64).map_err(torch)
    };
    let others = || (0..size).filter(|other| *other != rank);
    let own = part(rank)?;
    // [1] every process gets the others' shares of its own part
    let mut shares: Vec<Tensor> = Vec::with_capacity(size);
    for from in 0..size {
        let copy = if from == rank { own.f_detach_copy() } else { own.f_empty_like() };
        shares.push(copy.map_err(torch)?);
    }
    exchange(group, others(), part, |from| Ok(shares[from].shallow_clone()))?;
    // [2] adds them
    let (first, rest) = shares.split_at_mut(1);
    for share in rest {
        let _ = first[0].f_add_(share).map_err(torch)?;
    }
    own.f_detach().and_then(|mut own| own.f_copy_(&first[0])).map_err(torch)?;
    // [3] and gives the sum to all
    exchange(group, others(), |_| part(rank), part)
}

/// Sends a tensor to each of the other processes and receives one from each.
fn exchange(
    group: &Raw,
    others: impl Iterator<Item = usize> + Clone,
    sends: impl Fn(usize) -> Result<Tensor>,
    receives: impl Fn(usize) -> Result<Tensor>,
) -> Result<()> {
    let mut works = Vec::new();
    for other in others.clone() {
        let into = receives(other)?;
        if into.numel() > 0 {
            works.push(group.receive(&into, other, TAG)?);
        }
    }
    for other in others {
        let from = sends(other)?;
        if from.numel() > 0 {
            works.push(group.send(&from, other, TAG)?);
        }
    }
    works.iter().try_for_each(|work| work.wait(LONGEST))
}

fn broadcast(group: &Raw, tensor: Tensor, from: usize) -> Result<Tensor> {
    compare(group, &tensor)?;
    if tensor.numel() > 0 {
        // As bytes: Gloo does not know all dtypes. A view shares the memory.
        let bytes = tensor.f_view([-1]).and_then(|flat| flat.f_view_dtype(Kind::Uint8));
        let bytes = bytes.map_err(|source| error(source.to_string()))?;
        group.broadcast(&bytes, from)?.wait(LONGEST)?;
    }
    Ok(tensor)
}

/// Returns an error unless all processes have a tensor of the same size and dtype.
fn compare(group: &Raw, tensor: &Tensor) -> Result<()> {
    let own = [tensor.numel() as i64, tensor.kind() as i64];
    let torch = |source: tch::TchError| error(source.to_string());
    // If the maximum equals the minimum, all processes have the same value.
    let both = Tensor::f_from_slice(&[own[0], own[1], -own[0], -own[1]]).map_err(torch)?;
    group.all_reduce(&both, true)?.wait(LONGEST)?;
    let largest = Vec::<i64>::try_from(&both).map_err(torch)?;
    if largest == [own[0], own[1], -own[0], -own[1]] {
        return Ok(());
    }
    Err(error(format!(
        "this process gives {} elements of {:?}, another one gives others: all must give as many \
        of one dtype",
        own[0],
        tensor.kind()
    )))
}

fn error(message: String) -> Error {
    Error { operation: "an exchange with all processes".into(), peer: None, message }
}

impl std::fmt::Debug for Sums {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sums({} under way)", self.under_way.len())
    }
}
