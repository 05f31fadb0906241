#include "pinned.h"
#include <c10/util/Exception.h>
#include <map>
#include <sys/mman.h>

namespace simulated {

namespace {

struct Block {
  std::size_t bytes = 0;
  bool is_guarded = false;
  Access copy; // the last one in the background
};

// By address.
std::map<uintptr_t, Block> &blocks() {
  static auto *all = new std::map<uintptr_t, Block>;
  return *all;
}

std::map<uintptr_t, Block>::iterator find(const void *address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto next = blocks().upper_bound(at);
  if (next == blocks().begin())
    return blocks().end();
  --next;
  return at < next->first + next->second.bytes ? next : blocks().end();
}

void allow(uintptr_t address, Block &block, int access) {
  mprotect(reinterpret_cast<void *>(address), block.bytes, access);
  block.is_guarded = access != (PROT_READ | PROT_WRITE);
}

void put_back(void *address) {
  Lock lock(mutex());
  const auto found = blocks().find(reinterpret_cast<uintptr_t>(address));
  if (found == blocks().end())
    return;
  munmap(address, found->second.bytes);
  blocks().erase(found);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0)
      return {nullptr, nullptr, &put_back, cpu};
    const std::size_t pages = (bytes + 4095) / 4096 * 4096;
    void *address =
        mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(address != MAP_FAILED, "the host has no ", bytes, " bytes of pinned memory");
    Lock lock(mutex());
    blocks()[reinterpret_cast<uintptr_t>(address)].bytes = pages;
    return {address, address, &put_back, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &put_back; }
  void copy_data(void *to, const void *from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

} // namespace

c10::Allocator *pinned_allocator() {
  static auto *own = new Allocator;
  return own;
}

bool is_pinned(const void *address) {
  Lock lock(mutex());
  return find(address) != blocks().end();
}

PinnedCopy::PinnedCopy(const void *host, StreamNumber stream, Direction direction)
    : address(nullptr), stream(stream), direction(direction) {
  const auto found = find(host);
  if (found == blocks().end())
    return;
  auto &[at, block] = *found;
  if (block.is_guarded && block.copy.kernel > recorded(stream).of(block.copy.stream))
    report("a copy of pinned memory on cuda:" + std::to_string(device_of(stream)) +
           " does not wait for " + block.copy.operation + " on cuda:" +
           std::to_string(device_of(block.copy.stream)));
  allow(at, block, PROT_READ | PROT_WRITE);
  address = reinterpret_cast<void *>(at);
}

void PinnedCopy::done(bool in_background) {
  const auto found = address == nullptr ? blocks().end() : find(address);
  if (found == blocks().end() || !in_background)
    return;
  const bool to_host = direction == Direction::ToHost;
  auto &[at, block] = *found;
  block.copy = {stream, recorded(stream).of(stream),
                to_host ? "the copy to it" : "the copy from it"};
  allow(at, block, to_host ? PROT_NONE : PROT_READ);
}

void release_pinned() {
  for (auto &[at, block] : blocks())
    if (block.is_guarded && host_knows(block.copy.stream, block.copy.kernel))
      allow(at, block, PROT_READ | PROT_WRITE);
}

const char *pinned_fault(const void *address) {
  const auto found = find(address);
  if (found == blocks().end())
    return nullptr;
  return found->second.copy.operation.c_str();
}

} // namespace simulated
