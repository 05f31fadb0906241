#include "settings.h"
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace simulated {

namespace {

constexpr int kMostDevices = 16;
constexpr std::size_t kMemory = std::size_t{16} << 30;

// The library is loaded before main, where there is nobody to return an error to.
[[noreturn]] void refuse(const char *name, const char *value, const char *remedy) {
  std::fprintf(stderr, "%s=%s: %s\n", name, value, remedy);
  std::_Exit(2);
}

int devices() {
  const char *name = "GPIPE_SIMULATED_GPUS", *value = std::getenv(name);
  if (value == nullptr)
    return 0;
  char *end = nullptr;
  const long number = std::strtol(value, &end, 10);
  if (end == value || *end != 0 || number < 0 || number > kMostDevices)
    refuse(name, value, "give a number of simulated GPUs from 0 to 16");
  return static_cast<int>(number);
}

std::size_t memory() {
  const char *name = "GPIPE_SIMULATED_GPU_MEMORY", *value = std::getenv(name);
  if (value == nullptr)
    return kMemory;
  char *unit = nullptr;
  const double number = std::strtod(value, &unit);
  const struct {
    const char *name;
    double bytes;
  } units[] = {{"", 1.0}, {"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}};
  for (const auto &own : units) {
    const double bytes = number * own.bytes;
    if (unit != value && std::strcmp(unit, own.name) == 0 && bytes >= 4096 && bytes <= 1e12)
      return static_cast<std::size_t>(bytes);
  }
  refuse(name, value, "give the bytes of each simulated GPU, such as 512MiB or 80GiB");
}

std::string text(const char *name) {
  const char *value = std::getenv(name);
  return value == nullptr ? "" : value;
}

} // namespace

bool Settings::ignores(Wait wait) const {
  switch (wait) {
  case Wait::EventBlock:
    return ignored == "event-block";
  case Wait::EventSynchronize:
    return ignored == "event-synchronize";
  case Wait::StreamSynchronize:
    return ignored == "stream-synchronize";
  case Wait::RecordStream:
    return ignored == "record-stream";
  }
  return false;
}

namespace {

Settings read() {
  Settings all;
  all.devices = devices();
  all.memory = memory();
  all.log = text("GPIPE_SIMULATED_GPU_LOG");
  all.ignored = text("GPIPE_SIMULATED_GPU_IGNORES");
  const char *name = "GPIPE_SIMULATED_GPU_HANGS", *value = std::getenv(name);
  unsigned long long kernel = 0;
  if (value != nullptr && std::sscanf(value, "%d:%llu", &all.hanging, &kernel) != 2)
    refuse(name, value, "give a device and the number of its first kernel that hangs: 1:500");
  all.hangs_at = kernel;
  return all;
}

} // namespace

const Settings &settings() {
  static const Settings *all = new Settings(read());
  return *all;
}

} // namespace simulated
