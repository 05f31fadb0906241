// Why not at the dispatcher: a replayed value must still be the output of a node in autograd's
// graph, with the same backward as a computed one. So products and convolutions are our own
// functions (linear.cc, convolution.cc), which call `remembered` below autograd.
#include "op_cache.h"
#include "gpipe-bridge/src/ffi.rs.h"
#include <torch/csrc/autograd/variable.h>
#include <vector>

namespace gpipe {

namespace impl = torch::autograd::impl;

struct OpCache::Impl {
  struct Value {
    at::Tensor tensor;
    // The tensor's version when it was recorded. A value changed in place since then is computed
    // again. If that is known when the recording ends, `tensor` is undefined, so that it holds no
    // memory.
    uint32_t version;

    bool is_changed() const { return !tensor.defined() || tensor._version() != version; }
  };
  std::vector<Value> values;
  std::size_t next = 0;
};

namespace {

thread_local std::unique_ptr<OpCache> recorded, replayed;
thread_local bool unread = false;

} // namespace

OpCache::OpCache() : impl(std::make_unique<Impl>()) {}
OpCache::~OpCache() = default;

uint64_t OpCache::bytes() const {
  uint64_t all = 0;
  for (const Impl::Value &value : impl->values)
    all += value.tensor.defined() ? value.tensor.nbytes() : 0;
  return all;
}

at::Tensor remembered(at::IntArrayRef sizes, const std::function<at::Tensor()> &compute) {
  if (replayed) {
    OpCache::Impl &cache = *replayed->impl;
    TORCH_CHECK(
        cache.next < cache.values.size(),
        "a forward that is computed again has more products than the first time (",
        cache.values.size(),
        "): it must not depend on anything but its inputs, its parameters and its random numbers");
    OpCache::Impl::Value &value = cache.values[cache.next++];
    const bool changed = value.is_changed();
    const at::Tensor found = std::move(value.tensor);
    if (changed)
      return compute();
    TORCH_CHECK(found.sizes() == sizes, "a forward that is computed again has a product ", sizes,
                " where it had ", found.sizes(),
                " the first time: it must not depend on anything but its inputs, its parameters "
                "and its random numbers");
    return found;
  }
  at::Tensor made = compute();
  if (recorded) {
    // Shares the memory and the version counter, without the graph.
    at::Tensor kept = made.detach();
    impl::set_version_counter(kept, impl::version_counter(made));
    recorded->impl->values.push_back({kept, static_cast<uint32_t>(kept._version())});
  }
  return made;
}

void begin_recording() {
  TORCH_CHECK(!recorded && !replayed, "this thread records or replays already");
  recorded = std::make_unique<OpCache>();
}

std::unique_ptr<OpCache> end_recording() {
  TORCH_CHECK(recorded, "this thread does not record");
  for (OpCache::Impl::Value &value : recorded->impl->values)
    if (value.is_changed())
      value.tensor = at::Tensor();
  return std::move(recorded);
}

void begin_replay(std::unique_ptr<OpCache> cache) {
  TORCH_CHECK(cache && !recorded && !replayed, "this thread records or replays already");
  replayed = std::move(cache);
}

void end_replay() {
  TORCH_CHECK(replayed, "this thread does not replay");
  const auto cache = std::move(replayed);
  TORCH_CHECK(cache->impl->next == cache->impl->values.size(),
              "a forward that is computed again has ", cache->impl->next, " products where it had ",
              cache->impl->values.size(), " the first time");
}

bool is_unread() { return unread; }

void set_unread(bool is_unread) noexcept { unread = is_unread; }

void forget_op_caches() noexcept {
  recorded.reset();
  replayed.reset();
}

} // namespace gpipe
