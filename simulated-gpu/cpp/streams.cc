// Devices, streams and events, as libtorch's device-generic code asks for them.
#include "streams.h"
#include "memory.h"
#include "pinned.h"
#include "settings.h"
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <chrono>

namespace simulated {

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

thread_local int device = 0;
thread_local std::vector<StreamNumber> streams; // by device

// The default stream of each device, whose number is the device's.
const bool has_default_streams = [] {
  for (int at = 0; at < settings().devices; at++)
    make_stream(at);
  return true;
}();

void check_device(int number) {
  TORCH_CHECK(number >= 0 && number < settings().devices,
              "CUDA error: invalid device ordinal (simulated): cuda:", number, " of ",
              settings().devices, " devices");
}

int index_of_device(Device own) { return own.has_index() ? own.index() : device; }

Stream stream_of(StreamNumber number) {
  const auto index = static_cast<DeviceIndex>(device_of(number));
  return Stream(Stream::UNSAFE, Device(c10::DeviceType::CUDA, index), index_of(number));
}

struct Event {
  Clock clock;
  std::chrono::steady_clock::time_point time; // kernels run when they are launched
};

// As many as CUDA's pool has. It hands them out by turns.
constexpr int64_t kPool = 32;

Stream pooled_stream(Device own) {
  static auto *handed_out = new std::vector<int64_t>(settings().devices);
  const int index = index_of_device(own);
  check_device(index);
  Lock lock(mutex());
  const int64_t turn = (*handed_out)[index]++ % kPool;
  while (streams_of(index) <= turn + 1)
    make_stream(index);
  return stream_of(stream_at(index, turn + 1)); // after the default stream
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device exchangeDevice(Device own) const override {
    const Device before = getDevice();
    if (own.has_index())
      setDevice(own);
    return before;
  }
  Device getDevice() const override {
    return Device(c10::DeviceType::CUDA, static_cast<DeviceIndex>(device));
  }
  void setDevice(Device own) const override {
    check_device(own.index());
    device = own.index();
  }
  void uncheckedSetDevice(Device own) const noexcept override {
    if (own.index() >= 0 && own.index() < settings().devices)
      device = own.index();
  }
  DeviceIndex deviceCount() const noexcept override {
    return static_cast<DeviceIndex>(settings().devices);
  }

  Stream getStream(Device own) const override {
    Lock lock(mutex());
    return stream_of(current_stream(index_of_device(own)));
  }
  Stream getDefaultStream(Device own) const override {
    const auto index = static_cast<DeviceIndex>(index_of_device(own));
    return Stream(Stream::UNSAFE, Device(c10::DeviceType::CUDA, index), 0);
  }
  Stream getStreamFromGlobalPool(Device own, bool) const override { return pooled_stream(own); }
  Stream getNewStream(Device own, int) const override { return pooled_stream(own); }
  Stream exchangeStream(Stream own) const override {
    Lock lock(mutex());
    const StreamNumber before = current_stream(own.device_index());
    streams[own.device_index()] = number_of(own);
    return stream_of(before);
  }
  bool queryStream(const Stream &own) const override { return learn(clock_of(own)); }
  void synchronizeStream(const Stream &own) const override {
    if (!settings().ignores(Wait::StreamSynchronize))
      host_waits(clock_of(own));
  }
  void synchronizeDevice(DeviceIndex own) const override {
    Clock all;
    {
      Lock lock(mutex());
      for (int64_t at = 0; at < streams_of(own); at++)
        all.join(recorded(stream_at(own, at)));
    }
    host_waits(all);
  }

  void record(void **event, const Stream &own, DeviceIndex, c10::EventFlag) const override {
    Lock lock(mutex());
    if (*event == nullptr)
      *event = new Event;
    *static_cast<Event *>(*event) = {recorded(number_of(own)), std::chrono::steady_clock::now()};
  }
  void block(void *event, const Stream &own) const override {
    Lock lock(mutex());
    if (event == nullptr || settings().ignores(Wait::EventBlock))
      return;
    counts().stream_waits++;
    wait(number_of(own), static_cast<Event *>(event)->clock);
  }
  bool queryEvent(void *event) const override {
    return event == nullptr || learn(static_cast<Event *>(event)->clock);
  }
  void synchronizeEvent(void *event) const override {
    if (event != nullptr && !settings().ignores(Wait::EventSynchronize))
      host_waits(static_cast<Event *>(event)->clock);
  }
  double elapsedTime(void *from, void *to, DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr, "both events must be recorded");
    const auto time = static_cast<Event *>(to)->time - static_cast<Event *>(from)->time;
    return std::chrono::duration<double, std::milli>(time).count();
  }
  void destroyEvent(void *event, DeviceIndex) const noexcept override {
    delete static_cast<Event *>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr &data, const Stream &own) const override {
    device_allocator()->recordStream(data, own);
  }

private:
  static Clock clock_of(const Stream &own) {
    Lock lock(mutex());
    return recorded(number_of(own));
  }
  // Whether it is done.
  static bool learn(const Clock &clock) {
    Lock lock(mutex());
    if (!ends(clock))
      return false;
    host_learns(clock);
    return true;
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

} // namespace

int current_device() { return device; }

void set_current_device(int own) {
  check_device(own);
  device = own;
}

StreamNumber current_stream(int own) {
  check_device(own);
  for (auto at = streams.size(); at < static_cast<std::size_t>(settings().devices); at++)
    streams.push_back(static_cast<StreamNumber>(at));
  return streams[own];
}

StreamNumber number_of(const Stream &stream) {
  return stream_at(stream.device_index(), stream.id());
}

} // namespace simulated
