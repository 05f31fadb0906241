// Every operator that has no kernel of its own here: the CPU's kernel, at once, on views of the
// device's memory.
#include "operators.h"
#include "call.h"
#include "memory.h"
#include "streams.h"
#include <ATen/core/dispatch/Dispatcher.h>
#include <algorithm>
#include <cstring>
#include <torch/library.h>

namespace simulated {

namespace {

// Operators that have a kernel for CPUs and none for CUDA, by name and overload. Made from PyTorch
// itself: operators.py.
constexpr const char *kMissing[] = {
#include "missing_operators.inc"
};

// Operators whose result the host looks at, so that they wait for the stream.
constexpr const char *kHostLooks[] = {
    "aten::_local_scalar_dense", "aten::nonzero",    "aten::masked_select",
    "aten::_unique2",            "aten::unique_dim", "aten::unique_consecutive",
    "aten::equal",               "aten::bincount",
};

// Operators that take indices on a CPU beside tensors on a GPU, as CUDA's do.
constexpr const char *kTakesCpuIndices[] = {"aten::index", "aten::index_put_",
                                            "aten::_index_put_impl_"};

template <std::size_t N> bool is_among(const char *const (&names)[N], const std::string &name) {
  return std::any_of(std::begin(names), std::end(names),
                     [&](const char *own) { return name == own; });
}

std::string full_name(const c10::OperatorHandle &op) {
  const auto &name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// One call: its arguments as the CPU's kernel takes them, and its results as the caller does.
class Call {
public:
  Call(const c10::OperatorHandle &op, torch::jit::Stack &stack)
      : op(op), stack(stack), name(op.operator_name().name) {}

  void run() {
    TORCH_CHECK_NOT_IMPLEMENTED(!is_among(kMissing, full_name(op)), "Could not run '",
                                full_name(op), "' on a simulated GPU: CUDA has no such kernel");
    const AllocatedBy allocated_by(name.c_str());
    const StreamNumber stream = enter();
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
    Lock lock(mutex());
    give_results();
    for (Uses *own : fresh)
      made(stream, name, *own);
  }

private:
  const c10::OperatorHandle &op;
  torch::jit::Stack &stack;
  const std::string name;
  Views views;
  std::vector<c10::IValue> given;
  // libtorch drops the arguments from the stack before it takes the results of a kernel that
  // returns several of them by reference, so that something else has to hold them.
  std::vector<at::Tensor> seen;
  std::vector<Uses *> reads, writes, fresh;
  int device = -1;

  // Takes the arguments, and enters the kernel into its stream.
  StreamNumber enter() {
    StreamNumber stream = 0;
    Clock before;
    {
      Lock lock(mutex());
      take_arguments();
      if (device < 0)
        device = current_device();
      stream = current_stream(device);
      if (is_view())
        return stream;
      launch(stream, name, reads, writes);
      before = recorded(stream);
    }
    if (is_among(kHostLooks, name))
      host_waits(before);
    return stream;
  }

  const std::vector<c10::Argument> &parameters() const { return op.schema().arguments(); }
  const std::vector<c10::Argument> &returns() const { return op.schema().returns(); }

  static bool is_written(const c10::Argument &own) {
    return own.alias_info() != nullptr && own.alias_info()->isWrite();
  }

  // Whether the result is a view of an argument, which takes no kernel.
  bool is_view() const {
    return !returns().empty() && returns()[0].alias_info() != nullptr && !is_written(returns()[0]);
  }

  void on(int index) {
    TORCH_CHECK(device < 0 || device == index,
                "Expected all tensors to be on the same device, but found at least two devices, "
                "cuda:", device, " and cuda:", index, " (", name, ", simulated)");
    device = index;
  }

  at::Tensor take(const at::Tensor &tensor, bool is_written, bool may_be_on_cpu) {
    if (!tensor.defined())
      return tensor;
    if (!tensor.is_cuda()) {
      TORCH_CHECK(may_be_on_cpu || !tensor.is_cpu(),
                  "Expected all tensors to be on the same device, but found at least two devices, "
                  "cuda and cpu (", name, ", with a CPU tensor ", tensor.sizes(), ", simulated)");
      return tensor;
    }
    on(tensor.get_device());
    if (Uses *uses = uses_of(tensor))
      (is_written ? writes : reads).push_back(uses);
    seen.push_back(views.of(tensor));
    return seen.back();
  }

  // Replaces the arguments on the stack by what the CPU's kernel takes.
  void take_arguments() {
    const std::size_t count = parameters().size(), first = stack.size() - count;
    given.assign(stack.begin() + static_cast<std::ptrdiff_t>(first), stack.end());
    const bool takes_indices = is_among(kTakesCpuIndices, name);
    for (std::size_t at = 0; at < count; at++) {
      c10::IValue &value = stack[first + at];
      const bool written = is_written(parameters()[at]);
      if (value.isTensor()) {
        const at::Tensor tensor = value.toTensor();
        // A number as a tensor may stay on the CPU.
        const bool is_number = tensor.defined() && tensor.dim() == 0;
        value = take(tensor, written, takes_indices || (is_number && !written));
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor &tensor : value.toTensorVector())
          list.push_back(take(tensor, written, false));
        value = list;
      } else if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const std::optional<at::Tensor> &tensor : value.toOptionalTensorVector())
          list.push_back(tensor ? std::optional(take(*tensor, written, takes_indices)) : tensor);
        value = list;
      } else if (value.isDevice() && value.toDevice().is_cuda()) {
        const c10::Device own = value.toDevice();
        device = own.has_index() ? own.index() : current_device();
        value = c10::Device(c10::DeviceType::CPU);
      }
    }
  }

  at::Tensor give(const at::Tensor &tensor) {
    if (!tensor.defined() || !tensor.is_cpu())
      return tensor;
    if (at::Tensor shared = views.back(tensor); shared.defined())
      return shared;
    at::Tensor result = imported(tensor, device);
    if (Uses *uses = uses_of(result))
      fresh.push_back(uses);
    return result;
  }

  // The argument that a result is, if the schema says that it is written and returned.
  const c10::IValue *written_argument(const c10::Argument &result) const {
    for (std::size_t at = 0; at < parameters().size(); at++) {
      const auto *own = parameters()[at].alias_info();
      if (is_written(parameters()[at]) &&
          own->beforeSets() == result.alias_info()->beforeSets())
        return &given[at];
    }
    return nullptr;
  }

  void give_results() {
    const std::size_t first = stack.size() - returns().size();
    for (std::size_t at = 0; at < returns().size(); at++) {
      c10::IValue &value = stack[first + at];
      const c10::IValue *same = nullptr;
      if (is_written(returns()[at]))
        same = written_argument(returns()[at]);
      if (same != nullptr) {
        if (same->isTensor() && same->toTensor().is_cuda())
          take_size(same->toTensor(), value.toTensor());
        value = *same;
      } else if (value.isTensor()) {
        value = give(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor &tensor : value.toTensorVector())
          list.push_back(give(tensor));
        value = list;
      }
    }
  }
};

} // namespace

void run_on_cpu(const c10::OperatorHandle &op, torch::jit::Stack *stack) { Call(op, *stack).run(); }

namespace {

TORCH_LIBRARY_IMPL(_, CUDA, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

// libtorch would make these of other operators, of which some exist for CUDA alone, or of more
// kernels than CUDA takes, or with a result of another shape than the CPU's kernel takes.
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (const char *name :
       {"convolution", "convolution_overrideable", "convolution_backward",
        "convolution_backward_overrideable", "native_layer_norm", "native_group_norm",
        "silu_backward", "mish_backward", "all.dims", "any.dims", "addr", "mse_loss",
        "smooth_l1_loss"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}

} // namespace

} // namespace simulated
