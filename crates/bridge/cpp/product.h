// A float32 matrix product through oneDNN: what affine maps and 1x1 convolutions are made of.
#pragma once
#include "bridge.h"
#include <ATen/core/grad_mode.h>
#include <optional>

namespace gpipe {

// Below so many multiplications oneDNN's look-up of its kernel costs more than the kernel saves.
constexpr int64_t kMultiplicationsMin = int64_t{1} << 20;

// x [rows, in], w [out, in], both perhaps transposed views, bias [out]: [rows, out].
at::Tensor onednn_product(const at::Tensor &x, const at::Tensor &w, const std::optional<at::Tensor> &bias);

// At the start of a backward whose own operations make no graph: gradients of gradients would lack
// a part without a word.
inline void differentiable_once() {
  TORCH_CHECK(!at::GradMode::is_enabled(), "a product or convolution of a layer's context is differentiable once: for gradients of "
                                           "gradients use the tensors' own operations");
}

} // namespace gpipe
