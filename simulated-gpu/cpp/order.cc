#include "order.h"
#include "pinned.h"
#include "settings.h"
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <unistd.h>

namespace simulated {

namespace {

struct Stream {
  int device = 0;
  int64_t index = 0;
  uint64_t kernels = 0;
  uint64_t hangs_at = 0; // its first kernel that never ends; 0: none
  Clock before;          // what its next kernel comes after
};

std::vector<Stream> &streams() {
  static auto *all = new std::vector<Stream>;
  return *all;
}

// The streams of each device, by their number on it.
std::vector<StreamNumber> &streams_on(int device) {
  static auto *all = new std::vector<std::vector<StreamNumber>>;
  if (all->size() <= static_cast<std::size_t>(device))
    all->resize(device + 1);
  return (*all)[device];
}

// What the host waited for. One clock for all threads: how they wait for each other is not seen.
Clock &host() {
  static auto *clock = new Clock;
  return *clock;
}

// How many kernels the device that will hang was given.
uint64_t &kernels_of_hanging() {
  static uint64_t count = 0;
  return count;
}

std::string name(StreamNumber number) {
  const Stream &stream = streams()[number];
  return "cuda:" + std::to_string(stream.device) + " stream " + std::to_string(stream.index);
}

std::string described(const Uses &uses) {
  return std::to_string(uses.bytes) + " bytes, allocated by " + uses.allocated_by + " on " +
         name(uses.owner);
}

void check(const Access &earlier, StreamNumber stream, const std::string &operation,
           const char *what, const Uses &uses) {
  if (earlier.kernel <= streams()[stream].before.of(earlier.stream))
    return;
  report(operation + " on " + name(stream) + " " + what + " " + earlier.operation + " on " +
         name(earlier.stream) + " without waiting for it (" + described(uses) + ")");
}

} // namespace

std::recursive_mutex &mutex() {
  static auto *own = new std::recursive_mutex;
  return *own;
}

Counts &counts() {
  static auto *own = new Counts;
  return *own;
}

uint64_t Clock::of(StreamNumber stream) const {
  return stream < known.size() ? known[stream] : 0;
}

void Clock::set(StreamNumber stream, uint64_t kernels) {
  if (known.size() <= stream)
    known.resize(stream + 1);
  known[stream] = kernels;
}

void Clock::join(const Clock &other) {
  if (known.size() < other.known.size())
    known.resize(other.known.size());
  for (std::size_t at = 0; at < other.known.size(); at++)
    known[at] = std::max(known[at], other.known[at]);
}

StreamNumber make_stream(int device) {
  const auto number = static_cast<StreamNumber>(streams().size());
  Stream stream;
  stream.device = device;
  stream.index = streams_of(device);
  streams().push_back(std::move(stream));
  streams_on(device).push_back(number);
  return number;
}

int64_t streams_of(int device) { return static_cast<int64_t>(streams_on(device).size()); }

int device_of(StreamNumber stream) { return streams()[stream].device; }
int64_t index_of(StreamNumber stream) { return streams()[stream].index; }

StreamNumber stream_at(int device, int64_t index) {
  if (index < 0 || index >= streams_of(device))
    report("there is no stream " + std::to_string(index) + " of cuda:" + std::to_string(device));
  return streams_on(device)[index];
}

void launch(StreamNumber number, const std::string &operation, const std::vector<Uses *> &reads,
            const std::vector<Uses *> &writes) {
  Stream &stream = streams()[number];
  counts().launches++;
  stream.kernels++;
  if (stream.device == settings().hanging && ++kernels_of_hanging() >= settings().hangs_at &&
      stream.hangs_at == 0)
    stream.hangs_at = stream.kernels;
  stream.before.join(host());
  stream.before.set(number, stream.kernels);
  for (Uses *uses : reads) {
    check(uses->write, number, operation, "reads the result of", *uses);
    const auto same = [&](const Access &own) { return own.stream == number; };
    const auto known = std::find_if(uses->reads.begin(), uses->reads.end(), same);
    const Access access{number, stream.kernels, operation};
    if (known != uses->reads.end())
      *known = access;
    else
      uses->reads.push_back(access);
  }
  for (Uses *uses : writes) {
    check(uses->write, number, operation, "overwrites the result of", *uses);
    for (const Access &read : uses->reads)
      check(read, number, operation, "overwrites an operand of", *uses);
    uses->write = {number, stream.kernels, operation};
    uses->reads.clear();
  }
}

void made(StreamNumber stream, const std::string &operation, Uses &uses) {
  uses.write = {stream, streams()[stream].kernels, operation};
}

Clock recorded(StreamNumber number) {
  Stream &stream = streams()[number];
  stream.before.join(host());
  return stream.before;
}

void wait(StreamNumber stream, const Clock &clock) { streams()[stream].before.join(clock); }

bool ends(const Clock &clock) {
  for (StreamNumber number = 0; number < streams().size(); number++)
    if (const uint64_t hangs_at = streams()[number].hangs_at)
      if (clock.of(number) >= hangs_at)
        return false;
  return true;
}

void host_waits(const Clock &clock) {
  for (bool waits = true; waits;) {
    {
      Lock lock(mutex());
      waits = !ends(clock);
      if (!waits) {
        counts().host_waits++;
        host_learns(clock);
      }
    }
    if (waits)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

void host_learns(const Clock &clock) {
  host().join(clock);
  release_pinned();
}

bool host_knows(StreamNumber stream, uint64_t kernel) { return kernel <= host().of(stream); }

void check_free(const Uses &uses) {
  // As CUDA's allocator does: the memory waits for what is on the recorded streams at this time.
  Clock known = recorded(uses.owner);
  for (StreamNumber stream : uses.recorded)
    known.join(recorded(stream));
  const auto check = [&](const Access &access) {
    if (access.kernel <= known.of(access.stream))
      return;
    report("memory of " + name(uses.owner) + " is freed while " + access.operation + " on " +
           name(access.stream) + " may still run, and was not recorded on that stream (" +
           described(uses) + ")");
  };
  check(uses.write);
  for (const Access &read : uses.reads)
    check(read);
}

void report(const std::string &what) {
  const std::string text = "simulated GPU: " + what + "\n";
  (void)!write(STDERR_FILENO, text.data(), text.size());
  std::abort();
}

} // namespace simulated
