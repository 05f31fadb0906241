// A float32 matrix product through oneDNN: what affine maps and 1x1 convolutions are made of.
#pragma once
#include "bridge.h"
#include <optional>

namespace gpipe {

// Below so many multiplications oneDNN's look-up of its kernel costs more than the kernel saves.
constexpr int64_t kMultiplicationsMin = int64_t{1} << 20;

// x [rows, in], w [out, in], both perhaps transposed views, bias [out]: [rows, out].
at::Tensor onednn_product(const at::Tensor &x, const at::Tensor &w, const std::optional<at::Tensor> &bias);

} // namespace gpipe
