// A CPU allocator that counts, caps and reuses, per arena (one arena per stage).
//
// Why not libtorch's own: it neither counts nor refuses, and it returns large blocks to the system,
// so that every step pays again for the page faults of its activations (4-15% of a step).
//
// Each block carries a 64-byte header with its size and arena. A block is charged to the arena that
// the allocating thread had entered and goes back to it, whichever thread frees it: a boundary
// activation that is freed by the next stage returns to the stage that will want its like again.
// Freed blocks are kept by exact size; live + kept never exceeds the most that the arena ever had
// live, so reuse does not make the process larger than it already was.
#include "gpipe-bridge/src/ffi.rs.h"
#include "bridge.h"
#include <algorithm>
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

namespace gpipe {

namespace {

constexpr std::size_t kArenas = 4096;
constexpr std::size_t kHeader = 64;      // keeps the payload aligned as ATen wants it
constexpr std::size_t kKeepMin = 32768;  // smaller blocks never leave glibc's own lists
constexpr uint64_t kNoCap = ~uint64_t{0};

struct Header {
  uint64_t size; // of the payload, as asked for
  uint32_t arena;
  Header *next; // of the kept blocks of this size
};
static_assert(sizeof(Header) <= kHeader);

// The blocks of one size. The list goes through the blocks themselves and its entry is made when a
// block is taken, so that freeing, which must not fail, allocates nothing.
struct Blocks {
  Header *kept = nullptr;
  uint64_t live = 0;
};

struct Arena {
  std::mutex mutex;
  uint64_t live = 0, kept = 0, cap = kNoCap;
  uint64_t pending = 0; // asked of the system, and not there yet: counts against the cap
  uint64_t peak = 0;    // since the last reset: what is reported
  uint64_t high = 0;    // since the last trim: what bounds the kept blocks
  std::unordered_map<uint64_t, Blocks> blocks; // of at least kKeepMin
};

// Never destroyed: tensors in statics may be freed after any destructor of ours would run.
std::array<Arena, kArenas> &arenas() {
  static auto *all = new std::array<Arena, kArenas>();
  return *all;
}

thread_local uint32_t current_arena = 0;
thread_local Refusal last_refusal{};

// Drops kept blocks, until `bytes` are gone. The caller holds the lock.
void drop_kept(Arena &arena, uint64_t bytes) noexcept {
  uint64_t dropped = 0;
  for (auto size = arena.blocks.begin(); dropped < bytes && size != arena.blocks.end();) {
    Blocks &blocks = size->second;
    while (dropped < bytes && blocks.kept != nullptr) {
      Header *block = blocks.kept;
      blocks.kept = block->next;
      std::free(block);
      dropped += size->first;
      arena.kept -= size->first;
    }
    const bool is_unused = blocks.kept == nullptr && blocks.live == 0;
    size = is_unused ? arena.blocks.erase(size) : std::next(size);
  }
}

// The kept blocks make room, so that live and kept together do not exceed the most that was ever
// live.
void make_room(Arena &arena) noexcept {
  const uint64_t held = arena.live + arena.pending, most = std::max(arena.high, held);
  if (held + arena.kept > most)
    drop_kept(arena, held + arena.kept - most);
}

// A block of `size` is held from now on.
void hold(Arena &arena, std::size_t size) {
  if (size >= kKeepMin)
    arena.blocks[size].live++;
  arena.live += size;
  arena.peak = std::max(arena.peak, arena.live);
  arena.high = std::max(arena.high, arena.live);
}

// A kept block of `size`, or null.
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
      C10_THROW_ERROR(OutOfMemoryError, c10::str("out of memory: ", size, " bytes asked, ", arena.live,
                                                 " live, cap ", arena.cap));
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
    arena.pending -= size; // what was never held raises neither peak nor bound
    if (refused) {
      last_refusal = Refusal{true, size, arena.live, kNoCap};
      C10_THROW_ERROR(OutOfMemoryError, c10::str("out of memory: the system has no ", size, " bytes"));
    }
    hold(arena, size);
  }
  *static_cast<Header *>(block) = Header{size, current_arena, nullptr};
  return static_cast<char *>(block) + kHeader;
}

// libtorch calls it from destructors: whatever it did that could fail would end the process.
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
// Installed before main, because exchanging allocators under a running kernel is not safe.
[[maybe_unused]] static const bool installed = [] {
  c10::SetCPUAllocator(new CountingAllocator(), /*priority=*/100);
  return true;
}();
#endif

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
