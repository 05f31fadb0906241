// Tensors that autograd saves for a backward, and whose hooks they pass through (saved.cc).
#pragma once
#include "bridge.h"
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>

namespace gpipe {

// A saved tensor without its history, which would keep its node, and so itself, alive.
struct Saved {
  at::Tensor tensor;
  c10::VariableVersion version;
  uint32_t saved_at = 0;

  Saved() = default;
  explicit Saved(const at::Tensor &from);
  // The tensor. An error if it was changed in place since, as without hooks, or if this is empty.
  at::Tensor read() const;
};

// Whether a tensor's memory is one storage that can be replaced.
bool is_plain(const c10::TensorImpl &tensor);

// A storage without memory. Whoever asks for its address gets an error.
c10::Storage nothing_on(c10::Device device);

// From now on, autograd takes the hooks of this process's savings from the functions below.
void watch_saving();

// The hooks for the next tensor that this thread saves; null if nothing collects them here.
std::unique_ptr<torch::autograd::SavedVariableHooks> offload_hooks(); // offload.cc
std::unique_ptr<torch::autograd::SavedVariableHooks> hollow_hooks();  // hollow.cc
// Called where a layer has hooks of its own, which come before those of hollow.cc.
void note_other_hooks();

} // namespace gpipe
