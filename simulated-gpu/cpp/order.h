// The order of work on streams, by vector clocks (Fidge 1988, Mattern 1989).
//
// Work runs when it is launched, so results are right whatever the program waited for. Whether it
// would be right on a GPU is decided here: each stream has a clock of what is known to come before
// its next kernel, and an access whose predecessor is not in that clock is reported. That does not
// depend on chance or timing.
#pragma once
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace simulated {

// Guards everything in this folder. Recursive, because a kernel allocates.
std::recursive_mutex &mutex();
// Holds a mutex. Every kernel takes it several times, for about a microsecond each, so a thread looks
// again for as long before it sleeps.
class Lock {
public:
  explicit Lock(std::recursive_mutex &mutex) : mutex(mutex) {
    for (int look = 0; look < 100; ++look) {
      if (mutex.try_lock())
        return;
#ifdef __x86_64__
      __builtin_ia32_pause();
#endif
    }
    mutex.lock();
  }
  ~Lock() { mutex.unlock(); }
  Lock(const Lock &) = delete;
  Lock &operator=(const Lock &) = delete;

private:
  std::recursive_mutex &mutex;
};

// A stream, by its number among those of all devices.
using StreamNumber = uint32_t;

// For each stream, how many of its kernels are known to be done.
class Clock {
public:
  uint64_t of(StreamNumber stream) const;
  void set(StreamNumber stream, uint64_t kernels);
  void join(const Clock &other);

private:
  std::vector<uint64_t> known;
};

// One kernel's use of memory.
struct Access {
  StreamNumber stream = 0;
  uint64_t kernel = 0; // its number in the stream, from 1; 0: none
  std::string operation;
};

// The uses of one allocation that later kernels must wait for.
struct Uses {
  StreamNumber owner = 0; // the stream that was current when it was allocated
  std::size_t bytes = 0;
  std::string allocated_by;
  Access write;
  std::vector<Access> reads; // since the write, at most one for each stream
  std::set<StreamNumber> recorded;
};

StreamNumber make_stream(int device);
int device_of(StreamNumber stream);
// Its number among the streams of its device; 0 is the default stream.
int64_t index_of(StreamNumber stream);
StreamNumber stream_at(int device, int64_t index);
int64_t streams_of(int device);

// A kernel enters a stream. Reports uses that it does not wait for.
void launch(StreamNumber stream, const std::string &operation, const std::vector<Uses *> &reads,
            const std::vector<Uses *> &writes);
// The last kernel of the stream also made this memory.
void made(StreamNumber stream, const std::string &operation, Uses &uses);
// What is known to be done when the stream's work so far is.
Clock recorded(StreamNumber stream);
// The stream's next kernel waits for this.
void wait(StreamNumber stream, const Clock &clock);
// Whether all of this will ever be done: no kernel of it hangs.
bool ends(const Clock &clock);
// The host waits for this. The caller must not hold the mutex, because the wait may never end.
void host_waits(const Clock &clock);
// The host found out that this is done, without waiting.
void host_learns(const Clock &clock);
// Whether the host knows that this kernel is done.
bool host_knows(StreamNumber stream, uint64_t kernel);
// Reports uses by other streams that may still run when the memory is freed.
void check_free(const Uses &uses);

// Tells what is wrong, with both sides, and ends the process.
[[noreturn]] void report(const std::string &what);

// What the program asked of the devices since the process started.
struct Counts {
  uint64_t launches = 0;      // kernels, copies included
  uint64_t host_waits = 0;    // the host waits for a stream or an event
  uint64_t stream_waits = 0;  // a stream waits for an event
  uint64_t copies_in = 0;     // from the host
  uint64_t copies_out = 0;    // to the host
  uint64_t copies_across = 0; // to another device
  uint64_t allocations = 0;
};
Counts &counts();

} // namespace simulated
