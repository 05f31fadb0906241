// Matrix products of float32 whose operands fit the cache. For files that build.rs compiled once
// for each width of vector registers.
//
// Nothing is copied into another layout, as the products of libraries do: for few rows, that costs
// more than the product. Each element is a sum over `inner` from the first to the last, whatever
// its place in the result.
#pragma once
#include "kernel_vectors.h"

namespace gpipe {

namespace {

constexpr int64_t kWidth = Vec::size();
// Rows of the product's inner loop, with two registers each. AVX-512 has 32 registers, AVX2 has 16.
constexpr int kTall = kWidth == 16 ? 12 : 4;

int64_t rounded_up(int64_t count, int64_t step) { return (count + step - 1) / step * step; }

// C [M, N] = or += A [M, K] B [K, N]. A's elements are `a_row` apart from row to row, and
// `a_column` from column to column.
template <int M, int N>
inline void tile(int64_t inner, const float *a, int64_t a_row, int64_t a_column, const float *b,
                 int64_t b_row, float *c, int64_t c_row, bool adds) {
  Vec sums[M][N];
#pragma GCC unroll 16
  for (int i = 0; i < M; i++)
#pragma GCC unroll 2
    for (int j = 0; j < N; j++)
      sums[i][j] = adds ? Vec::loadu(c + i * c_row + j * kWidth) : Vec(0.0f);
  for (int64_t k = 0; k < inner; k++) {
    Vec row[N];
#pragma GCC unroll 2
    for (int j = 0; j < N; j++)
      row[j] = Vec::loadu(b + k * b_row + j * kWidth);
#pragma GCC unroll 16
    for (int i = 0; i < M; i++) {
      const Vec own(a[i * a_row + k * a_column]);
#pragma GCC unroll 2
      for (int j = 0; j < N; j++)
        sums[i][j] = at::vec::fmadd(own, row[j], sums[i][j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; i++)
#pragma GCC unroll 2
    for (int j = 0; j < N; j++)
      sums[i][j].store(c + i * c_row + j * kWidth);
}

template <int N>
void tiles(int64_t rows, int64_t inner, const float *a, int64_t a_row, int64_t a_column,
           const float *b, int64_t b_row, float *c, int64_t c_row, bool adds) {
  int64_t i = 0;
  for (; i + kTall <= rows; i += kTall)
    tile<kTall, N>(inner, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row, adds);
  if constexpr (kTall > 4)
    for (; i + 4 <= rows; i += 4)
      tile<4, N>(inner, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row, adds);
  for (; i < rows; i++)
    tile<1, N>(inner, a + i * a_row, a_row, a_column, b, b_row, c + i * c_row, c_row, adds);
}

// C = or += A B. `columns` is a multiple of a register's width.
void product(int64_t rows, int64_t columns, int64_t inner, const float *a, int64_t a_row,
             int64_t a_column, const float *b, int64_t b_row, float *c, int64_t c_row, bool adds) {
  int64_t j = 0;
  for (; j + 2 * kWidth <= columns; j += 2 * kWidth)
    tiles<2>(rows, inner, a, a_row, a_column, b + j, b_row, c + j, c_row, adds);
  if (j < columns)
    tiles<1>(rows, inner, a, a_row, a_column, b + j, b_row, c + j, c_row, adds);
}

} // namespace

} // namespace gpipe
