#include "memory.h"
#include "pinned.h"
#include "settings.h"
#include "streams.h"
#include <algorithm>
#include <c10/util/Exception.h>
#include <csignal>
#include <cstring>
#include <execinfo.h>
#include <map>
#include <sys/mman.h>
#include <unistd.h>

namespace simulated {

namespace {

// As PyTorch's allocator for CUDA rounds.
constexpr std::size_t kRounding = 512;
// Addresses are twice the memory, so that gaps between allocations do not count as used.
constexpr std::size_t kAddresses = 2;

struct Block {
  std::size_t size = 0; // rounded
  int device = 0;
  Uses uses;
};

struct Device {
  std::map<uintptr_t, std::size_t> gaps; // address -> bytes
  int64_t live = 0, peak = 0;            // rounded bytes
  int64_t requested = 0, requested_peak = 0;
  int64_t reserved = 0;
  int64_t allocations = 0, refusals = 0;
};

class Space {
public:
  char *tensors = nullptr; // no access
  char *kernels = nullptr;
  std::size_t bytes = 0;
  std::map<uintptr_t, Block> blocks; // by the tensors' address
  std::vector<Device> devices;

  Space() : devices(settings().devices) {
    bytes = per_device() * devices.size();
    if (bytes == 0)
      return;
    const int file = memfd_create("simulated GPUs", 0);
    if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0)
      report("the host has no " + std::to_string(bytes) +
             " bytes of addresses: set a smaller GPIPE_SIMULATED_GPU_MEMORY");
    kernels = map(file, PROT_READ | PROT_WRITE);
    tensors = map(file, PROT_NONE);
    close(file);
    for (std::size_t at = 0; at < devices.size(); at++)
      devices[at].gaps[first() + at * per_device()] = per_device();
  }

  std::size_t per_device() const { return settings().memory / 4096 * 4096 * kAddresses; }
  uintptr_t first() const { return reinterpret_cast<uintptr_t>(tensors); }

private:
  char *map(int file, int access) {
    void *address = mmap(nullptr, bytes, access, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (address == MAP_FAILED)
      report("cannot map " + std::to_string(bytes) +
             " bytes: set a smaller GPIPE_SIMULATED_GPU_MEMORY");
    return static_cast<char *>(address);
  }
};

Space &space() {
  static auto *own = new Space;
  return *own;
}

thread_local const char *allocated_by = "the program";

[[noreturn]] void refuse(std::size_t bytes, int device) {
  Device &own = space().devices[device];
  own.refusals++;
  const auto total = static_cast<int64_t>(settings().memory);
  C10_THROW_ERROR(OutOfMemoryError,
                  c10::str("CUDA out of memory (simulated). Tried to allocate ", bytes,
                           " bytes. GPU ", device, " has ", total, " bytes, of which ",
                           total - own.live, " are free."));
}

void *take(std::size_t bytes, int device) {
  Lock lock(mutex());
  Device &own = space().devices[device];
  const std::size_t size = (bytes + kRounding - 1) / kRounding * kRounding;
  if (own.live + size > settings().memory)
    refuse(bytes, device);
  auto best = own.gaps.end();
  for (auto gap = own.gaps.begin(); gap != own.gaps.end(); ++gap)
    if (gap->second >= size && (best == own.gaps.end() || gap->second < best->second))
      best = gap;
  if (best == own.gaps.end())
    refuse(bytes, device);
  const auto [address, gap] = *best;
  own.gaps.erase(best);
  if (gap > size)
    own.gaps[address + size] = gap - size;

  Block &block = space().blocks[address];
  block = Block{size, device, Uses{}};
  block.uses.owner = current_stream(device);
  block.uses.bytes = bytes;
  block.uses.allocated_by = allocated_by;
  own.live += static_cast<int64_t>(size);
  own.peak = std::max(own.peak, own.live);
  own.requested += static_cast<int64_t>(bytes);
  own.requested_peak = std::max(own.requested_peak, own.requested);
  own.reserved = std::max(own.reserved, own.live);
  own.allocations++;
  counts().allocations++;
  void *result = reinterpret_cast<void *>(address);
  std::memset(kernel_view(result), 0xFF, bytes); // NaN, so that nobody counts on zeros
  return result;
}

// Adds a gap, joined with those beside it.
void add_gap(Device &device, uintptr_t address, std::size_t size) {
  auto next = device.gaps.lower_bound(address);
  if (next != device.gaps.end() && address + size == next->first) {
    size += next->second;
    next = device.gaps.erase(next);
  }
  if (next != device.gaps.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == address) {
      before->second += size;
      return;
    }
  }
  device.gaps[address] = size;
}

void put_back(void *address) {
  if (address == nullptr)
    return;
  Lock lock(mutex());
  const auto found = space().blocks.find(reinterpret_cast<uintptr_t>(address));
  if (found == space().blocks.end())
    report("memory is freed that is not allocated");
  const auto &[at, block] = *found;
  check_free(block.uses);
  std::memset(kernel_view(address), 0xFF, block.size);
  Device &own = space().devices[block.device];
  own.live -= static_cast<int64_t>(block.size);
  own.requested -= static_cast<int64_t>(block.uses.bytes);
  add_gap(own, at, block.size);
  space().blocks.erase(found);
}

Device &device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < settings().devices, "Invalid device argument ",
              static_cast<int>(index), ": there are ", settings().devices, " simulated GPUs");
  return space().devices[index];
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    return allocate_on(current_device(), bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &put_back; }
  void copy_data(void *to, const void *from, std::size_t bytes) const override {
    std::memmove(kernel_view(to), kernel_view(from), bytes);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    Lock lock(mutex());
    for (Device &own : space().devices)
      own.reserved = own.live;
  }
  void recordStream(const c10::DataPtr &data, c10::Stream stream) override {
    Lock lock(mutex());
    Uses *uses = uses_at(data.get());
    if (uses != nullptr && !settings().ignores(Wait::RecordStream))
      uses->recorded.insert(number_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    Lock lock(mutex());
    const Device &own = device(index);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = own.live;
    stats.allocated_bytes[0].peak = own.peak;
    stats.requested_bytes[0].current = own.requested;
    stats.requested_bytes[0].peak = own.requested_peak;
    stats.reserved_bytes[0].current = own.reserved;
    stats.reserved_bytes[0].peak = own.reserved;
    stats.num_ooms = own.refusals;
    stats.num_device_alloc = own.allocations;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex index) override {
    Lock lock(mutex());
    Device &own = device(index);
    own.peak = own.live;
    own.requested_peak = own.requested;
  }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex index) override {
    Lock lock(mutex());
    return {settings().memory - device(index).live, settings().memory};
  }
};

// Says what was accessed before the process ends. Takes no lock: the faulting thread may hold it.
void on_fault(int signal, siginfo_t *info, void *) {
  const void *address = info->si_addr;
  char text[200];
  const char *copy = pinned_fault(address);
  if (is_device_address(address))
    std::snprintf(text, sizeof text,
                  "simulated GPU: the host accesses memory of cuda:%d as if it were its own\n",
                  device_of(address));
  else if (copy != nullptr)
    std::snprintf(text, sizeof text,
                  "simulated GPU: the host accesses pinned memory without waiting for %s\n", copy);
  else
    std::snprintf(text, sizeof text, "a fault at %p\n", address);
  (void)!write(STDERR_FILENO, text, std::strlen(text));
  void *frames[40];
  backtrace_symbols_fd(frames, backtrace(frames, 40), STDERR_FILENO);
  std::signal(signal, SIG_DFL);
  std::raise(signal);
}

const bool is_ready = [] {
  if (settings().devices == 0)
    return false;
  space();
  c10::SetAllocator(c10::DeviceType::CUDA, device_allocator(), 100);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, nullptr);
  return true;
}();

} // namespace

bool is_device_address(const void *address) {
  const auto *at = static_cast<const char *>(address);
  return at >= space().tensors && at < space().tensors + space().bytes;
}

int device_of(const void *address) {
  const auto offset = static_cast<const char *>(address) - space().tensors;
  return static_cast<int>(offset / space().per_device());
}

void *kernel_view(const void *address) {
  return space().kernels + (static_cast<const char *>(address) - space().tensors);
}

Uses *uses_at(const void *address) {
  auto &blocks = space().blocks;
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto next = blocks.upper_bound(at);
  if (next == blocks.begin())
    return nullptr;
  --next;
  return at < next->first + next->second.size ? &next->second.uses : nullptr;
}

c10::DeviceAllocator *device_allocator() {
  static auto *own = new Allocator;
  return own;
}

c10::DataPtr allocate_on(int device, std::size_t bytes) {
  void *address = bytes == 0 ? nullptr : take(bytes, device);
  const auto index = static_cast<c10::DeviceIndex>(device);
  return {address, address, &put_back, c10::Device(c10::DeviceType::CUDA, index)};
}

AllocatedBy::AllocatedBy(const char *operation) : before(allocated_by) { allocated_by = operation; }
AllocatedBy::~AllocatedBy() { allocated_by = before; }

} // namespace simulated
