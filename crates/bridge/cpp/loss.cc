// Summed cross entropy whose backward overwrites what its forward saved.
//
// Why not at::cross_entropy_loss: its backward holds the logits, their log-softmax, and two
// gradients of that size at once. With a language model's vocabulary, that is the peak memory of
// the whole stage. On a CPU the forward already computes the gradient, while a row is in the cache;
// the backward only scales it.
#include "gpipe-bridge/src/ffi.rs.h"
#include "kernels.h"
#include "ledger.h"
#include "product.h"
#include <ATen/Parallel.h>
#include <ATen/core/Reduction.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/log_softmax.h>
#include <ATen/ops/scalar_tensor.h>
#include <torch/csrc/autograd/custom_function.h>

namespace gpipe {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Whether the kernels of fused_kernels.h take the logits.
bool has_loss_kernel(const at::Tensor &logits) {
  return kernels_take(logits) && logits.size(1) > 0;
}

// The sum of the rows' losses. Writes the gradient of the logits if there is one.
at::Tensor fused_sum(const at::Tensor &logits, const at::Tensor &target, int64_t ignore,
                     double smoothing, const at::Tensor &gradient) {
  const int64_t rows = logits.size(0), classes = logits.size(1);
  const at::Tensor x = logits.contiguous(), classes_of = target.contiguous();
  const int64_t *of = classes_of.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < rows; row++)
    TORCH_CHECK(of[row] == ignore || (of[row] >= 0 && of[row] < classes), "target ", of[row],
                " is out of bounds: the classes are 0..", classes);
  std::vector<float> losses(static_cast<std::size_t>(rows));
  by_dtype(x.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    const T *from = x.const_data_ptr<T>();
    T *to = gradient.defined() ? gradient.mutable_data_ptr<T>() : nullptr;
    at::parallel_for(0, rows, grain_of_rows(classes), [&](int64_t begin, int64_t end) {
      std::vector<float> exps(static_cast<std::size_t>(classes));
      for (int64_t row = begin; row < end; row++) {
        T *own = to ? to + row * classes : nullptr;
        if (of[row] != ignore)
          losses[row] = fused_kernels<T>().cross_entropy(from + row * classes, classes, of[row],
                                                         static_cast<float>(smoothing),
                                                         exps.data(), own);
        else if (own)
          std::fill(own, own + classes, T(0));
      }
    });
  });
  double sum = 0.0;
  for (const float loss : losses)
    sum += loss;
  return at::scalar_tensor(sum, logits.options());
}

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  // logits [rows, classes], target [rows].
  static at::Tensor forward(AutogradContext *context, const at::Tensor &logits,
                            const at::Tensor &target, int64_t ignore, double smoothing) {
    RECORD_USER_SCOPE("gpipe::cross entropy");
    at::AutoDispatchBelowADInplaceOrView below;
    if (has_loss_kernel(logits)) {
      at::Tensor gradient;
      if (logits.requires_grad())
        gradient = at::empty_like(logits, at::MemoryFormat::Contiguous);
      at::Tensor sum = fused_sum(logits, target, ignore, smoothing, gradient);
      context->saved_data["gradient"] = std::move(gradient);
      return sum;
    }
    at::Tensor ignored = target.eq(ignore);
    at::Tensor index = target.masked_fill(ignored, 0).unsqueeze(1);
    at::Tensor logs = at::log_softmax(logits, 1);
    at::Tensor sum = logs.gather(1, index).squeeze(1).masked_fill_(ignored, 0).sum().neg_();
    context->save_for_backward({index, ignored});
    context->saved_data["logs"] = std::move(logs); // not a saved variable: backward overwrites it
    return sum;
  }

  static void check(const at::Tensor &kept) {
    TORCH_CHECK(kept.defined(),
                "a second backward through one cross entropy: its values are overwritten");
  }

  // d sum / d logits = softmax - one-hot, in the rows that count.
  static variable_list backward(AutogradContext *context, variable_list grads) {
    RECORD_USER_SCOPE("gpipe::cross entropy");
    differentiable_once();
    at::NoGradGuard no_grad;
    if (const auto found = context->saved_data.find("gradient");
        found != context->saved_data.end()) {
      const at::Tensor gradient = found->second.toTensor();
      check(gradient);
      found->second = at::Tensor();
      return {gradient.mul_(grads[0]), at::Tensor(), at::Tensor(), at::Tensor()};
    }
    auto saved = context->get_saved_variables();
    const at::Tensor &index = saved[0], &ignored = saved[1];
    at::Tensor grad = context->saved_data["logs"].toTensor();
    check(grad);
    context->saved_data["logs"] = at::Tensor();
    grad.exp_();
    grad.scatter_add_(1, index, at::full({}, -1, grad.options()).expand_as(index));
    grad.mul_(grads[0].expand_as(index).masked_fill(ignored.unsqueeze(1), 0));
    return {grad, at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

} // namespace

Address cross_entropy_sum(Address logits, Address target, int64_t ignore, double smoothing) {
  const at::Tensor &x = borrow(logits), &y = borrow(target);
  TORCH_CHECK(x.dim() == 2 && y.dim() == 1 && x.size(0) == y.size(0) && x.device() == y.device(),
              "cross entropy of ", x.sizes(), " on ", x.device(), " and ", y.sizes(), " on ",
              y.device());
  TORCH_CHECK(smoothing >= 0.0 && smoothing <= 1.0, "label smoothing of ", smoothing,
              ": it is a share, from 0 to 1");
  if (smoothing != 0.0 && !has_loss_kernel(x))
    return give(at::cross_entropy_loss(x, y, {}, at::Reduction::Sum, ignore, smoothing));
  return give(CrossEntropy::apply(x, y, ignore, smoothing));
}

} // namespace gpipe
