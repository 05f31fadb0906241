// A CPU allocator that counts, caps and reuses, per arena (one arena per stage).
//
// Why not libtorch's own: it neither counts nor refuses, and it returns large blocks to the system,
// so that every step pays again for the page faults of its activations (4-15% of a step).
//
// Each block carries a 64-byte header with its size and arena. A block is charged to the arena that
// the allocating thread had entered and goes back to it, whichever thread frees it: a boundary
// activation that is freed by the next stage returns to the stage that will want its like again.
// Freed blocks are kept by exact size; live + kept never exceeds the most that the arena ever had live,
// so reuse does not make the process larger than it already was.
#include "gpipe-bridge/src/ffi.rs.h"
#include "bridge.h"
#include <array>
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
#include <unordered_map>
#include <vector>

namespace gpipe {

namespace {

constexpr std::size_t kArenas = 4096;
constexpr std::size_t kHeader = 64;      // keeps the payload aligned as ATen wants it
constexpr std::size_t kKeepMin = 32768;  // smaller blocks never leave glibc's own lists
constexpr uint64_t kNoCap = ~uint64_t{0};

struct Header {
  uint64_t size; // of the payload, as asked for
  uint32_t arena;
};
static_assert(sizeof(Header) <= kHeader);

struct Arena {
  std::mutex mutex;
  uint64_t live = 0, kept = 0, cap = kNoCap;
  uint64_t peak = 0; // since the last reset: what is reported
  uint64_t high = 0; // since the last trim: what bounds the kept blocks
  std::unordered_map<uint64_t, std::vector<void *>> free_blocks;
};

// Never destroyed: tensors in statics may be freed after any destructor of ours would run.
std::array<Arena, kArenas> &arenas() {
  static auto *all = new std::array<Arena, kArenas>();
  return *all;
}

thread_local uint32_t current_arena = 0;
thread_local Refusal last_refusal{};

// Drops kept blocks, until `bytes` are gone. The caller holds the lock.
void drop_kept(Arena &arena, uint64_t bytes) {
  uint64_t dropped = 0;
  for (auto list = arena.free_blocks.begin();
       dropped < bytes && list != arena.free_blocks.end();) {
    while (dropped < bytes && !list->second.empty()) {
      std::free(list->second.back());
      list->second.pop_back();
      dropped += list->first;
      arena.kept -= list->first;
    }
    list = list->second.empty() ? arena.free_blocks.erase(list) : std::next(list);
  }
}

void *take(std::size_t size) {
  Arena &arena = arenas()[current_arena];
  void *block = nullptr;
  uint64_t peak_before, high_before;
  {
    std::lock_guard<std::mutex> lock(arena.mutex);
    peak_before = arena.peak;
    high_before = arena.high;
    if (size > arena.cap || arena.live > arena.cap - size) {
      last_refusal = Refusal{true, size, arena.live, arena.cap};
      C10_THROW_ERROR(OutOfMemoryError, c10::str("out of memory: ", size, " bytes asked, ", arena.live,
                                                 " live, cap ", arena.cap));
    }
    auto list = arena.free_blocks.find(size);
    if (list != arena.free_blocks.end() && !list->second.empty()) {
      block = list->second.back();
      list->second.pop_back();
      arena.kept -= size;
    }
    arena.live += size;
    arena.peak = std::max(arena.peak, arena.live);
    arena.high = std::max(arena.high, arena.live);
    if (arena.live + arena.kept > arena.high) // kept blocks of other sizes make room
      drop_kept(arena, arena.live + arena.kept - arena.high);
  }
  if (block == nullptr && posix_memalign(&block, kHeader, kHeader + size) != 0) {
    std::lock_guard<std::mutex> lock(arena.mutex);
    arena.live -= size; // what was never held must not raise what may be kept
    arena.peak = std::max(peak_before, arena.live);
    arena.high = std::max(high_before, arena.live);
    last_refusal = Refusal{true, size, arena.live, kNoCap};
    C10_THROW_ERROR(OutOfMemoryError, c10::str("out of memory: the system has no ", size, " bytes"));
  }
  *static_cast<Header *>(block) = Header{size, current_arena};
  return static_cast<char *>(block) + kHeader;
}

void put_back(void *payload) {
  if (payload == nullptr)
    return;
  void *block = static_cast<char *>(payload) - kHeader;
  const Header header = *static_cast<Header *>(block);
  Arena &arena = arenas()[header.arena];
  {
    std::lock_guard<std::mutex> lock(arena.mutex);
    arena.live -= header.size;
    if (header.size >= kKeepMin && arena.live + arena.kept + header.size <= arena.high) {
      arena.free_blocks[header.size].push_back(block);
      arena.kept += header.size;
      return;
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

// Installed before main, because exchanging allocators under a running kernel is not safe.
[[maybe_unused]] static const bool installed = [] {
  c10::SetCPUAllocator(new CountingAllocator(), /*priority=*/100);
  return true;
}();

void enter_arena(uint32_t arena) {
  at_index(arena);
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

// Whoever owned the arena is gone: nothing is kept any more, also of what is freed later.
void close_arena(uint32_t index) {
  Arena &arena = at_index(index);
  std::lock_guard<std::mutex> lock(arena.mutex);
  drop_kept(arena, arena.kept);
  arena.high = 0;
  arena.cap = kNoCap;
}

bool keep_freed_memory() {
#if defined(__GLIBC__)
  // No block comes from mmap, whose pages would be new each time, and the heap is never trimmed.
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
