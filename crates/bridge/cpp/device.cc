// Streams, events and memory statistics of GPUs, through libtorch's device-generic interfaces. The
// CPU library has these interfaces too, so this compiles, links and runs without CUDA and needs no
// CUDA headers.
#include "gpipe-bridge/src/ffi.rs.h"
#include "bridge.h"
#include <ATen/Context.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <cstdlib>
#include <dlfcn.h>
#include <filesystem>
#include <unordered_map>

namespace gpipe {

namespace {

constexpr const char *kLibrary = "libtorch_cuda.so";
// The simulator alone has it.
constexpr const char *kCounts = "gpipe_simulated_counts";

// Python loads the simulator before PyTorch. Otherwise it lies in a folder beside the program, or
// beside the program's folder, where cargo puts tests and examples. Elsewhere LD_LIBRARY_PATH names
// it.
void *load_simulator() {
  if (dlsym(RTLD_DEFAULT, kCounts) != nullptr)
    return dlopen(nullptr, RTLD_NOW);
#ifdef GPIPE_NCCL
  return nullptr; // CUDA's own part is linked, and was loaded before
#endif
  std::error_code error;
  std::filesystem::path folder = std::filesystem::read_symlink("/proc/self/exe", error);
  for (int up = 0; up < 2; up++) {
    folder = folder.parent_path();
    const std::filesystem::path path = folder / "simulated-gpu" / kLibrary;
    if (std::filesystem::exists(path, error))
      return dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
  }
  void *library = dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);
  return library != nullptr && dlsym(library, kCounts) != nullptr ? library : nullptr;
}

bool wants_simulator() { return std::getenv("GPIPE_SIMULATED_GPUS") != nullptr; }

// Loads libtorch's CUDA part before main, if it lies beside the rest. It registers itself when
// loaded, and must be loaded before libtorch first looks for devices. Nothing refers to it by name,
// so a linker would leave it out. A libtorch without this library has no CUDA.
void *const cuda_part =
    wants_simulator() ? load_simulator() : dlopen(kLibrary, RTLD_NOW | RTLD_GLOBAL);

// As the simulator declares it.
struct Counts {
  uint64_t launches, host_waits, stream_waits, copies_in, copies_out, copies_across, allocations;
};

constexpr auto kGpu = c10::DeviceType::CUDA;

c10::Device gpu(int32_t device) { return {kGpu, static_cast<c10::DeviceIndex>(device)}; }

c10::Stream unpack(DeviceStream stream) {
  return c10::Stream::unpack3(stream.id, static_cast<c10::DeviceIndex>(stream.device), kGpu);
}

DeviceStream pack(c10::Stream stream) { return DeviceStream{stream.device_index(), stream.id()}; }

// The stream on which copies from this thread arrive at a GPU. libtorch makes a copy wait for the
// target's current stream. If all threads had the same one, a copy would wait for those of others.
c10::Stream arrivals_at(int32_t device) {
  thread_local std::unordered_map<int32_t, c10::Stream> streams;
  auto found = streams.find(device);
  if (found == streams.end()) {
    const c10::Stream own = c10::impl::VirtualGuardImpl(kGpu).getStreamFromGlobalPool(gpu(device));
    found = streams.emplace(device, own).first;
  }
  return found->second;
}

} // namespace

struct DeviceEvent::Impl {
  c10::Event event;
};
// An event that keeps its time costs more to record.
DeviceEvent::DeviceEvent(bool timed)
    : impl(std::make_unique<Impl>(Impl{c10::Event(
          kGpu, timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT)})) {}
DeviceEvent::~DeviceEvent() = default;
// libtorch makes an event's GPU current to destroy it, and then the one before. On a thread that
// has used no GPU, that is GPU 0, where CUDA would then make a context of hundreds of megabytes.
void DeviceEvent::make_current() const {
  c10::impl::VirtualGuardImpl(kGpu).setDevice(gpu(impl->event.device_index()));
}
void DeviceEvent::block(DeviceStream stream) const { impl->event.block(unpack(stream)); }
void DeviceEvent::synchronize() const { impl->event.synchronize(); }
bool DeviceEvent::is_done() const { return impl->event.query(); }
double DeviceEvent::ms_since(const DeviceEvent &earlier) const {
  return earlier.impl->event.elapsedTime(impl->event);
}

bool has_cuda() { return cuda_part != nullptr; }

Simulation simulation() {
  if (!wants_simulator())
    return Simulation::None;
  return cuda_part == nullptr ? Simulation::Missing : Simulation::Loaded;
}

SimulatedCounts simulated_counts() {
  Counts counts{};
  if (simulation() == Simulation::Loaded)
    if (void *read = dlsym(cuda_part, kCounts))
      reinterpret_cast<void (*)(Counts *)>(read)(&counts);
  return SimulatedCounts{counts.launches,   counts.host_waits, counts.stream_waits,
                         counts.copies_in,  counts.copies_out, counts.copies_across,
                         counts.allocations};
}

int32_t gpu_count() {
  return c10::impl::hasDeviceGuardImpl(kGpu) ? c10::impl::getDeviceGuardImpl(kGpu)->deviceCount()
                                             : 0;
}

DeviceStream new_stream(int32_t device) {
  return pack(c10::impl::VirtualGuardImpl(kGpu).getStreamFromGlobalPool(gpu(device)));
}

// Sets the thread's current device and stream for the rest of the thread.
void enter_stream(DeviceStream stream) {
  c10::impl::VirtualGuardImpl impl(kGpu);
  impl.setDevice(gpu(stream.device));
  impl.exchangeStream(unpack(stream));
}

void synchronize_stream(DeviceStream stream) {
  c10::impl::VirtualGuardImpl(kGpu).synchronizeStream(unpack(stream));
}

std::unique_ptr<DeviceEvent> record_event(DeviceStream stream, bool timed) {
  auto event = std::make_unique<DeviceEvent>(timed);
  event->impl->event.record(unpack(stream));
  return event;
}

// Copies a GPU's tensor to another device (-1: the CPU's pinned memory), on `stream`.
Address copy_on_stream(Address tensor, DeviceStream stream, int32_t to) {
  const at::Tensor &source = borrow(tensor);
  c10::OptionalStreamGuard target;
  if (to >= 0)
    target.reset_stream(arrivals_at(to));
  c10::StreamGuard guard(unpack(stream));
  at::Tensor copy;
  if (to < 0) {
    copy = at::empty_like(source, source.options().device(at::kCPU).pinned_memory(true));
    copy.copy_(source, /*non_blocking=*/true);
  } else {
    copy = source.to(gpu(to), /*non_blocking=*/true);
  }
  source.record_stream(unpack(stream)); // prevents reuse of its memory before the copy is done
  return give(std::move(copy));
}

// Copies a CPU tensor to a GPU, on the current stream, from pinned memory: the call does not wait
// for the copy. The memory stays pinned until then.
Address upload(Address tensor, int32_t device) {
  const at::Tensor &source = borrow(tensor);
  at::Tensor pinned = source;
  if (!source.is_pinned()) {
    pinned = at::empty_like(source, source.options().pinned_memory(true)); // keeps the strides
    pinned.copy_(source);
  }
  return give(pinned.to(gpu(device), /*non_blocking=*/true));
}

Address upload_on_stream(Address tensor, DeviceStream stream) {
  c10::StreamGuard guard(unpack(stream));
  return upload(tensor, stream.device);
}

void record_use(Address tensor, DeviceStream stream) {
  borrow(tensor).record_stream(unpack(stream));
}

// In this mode libtorch also fills every new tensor with NaN. That costs an extra kernel and
// changes no result here, so it is turned off.
void use_deterministic_kernels(bool deterministic, bool warn_only) {
  at::globalContext().setDeterministicAlgorithms(deterministic, warn_only);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

// Keeps what the process has chosen, with a warning or without.
void require_deterministic_kernels() {
  const bool warn_only = at::globalContext().deterministicAlgorithms() &&
                         at::globalContext().deterministicAlgorithmsWarnOnly();
  use_deterministic_kernels(true, warn_only);
}

MemoryStats gpu_stats(int32_t device) {
  auto stats = c10::getDeviceAllocator(kGpu)->getDeviceStats(static_cast<c10::DeviceIndex>(device));
  // Over all pools, and as asked for: the allocator rounds each tensor up.
  const auto &bytes = stats.requested_bytes[0];
  const auto &reserved = stats.reserved_bytes[0];
  return MemoryStats{static_cast<uint64_t>(bytes.current), static_cast<uint64_t>(bytes.peak),
                     static_cast<uint64_t>(reserved.current - bytes.current)};
}

void reset_gpu_peak(int32_t device) {
  c10::getDeviceAllocator(kGpu)->resetPeakStats(static_cast<c10::DeviceIndex>(device));
}

} // namespace gpipe
