// ATen's fused optimizer kernels over tensors that the caller owns.
#include "gpipe-bridge/src/ffi.rs.h"
#include "bridge.h"
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>

namespace gpipe {

namespace {
std::vector<at::Tensor> list(rust::Slice<const Address> addresses) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(addresses.size());
  for (Address address : addresses)
    tensors.push_back(borrow(address));
  return tensors;
}
} // namespace

void fused_adam(rust::Slice<const Address> parameters, rust::Slice<const Address> grads,
                rust::Slice<const Address> exp_avgs, rust::Slice<const Address> exp_avg_sqs,
                rust::Slice<const Address> steps, double lr, double beta1, double beta2,
                double weight_decay, double eps, bool decoupled) {
  at::NoGradGuard no_grad;
  auto p = list(parameters), g = list(grads), m = list(exp_avgs), v = list(exp_avg_sqs),
       s = list(steps);
  std::vector<at::Tensor> none;
  if (decoupled)
    at::_fused_adamw_(p, g, m, v, none, s, lr, beta1, beta2, weight_decay, eps, /*amsgrad=*/false,
                      /*maximize=*/false);
  else
    at::_fused_adam_(p, g, m, v, none, s, lr, beta1, beta2, weight_decay, eps, /*amsgrad=*/false,
                     /*maximize=*/false);
}

void fused_sgd(rust::Slice<const Address> parameters, rust::Slice<const Address> grads,
               rust::Slice<const Address> momenta, double lr, double momentum, bool nesterov,
               double weight_decay, bool first_step) {
  at::NoGradGuard no_grad;
  auto p = list(parameters), g = list(grads), m = list(momenta);
  at::_fused_sgd_(p, g, m, weight_decay, momentum, lr, /*dampening=*/0.0, nesterov,
                  /*maximize=*/false, first_step);
}

} // namespace gpipe
