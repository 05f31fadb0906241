// Operators that need a kernel of their own: they allocate, or move bytes between devices.
#include "call.h"
#include "memory.h"
#include "operators.h"
#include "pinned.h"
#include "streams.h"
#include <ATen/EmptyTensor.h>
#include <algorithm>
#include <cstring>
#include <torch/library.h>

namespace simulated {

namespace {

using at::Tensor;

const auto kKeys = c10::DispatchKeySet(c10::DispatchKey::CUDA);

c10::Device device_in(const std::optional<c10::Device> &asked) {
  const int index = asked && asked->has_index() ? asked->index() : current_device();
  return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(index));
}

// The current device during a scope.
class OnDevice {
public:
  explicit OnDevice(c10::Device device) : before(current_device()) {
    set_current_device(device.index());
  }
  ~OnDevice() { set_current_device(before); }
  OnDevice(const OnDevice &) = delete;
  OnDevice &operator=(const OnDevice &) = delete;

private:
  int before;
};

Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<c10::Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const OnDevice on(device_in(device));
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype),
                                   format);
}

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<c10::Device> device, std::optional<bool>) {
  const OnDevice on(device_in(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys,
                                           c10::dtype_or_default(dtype));
}

std::vector<Uses *> list_of(Uses *uses) {
  return uses == nullptr ? std::vector<Uses *>{} : std::vector<Uses *>{uses};
}

StreamNumber stream_for(const Tensor &tensor) { return current_stream(tensor.get_device()); }

// As CUDA does: on the source's stream, which waits for the target's, and the other way round.
void enter_copy_between(const Tensor &self, const Tensor &source) {
  Lock lock(mutex());
  const StreamNumber from = stream_for(source), to = stream_for(self);
  const bool across = from != to;
  if (across)
    wait(from, recorded(to));
  launch(from, across ? "a copy between devices" : "a copy", list_of(uses_of(source)),
         list_of(uses_of(self)));
  if (across) {
    counts().copies_across++;
    wait(to, recorded(from));
  }
}

void copy_between(Tensor &self, const Tensor &source) {
  Views views;
  Tensor target = views.of(self);
  enter_copy_between(self, source);
  target.copy_(views.of(source));
}

// Under the lock, because it opens pinned memory for the time of the copy. Returns whether the host
// waits for it.
bool copy_in(Tensor &self, const Tensor &source, bool non_blocking) {
  Lock lock(mutex());
  const StreamNumber stream = stream_for(self);
  PinnedCopy pinned(source.storage().data(), stream, PinnedCopy::Direction::FromHost);
  launch(stream, "a copy from the host", {}, list_of(uses_of(self)));
  counts().copies_in++;
  Tensor target = Views().of(self);
  target.copy_(source);
  const bool in_background = non_blocking && is_pinned(source.storage().data());
  pinned.done(in_background);
  // Memory that is not pinned is read before the call ends.
  return !in_background;
}

bool copy_out(Tensor &self, const Tensor &source, bool non_blocking) {
  Lock lock(mutex());
  const StreamNumber stream = stream_for(source);
  PinnedCopy pinned(self.storage().data(), stream, PinnedCopy::Direction::ToHost);
  launch(stream, "a copy to the host", list_of(uses_of(source)), {});
  counts().copies_out++;
  self.copy_(Views().of(source));
  const bool in_background = non_blocking && is_pinned(self.storage().data());
  pinned.done(in_background);
  return !in_background;
}

Tensor &copy_(Tensor &self, const Tensor &source, bool non_blocking) {
  if (self.numel() == 0)
    return self;
  c10::impl::ExcludeDispatchKeyGuard below(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const Tensor &here = self.is_cuda() ? self : source;
  bool waits = false;
  if (self.is_cuda() && source.is_cuda())
    copy_between(self, source);
  else if (self.is_cuda())
    waits = copy_in(self, source, non_blocking);
  else
    waits = copy_out(self, source, non_blocking);
  if (waits) {
    Clock copied;
    {
      Lock lock(mutex());
      copied = recorded(stream_for(here));
    }
    host_waits(copied);
  }
  return self;
}

void record_stream(Tensor &self, c10::Stream stream) {
  device_allocator()->recordStream(self.storage().data_ptr(), stream);
}

const Tensor &resize_(const Tensor &self, c10::IntArrayRef size,
                      std::optional<at::MemoryFormat> format) {
  auto *impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format)
    impl->empty_tensor_restride(*format);
  const c10::Storage &storage = self.storage();
  const std::size_t before = storage.nbytes();
  const std::size_t bytes = (impl->numel() + impl->storage_offset()) * self.element_size();
  if (bytes > before) {
    c10::DataPtr fresh = allocate_on(self.get_device(), bytes);
    if (before != 0)
      std::memcpy(kernel_view(fresh.get()), kernel_view(storage.data()), before);
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
  return self;
}

// As they are registered below.
constexpr const char *kOwn[] = {"aten::empty.memory_format", "aten::empty_strided", "aten::copy_",
                                "aten::record_stream", "aten::resize_"};

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("record_stream", &record_stream);
  m.impl("resize_", &resize_);
}

} // namespace

bool is_own(const c10::OperatorName &name) {
  const std::string full = toString(name);
  return std::any_of(std::begin(kOwn), std::end(kOwn), [&](const char *own) { return full == own; });
}

} // namespace simulated
