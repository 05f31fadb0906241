// The graph of a forward without what autograd saved, and the recomputation that fills it again.
//
// The first run of the forward makes the graph. Its saved tensors are dropped when it ends. The
// second run makes a graph that nobody uses: each tensor that it saves goes to the place of the
// tensor that the first run saved at that point. With the last one, an exception ends it. So it
// ends where no backward reads further, whatever the operations are. PyTorch's checkpoints do the
// same (torch.utils.checkpoint, early_stop).
#include "hollow.h"
#include "gpipe-bridge/src/ffi.rs.h"
#include <torch/csrc/autograd/variable.h>
#include <exception>

namespace gpipe {

namespace {

using torch::autograd::SavedVariableHooks;

struct Place;

} // namespace

struct HollowGraph::Impl {
  // One for each saved tensor, in order; null where the graph has released it.
  std::vector<Place *> places;
  std::size_t filled = 0;
  bool fills = false;

  bool is_full() const { return filled == places.size(); }
};

namespace {

using Shared = std::shared_ptr<HollowGraph::Impl>;

thread_local Shared active;

// A tensor without history: its own would keep its node, which keeps this, alive.
struct Held {
  at::Tensor tensor;
  c10::VariableVersion version;
  uint32_t saved_at = 0;

  Held() = default;
  explicit Held(const at::Tensor &from)
      : tensor(from.unsafeGetTensorImpl()->shallow_copy_and_detach(
            c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true)),
        version(torch::autograd::impl::version_counter(from)), saved_at(version.current_version()) {
  }

  at::Tensor read() const {
    TORCH_CHECK(tensor.defined(), "a backward needs values that are not computed again yet");
    // As autograd says it where there are no hooks.
    TORCH_CHECK(version.current_version() == saved_at,
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: it is at version ",
                version.current_version(), ", and was saved at version ", saved_at);
    return tensor;
  }
};

// The place of a saved tensor in the graph of the first run.
struct Place : SavedVariableHooks {
  explicit Place(Shared graph) : graph(std::move(graph)) {}
  ~Place() override {
    if (number < graph->places.size())
      graph->places[number] = nullptr;
  }

  void call_pack_hook(const at::Tensor &tensor) override {
    number = graph->places.size();
    graph->places.push_back(this);
    sizes = tensor.sizes().vec();
    dtype = tensor.scalar_type();
    held = Held(tensor); // a backward within the forward may read it
  }
  at::Tensor call_unpack_hook() override { return held.read(); }

  void fill(Held again) {
    TORCH_CHECK(again.tensor.sizes() == sizes && again.tensor.scalar_type() == dtype,
                "a forward that is computed again saves ", again.tensor.scalar_type(),
                again.tensor.sizes(), " where it saved ", dtype, at::IntArrayRef(sizes),
                " the first time: it must not depend on anything but its inputs, its parameters "
                "and its random numbers");
    held = std::move(again);
  }

  Shared graph;
  std::size_t number = SIZE_MAX;
  std::vector<int64_t> sizes;
  at::ScalarType dtype = at::kFloat;
  Held held;
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
    held = Held(tensor);
    if (!active || !active->fills)
      return;
    HollowGraph::Impl &graph = *active;
    if (!graph.is_full()) {
      if (Place *place = graph.places[graph.filled])
        place->fill(held);
      graph.filled++;
    }
    if (graph.is_full())
      throw Ended();
  }
  at::Tensor call_unpack_hook() override { return held.read(); }

  Held held;
};

} // namespace

std::unique_ptr<SavedVariableHooks> hollow_hooks() {
  if (!active)
    return nullptr;
  if (active->fills)
    return std::make_unique<Filler>();
  return std::make_unique<Place>(active);
}

bool ends_with(std::size_t count) {
  return active && active->fills && active->filled + count >= active->places.size();
}

HollowGraph::HollowGraph() : impl(std::make_shared<Impl>()) { stand_in_front(); }
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
  for (Place *place : impl->places)
    if (place)
      place->held = Held();
}

bool HollowGraph::is_full() const { return impl->is_full(); }

uint64_t HollowGraph::count() const { return impl->places.size(); }

// A leaf that anybody but its owner and the graph refers to keeps its memory.
void HollowGraph::empty_leaf(Address address) const {
  const at::Tensor &leaf = borrow(address);
  c10::TensorImpl *own = leaf.unsafeGetTensorImpl();
  const auto end = torch::autograd::impl::try_get_grad_accumulator(leaf);
  const bool is_plain = leaf.layout() == at::kStrided && own->has_storage() &&
                        !own->key_set().has(c10::DispatchKey::Python);
  // The owner counts, then the node that receives the leaf's gradient.
  if (!is_plain || leaf.use_count() > (end ? 2u : 1u))
    return;
  own->set_allow_tensor_metadata_change(true);
  own->set_storage_keep_dtype(nothing_on(leaf.device()));
}

} // namespace gpipe
