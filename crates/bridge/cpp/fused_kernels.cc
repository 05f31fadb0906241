// Compiled once for each width of vector registers (build.rs).
#include "fused_kernels.h"
#include "kernel_vectors.h"
#include <algorithm>
#include <cmath>

namespace gpipe {

namespace {

template <typename T>
void rms_norm(const T *x, const T *w, T *y, float *r, int64_t rows, int64_t size, double eps) {
  for (int64_t row = 0; row < rows; row++, x += size, y += size) {
    Two squares = all(0);
    blocks(size, [&](int64_t at, int64_t count) {
      const Two one = get(x + at, count);
      squares = squares + one * one;
    });
    const float mean = sum(squares) / static_cast<float>(size);
    r[row] = 1.0f / sqrtf(mean + static_cast<float>(eps));
    const Two root = all(r[row]);
    blocks(size, [&](int64_t at, int64_t count) {
      put(y + at, rounded<T>(get(x + at, count) * root) * get(w + at, count), count);
    });
  }
}

// With n = x r and g = dy w: dx = r (g - n mean(g n)), and dw = dy n.
template <typename T>
void rms_norm_backward(const T *dy, const T *x, const T *w, const float *r, T *dx, float *dw,
                       int64_t rows, int64_t size) {
  for (int64_t row = 0; row < rows; row++, x += size, dy += size) {
    const Two root = all(r[row]);
    Two products = all(0);
    blocks(size, [&](int64_t at, int64_t count) {
      const Two normed = get(x + at, count) * root, given = get(dy + at, count);
      if (dw)
        put(dw + at, get(dw + at, count) + given * rounded<T>(normed), count);
      products = products + given * get(w + at, count) * normed;
    });
    if (!dx)
      continue;
    const Two mean = all(sum(products) / static_cast<float>(size));
    blocks(size, [&](int64_t at, int64_t count) {
      const Two normed = get(x + at, count) * root;
      const Two given = get(dy + at, count) * get(w + at, count);
      put(dx + at, (given - normed * mean) * root, count);
    });
    dx += size;
  }
}

inline Two sigmoid(Two x) { return all(1) / (all(1) + exp(negative(x))); }

template <typename T> void swiglu(const T *a, const T *b, T *y, int64_t size) {
  blocks(size, [&](int64_t at, int64_t count) {
    const Two own = get(a + at, count);
    const Two active = own / (all(1) + exp(negative(own)));
    put(y + at, rounded<T>(active) * get(b + at, count), count);
  });
}

// With s = sigmoid(a): da = dy b s (1 + a (1 - s)), and db = dy a s.
template <typename T>
void swiglu_backward(const T *dy, const T *a, const T *b, T *da, T *db, int64_t size) {
  blocks(size, [&](int64_t at, int64_t count) {
    const Two given = get(dy + at, count), own = get(a + at, count), s = sigmoid(own);
    if (db)
      put(db + at, given * rounded<T>(own * s), count);
    if (da) {
      const Two slope = s * (all(1) + own * (all(1) - s));
      put(da + at, rounded<T>(given * get(b + at, count)) * slope, count);
    }
  });
}

template <typename T>
void turn(const T *x, int64_t x_stride, const T *c, const T *s, T *y, int64_t y_stride,
          int64_t rows, int64_t half, bool back) {
  const auto kept = [](Vec value) { return rounded<T>({value, value}).a; };
  for (int64_t row = 0; row < rows; row++, x += x_stride, y += y_stride, c += half, s += half)
    for (int64_t at = 0; at < half; at += Vec::size()) {
      const int64_t count = at + Vec::size() <= half ? Vec::size() : half - at;
      const Vec a = get_one(x + at, count), b = get_one(x + half + at, count);
      const Vec cos = get_one(c + at, count), given = get_one(s + at, count);
      const Vec sin = back ? given.neg() : given;
      put_one(y + at, kept(a * cos) - kept(b * sin), count);
      put_one(y + half + at, kept(b * cos) + kept(a * sin), count);
    }
}

template <typename T>
float cross_entropy(const T *x, int64_t classes, int64_t target, float smoothing, float *exps,
                    T *gradient) {
  // Each logit's distance from the largest, so that no exponential overflows.
  float largest = static_cast<float>(x[0]);
  int64_t at = 0;
  if (classes >= kBlock) {
    Two most = load(x);
    for (at = kBlock; at + kBlock <= classes; at += kBlock) {
      const Two own = load(x + at);
      most = {at::vec::maximum(most.a, own.a), at::vec::maximum(most.b, own.b)};
    }
    largest = at::vec::vec_reduce_all<float>(
        [](Vec &x, Vec &y) { return at::vec::maximum(x, y); }, at::vec::maximum(most.a, most.b));
  }
  for (; at < classes; at++) {
    const float own = static_cast<float>(x[at]);
    largest = own > largest || own != own ? own : largest;
  }
  const Two from = all(largest);
  Two sums = all(0), apart = all(0); // of exponentials, and of distances
  float rest = 0.0f, apart_rest = 0.0f;
  blocks(classes, [&](int64_t at, int64_t count) {
    const Two distance = get(x + at, count) - from, own = exp(distance);
    put(exps + at, own, count);
    if (count == kBlock) {
      sums = sums + own;
      apart = apart + distance;
      return;
    }
    for (int64_t i = 0; i < count; i++) {
      rest += exps[at + i];
      apart_rest += static_cast<float>(x[at + i]) - largest;
    }
  });
  const float total = sum(sums) + rest;
  if (gradient) {
    const float each = smoothing / static_cast<float>(classes);
    const Two share = all(1.0f / total), less = all(each);
    blocks(classes, [&](int64_t at, int64_t count) {
      put(gradient + at, get(exps + at, count) * share - less, count);
    });
    gradient[target] = static_cast<T>(exps[target] / total - (1.0f - smoothing) - each);
  }
  const float log_total = logf(total);
  // The largest is subtracted first: beside it, small numbers would be rounded away.
  const float of_target = log_total - (static_cast<float>(x[target]) - largest);
  if (smoothing == 0.0f)
    return of_target;
  const float mean = log_total - (sum(apart) + apart_rest) / static_cast<float>(classes);
  return (1.0f - smoothing) * of_target + smoothing * mean;
}

template <typename T> void add(const T *x, float *sum, int64_t size) {
  blocks(size, [&](int64_t at, int64_t count) {
    put(sum + at, get(sum + at, count) + get(x + at, count), count);
  });
}

// Rows whose sum is added to that of the rows before: so rounding errors grow with the number of
// blocks and with their length, not with their product.
constexpr int64_t kSummed = 128;

// The sums of up to kSummed rows, added to what is there. Parts of rows are read as they lie in
// memory, so that the processor foresees what is next.
template <typename T>
inline void add_rows(const T *x, int64_t stride, int64_t rows, int64_t columns, float *sums) {
  constexpr int64_t kPart = 512;
  float own[kPart];
  for (int64_t first = 0; first < columns; first += kPart) {
    const int64_t part = columns - first < kPart ? columns - first : kPart;
    for (int64_t i = 0; i < part; i++)
      own[i] = 0.0f;
    for (int64_t row = 0; row < rows; row++)
      add(x + row * stride + first, own, part);
    add(own, sums + first, part);
  }
}

template <typename T>
void column_sums(const T *x, int64_t stride, int64_t rows, int64_t columns, float *sums) {
  for (int64_t column = 0; column < columns; column++)
    sums[column] = 0.0f;
  for (int64_t row = 0; row < rows; row += kSummed)
    add_rows(x + row * stride, stride, rows - row < kSummed ? rows - row : kSummed, columns, sums);
}

// Transposes `count` rows, 16 at a time. Rows are far apart in both matrices, so the processor does
// not foresee which are next: those are asked for early.
inline void transposed_block(const float *x, int64_t stride, int64_t count, int64_t wide, float *to,
                             int64_t rows) {
  constexpr int64_t kRows = 16, kLine = 16;
  for (int64_t row = 0; row < count; row += kRows) {
    const int64_t next = row + kRows, last = std::min(next + kRows, count);
    for (int64_t at = next; at < last; at++)
      for (int64_t i = 0; i < wide; i += kLine)
        __builtin_prefetch(x + at * stride + i, /*rw=*/0, /*locality=*/2);
    for (int64_t i = 0; i < wide && next < count; i++)
      __builtin_prefetch(to + i * rows + next, /*rw=*/1, /*locality=*/2);
    transpose(x + row * stride, stride, std::min(kRows, count - row), wide, to + row, rows);
  }
}

// Blocks of kSummed rows and 64 columns: small enough for the cache, and each page of memory is
// visited for more than one cache line.
void transposed(const float *x, int64_t stride, int64_t rows, int64_t columns, float *to,
                float *sums) {
  constexpr int64_t kColumns = 64;
  for (int64_t column = 0; column < columns; column += kColumns) {
    const int64_t wide = columns - column < kColumns ? columns - column : kColumns;
    if (sums)
      for (int64_t i = 0; i < wide; i++)
        sums[column + i] = 0.0f;
    for (int64_t row = 0; row < rows; row += kSummed) {
      const int64_t count = rows - row < kSummed ? rows - row : kSummed;
      const float *from = x + row * stride + column;
      transposed_block(from, stride, count, wide, to + column * rows + row, rows);
      if (sums)
        add_rows(from, stride, count, wide, sums + column);
    }
  }
}

template <typename T> constexpr FusedKernels<T> kernels() {
  return {rms_norm<T>, rms_norm_backward<T>, swiglu<T>, swiglu_backward<T>, turn<T>,
          cross_entropy<T>, add<T>, column_sums<T>, transposed};
}

} // namespace

extern const FusedKernels<float> GPIPE_FLOAT;
extern const FusedKernels<c10::BFloat16> GPIPE_BFLOAT16;
const FusedKernels<float> GPIPE_FLOAT = kernels<float>();
const FusedKernels<c10::BFloat16> GPIPE_BFLOAT16 = kernels<c10::BFloat16>();

} // namespace gpipe
