//! Declarations that Rust and C++ share. Nothing here is public; the sibling modules wrap it.

use crate::custom_backward::CustomBackward;

#[allow(
    dead_code,
    missing_docs,
    unused_qualifications,
    clippy::too_many_arguments,
    clippy::undocumented_unsafe_blocks
)]
#[cxx::bridge(namespace = "gpipe")]
pub(crate) mod bridged {
    struct MemoryStats {
        live: u64,
        peak: u64,
        kept: u64,
    }

    /// Whether the GPUs of this process are simulated.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    enum Simulation {
        /// Nobody asked for simulated GPUs.
        None,
        /// They were asked for, and the simulator was not found.
        Missing,
        Loaded,
    }

    /// What the program asked of simulated GPUs since it started.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    struct SimulatedCounts {
        /// Kernels that were launched, copies included.
        launches: u64,
        /// Waits of the host, for a stream or an event.
        host_waits: u64,
        /// Waits of a stream for an event.
        stream_waits: u64,
        /// Copies from the host.
        copies_in: u64,
        /// Copies to the host.
        copies_out: u64,
        /// Copies to another GPU.
        copies_across: u64,
        allocations: u64,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    struct DeviceStream {
        device: i32,
        id: i64,
    }

    struct Refusal {
        refused: bool,
        requested: u64,
        live: u64,
        cap: u64,
    }

    /// What one kind of operation did.
    struct LedgerEntry {
        name: String,
        calls: u64,
        time_ns: u64,
        bytes: u64,
        flops: f64,
    }

    extern "Rust" {
        type CustomBackward;
        fn call(
            self: &CustomBackward,
            saved: Vec<usize>,
            grads: Vec<usize>,
            wanted: &Vec<bool>,
        ) -> Result<Vec<usize>>;
    }

    unsafe extern "C++" {
        include!("bridge.h");
        include!("c10d.h");

        unsafe fn vjp(
            outputs: &[usize],
            output_grads: &[usize],
            inputs: &[usize],
            parameters: &[usize],
            accumulators: &[usize],
        ) -> Result<Vec<usize>>;
        type Halves;
        unsafe fn split_vjp(
            outputs: &[usize],
            output_grads: &[usize],
            inputs: &[usize],
            parameters: &[usize],
            accumulators: &[usize],
            in_turn: &[bool],
        ) -> Result<UniquePtr<Halves>>;
        fn can_split(self: &Halves) -> bool;
        fn take_inputs(self: Pin<&mut Halves>) -> Result<Vec<usize>>;
        fn take_sums(self: Pin<&mut Halves>) -> Result<Vec<usize>>;
        fn is_summed(self: &Halves, parameter: u32) -> Result<bool>;
        unsafe fn finish(self: Pin<&mut Halves>, accumulators: &[usize]) -> Result<Vec<usize>>;
        fn throw_for_test(kind: i32) -> Result<()>;

        type OpCache;
        fn bytes(self: &OpCache) -> u64;
        fn begin_recording() -> Result<()>;
        fn end_recording() -> Result<UniquePtr<OpCache>>;
        fn begin_replay(cache: UniquePtr<OpCache>) -> Result<()>;
        fn end_replay() -> Result<()>;
        fn forget_op_caches();
        fn set_unread(is_unread: bool);

        type SavedTensors;
        fn new_saved_tensors(gpu: i32) -> Result<UniquePtr<SavedTensors>>;
        fn enter(self: Pin<&mut SavedTensors>) -> Result<()>;
        fn leave(self: Pin<&mut SavedTensors>);
        unsafe fn add_leaf(self: Pin<&mut SavedTensors>, leaf: usize) -> Result<()>;
        fn take_away(self: Pin<&mut SavedTensors>) -> Result<Vec<usize>>;
        unsafe fn bring_back(self: Pin<&mut SavedTensors>, blocks: &[usize]) -> Result<()>;
        unsafe fn root_of(output: usize) -> Result<usize>;

        type HollowGraph;
        fn new_hollow_graph() -> Result<UniquePtr<HollowGraph>>;
        fn enter(self: &HollowGraph, fills: bool) -> Result<()>;
        fn leave_hollow_graph();
        fn empty(self: &HollowGraph);
        unsafe fn empty_leaf(self: &HollowGraph, leaf: usize) -> Result<()>;
        fn is_full(self: &HollowGraph) -> bool;
        unsafe fn keeps_memory(self: &HollowGraph, outputs: &[usize]) -> Result<bool>;
        fn count(self: &HollowGraph) -> u64;
        fn is_filled() -> bool;

        unsafe fn settled(tensor: usize) -> Result<usize>;
        unsafe fn concatenate(tensors: &[usize], axis: i64) -> Result<usize>;

        unsafe fn linear(
            x: usize,
            w: usize,
            bias: usize,
            use_onednn: bool,
            fused: bool,
        ) -> Result<usize>;
        unsafe fn convolution(
            x: usize,
            w: usize,
            stride: &[i64],
            padding: &[i64],
            dilation: &[i64],
            groups: i64,
            channels_last: bool,
            onednn: bool,
        ) -> Result<usize>;
        unsafe fn custom(
            inputs: &[usize],
            outputs: &[usize],
            saved: &[usize],
            backward: Box<CustomBackward>,
        ) -> Result<Vec<usize>>;
        unsafe fn cross_entropy_sum(
            logits: usize,
            target: usize,
            ignore: i64,
            smoothing: f64,
        ) -> Result<usize>;
        fn onednn_is_faster() -> bool;
        fn set_threads(count: i32) -> Result<()>;
        fn cpu_capability() -> Result<String>;

        unsafe fn can_attend(q: usize, k: usize) -> Result<bool>;
        unsafe fn fused_attention(q: usize, k: usize, v: usize, window: i64) -> Result<usize>;

        unsafe fn can_fuse(x: usize) -> Result<bool>;
        unsafe fn fused_rms_norm(x: usize, w: usize, eps: f64) -> Result<usize>;
        unsafe fn fused_swiglu(gate: usize, up: usize) -> Result<usize>;
        unsafe fn fused_turn(x: usize, cos: usize, sin: usize) -> Result<usize>;

        unsafe fn are_images(x: usize) -> Result<bool>;
        unsafe fn batch_norm_images(
            x: usize,
            w: usize,
            b: usize,
            eps: f64,
            relu: bool,
        ) -> Result<Vec<usize>>;
        unsafe fn pool_images(
            x: usize,
            size: i64,
            stride: i64,
            padding: i64,
            ceil: bool,
            largest: bool,
        ) -> Result<usize>;

        unsafe fn every_second_pixel(x: usize, from: i64) -> Result<usize>;

        type LedgerScope;
        fn begin_ledger() -> Result<()>;
        fn end_ledger() -> Result<Vec<LedgerEntry>>;
        fn forget_ledger();
        fn ledger_scope(name: &str) -> Result<UniquePtr<LedgerScope>>;

        unsafe fn fused_adam(
            parameters: &[usize],
            grads: &[usize],
            exp_avgs: &[usize],
            exp_avg_sqs: &[usize],
            steps: &[usize],
            lr: f64,
            beta1: f64,
            beta2: f64,
            weight_decay: f64,
            eps: f64,
            decoupled: bool,
        ) -> Result<()>;
        unsafe fn fused_sgd(
            parameters: &[usize],
            grads: &[usize],
            momenta: &[usize],
            lr: f64,
            momentum: f64,
            nesterov: bool,
            weight_decay: f64,
            first_step: bool,
        ) -> Result<()>;

        type DeviceEvent;
        fn block(self: &DeviceEvent, stream: DeviceStream) -> Result<()>;
        fn make_current(self: &DeviceEvent) -> Result<()>;
        fn synchronize(self: &DeviceEvent) -> Result<()>;
        fn is_done(self: &DeviceEvent) -> Result<bool>;
        fn ms_since(self: &DeviceEvent, earlier: &DeviceEvent) -> Result<f64>;
        fn has_cuda() -> bool;
        fn simulation() -> Simulation;
        fn simulated_counts() -> SimulatedCounts;
        fn gpu_count() -> Result<i32>;
        fn new_stream(device: i32) -> Result<DeviceStream>;
        fn enter_stream(stream: DeviceStream) -> Result<()>;
        fn synchronize_stream(stream: DeviceStream) -> Result<()>;
        fn record_event(stream: DeviceStream, timed: bool) -> Result<UniquePtr<DeviceEvent>>;
        unsafe fn copy_on_stream(tensor: usize, stream: DeviceStream, to: i32) -> Result<usize>;
        unsafe fn upload(tensor: usize, device: i32) -> Result<usize>;
        unsafe fn upload_on_stream(tensor: usize, stream: DeviceStream) -> Result<usize>;
        unsafe fn record_use(tensor: usize, stream: DeviceStream) -> Result<()>;
        fn use_deterministic_kernels(deterministic: bool, warn_only: bool) -> Result<()>;
        fn require_deterministic_kernels() -> Result<()>;
        fn gpu_stats(device: i32) -> Result<MemoryStats>;
        fn reset_gpu_peak(device: i32) -> Result<()>;

        fn enter_random(seed: u64) -> Result<()>;
        fn leave_random();

        fn enter_arena(arena: u32) -> Result<()>;
        fn arena_stats(arena: u32) -> Result<MemoryStats>;
        fn reset_arena_peak(arena: u32) -> Result<()>;
        fn set_arena_cap(arena: u32, bytes: u64) -> Result<()>;
        fn trim_arena(arena: u32) -> Result<()>;
        fn close_arena(arena: u32) -> Result<()>;
        fn take_refusal() -> Result<Refusal>;
        fn keep_freed_memory() -> bool;

        type TcpStore;
        fn tcp_store(
            host: &str,
            port: u16,
            listener: i32,
            timeout_ms: i64,
        ) -> Result<UniquePtr<TcpStore>>;
        fn another(self: &TcpStore) -> Result<UniquePtr<TcpStore>>;
        fn prefixed(self: &TcpStore, prefix: &str) -> Result<UniquePtr<TcpStore>>;
        fn port(self: &TcpStore) -> u16;
        fn set(self: &TcpStore, key: &str, value: &[u8]) -> Result<()>;
        fn get(self: &TcpStore, key: &str, timeout_ms: i64) -> Result<Vec<u8>>;
        fn check(self: &TcpStore, key: &str) -> Result<bool>;
        fn add(self: &TcpStore, key: &str, amount: i64) -> Result<i64>;
        fn compare_set(
            self: &TcpStore,
            key: &str,
            expected: &[u8],
            desired: &[u8],
        ) -> Result<Vec<u8>>;
        fn remove(self: &TcpStore, key: &str) -> Result<bool>;

        type GroupWork;
        fn wait(self: &GroupWork, timeout_ms: i64) -> Result<bool>;
        fn abort(self: &GroupWork) -> Result<()>;

        type GpuGroup;
        fn has_nccl() -> bool;
        fn gpu_group(
            store: &TcpStore,
            rank: i32,
            size: i32,
            gpu: i32,
            address: &str,
            timeout_ms: i64,
        ) -> Result<UniquePtr<GpuGroup>>;
        unsafe fn exchange(
            self: &GpuGroup,
            sends: &[usize],
            to: &[i32],
            receives: &[usize],
            from: &[i32],
        ) -> Result<()>;
        fn abort(self: &GpuGroup) -> Result<()>;

        type ProcessGroup;
        fn gloo_group(
            store: &TcpStore,
            rank: i32,
            size: i32,
            address: &str,
            timeout_ms: i64,
        ) -> Result<UniquePtr<ProcessGroup>>;
        unsafe fn send(
            self: &ProcessGroup,
            tensor: usize,
            to: i32,
            tag: i32,
        ) -> Result<UniquePtr<GroupWork>>;
        unsafe fn receive(
            self: &ProcessGroup,
            tensor: usize,
            from: i32,
            tag: i32,
        ) -> Result<UniquePtr<GroupWork>>;
        unsafe fn all_reduce(
            self: &ProcessGroup,
            tensor: usize,
            largest: bool,
        ) -> Result<UniquePtr<GroupWork>>;
        unsafe fn broadcast(
            self: &ProcessGroup,
            tensor: usize,
            from: i32,
        ) -> Result<UniquePtr<GroupWork>>;
    }
}
