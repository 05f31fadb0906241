// Kernels that build.rs compiled once for each width of vector registers: those for this processor.
#pragma once
#include "attention_kernels.h"
#include "fused_kernels.h"
#include "image_kernels.h"
#include "product_kernels.h"
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <algorithm>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Exception.h>

namespace gpipe {

template <typename T> const FusedKernels<T> &fused_kernels();
template <typename T> const AttentionKernels<T> &attention_kernels();
const ImageKernels &image_kernels();
const ProductKernels &product_kernels();

// The layout of images that kernels take.
constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;

// Elements for which another thread is worth its start, as in libtorch.
constexpr int64_t kGrain = 32768;

// How many rows of `size` elements are worth another thread.
inline int64_t grain_of_rows(int64_t size) {
  return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, size));
}

// threads.cc
// How many threads at::parallel_for divides work among at most. at::get_thread_num() is below this
// in its calls.
int64_t threads();

// Whether kernels can read the memory of `x` in one of their dtypes.
inline bool kernels_take(const at::Tensor &x) {
  return x.device().is_cpu() && x.layout() == at::kStrided && !x.is_neg() &&
         (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16);
}

// Calls `call` with a value of the dtype.
template <typename Call> void by_dtype(at::ScalarType dtype, Call &&call) {
  if (dtype == at::kFloat)
    call(float());
  else if (dtype == at::kBFloat16)
    call(c10::BFloat16());
  else
    TORCH_CHECK(false, "a fused operation in ", dtype, ": it takes float32 and bfloat16");
}

} // namespace gpipe
