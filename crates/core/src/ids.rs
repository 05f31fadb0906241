//! Small numbers with distinct types, so that a stage is never mistaken for a micro-batch.

use std::fmt;

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize,
            Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $name {
            /// The number as an index.
            pub fn index(self) -> usize {
                self.0 as usize
            }

            /// Converts from an index. Numbers that do not fit saturate; a pipeline never has 2^32
            /// of anything.
            pub fn from_index(index: usize) -> Self {
                Self(u32::try_from(index).unwrap_or(u32::MAX))
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// A cell of the partition, placed on a device and executing. Stages are numbered along the
    /// sequence from 0.
    StageId
}
id! {
    /// A worker with a thread or an accelerator to itself. It may hold several stages.
    DeviceId
}
id! {
    /// A slice of the mini-batch. Micro-batches are numbered from 0 in the order of the samples.
    MicroBatch
}
id! {
    /// A layer's position in the sequence, from 0.
    LayerId
}
id! {
    /// An edge between two stages: its position in the topology's list.
    EdgeId
}
