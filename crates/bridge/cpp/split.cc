// A vector-Jacobian product in two halves: the gradients of the inputs now, those of the parameters
// later.
//
// A node of the autograd graph that leads to an input and, by another edge, to a parameter (a
// product, a convolution, a normalization) computes both gradients from the gradient that reaches
// it, each only where it is wanted. The first half runs the nodes that lead to an input, for the
// inputs alone, and captures what reaches those nodes. Their way to the inputs is then cut off, and
// the second half runs them again with what was captured, for their parameters alone. Every
// gradient comes from the same kernel and the same values as in one run, so the bits are the same;
// twice is done only what lies between such a node and its parameters (a transposition, a cast).
// What only the first half needs of a node is released when the node has run, as in a whole
// product.
//
// A node whose parameters are vectors (a normalization's scale and shift) finds their gradients on
// the way to its input's, and that of a small convolution's kernel takes less time than reading
// again what it is computed from, which by the time of the second half has left the cache: those
// are found in the first half, and added there where it is their turn, or else in the second.
//
// Where a parameter is reached from two such nodes (one weight used twice in a layer) its gradient
// would be summed in another order: such a layer is not split.
#include "gpipe-bridge/src/ffi.rs.h"
#include "vjp.h"
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <algorithm>
#include <unordered_map>
#include <utility>

namespace gpipe {

namespace {

using torch::autograd::Edge;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::Node;
using torch::autograd::variable_list;

// Where a leaf's gradient arrives; null if the graph does not have it.
std::shared_ptr<Node> end_of(const at::Tensor &leaf) { return torch::autograd::impl::try_get_grad_accumulator(leaf); }

// A kernel with fewer inputs of an output finds its gradient at the speed of memory. Measured on
// two cores, AmoebaNet's I and W together took 1.05 of B with the kernels below 256 in I, 1.03 with
// those below 400, 1.02 below 512 and 600, and 1.00 with all of them, when nothing is left for W to
// fill a bubble with; what is left at 512 leaves the bubble of four devices where it is at 256, but
// for a hundredth.
constexpr int64_t FAN_IN_MIN = 512;

// Whether a parameter's gradient is not worth a second run.
bool is_small(const at::Tensor &parameter) {
  return parameter.dim() <= 1 || (parameter.dim() == 4 && parameter.numel() < FAN_IN_MIN * parameter.size(0));
}

variable_list run(const edge_list &from, const variable_list &grads, const edge_list &to, bool keep) {
  return Engine::get_default_engine().execute(from, grads, keep, /*create_graph=*/false, /*accumulate_grad=*/false, to);
}

// Releases what a node holds when it has run.
struct Release : torch::autograd::FunctionPostHook {
  explicit Release(Node &node) : node(node) {}
  variable_list operator()(const variable_list &found, const variable_list &) override {
    node.release_variables();
    return found;
  }
  Node &node; // whose hook it is
};

// The graph below the outputs, each node after all that it leads to, by number.
struct Graph {
  std::vector<std::shared_ptr<Node>> nodes;
  std::unordered_map<Node *, uint32_t> numbers;

  explicit Graph(const edge_list &roots) {
    numbers.reserve(256);
    std::vector<std::pair<std::shared_ptr<Node>, uint32_t>> path;
    const auto enter = [&](const Edge &edge) {
      if (edge.is_valid() && numbers.emplace(edge.function.get(), 0).second)
        path.emplace_back(edge.function, 0);
    };
    for (const Edge &root : roots) {
      enter(root);
      while (!path.empty()) {
        auto &[node, next] = path.back();
        if (next < node->num_outputs()) {
          enter(node->next_edge(next++));
          continue;
        }
        numbers[node.get()] = static_cast<uint32_t>(nodes.size());
        nodes.push_back(std::move(node));
        path.pop_back();
      }
    }
  }

  // -1: the graph does not have it.
  int64_t number(const std::shared_ptr<Node> &node) const {
    const auto found = node ? numbers.find(node.get()) : numbers.end();
    return found == numbers.end() ? -1 : static_cast<int64_t>(found->second);
  }
};

// What is known of a node.
struct Known {
  bool leads = false;               // to an input
  bool starts = false;              // the second half runs it again
  std::vector<uint32_t> parameters; // that it finds without going where an input is
};

} // namespace

struct Halves::Impl {
  // What the second half starts from: nodes, and what reached them.
  edge_list starts;
  variable_list grads;
  // Of the parameters: where their gradients arrive, and those that the first half has found.
  std::vector<std::shared_ptr<Node>> ends;
  std::vector<bool> early, summed; // `summed`: and added
  variable_list found_early; // not yet added
  std::vector<at::Tensor> inputs, sums;
  bool splits = true;

  // Finds out which nodes start the second half, those that lead to an input and by another way to
  // a parameter that is worth a second run, and whether there can be one. `small`: which parameters
  // are not.
  void find(const Graph &graph, std::vector<Known> &known, const edge_list &roots, const std::vector<bool> &small);
};

void Halves::Impl::find(const Graph &graph, std::vector<Known> &known, const edge_list &roots,
                        const std::vector<bool> &small) {
  for (uint32_t i = 0; i < ends.size(); i++)
    if (const int64_t number = graph.number(ends[i]); number >= 0)
      known[number].parameters.push_back(i);
  std::vector<uint32_t> reached(ends.size(), 0);
  const auto count = [&](const std::vector<uint32_t> &parameters) {
    for (uint32_t parameter : parameters)
      splits = splits && ++reached[parameter] == 1;
  };
  const auto add = [](std::vector<uint32_t> &all, const std::vector<uint32_t> &more) {
    for (uint32_t one : more)
      if (std::find(all.begin(), all.end(), one) == all.end())
        all.push_back(one);
  };
  for (std::size_t number = 0; number < graph.nodes.size(); number++) {
    Known &own = known[number];
    for (const Edge &edge : graph.nodes[number]->next_edges())
      if (edge.is_valid()) {
        const Known &below = known[graph.numbers.at(edge.function.get())];
        own.leads = own.leads || below.leads;
        if (!below.leads)
          add(own.parameters, below.parameters);
      }
    if (!own.leads || own.parameters.empty())
      continue;
    count(own.parameters);
    own.starts = std::any_of(own.parameters.begin(), own.parameters.end(), [&](uint32_t one) { return !small[one]; });
    if (!own.starts)
      for (uint32_t parameter : own.parameters)
        early[parameter] = true;
  }
  // Outputs that lead to no input are one start together: they are run as in a whole product.
  std::vector<uint32_t> rest;
  for (const Edge &root : roots)
    if (const Known &own = known[graph.numbers.at(root.function.get())]; !own.leads)
      add(rest, own.parameters);
  count(rest);
}

Halves::Halves() : impl(std::make_unique<Impl>()) {}
Halves::~Halves() = default;
bool Halves::can_split() const { return impl->splits; }
rust::Vec<Address> Halves::take_inputs() { return give_all(std::move(impl->inputs)); }
rust::Vec<Address> Halves::take_sums() { return give_all(std::move(impl->sums)); }
bool Halves::is_summed(uint32_t parameter) const { return impl->summed.at(parameter); }

// `in_turn`: to which of the parameters' accumulators their gradients are added at once if they are
// found.
std::unique_ptr<Halves> split_vjp(rust::Slice<const Address> outputs, rust::Slice<const Address> output_grads,
                                  rust::Slice<const Address> inputs, rust::Slice<const Address> parameters,
                                  rust::Slice<const Address> accumulators, rust::Slice<const bool> in_turn) {
  TORCH_CHECK(accumulators.size() == parameters.size() && in_turn.size() == parameters.size(), "split: ",
              parameters.size(), " parameters, ", accumulators.size(), " accumulators, ", in_turn.size(), " turns");
  TORCH_CHECK(outputs.size() == output_grads.size(), "split: ", outputs.size(), " outputs, ", output_grads.size(),
              " gradients");
  auto halves = std::make_unique<Halves>();
  Halves::Impl &impl = *halves->impl;
  edge_list roots;
  variable_list grads = borrow_all(output_grads);
  for (Address output : outputs) {
    roots.push_back(torch::autograd::impl::gradient_edge(borrow(output)));
    TORCH_CHECK(roots.back().is_valid(), "split: an output is not part of a graph");
  }
  std::vector<bool> small;
  for (Address parameter : parameters) {
    impl.ends.push_back(end_of(borrow(parameter)));
    small.push_back(is_small(borrow(parameter)));
  }
  impl.early.resize(parameters.size(), false);
  impl.summed.resize(parameters.size(), false);
  impl.found_early.resize(parameters.size());
  const Graph graph(roots);
  std::vector<Known> known(graph.nodes.size());
  edge_list ways;                    // to what the first half finds: inputs, small parameters, and then what the second half starts from
  std::vector<std::size_t> of_input; // the input of each of the first ways
  for (std::size_t i = 0; i < inputs.size(); i++) {
    auto end = end_of(borrow(inputs[i]));
    if (const int64_t number = graph.number(end); number >= 0) {
      known[number].leads = true;
      ways.emplace_back(std::move(end), 0);
      of_input.push_back(i);
    }
  }
  impl.find(graph, known, roots, small);
  if (!impl.splits)
    return halves;

  impl.inputs.resize(inputs.size());
  std::vector<std::size_t> of_parameter;
  for (std::size_t i = 0; i < impl.early.size(); i++)
    if (impl.early[i]) {
      ways.emplace_back(impl.ends[i], 0);
      of_parameter.push_back(i);
    }
  const std::size_t first_start = ways.size();
  for (std::size_t number = 0; number < known.size(); number++)
    if (known[number].starts)
      for (uint32_t input = 0; input < graph.nodes[number]->num_inputs(); input++)
        ways.emplace_back(graph.nodes[number], input);
  edge_list from;
  variable_list given;
  for (std::size_t i = 0; i < roots.size(); i++) {
    const bool leads_to_input = known[graph.numbers.at(roots[i].function.get())].leads;
    (leads_to_input ? from : impl.starts).push_back(roots[i]);
    (leads_to_input ? given : impl.grads).push_back(grads[i]);
  }
  for (std::size_t number = 0; number < known.size(); number++)
    if (Node &node = *graph.nodes[number]; known[number].leads && !known[number].starts && node.num_outputs() > 0)
      node.add_post_hook(std::make_unique<Release>(node));
  if (!from.empty()) {
    variable_list found = run(from, given, ways, /*keep=*/true);
    for (std::size_t i = 0; i < of_input.size(); i++)
      impl.inputs[of_input[i]] = std::move(found[i]);
    for (std::size_t i = 0; i < of_parameter.size(); i++)
      impl.found_early[of_parameter[i]] = std::move(found[of_input.size() + i]);
    for (std::size_t i = first_start; i < ways.size(); i++)
      if (found[i].defined()) {
        impl.starts.push_back(ways[i]);
        impl.grads.push_back(std::move(found[i]));
      }
  }
  // What leads to inputs is not run again, but for the starts, from where there is no way to an
  // input any more.
  for (std::size_t number = 0; number < known.size(); number++)
    if (known[number].starts)
      for (Edge &edge : graph.nodes[number]->next_edges())
        if (edge.is_valid() && known[graph.numbers.at(edge.function.get())].leads)
          edge = Edge();
  at::NoGradGuard no_grad;
  impl.sums = borrow_all(accumulators);
  for (std::size_t i : of_parameter)
    if (in_turn[i]) {
      impl.sums[i] = accumulate(std::move(impl.sums[i]), std::exchange(impl.found_early[i], at::Tensor()));
      impl.summed[i] = true;
    }
  return halves;
}

// The parameters' accumulators; 0 where there is none.
rust::Vec<Address> Halves::finish(rust::Slice<const Address> accumulators) {
  TORCH_CHECK(accumulators.size() == impl->ends.size(), "split: ", impl->ends.size(), " parameters, ", accumulators.size(),
              " accumulators");
  std::vector<at::Tensor> sums = borrow_all(accumulators);
  edge_list ways;
  std::vector<std::size_t> numbers;
  for (std::size_t i = 0; i < impl->ends.size(); i++)
    if (impl->ends[i] && !impl->early[i]) {
      ways.emplace_back(impl->ends[i], 0);
      numbers.push_back(i);
    }
  variable_list found = std::move(impl->found_early);
  if (!ways.empty() && !impl->starts.empty()) {
    variable_list later = run(impl->starts, impl->grads, ways, /*keep=*/false);
    for (std::size_t i = 0; i < numbers.size(); i++)
      found[numbers[i]] = std::move(later[i]);
  }
  impl->starts.clear();
  impl->grads.clear();
  at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < sums.size(); i++)
    sums[i] = accumulate(std::move(sums[i]), std::move(found[i]));
  return give_all(std::move(sums));
}

} // namespace gpipe
