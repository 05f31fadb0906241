// The CPU's view of tensors on simulated GPUs.
#pragma once
#include "order.h"
#include <ATen/core/Tensor.h>
#include <unordered_map>

namespace simulated {

// The tensors of one call as the CPU's kernels see them: on the same bytes, through the mapping
// that kernels use. Tensors that share a storage still share one.
class Views {
public:
  // A CPU tensor on the bytes of a GPU's tensor.
  at::Tensor of(const at::Tensor &device_tensor);
  // The GPU's tensor for a CPU tensor that shares the bytes of one of the call's; undefined if it
  // shares none.
  at::Tensor back(const at::Tensor &cpu_tensor) const;

private:
  struct Pair {
    c10::Storage cpu, device;
  };
  std::unordered_map<c10::StorageImpl *, c10::Storage> by_device;
  std::unordered_map<c10::StorageImpl *, Pair> by_cpu;
};

// A new tensor of a GPU with the bytes of a CPU tensor.
at::Tensor imported(const at::Tensor &cpu_tensor, int device);

// Gives a GPU's tensor the size, and the bytes, that a kernel gave to its view.
void take_size(const at::Tensor &device_tensor, const at::Tensor &view);

// The uses of a tensor's memory; null if it has none.
Uses *uses_of(const at::Tensor &device_tensor);

} // namespace simulated
