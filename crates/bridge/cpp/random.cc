// Generators keyed by what runs, in the place of libtorch's process-wide ones.
//
// While a thread is in a scope, each random operator that is given no generator gets the scope's.
// A dispatch key puts it there: the key has a kernel for exactly the operators whose schema names a
// generator, and lets all others fall through, so that they cost nothing more. Operators that are
// made of others (such as dropout on a CPU) reach the dispatcher again with their parts, and are
// caught there. On a GPU, some are one kernel that draws from the process-wide generator, and their
// schemas name none. Dropout and attention are made of parts here; cuDNN's recurrent layers are
// refused.
//
// The key is PyTorch's own for tests of its dispatcher, because user code cannot add one. Only this
// file knows it. The tests of `random.rs` notice if a later libtorch changes what it does.
#include "gpipe-bridge/src/ffi.rs.h"
#include "bridge.h"
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <mutex>
#include <optional>
#include <torch/library.h>
#include <unordered_map>

namespace gpipe {

namespace {

constexpr auto kKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// A scope's generators: one for each device that it draws on, made when it first draws.
struct Scope {
  uint64_t seed;
  std::unordered_map<c10::Device, at::Generator> generators;

  at::Generator &on(c10::Device device) {
    const auto found = generators.find(device);
    if (found != generators.end())
      return found->second;
    at::Generator made = at::globalContext().defaultGenerator(device).clone();
    made.set_current_seed(seed);
    return generators.emplace(device, std::move(made)).first->second;
  }
};

thread_local std::vector<Scope> scopes;

bool is_generator(const c10::Type &type) {
  if (type.kind() == c10::TypeKind::GeneratorType)
    return true;
  const auto *optional = type.castRaw<c10::OptionalType>();
  return optional != nullptr &&
         optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// The device that an operator draws on: that of its first tensor, or the one that it is told.
c10::Device device_of(const torch::jit::Stack &stack, std::size_t first) {
  for (std::size_t at = first; at < stack.size(); ++at) {
    if (stack[at].isTensor() && stack[at].toTensor().defined())
      return stack[at].toTensor().device();
    if (stack[at].isDevice())
      return stack[at].toDevice();
  }
  return c10::Device(c10::DeviceType::CPU);
}

// A device without a number is the current one; on a CPU there is only one.
c10::Device numbered(c10::Device device) {
  if (device.is_cpu() || device.has_index())
    return device;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

void go_on(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

void with_generator(const c10::OperatorHandle &op, c10::DispatchKeySet keys,
                    torch::jit::Stack *stack) {
  if (!scopes.empty()) {
    const auto &arguments = op.schema().arguments();
    const std::size_t first = stack->size() - arguments.size();
    for (std::size_t at = 0; at < arguments.size(); ++at) {
      if (!is_generator(*arguments[at].type()))
        continue;
      c10::IValue &given = (*stack)[first + at];
      at::Generator &own = scopes.back().on(numbered(device_of(*stack, first)));
      TORCH_CHECK(given.isNone() || given.toGenerator() == own, op.schema().name(),
                  " is given a generator: its numbers would depend on the order of the stages; "
                  "leave the generator out, and it is keyed by seed, layer, step and sample");
      given = own;
    }
  }
  go_on(op, keys, stack);
}

// aten::native_dropout(input, p, train?) -> (output, mask)
void dropout(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
  const auto arguments = torch::jit::last(*stack, 3);
  const double p = arguments[1].toDouble();
  const bool trains = arguments[2].isNone() || arguments[2].toBool();
  if (scopes.empty() || !trains || p == 0)
    return go_on(op, keys, stack);
  const at::Tensor input = arguments[0].toTensor();
  torch::jit::drop(*stack, 3);
  const at::Tensor mask =
      at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  const at::Tensor output = input.mul(mask).mul(p < 1 ? 1 / (1 - p) : 0.0);
  torch::jit::push(*stack, output, mask);
}

// aten::scaled_dot_product_attention(query, key, value, mask?, dropout, is_causal, scale?, shared)
void attention(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
  const auto arguments = torch::jit::last(*stack, 8);
  const double p = arguments[4].toDouble();
  const at::Tensor q = arguments[0].toTensor();
  if (scopes.empty() || p == 0 || q.is_cpu())
    return go_on(op, keys, stack);
  std::optional<at::Tensor> mask = arguments[3].toOptional<at::Tensor>();
  if (mask.has_value() && mask->scalar_type() == at::kBool)
    mask = at::zeros(mask->sizes(), q.options())
               .masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
  const auto [output, weights] = at::_scaled_dot_product_attention_math(
      q, arguments[1].toTensor(), arguments[2].toTensor(), mask, p, arguments[5].toBool(),
      /*dropout_mask=*/{}, arguments[6].toOptional<double>(), arguments[7].toBool());
  torch::jit::drop(*stack, 8);
  torch::jit::push(*stack, output);
}

// Of cuDNN's recurrent layers. It draws between layers, so not where there is one.
void without_dropout(const c10::OperatorHandle &op, c10::DispatchKeySet keys,
                     torch::jit::Stack *stack) {
  const auto &schema = op.schema();
  const std::size_t first = stack->size() - schema.arguments().size();
  const auto argument = [&](const char *name) {
    return (*stack)[first + schema.argumentIndexWithName(name).value()];
  };
  TORCH_CHECK(scopes.empty() || !argument("train").toBool() || argument("num_layers").toInt() < 2 ||
                  argument("dropout").toDouble() == 0,
              "cuDNN draws the dropout of recurrent layers itself: a recomputation would draw "
              "other numbers; make each of them a layer of its own, with nn.Dropout between them");
  go_on(op, keys, stack);
}

// Registers the key's kernels, for the rest of the process.
void install() {
  static std::once_flag once;
  std::call_once(once, [] {
    static torch::Library all(torch::Library::IMPL, "_", kKey, __FILE__, __LINE__);
    all.fallback(torch::CppFunction::makeFallthrough());
    static torch::Library aten(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
    for (const c10::OperatorName &name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (name.getNamespace() != std::optional<c10::string_view>("aten"))
        continue;
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (!op.has_value())
        continue;
      const auto &arguments = op->schema().arguments();
      if (std::any_of(arguments.begin(), arguments.end(),
                      [](const c10::Argument &own) { return is_generator(*own.type()); })) {
        const std::string full = toString(name);
        aten.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&with_generator>());
      }
    }
    aten.impl("native_dropout", torch::CppFunction::makeFromBoxedFunction<&dropout>());
    aten.impl("scaled_dot_product_attention",
              torch::CppFunction::makeFromBoxedFunction<&attention>());
    aten.impl("_cudnn_rnn", torch::CppFunction::makeFromBoxedFunction<&without_dropout>());
  });
}

} // namespace

void enter_random(uint64_t seed) {
  install();
  scopes.push_back(Scope{seed, {}});
  c10::impl::tls_set_dispatch_key_included(kKey, true);
}

void leave_random() noexcept {
  if (!scopes.empty())
    scopes.pop_back();
  if (scopes.empty())
    c10::impl::tls_set_dispatch_key_included(kKey, false);
}

} // namespace gpipe
