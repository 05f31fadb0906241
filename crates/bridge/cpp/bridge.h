// Shared by the bridge's C++ files: exceptions, and tensors as addresses.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <cstdint>
#include <exception>
#include <memory>

// cxx calls this around every bridged function, so no C++ exception of any type crosses into Rust.
namespace rust::behavior {
template <typename Try, typename Fail>
static void trycatch(Try &&func, Fail &&fail) noexcept {
  try {
    func();
  } catch (const c10::Error &error) {
    fail(error.what_without_backtrace());
  } catch (const std::exception &error) {
    fail(error.what());
  } catch (...) {
    fail("a C++ exception that is not a std::exception");
  }
}
} // namespace rust::behavior

#include "rust/cxx.h"

namespace gpipe {

// A tensor crosses as the address of an at::Tensor: borrowed as an argument, owned by the caller as
// a result. 0 means "no tensor".
using Address = std::size_t;

inline const at::Tensor &borrow(Address address) {
  TORCH_CHECK(address != 0, "no tensor where one is needed");
  const at::Tensor &tensor = *reinterpret_cast<const at::Tensor *>(address);
  TORCH_CHECK(tensor.defined(), "an undefined tensor where one is needed");
  return tensor;
}

inline Address give(at::Tensor tensor) {
  return tensor.defined() ? reinterpret_cast<Address>(new at::Tensor(std::move(tensor))) : 0;
}

// vjp.cc
rust::Vec<Address> vjp(rust::Slice<const Address> outputs, rust::Slice<const Address> output_grads,
                       rust::Slice<const Address> inputs, rust::Slice<const Address> parameters,
                       rust::Slice<const Address> accumulators);
void throw_for_test(int32_t kind);

// split.cc
class Halves {
public:
  Halves();
  ~Halves();
  bool can_split() const;
  rust::Vec<Address> take_inputs();
  rust::Vec<Address> take_sums();
  bool is_summed(uint32_t parameter) const;
  rust::Vec<Address> finish(rust::Slice<const Address> accumulators);
  struct Impl;
  std::unique_ptr<Impl> impl;
};
std::unique_ptr<Halves> split_vjp(rust::Slice<const Address> outputs,
                                  rust::Slice<const Address> output_grads,
                                  rust::Slice<const Address> inputs,
                                  rust::Slice<const Address> parameters,
                                  rust::Slice<const Address> accumulators,
                                  rust::Slice<const bool> in_turn);

// op_cache.cc
class OpCache {
public:
  OpCache();
  ~OpCache();
  uint64_t bytes() const;
  struct Impl;
  std::unique_ptr<Impl> impl;
};
void begin_recording();
std::unique_ptr<OpCache> end_recording();
void begin_replay(std::unique_ptr<OpCache> cache);
void end_replay();
void forget_op_caches() noexcept;
void set_unread(bool is_unread) noexcept;

// offload.cc
class SavedTensors {
public:
  explicit SavedTensors(int32_t gpu); // below 0: the CPU
  ~SavedTensors();
  void enter();
  void leave() noexcept;
  void add_leaf(Address leaf);
  rust::Vec<Address> take_away();
  void bring_back(rust::Slice<const Address> blocks);
  struct Impl;
  std::unique_ptr<Impl> impl;
};
std::unique_ptr<SavedTensors> new_saved_tensors(int32_t gpu);
Address root_of(Address output);

// hollow.cc
class HollowGraph {
public:
  HollowGraph();
  ~HollowGraph();
  void enter(bool fills) const;
  void empty() const;
  void empty_leaf(Address leaf) const;
  bool is_full() const;
  bool keeps_memory(rust::Slice<const Address> outputs) const;
  uint64_t count() const;
  struct Impl;
  std::shared_ptr<Impl> impl;
};
std::unique_ptr<HollowGraph> new_hollow_graph();
void leave_hollow_graph() noexcept;
bool is_filled() noexcept;

// layout.cc
Address settled(Address address);
Address concatenate(rust::Slice<const Address> addresses, int64_t axis);

// linear.cc
Address linear(Address x, Address w, Address bias, bool use_onednn, bool fused);
bool onednn_is_faster();

// convolution.cc
Address convolution(Address x, Address w, rust::Slice<const int64_t> stride,
                    rust::Slice<const int64_t> padding, rust::Slice<const int64_t> dilation,
                    int64_t groups, bool channels_last, bool onednn);

// custom.cc
struct CustomBackward;
rust::Vec<Address> custom(rust::Slice<const Address> inputs, rust::Slice<const Address> outputs,
                          rust::Slice<const Address> saved, rust::Box<CustomBackward> backward);

// attention.cc
bool can_attend(Address q, Address k);
Address fused_attention(Address q, Address k, Address v, int64_t window);

// threads.cc
void set_threads(int32_t count);
rust::String cpu_capability();

// fused.cc
bool can_fuse(Address x);
Address fused_rms_norm(Address x, Address w, double eps);
Address fused_swiglu(Address gate, Address up);
Address fused_turn(Address x, Address cos, Address sin);

// images.cc
bool are_images(Address x);
rust::Vec<Address> batch_norm_images(Address x, Address w, Address b, double eps, bool relu);
Address pool_images(Address x, int64_t size, int64_t stride, int64_t padding, bool ceil,
                    bool largest);
Address every_second_pixel(Address x, int64_t from);

// ledger.cc
struct LedgerEntry;
class LedgerScope {
public:
  LedgerScope();
  ~LedgerScope();
  struct Impl;
  std::unique_ptr<Impl> impl;
};
void begin_ledger();
rust::Vec<LedgerEntry> end_ledger();
void forget_ledger() noexcept;
std::unique_ptr<LedgerScope> ledger_scope(rust::Str name);

// loss.cc
Address cross_entropy_sum(Address logits, Address target, int64_t ignore, double smoothing);

// optim.cc
void fused_adam(rust::Slice<const Address> parameters, rust::Slice<const Address> grads,
                rust::Slice<const Address> exp_avgs, rust::Slice<const Address> exp_avg_sqs,
                rust::Slice<const Address> steps, double lr, double beta1, double beta2,
                double weight_decay, double eps, bool decoupled);
void fused_sgd(rust::Slice<const Address> parameters, rust::Slice<const Address> grads,
               rust::Slice<const Address> momenta, double lr, double momentum, bool nesterov,
               double weight_decay, bool first_step);

struct MemoryStats;

// device.cc
struct DeviceStream;
struct SimulatedCounts;
enum class Simulation : ::std::uint8_t;
struct DeviceEvent {
  explicit DeviceEvent(bool timed);
  ~DeviceEvent();
  void block(DeviceStream stream) const;
  void make_current() const;
  void synchronize() const;
  bool is_done() const;
  double ms_since(const DeviceEvent &earlier) const;
  struct Impl;
  std::unique_ptr<Impl> impl;
};
bool has_cuda();
Simulation simulation();
SimulatedCounts simulated_counts();
int32_t gpu_count();
DeviceStream new_stream(int32_t device);
void enter_stream(DeviceStream stream);
void synchronize_stream(DeviceStream stream);
std::unique_ptr<DeviceEvent> record_event(DeviceStream stream, bool timed);
Address copy_on_stream(Address tensor, DeviceStream stream, int32_t to);
Address upload(Address tensor, int32_t device);
Address upload_on_stream(Address tensor, DeviceStream stream);
void record_use(Address tensor, DeviceStream stream);
void use_deterministic_kernels(bool deterministic, bool warn_only);
void require_deterministic_kernels();
MemoryStats gpu_stats(int32_t device);
void reset_gpu_peak(int32_t device);

// allocator.cc
struct Refusal;
// Random numbers keyed by what runs (random.cc).
void enter_random(uint64_t seed);
void leave_random() noexcept;

void enter_arena(uint32_t arena);
MemoryStats arena_stats(uint32_t arena);
void reset_arena_peak(uint32_t arena);
void set_arena_cap(uint32_t arena, uint64_t bytes);
void trim_arena(uint32_t arena);
void close_arena(uint32_t arena);
Refusal take_refusal();
bool keep_freed_memory();

} // namespace gpipe
