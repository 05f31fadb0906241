// A float32 matrix product through oneDNN, used by affine maps and 1x1 convolutions.
#pragma once
#include "bridge.h"
#include <ATen/core/grad_mode.h>
#include <optional>

namespace gpipe {

// With fewer multiplications, oneDNN's kernel lookup costs more than its kernel saves.
constexpr int64_t kMultiplicationsMin = int64_t{1} << 20;

// x [rows, in], w [out, in], bias [out] -> [rows, out]. x and w may be transposed views.
at::Tensor onednn_product(const at::Tensor &x, const at::Tensor &w,
                          const std::optional<at::Tensor> &bias);

// g^T of float32 g [rows, columns] without gaps, in memory of its own, and the sums of g's columns
// where they are wanted. oneDNN's product takes no transposed first operand, and libtorch's copy of
// one reads a number at a time.
at::Tensor transposed(const at::Tensor &g, at::Tensor *sums);

// Call this at the start of a backward whose operations record no graph. Gradients of gradients
// would otherwise silently lack a part.
inline void differentiable_once() {
  TORCH_CHECK(
      !at::GradMode::is_enabled(),
      "a product or convolution of a layer's context is differentiable once: for gradients of "
      "gradients use the tensors' own operations");
}

} // namespace gpipe
