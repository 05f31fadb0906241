// PyTorch's engine for distributed training: TCPStore and ProcessGroupGloo of libtorch's c10d.
//
// Gloo requires contiguous CPU tensors. It also ends the receiving process if a receive is smaller
// than what was sent, so mail.rs and sums.rs agree on sizes first.
#include "gpipe-bridge/src/ffi.rs.h"
#include "c10d_inside.h"
#include <c10/util/Logging.h>
#include <cstdlib>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

namespace gpipe {

namespace {

using std::chrono::milliseconds;

std::vector<uint8_t> bytes(rust::Slice<const uint8_t> slice) {
  return {slice.begin(), slice.end()};
}

rust::Vec<uint8_t> bytes(const std::vector<uint8_t> &vector) {
  rust::Vec<uint8_t> copy;
  copy.reserve(vector.size());
  for (uint8_t byte : vector)
    copy.push_back(byte);
  return copy;
}

std::string text(rust::Str str) { return std::string(str); }

} // namespace

// Turns off c10d's flight recorder, a table of the last 2,000 operations of all groups in a
// process, meant for diagnosing hangs. c10d updates it without a lock for Gloo's groups. When two
// stages of a process summed gradients over replicas at the same time, the process crashed or
// continued with a corrupted heap. The variable is set before main because c10d reads it only once.
// A user can set TORCH_FR_BUFFER_SIZE to turn the table on again.
[[maybe_unused]] static const int no_table = setenv("TORCH_FR_BUFFER_SIZE", "0", /*overwrite=*/0);

TcpStore::TcpStore() = default;
TcpStore::~TcpStore() = default;

namespace {

std::unique_ptr<TcpStore> own(c10::intrusive_ptr<c10d::Store> store, uint16_t port) {
  auto owned = std::make_unique<TcpStore>();
  owned->impl = std::make_unique<TcpStore::Impl>(TcpStore::Impl{std::move(store), port});
  return owned;
}

} // namespace

// Silences c10d's warnings: they concern waits and host names, and what goes wrong is reported as
// an error here. TORCH_CPP_LOG_LEVEL turns them on again.
void hush() {
  static const bool once = [] {
    constexpr int errors = 2;
    if (!std::getenv("TORCH_CPP_LOG_LEVEL"))
      FLAGS_caffe2_log_level = errors;
    return true;
  }();
  (void)once;
}

// Creates a client, and also the server if `listener` is a bound and listening socket (else -1).
// Without that socket, c10d would listen on all interfaces. The store owns the socket from here on.
std::unique_ptr<TcpStore> tcp_store(rust::Str host, uint16_t port, int32_t listener,
                                    int64_t timeout_ms) {
  hush();
  c10d::TCPStoreOptions options;
  options.port = port;
  options.isServer = listener >= 0;
  options.waitWorkers = false;
  options.timeout = milliseconds(timeout_ms);
  if (listener >= 0)
    options.masterListenFd = static_cast<std::size_t>(listener);
  auto store = c10::make_intrusive<c10d::TCPStore>(text(host), options);
  const uint16_t bound = store->getPort();
  return own(std::move(store), bound);
}

// A separate connection, because a wait blocks its connection until it ends.
std::unique_ptr<TcpStore> TcpStore::another() const {
  return own(impl->store->clone(), impl->port);
}

std::unique_ptr<TcpStore> TcpStore::prefixed(rust::Str prefix) const {
  return own(c10::make_intrusive<c10d::PrefixStore>(text(prefix), impl->store), impl->port);
}

uint16_t TcpStore::port() const { return impl->port; }

void TcpStore::set(rust::Str key, rust::Slice<const uint8_t> value) const {
  impl->store->set(text(key), bytes(value));
}

rust::Vec<uint8_t> TcpStore::get(rust::Str key, int64_t timeout_ms) const {
  impl->store->wait({text(key)}, milliseconds(timeout_ms));
  return bytes(impl->store->get(text(key)));
}

bool TcpStore::check(rust::Str key) const { return impl->store->check({text(key)}); }

int64_t TcpStore::add(rust::Str key, int64_t amount) const {
  return impl->store->add(text(key), amount);
}

rust::Vec<uint8_t> TcpStore::compare_set(rust::Str key, rust::Slice<const uint8_t> expected,
                                         rust::Slice<const uint8_t> desired) const {
  return bytes(impl->store->compareSet(text(key), bytes(expected), bytes(desired)));
}

bool TcpStore::remove(rust::Str key) const { return impl->store->deleteKey(text(key)); }

struct GroupWork::Impl {
  // Gloo reads and writes through references to these tensors, until the work is destroyed.
  std::vector<at::Tensor> tensors;
  c10::intrusive_ptr<c10d::Work> work;
};
GroupWork::GroupWork() : impl(std::make_unique<Impl>()) {}
GroupWork::~GroupWork() = default;

// False if the operation was aborted.
bool GroupWork::wait(int64_t timeout_ms) const {
  return impl->work->wait(milliseconds(timeout_ms));
}

void GroupWork::abort() const { impl->work->abort(); }

struct ProcessGroup::Impl {
  c10::intrusive_ptr<c10d::Backend> backend;
};
ProcessGroup::ProcessGroup() : impl(std::make_unique<Impl>()) {}
ProcessGroup::~ProcessGroup() = default;

std::unique_ptr<GroupWork> ProcessGroup::send(Address tensor, int32_t to, int32_t tag) const {
  auto work = std::make_unique<GroupWork>();
  work->impl->tensors = {borrow(tensor)};
  work->impl->work = impl->backend->send(work->impl->tensors, to, tag);
  return work;
}

std::unique_ptr<GroupWork> ProcessGroup::receive(Address tensor, int32_t from, int32_t tag) const {
  auto work = std::make_unique<GroupWork>();
  work->impl->tensors = {borrow(tensor)};
  work->impl->work = impl->backend->recv(work->impl->tensors, from, tag);
  return work;
}

std::unique_ptr<GroupWork> ProcessGroup::all_reduce(Address tensor, bool largest) const {
  auto work = std::make_unique<GroupWork>();
  work->impl->tensors = {borrow(tensor)};
  c10d::AllreduceOptions options;
  options.reduceOp = largest ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
  work->impl->work = impl->backend->allreduce(work->impl->tensors, options);
  return work;
}

std::unique_ptr<GroupWork> ProcessGroup::broadcast(Address tensor, int32_t from) const {
  auto work = std::make_unique<GroupWork>();
  work->impl->tensors = {borrow(tensor)};
  c10d::BroadcastOptions options;
  options.rootRank = from;
  work->impl->work = impl->backend->broadcast(work->impl->tensors, options);
  return work;
}

c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store> &store, int rank,
                                            int size, const std::string &address,
                                            milliseconds timeout) {
  auto options = c10d::ProcessGroupGloo::Options::create(timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDeviceForHostname(address));
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, size, options);
}

std::unique_ptr<ProcessGroup> gloo_group(const TcpStore &store, int32_t rank, int32_t size,
                                         rust::Str address, int64_t timeout_ms) {
  auto group = std::make_unique<ProcessGroup>();
  group->impl->backend =
      make_gloo(store.impl->store, rank, size, text(address), milliseconds(timeout_ms));
  // That is for connecting. Later waits have limits of their own, or end when a process is gone.
  group->impl->backend->setTimeout(std::chrono::hours(24));
  return group;
}

} // namespace gpipe
