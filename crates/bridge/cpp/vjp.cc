// Vector-Jacobian products with given output gradients, and exact accumulation of parameter
// gradients.
#include "gpipe-bridge/src/ffi.rs.h"
#include "kernels.h"
#include "ledger.h"
#include "vjp.h"
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>

namespace gpipe {

std::vector<at::Tensor> borrow_all(rust::Slice<const Address> addresses) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(addresses.size());
  for (Address address : addresses)
    tensors.push_back(address == 0 ? at::Tensor() : borrow(address));
  return tensors;
}

OnThisThread::OnThisThread() : before(state().get_multithreading_enabled()) {
  state().set_multithreading_enabled(false);
}
OnThisThread::~OnThisThread() { state().set_multithreading_enabled(before); }
c10::AutogradState &OnThisThread::state() { return c10::AutogradState::get_tls_state(); }

// Adds a bfloat16 gradient to a float32 sum without a float32 copy of it, where both are on a CPU:
// libtorch makes one, in parts. Returns whether it did.
bool add_in_one_pass(const at::Tensor &sum, const at::Tensor &grad) {
  const auto lies_so = [&](const at::Tensor &one, at::ScalarType kind) {
    return one.defined() && one.scalar_type() == kind && kernels_take(one) && one.is_contiguous();
  };
  if (!lies_so(sum, at::kFloat) || !lies_so(grad, at::kBFloat16) || sum.sizes() != grad.sizes())
    return false;
  RECORD_USER_SCOPE_WITH_INPUTS("gpipe::gradient sum", moved(sum, sum, grad));
  float *to = sum.mutable_data_ptr<float>();
  const auto *from = grad.const_data_ptr<c10::BFloat16>();
  at::parallel_for(0, sum.numel(), kGrain, [&](int64_t begin, int64_t end) {
    fused_kernels<c10::BFloat16>().add(from + begin, to + begin, end - begin);
  });
  return true;
}

// The first gradient becomes the accumulator if nothing else refers to it. Otherwise it is copied:
// autograd may return one tensor for two inputs, and later additions to the accumulator are in
// place. Gradients in bfloat16 and float16 are summed in float32.
at::Tensor accumulate(at::Tensor accumulator, at::Tensor grad) {
  if (!grad.defined())
    return accumulator;
  if (add_in_one_pass(accumulator, grad))
    return accumulator;
  RECORD_USER_SCOPE("gpipe::gradient sum");
  const bool reduced = at::isReducedFloatingType(grad.scalar_type());
  if (!accumulator.defined() && reduced)
    return grad.to(at::kFloat, /*non_blocking=*/false, /*copy=*/false,
                   at::MemoryFormat::Contiguous);
  if (!accumulator.defined()) {
    bool ours = grad.use_count() == 1 && grad.storage().use_count() == 1 && grad.is_contiguous();
    return ours ? grad : grad.clone(at::MemoryFormat::Contiguous);
  }
  TORCH_CHECK(accumulator.sizes() == grad.sizes(), "the gradient of a parameter ", grad.sizes(),
              " is added to a sum ", accumulator.sizes(), ": both need one shape");
  accumulator.add_(grad);
  return accumulator;
}

rust::Vec<Address> give_all(std::vector<at::Tensor> tensors) {
  rust::Vec<Address> result;
  result.reserve(tensors.size());
  for (at::Tensor &tensor : tensors)
    result.push_back(give(std::move(tensor)));
  return result;
}

// Returns the inputs' gradients followed by the parameters' accumulators; 0 where there is none.
rust::Vec<Address> vjp(rust::Slice<const Address> outputs, rust::Slice<const Address> output_grads,
                       rust::Slice<const Address> inputs, rust::Slice<const Address> parameters,
                       rust::Slice<const Address> accumulators) {
  TORCH_CHECK(outputs.size() == output_grads.size(), "vjp: ", outputs.size(), " outputs, ",
              output_grads.size(), " gradients");
  TORCH_CHECK(parameters.size() == accumulators.size(), "vjp: ", parameters.size(),
              " parameters, ", accumulators.size(), " accumulators");
  std::vector<at::Tensor> wrt = borrow_all(inputs);
  for (Address parameter : parameters)
    wrt.push_back(borrow(parameter));
  const OnThisThread on_this_thread;
  std::vector<at::Tensor> grads = torch::autograd::grad(
      borrow_all(outputs), wrt, borrow_all(output_grads), /*retain_graph=*/false,
      /*create_graph=*/false, /*allow_unused=*/true);
  wrt.clear();

  at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < parameters.size(); i++) {
    at::Tensor accumulator = accumulators[i] == 0 ? at::Tensor() : borrow(accumulators[i]);
    at::Tensor &grad = grads[inputs.size() + i];
    grad = accumulate(std::move(accumulator), std::move(grad));
  }
  return give_all(std::move(grads));
}

// Throws an exception of each kind, for the bridge's tests: every one must become an error value.
void throw_for_test(int32_t kind) {
  switch (kind) {
  case 0:
    TORCH_CHECK(false, "a c10::Error");
  case 1:
    throw std::runtime_error("a std::exception");
  default:
    throw kind;
  }
}

} // namespace gpipe
