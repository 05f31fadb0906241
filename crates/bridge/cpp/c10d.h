// PyTorch's store and process groups (`c10d.cc`) as opaque objects for Rust.
#pragma once
#include "bridge.h"

namespace gpipe {

// c10d's objects are reference counted and their headers heavy, so only c10d.cc includes them.
struct TcpStore {
  TcpStore();
  ~TcpStore();
  std::unique_ptr<TcpStore> another() const;
  std::unique_ptr<TcpStore> prefixed(rust::Str prefix) const;
  uint16_t port() const;
  void set(rust::Str key, rust::Slice<const uint8_t> value) const;
  rust::Vec<uint8_t> get(rust::Str key, int64_t timeout_ms) const;
  bool check(rust::Str key) const;
  int64_t add(rust::Str key, int64_t amount) const;
  rust::Vec<uint8_t> compare_set(rust::Str key, rust::Slice<const uint8_t> expected,
                                 rust::Slice<const uint8_t> desired) const;
  bool remove(rust::Str key) const;
  struct Impl;
  std::unique_ptr<Impl> impl;
};
std::unique_ptr<TcpStore> tcp_store(rust::Str host, uint16_t port, int32_t listener,
                                    int64_t timeout_ms);

struct GroupWork {
  GroupWork();
  ~GroupWork();
  bool wait(int64_t timeout_ms) const;
  void abort() const;
  struct Impl;
  std::unique_ptr<Impl> impl;
};

struct ProcessGroup {
  ProcessGroup();
  ~ProcessGroup();
  std::unique_ptr<GroupWork> send(Address tensor, int32_t to, int32_t tag) const;
  std::unique_ptr<GroupWork> receive(Address tensor, int32_t from, int32_t tag) const;
  std::unique_ptr<GroupWork> all_reduce(Address tensor, bool largest) const;
  std::unique_ptr<GroupWork> broadcast(Address tensor, int32_t from) const;
  struct Impl;
  std::unique_ptr<Impl> impl;
};
// Processes with a GPU each. Everything runs on the calling thread's current stream.
struct GpuGroup {
  GpuGroup();
  ~GpuGroup();
  void exchange(rust::Slice<const Address> sends, rust::Slice<const int32_t> to,
                rust::Slice<const Address> receives, rust::Slice<const int32_t> from) const;
  void abort() const;
  struct Impl;
  std::unique_ptr<Impl> impl;
};
bool has_nccl();
std::unique_ptr<GpuGroup> gpu_group(const TcpStore &store, int32_t rank, int32_t size, int32_t gpu,
                                    rust::Str address, int64_t timeout_ms);

std::unique_ptr<ProcessGroup> gloo_group(const TcpStore &store, int32_t rank, int32_t size,
                                         rust::Str address, int64_t timeout_ms);

} // namespace gpipe
