// Summed cross entropy whose backward overwrites what its forward saved.
//
// Why not at::cross_entropy_loss: its backward holds the logits, their log-softmax, and two
// gradients of that size at once. With a language model's vocabulary, that is the peak memory of
// the whole stage.
#include "gpipe-bridge/src/ffi.rs.h"
#include "ledger.h"
#include <ATen/ops/log_softmax.h>
#include <torch/csrc/autograd/custom_function.h>

namespace gpipe {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  // logits [rows, classes], target [rows].
  static at::Tensor forward(AutogradContext *context, const at::Tensor &logits,
                            const at::Tensor &target, int64_t ignore) {
    RECORD_USER_SCOPE("gpipe::cross entropy");
    at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor ignored = target.eq(ignore);
    at::Tensor index = target.masked_fill(ignored, 0).unsqueeze(1);
    at::Tensor logs = at::log_softmax(logits, 1);
    at::Tensor sum = logs.gather(1, index).squeeze(1).masked_fill_(ignored, 0).sum().neg_();
    context->save_for_backward({index, ignored});
    context->saved_data["logs"] = std::move(logs); // not a saved variable: backward overwrites it
    return sum;
  }

  // d sum / d logits = softmax - one-hot, in the rows that count.
  static variable_list backward(AutogradContext *context, variable_list grads) {
    RECORD_USER_SCOPE("gpipe::cross entropy");
    at::NoGradGuard no_grad;
    auto saved = context->get_saved_variables();
    const at::Tensor &index = saved[0], &ignored = saved[1];
    at::Tensor grad = context->saved_data["logs"].toTensor();
    TORCH_CHECK(grad.defined(),
                "a second backward through one cross entropy: its values are overwritten");
    context->saved_data["logs"] = at::Tensor();
    grad.exp_();
    grad.scatter_add_(1, index, at::full({}, -1, grad.options()).expand_as(index));
    grad.mul_(grads[0].expand_as(index).masked_fill(ignored.unsqueeze(1), 0));
    return {grad, at::Tensor(), at::Tensor()};
  }
};

} // namespace

Address cross_entropy_sum(Address logits, Address target, int64_t ignore) {
  const at::Tensor &x = borrow(logits), &y = borrow(target);
  TORCH_CHECK(x.dim() == 2 && y.dim() == 1 && x.size(0) == y.size(0), "cross entropy of ",
              x.sizes(), " and ", y.sizes());
  return give(CrossEntropy::apply(x, y, ignore));
}

} // namespace gpipe
