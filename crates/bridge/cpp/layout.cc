// The memory layout of a value that passes from one layer to the next.
#include "gpipe-bridge/src/ffi.rs.h"
#include "bridge.h"
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/resolve_neg.h>

namespace gpipe {

namespace {

// The allocator's alignment. Vector kernels and MKL may round differently at another alignment.
constexpr std::uintptr_t kAlignment = 64;

bool is_aligned(const at::Tensor &tensor) {
  return reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % kAlignment == 0;
}

} // namespace

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
