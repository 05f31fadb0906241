// Shared by whole and split vector-Jacobian products.
#pragma once
#include "bridge.h"
#include <c10/core/AutogradState.h>
#include <vector>

namespace gpipe {

std::vector<at::Tensor> borrow_all(rust::Slice<const Address> addresses);

// While it lives, autograd computes on the calling thread. For a GPU it would use a thread of its
// own, which may hold on to gradients after the call: they would have to be copied, and would count
// as memory, by chance.
class OnThisThread {
public:
  OnThisThread();
  ~OnThisThread();
  OnThisThread(const OnThisThread &) = delete;
  OnThisThread &operator=(const OnThisThread &) = delete;

private:
  static c10::AutogradState &state();
  const bool before;
};

// Adds `grad` to `accumulator`; either may be undefined.
at::Tensor accumulate(at::Tensor accumulator, at::Tensor grad);

// Call this only when nothing can throw any more: a lost address is a tensor that is never freed.
rust::Vec<Address> give_all(std::vector<at::Tensor> tensors);

} // namespace gpipe
