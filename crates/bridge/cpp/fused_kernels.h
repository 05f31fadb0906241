// The kernels of fused.cc, compiled once for each width of vector registers (fused_kernels.cc).
//
// Rows are worked on by one thread each, from the first element to the last. So a row's result
// depends neither on the other rows nor on the number of threads.
#pragma once
#include <cstdint>

namespace gpipe {

// One dtype's kernels. `rows` rows lie behind each other and have `size` elements.
template <typename T> struct FusedKernels {
  // y = T(x r) w, r = 1 / sqrt(mean(x^2) + eps), with r kept in float32.
  void (*rms_norm)(const T *x, const T *w, T *y, float *r, int64_t rows, int64_t size, double eps);
  // The gradient of x, where dx is not null. Adds that of w to `dw` [size], where it is not null.
  void (*rms_norm_backward)(const T *dy, const T *x, const T *w, const float *r, T *dx, float *dw,
                            int64_t rows, int64_t size);
  // y = T(a sigmoid(a)) b, of `size` elements.
  void (*swiglu)(const T *a, const T *b, T *y, int64_t size);
  // The gradients of a and b, each where it is not null.
  void (*swiglu_backward)(const T *dy, const T *a, const T *b, T *da, T *db, int64_t size);
  // Turns rows: y = (a c - b s, b c + a s) for the halves a and b of each, `half` elements each.
  // With `back`, the other way. The tables c and s have a row of `half` elements for each row.
  void (*turn)(const T *x, int64_t x_stride, const T *c, const T *s, T *y, int64_t y_stride,
               int64_t rows, int64_t half, bool back);
  // Cross entropy of `classes` logits with a target distribution: 1 - smoothing for class `target`,
  // and smoothing / classes for each class. Where `gradient` is not null, also the gradient of x:
  // softmax(x) less that distribution. `exps` has room for `classes` elements.
  float (*cross_entropy)(const T *x, int64_t classes, int64_t target, float smoothing, float *exps,
                         T *gradient);
  // Adds x to `sum`, of `size` elements.
  void (*add)(const T *x, float *sum, int64_t size);
  // The sum of each column of x [rows, columns], whose rows are `stride` elements apart.
  void (*column_sums)(const T *x, int64_t stride, int64_t rows, int64_t columns, float *sums);
  // to [columns, rows] = x [rows, columns], and the columns' sums where `sums` is not null. Rows of
  // x are `stride` elements apart. Always float32.
  void (*transposed)(const float *x, int64_t stride, int64_t rows, int64_t columns, float *to,
                     float *sums);
};

} // namespace gpipe
