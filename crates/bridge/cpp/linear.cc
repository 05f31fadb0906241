// The affine map y = x W^T + b through oneDNN, in float32, with its VJP.
//
// Why not at::linear: in float32 it always calls MKL, whose AVX-512 kernels are for Intel's processors; on
// others it falls back to AVX2 and is half as fast as oneDNN, which libtorch brings along anyway.
#include "gpipe-bridge/src/ffi.rs.h"
#include "product.h"
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/custom_function.h>

namespace gpipe {

namespace {

using Optional = std::optional<at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor rows(const at::Tensor &x) { return x.reshape({-1, x.size(-1)}); }

struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(AutogradContext *context, const at::Tensor &x, const at::Tensor &w,
                            const Optional &bias) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({x, w});
    context->saved_data["bias"] = bias.has_value();
    auto shape = x.sizes().vec();
    shape.back() = w.size(0);
    return onednn_product(rows(x), w, bias).reshape(shape);
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    at::NoGradGuard no_grad;
    auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &w = saved[1];
    at::Tensor g = rows(grads[0]).contiguous(), dx, dw, db;
    if (context->needs_input_grad(0))
      dx = onednn_product(g, w.t(), {}).reshape(x.sizes());
    if (context->needs_input_grad(1))
      dw = onednn_product(g.t(), rows(x).t(), {});
    // An absent bias is no input, and must not be asked for.
    if (context->saved_data["bias"].toBool() && context->needs_input_grad(2))
      db = g.sum(0);
    return {dx, dw, db};
  }
};

bool fits_onednn_product(const at::Tensor &x, const at::Tensor &w, const Optional &b) {
  const bool bias_fits = !b || (b->device().is_cpu() && b->scalar_type() == at::kFloat && b->dim() == 1 &&
                                b->size(0) == w.size(0));
  return bias_fits && x.device().is_cpu() && w.device().is_cpu() && x.scalar_type() == at::kFloat &&
         w.scalar_type() == at::kFloat && w.dim() == 2 && x.dim() >= 1 && x.size(-1) == w.size(1) &&
         x.numel() * w.size(0) >= kMultiplicationsMin;
}

} // namespace

bool onednn_is_faster() {
#if defined(__x86_64__)
  static const bool faster = __builtin_cpu_supports("avx512f") && !__builtin_cpu_is("intel");
  return faster;
#else
  return false;
#endif
}

Address linear(Address x, Address w, Address bias, bool use_onednn) {
  const Optional b = bias == 0 ? Optional() : Optional(borrow(bias));
  if (use_onednn && fits_onednn_product(borrow(x), borrow(w), b))
    return give(Linear::apply(borrow(x), borrow(w), b));
  return give(at::linear(borrow(x), borrow(w), b));
}

} // namespace gpipe
