// What products and convolutions gave in a forward, kept for its re-materialization, which then
// need not compute them again.
#pragma once
#include "bridge.h"
#include <functional>

namespace gpipe {

// While this thread records: `compute`, whose value is kept. While it replays: what was kept at
// this place, or else `compute`. To be called below autograd, on what a function returns.
at::Tensor remembered(at::IntArrayRef sizes, const std::function<at::Tensor()> &compute);

} // namespace gpipe
