// Shared by whole and split vector-Jacobian products.
#pragma once
#include "bridge.h"
#include <vector>

namespace gpipe {

std::vector<at::Tensor> borrow_all(rust::Slice<const Address> addresses);

// Adds `grad` to `accumulator`; either may be undefined.
at::Tensor accumulate(at::Tensor accumulator, at::Tensor grad);

// Call this only when nothing can throw any more: a lost address is a tensor that is never freed.
rust::Vec<Address> give_all(std::vector<at::Tensor> tensors);

} // namespace gpipe
