// A vector-Jacobian product in two halves: the gradients of the inputs now, those of the parameters
// later.
//
// Some nodes of the autograd graph (products, convolutions, normalizations) lead to an input and,
// by another edge, to a parameter. Such a node computes both gradients from its incoming gradient,
// each only if requested.
//
// The first half runs the nodes that lead to an input, for the inputs alone, and captures the
// incoming gradients of these nodes. Then their edges towards the inputs are cut. The second half
// runs them again on the captured gradients, for their parameters alone. Every gradient comes from
// the same kernel and the same values as in one run, so the bits are the same. Only what lies
// between such a node and its parameters (a transposition, a cast) is done twice. If only the first
// half needs a node's saved values, they are released once the node has run, as in a whole product.
//
// Two kinds of parameter gradients are computed in the first half. A node with vector parameters (a
// normalization's scale and shift) computes their gradients along with its input's. The gradient of
// a small convolution kernel takes less time than reading its operands again, since they have left
// the cache by the second half. The first half adds these gradients to their accumulators if it is
// their turn; otherwise the second half does.
//
// If two such nodes reach the same parameter (one weight used twice in a layer), its gradient would
// be summed in another order. Such a layer is not split.
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

// The node that receives a leaf's gradient; null if there is none.
std::shared_ptr<Node> end_of(const at::Tensor &leaf) {
  return torch::autograd::impl::try_get_grad_accumulator(leaf);
}

// Threshold in inputs per output. Below it, a kernel's gradient runs at the speed of memory and is
// computed in I. Measured with AmoebaNet on two cores, where B is the time of a whole backward:
//
// | threshold  | (I + W) / B |
// |------------|-------------|
// | 256        | 1.05        |
// | 400        | 1.03        |
// | 512, 600   | 1.02        |
// | no limit   | 1.00        |
//
// Without a limit, W has nothing left to fill a bubble with. With 512 instead of 256, the bubble of
// four devices grows by only a hundredth.
constexpr int64_t FAN_IN_MIN = 512;

// Whether a parameter's gradient is not worth a second run of its node.
bool is_small(const at::Tensor &parameter) {
  return parameter.dim() <= 1 ||
         (parameter.dim() == 4 && parameter.numel() < FAN_IN_MIN * parameter.size(0));
}

variable_list run(const edge_list &from, const variable_list &grads, const edge_list &to,
                  bool keep) {
  const OnThisThread on_this_thread;
  return Engine::get_default_engine().execute(from, grads, keep, /*create_graph=*/false,
                                              /*accumulate_grad=*/false, to);
}

// Releases a node's saved values once it has run.
struct Release : torch::autograd::FunctionPostHook {
  explicit Release(Node &node) : node(node) {}
  variable_list operator()(const variable_list &found, const variable_list &) override {
    node.release_variables();
    return found;
  }
  Node &node; // the node with this hook
};

// The graph below the outputs, numbered so that each node follows all nodes that it leads to.
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

  // The node's number; -1 if it is not in the graph.
  int64_t number(const std::shared_ptr<Node> &node) const {
    const auto found = node ? numbers.find(node.get()) : numbers.end();
    return found == numbers.end() ? -1 : static_cast<int64_t>(found->second);
  }
};

// What is known about a node.
struct Known {
  bool leads = false;               // leads to an input
  bool starts = false;              // the second half runs it again
  std::vector<uint32_t> parameters; // reached without a node that leads to an input
};

} // namespace

struct Halves::Impl {
  // Where the second half starts: edges into nodes, with their incoming gradients.
  edge_list starts;
  variable_list grads;
  // For each parameter: the node that receives its gradient, and whether the first half computes
  // it.
  std::vector<std::shared_ptr<Node>> ends;
  std::vector<bool> early, summed; // `summed`: also added to its accumulator
  variable_list found_early; // gradients not yet added
  std::vector<at::Tensor> inputs, sums;
  bool splits = true;

  // Finds the nodes where the second half starts: they lead to an input and, another way, to a
  // parameter that is worth a second run. Also decides whether a split is possible. `small` marks
  // the parameters that are not worth a second run.
  void find(const Graph &graph, std::vector<Known> &known, const edge_list &roots,
            const std::vector<bool> &small);
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
    own.starts = std::any_of(own.parameters.begin(), own.parameters.end(),
                             [&](uint32_t one) { return !small[one]; });
    if (!own.starts)
      for (uint32_t parameter : own.parameters)
        early[parameter] = true;
  }
  // Outputs that lead to no input form one start together: they run as in a whole product.
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

// `in_turn` marks the parameters whose gradients, if the first half computes them, are added to
// their accumulators at once.
std::unique_ptr<Halves> split_vjp(rust::Slice<const Address> outputs,
                                  rust::Slice<const Address> output_grads,
                                  rust::Slice<const Address> inputs,
                                  rust::Slice<const Address> parameters,
                                  rust::Slice<const Address> accumulators,
                                  rust::Slice<const bool> in_turn) {
  TORCH_CHECK(accumulators.size() == parameters.size() && in_turn.size() == parameters.size(),
              "split: ", parameters.size(), " parameters, ", accumulators.size(), " accumulators, ",
              in_turn.size(), " turns");
  TORCH_CHECK(outputs.size() == output_grads.size(), "split: ", outputs.size(), " outputs, ",
              output_grads.size(), " gradients");
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
  // what the first half computes: the gradients of inputs and small parameters, and the incoming
  // gradients of the second half's starts
  edge_list ways;
  std::vector<std::size_t> of_input; // for each leading edge of `ways`, its input
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
    if (Node &node = *graph.nodes[number];
        known[number].leads && !known[number].starts && node.num_outputs() > 0)
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
  // Nodes that lead to inputs do not run again, except for the starts, whose edges towards inputs
  // are cut here.
  for (std::size_t number = 0; number < known.size(); number++)
    if (known[number].starts)
      for (Edge &edge : graph.nodes[number]->next_edges())
        if (edge.is_valid() && known[graph.numbers.at(edge.function.get())].leads)
          edge = Edge();
  at::NoGradGuard no_grad;
  impl.sums = borrow_all(accumulators);
  for (std::size_t i : of_parameter)
    if (in_turn[i]) {
      impl.sums[i] =
          accumulate(std::move(impl.sums[i]), std::exchange(impl.found_early[i], at::Tensor()));
      impl.summed[i] = true;
    }
  return halves;
}

// Returns the parameters' accumulators; 0 where there is none.
rust::Vec<Address> Halves::finish(rust::Slice<const Address> accumulators) {
  TORCH_CHECK(accumulators.size() == impl->ends.size(), "split: ", impl->ends.size(),
              " parameters, ", accumulators.size(), " accumulators");
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
