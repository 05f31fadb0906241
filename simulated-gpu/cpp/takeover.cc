// Beside PyTorch's own CUDA part, in Python: takes the place of its kernels. Its hooks are replaced
// by priority (hooks.cc), and its allocator and streams because the last registration counts.
#include "takeover.h"
#include "operators.h"
#include <ATen/core/dispatch/Dispatcher.h>
#include <memory>
#include <torch/library.h>

namespace simulated {

namespace {

using Libraries = std::vector<std::unique_ptr<torch::Library>>;

// This file is linked last, so the kernels of this library are there, too: they stay.
const Libraries *const taken = [] {
  auto *libraries = new Libraries;
  auto &dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName &name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || is_own(name))
      continue;
    const std::size_t colons = name.name.find("::");
    const std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    libraries->push_back(std::make_unique<torch::Library>(torch::Library::IMPL,
                                                          name.name.substr(0, colons),
                                                          c10::DispatchKey::CUDA, __FILE__,
                                                          __LINE__));
    libraries->back()->impl((name.name.substr(colons + 2) + overload).c_str(),
                            torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
  end_silence();
  return libraries;
}();

} // namespace

} // namespace simulated
