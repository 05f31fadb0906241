// Processes with a GPU each: ProcessGroupNCCL, or the simulator's stand-in for it.
//
// NCCL is in builds against a libtorch with CUDA whose headers are all there (build.rs). The
// simulator sends and receives through Gloo.
#include "gpipe-bridge/src/ffi.rs.h"
#include "bridge.h"
#include "c10d_inside.h"
#include <cstdlib>
#include <dlfcn.h>
#ifdef GPIPE_NCCL
#define USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

namespace gpipe {

struct GpuGroup::Impl {
  c10::intrusive_ptr<c10d::Backend> backend;
};
GpuGroup::GpuGroup() : impl(std::make_unique<Impl>()) {}
GpuGroup::~GpuGroup() = default;

namespace {

using Backend = c10::intrusive_ptr<c10d::Backend>;

// The simulator's group over a Gloo group, which it keeps.
using Simulated = c10d::Backend *(*)(c10d::Backend *);

Simulated simulated_group() {
  if (simulation() != Simulation::Loaded)
    return nullptr;
  return reinterpret_cast<Simulated>(dlsym(RTLD_DEFAULT, "gpipe_simulated_group"));
}

#ifdef GPIPE_NCCL
// c10d's threads end the process when an operation fails or is slow, and wait for the store. With
// blocking waits, of which there is none here, a group has no such threads: deadlines are the
// pipeline's. The variable is read when a group is made, and put back for other groups.
class WithoutWatchdog {
public:
  WithoutWatchdog() {
    if (const char *before = std::getenv(kName))
      value = before;
    setenv(kName, "1", /*overwrite=*/1);
  }
  ~WithoutWatchdog() {
    if (value)
      setenv(kName, value->c_str(), /*overwrite=*/1);
    else
      unsetenv(kName);
  }
  WithoutWatchdog(const WithoutWatchdog &) = delete;
  WithoutWatchdog &operator=(const WithoutWatchdog &) = delete;

private:
  static constexpr const char *kName = "TORCH_NCCL_BLOCKING_WAIT";
  std::optional<std::string> value;
};

Backend make_nccl(const TcpStore &store, int32_t rank, int32_t size, int32_t gpu,
                  std::chrono::milliseconds timeout) {
  const WithoutWatchdog without_watchdog;
  auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = timeout;
  Backend group =
      c10::make_intrusive<c10d::ProcessGroupNCCL>(store.impl->store, rank, size, options);
  // Now: in a pipeline, the last process has nothing to receive until the first one has sent, which
  // would wait for the last one.
  const c10::Device device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(gpu));
  group->setBoundDeviceId(device);
  group->eagerConnectSingleDevice(device);
  return group;
}
#endif

} // namespace

bool has_nccl() {
#ifdef GPIPE_NCCL
  return true;
#else
  return simulated_group() != nullptr;
#endif
}

std::unique_ptr<GpuGroup> gpu_group(const TcpStore &store, int32_t rank, int32_t size, int32_t gpu,
                                    rust::Str address, int64_t timeout_ms) {
  const std::chrono::milliseconds timeout(timeout_ms);
  auto group = std::make_unique<GpuGroup>();
  if (const Simulated simulated = simulated_group()) {
    Backend gloo = make_gloo(store.impl->store, rank, size, std::string(address), timeout);
    group->impl->backend = Backend::reclaim(simulated(gloo.release()));
    return group;
  }
#ifdef GPIPE_NCCL
  group->impl->backend = make_nccl(store, rank, size, gpu, timeout);
#else
  TORCH_CHECK(false, "this program was built without NCCL");
#endif
  return group;
}

// One group call. The stream then waits for all of it; the thread does not.
void GpuGroup::exchange(rust::Slice<const Address> sends, rust::Slice<const int32_t> to,
                        rust::Slice<const Address> receives,
                        rust::Slice<const int32_t> from) const {
  const auto one = [](Address tensor) { return std::vector<at::Tensor>{borrow(tensor)}; };
  c10d::Backend &backend = *impl->backend;
  backend.startCoalescing();
  try {
    for (std::size_t at = 0; at < sends.size(); at++) {
      auto tensors = one(sends[at]);
      backend.send(tensors, to[at], /*tag=*/0);
    }
    for (std::size_t at = 0; at < receives.size(); at++) {
      auto tensors = one(receives[at]);
      backend.recv(tensors, from[at], /*tag=*/0);
    }
    if (const auto work = backend.endCoalescing())
      work->synchronize();
  } catch (...) {
    backend.abort(); // a group that is begun must end
    throw;
  }
}

void GpuGroup::abort() const { impl->backend->abort(); }

} // namespace gpipe
