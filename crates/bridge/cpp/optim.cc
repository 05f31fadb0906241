// ATen's fused optimizer kernels over tensors that the caller owns.
#include "gpipe-bridge/src/ffi.rs.h"
#include "bridge.h"
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>

namespace gpipe {

namespace {

using Tensors = std::vector<at::Tensor>;

Tensors list(rust::Slice<const Address> addresses) {
  Tensors tensors;
  tensors.reserve(addresses.size());
  for (Address address : addresses)
    tensors.push_back(borrow(address));
  return tensors;
}

void check_parameters(const char *rule, const Tensors &parameters) {
  for (std::size_t i = 0; i < parameters.size(); i++) {
    const at::Tensor &parameter = parameters[i];
    TORCH_CHECK(parameter.defined() && parameter.layout() == at::kStrided &&
                    parameter.is_floating_point() && parameter.is_non_overlapping_and_dense(),
                rule, ": parameter ", i, " is not a dense tensor of floating-point numbers");
  }
}

// Checks the tensors beside the parameters. ATen's kernels treat a parameter and these tensors as
// arrays of one length, without a check.
void check_beside(const char *rule, const Tensors &parameters, const char *name,
                  const Tensors &beside) {
  TORCH_CHECK(beside.size() == parameters.size(), rule, ": ", parameters.size(), " parameters and ",
              beside.size(), " of ", name);
  for (std::size_t i = 0; i < parameters.size(); i++) {
    const at::Tensor &parameter = parameters[i], &other = beside[i];
    TORCH_CHECK(other.defined(), rule, ": the ", name, " of parameter ", i,
                " is an undefined tensor");
    TORCH_CHECK(other.layout() == at::kStrided && other.sizes() == parameter.sizes() &&
                    other.scalar_type() == parameter.scalar_type() &&
                    other.device() == parameter.device() &&
                    (other.strides() == parameter.strides() ||
                     (other.is_contiguous() && parameter.is_contiguous())),
                rule, ": the ", name, " of parameter ", i, " is ", other.scalar_type(), " ",
                other.sizes(), " on ", other.device(), ", the parameter ", parameter.scalar_type(),
                " ", parameter.sizes(), " on ", parameter.device(),
                ": shape, dtype, device and strides must be the parameter's");
  }
}

void check_steps(const Tensors &parameters, const Tensors &steps) {
  TORCH_CHECK(steps.size() == parameters.size(), "adam: ", parameters.size(), " parameters and ",
              steps.size(), " step numbers");
  for (std::size_t i = 0; i < steps.size(); i++)
    TORCH_CHECK(
        steps[i].defined() && steps[i].layout() == at::kStrided && steps[i].numel() == 1 &&
            steps[i].scalar_type() == at::kFloat && steps[i].device() == parameters[i].device(),
        "adam: the step number of parameter ", i, " is not one float32 on the parameter's device");
}

} // namespace

void fused_adam(rust::Slice<const Address> parameters, rust::Slice<const Address> grads,
                rust::Slice<const Address> exp_avgs, rust::Slice<const Address> exp_avg_sqs,
                rust::Slice<const Address> steps, double lr, double beta1, double beta2,
                double weight_decay, double eps, bool decoupled) {
  at::NoGradGuard no_grad;
  auto p = list(parameters), g = list(grads), m = list(exp_avgs), v = list(exp_avg_sqs),
       s = list(steps);
  check_parameters("adam", p);
  check_beside("adam", p, "gradient", g);
  check_beside("adam", p, "exp_avg", m);
  check_beside("adam", p, "exp_avg_sq", v);
  check_steps(p, s);
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
  check_parameters("sgd", p);
  check_beside("sgd", p, "gradient", g);
  if (momentum != 0 || !m.empty())
    check_beside("sgd", p, "momentum", m);
  at::_fused_sgd_(p, g, m, weight_decay, momentum, lr, /*dampening=*/0.0, nesterov,
                  /*maximize=*/false, first_step);
}

} // namespace gpipe
