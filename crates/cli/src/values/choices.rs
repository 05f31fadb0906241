//! Choices of one of several names.

use std::{fmt::Display, str::FromStr};

/// Defines an enum whose variants are written as the given names. Other names may follow, which are
/// read, too.
macro_rules! choice {
    (
        $(#[$doc:meta])* $name:ident,
        { $($variant:ident = $text:literal $(or $other:literal)*),* $(,)? }
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum $name { $($variant),* }

        impl Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(match self { $(Self::$variant => $text),* })
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $($text $(| $other)* => Ok(Self::$variant),)*
                    _ => Err(format!("'{text}' is not one of {}", [$($text),*].join(", "))),
                }
            }
        }
    };
}

choice!(
    /// The dtype of the arithmetic.
    Dtype,
    {
        Float32 = "float32" or "fp32" or "f32",
        Float64 = "float64" or "fp64" or "f64",
        BFloat16 = "bfloat16" or "bf16",
        Float16 = "float16" or "fp16" or "f16",
    }
);

choice!(
    /// Which kernels compute matrix products in float32 on CPUs.
    KernelChoice,
    {
        Fastest = "fastest", Aten = "aten", ChannelsLast = "channels-last", OneDnn = "onednn"
    }
);

choice!(
    /// How the learning rate decays.
    Decays,
    {
        Constant = "constant", Cosine = "cosine", InverseSqrt = "inverse-sqrt",
        Exponential = "exponential"
    }
);

choice!(
    /// An update rule.
    OptimizerName,
    { Adam = "adam", AdamW = "adamw", Sgd = "sgd", RmsProp = "rmsprop", Adafactor = "adafactor" }
);

choice!(
    /// The dtype of Adam's moments.
    MomentsChoice,
    { Float32 = "float32", BFloat16 = "bfloat16" }
);

choice!(
    /// What to do when a loss or gradient is not finite.
    OnNan, { Stop = "stop", Skip = "skip" }
);

choice!(
    /// Which AmoebaNet to build.
    VariantName, { B = "B", D = "D" }
);

choice!(
    /// Which form of GELU to compute.
    GeluChoice, { Exact = "exact", Tanh = "tanh" }
);

choice!(
    /// How to treat JSON files among text.
    JsonChoice, { Refuse = "refuse", Text = "text", Skip = "skip" }
);

choice!(
    /// How samples are packed into rows.
    PackingChoice, {
        Auto = "auto", Separate = "separate", Joined = "joined", None = "none"
    }
);

choice!(
    /// What to do with an invalid line of JSONL.
    OnBadLineChoice, { Stop = "stop", Skip = "skip" }
);

choice!(
    /// What to do with an image that cannot be read.
    OnUnreadableChoice, { Stop = "stop", Skip = "skip" }
);
