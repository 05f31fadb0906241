// Why three kernels: in float32 at::linear always calls MKL, whose AVX-512 kernels run on Intel's
// processors only. On others MKL falls back to AVX2 and is half as fast as oneDNN, which libtorch
// includes. oneDNN copies the weight into a layout of its own at every call. With few rows, as in a
// micro-batch of small images, that takes several times as long as the arithmetic.
#include "product.h"
#include "kernels.h"
#include "ledger.h"
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>

namespace gpipe {

namespace {

// With fewer multiplications, oneDNN's kernel lookup costs more than its kernel saves.
constexpr int64_t kMultiplicationsMin = int64_t{1} << 20;
// With more rows, oneDNN is the faster.
constexpr int64_t kFewRows = 64;
// Multiplications for which another thread is worth its start.
constexpr int64_t kMultiplicationsOfThread = int64_t{1} << 18;

FewRows few(const at::Tensor &rows, int64_t inputs, int64_t outputs) {
  return {rows.size(0), inputs, outputs};
}

// Calls `work(first, last)` for parts of `count`, in multiples of `step`.
template <typename Work>
void in_parts(const FewRows &sizes, int64_t count, int64_t step, Work &&work) {
  const int64_t parts = (count + step - 1) / step;
  const int64_t each = sizes.rows * sizes.inputs * sizes.outputs / std::max<int64_t>(1, parts);
  const int64_t grain = std::max<int64_t>(1, kMultiplicationsOfThread / std::max<int64_t>(1, each));
  at::parallel_for(0, parts, grain, [&](int64_t begin, int64_t end) {
    work(begin * step, std::min(end * step, count));
  });
}

at::Tensor of_few_rows(const at::Tensor &x, const at::Tensor &w,
                       const std::optional<at::Tensor> &bias) {
  const FewRows sizes = few(x, w.size(1), w.size(0));
  const int64_t padded = padded_rows(sizes.rows);
  at::Tensor y = at::empty({sizes.rows, sizes.outputs}, x.options());
  RECORD_USER_SCOPE_WITH_INPUTS("gpipe::product", moved(x, w, y));
  const at::Tensor scratch = at::empty({(sizes.inputs + sizes.outputs) * padded}, x.options());
  float *xt = scratch.mutable_data_ptr<float>(), *made = xt + sizes.inputs * padded;
  const float *weight = w.const_data_ptr<float>();
  const at::Tensor own = bias ? bias->contiguous() : at::Tensor();
  const float *added = bias ? own.const_data_ptr<float>() : nullptr;
  float *to = y.mutable_data_ptr<float>();
  product_kernels().transposed(sizes, x.const_data_ptr<float>(), xt);
  in_parts(sizes, sizes.outputs, kColumnStep, [&](int64_t first, int64_t last) {
    product_kernels().forward(sizes, xt, weight, added, to, first, last,
                              made + first * padded);
  });
  return y;
}

at::Tensor input_gradient_of_few_rows(const at::Tensor &g, const at::Tensor &w) {
  const FewRows sizes = few(g, w.size(1), w.size(0));
  at::Tensor dx = at::empty({sizes.rows, sizes.inputs}, g.options());
  RECORD_USER_SCOPE_WITH_INPUTS("gpipe::product backward", moved(g, w, dx));
  const float *given = g.const_data_ptr<float>(), *weight = w.const_data_ptr<float>();
  float *to = dx.mutable_data_ptr<float>();
  in_parts(sizes, sizes.inputs, kColumnStep, [&](int64_t first, int64_t last) {
    product_kernels().input_gradient(sizes, given, weight, to, first, last);
  });
  return dx;
}

at::Tensor weight_gradient_of_few_rows(const at::Tensor &g, const at::Tensor &x,
                                       at::Tensor *bias) {
  const FewRows sizes = few(g, x.size(1), g.size(1));
  at::Tensor dw = at::empty({sizes.outputs, sizes.inputs}, g.options());
  if (bias)
    *bias = at::empty({sizes.outputs}, g.options());
  RECORD_USER_SCOPE_WITH_INPUTS("gpipe::product backward", moved(g, x, dw));
  const float *given = g.const_data_ptr<float>(), *from = x.const_data_ptr<float>();
  float *to = dw.mutable_data_ptr<float>();
  float *sums = bias ? bias->mutable_data_ptr<float>() : nullptr;
  in_parts(sizes, sizes.outputs, kColumnStep, [&](int64_t first, int64_t last) {
    product_kernels().weight_gradient(sizes, given, from, to, sums, first, last);
  });
  return dw;
}

// x and w may be transposed views.
at::Tensor of_onednn(const at::Tensor &x, const at::Tensor &w,
                     const std::optional<at::Tensor> &bias) {
  using Scalars = c10::List<std::optional<at::Scalar>>;
  using Call = at::Tensor(const at::Tensor &, const at::Tensor &, const std::optional<at::Tensor> &,
                          std::string_view, Scalars, std::optional<std::string_view>);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                             .typed<Call>();
  return op.call(x, w, bias, "none", Scalars(), "");
}

// Calls `work(first, count)` for parts of the columns of a matrix, on several threads if they pay.
template <typename Work> void in_strips(int64_t rows, int64_t columns, Work &&work) {
  constexpr int64_t kColumns = 64; // of a strip
  const int64_t strips = (columns + kColumns - 1) / kColumns;
  at::parallel_for(0, strips, grain_of_rows(rows * kColumns), [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kColumns;
    work(first, std::min(end * kColumns, columns) - first);
  });
}

// A matrix transposed, in memory of its own, and the sums of its columns if they are wanted.
// oneDNN's product takes no transposed first operand, and libtorch's copy of one reads a number at
// a time.
at::Tensor transposed(const at::Tensor &x, at::Tensor *sums) {
  const int64_t count = x.size(0), columns = x.size(1);
  RECORD_USER_SCOPE_WITH_INPUTS("gpipe::transpose", moved(x, x));
  at::Tensor all = at::empty({columns, count}, x.options());
  if (sums)
    *sums = at::empty({columns}, x.options());
  const float *from = x.const_data_ptr<float>();
  float *to = all.mutable_data_ptr<float>();
  float *added = sums ? sums->mutable_data_ptr<float>() : nullptr;
  in_strips(count, columns, [&](int64_t first, int64_t wide) {
    fused_kernels<float>().transposed(from + first, columns, count, wide, to + first * count,
                                      added ? added + first : nullptr);
  });
  return all;
}

bool is_float(const at::Tensor &one) {
  return one.device().is_cpu() && one.scalar_type() == at::kFloat && !one.is_neg();
}

} // namespace

Products products_for(at::IntArrayRef sizes, const at::Tensor &x, const at::Tensor &w,
                      bool onednn) {
  if (!onednn || !is_float(x) || !is_float(w) || sizes.size() != 2 || w.dim() != 2)
    return Products::Aten;
  const bool is_few = sizes[0] > 0 && sizes[0] <= kFewRows && w.size(1) % kColumnStep == 0 &&
                      w.size(1) > 0 && w.is_contiguous();
  if (sizes[0] * sizes[1] * w.size(0) < kMultiplicationsMin)
    return Products::Aten;
  return is_few ? Products::FewRows : Products::OneDnn;
}

at::Tensor product(Products by, const at::Tensor &x, const at::Tensor &w,
                   const std::optional<at::Tensor> &bias) {
  switch (by) {
  case Products::FewRows:
    return of_few_rows(x.contiguous(), w, bias);
  case Products::OneDnn:
    return of_onednn(x, w, bias);
  case Products::Aten:
    break;
  }
  return at::linear(x, w, bias);
}

at::Tensor input_gradient(Products by, const at::Tensor &g, const at::Tensor &w) {
  switch (by) {
  case Products::FewRows:
    return input_gradient_of_few_rows(g.contiguous(), w);
  case Products::OneDnn:
    return of_onednn(g.contiguous(), w.t(), {});
  case Products::Aten:
    break;
  }
  return at::mm(g, w);
}

at::Tensor column_sums(const at::Tensor &given, bool fused) {
  if (!fused || !kernels_take(given))
    return given.sum(0);
  const at::Tensor g = given.contiguous(); // so that strides decide about no bit
  const int64_t rows = g.size(0), columns = g.size(1);
  at::Tensor sums = at::empty({columns}, g.options().dtype(at::kFloat));
  RECORD_USER_SCOPE_WITH_INPUTS("gpipe::column sums", moved(g, sums));
  float *to = sums.mutable_data_ptr<float>();
  by_dtype(g.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    const T *from = g.const_data_ptr<T>();
    in_strips(rows, columns, [&](int64_t first, int64_t count) {
      fused_kernels<T>().column_sums(from + first, columns, rows, count, to + first);
    });
  });
  return sums.to(g.scalar_type());
}

at::Tensor weight_gradient(Products by, const at::Tensor &g, const at::Tensor &x, at::Tensor *bias,
                           bool fused) {
  switch (by) {
  case Products::FewRows:
    return weight_gradient_of_few_rows(g.contiguous(), x.contiguous(), bias);
  case Products::OneDnn: {
    const int64_t rows = g.size(0), outputs = g.size(1), inputs = x.size(1);
    // g^T x, or the transpose of x^T g: x and the result together may be less to transpose than g.
    // The pass over g that a bias then needs is small beside either, and not counted.
    if ((rows + outputs) * inputs >= rows * outputs)
      return of_onednn(transposed(g.contiguous(), bias), x.t(), {});
    if (bias)
      *bias = column_sums(g, fused);
    const at::Tensor turned = transposed(x.contiguous(), nullptr);
    return transposed(of_onednn(turned, g.contiguous().t(), {}), nullptr);
  }
  case Products::Aten:
    break;
  }
  if (bias)
    *bias = column_sums(g, fused);
  return at::mm(g.t(), x);
}

} // namespace gpipe
