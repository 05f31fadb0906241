// Batch norm, with the ReLU behind it, and pooling, of float32 and bfloat16 images in channels-last
// layout. All is computed in float32.
//
// Libtorch's batch norm and ReLU are two operations, each of which reads and writes the images; the
// backward of its norm is slower than memory. Its max pooling saves the images and eight bytes for
// each output. Here it is a byte for each output. In bfloat16 its pooling is many times slower than
// a conversion to float32 and back.
#include "gpipe-bridge/src/ffi.rs.h"
#include "kernels.h"
#include "ledger.h"
#include "product.h"
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

namespace gpipe {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
// Channels of a cache line: threads that divide channels do not share one.
constexpr int64_t kLine = 16;

bool is_images(const at::Tensor &x) {
  return kernels_take(x) && x.dim() == 4 && x.numel() > 0 && x.is_contiguous(kChannelsLast);
}

template <typename T> const NormKernels<T> &norm_kernels();
template <> const NormKernels<float> &norm_kernels() { return image_kernels().norm; }
template <> const NormKernels<c10::BFloat16> &norm_kernels() {
  return image_kernels().norm_bfloat16;
}

// Calls `work(first, pixels)` with ranges of the channels, on several threads if they pay.
template <typename Work> void by_channels(const at::Tensor &x, Work &&work) {
  const int64_t all = x.size(1), rows = x.numel() / all, lines = (all + kLine - 1) / kLine;
  at::parallel_for(0, lines, grain_of_rows(rows * kLine), [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kLine;
    work(first, Pixels{rows, all, std::min(end * kLine, all) - first});
  });
}

// The vectors of a norm, from channel `first` on.
struct Vectors {
  const float *weight, *bias, *mean, *inverse;
  Vectors(const at::Tensor &w, const at::Tensor &b, const at::Tensor &m, const at::Tensor &r)
      : weight(w.const_data_ptr<float>()), bias(b.const_data_ptr<float>()),
        mean(m.const_data_ptr<float>()), inverse(r.const_data_ptr<float>()) {}
  Norm from(int64_t first) const {
    return {weight + first, bias + first, mean + first, inverse + first};
  }
};

struct BatchNorm : torch::autograd::Function<BatchNorm> {
  static variable_list forward(AutogradContext *context, const at::Tensor &x, const at::Tensor &w,
                               const at::Tensor &b, double eps, bool relu) {
    at::AutoDispatchBelowADInplaceOrView below;
    at::Tensor y = at::empty_like(x), mean = at::empty_like(w), inverse = at::empty_like(w);
    RECORD_USER_SCOPE_WITH_INPUTS("gpipe::batch_norm", moved(x, y));
    float *means = mean.mutable_data_ptr<float>(), *roots = inverse.mutable_data_ptr<float>();
    const Vectors vectors(w, b, mean, inverse);
    by_dtype(x.scalar_type(), [&](auto kind) {
      using T = decltype(kind);
      const T *from = x.const_data_ptr<T>();
      T *to = y.mutable_data_ptr<T>();
      by_channels(x, [&](int64_t first, Pixels pixels) {
        const NormKernels<T> &kernels = norm_kernels<T>();
        kernels.statistics(pixels, from + first, eps, means + first, roots + first);
        kernels.normalise(pixels, from + first, vectors.from(first), relu, to + first);
      });
    });
    context->save_for_backward({x, w, b, mean, inverse});
    context->saved_data["relu"] = relu;
    context->mark_non_differentiable({mean, inverse});
    context->set_materialize_grads(false);
    return {y, mean, inverse};
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    differentiable_once();
    at::NoGradGuard no_grad;
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &w = saved[1];
    if (!grads[0].defined())
      return variable_list(5);
    const at::Tensor dy = readable(grads[0]).contiguous(kChannelsLast);
    const bool relu = context->saved_data["relu"].toBool(), wants_x = context->needs_input_grad(0);
    at::Tensor dx, dw = at::empty_like(w), db = at::empty_like(w);
    if (wants_x)
      dx = at::empty_like(x);
    RECORD_USER_SCOPE_WITH_INPUTS("gpipe::batch_norm", moved(x, dy, dx));
    float *weights = dw.mutable_data_ptr<float>(), *biases = db.mutable_data_ptr<float>();
    const Vectors vectors(w, saved[2], saved[3], saved[4]);
    by_dtype(x.scalar_type(), [&](auto kind) {
      using T = decltype(kind);
      const T *from = x.const_data_ptr<T>(), *given = dy.const_data_ptr<T>();
      T *to = wants_x ? dx.mutable_data_ptr<T>() : nullptr;
      by_channels(x, [&](int64_t first, Pixels pixels) {
        const NormKernels<T> &kernels = norm_kernels<T>();
        const Norm norm = vectors.from(first);
        kernels.norm_sums(pixels, given + first, from + first, norm, relu, weights + first,
                          biases + first);
        if (to)
          kernels.norm_backward(pixels, given + first, from + first, norm, relu, weights + first,
                                biases + first, to + first);
      });
    });
    return {dx, dw, db, at::Tensor(), at::Tensor()};
  }
};

// How many windows fit along an axis, as libtorch counts them.
int64_t windows_along(int64_t length, int64_t size, int64_t stride, int64_t padding, bool ceil) {
  const int64_t free = length + 2 * padding - size + (ceil ? stride - 1 : 0);
  if (free < 0)
    return 0;
  const int64_t count = free / stride + 1;
  return ceil && (count - 1) * stride >= length + padding ? count - 1 : count;
}

Windows windows_of(at::IntArrayRef sizes, int64_t size, int64_t stride, int64_t padding,
                   bool ceil) {
  return {sizes[2],
          sizes[3],
          sizes[1],
          windows_along(sizes[2], size, stride, padding, ceil),
          windows_along(sizes[3], size, stride, padding, ceil),
          size,
          stride,
          padding};
}

// Calls `work(sample)` for each of `samples`, on several threads if they pay.
template <typename Work> void by_sample(int64_t samples, const Windows &windows, Work &&work) {
  const int64_t each = windows.out_height * windows.out_width * windows.channels;
  at::parallel_for(0, samples, grain_of_rows(each * windows.size), [&](int64_t begin, int64_t end) {
    for (int64_t sample = begin; sample < end; sample++)
      work(sample);
  });
}

struct Pool : torch::autograd::Function<Pool> {
  static at::Tensor forward(AutogradContext *context, const at::Tensor &own, int64_t size,
                            int64_t stride, int64_t padding, bool ceil, bool largest) {
    at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor x = own.to(at::kFloat);
    const int64_t samples = x.size(0);
    const Windows windows = windows_of(x.sizes(), size, stride, padding, ceil);
    const std::vector<int64_t> sizes{samples, windows.channels, windows.out_height,
                                     windows.out_width};
    at::Tensor y = at::empty(sizes, x.options(), kChannelsLast), which;
    if (largest)
      which = at::empty(sizes, x.options().dtype(at::kByte), kChannelsLast);
    RECORD_USER_SCOPE_WITH_INPUTS("gpipe::pool", moved(x, y));
    const float *from = x.const_data_ptr<float>();
    float *to = y.mutable_data_ptr<float>();
    uint8_t *found = largest ? which.mutable_data_ptr<uint8_t>() : nullptr;
    const int64_t given = x.numel() / samples, made = y.numel() / samples;
    by_sample(samples, windows, [&](int64_t sample) {
      if (found)
        image_kernels().max_pool(windows, from + sample * given, to + sample * made,
                                 found + sample * made);
      else
        image_kernels().average_pool(windows, from + sample * given, to + sample * made);
    });
    context->save_for_backward({which});
    for (const auto &[name, value] :
         {std::pair{"size", size}, {"stride", stride}, {"padding", padding}})
      context->saved_data[name] = value;
    context->saved_data["ceil"] = ceil;
    context->saved_data["sizes"] = x.sizes();
    return y.to(own.scalar_type());
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    differentiable_once();
    at::NoGradGuard no_grad;
    const at::Tensor which = context->get_saved_variables()[0];
    const at::Tensor dy = readable(grads[0]).to(at::kFloat).contiguous(kChannelsLast);
    const auto sizes = context->saved_data["sizes"].toIntVector();
    const auto number = [&](const char *name) { return context->saved_data[name].toInt(); };
    const Windows windows = windows_of(sizes, number("size"), number("stride"), number("padding"),
                                       context->saved_data["ceil"].toBool());
    at::Tensor dx = at::empty(sizes, dy.options(), kChannelsLast);
    RECORD_USER_SCOPE_WITH_INPUTS("gpipe::pool", moved(dy, dx));
    const float *given = dy.const_data_ptr<float>();
    const uint8_t *found = which.defined() ? which.const_data_ptr<uint8_t>() : nullptr;
    float *to = dx.mutable_data_ptr<float>();
    const int64_t own = dx.numel() / sizes[0], made = dy.numel() / sizes[0];
    by_sample(sizes[0], windows, [&](int64_t sample) {
      std::fill(to + sample * own, to + (sample + 1) * own, 0.0f);
      if (found)
        image_kernels().max_pool_backward(windows, given + sample * made, found + sample * made,
                                          to + sample * own);
      else
        image_kernels().average_pool_backward(windows, given + sample * made, to + sample * own);
    });
    const at::Tensor none;
    return {dx.to(grads[0].scalar_type()), none, none, none, none, none};
  }
};

// Every second pixel in both directions, from one on; zeros where that is beyond the border. The
// gradient of libtorch's own slices is never in channels-last layout.
struct EverySecond : torch::autograd::Function<EverySecond> {
  // The pixels of `x`, and those of `y` that they become.
  static std::pair<at::Tensor, at::Tensor> both(const at::Tensor &x, const at::Tensor &y,
                                                int64_t from) {
    const at::Tensor own = x.slice(2, from, x.size(2), 2).slice(3, from, x.size(3), 2);
    return {own, y.slice(2, 0, own.size(2)).slice(3, 0, own.size(3))};
  }

  static at::Tensor forward(AutogradContext *context, const at::Tensor &x, int64_t from) {
    at::AutoDispatchBelowADInplaceOrView below;
    context->saved_data["sizes"] = x.sizes();
    context->saved_data["from"] = from;
    const auto format = x.suggest_memory_format();
    context->saved_data["format"] = static_cast<int64_t>(format);
    const at::Tensor y =
        at::empty({x.size(0), x.size(1), (x.size(2) + 1) / 2, (x.size(3) + 1) / 2}, x.options(),
                  format)
            .zero_();
    const auto [pixels, to] = both(x, y, from);
    to.copy_(pixels);
    return y;
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    differentiable_once();
    at::NoGradGuard no_grad;
    const auto format = static_cast<at::MemoryFormat>(context->saved_data["format"].toInt());
    const at::Tensor dx =
        at::empty(context->saved_data["sizes"].toIntVector(), grads[0].options(), format).zero_();
    const auto [to, given] = both(dx, grads[0], context->saved_data["from"].toInt());
    to.copy_(given);
    return {dx, at::Tensor()};
  }
};

} // namespace

bool are_images(Address x) { return is_images(borrow(x)); }

rust::Vec<Address> batch_norm_images(Address x_address, Address w_address, Address b_address,
                                     double eps, bool relu) {
  const at::Tensor &x = borrow(x_address), &w = borrow(w_address), &b = borrow(b_address);
  const auto fits = [&](const at::Tensor &one) {
    return one.device().is_cpu() && one.scalar_type() == at::kFloat && one.dim() == 1 &&
           one.size(0) == x.size(1) && one.is_contiguous() && !one.is_neg();
  };
  TORCH_CHECK(is_images(x) && fits(w) && fits(b), "a batch norm of ", x.scalar_type(), " ",
              x.sizes(), " with vectors ", w.sizes(), " and ", b.sizes(),
              ": it takes float32 or bfloat16 images in channels-last layout, on a CPU, and "
              "float32 vectors");
  rust::Vec<Address> given;
  for (at::Tensor &one : BatchNorm::apply(x, w, b, eps, relu))
    given.push_back(give(std::move(one)));
  return given;
}

Address pool_images(Address x_address, int64_t size, int64_t stride, int64_t padding,
                    bool ceil, bool largest) {
  const at::Tensor &x = borrow(x_address);
  const auto fits = [&](int64_t length) {
    return windows_along(length, size, stride, padding, ceil) > 0;
  };
  TORCH_CHECK(is_images(x) && size >= 1 && size <= 15 && stride >= 1 && stride <= INT32_MAX &&
                  padding >= 0 && padding <= size / 2 && fits(x.size(2)) && fits(x.size(3)),
              "pooling of ", x.scalar_type(), " ", x.sizes(), " in windows of ", size, " x ", size,
              ", stride ", stride, ", padding ", padding,
              ": it takes float32 or bfloat16 images in channels-last layout, on a CPU, that a "
              "window fits, of at most 15 x 15, half of which may be padding");
  return give(Pool::apply(x, size, stride, padding, ceil, largest));
}

Address every_second_pixel(Address x_address, int64_t from) {
  const at::Tensor &x = borrow(x_address);
  TORCH_CHECK(x.dim() == 4 && (from == 0 || from == 1), "every second pixel of ", x.sizes(),
              " from ", from, " on: it takes images, from 0 or 1 on");
  return give(EverySecond::apply(x, from));
}

} // namespace gpipe
