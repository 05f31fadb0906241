#include "product.h"
#include <ATen/core/dispatch/Dispatcher.h>

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

} // namespace gpipe
