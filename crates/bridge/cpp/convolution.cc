// Convolution of images in channels-last layout, with its VJP.
//
// Why not at::conv2d alone: oneDNN's convolution converts the weight to its own layout and back at
// every call. With few small images, as in a micro-batch after a few reductions, that costs several
// times the arithmetic. A 1x1 convolution is a matrix product. Channels-last memory already has the
// product's rows, and the product takes the weight as it is.
#include "gpipe-bridge/src/ffi.rs.h"
#include "op_cache.h"
#include "product.h"
#include <ATen/ops/conv2d.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

namespace gpipe {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
constexpr auto kChannelsLast = at::MemoryFormat::ChannelsLast;

bool takes_onednn(const at::Tensor &x, const at::Tensor &w, bool onednn) {
  return onednn && x.numel() * w.size(0) >= kMultiplicationsMin;
}

at::Tensor product(const at::Tensor &x, const at::Tensor &w, bool onednn) {
  return takes_onednn(x, w, onednn) ? onednn_product(x, w, {}) : at::linear(x, w);
}

// Every stride-th pixel in both directions.
at::Tensor pixels(const at::Tensor &x, at::IntArrayRef stride) {
  return x.slice(2, 0, x.size(2), stride[0]).slice(3, 0, x.size(3), stride[1]);
}

// [n, c, h, w] in channels-last layout as [n h w, c], sharing its memory.
at::Tensor rows(const at::Tensor &x) { return x.permute({0, 2, 3, 1}).reshape({-1, x.size(1)}); }

// The inverse of `rows`, with n, h and w of `like`.
at::Tensor images(const at::Tensor &rows, const at::Tensor &like) {
  return rows.view({like.size(0), like.size(2), like.size(3), rows.size(1)}).permute({0, 3, 1, 2});
}

// A 1x1 convolution without padding, in one group.
struct Pointwise : torch::autograd::Function<Pointwise> {
  static at::Tensor forward(AutogradContext *context, const at::Tensor &x, const at::Tensor &w,
                            at::IntArrayRef stride, bool onednn) {
    at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor used = pixels(x, stride).contiguous(kChannelsLast);
    context->save_for_backward({used, w});
    context->saved_data["sizes"] = x.sizes();
    context->saved_data["stride"] = stride;
    context->saved_data["onednn"] = onednn;
    return remembered({used.size(0), w.size(0), used.size(2), used.size(3)},
                      [&] { return images(product(rows(used), w.flatten(1), onednn), used); });
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    differentiable_once();
    at::NoGradGuard no_grad;
    const auto saved = context->get_saved_variables();
    const at::Tensor &used = saved[0], &w = saved[1];
    const bool onednn = context->saved_data["onednn"].toBool();
    const at::Tensor g = rows(grads[0].contiguous(kChannelsLast));
    at::Tensor dx, dw;
    if (context->needs_input_grad(0)) {
      dx = images(product(g, w.flatten(1).t(), onednn), used);
      const auto sizes = context->saved_data["sizes"].toIntVector();
      if (dx.sizes() != at::IntArrayRef(sizes)) {
        // at::zeros ignores a memory format.
        const at::Tensor all = at::empty(sizes, dx.options(), kChannelsLast).zero_();
        pixels(all, context->saved_data["stride"].toIntVector()).copy_(dx);
        dx = all;
      }
    }
    if (context->needs_input_grad(1)) {
      const at::Tensor columns = g.t(), inputs = rows(used).t();
      const bool own = takes_onednn(columns, inputs, onednn);
      dw = own ? onednn_product(transposed(g, nullptr), inputs, {}) : at::linear(columns, inputs);
      dw = dw.view(w.sizes());
    }
    return {dx, dw, at::Tensor(), at::Tensor()};
  }
};

// Any other convolution: ATen's forward and backward, to the bit.
struct Spatial : torch::autograd::Function<Spatial> {
  static at::Tensor forward(AutogradContext *context, const at::Tensor &x, const at::Tensor &w,
                            at::IntArrayRef stride, at::IntArrayRef padding,
                            at::IntArrayRef dilation, int64_t groups) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({x, w});
    context->saved_data["stride"] = stride;
    context->saved_data["padding"] = padding;
    context->saved_data["dilation"] = dilation;
    context->saved_data["groups"] = groups;
    std::vector<int64_t> sizes{x.size(0), w.size(0)};
    for (std::size_t i = 0; i < 2; i++)
      sizes.push_back(
          (x.size(2 + i) + 2 * padding[i] - dilation[i] * (w.size(2 + i) - 1) - 1) / stride[i] + 1);
    return remembered(sizes,
                      [&] { return at::conv2d(x, w, {}, stride, padding, dilation, groups); });
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    differentiable_once();
    at::NoGradGuard no_grad;
    const auto saved = context->get_saved_variables();
    const auto list = [&](const char *name) { return context->saved_data[name].toIntVector(); };
    const auto [dx, dw, db] = at::convolution_backward(
        grads[0], saved[0], saved[1], std::nullopt, list("stride"), list("padding"),
        list("dilation"), /*transposed=*/false,
        /*output_padding=*/{0, 0}, context->saved_data["groups"].toInt(),
        {context->needs_input_grad(0), context->needs_input_grad(1), false});
    const at::Tensor none;
    return {dx, dw, none, none, none, none};
  }
};

} // namespace

Address convolution(Address x_address, Address w_address, rust::Slice<const int64_t> stride,
                    rust::Slice<const int64_t> padding, rust::Slice<const int64_t> dilation,
                    int64_t groups, bool channels_last, bool onednn) {
  const auto list = [](rust::Slice<const int64_t> slice) {
    return at::IntArrayRef(slice.data(), slice.size());
  };
  const at::Tensor &x = borrow(x_address), &w = borrow(w_address);
  // With a single output position, the stride has no effect. But with a stride over a map one pixel
  // wide, oneDNN leaves parts of a bfloat16 weight gradient uninitialized. So the stride becomes 1.
  std::vector<int64_t> steps(stride.begin(), stride.end());
  const bool fits = x.dim() == 4 && w.dim() == 4 && steps.size() == 2 && steps[0] > 0 &&
                    steps[1] > 0 && padding.size() == 2 && dilation.size() == 2;
  if (fits)
    for (std::size_t i = 0; i < 2; i++)
      if (x.size(2 + i) + 2 * padding[i] == dilation[i] * (w.size(2 + i) - 1) + 1)
        steps[i] = 1;
  const auto spatial = [&](const at::Tensor &from) {
    // Arguments that do not fit go to conv2d, which reports what is wrong.
    return give(fits ? Spatial::apply(from, w, at::IntArrayRef(steps), list(padding),
                                      list(dilation), groups)
                     : at::conv2d(from, w, {}, steps, list(padding), list(dilation), groups));
  };
  if (!channels_last || !x.device().is_cpu() || x.scalar_type() != at::kFloat || x.dim() != 4)
    return spatial(x);
  TORCH_CHECK(w.dim() == 4 && w.size(1) * groups == x.size(1), "a convolution with a weight ",
              w.sizes(), " in ", groups, " group(s) does not take ", x.sizes());
  const bool pointwise =
      w.size(2) == 1 && w.size(3) == 1 && groups == 1 && padding[0] == 0 && padding[1] == 0;
  if (pointwise && w.device().is_cpu() && w.scalar_type() == at::kFloat)
    return give(Pointwise::apply(x, w, at::IntArrayRef(steps), onednn));
  return spatial(x.contiguous(kChannelsLast));
}

} // namespace gpipe
