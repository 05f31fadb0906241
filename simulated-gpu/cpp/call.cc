#include "call.h"
#include "memory.h"
#include <cstring>

namespace simulated {

namespace {

at::Tensor tensor_on(const c10::Storage &storage, c10::DispatchKey key, const at::Tensor &like) {
  at::Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto *impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number())
    impl->set_wrapped_number(true);
  return made;
}

const void *address_of(const at::Tensor &tensor) {
  return tensor.has_storage() ? tensor.storage().data() : nullptr;
}

} // namespace

at::Tensor Views::of(const at::Tensor &tensor) {
  const c10::Storage &device = tensor.storage();
  auto found = by_device.find(device.unsafeGetStorageImpl());
  if (found == by_device.end()) {
    void *view = device.data() == nullptr ? nullptr : kernel_view(device.data());
    c10::Storage cpu(c10::Storage::use_byte_size_t(), device.nbytes(),
                     c10::DataPtr(view, c10::Device(c10::DeviceType::CPU)),
                     c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true);
    found = by_device.emplace(device.unsafeGetStorageImpl(), cpu).first;
    by_cpu.emplace(cpu.unsafeGetStorageImpl(), Pair{cpu, device});
  }
  return tensor_on(found->second, c10::DispatchKey::CPU, tensor);
}

at::Tensor Views::back(const at::Tensor &tensor) const {
  const auto found = by_cpu.find(tensor.storage().unsafeGetStorageImpl());
  if (found == by_cpu.end())
    return {};
  return tensor_on(found->second.device, c10::DispatchKey::CUDA, tensor);
}

at::Tensor imported(const at::Tensor &tensor, int device) {
  const std::size_t bytes = tensor.storage().nbytes();
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocate_on(device, bytes),
                       device_allocator(), /*resizable=*/true);
  if (bytes != 0)
    std::memcpy(kernel_view(storage.data()), tensor.storage().data(), bytes);
  return tensor_on(storage, c10::DispatchKey::CUDA, tensor);
}

void take_size(const at::Tensor &tensor, const at::Tensor &view) {
  if (tensor.sizes() == view.sizes() && tensor.strides() == view.strides())
    return;
  const std::size_t bytes = view.storage().nbytes();
  const c10::Storage &storage = tensor.storage();
  if (bytes > storage.nbytes()) {
    storage.set_data_ptr_noswap(allocate_on(tensor.get_device(), bytes));
    storage.set_nbytes(bytes);
  }
  if (bytes != 0 && view.storage().data() != kernel_view(storage.data()))
    std::memcpy(kernel_view(storage.data()), view.storage().data(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(),
                                                      view.storage_offset());
}

Uses *uses_of(const at::Tensor &tensor) {
  const void *address = address_of(tensor);
  return address == nullptr ? nullptr : uses_at(address);
}

} // namespace simulated
