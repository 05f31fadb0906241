// The graph of a forward whose saved tensors are computed again (hollow.cc).
#pragma once
#include "bridge.h"
#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace gpipe {

// The hooks for a tensor that an operator saves on this thread; null if no hollow graph records or
// is filled here.
std::unique_ptr<torch::autograd::SavedVariableHooks> hollow_hooks();

// Notes that an operator on this thread saves through hooks of the layer's own.
void note_other_hooks();

// Whether this thread fills a hollow graph that is full once `count` more tensors are saved.
bool ends_with(std::size_t count);

// Puts an engine of ours in front of autograd's, which asks for these hooks (offload.cc).
void stand_in_front();

// A storage without memory. Whoever asks for its address gets an error.
c10::Storage nothing_on(c10::Device device);

} // namespace gpipe
