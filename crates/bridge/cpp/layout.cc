// The memory layout of values that pass from one layer to the next, and of gradients.
#include "gpipe-bridge/src/ffi.rs.h"
#include "vjp.h"
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/resolve_neg.h>
#include <torch/csrc/autograd/custom_function.h>

namespace gpipe {

namespace {

// The allocator's alignment. Vector kernels and MKL may round differently at another alignment.
constexpr std::uintptr_t kAlignment = 64;

bool is_aligned(const at::Tensor &tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % kAlignment == 0;
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The gradients of libtorch's own concatenation are views with gaps in memory. For such a gradient
// libtorch's batch norm has a backward that works on one number at a time.
struct Concatenate : torch::autograd::Function<Concatenate> {
  static at::Tensor forward(AutogradContext *context, at::TensorList parts, int64_t axis) {
    at::AutoDispatchBelowADInplaceOrView below;
    std::vector<int64_t> sizes;
    for (const at::Tensor &part : parts)
      sizes.push_back(part.size(axis));
    context->saved_data["sizes"] = std::move(sizes);
    context->saved_data["axis"] = axis;
    context->saved_data["format"] = static_cast<int64_t>(parts[0].suggest_memory_format());
    return at::cat(parts, axis);
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    const auto sizes = context->saved_data["sizes"].toIntVector();
    const int64_t axis = context->saved_data["axis"].toInt();
    const auto format = static_cast<at::MemoryFormat>(context->saved_data["format"].toInt());
    variable_list found;
    int64_t start = 0;
    for (std::size_t i = 0; i < sizes.size(); start += sizes[i++])
      found.push_back(context->needs_input_grad(i)
                          ? grads[0].narrow(axis, start, sizes[i]).contiguous(format)
                          : at::Tensor());
    found.emplace_back(); // of the axis
    return found;
  }
};

} // namespace

// Joins tensors along an axis. The gradient of each is contiguous in the layout of the first.
Address concatenate(rust::Slice<const Address> addresses, int64_t axis) {
  const std::vector<at::Tensor> parts = borrow_all(addresses);
  TORCH_CHECK(!parts.empty() && axis >= 0, "a concatenation of ", parts.size(),
              " tensors along axis ", axis);
  for (const at::Tensor &part : parts)
    TORCH_CHECK(part.defined() && axis < part.dim(), "a concatenation along axis ", axis,
                " of a tensor without one");
  return give(Concatenate::apply(at::TensorList(parts), axis));
}

// Copies a tensor so that its elements lie in memory once each, without gaps, from an aligned
// address on. Returns 0 if the tensor already lies so.
Address settled(Address address) {
  const at::Tensor &tensor = borrow(address);
  TORCH_CHECK(tensor.layout() == at::kStrided, "a ", tensor.layout(),
              " tensor cannot pass from one layer to the next: pass on a dense one (to_dense)");
  const bool dense = tensor.is_non_overlapping_and_dense();
  if (dense && !tensor.is_neg() && !tensor._is_zerotensor() && is_aligned(tensor))
    return 0;
  at::NoGradGuard no_grad;
  // Always new memory: resolve_neg alone returns a tensor that is not negative as it is.
  const auto format = dense ? at::MemoryFormat::Preserve : at::MemoryFormat::Contiguous;
  return give(tensor.resolve_neg().clone(format));
}

} // namespace gpipe
