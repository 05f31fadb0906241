// Operations whose backward is Rust code: one autograd node that calls it.
//
// torch::autograd::Function wants a C++ type with static methods for each operation. A node of its
// own needs one type for all. Like every node, it computes only the gradients that a run asks for,
// so a split backward runs it twice: for the inputs, then for the parameters.
#include "gpipe-bridge/src/ffi.rs.h"
#include "vjp.h"
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <utility>

namespace gpipe {

namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

struct Custom : Node {
  explicit Custom(rust::Box<CustomBackward> backward) : backward(std::move(backward)) {}

  variable_list apply(variable_list &&grads) override {
    TORCH_CHECK(!at::GradMode::is_enabled(), "a custom function is differentiable once");
    std::vector<at::Tensor> values;
    for (const SavedVariable &own : saved)
      values.push_back(own.unpack());
    rust::Vec<bool> wanted;
    for (uint32_t input = 0; input < num_outputs(); input++)
      wanted.push_back(task_should_compute_output(input));
    std::vector<at::Tensor> given(std::make_move_iterator(grads.begin()),
                                  std::make_move_iterator(grads.end()));
    const rust::Vec<Address> found =
        backward->call(give_all(std::move(values)), give_all(std::move(given)), wanted);
    // Rust has checked their number and shapes.
    variable_list gradients;
    for (Address address : found) {
      std::unique_ptr<at::Tensor> own(reinterpret_cast<at::Tensor *>(address));
      gradients.push_back(own ? std::move(*own) : at::Tensor());
    }
    return gradients;
  }

  void release_variables() override {
    for (SavedVariable &own : saved)
      own.reset_data();
  }

  std::string name() const override { return "CustomBackward"; }

  rust::Box<CustomBackward> backward;
  std::vector<SavedVariable> saved;
};

} // namespace

// Makes `outputs`, computed from `inputs` without a graph, outputs of a node with this backward.
rust::Vec<Address> custom(rust::Slice<const Address> inputs, rust::Slice<const Address> outputs,
                          rust::Slice<const Address> saved, rust::Box<CustomBackward> backward) {
  const variable_list from = borrow_all(inputs);
  std::vector<at::Tensor> made;
  for (Address output : outputs)
    made.push_back(borrow(output).detach());
  if (!torch::autograd::compute_requires_grad(from))
    return give_all(std::move(made));
  std::shared_ptr<Custom> node(new Custom(std::move(backward)), torch::autograd::deleteNode);
  node->set_next_edges(torch::autograd::collect_next_edges(from));
  for (Address tensor : saved)
    node->saved.emplace_back(borrow(tensor), /*is_output=*/false);
  for (at::Tensor &output : made)
    if (torch::autograd::isDifferentiableType(output.scalar_type()))
      torch::autograd::set_history(output, node);
    else
      node->add_input_metadata(Node::undefined_input());
  return give_all(std::move(made));
}

} // namespace gpipe
