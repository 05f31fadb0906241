// What c10d.cc and gpu_group.cc share.
#pragma once
#define USE_C10D
#define USE_C10D_GLOO // libtorch is built with it; its headers check it
#include "c10d.h"
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace gpipe {

struct TcpStore::Impl {
  c10::intrusive_ptr<c10d::Store> store;
  uint16_t port;
};

// `address` is where this process listens for its peers.
c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store> &store, int rank,
                                            int size, const std::string &address,
                                            std::chrono::milliseconds timeout);

} // namespace gpipe
