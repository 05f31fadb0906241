// The kernels of attention.cc, compiled once for each width of vector registers
// (attention_kernels.cc). One call computes a group, on one thread, in float32: a head of keys and
// values, and the heads of queries that share it (Ainslie et al. 2023, GQA).
#pragma once
#include <cstdint>

namespace gpipe {

// The rows of one head: `data` with `stride` elements from one position to the next.
template <typename T> struct Rows {
  T *data;
  int64_t stride;
};

// The heads of a group, with `stride` elements from one to the next.
template <typename T> struct Heads {
  Rows<T> first;
  int64_t stride;

  // Inline, so that no width's code is linked in the place of another's.
  __attribute__((always_inline)) Rows<T> operator[](int64_t head) const {
    return {first.data + head * stride, first.stride};
  }
};

struct AttentionShape {
  int64_t queries, keys;
  int64_t shared; // heads of queries in a group
  int64_t size;   // of a head; a multiple of kHeadStep
  float scale;
  // Query i sees the keys from i - window + 1 to i, or all keys if the window is 0. Then there are
  // as many queries as keys.
  int64_t window;

  int64_t first_key(int64_t query) const {
    return window == 0 || query < window ? 0 : query - window + 1;
  }
  int64_t end_key(int64_t query) const { return window == 0 ? keys : query + 1; }
};

// What a head's size must be a multiple of: the widest register.
constexpr int64_t kHeadStep = 16;

template <typename T> struct AttentionKernels {
  // Elements of float32 that a call needs to work with.
  int64_t (*scratch)(const AttentionShape &shape);
  // y = softmax(q k^T scale) v, and for each head and query the logarithm of the softmax's sum. q
  // and y are [shared, queries, size], k and v [keys, size], and sums [shared, queries].
  void (*forward)(const AttentionShape &shape, Heads<const T> q, Rows<const T> k, Rows<const T> v,
                  Heads<T> y, float *sums, float *scratch);
  // The gradients dq, dk and dv, from dy, each with its tensor's shape. dk and dv are sums over the
  // group's heads.
  void (*backward)(const AttentionShape &shape, Heads<const T> q, Rows<const T> k, Rows<const T> v,
                   Heads<const T> y, const float *sums, Heads<const T> dy, Heads<T> dq,
                   Rows<T> dk, Rows<T> dv, float *scratch);
};

} // namespace gpipe
