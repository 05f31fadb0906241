//! How values pass between GPUs of different processes.

use std::{fmt, str::FromStr};

/// How values pass between the processes of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Links {
    /// Through the memory of the CPU, over Gloo. For any devices.
    #[default]
    Gloo,
    /// From GPU to GPU, over NCCL. Each process has one device, a GPU. Sums over replicas, votes
    /// and everything else still go over Gloo.
    Nccl,
}

impl fmt::Display for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Gloo => "gloo",
            Self::Nccl => "nccl",
        })
    }
}

impl FromStr for Links {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "gloo" => Ok(Self::Gloo),
            "nccl" => Ok(Self::Nccl),
            _ => Err(format!("'{text}' is no kind of link: use gloo or nccl")),
        }
    }
}
