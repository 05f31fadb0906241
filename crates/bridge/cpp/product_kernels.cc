// Compiled once for each width of vector registers (build.rs).
#include "product_kernels.h"
#include "kernel_products.h"
#include <algorithm>

namespace gpipe {

namespace {

void transposed(FewRows sizes, const float *x, float *to) {
  const int64_t padded = padded_rows(sizes.rows);
  transpose(x, sizes.inputs, sizes.rows, sizes.inputs, to, padded);
  for (int64_t i = 0; i < sizes.inputs; i++)
    for (int64_t row = sizes.rows; row < padded; row++)
      to[i * padded + row] = 0.0f;
}

void forward(FewRows sizes, const float *xt, const float *w, const float *bias, float *y,
             int64_t first, int64_t last, float *scratch) {
  const int64_t padded = padded_rows(sizes.rows), inputs = sizes.inputs;
  product(last - first, padded, inputs, w + first * inputs, inputs, 1, xt, padded, scratch,
          padded, /*adds=*/false);
  if (bias)
    for (int64_t output = first; output < last; output++)
      for (int64_t row = 0; row < sizes.rows; row++)
        scratch[(output - first) * padded + row] += bias[output];
  transpose(scratch, padded, last - first, sizes.rows, y + first, sizes.outputs);
}

void input_gradient(FewRows sizes, const float *g, const float *w, float *dx, int64_t first,
                    int64_t last) {
  // A few rows of the weight at a time: the processor does not read ahead of more.
  const int64_t step = sizes.rows > 32 ? 32 : 16;
  for (int64_t output = 0; output < sizes.outputs; output += step)
    product(sizes.rows, last - first, std::min(step, sizes.outputs - output), g + output,
            sizes.outputs, 1, w + output * sizes.inputs + first, sizes.inputs, dx + first,
            sizes.inputs, /*adds=*/output > 0);
}

void weight_gradient(FewRows sizes, const float *g, const float *x, float *dw, float *db,
                     int64_t first, int64_t last) {
  // A few rows of the result at a time, from end to end, as memory is fastest to write.
  for (int64_t output = first; output < last; output += kTall)
    product(std::min<int64_t>(kTall, last - output), sizes.inputs, sizes.rows, g + output, 1,
            sizes.outputs, x, sizes.inputs, dw + output * sizes.inputs, sizes.inputs,
            /*adds=*/false);
  if (!db)
    return;
  for (int64_t output = first; output < last; output++) {
    float sum = 0.0f;
    for (int64_t row = 0; row < sizes.rows; row++)
      sum += g[row * sizes.outputs + output];
    db[output] = sum;
  }
}

} // namespace

extern const ProductKernels GPIPE_PRODUCTS;
const ProductKernels GPIPE_PRODUCTS = {transposed, forward, input_gradient, weight_gradient};

} // namespace gpipe
