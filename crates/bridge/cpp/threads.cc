// How many threads share an operation, and which vector units compute it.
//
// at::parallel_for is compiled into libtorch and, from its headers, into this library. Each has a
// thread-local flag of its own. On a thread's first call, each adopts the number that was last set
// anywhere in the process.
#include "gpipe-bridge/src/ffi.rs.h"
#include "kernels.h"
#include <ATen/Version.h>

namespace gpipe {

void set_threads(int32_t count) {
  // Both adopt a number now, so that neither does later.
  at::get_num_threads();
  at::internal::lazy_init_num_threads();
  at::set_num_threads(count);
}

int64_t threads() {
  at::internal::lazy_init_num_threads();
  return at::get_num_threads();
}

rust::String cpu_capability() { return at::get_cpu_capability(); }

} // namespace gpipe
