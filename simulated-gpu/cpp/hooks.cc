// What libtorch asks of its CUDA part.
#include "memory.h"
#include "pinned.h"
#include "settings.h"
#include "streams.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace at {

namespace {

// libtorch looks for this name.
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return simulated::settings().devices > 0; }
  bool hasCUDA() const override { return simulated::settings().devices > 0; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return simulated::settings().devices; }
  DeviceIndex deviceCount() const override {
    return static_cast<DeviceIndex>(simulated::settings().devices);
  }
  DeviceIndex current_device() const override { return getCurrentDevice(); }
  DeviceIndex getCurrentDevice() const override {
    return static_cast<DeviceIndex>(simulated::current_device());
  }
  void setCurrentDevice(DeviceIndex device) const override {
    simulated::set_current_device(device);
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void *address) const override { return simulated::is_pinned(address); }
  Allocator *getPinnedMemoryAllocator() const override { return simulated::pinned_allocator(); }
  Allocator *getCUDADeviceAllocator() const override { return simulated::device_allocator(); }
  Device getDeviceFromPtr(void *address) const override {
    return Device(kCUDA, static_cast<DeviceIndex>(simulated::device_of(address)));
  }
  // Kernels are the CPU's, and draw from its generators.
  const Generator &getDefaultGenerator(DeviceIndex device) const override {
    static const auto *all = [] {
      auto *made = new std::vector<Generator>;
      for (int at = 0; at < simulated::settings().devices; at++)
        made->push_back(detail::createCPUGenerator());
      return made;
    }();
    return all->at(device < 0 ? simulated::current_device() : device);
  }
  Generator getNewGenerator(DeviceIndex) const override { return detail::createCPUGenerator(); }
  void deviceSynchronize(DeviceIndex device) const override {
    c10::impl::VirtualGuardImpl(kCUDA).synchronizeDevice(device);
  }
  // There is no cuDNN: libtorch then takes its own operators.
  bool compiledWithCuDNN() const override { return false; }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
  long versionCuDNNFrontend() const override { return 0; }
  std::string showConfig() const override { return "simulated GPUs"; }
};

// Before those of PyTorch's own CUDA part, if that is loaded, too.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)

} // namespace

} // namespace at
