// Outputs of products and convolutions in a forward, kept so that its re-materialization need not
// compute them again.
#pragma once
#include "bridge.h"
#include <functional>

namespace gpipe {

// Returns the result of `compute`, and keeps it if this thread records. If this thread replays,
// returns the value kept at this position if it is still valid, else `compute`'s. Call it below
// autograd, on the value that a function returns.
at::Tensor remembered(at::IntArrayRef sizes, const std::function<at::Tensor()> &compute);

// Whether nobody reads the result of the product that this thread computes (set_unread).
bool is_unread();

} // namespace gpipe
