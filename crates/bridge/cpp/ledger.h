// Names for parts of the bridge in a ledger of operations. They cost nothing while nobody counts.
#pragma once
#include "bridge.h"
#include <ATen/record_function.h>

namespace gpipe {

// How the names of our own scopes begin. Operations inside are counted as the scope's.
constexpr std::string_view kScope = "gpipe::";

// The tensors that an operation reads and writes.
template <typename... Tensors> std::vector<c10::IValue> moved(const Tensors &...tensors) {
  return {tensors...};
}

} // namespace gpipe
