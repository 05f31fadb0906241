// Convolution of images in channels-last layout, with its VJP.
//
// Why not at::conv2d alone: oneDNN's convolution converts the weight to its own layout and back at
// every call. With few small images, as in a micro-batch after a few reductions, that costs several
// times the arithmetic. A 1x1 convolution is a matrix product. Channels-last memory already has the
// product's rows, and the product takes the weight as it is.
#include "gpipe-bridge/src/ffi.rs.h"
#include "kernels.h"
#include "ledger.h"
#include "op_cache.h"
#include "product.h"
#include <ATen/ops/conv2d.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <algorithm>

namespace gpipe {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

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
    const at::Tensor x_rows = rows(used), weight = w.flatten(1);
    const Products by = products_for(x_rows.sizes(), x_rows, weight, onednn);
    context->saved_data["by"] = static_cast<int64_t>(by);
    return remembered({used.size(0), w.size(0), used.size(2), used.size(3)},
                      [&] { return images(product(by, x_rows, weight, {}), used); });
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    differentiable_once();
    at::NoGradGuard no_grad;
    const auto saved = context->get_saved_variables();
    const at::Tensor &used = saved[0], &w = saved[1];
    const auto by = static_cast<Products>(context->saved_data["by"].toInt());
    const at::Tensor g = rows(readable(grads[0]).contiguous(kChannelsLast));
    at::Tensor dx, dw;
    if (context->needs_input_grad(0)) {
      dx = images(input_gradient(by, g, w.flatten(1)), used);
      const auto sizes = context->saved_data["sizes"].toIntVector();
      if (dx.sizes() != at::IntArrayRef(sizes)) {
        // at::zeros ignores a memory format.
        const at::Tensor all = at::empty(sizes, dx.options(), kChannelsLast).zero_();
        pixels(all, context->saved_data["stride"].toIntVector()).copy_(dx);
        dx = all;
      }
    }
    if (context->needs_input_grad(1))
      dw = weight_gradient(by, g, rows(used), nullptr, /*fused=*/true).view(w.sizes());
    return {dx, dw, at::Tensor(), at::Tensor()};
  }
};

// A kernel's positions over images of one size.
struct Positions {
  int64_t samples, channels, height, width, out_height, out_width;
  int64_t kernel[2], stride[2], padding[2], dilation[2];

  int64_t rows() const { return samples * out_height * out_width; }
  int64_t size() const { return kernel[0] * kernel[1]; }

  // Calls `work(patch, pixel, number)` for each position and each element of the kernel: the
  // offsets of the patch and of the pixel, and the element's number. The pixel is -1 beyond the
  // border. Samples are divided among threads.
  template <typename Work> void visit(Work &&work) const {
    const int64_t each = out_height * out_width * size() * channels;
    at::parallel_for(0, samples, grain_of_rows(each), [&](int64_t begin, int64_t end) {
      int64_t patch = begin * out_height * out_width * size() * channels;
      for (int64_t sample = begin; sample < end; sample++)
        for (int64_t i = 0; i < out_height; i++)
          for (int64_t j = 0; j < out_width; j++, patch += size() * channels)
            for (int64_t number = 0; number < size(); number++) {
              const int64_t row = i * stride[0] - padding[0] + number / kernel[1] * dilation[0];
              const int64_t column = j * stride[1] - padding[1] + number % kernel[1] * dilation[1];
              const bool inside = row >= 0 && row < height && column >= 0 && column < width;
              const int64_t pixel = (sample * height + row) * width + column;
              work(patch, inside ? pixel * channels : -1, number);
            }
    });
  }
};

// A convolution of few pixels, as a product. The patches under the kernel's positions are copied
// into rows [position, channel, element of the kernel], which fit the weight as it lies in memory.
struct Patches : torch::autograd::Function<Patches> {
  // Up to as many positions, the copies cost less than oneDNN's of the weight.
  static constexpr int64_t kPositionsMax = 256;

  static at::Tensor gathered(const Positions &own, const at::Tensor &x) {
    const int64_t size = own.size(), channels = own.channels;
    at::Tensor patches = at::empty({own.rows(), channels * size}, x.options());
    RECORD_USER_SCOPE_WITH_INPUTS("gpipe::patches", moved(x, patches));
    by_dtype(x.scalar_type(), [&](auto kind) {
      using T = decltype(kind);
      const T *from = x.const_data_ptr<T>();
      T *to = patches.mutable_data_ptr<T>();
      own.visit([&](int64_t patch, int64_t pixel, int64_t number) {
        T *place = to + patch + number;
        for (int64_t channel = 0; channel < channels; channel++)
          place[channel * size] = pixel < 0 ? T(0) : from[pixel + channel];
      });
    });
    return patches;
  }

  static at::Tensor scattered(const Positions &own, const at::Tensor &patches) {
    const int64_t size = own.size(), channels = own.channels;
    at::Tensor x = at::empty({own.samples, channels, own.height, own.width},
                             patches.options().dtype(at::kFloat), kChannelsLast)
                       .zero_();
    RECORD_USER_SCOPE_WITH_INPUTS("gpipe::patches", moved(patches, x));
    float *to = x.mutable_data_ptr<float>();
    by_dtype(patches.scalar_type(), [&](auto kind) {
      const auto *from = patches.const_data_ptr<decltype(kind)>();
      own.visit([&](int64_t patch, int64_t pixel, int64_t number) {
        const auto *place = from + patch + number;
        for (int64_t channel = 0; pixel >= 0 && channel < channels; channel++)
          to[pixel + channel] += place[channel * size];
      });
    });
    return x.to(patches.scalar_type());
  }

  // Whether this convolution is one of few pixels.
  static bool takes(const Positions &own, const at::Tensor &x, const at::Tensor &w) {
    // One by one first: a product of hostile sizes may wrap around.
    const auto is_few = [](int64_t count) { return count > 0 && count <= kPositionsMax; };
    return is_few(own.samples) && is_few(own.out_height) && is_few(own.out_width) &&
           is_few(own.rows()) && !x.is_neg() && !w.is_neg() && w.is_contiguous() &&
           w.numel() > 0 && x.numel() > 0 && own.channels * own.size() % kColumnStep == 0;
  }

  static at::Tensor forward(AutogradContext *context, const at::Tensor &x, const at::Tensor &w,
                            const Positions &own) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({x, w});
    context->saved_data["stride"] = at::IntArrayRef(own.stride);
    context->saved_data["padding"] = at::IntArrayRef(own.padding);
    context->saved_data["dilation"] = at::IntArrayRef(own.dilation);
    const at::Tensor weight = w.flatten(1);
    const Products by = products_for({own.rows(), weight.size(1)}, x, weight, true);
    context->saved_data["by"] = static_cast<int64_t>(by);
    return remembered({own.samples, w.size(0), own.out_height, own.out_width}, [&] {
      const at::Tensor y = product(by, gathered(own, x), weight, {});
      return y.view({own.samples, own.out_height, own.out_width, w.size(0)}).permute({0, 3, 1, 2});
    });
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    differentiable_once();
    at::NoGradGuard no_grad;
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &w = saved[1];
    const auto list = [&](const char *name) { return context->saved_data[name].toIntVector(); };
    const Positions own = positions_of(x, w, list("stride"), list("padding"), list("dilation"));
    const at::Tensor g = rows(readable(grads[0]).contiguous(kChannelsLast)), weight = w.flatten(1);
    const auto by = static_cast<Products>(context->saved_data["by"].toInt());
    at::Tensor dx, dw;
    if (context->needs_input_grad(0))
      dx = scattered(own, input_gradient(by, g, weight));
    if (context->needs_input_grad(1))
      dw = weight_gradient(by, g, gathered(own, x), nullptr, /*fused=*/true).view(w.sizes());
    return {dx, dw, at::Tensor()};
  }

  static Positions positions_of(const at::Tensor &x, const at::Tensor &w, at::IntArrayRef stride,
                                at::IntArrayRef padding, at::IntArrayRef dilation) {
    Positions own{x.size(0), x.size(1), x.size(2), x.size(3), 0, 0, {}, {}, {}, {}};
    int64_t counts[2];
    for (int i = 0; i < 2; i++) {
      own.kernel[i] = w.size(2 + i);
      own.stride[i] = stride[i];
      own.padding[i] = padding[i];
      own.dilation[i] = dilation[i];
      const int64_t free = x.size(2 + i) + 2 * padding[i] - dilation[i] * (w.size(2 + i) - 1) - 1;
      counts[i] = free < 0 ? 0 : free / stride[i] + 1; // with 0, conv2d reports what is wrong
    }
    own.out_height = counts[0];
    own.out_width = counts[1];
    return own;
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
  const bool takes = x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16;
  if (!channels_last || !takes || !x.device().is_cpu() || x.dim() != 4)
    return spatial(x);
  TORCH_CHECK(w.dim() == 4 && w.size(1) * groups == x.size(1), "a convolution with a weight ",
              w.sizes(), " in ", groups, " group(s) does not take ", x.sizes());
  const bool pointwise =
      w.size(2) == 1 && w.size(3) == 1 && groups == 1 && padding[0] == 0 && padding[1] == 0;
  if (pointwise && w.device().is_cpu() && w.scalar_type() == x.scalar_type())
    return give(Pointwise::apply(x, w, at::IntArrayRef(steps), onednn));
  const at::Tensor from = x.contiguous(kChannelsLast);
  // Other arguments go to conv2d, which reports what is wrong.
  const auto are_in = [](rust::Slice<const int64_t> all, int64_t least) {
    return std::all_of(all.begin(), all.end(),
                       [&](int64_t one) { return one >= least && one <= INT32_MAX; });
  };
  if (onednn && groups == 1 && fits && are_in(padding, 0) && are_in(dilation, 1) &&
      w.device().is_cpu() && w.scalar_type() == x.scalar_type()) {
    const Positions own = Patches::positions_of(from, w, steps, list(padding), list(dilation));
    if (Patches::takes(own, from, w))
      return give(Patches::apply(from, w, own));
  }
  return spatial(from);
}

} // namespace gpipe
