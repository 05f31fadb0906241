// libtorch asks its engine for the hooks of saved tensors, and only the engine of Python has any.
// An engine of our own stands in front of whichever is there and passes everything on.
#include "saved.h"
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/input_buffer.h>
#include <mutex>

namespace gpipe {

namespace {

using torch::autograd::Engine;
using torch::autograd::SavedVariableHooks;

// Hands out our hooks, and leaves everything else to the engine behind it.
struct Front : Engine {
  explicit Front(Engine &behind) : behind(behind) {}

  torch::autograd::variable_list execute(const torch::autograd::edge_list &roots,
                                         const torch::autograd::variable_list &inputs, bool keep,
                                         bool create, bool accumulate,
                                         const torch::autograd::edge_list &outputs) override {
    return behind.execute(roots, inputs, keep, create, accumulate, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future>
  execute_with_graph_task(const std::shared_ptr<torch::autograd::GraphTask> &task,
                          std::shared_ptr<torch::autograd::Node> root,
                          torch::autograd::InputBuffer &&input) override {
    return behind.execute_with_graph_task(task, std::move(root), std::move(input));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return behind.make_anomaly_metadata();
  }
  std::unique_ptr<SavedVariableHooks> get_default_saved_variable_hooks() override {
    if (auto ours = offload_hooks())
      return ours;
    // Hooks of the layer's own (a checkpoint within it) come first.
    if (auto theirs = behind.get_default_saved_variable_hooks()) {
      note_other_hooks();
      return theirs;
    }
    return hollow_hooks();
  }

  Engine &behind;
};

Engine *front = nullptr;

Engine &get_front() { return *front; }

} // namespace

// Never undone: other threads may be in a call of the engine. It lives as long as the process, as
// the engine behind it does.
void watch_saving() {
  static std::once_flag once;
  std::call_once(once, [] {
    front = new Front(Engine::get_default_engine());
    torch::autograd::set_default_engine_stub(get_front);
  });
}

c10::Storage nothing_on(c10::Device device) {
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, device),
                       /*allocator=*/nullptr, /*resizable=*/false);
  nothing.unsafeGetStorageImpl()->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "its elements are not in memory: they are offloaded, or not computed again yet");
  return nothing;
}

bool is_plain(const c10::TensorImpl &tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() &&
         !tensor.key_set().has(c10::DispatchKey::Python);
}

Saved::Saved(const at::Tensor &from)
    : tensor(from.unsafeGetTensorImpl()->shallow_copy_and_detach(
          c10::VariableVersion(0), /*allow_tensor_metadata_change=*/true)),
      version(torch::autograd::impl::version_counter(from)), saved_at(version.current_version()) {}

at::Tensor Saved::read() const {
  TORCH_CHECK(tensor.defined(), "a backward needs values that are not computed again yet");
  TORCH_CHECK(version.current_version() == saved_at,
              "one of the variables needed for gradient computation has been modified by an "
              "inplace operation: it is at version ",
              version.current_version(), ", and was saved at version ", saved_at);
  return tensor;
}

} // namespace gpipe
