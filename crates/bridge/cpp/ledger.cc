// Counts the operations that libtorch's dispatcher runs on a thread: how often, how long, how many
// bytes they read and write, and how many floating-point operations they make.
//
// Time is an operation's own: without that of the operations that it calls. Bytes and
// floating-point operations are counted for the innermost operation that has any.
#include "ledger.h"
#include "gpipe-bridge/src/ffi.rs.h"
#include <algorithm>
#include <chrono>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace gpipe {

namespace {

// Operations that the names of one recording tell apart, at most. The shapes of a network are few.
constexpr std::size_t kEntriesMax = 1 << 14;

struct Sum {
  uint64_t calls = 0, ns = 0, bytes = 0;
  double flops = 0;
};

// An operation that has begun.
struct Open {
  int64_t start = 0;
  int64_t inside_ns = 0; // of operations that it called
  uint64_t inside_bytes = 0;
  double inside_flops = 0;
  uint64_t bytes = 0;
  uint64_t gradient_bytes = 0; // of an optimizer
  double flops = 0;      // known from the inputs
  double flops_each = 0; // for each element of the output
  const char *scope = nullptr;
  const char *kind = "";
  std::string shape;
  std::vector<const void *> storages; // of the inputs
};

struct Recording {
  at::CallbackHandle handle = 0;
  std::vector<Open> open;
  std::unordered_map<std::string, Sum> sums;
};

thread_local std::unique_ptr<Recording> recording;

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

template <typename Call> void for_tensors(const c10::IValue &value, Call &&call) {
  if (value.isTensor() && value.toTensor().defined())
    call(value.toTensor());
  else if (value.isTensorList())
    for (const at::Tensor &tensor : value.toTensorVector())
      if (tensor.defined())
        call(tensor);
}

// An expanded tensor is read as often as it is in memory.
uint64_t bytes_of(const at::Tensor &tensor) {
  if (tensor.layout() != at::kStrided || !tensor.has_storage())
    return 0;
  return std::min<uint64_t>(tensor.nbytes(), tensor.storage().nbytes());
}

const void *storage_of(const at::Tensor &tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

std::string text_of(at::IntArrayRef sizes) {
  std::string text = "[";
  for (std::size_t i = 0; i < sizes.size(); i++)
    text += (i ? " " : "") + std::to_string(sizes[i]);
  return text + "]";
}

at::Tensor tensor_at(c10::ArrayRef<const c10::IValue> inputs, std::size_t index) {
  return index < inputs.size() && inputs[index].isTensor() ? inputs[index].toTensor()
                                                           : at::Tensor();
}

bool starts_with(std::string_view text, std::string_view start) {
  return text.substr(0, start.size()) == start;
}

// Products and convolutions: multiplications and additions, counted apart. Those of attention are
// counted for all keys, also where a causal mask hides half of them.
void count_operations(Open &own, std::string_view name,
                      c10::ArrayRef<const c10::IValue> inputs) {
  const auto shapes = [&](const at::Tensor &a, const at::Tensor &b) {
    own.shape = text_of(a.sizes()) + text_of(b.sizes());
  };
  const auto product = [&](std::size_t first) {
    const at::Tensor a = tensor_at(inputs, first), b = tensor_at(inputs, first + 1);
    if (!a.defined() || !b.defined() || b.dim() == 0)
      return;
    own.flops = 2.0 * static_cast<double>(a.numel()) * (b.dim() > 1 ? b.size(-1) : 1);
    shapes(a, b);
  };
  if (name == "aten::mm" || name == "aten::bmm" || name == "aten::mv")
    product(0);
  else if (name == "aten::addmm" || name == "aten::baddbmm" || name == "aten::addmv")
    product(1);
  else if (name == "mkldnn::_linear_pointwise" || name == "aten::mkldnn_linear") {
    const at::Tensor x = tensor_at(inputs, 0), w = tensor_at(inputs, 1);
    if (!x.defined() || !w.defined())
      return;
    own.flops = 2.0 * static_cast<double>(x.numel()) * w.size(0);
    shapes(x, w);
  } else if (name == "aten::convolution_backward") {
    const at::Tensor grad = tensor_at(inputs, 0), w = tensor_at(inputs, 2);
    if (!grad.defined() || !w.defined() || inputs.size() < 11 || !inputs[10].isBoolList())
      return;
    const auto mask = inputs[10].toBoolList();
    const double gradients = double(mask.get(0)) + double(mask.get(1));
    own.flops = 2.0 * gradients * static_cast<double>(grad.numel()) * w.numel() / w.size(0);
    shapes(grad, w);
  } else if (name == "aten::convolution" || name == "aten::_convolution" ||
             name == "aten::mkldnn_convolution" || name == "aten::_slow_conv2d_forward" ||
             name == "aten::thnn_conv2d" || name == "aten::cudnn_convolution") {
    const at::Tensor x = tensor_at(inputs, 0), w = tensor_at(inputs, 1);
    if (!x.defined() || !w.defined() || w.dim() == 0 || w.size(0) == 0)
      return;
    own.flops_each = 2.0 * static_cast<double>(w.numel()) / w.size(0);
    shapes(x, w);
  } else if (name == "gpipe::product" || name == "gpipe::product backward") {
    const at::Tensor a = tensor_at(inputs, 0), b = tensor_at(inputs, 1);
    if (!a.defined() || !b.defined() || b.dim() != 2)
      return;
    // [rows, inputs] and [outputs, inputs]; backwards, the last axis of b is not summed over.
    const int64_t others = name == "gpipe::product" ? b.size(0) : b.size(1);
    own.flops = 2.0 * static_cast<double>(a.numel()) * others;
    shapes(a, b);
  } else if (starts_with(name, "gpipe::attention") ||
             (starts_with(name, "aten::_scaled_dot_product_") && name.find("math") == name.npos)) {
    const bool backward = name.find("backward") != name.npos;
    const std::size_t first = backward && name[0] == 'a' ? 1 : 0; // behind the gradient
    const at::Tensor q = tensor_at(inputs, first), k = tensor_at(inputs, first + 1);
    if (!q.defined() || !k.defined() || q.dim() < 2 || k.dim() < 2)
      return;
    own.flops = (backward ? 8.0 : 4.0) * static_cast<double>(q.numel()) * k.size(-2);
    shapes(q, k);
  }
}

// What a copy is for.
const char *kind_of_copy(c10::ArrayRef<const c10::IValue> inputs) {
  const at::Tensor to = tensor_at(inputs, 0), from = tensor_at(inputs, 1);
  if (!to.defined() || !from.defined())
    return "";
  if (to.device() != from.device())
    return " (device)";
  if (to.scalar_type() != from.scalar_type())
    return " (cast)";
  return to.strides() != from.strides() ? " (layout)" : "";
}

std::unique_ptr<at::ObserverContext> begun(const at::RecordFunction &function) {
  if (!recording)
    return nullptr;
  Open own;
  const std::string_view name = function.name();
  own.scope = recording->open.empty() ? nullptr : recording->open.back().scope;
  if (starts_with(name, kScope))
    own.scope = function.name();
  const auto inputs = function.inputs();
  const bool copies = name == "aten::copy_";
  if (copies)
    own.kind = kind_of_copy(inputs);
  for (std::size_t i = 0; i < inputs.size(); i++)
    for_tensors(inputs[i], [&](const at::Tensor &tensor) {
      own.storages.push_back(storage_of(tensor));
      // Memory that is only written is counted as an output.
      const bool read = !(i == 0 && (copies || name == "aten::fill_" || name == "aten::zero_"));
      own.bytes += read ? bytes_of(tensor) : 0;
      own.gradient_bytes += i == 1 ? bytes_of(tensor) : 0;
    });
  count_operations(own, name, inputs);
  own.start = now();
  recording->open.push_back(std::move(own));
  return nullptr;
}

void ended(const at::RecordFunction &function, at::ObserverContext *) {
  if (!recording || recording->open.empty())
    return;
  const int64_t end = now();
  Open own = std::move(recording->open.back());
  recording->open.pop_back();
  const std::string_view name = function.name();
  const bool in_place = !name.empty() && name.back() == '_';
  const bool allocates = starts_with(name, "aten::empty") || name == "aten::resize_";
  uint64_t written = 0;
  // Adam and SGD return nothing. They write all their lists but the gradients.
  if (starts_with(name, "aten::_fused_"))
    written = own.bytes - own.gradient_bytes;
  for (const c10::IValue &output : function.outputs())
    for_tensors(output, [&](const at::Tensor &tensor) {
      if (own.flops_each > 0)
        own.flops = own.flops_each * static_cast<double>(tensor.numel());
      const auto &all = own.storages;
      const bool view = std::find(all.begin(), all.end(), storage_of(tensor)) != all.end();
      written += view && !in_place ? 0 : bytes_of(tensor);
    });
  // A scope of our own names all that it reads and writes as its inputs.
  const bool moves = function.scope() == at::RecordScope::USER_SCOPE
                         ? own.bytes > 0
                         : written > 0 && !allocates &&
                               function.scope() == at::RecordScope::FUNCTION;
  Sum one;
  one.calls = 1;
  one.ns = static_cast<uint64_t>(end - own.start - own.inside_ns);
  one.bytes = moves && own.inside_bytes == 0 ? own.bytes + written : 0;
  one.flops = own.inside_flops == 0 ? own.flops : 0;
  if (!recording->open.empty()) {
    Open &outer = recording->open.back();
    outer.inside_ns += end - own.start;
    outer.inside_bytes += own.inside_bytes + one.bytes;
    outer.inside_flops += own.inside_flops + one.flops;
  }
  std::string key;
  if (own.scope && own.scope != function.name())
    key = std::string(own.scope) + " ";
  key += std::string(name) + own.kind;
  if (one.flops > 0)
    key += " " + own.shape;
  if (recording->sums.size() >= kEntriesMax && !recording->sums.count(key))
    key = "others";
  Sum &sum = recording->sums[key];
  sum.calls += one.calls;
  sum.ns += one.ns;
  sum.bytes += one.bytes;
  sum.flops += one.flops;
}

} // namespace

// An operation of our own, from its making to its end. Null while nobody counts.
struct LedgerScope::Impl {
  at::RecordFunction function{at::RecordScope::USER_SCOPE};
};
LedgerScope::LedgerScope() : impl(std::make_unique<Impl>()) {}
LedgerScope::~LedgerScope() = default;

std::unique_ptr<LedgerScope> ledger_scope(rust::Str name) {
  if (!recording)
    return nullptr;
  auto scope = std::make_unique<LedgerScope>();
  scope->impl->function.before(std::string_view(name.data(), name.size()));
  return scope;
}

// Begins to count on this thread, and forgets what was counted before.
void begin_ledger() {
  forget_ledger();
  recording = std::make_unique<Recording>();
  recording->handle = at::addThreadLocalCallback(at::RecordFunctionCallback(begun, ended)
                                                     .needsInputs(true)
                                                     .needsOutputs(true)
                                                     .scopes({at::RecordScope::FUNCTION,
                                                              at::RecordScope::BACKWARD_FUNCTION,
                                                              at::RecordScope::USER_SCOPE}));
}

rust::Vec<LedgerEntry> end_ledger() {
  TORCH_CHECK(recording, "this thread counts no operations");
  at::removeCallback(recording->handle);
  const auto own = std::move(recording);
  rust::Vec<LedgerEntry> entries;
  for (const auto &[name, sum] : own->sums)
    entries.push_back({rust::String::lossy(name), sum.calls, sum.ns, sum.bytes, sum.flops});
  return entries;
}

void forget_ledger() noexcept {
  if (recording)
    at::removeCallback(recording->handle);
  recording.reset();
}

} // namespace gpipe
