// What autograd saves of a forward, taken out of memory and put back.
//
// Every tensor that an operator saves passes through a pair of hooks. They keep an alias of their
// own: a second tensor on the same memory, with its shape, strides and dtype. Taking the memory
// away replaces the aliases' storage by an empty one; giving it back replaces it again. Nothing
// else about an alias changes, so the backward sees the same bits in the same layout.
//
// Memory goes by storages, as autograd keeps it: a tensor that is saved twice, or whose views are
// saved, goes once. A storage that somebody else refers to stays, because taking it away would free
// nothing: parameters, values that cross stages, and what a layer keeps for itself.
//
#include "gpipe-bridge/src/ffi.rs.h"
#include "saved.h"
#include "vjp.h"
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/variable.h>
#include <algorithm>
#include <unordered_map>

namespace gpipe {

namespace {

using torch::autograd::SavedVariableHooks;
using Alias = c10::intrusive_ptr<c10::TensorImpl>;

// One storage, and all tensors known to be on it.
struct Slot {
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> aliases;
  bool is_away = false;

  bool has_living() const {
    return std::any_of(aliases.begin(), aliases.end(),
                       [](const auto &alias) { return !alias.expired(); });
  }

  // The tensors that still exist.
  std::vector<Alias> living() const {
    std::vector<Alias> living;
    for (const auto &alias : aliases)
      if (Alias own = alias.lock())
        living.push_back(std::move(own));
    return living;
  }
};

} // namespace

struct SavedTensors::Impl {
  explicit Impl(c10::Device device) : device(device) {}

  // Whose memory goes away. A layer on a GPU may save a number on the CPU, which stays.
  c10::Device device;
  std::vector<std::shared_ptr<Slot>> slots; // in the order of their first save
  std::unordered_map<const c10::StorageImpl *, std::shared_ptr<Slot>> by_storage;
  std::vector<std::shared_ptr<Slot>> away;

  // Notes that `alias` is on its storage; null if the memory cannot be moved.
  std::shared_ptr<Slot> add(const Alias &alias) {
    if (!is_plain(*alias) || alias->device() != device)
      return nullptr;
    std::shared_ptr<Slot> &slot = by_storage[alias->storage().unsafeGetStorageImpl()];
    // A storage that is gone may have left its address to another.
    if (!slot || !slot->has_living()) {
      slot = std::make_shared<Slot>();
      slots.push_back(slot);
    }
    slot->aliases.emplace_back(alias);
    return slot;
  }
};

namespace {

// The collection that this thread's forward adds to. A pointer that its scope owns.
thread_local SavedTensors::Impl *saving = nullptr;

struct Hooks : SavedVariableHooks {
  void call_pack_hook(const at::Tensor &tensor) override {
    saved = Saved(tensor);
    slot = saving ? saving->add(saved.tensor.getIntrusivePtr()) : nullptr;
  }

  at::Tensor call_unpack_hook() override {
    TORCH_CHECK(!slot || !slot->is_away,
                "a backward needs saved activations that are not back in memory yet");
    return saved.read();
  }

  Saved saved;
  std::shared_ptr<Slot> slot;
};

// All bytes of a storage, as a tensor.
at::Tensor bytes_of(const c10::Storage &storage) {
  const bool is_cpu = storage.device().is_cpu();
  auto bytes = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(is_cpu ? c10::DispatchKey::CPU
                                                        : c10::DispatchKey::CUDA),
      caffe2::TypeMeta::Make<uint8_t>());
  bytes.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(storage.nbytes())});
  return bytes;
}

// Whether only the known tensors, the graph and one handle of the caller's refer to this memory.
bool is_ours(const std::vector<Alias> &aliases) {
  const c10::Storage &storage = aliases.front()->storage();
  if (storage.use_count() != aliases.size())
    return false;
  return std::all_of(aliases.begin(), aliases.end(), [](const Alias &alias) {
    const at::Tensor tensor(alias);
    const auto end = torch::autograd::impl::try_get_grad_accumulator(tensor);
    // `alias` and `tensor` count, then the owner, then the node that receives a leaf's gradient.
    return alias.use_count() <= (end ? 4u : 3u);
  });
}

} // namespace

std::unique_ptr<SavedVariableHooks> offload_hooks() {
  return saving ? std::make_unique<Hooks>() : nullptr;
}

SavedTensors::SavedTensors(int32_t gpu)
    : impl(std::make_unique<Impl>(gpu < 0 ? c10::Device(c10::kCPU)
                                          : c10::Device(c10::kCUDA, c10::DeviceIndex(gpu)))) {
  watch_saving();
}
SavedTensors::~SavedTensors() {
  if (saving == impl.get())
    saving = nullptr;
}

std::unique_ptr<SavedTensors> new_saved_tensors(int32_t gpu) {
  return std::make_unique<SavedTensors>(gpu);
}

void SavedTensors::enter() {
  TORCH_CHECK(!saving, "this thread saves already");
  saving = impl.get();
}

void SavedTensors::leave() noexcept {
  if (saving == impl.get())
    saving = nullptr;
}

void SavedTensors::add_leaf(Address leaf) {
  const at::Tensor &tensor = borrow(leaf);
  // Detached tensors do not let their storage be replaced. This one is an island's own.
  tensor.unsafeGetTensorImpl()->set_allow_tensor_metadata_change(true);
  impl->add(tensor.getIntrusivePtr());
}

rust::Vec<Address> SavedTensors::take_away() {
  std::vector<at::Tensor> blocks;
  for (const std::shared_ptr<Slot> &slot : impl->slots) {
    std::vector<Alias> aliases = slot->living();
    if (aliases.empty() || aliases.front()->storage().nbytes() == 0 || !is_ours(aliases))
      continue;
    blocks.push_back(bytes_of(aliases.front()->storage()));
    const c10::Storage nothing = nothing_on(aliases.front()->device());
    for (const Alias &alias : aliases)
      alias->set_storage_keep_dtype(nothing);
    slot->is_away = true;
    impl->away.push_back(slot);
  }
  impl->slots.clear();
  impl->by_storage.clear();
  return give_all(std::move(blocks));
}

void SavedTensors::bring_back(rust::Slice<const Address> addresses) {
  const std::vector<at::Tensor> blocks = borrow_all(addresses);
  TORCH_CHECK(blocks.size() == impl->away.size(), impl->away.size(),
              " blocks of saved activations are away, and ", blocks.size(), " come back");
  for (std::size_t i = 0; i < blocks.size(); i++) {
    for (const Alias &alias : impl->away[i]->living())
      alias->set_storage_keep_dtype(blocks[i].storage());
    impl->away[i]->is_away = false;
  }
  impl->away.clear();
}

// A tensor without memory at the same place in the graph: a root for a backward.
Address root_of(Address address) {
  const at::Tensor &output = borrow(address);
  at::NoGradGuard no_grad;
  at::Tensor root = at::empty({0}, output.options());
  if (output.requires_grad())
    torch::autograd::impl::set_gradient_edge(root, torch::autograd::impl::gradient_edge(output));
  return give(std::move(root));
}

} // namespace gpipe
