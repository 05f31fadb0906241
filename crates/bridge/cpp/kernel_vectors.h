// Vector registers of float32, and how both dtypes are read into them. For files that build.rs
// compiled once for each width of registers.
//
// All is local to the file that includes this, and no templates of the standard library are used:
// the linker keeps one copy of a function that several files have, and an old processor must not
// get one with new instructions.
#pragma once
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>
#include <c10/util/BFloat16.h>
#include <cstdint>

namespace gpipe {

namespace {

using Vec = at::vec::Vectorized<float>;

// As many elements as the loops work on at once: two registers of float32.
constexpr int64_t kBlock = 2 * Vec::size();

struct Two {
  Vec a, b;
};

inline Two operator+(Two x, Two y) { return {x.a + y.a, x.b + y.b}; }
inline Two operator-(Two x, Two y) { return {x.a - y.a, x.b - y.b}; }
inline Two operator*(Two x, Two y) { return {x.a * y.a, x.b * y.b}; }
inline Two operator/(Two x, Two y) { return {x.a / y.a, x.b / y.b}; }
inline Two all(float value) { return {Vec(value), Vec(value)}; }
inline Two exp(Two x) { return {x.a.exp(), x.b.exp()}; }
inline Two negative(Two x) { return {x.a.neg(), x.b.neg()}; }
inline float sum(Two x) {
  return at::vec::vec_reduce_all<float>([](Vec &x, Vec &y) { return x + y; }, x.a + x.b);
}

inline Two load(const float *from) { return {Vec::loadu(from), Vec::loadu(from + Vec::size())}; }
inline void store(float *to, Two x) {
  x.a.store(to);
  x.b.store(to + Vec::size());
}
inline Two load(const c10::BFloat16 *from) {
  const auto both =
      at::vec::convert_bfloat16_float(at::vec::Vectorized<c10::BFloat16>::loadu(from));
  return {std::get<0>(both), std::get<1>(both)};
}
inline void store(c10::BFloat16 *to, Two x) {
  at::vec::convert_float_bfloat16(x.a, x.b).store(to);
}

// The first `count` elements; the others are 0.
template <typename T> inline Two load(const T *from, int64_t count) {
  T block[kBlock];
  for (int64_t i = 0; i < kBlock; i++)
    block[i] = i < count ? from[i] : T(0);
  return load(block);
}
template <typename T> inline void store(T *to, Two x, int64_t count) {
  T block[kBlock];
  store(block, x);
  for (int64_t i = 0; i < count; i++)
    to[i] = block[i];
}

// What a tensor in dtype T would have kept of a value between two operations.
template <typename T> inline Two rounded(Two x) {
  if constexpr (sizeof(T) == sizeof(float))
    return x;
  T block[kBlock];
  store(block, x);
  return load(block);
}

// Calls `work(position, count)` for each block; count is below kBlock in the last one only.
template <typename Work> inline void blocks(int64_t size, Work &&work) {
  int64_t at = 0;
  for (; at + kBlock <= size; at += kBlock)
    work(at, kBlock);
  if (at < size)
    work(at, size - at);
}

template <typename T> inline Two get(const T *from, int64_t count) {
  return count == kBlock ? load(from) : load(from, count);
}
template <typename T> inline void put(T *to, Two x, int64_t count) {
  if (count == kBlock)
    store(to, x);
  else
    store(to, x, count);
}

// A single register. `count` is at most Vec::size().
inline Vec get_one(const float *from, int64_t count) { return Vec::loadu(from, count); }
inline void put_one(float *to, Vec x, int64_t count) { x.store(to, static_cast<int>(count)); }
inline Vec get_one(const c10::BFloat16 *from, int64_t count) {
  if (count == Vec::size()) {
    Vec whole;
    at::vec::load_fp32_from_bf16(from, whole);
    return whole;
  }
  const auto own = at::vec::Vectorized<c10::BFloat16>::loadu(from, count);
  return std::get<0>(at::vec::convert_bfloat16_float(own));
}
inline void put_one(c10::BFloat16 *to, Vec x, int64_t count) {
  const auto both = at::vec::convert_float_bfloat16(x, x);
  if (count < Vec::size()) {
    both.store(to, static_cast<int>(count));
    return;
  }
  // A size that the compiler knows takes an instruction.
  c10::BFloat16 kept[kBlock];
  both.store(kept);
  __builtin_memcpy(to, kept, Vec::size() * sizeof(c10::BFloat16));
}

// to [columns, rows] = from [rows, columns], each with its own distance from row to row. Tiles of
// 16 x 16 are read and written in whole cache lines.
inline void transpose_tile(const float *from, int64_t from_row, int64_t rows, int64_t columns,
                           float *to, int64_t to_row) {
  alignas(64) float tile[16][16];
#if defined(__x86_64__)
  if (rows == 16 && columns == 16) {
    for (int i = 0; i < 16; i += 4)
      for (int j = 0; j < 16; j += 4) {
        __m128 a = _mm_loadu_ps(from + i * from_row + j);
        __m128 b = _mm_loadu_ps(from + (i + 1) * from_row + j);
        __m128 c = _mm_loadu_ps(from + (i + 2) * from_row + j);
        __m128 d = _mm_loadu_ps(from + (i + 3) * from_row + j);
        _MM_TRANSPOSE4_PS(a, b, c, d);
        _mm_store_ps(&tile[j][i], a);
        _mm_store_ps(&tile[j + 1][i], b);
        _mm_store_ps(&tile[j + 2][i], c);
        _mm_store_ps(&tile[j + 3][i], d);
      }
    for (int j = 0; j < 16; j++)
      for (int i = 0; i < 16; i += Vec::size())
        Vec::loadu(&tile[j][i]).store(to + j * to_row + i);
    return;
  }
#endif
  for (int64_t i = 0; i < rows; i++)
    for (int64_t j = 0; j < columns; j++)
      tile[j][i] = from[i * from_row + j];
  for (int64_t j = 0; j < columns; j++)
    for (int64_t i = 0; i < rows; i++)
      to[j * to_row + i] = tile[j][i];
}

inline void transpose(const float *from, int64_t from_row, int64_t rows, int64_t columns,
                      float *to, int64_t to_row) {
  for (int64_t j = 0; j < columns; j += 16)
    for (int64_t i = 0; i < rows; i += 16)
      transpose_tile(from + i * from_row + j, from_row, rows - i < 16 ? rows - i : 16,
                     columns - j < 16 ? columns - j : 16, to + j * to_row + i, to_row);
}

} // namespace

} // namespace gpipe
