// Matrix products of affine maps and convolutions, and their gradients, through one of
// three kernels: ATen's, oneDNN's, or ours for few rows (product_kernels.h).
#pragma once
#include "bridge.h"
#include <ATen/core/grad_mode.h>
#include <optional>

namespace gpipe {

// Which kernels compute a product and its gradients.
enum class Products : int64_t { Aten, OneDnn, FewRows };

// The kernels for x [rows, inputs] and w [outputs, inputs]. `onednn`: whether oneDNN is faster than
// ATen on this processor. The choice depends on nothing but shapes, layouts, dtypes
// and devices. `sizes` are those of x, whose memory may still have another shape.
Products products_for(at::IntArrayRef sizes, const at::Tensor &x, const at::Tensor &w,
                      bool onednn);

// y [rows, outputs] = x w^T + bias [outputs].
at::Tensor product(Products by, const at::Tensor &x, const at::Tensor &w,
                   const std::optional<at::Tensor> &bias);

// dx [rows, inputs] = g [rows, outputs] w.
at::Tensor input_gradient(Products by, const at::Tensor &g, const at::Tensor &w);

// dw [outputs, inputs] = g^T x. Also the gradient of the bias, where `bias` is not null; `fused` as
// in column_sums.
at::Tensor weight_gradient(Products by, const at::Tensor &g, const at::Tensor &x, at::Tensor *bias,
                           bool fused);

// The sum of each column of g [rows, columns]. `fused`: with a kernel of ours where it takes g,
// otherwise with ATen's, which reads memory several times slower.
at::Tensor column_sums(const at::Tensor &g, bool fused);

// Call this at the start of a backward whose operations record no graph. Gradients of gradients
// would otherwise silently lack a part.
inline void differentiable_once() {
  TORCH_CHECK(
      !at::GradMode::is_enabled(),
      "a product or convolution of a layer's context is differentiable once: for gradients of "
      "gradients use the tensors' own operations");
}

// A gradient as kernels can read it. In the memory of a lazily negated tensor, which the conjugate
// of a complex one gives, numbers have the other sign.
inline at::Tensor readable(const at::Tensor &grad) { return grad.resolve_neg(); }

} // namespace gpipe
