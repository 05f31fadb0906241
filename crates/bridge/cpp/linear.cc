// The affine map y = x W^T + b with its VJP: through oneDNN in float32 if requested, else through
// ATen.
//
// Why not at::linear alone: in float32 it always calls MKL, whose AVX-512 kernels run on Intel's
// processors only. On others MKL falls back to AVX2 and is half as fast as oneDNN, which libtorch
// includes. And at::linear's result could not be replayed for re-materialization (op_cache.h). With
// ATen, the products equal those of addmm and its backward, to the bit.
#include "gpipe-bridge/src/ffi.rs.h"
#include "op_cache.h"
#include "product.h"
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <torch/csrc/autograd/custom_function.h>

namespace gpipe {

namespace {

using Optional = std::optional<at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor rows(const at::Tensor &x) { return x.reshape({-1, x.size(-1)}); }

struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(AutogradContext *context, const at::Tensor &x, const at::Tensor &w,
                            const Optional &bias, bool onednn) {
    at::AutoDispatchBelowADInplaceOrView below;
    // As in ATen: with a frozen weight the input is not saved.
    context->save_for_backward({w.requires_grad() ? x : at::Tensor(), w});
    context->saved_data["sizes"] = x.sizes();
    context->saved_data["bias"] = bias.has_value();
    context->saved_data["onednn"] = onednn;
    auto shape = x.sizes().vec();
    shape.back() = w.size(0);
    return remembered(shape, [&] {
      return (onednn ? onednn_product(rows(x), w, bias) : at::linear(rows(x), w, bias))
          .reshape(shape);
    });
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    differentiable_once();
    at::NoGradGuard no_grad;
    auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &w = saved[1];
    const bool onednn = context->saved_data["onednn"].toBool();
    at::Tensor g = rows(grads[0]), dx, dw, db;
    if (onednn)
      g = g.contiguous();
    // An absent bias is not an input, so needs_input_grad must not be asked about it.
    const bool wants_bias =
        context->saved_data["bias"].toBool() && context->needs_input_grad(2);
    if (context->needs_input_grad(0))
      dx = (onednn ? onednn_product(g, w.t(), {}) : at::mm(g, w))
               .reshape(context->saved_data["sizes"].toIntVector());
    if (context->needs_input_grad(1)) {
      at::Tensor columns;
      if (onednn) {
        columns = transposed(g, wants_bias ? &db : nullptr);
        dw = onednn_product(columns, rows(x).t(), {});
      } else {
        dw = at::mm(g.t(), rows(x));
      }
    }
    if (wants_bias && !db.defined())
      db = g.sum(0);
    return {dx, dw, db, at::Tensor()};
  }
};

bool fits(const at::Tensor &x, const at::Tensor &w, const Optional &b) {
  return w.dim() == 2 && x.dim() >= 1 && x.size(-1) == w.size(1) &&
         (!b || (b->dim() == 1 && b->size(0) == w.size(0)));
}

bool fits_onednn_product(const at::Tensor &x, const at::Tensor &w, const Optional &b) {
  const auto is_own = [](const at::Tensor &one) {
    return one.device().is_cpu() && one.scalar_type() == at::kFloat;
  };
  return is_own(x) && is_own(w) && (!b || is_own(*b)) &&
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
  if (!fits(borrow(x), borrow(w), b))
    return give(at::linear(borrow(x), borrow(w), b)); // reports what is wrong
  return give(Linear::apply(borrow(x), borrow(w), b,
                            use_onednn && fits_onednn_product(borrow(x), borrow(w), b)));
}

} // namespace gpipe
