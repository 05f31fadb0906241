// Memory of the simulated GPUs: one file, mapped twice. Tensors hold addresses that nobody can
// access; kernels use the other mapping. An access by the host is therefore a fault.
#pragma once
#include "order.h"
#include <c10/core/CachingDeviceAllocator.h>

namespace simulated {

// Whether the address is memory of a simulated GPU.
bool is_device_address(const void *address);
// The device of such an address.
int device_of(const void *address);
// Where kernels find the memory at a device's address.
void *kernel_view(const void *address);
// The uses of the allocation that an address is in; null if it is in none.
Uses *uses_at(const void *address);

c10::DeviceAllocator *device_allocator();
// Allocates on a device that may not be the current one.
c10::DataPtr allocate_on(int device, std::size_t bytes);

// Names what allocates on this thread, for reports.
class AllocatedBy {
public:
  explicit AllocatedBy(const char *operation);
  ~AllocatedBy();
  AllocatedBy(const AllocatedBy &) = delete;
  AllocatedBy &operator=(const AllocatedBy &) = delete;

private:
  const char *before;
};

} // namespace simulated
