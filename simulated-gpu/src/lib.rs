//! Simulated GPUs: a `libtorch_cuda.so` that computes on the CPU and checks every wait.
//!
//! Building this package puts the library into `simulated-gpu/`, beside the programs of the same
//! build. A program with gpipe loads it if `GPIPE_SIMULATED_GPUS` is set. Only the
//! tests of the command and the Python package depend on it.
