// The affine map y = x W^T + b with its VJP.
//
// Why not at::linear alone: its result could not be replayed for re-materialization (op_cache.h),
// and it is not always the fastest (product.cc). With ATen, the products equal those of addmm and
// its backward, to the bit.
#include "gpipe-bridge/src/ffi.rs.h"
#include "hollow.h"
#include "op_cache.h"
#include "product.h"
#include <ATen/ops/linear.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

namespace gpipe {

namespace {

using Optional = std::optional<at::Tensor>;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor flat_rows(const at::Tensor &x) { return x.reshape({-1, x.size(-1)}); }

struct Linear : torch::autograd::Function<Linear> {
  static at::Tensor forward(AutogradContext *context, const at::Tensor &x, const at::Tensor &w,
                            const Optional &bias, bool onednn, bool fused, bool nobody_reads) {
    at::AutoDispatchBelowADInplaceOrView below;
    const bool takes = !bias || (bias->device().is_cpu() && bias->scalar_type() == at::kFloat &&
                                 !bias->is_neg());
    const at::Tensor x_rows = flat_rows(x);
    const Products by = products_for(x_rows.sizes(), x_rows, w, onednn && takes);
    // As in ATen: with a frozen weight the input is not saved.
    context->save_for_backward({w.requires_grad() ? x : at::Tensor(), w});
    context->saved_data["sizes"] = x.sizes();
    context->saved_data["bias"] = bias.has_value();
    context->saved_data["by"] = static_cast<int64_t>(by);
    context->saved_data["fused"] = fused;
    auto shape = x.sizes().vec();
    shape.back() = w.size(0);
    return remembered(shape, [&] {
      return nobody_reads ? at::zeros(shape, x.options())
                         : product(by, x_rows, w, bias).reshape(shape);
    });
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    differentiable_once();
    at::NoGradGuard no_grad;
    auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &w = saved[1];
    const auto by = static_cast<Products>(context->saved_data["by"].toInt());
    const at::Tensor g = flat_rows(readable(grads[0]));
    const bool fused = context->saved_data["fused"].toBool();
    at::Tensor dx, dw, db;
    // An absent bias is not an input, so needs_input_grad must not be asked about it.
    const bool wants_bias =
        context->saved_data["bias"].toBool() && context->needs_input_grad(2);
    if (context->needs_input_grad(0))
      dx = input_gradient(by, g, w).reshape(context->saved_data["sizes"].toIntVector());
    if (context->needs_input_grad(1))
      dw = weight_gradient(by, g, flat_rows(x), wants_bias ? &db : nullptr, fused);
    else if (wants_bias)
      db = column_sums(g, fused);
    return {dx, dw, db, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

// Whether a forward that is computed again ends with what this product saves.
bool is_last(const at::Tensor &x, const at::Tensor &w, const Optional &b) {
  const bool has_graph = at::GradMode::is_enabled() &&
                         (x.requires_grad() || w.requires_grad() || (b && b->requires_grad()));
  return has_graph && ends_with(w.requires_grad() ? 2 : 1);
}

bool fits(const at::Tensor &x, const at::Tensor &w, const Optional &b) {
  return w.dim() == 2 && x.dim() >= 1 && x.size(-1) == w.size(1) &&
         (!b || (b->dim() == 1 && b->size(0) == w.size(0)));
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

Address linear(Address x, Address w, Address bias, bool use_onednn, bool fused) {
  const Optional b = bias == 0 ? Optional() : Optional(borrow(bias));
  if (!fits(borrow(x), borrow(w), b))
    return give(at::linear(borrow(x), borrow(w), b)); // reports what is wrong
  const bool nobody_reads = is_unread() || is_last(borrow(x), borrow(w), b);
  return give(Linear::apply(borrow(x), borrow(w), b, use_onednn, fused, nobody_reads));
}

} // namespace gpipe
