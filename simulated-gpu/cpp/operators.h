// Every operator by the CPU's kernel.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

namespace simulated {

// Runs an operator by the CPU's kernel, at once, on views of the devices' memory.
void run_on_cpu(const c10::OperatorHandle &op, torch::jit::Stack *stack);

// Whether the operator has a kernel of its own here (kernels.cc).
bool is_own(const c10::OperatorName &name);

} // namespace simulated
