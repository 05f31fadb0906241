// The stand-in for NCCL: a process group whose tensors are on simulated GPUs, over Gloo.
//
// As with NCCL, there are no buffers and no tags: a pair of processes passes tensors in order, and a
// group call ends when all it sends is received and all it receives is sent. Then it also waits for
// the groups that it met to have come as far, because NCCL may pass nothing of a group before. Unlike
// NCCL, the thread waits for that in the call.
#include "call.h"
#include "memory.h"
#include "streams.h"
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <set>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace simulated {

namespace {

using c10d::Work;
using WorkPtr = c10::intrusive_ptr<Work>;

constexpr int kTag = 0;
constexpr int kPassedTag = 1;

// The caller's stream waits for what ran on the group's stream.
class Done final : public Work {
public:
  Done(StreamNumber stream, int device) : stream(stream), device(device) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  void synchronize() override {
    Lock lock(mutex());
    simulated::wait(current_stream(device), recorded(stream));
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }

private:
  StreamNumber stream;
  int device;
};

class Group final : public c10d::Backend {
public:
  explicit Group(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)) {}

  const std::string getBackendName() const override { return "simulated NCCL"; }
  void startCoalescing() override { calls.clear(); }
  WorkPtr send(std::vector<at::Tensor> &tensors, int to, int) override {
    calls.push_back({tensors.at(0), to, /*sends=*/true});
    return nullptr;
  }
  WorkPtr recv(std::vector<at::Tensor> &tensors, int from, int) override {
    calls.push_back({tensors.at(0), from, /*sends=*/false});
    return nullptr;
  }
  WorkPtr endCoalescing() override {
    if (calls.empty())
      return nullptr;
    const int device = calls.front().tensor.get_device();
    enter(device);
    auto done = c10::make_intrusive<Done>(*stream, device);
    try {
      pass();
    } catch (...) {
      done->synchronize(); // an aborted group no longer uses memory
      calls.clear();
      throw;
    }
    calls.clear();
    return done;
  }
  void abort() override {
    std::lock_guard<std::mutex> lock(guard);
    is_aborted = true;
    for (const WorkPtr &work : under_way)
      work->abort();
  }

private:
  struct Call {
    at::Tensor tensor;
    int other;
    bool sends;
  };

  // Passes all tensors, and waits for that.
  void pass() {
    Views views;
    std::vector<WorkPtr> works;
    for (const Call &call : calls) {
      std::vector<at::Tensor> bytes{views.of(call.tensor)};
      works.push_back(call.sends ? gloo->send(bytes, call.other, kTag)
                                 : gloo->recv(bytes, call.other, kTag));
    }
    finish(works);
    // Tell those that it met that all has passed, and wait for the same.
    std::set<int> met;
    for (const Call &call : calls)
      met.insert(call.other);
    works.clear();
    std::vector<std::vector<at::Tensor>> words;
    for (int other : met)
      for (bool sends : {true, false}) {
        words.push_back({at::zeros({1}, at::kByte)});
        works.push_back(sends ? gloo->send(words.back(), other, kPassedTag)
                              : gloo->recv(words.back(), other, kPassedTag));
      }
    finish(works);
  }

  void finish(const std::vector<WorkPtr> &works) {
    {
      std::lock_guard<std::mutex> lock(guard);
      under_way = works;
      TORCH_CHECK(!is_aborted, "the group was aborted");
    }
    for (const WorkPtr &work : works)
      TORCH_CHECK(work->wait(), "the group was aborted");
    std::lock_guard<std::mutex> lock(guard);
    under_way.clear();
  }

  // On a stream of its own, as NCCL's groups, after what is on the caller's.
  void enter(int device) {
    const c10::Device own(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
    if (!stream)
      stream = number_of(
          c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).getStreamFromGlobalPool(own));
    Lock lock(mutex());
    std::vector<Uses *> reads, writes;
    for (const Call &call : calls)
      (call.sends ? reads : writes).push_back(uses_of(call.tensor));
    simulated::wait(*stream, recorded(current_stream(device)));
    launch(*stream, "a group of sends and receives", reads, writes);
  }

  c10::intrusive_ptr<c10d::Backend> gloo;
  std::vector<Call> calls;
  std::optional<StreamNumber> stream;
  std::mutex guard;
  std::vector<WorkPtr> under_way;
  bool is_aborted = false;
};

} // namespace

} // namespace simulated

// Owns `gloo`, and gives what it returns to the caller.
extern "C" __attribute__((visibility("default"))) c10d::Backend *
gpipe_simulated_group(c10d::Backend *gloo) {
  return c10::make_intrusive<simulated::Group>(c10::intrusive_ptr<c10d::Backend>::reclaim(gloo))
      .release();
}
