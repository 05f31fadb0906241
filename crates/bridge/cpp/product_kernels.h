// The kernels of product.cc for few rows, in float32, compiled once for each width of vector
// registers (product_kernels.cc).
//
// x [rows, inputs] and g [rows, outputs] are the rows, w [outputs, inputs] is the weight, and all
// are without gaps. A call computes a range of the weight's rows or columns, so that threads can
// share a product. `inputs` is a multiple of kColumnStep.
#pragma once
#include <cstdint>

namespace gpipe {

struct FewRows {
  int64_t rows, inputs, outputs;
};

// What the number of inputs must be a multiple of: the widest register.
constexpr int64_t kColumnStep = 16;

// The rows' number that x has when it is transposed: a multiple of the widest register.
static inline int64_t padded_rows(int64_t rows) {
  return (rows + kColumnStep - 1) / kColumnStep * kColumnStep;
}

struct ProductKernels {
  // x as xt [inputs, padded rows]. The columns behind the rows are 0.
  void (*transposed)(FewRows sizes, const float *x, float *xt);
  // Columns `first` to `last` of y [rows, outputs] = x w^T + bias. There may be no bias. `scratch`
  // has room for last - first times the padded rows.
  void (*forward)(FewRows sizes, const float *xt, const float *w, const float *bias, float *y,
                  int64_t first, int64_t last, float *scratch);
  // Columns `first` to `last` of dx [rows, inputs] = g w. Both are multiples of kColumnStep.
  void (*input_gradient)(FewRows sizes, const float *g, const float *w, float *dx, int64_t first,
                         int64_t last);
  // Rows `first` to `last` of dw [outputs, inputs] = g^T x, and of db, the sums of g's columns,
  // where it is not null.
  void (*weight_gradient)(FewRows sizes, const float *g, const float *x, float *dw, float *db,
                          int64_t first, int64_t last);
};

} // namespace gpipe
