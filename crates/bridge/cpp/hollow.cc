// The graph of a forward without what autograd saved, and the recomputation that fills it again.
//
// The first run of the forward makes the graph. Its saved tensors are dropped when it ends. The
// second run makes a graph that nobody uses: each tensor that it saves goes to the place of the
// tensor that the first run saved at that point. With the last one, an exception ends it. So it
// ends where no backward reads further, whatever the operations are. PyTorch's checkpoints do the
// same (torch.utils.checkpoint, early_stop).
#include "hollow.h"
#include "gpipe-bridge/src/ffi.rs.h"
#include "saved.h"
#include "vjp.h"
#include <torch/csrc/autograd/function.h>
#include <cstring>
#include <exception>
#include <typeinfo>
#include <unordered_set>

namespace gpipe {

namespace {

using torch::autograd::SavedVariableHooks;

struct Slot;

} // namespace

struct HollowGraph::Impl {
  // One for each saved tensor, in order; expired where the graph has released it. Any thread may
  // release a branch of the graph that leads to no output.
  std::vector<std::weak_ptr<Slot>> places;
  std::size_t filled = 0;
  bool fills = false;
  // Whether the forward saved through hooks of its own, whose memory is not ours to drop.
  bool has_others = false;

  bool is_full() const { return filled == places.size(); }
};

namespace {

using Shared = std::shared_ptr<HollowGraph::Impl>;

thread_local Shared active;

// What a node of the first run reads as its saved tensor.
struct Slot {
  explicit Slot(const at::Tensor &tensor)
      : has_sizes(is_plain(*tensor.unsafeGetTensorImpl()) && !tensor.is_nested() &&
                  !tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()),
        sizes(has_sizes ? tensor.sizes().vec() : std::vector<int64_t>()),
        dtype(tensor.scalar_type()), held(tensor) {}

  void fill(Saved again) {
    const bool fits = again.tensor.scalar_type() == dtype &&
                      (!has_sizes || (again.tensor.layout() == at::kStrided &&
                                      again.tensor.sizes() == sizes));
    TORCH_CHECK(fits, "a forward that is computed again saves ", again.tensor.scalar_type(),
                has_sizes ? again.tensor.sizes() : at::IntArrayRef(), " where it saved ", dtype,
                at::IntArrayRef(sizes),
                " the first time: it must not depend on anything but its inputs, its parameters "
                "and its random numbers");
    held = std::move(again);
  }

  const bool has_sizes; // only a plain strided tensor's are compared
  const std::vector<int64_t> sizes;
  const at::ScalarType dtype;
  Saved held;
};

// Of the first run: a backward within the forward may read what is saved until the run ends.
struct Place : SavedVariableHooks {
  void call_pack_hook(const at::Tensor &tensor) override {
    slot = std::make_shared<Slot>(tensor);
    if (active && !active->fills)
      active->places.push_back(slot);
  }
  at::Tensor call_unpack_hook() override { return slot->held.read(); }

  std::shared_ptr<Slot> slot;
};

// Ends the second run. Not a c10::Error, which would collect the names of all callers.
struct Ended : std::exception {
  const char *what() const noexcept override {
    return "all that the backward reads is computed again";
  }
};

// Of the second run: hands what is saved to its place.
struct Filler : SavedVariableHooks {
  void call_pack_hook(const at::Tensor &tensor) override {
    held = Saved(tensor);
    if (!active || !active->fills)
      return;
    HollowGraph::Impl &graph = *active;
    if (!graph.is_full()) {
      if (const auto place = graph.places[graph.filled].lock())
        place->fill(held);
      graph.filled++;
    }
    if (graph.is_full())
      throw Ended();
  }
  at::Tensor call_unpack_hook() override { return held.read(); }

  Saved held;
};

using torch::autograd::Node;

// Whether all that a node's backward reads is saved by autograd, and complete when it is saved: of
// libtorch's own operations, and of ours. A function of Python's, of another library or of the
// user's may keep tensors of its own, and so may a hook.
bool saves_only(Node &node) {
  const auto has = [type = typeid(node).name()](const char *part) {
    return std::strstr(type, part) != nullptr;
  };
  if (has("AccumulateGrad"))
    return true;
  // RReLU's noise is saved before it is drawn: a recomputation that ends at this save has none.
  if (has("RreluWithNoise"))
    return false;
  const bool is_libtorchs = has("8autograd9generated") || has("CopyBackwards");
  const bool is_ours = has("N5gpipe") && !has("Custom");
  return (is_libtorchs || is_ours) && node.pre_hooks().empty() && node.post_hooks().empty() &&
         node.tensor_pre_hooks().empty();
}

} // namespace

std::unique_ptr<SavedVariableHooks> hollow_hooks() {
  if (!active)
    return nullptr;
  if (active->fills)
    return std::make_unique<Filler>();
  return std::make_unique<Place>();
}

void note_other_hooks() {
  if (active && !active->fills)
    active->has_others = true;
}

bool ends_with(std::size_t count) {
  return active && active->fills && active->filled + count >= active->places.size();
}

HollowGraph::HollowGraph() : impl(std::make_shared<Impl>()) { watch_saving(); }
HollowGraph::~HollowGraph() = default;

std::unique_ptr<HollowGraph> new_hollow_graph() { return std::make_unique<HollowGraph>(); }

void HollowGraph::enter(bool fills) const {
  TORCH_CHECK(!active, "this thread records or fills a graph already");
  impl->fills = fills;
  impl->filled = 0;
  active = impl;
}

void leave_hollow_graph() noexcept { active.reset(); }

bool is_filled() noexcept { return active && active->fills && active->is_full(); }

void HollowGraph::empty() const {
  for (const auto &place : impl->places)
    if (const auto slot = place.lock())
      slot->held = Saved();
}

bool HollowGraph::is_full() const { return impl->is_full(); }

uint64_t HollowGraph::count() const { return impl->places.size(); }

// A leaf that anybody but its owner and the graph refers to keeps its memory.
void HollowGraph::empty_leaf(Address address) const {
  const at::Tensor &leaf = borrow(address);
  c10::TensorImpl *own = leaf.unsafeGetTensorImpl();
  const auto end = torch::autograd::impl::try_get_grad_accumulator(leaf);
  // The owner counts, then the node that receives the leaf's gradient.
  if (!is_plain(*own) || leaf.use_count() > (end ? 2u : 1u))
    return;
  own->set_allow_tensor_metadata_change(true);
  own->set_storage_keep_dtype(nothing_on(leaf.device()));
}

bool HollowGraph::keeps_memory(rust::Slice<const Address> outputs) const {
  if (impl->has_others)
    return true;
  std::unordered_set<Node *> seen;
  std::vector<Node *> next;
  const auto visit = [&](Node *node) {
    if (node && seen.insert(node).second)
      next.push_back(node);
  };
  for (const at::Tensor &output : borrow_all(outputs))
    visit(output.defined() ? output.grad_fn().get() : nullptr);
  while (!next.empty()) {
    Node &node = *next.back();
    next.pop_back();
    if (!saves_only(node))
      return true;
    for (const torch::autograd::Edge &edge : node.next_edges())
      visit(edge.function.get());
  }
  return false;
}

} // namespace gpipe
