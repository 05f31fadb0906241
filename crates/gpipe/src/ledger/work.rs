//! Kinds of work, and which operation of libtorch is of which kind.

use std::fmt;

use super::Phase;

/// A kind of work of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Work {
    /// Matrix products, also those of 1x1 convolutions in channels-last layout, and of convolutions
    /// of few positions.
    Products,
    /// Other convolutions.
    Convolutions,
    /// Attention between its projections: the fused kernel, or a softmax. The products of unfused
    /// attention are [`Work::Products`].
    Attention,
    /// Normalisations.
    Norms,
    /// Activation functions.
    Activations,
    /// Pooling of images.
    Pooling,
    /// Additions, multiplications and sums that are not part of another kind.
    Elementwise,
    /// Lookups in tables, and their gradients.
    Lookups,
    /// The loss.
    Loss,
    /// Random masks.
    Masks,
    /// Conversions from one dtype to another.
    Casts,
    /// Copies into another memory layout, also of the patches under a convolution's kernel.
    Layouts,
    /// Other copies, and filling memory.
    Copies,
    /// Sums of a parameter's gradients over micro-batches.
    GradientSums,
    /// The norm of the gradients and the update.
    Optimizer,
    /// What is left: views, allocations, autograd's nodes, and the pipeline's own code.
    Dispatch,
}

impl Work {
    /// All kinds, in the order of a table.
    pub const ALL: [Self; 16] = [
        Self::Products,
        Self::Convolutions,
        Self::Attention,
        Self::Norms,
        Self::Activations,
        Self::Pooling,
        Self::Elementwise,
        Self::Lookups,
        Self::Loss,
        Self::Masks,
        Self::Casts,
        Self::Layouts,
        Self::Copies,
        Self::GradientSums,
        Self::Optimizer,
        Self::Dispatch,
    ];

    /// The kind of an operation that moved `bytes` in `phase`.
    pub(super) fn of(phase: Phase, operation: &str, bytes: u64) -> Self {
        if phase == Phase::Update {
            return Self::Optimizer;
        }
        for (scope, work) in SCOPES {
            if operation.starts_with(scope) {
                return work;
            }
        }
        let mut words = operation.split(' ');
        let name = words.next().unwrap_or_default();
        let purpose = words.next().unwrap_or_default();
        let Some((library, name)) = name.split_once("::") else { return Self::Dispatch };
        if library != "aten" && library != "mkldnn" {
            return Self::Dispatch; // a node of autograd's graph
        }
        let name = name.trim_start_matches('_');
        let is = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
        let moving = match name {
            "copy_" => match purpose {
                "(cast)" => Self::Casts,
                "(layout)" => Self::Layouts,
                _ => Self::Copies,
            },
            "mm" | "addmm" | "bmm" | "baddbmm" | "mv" | "addmv" | "dot" => Self::Products,
            "cat" | "stack" | "fill_" | "zero_" | "clone" => Self::Copies,
            _ if is(&["linear"]) => Self::Products,
            _ if is(&["conv"]) => Self::Convolutions,
            _ if is(&["log_softmax", "nll_loss", "gather", "scatter"]) => Self::Loss,
            _ if is(&["scaled_dot_product", "softmax"]) => Self::Attention,
            _ if is(&["layer_norm", "batch_norm", "rms_norm", "group_norm"]) => Self::Norms,
            _ if is(&["elu", "silu", "sigmoid", "tanh", "threshold", "hardswish"]) => {
                Self::Activations
            }
            _ if is(&["pool"]) => Self::Pooling,
            _ if is(&["embedding", "index", "take"]) => Self::Lookups,
            _ if is(&["bernoulli", "dropout"]) => Self::Masks,
            _ => Self::Elementwise,
        };
        match moving {
            // Views, and operations that only call others.
            Self::Elementwise | Self::Copies if bytes == 0 => Self::Dispatch,
            other => other,
        }
    }
}

/// Our own scopes.
const SCOPES: [(&str, Work); 13] = [
    ("gpipe::product", Work::Products),
    ("gpipe::patches", Work::Layouts),
    ("gpipe::batch_norm", Work::Norms),
    ("gpipe::pool", Work::Pooling),
    ("gpipe::attention", Work::Attention),
    ("gpipe::transpose", Work::Layouts),
    ("gpipe::rms_norm", Work::Norms),
    ("gpipe::swiglu", Work::Activations),
    ("gpipe::rotary", Work::Elementwise),
    ("gpipe::gradient sum", Work::GradientSums),
    ("gpipe::column sums", Work::GradientSums),
    ("gpipe::cross entropy", Work::Loss),
    ("gpipe::dropout mask", Work::Masks),
];

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Products => "products",
            Self::Convolutions => "convolutions",
            Self::Attention => "attention",
            Self::Norms => "norms",
            Self::Activations => "activations",
            Self::Pooling => "pooling",
            Self::Elementwise => "elementwise",
            Self::Lookups => "lookups",
            Self::Loss => "loss",
            Self::Masks => "masks",
            Self::Casts => "casts",
            Self::Layouts => "layouts",
            Self::Copies => "copies",
            Self::GradientSums => "gradient sums",
            Self::Optimizer => "optimizer",
            Self::Dispatch => "dispatch",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oracle_operations_are_of_these_kinds() {
        for (operation, bytes, work) in [
            ("aten::addmm [32 8][8 4]", 10, Work::Products),
            ("mkldnn::_linear_pointwise [32 8][4 8]", 10, Work::Products),
            ("aten::mkldnn_convolution [1 3 8 8][4 3 3 3]", 10, Work::Convolutions),
            ("aten::convolution_backward [1 4 8 8][4 3 3 3]", 10, Work::Convolutions),
            (
                "aten::_scaled_dot_product_flash_attention_for_cpu [1 2 3 4][1 2 3 4]",
                10,
                Work::Attention,
            ),
            ("aten::_softmax", 10, Work::Attention),
            ("aten::_log_softmax", 10, Work::Loss),
            ("gpipe::cross entropy aten::_log_softmax", 10, Work::Loss),
            ("aten::native_batch_norm_backward", 10, Work::Norms),
            ("aten::gelu_backward", 10, Work::Activations),
            ("aten::relu", 10, Work::Activations),
            ("aten::avg_pool2d", 10, Work::Pooling),
            ("aten::add_", 10, Work::Elementwise),
            ("gpipe::gradient sum aten::add_", 10, Work::GradientSums),
            ("aten::copy_ (cast)", 10, Work::Casts),
            ("aten::copy_ (layout)", 10, Work::Layouts),
            ("aten::copy_", 10, Work::Copies),
            ("aten::view", 0, Work::Dispatch),
            ("aten::empty", 0, Work::Dispatch),
            ("AddBackward0", 0, Work::Dispatch),
            ("torch::autograd::AccumulateGrad", 0, Work::Dispatch),
            ("aten::embedding_dense_backward", 10, Work::Lookups),
        ] {
            assert_eq!(Work::of(Phase::Backward, operation, bytes), work, "{operation}");
        }
        assert_eq!(Work::of(Phase::Update, "aten::_fused_adam_", 10), Work::Optimizer);
    }
}
