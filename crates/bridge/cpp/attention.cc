// Attention without a mask tensor, on CPUs, in float32 arithmetic for float32 and bfloat16.
//
// Why not libtorch's: its products of small blocks call MKL, which is slow on processors of other
// makers, and in bfloat16 its backward takes more than twice as long as in float32.
#include "gpipe-bridge/src/ffi.rs.h"
#include "kernels.h"
#include "ledger.h"
#include "product.h"
#include <ATen/ops/empty.h>
#include <cmath>
#include <torch/csrc/autograd/custom_function.h>

namespace gpipe {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Group `number` of x [samples, heads, positions, size], counted sample after sample, where `count`
// heads make a group.
template <typename T, typename Data>
Heads<T> heads(const at::Tensor &x, Data *data, int64_t count, int64_t number) {
  const int64_t groups = x.size(1) / count, sample = number / groups;
  data += sample * x.stride(0) + number % groups * count * x.stride(1);
  return {{data, x.stride(2)}, x.stride(1)};
}

template <typename T>
Heads<const T> read_heads(const at::Tensor &x, int64_t count, int64_t number) {
  return heads<const T>(x, x.const_data_ptr<T>(), count, number);
}

template <typename T> Heads<T> written_heads(const at::Tensor &x, int64_t count, int64_t number) {
  return heads<T>(x, x.mutable_data_ptr<T>(), count, number);
}

template <typename T> Rows<const T> read_head(const at::Tensor &x, int64_t number) {
  return read_heads<T>(x, 1, number)[0];
}

template <typename T> Rows<T> written_head(const at::Tensor &x, int64_t number) {
  return written_heads<T>(x, 1, number)[0];
}

// [samples, heads, positions, size] in memory as [samples, positions, heads, size], as the
// projections have it.
at::Tensor empty_heads(const at::Tensor &like) {
  const auto sizes = like.sizes();
  return at::empty({sizes[0], sizes[2], sizes[1], sizes[3]}, like.options()).transpose(1, 2);
}

at::Tensor with_rows(const at::Tensor &x) { return x.stride(3) == 1 ? x : x.contiguous(); }

AttentionShape shape_of(const at::Tensor &q, const at::Tensor &k, int64_t window) {
  const float scale = 1.0f / std::sqrt(static_cast<float>(q.size(3)));
  return {q.size(2), k.size(2), q.size(1) / k.size(1), q.size(3), scale, window};
}

// Calls `work` with the number of each group and the memory of its thread.
template <typename T, typename Work>
void for_groups(const at::Tensor &q, const AttentionShape &shape, Work &&work) {
  const int64_t count = q.size(0) * q.size(1) / shape.shared;
  const int64_t each = attention_kernels<T>().scratch(shape);
  const int64_t grain = grain_of_rows(shape.shared * shape.queries * shape.keys);
  const int64_t parts = std::min<int64_t>(threads(), (count + grain - 1) / grain);
  const at::Tensor memory =
      at::empty({count <= grain ? 1 : parts, each}, q.options().dtype(at::kFloat));
  float *all = memory.mutable_data_ptr<float>();
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    float *own = all + (count <= grain ? 0 : at::get_thread_num()) * each;
    for (int64_t number = begin; number < end; number++)
      work(number, own);
  });
}

struct Attention : torch::autograd::Function<Attention> {
  static at::Tensor forward(AutogradContext *context, const at::Tensor &given_q,
                            const at::Tensor &given_k, const at::Tensor &given_v,
                            int64_t window) {
    at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor q = with_rows(given_q), k = with_rows(given_k), v = with_rows(given_v);
    AttentionShape shape = shape_of(q, k, window);
    const int64_t whole = shape.shared;
    // With fewer groups than threads, each head is computed alone, which changes no bit. In a
    // backward a group stays together, so that its sums do not depend on the number of threads.
    if (k.size(0) * k.size(1) < threads())
      shape.shared = 1;
    at::Tensor y = empty_heads(q);
    at::Tensor sums =
        at::empty({q.size(0) * q.size(1), shape.queries}, q.options().dtype(at::kFloat));
    RECORD_USER_SCOPE_WITH_INPUTS("gpipe::attention", moved(q, k, v, y));
    by_dtype(q.scalar_type(), [&](auto kind) {
      using T = decltype(kind);
      float *logarithms = sums.mutable_data_ptr<float>();
      const int64_t shared = shape.shared;
      for_groups<T>(q, shape, [&](int64_t number, float *memory) {
        const int64_t group = number * shared / whole;
        attention_kernels<T>().forward(
            shape, read_heads<T>(q, shared, number), read_head<T>(k, group),
            read_head<T>(v, group), written_heads<T>(y, shared, number),
            logarithms + number * shared * shape.queries, memory);
      });
    });
    context->save_for_backward({q, k, v, y, sums});
    context->saved_data["window"] = window;
    return y;
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    differentiable_once();
    at::NoGradGuard no_grad;
    const auto saved = context->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &y = saved[3], &sums = saved[4];
    const AttentionShape shape = shape_of(q, k, context->saved_data["window"].toInt());
    const at::Tensor dy = with_rows(readable(grads[0]));
    at::Tensor dq = empty_heads(q), dk = empty_heads(k), dv = empty_heads(v);
    RECORD_USER_SCOPE_WITH_INPUTS("gpipe::attention backward", moved(q, k, v, y, dy, dq, dk, dv));
    by_dtype(q.scalar_type(), [&](auto kind) {
      using T = decltype(kind);
      const float *logarithms = sums.const_data_ptr<float>();
      const int64_t shared = shape.shared;
      for_groups<T>(q, shape, [&](int64_t number, float *memory) {
        attention_kernels<T>().backward(
            shape, read_heads<T>(q, shared, number), read_head<T>(k, number),
            read_head<T>(v, number), read_heads<T>(y, shared, number),
            logarithms + number * shared * shape.queries, read_heads<T>(dy, shared, number),
            written_heads<T>(dq, shared, number), written_head<T>(dk, number),
            written_head<T>(dv, number), memory);
      });
    });
    return {dq, dk, dv, at::Tensor()};
  }
};

bool has_attention_kernel(const at::Tensor &x) {
  return kernels_take(x) && x.dim() == 4;
}

} // namespace

// Whether heads of this size and length are computed here. With few queries, as when a text is
// generated, the keys would be read into the blocks' layout for nothing.
bool can_attend(Address q_address, Address k_address) {
  constexpr int64_t kQueriesMin = 16;
  const at::Tensor &q = borrow(q_address), &k = borrow(k_address);
  return has_attention_kernel(q) && has_attention_kernel(k) && q.size(3) > 0 &&
         q.size(3) % kHeadStep == 0 && q.size(2) >= kQueriesMin && k.size(2) > 0 && q.numel() > 0;
}

Address fused_attention(Address q_address, Address k_address, Address v_address, int64_t window) {
  const at::Tensor &q = borrow(q_address), &k = borrow(k_address), &v = borrow(v_address);
  const auto alike = [&](const at::Tensor &x) {
    return has_attention_kernel(x) && x.scalar_type() == q.scalar_type() &&
           x.size(0) == q.size(0) && x.size(1) == k.size(1) && x.size(3) == q.size(3) &&
           x.size(2) == k.size(2);
  };
  TORCH_CHECK(has_attention_kernel(q) && has_attention_kernel(k) && alike(k) &&
                  has_attention_kernel(v) && alike(v) && k.size(1) > 0 &&
                  q.size(1) % k.size(1) == 0 && q.size(3) > 0 && q.size(3) % kHeadStep == 0 &&
                  q.numel() > 0 && k.size(2) > 0 && window >= 0 &&
                  (window == 0 || q.size(2) == k.size(2)),
              "attention of ", q.scalar_type(), " ", q.sizes(), " to ", k.sizes(), " and ",
              v.sizes(), " with a window of ", window, ": samples and size must be equal, the "
              "heads of queries a multiple of those of keys and values, the size a multiple of ",
              kHeadStep, ", and with a window the lengths equal, too");
  return give(Attention::apply(q, k, v, window));
}

} // namespace gpipe
