#include "product.h"
#include "kernels.h"
#include "ledger.h"
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

namespace gpipe {

at::Tensor onednn_product(const at::Tensor &x, const at::Tensor &w,
                          const std::optional<at::Tensor> &bias) {
  using Scalars = c10::List<std::optional<at::Scalar>>;
  using Call = at::Tensor(const at::Tensor &, const at::Tensor &, const std::optional<at::Tensor> &,
                          std::string_view, Scalars, std::optional<std::string_view>);
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                             .typed<Call>();
  return op.call(x, w, bias, "none", Scalars(), "");
}

at::Tensor transposed(const at::Tensor &g, at::Tensor *sums) {
  const int64_t count = g.size(0), columns = g.size(1);
  RECORD_USER_SCOPE_WITH_INPUTS("gpipe::transpose", moved(g, g));
  at::Tensor all = at::empty({columns, count}, g.options());
  if (sums)
    *sums = at::empty({columns}, g.options());
  const float *from = g.const_data_ptr<float>();
  float *to = all.mutable_data_ptr<float>();
  float *added = sums ? sums->mutable_data_ptr<float>() : nullptr;
  constexpr int64_t kColumns = 64; // of a block
  const int64_t strips = (columns + kColumns - 1) / kColumns;
  at::parallel_for(0, strips, grain_of_rows(count * kColumns), [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kColumns, last = std::min(end * kColumns, columns);
    fused_kernels<float>().transposed(from + first, columns, count, last - first,
                                      to + first * count, added ? added + first : nullptr);
  });
  return all;
}

} // namespace gpipe
