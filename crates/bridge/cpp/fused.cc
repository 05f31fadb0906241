// Operations that libtorch makes of several, each of which reads and writes whole tensors: as one
// pass over memory forwards, and one backwards.
//
// They save less, too: only their inputs. With `kernels = "aten"` the layers call libtorch's own
// operations instead, which these are tested against.
#include "gpipe-bridge/src/ffi.rs.h"
#include "kernels.h"
#include "ledger.h"
#include "product.h"
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

namespace gpipe {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct RmsNorm : torch::autograd::Function<RmsNorm> {
  static at::Tensor forward(AutogradContext *context, const at::Tensor &given, const at::Tensor &w,
                            double eps) {
    at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor x = given.contiguous();
    const int64_t size = w.numel(), rows = x.numel() / size;
    at::Tensor y = at::empty_like(x), r = at::empty({rows}, x.options().dtype(at::kFloat));
    RECORD_USER_SCOPE_WITH_INPUTS("gpipe::rms_norm", moved(x, y));
    by_dtype(x.scalar_type(), [&](auto kind) {
      using T = decltype(kind);
      const T *from = x.const_data_ptr<T>(), *weight = w.const_data_ptr<T>();
      T *to = y.mutable_data_ptr<T>();
      float *roots = r.mutable_data_ptr<float>();
      at::parallel_for(0, rows, grain_of_rows(size), [&](int64_t begin, int64_t end) {
        fused_kernels<T>().rms_norm(from + begin * size, weight, to + begin * size, roots + begin,
                              end - begin, size, eps);
      });
    });
    context->save_for_backward({x, w, r});
    return y;
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    differentiable_once();
    at::NoGradGuard no_grad;
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &w = saved[1], &r = saved[2];
    const at::Tensor dy = readable(grads[0]).contiguous();
    const int64_t size = w.numel(), rows = x.numel() / size;
    const bool wants_x = context->needs_input_grad(0), wants_w = context->needs_input_grad(1);
    at::Tensor dx, sums;
    if (wants_x)
      dx = at::empty_like(x);
    // Each thread has a sum of its own. They are added in the threads' order.
    if (wants_w)
      sums = at::zeros({threads(), size}, x.options().dtype(at::kFloat));
    RECORD_USER_SCOPE_WITH_INPUTS("gpipe::rms_norm", moved(x, dy, dx));
    by_dtype(x.scalar_type(), [&](auto kind) {
      using T = decltype(kind);
      const T *given = dy.const_data_ptr<T>(), *from = x.const_data_ptr<T>();
      const T *weight = w.const_data_ptr<T>();
      const float *roots = r.const_data_ptr<float>();
      T *to = wants_x ? dx.mutable_data_ptr<T>() : nullptr;
      float *all = wants_w ? sums.mutable_data_ptr<float>() : nullptr;
      at::parallel_for(0, rows, grain_of_rows(size), [&](int64_t begin, int64_t end) {
        float *own = all ? all + at::get_thread_num() * size : nullptr;
        fused_kernels<T>().rms_norm_backward(given + begin * size, from + begin * size, weight,
                                       roots + begin, to ? to + begin * size : nullptr, own,
                                       end - begin, size);
      });
    });
    at::Tensor dw;
    if (wants_w)
      dw = sums.sum(0).to(w.scalar_type()).reshape(w.sizes());
    return {dx, dw, at::Tensor()};
  }
};

struct SwiGlu : torch::autograd::Function<SwiGlu> {
  static at::Tensor forward(AutogradContext *context, const at::Tensor &gate,
                            const at::Tensor &up) {
    at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor a = gate.contiguous(), b = up.contiguous();
    at::Tensor y = at::empty_like(a);
    RECORD_USER_SCOPE_WITH_INPUTS("gpipe::swiglu", moved(a, b, y));
    by_dtype(a.scalar_type(), [&](auto kind) {
      using T = decltype(kind);
      const T *first = a.const_data_ptr<T>(), *second = b.const_data_ptr<T>();
      T *to = y.mutable_data_ptr<T>();
      at::parallel_for(0, a.numel(), kGrain, [&](int64_t begin, int64_t end) {
        fused_kernels<T>().swiglu(first + begin, second + begin, to + begin, end - begin);
      });
    });
    context->save_for_backward({a, b});
    return y;
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    differentiable_once();
    at::NoGradGuard no_grad;
    const auto saved = context->get_saved_variables();
    const at::Tensor &a = saved[0], &b = saved[1];
    const at::Tensor dy = readable(grads[0]).contiguous();
    at::Tensor da, db;
    if (context->needs_input_grad(0))
      da = at::empty_like(a);
    if (context->needs_input_grad(1))
      db = at::empty_like(b);
    RECORD_USER_SCOPE_WITH_INPUTS("gpipe::swiglu", moved(dy, a, b, da, db));
    by_dtype(a.scalar_type(), [&](auto kind) {
      using T = decltype(kind);
      const T *given = dy.const_data_ptr<T>();
      const T *first = a.const_data_ptr<T>(), *second = b.const_data_ptr<T>();
      T *to_a = da.defined() ? da.mutable_data_ptr<T>() : nullptr;
      T *to_b = db.defined() ? db.mutable_data_ptr<T>() : nullptr;
      at::parallel_for(0, a.numel(), kGrain, [&](int64_t begin, int64_t end) {
        fused_kernels<T>().swiglu_backward(given + begin, first + begin, second + begin,
                                     to_a ? to_a + begin : nullptr, to_b ? to_b + begin : nullptr,
                                     end - begin);
      });
    });
    return {da, db};
  }
};

// Turns the rows of x [samples, heads, positions, size]. Tables are [positions, size / 2], or
// [samples, 1, positions, size / 2].
at::Tensor turned(const at::Tensor &x, const at::Tensor &cos, const at::Tensor &sin,
                  at::Tensor y, bool back) {
  const int64_t samples = x.size(0), heads = x.size(1), length = x.size(2), size = x.size(3);
  RECORD_USER_SCOPE_WITH_INPUTS("gpipe::rotary", moved(x, y));
  const int64_t half = size / 2, own_table = cos.dim() == 4 ? length * half : 0;
  const auto from = x.strides(), to = y.strides();
  by_dtype(x.scalar_type(), [&](auto kind) {
    using T = decltype(kind);
    const T *input = x.const_data_ptr<T>(), *c = cos.const_data_ptr<T>();
    const T *s = sin.const_data_ptr<T>();
    T *output = y.mutable_data_ptr<T>();
    const auto one = [&](int64_t sample, int64_t head) {
      const int64_t table = sample * own_table;
      fused_kernels<T>().turn(input + sample * from[0] + head * from[1], from[2], c + table,
                              s + table, output + sample * to[0] + head * to[1], to[2], length,
                              half, back);
    };
    at::parallel_for(0, samples * heads, grain_of_rows(length * size),
                     [&](int64_t begin, int64_t end) {
                       for (int64_t number = begin; number < end; number++)
                         one(number / heads, number % heads);
                     });
  });
  return y;
}

struct Turn : torch::autograd::Function<Turn> {
  static at::Tensor forward(AutogradContext *context, const at::Tensor &given,
                            const at::Tensor &cos, const at::Tensor &sin) {
    at::AutoDispatchBelowADInplaceOrView below;
    const at::Tensor x = given.stride(3) == 1 ? given : given.contiguous();
    const at::Tensor c = cos.contiguous(), s = sin.contiguous();
    context->save_for_backward({c, s});
    return turned(x, c, s, at::empty(x.sizes(), x.options()), /*back=*/false);
  }

  static variable_list backward(AutogradContext *context, variable_list grads) {
    differentiable_once();
    at::NoGradGuard no_grad;
    const auto saved = context->get_saved_variables();
    const at::Tensor grad = readable(grads[0]);
    const at::Tensor dy = grad.stride(3) == 1 ? grad : grad.contiguous();
    // Heads of a position lie side by side in what the projection gave, and so do their gradients.
    const auto sizes = dy.sizes();
    at::Tensor dx = at::empty({sizes[0], sizes[2], sizes[1], sizes[3]}, dy.options());
    dx = dx.transpose(1, 2);
    return {turned(dy, saved[0], saved[1], dx, /*back=*/true), at::Tensor(), at::Tensor()};
  }
};

} // namespace

bool can_fuse(Address x) { return kernels_take(borrow(x)); }

Address fused_rms_norm(Address x_address, Address w_address, double eps) {
  const at::Tensor &x = borrow(x_address), &w = borrow(w_address);
  TORCH_CHECK(kernels_take(x) && w.dim() == 1 && w.is_contiguous() && kernels_take(w) &&
                  w.scalar_type() == x.scalar_type() && x.dim() >= 1 && w.numel() > 0 &&
                  x.size(-1) == w.size(0),
              "a norm of ", x.scalar_type(), " ", x.sizes(), " with a weight ", w.scalar_type(),
              " ", w.sizes(), ": the last axis and the dtype must be the same, on a CPU");
  return give(RmsNorm::apply(x, w, eps));
}

Address fused_swiglu(Address gate_address, Address up_address) {
  const at::Tensor &gate = borrow(gate_address), &up = borrow(up_address);
  TORCH_CHECK(kernels_take(gate) && kernels_take(up) && gate.sizes() == up.sizes() &&
                  gate.scalar_type() == up.scalar_type(),
              "swiglu of ", gate.scalar_type(), " ", gate.sizes(), " and ", up.scalar_type(), " ",
              up.sizes(), ": shape and dtype must be the same, on a CPU");
  return give(SwiGlu::apply(gate, up));
}

Address fused_turn(Address x_address, Address cos_address, Address sin_address) {
  const at::Tensor &x = borrow(x_address), &cos = borrow(cos_address), &sin = borrow(sin_address);
  const auto fits = [&](const at::Tensor &table) {
    if (!kernels_take(table) || table.scalar_type() != x.scalar_type() || table.numel() == 0)
      return x.numel() == 0;
    const auto sizes = table.sizes();
    const bool own = sizes.size() == 4 && sizes[0] == x.size(0) && sizes[1] == 1;
    return (own || sizes.size() == 2) && sizes[sizes.size() - 2] == x.size(2) &&
           2 * sizes.back() == x.size(3);
  };
  TORCH_CHECK(kernels_take(x) && x.dim() == 4 && fits(cos) && fits(sin) &&
                  cos.sizes() == sin.sizes(),
              "rotary positions of ", x.scalar_type(), " ", x.sizes(), " with tables ",
              cos.scalar_type(), " ", cos.sizes(), " and ", sin.sizes(),
              ": tables are [positions, size / 2], or [samples, 1, positions, size / 2]");
  return give(Turn::apply(x, cos, sin));
}

} // namespace gpipe
