// A CPU allocator with accounting, caps and reuse, per arena (one per device of a pipeline).
//
// Why not libtorch's own allocator: it neither counts nor caps. It also returns large blocks to the
// system, so every step pays again for the page faults of its activations (4-15% of a step).
//
// Each block has a 64-byte header with its size and arena. A block is charged to the arena that the
// allocating thread had entered, and returns to it whichever thread frees it. A boundary activation
// freed by the next stage thus returns to the stage that will need such a block again. Freed blocks
// are kept by exact size. live + kept never exceeds the arena's highest live, so reuse does not
// make the process larger than it already was.
#include "gpipe-bridge/src/ffi.rs.h"
#include "bridge.h"
#include <algorithm>
#include <array>
#include <atomic>
#include <climits>
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/alignment.h>
#include <c10/util/Exception.h>
#include <cstdlib>
#include <cstring>
#if defined(__GLIBC__)
#include <malloc.h>
#endif
#include <mutex>
#include <pthread.h>
#include <unordered_map>

namespace gpipe {

namespace {

constexpr std::size_t kArenas = 4096;
constexpr std::size_t kHeader = 64;      // keeps the payload aligned as ATen expects
constexpr std::size_t kKeepMin = 32768;  // smaller blocks stay in glibc's own lists anyway
constexpr uint64_t kNoCap = ~uint64_t{0};

struct Header {
  uint64_t size; // requested size of the payload
  uint32_t arena;
  Header *next; // next kept block of this size
};
static_assert(sizeof(Header) <= kHeader);

// The blocks of one size. Freeing must not fail, so it allocates nothing: the list links the blocks
// themselves, and the map entry is created when a block is taken.
struct Blocks {
  Header *kept = nullptr;
  uint64_t live = 0;
};

struct Arena {
  std::mutex mutex;
  uint64_t live = 0, kept = 0, cap = kNoCap;
  uint64_t pending = 0; // requested from the system but not yet received: counts against the cap
  uint64_t peak = 0;    // highest live since the last reset, as reported
  uint64_t high = 0;    // highest live since the last trim: bounds the kept blocks
  std::unordered_map<uint64_t, Blocks> blocks; // only sizes from kKeepMin up
};

// Never destroyed, because tensors in statics may be freed after our destructors would have run.
std::array<Arena, kArenas> &arenas() {
  static auto *all = new std::array<Arena, kArenas>();
  return *all;
}

thread_local uint32_t current_arena = 0;
thread_local Refusal last_refusal{};

// The smallest kept block of `bytes` or more, otherwise the largest of all, otherwise the end.
auto fitting(Arena &arena, uint64_t bytes) noexcept {
  const auto end = arena.blocks.end();
  auto enough = end, largest = end;
  for (auto own = arena.blocks.begin(); own != end; ++own) {
    if (own->second.kept == nullptr)
      continue;
    if (own->first >= bytes && (enough == end || own->first < enough->first))
      enough = own;
    if (largest == end || own->first > largest->first)
      largest = own;
  }
  return enough != end ? enough : largest;
}

// Frees kept blocks until `bytes` are freed, and little more: what is freed will be asked for again
// in the next step. The caller holds the lock.
void drop_kept(Arena &arena, uint64_t bytes) noexcept {
  while (bytes > 0) {
    const auto own = fitting(arena, bytes);
    if (own == arena.blocks.end())
      return;
    const uint64_t size = own->first;
    Blocks &blocks = own->second;
    Header *block = blocks.kept;
    blocks.kept = block->next;
    std::free(block);
    arena.kept -= size;
    bytes -= std::min(bytes, size);
    if (blocks.kept == nullptr && blocks.live == 0)
      arena.blocks.erase(own);
  }
}

// Frees kept blocks so that live + kept does not exceed the highest live.
void make_room(Arena &arena) noexcept {
  const uint64_t held = arena.live + arena.pending, most = std::max(arena.high, held);
  if (held + arena.kept > most)
    drop_kept(arena, held + arena.kept - most);
}

// Counts a block of `size` as live.
void hold(Arena &arena, std::size_t size) {
  if (size >= kKeepMin)
    arena.blocks[size].live++;
  arena.live += size;
  arena.peak = std::max(arena.peak, arena.live);
  arena.high = std::max(arena.high, arena.live);
}

// Takes a kept block of `size`, or returns null.
Header *take_kept(Arena &arena, std::size_t size) noexcept {
  const auto found = arena.blocks.find(size);
  if (found == arena.blocks.end() || found->second.kept == nullptr)
    return nullptr;
  Header *block = found->second.kept;
  found->second.kept = block->next;
  arena.kept -= size;
  return block;
}

void *take(std::size_t size) {
  Arena &arena = arenas()[current_arena];
  void *block = nullptr;
  {
    std::lock_guard<std::mutex> lock(arena.mutex);
    const uint64_t held = arena.live + arena.pending;
    if (size > arena.cap || held > arena.cap - size) {
      last_refusal = Refusal{true, size, arena.live, arena.cap};
      C10_THROW_ERROR(OutOfMemoryError, c10::str("out of memory: ", size, " bytes asked, ",
                                                 arena.live, " live, cap ", arena.cap));
    }
    block = take_kept(arena, size);
    if (block != nullptr)
      hold(arena, size);
    else
      arena.pending += size;
    make_room(arena);
  }
  if (block == nullptr) {
    const bool refused = posix_memalign(&block, kHeader, kHeader + size) != 0;
    std::lock_guard<std::mutex> lock(arena.mutex);
    arena.pending -= size; // a refused block raises neither peak nor high
    if (refused) {
      last_refusal = Refusal{true, size, arena.live, kNoCap};
      C10_THROW_ERROR(OutOfMemoryError,
                      c10::str("out of memory: the system has no ", size, " bytes"));
    }
    hold(arena, size);
  }
  *static_cast<Header *>(block) = Header{size, current_arena, nullptr};
  return static_cast<char *>(block) + kHeader;
}

// Must not fail: libtorch calls it from destructors, where an exception would end the process.
void put_back(void *payload) noexcept {
  if (payload == nullptr)
    return;
  Header *block = reinterpret_cast<Header *>(static_cast<char *>(payload) - kHeader);
  Arena &arena = arenas()[block->arena];
  {
    std::lock_guard<std::mutex> lock(arena.mutex);
    const uint64_t size = block->size;
    arena.live -= size;
    if (const auto own = arena.blocks.find(size); own != arena.blocks.end()) {
      Blocks &blocks = own->second;
      blocks.live--;
      if (arena.live + arena.pending + arena.kept + size <= arena.high) {
        block->next = blocks.kept;
        blocks.kept = block;
        arena.kept += size;
        return;
      }
      if (blocks.live == 0 && blocks.kept == nullptr)
        arena.blocks.erase(own);
    }
  }
  std::free(block);
}

struct CountingAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t size) override {
    void *payload = size == 0 ? nullptr : take(size);
    return {payload, payload, &put_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &put_back; }
  void copy_data(void *destination, const void *source, std::size_t count) const override {
    std::memcpy(destination, source, count);
  }
};

Arena &at_index(uint32_t arena) {
  TORCH_CHECK(arena < kArenas, "arena ", arena, " of ", kArenas);
  return arenas()[arena];
}

} // namespace

#ifdef GPIPE_ALLOCATOR
// Arenas that a thread has entered so far are below this number.
std::atomic<uint32_t> arenas_used{1};

// A process may fork while a thread is in the allocator, as Python's loaders of data do. Without
// this, that arena would stay locked in the child for ever.
// Another thread may enter a new arena between the two, so the first says how many it locked.
uint32_t arenas_locked = 0;

void lock_all() {
  const uint32_t count = arenas_used;
  for (uint32_t index = 0; index < count; ++index)
    arenas()[index].mutex.lock();
  arenas_locked = count;
}

void unlock_all() {
  const uint32_t count = arenas_locked;
  for (uint32_t index = 0; index < count; ++index)
    arenas()[index].mutex.unlock();
}

// Installed when the library is loaded: before main, or while Python imports it. Both are safe. A
// tensor knows which allocator its memory is from, so memory of the allocator before is freed by
// that one. libtorch reads the allocator as one word, which is written once here.
[[maybe_unused]] static const bool installed = [] {
  arenas();
  pthread_atfork(&lock_all, &unlock_all, &unlock_all);
  c10::SetCPUAllocator(new CountingAllocator(), /*priority=*/100);
  return true;
}();
#endif

void enter_arena(uint32_t arena) {
  at_index(arena);
#ifdef GPIPE_ALLOCATOR
  for (uint32_t used = arenas_used; used <= arena;)
    arenas_used.compare_exchange_weak(used, arena + 1);
#endif
  current_arena = arena;
}

MemoryStats arena_stats(uint32_t index) {
  Arena &arena = at_index(index);
  std::lock_guard<std::mutex> lock(arena.mutex);
  return MemoryStats{arena.live, arena.peak, arena.kept};
}

void reset_arena_peak(uint32_t index) {
  Arena &arena = at_index(index);
  std::lock_guard<std::mutex> lock(arena.mutex);
  arena.peak = arena.live;
}

void set_arena_cap(uint32_t index, uint64_t bytes) {
  Arena &arena = at_index(index);
  std::lock_guard<std::mutex> lock(arena.mutex);
  arena.cap = bytes;
}

void trim_arena(uint32_t index) {
  Arena &arena = at_index(index);
  std::lock_guard<std::mutex> lock(arena.mutex);
  drop_kept(arena, arena.kept);
  arena.high = arena.live;
}

// The arena's owner is gone: frees all kept blocks. Blocks freed later are not kept either.
void close_arena(uint32_t index) {
  Arena &arena = at_index(index);
  std::lock_guard<std::mutex> lock(arena.mutex);
  drop_kept(arena, arena.kept);
  arena.high = 0;
  arena.cap = kNoCap;
}

bool keep_freed_memory() {
#if defined(__GLIBC__)
  // Disables mmap for blocks, because its pages would be new each time, and never trims the heap.
  return mallopt(M_MMAP_MAX, 0) == 1 && mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
#else
  return false;
#endif
}

Refusal take_refusal() {
  Refusal refusal = last_refusal;
  last_refusal = Refusal{};
  return refusal;
}

} // namespace gpipe
